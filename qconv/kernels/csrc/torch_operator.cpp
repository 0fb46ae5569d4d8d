/* `qconv::run_program`, torch's operator over the runtime of programs, for processes without qconv's Python package:
 * C++ that loads this library runs the `torch.export` files and AOTInductor packages of frozen networks.
 *
 *   cc -O3 -ffp-contract=off -fPIC -fvisibility=hidden -c plan*.c instruction_sets.c
 *   c++ -std=c++20 -O2 -fPIC -shared -o libqconv_torch.so torch_operator.cpp *.o -I$TORCH/include -L$TORCH/lib \
 *       -ltorch_cpu -lc10
 */
extern "C" {
#include "plan.h"
}

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstring>
#include <list>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <vector>

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using PlanOwner = std::unique_ptr<Plan, void (*)(Plan *)>;

constexpr size_t PLANS = 8; /* that are kept */

/* A plan, and what it was made of. */
struct Opened {
    std::vector<char> bytes;
    int64_t height, width;
    PlanOwner plan;
};

std::shared_ptr<Opened> open(const char *bytes, size_t count, int64_t height, int64_t width) {
    char error[PLAN_MESSAGE];
    const int64_t size[1][2] = {{height, width}};
    PlanOwner plan(plan_open(bytes, count, size, 1, PLAN_BEST, error), plan_close);
    STD_TORCH_CHECK(plan != nullptr, "qconv::run_program: ", error[0] ? error : "no memory for the plan");
    return std::make_shared<Opened>(Opened{{bytes, bytes + count}, height, width, std::move(plan)});
}

/* The plan of a program for images of this size. Bytes are compared, since a package may write others to their
 * place. */
std::shared_ptr<Opened> find(const char *bytes, size_t count, int64_t height, int64_t width) {
    static std::mutex mutex;
    static std::list<std::shared_ptr<Opened>> recent;
    const std::lock_guard<std::mutex> lock(mutex);
    for (auto at = recent.begin(); at != recent.end(); ++at) {
        const Opened &opened = **at;
        if (opened.height == height && opened.width == width && opened.bytes.size() == count &&
            std::memcmp(opened.bytes.data(), bytes, count) == 0) {
            recent.splice(recent.begin(), recent, at);
            return recent.front();
        }
    }
    recent.push_front(open(bytes, count, height, width));
    if (recent.size() > PLANS) recent.pop_back(); /* calls that run it still hold it */
    return recent.front();
}

/* The length of an output by its numbers: (length * times + plus) / over, of each; 0 where that is no length. */
int64_t length_of(int64_t length, const int64_t *numbers, size_t count) {
    for (; count > 0; numbers += 3, count--)
        length = numbers[1] > 0 ? (length * numbers[2] + numbers[0]) / numbers[1] : 0;
    return length;
}

Tensor run_program(Tensor program, Tensor images, std::vector<int64_t> shape) {
    STD_TORCH_CHECK(program.scalar_type() == ScalarType::Byte && program.dim() == 1 && program.is_contiguous(),
                    "qconv::run_program: program must be bytes, of one dimension");
    STD_TORCH_CHECK(images.scalar_type() == ScalarType::Float && images.dim() == 4,
                    "qconv::run_program: images must be float32 (N, C, H, W)");
    const auto *bytes = static_cast<const char *>(program.const_data_ptr());
    const auto opened = find(bytes, static_cast<size_t>(program.numel()), images.size(2), images.size(3));
    Plan *plan = opened->plan.get();
    int64_t sizes[PLAN_FIRST_OUTPUT + 3];
    STD_TORCH_CHECK(plan_sizes(plan, sizes, PLAN_FIRST_OUTPUT + 3) == PLAN_FIRST_OUTPUT + 3,
                    "qconv::run_program: the program has several outputs");
    STD_TORCH_CHECK(images.size(1) == sizes[0], "qconv::run_program: images have ", images.size(1),
                    " channels; the program takes ", sizes[0]);
    std::vector<int64_t> size{images.size(0), sizes[5], sizes[6], sizes[7]};
    if (shape.size() == 1 && sizes[6] * sizes[7] == 1) size.resize(2);
    const size_t lengths = shape.size() / 6; /* of each side */
    const bool is_its = size.size() == 2 ? shape[0] == size[1]
                                         : lengths > 0 && shape.size() % 6 == 1 && shape[0] == size[1] &&
                                               length_of(images.size(2), &shape[1], lengths) == size[2] &&
                                               length_of(images.size(3), &shape[1 + 3 * lengths], lengths) == size[3];
    STD_TORCH_CHECK(is_its, "qconv::run_program: shape does not give the program's output, of ", sizes[5], " x ",
                    sizes[6], " x ", sizes[7]);
    const Tensor output = torch::stable::new_empty(images, size);
    float *const outputs[] = {static_cast<float *>(output.mutable_data_ptr())};
    const int64_t strides[][4] = {{images.stride(0), images.stride(1), images.stride(2), images.stride(3)}};
    const auto threads = static_cast<int>(torch::stable::get_num_threads());
    const float *const from[] = {static_cast<const float *>(images.const_data_ptr())};
    STD_TORCH_CHECK(plan_run(plan, from, strides, images.size(0), threads, outputs, nullptr) == 0,
                    "qconv::run_program: no memory for images");
    return output;
}

} // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(qconv, library) {
    try {
        library.def("run_program(Tensor program, Tensor images, int[] shape) -> Tensor");
    } catch (const std::runtime_error &) { /* qconv's Python package has defined it: this kernel takes over */
    }
}

STABLE_TORCH_LIBRARY_IMPL(qconv, CPU, library) { library.impl("run_program", TORCH_BOX(&run_program)); }
