// Another device for torch, "other": its tensors lie in the CPU's memory and the CPU's kernels compute them, but they do
// not mix with tensors of the CPU. So a program that forgets to move a tensor fails on it as it would on a GPU, and one
// that does not gives what it gives on the CPU. `torch.ops.other.reads()` counts the values that were read from it.
#include <ATen/EmptyTensor.h>
#include <ATen/Functions.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <cstdlib>
#include <cstring>

namespace {

using at::Tensor;
using Ints = c10::IntArrayRef;
constexpr auto OTHER = c10::DeviceType::PrivateUse1;
std::atomic<int64_t> reads{0};

c10::Device device() { return {OTHER, 0}; }

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void* data = size ? std::aligned_alloc(64, (size + 63) / 64 * 64) : nullptr;
    return {data, data, &std::free, device()};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &std::free; }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }
};
Memory memory;
REGISTER_ALLOCATOR(OTHER, &memory);

struct Guard final : c10::impl::NoOpDeviceGuardImpl<OTHER> {
  static c10::Stream stream() { return c10::Stream(c10::Stream::DEFAULT, device()); }
  c10::Device exchangeDevice(c10::Device) const override { return device(); }
  c10::Device getDevice() const override { return device(); }
  c10::Stream getStream(c10::Device) const noexcept override { return stream(); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream(); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return stream(); }
  void record(void**, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  at::Device getDeviceFromPtr(void*) const override { return device(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    auto data = memory.allocate(size);
    if (const size_t kept = std::min(size, storage.nbytes())) std::memcpy(data.get(), storage.data(), kept);
    auto* impl = storage.unsafeGetStorageImpl();
    impl->set_data_ptr_noswap(std::move(data));
    impl->set_nbytes(size);
  }
};
Hooks hooks;
const bool hooked = (at::RegisterPrivateUse1HooksInterface(&hooks), true);

// The same memory as a tensor of the CPU.
Tensor as_cpu(const Tensor& tensor) {
  void* data = const_cast<void*>(tensor.const_data_ptr());
  const auto options = at::TensorOptions().dtype(tensor.dtype());
  return at::from_blob(data, tensor.sizes(), tensor.strides(), [tensor](void*) {}, options);
}

// A copy on the device, with the same strides.
Tensor there(const Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  Tensor copy = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(device()));
  if (tensor.numel()) as_cpu(copy).copy_(tensor);
  return copy;
}

void check(bool right, const std::string& name) {
  TORCH_CHECK(right, "expected all tensors to be on the same device, but found other:0 and cpu in ", name);
}

// The arguments of one call, each with its twin on the CPU.
struct Call {
  struct Twin {
    Tensor own, cpu;
    bool may_grow;
  };
  std::vector<Twin> twins;
  bool has_cpu = false;

  Tensor argument(const Tensor& tensor, bool is_written) {
    if (!tensor.defined()) return tensor;
    if (tensor.device().type() != OTHER) {
      has_cpu |= tensor.dim() > 0;  // a number may come from anywhere
      return tensor;
    }
    for (const auto& twin : twins)
      if (twin.own.is_same(tensor)) return twin.cpu;
    const bool may_grow = is_written && tensor.numel() == 0;  // an output of out=, which the operator gives its size
    const auto options = at::TensorOptions().dtype(tensor.dtype());
    twins.push_back({tensor, may_grow ? at::empty(tensor.sizes(), options) : as_cpu(tensor), may_grow});
    return twins.back().cpu;
  }

  void grow() {
    for (const auto& twin : twins) {
      if (!twin.may_grow) continue;
      twin.own.resize_(twin.cpu.sizes());
      if (twin.cpu.numel()) as_cpu(twin.own).copy_(twin.cpu);
    }
  }

  Tensor result(const Tensor& tensor, const std::string& name) const {
    if (!tensor.defined()) return tensor;
    for (const auto& twin : twins) {
      if (twin.cpu.is_same(tensor)) return twin.own;
      const bool is_view = tensor.numel() && tensor.storage().data() == twin.cpu.storage().data();
      TORCH_CHECK(!is_view, "other_device.cpp has no view ", name);
    }
    return there(tensor);
  }
};

// Any operator that has no kernel below: that of the CPU.
void by_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto& name = schema.name();
  const size_t count = schema.arguments().size(), first = stack->size() - count;
  Call call;
  for (size_t i = 0; i < count; i++) {
    auto& value = (*stack)[first + i];
    const auto* alias = schema.arguments()[i].alias_info();
    const bool is_written = alias && alias->isWrite();
    if (value.isTensor()) {
      value = call.argument(value.toTensor(), is_written);
    } else if (value.isTensorList()) {
      std::vector<Tensor> list;
      for (const Tensor& tensor : value.toTensorVector()) list.push_back(call.argument(tensor, is_written));
      value = list;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector())
        list.push_back(tensor ? std::optional<Tensor>(call.argument(*tensor, false)) : std::nullopt);
      value = list;
    } else if (value.isDevice() && value.toDevice().type() == OTHER) {
      value = c10::Device(c10::kCPU);
    }
  }
  const bool takes_indices = name.find("index") != std::string::npos;  // torch takes them from the CPU, too
  check(call.twins.empty() || !call.has_cpu || takes_indices, name);
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  call.grow();
  const size_t results = schema.returns().size();
  for (size_t i = stack->size() - results; i < stack->size(); i++) {
    auto& value = (*stack)[i];
    if (value.isTensor()) {
      value = call.result(value.toTensor(), name);
    } else if (value.isTensorList()) {
      std::vector<Tensor> list;
      for (const Tensor& tensor : value.toTensorVector()) list.push_back(call.result(tensor, name));
      value = list;
    }
  }
}

using Type = std::optional<c10::ScalarType>;
using Layout = std::optional<c10::Layout>;
using Place = std::optional<c10::Device>;
const c10::DispatchKeySet KEY(c10::DispatchKey::PrivateUse1);

Tensor empty(Ints size, Type type, Layout, Place, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  return at::detail::empty_generic(size, &memory, KEY, c10::dtype_or_default(type), format);
}

Tensor empty_strided(Ints size, Ints stride, Type type, Layout, Place, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &memory, KEY, c10::dtype_or_default(type));
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool) {
  const bool from_here = from.device().type() == OTHER, to_here = to.device().type() == OTHER;
  reads += from_here && !to_here;
  (to_here ? as_cpu(to) : to).copy_(from_here ? as_cpu(from) : from);
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar item(const Tensor& tensor) {
  reads++;
  return as_cpu(tensor).item();
}

const Tensor& resize(const Tensor& tensor, Ints size, std::optional<c10::MemoryFormat>) {
  const auto offset = tensor.storage_offset();
  const size_t bytes = at::detail::computeStorageNbytesContiguous(size, tensor.dtype().itemsize(), offset);
  if (bytes > tensor.storage().nbytes()) hooks.resizePrivateUse1Bytes(tensor.storage(), bytes);
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return tensor;
}

Tensor& set_storage(Tensor& tensor, c10::Storage storage, int64_t offset, Ints size, Ints stride) {
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(offset);
  impl->set_sizes_and_strides(size, stride);
  return tensor;
}

Tensor& set_tensor(Tensor& tensor, const Tensor& other) {
  return set_storage(tensor, other.storage(), other.storage_offset(), other.sizes(), other.strides());
}

Tensor operand(const Tensor& tensor) {
  check(tensor.device().type() == OTHER, "convolution");
  return as_cpu(tensor);
}

Tensor convolution(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias, Ints stride,
                   Ints padding, Ints dilation, bool transposed, Ints output_padding, int64_t groups) {
  std::optional<Tensor> own;
  if (bias && bias->defined()) own = operand(*bias);
  return there(at::convolution(operand(input), operand(weight), own, stride, padding, dilation, transposed,
                               output_padding, groups));
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(const Tensor& grad, const Tensor& input, const Tensor& weight,
                                                        Ints stride, Ints padding, Ints dilation, bool transposed,
                                                        Ints output_padding, int64_t groups,
                                                        std::array<bool, 3> mask) {
  const std::vector<int64_t> size{transposed ? weight.size(1) * groups : weight.size(0)};
  auto [one, two, three] = at::convolution_backward(operand(grad), operand(input), operand(weight), size, stride,
                                                    padding, dilation, transposed, output_padding, groups, mask);
  return {there(one), there(two), there(three)};
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&by_cpu>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &item);
  m.impl("resize_", &resize);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("alias", &at::native::alias);
  m.impl("convolution_overrideable", &convolution);
  m.impl("convolution_backward_overrideable", &convolution_backward);
}

TORCH_LIBRARY(other, m) {
  m.def("reads() -> int", [] { return reads.exchange(0); });
}

}  // namespace
