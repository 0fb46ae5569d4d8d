"""The fused Function against the composed form, an independent reference, and what it promises to spare."""

import copy
import math
import sys
from contextlib import nullcontext
from functools import partial
from itertools import product
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from methods import METHODS, SCHEMES
from settings import mostly_nightly
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import qconv
from qconv import Scheme, models, schemes
from qconv.function.operations import Convolution, Linear, TransposedConvolution, exchange_channels
from qconv.function.quantized_op import LayerQuantizers, quantized_op
from qconv.quantizers import FP8, DoReFaGradient, Identity, Int8Stochastic, Quantizer, ScaledSign, ShiftPS, Sign
from qconv.quantizers.base import is_plain

OPS: dict[str, tuple[Any, tuple[int, ...], tuple[int, ...]]] = {
    # the operation, input shape, filter shape
    "conv1d": (Convolution((2,), (1,), (1,), 1), (2, 4, 9), (6, 4, 3)),
    "conv2d": (Convolution((1, 1), (1, 1), (1, 1), 1), (2, 4, 7, 5), (6, 4, 3, 3)),
    "conv2d strided, dilated, grouped": (Convolution((2, 1), (1, 2), (1, 2), 2), (2, 4, 7, 6), (6, 2, 3, 2)),
    "conv2d depthwise": (Convolution((1, 1), (1, 1), (1, 1), 4), (2, 4, 5, 5), (4, 1, 3, 3)),
    "conv2d with a border of -1": (
        Convolution((1, 1), (0, 0), (1, 1), 1, (1, 2, 0, 1), -1.0),
        (2, 4, 5, 5),
        (6, 4, 3, 3),
    ),
    "conv3d": (Convolution((1, 1, 1), (1, 0, 1), (1, 1, 1), 1), (2, 2, 4, 5, 3), (3, 2, 2, 3, 3)),
    "transposed": (TransposedConvolution((2, 2), (1, 0), (1, 1), (1, 1), 1), (2, 4, 4, 3), (6, 4, 3, 3)),
    "transposed, grouped": (TransposedConvolution((2, 1), (1, 1), (0, 0), (1, 2), 2), (2, 4, 4, 5), (6, 2, 3, 2)),
    "linear": (Linear(), (2, 3, 5), (6, 5)),
}
EVERY_OP = pytest.mark.parametrize(("op", "input_shape", "filter_shape"), OPS.values(), ids=OPS.keys())


def made(scheme: Scheme, filters: Tensor, input: Tensor | None = None, dim: int = 1) -> LayerQuantizers:
    """The quantizers of a layer; those of the input see ``input`` first, with its channels in ``dim``."""
    quantizers = LayerQuantizers(scheme.input(), scheme.weight(), None, scheme.backward_weight)
    quantizers.weight.to(filters.dtype).initialize(filters)
    if input is not None:
        quantizers.input.build(input.shape[dim], dim)
        quantizers.input.to(input.dtype).initialize(input)
    return quantizers


def composed(input: Tensor, filters: Tensor, bias: Tensor | None, op: Any, input_q: Any, filters_q: Any) -> Tensor:
    """The same layer left to autograd, from public functions of torch alone."""
    x, w = input_q(input), filters_q(filters)
    if isinstance(op, Linear):
        return F.linear(x, w, bias)
    if isinstance(op, TransposedConvolution):
        w = exchange_channels(w, op.groups)
        return F.conv_transpose2d(x, w, bias, op.stride, op.padding, op.output_padding, op.groups, op.dilation)
    if op.border:
        x = F.pad(x, op.border, value=op.border_value)
    convolution = (F.conv1d, F.conv2d, F.conv3d)[len(op.stride) - 1]
    return convolution(x, w, bias, op.stride, op.padding, op.dilation, op.groups)


def from_codes(
    input: Tensor, filters: Tensor, bias: Tensor | None, op: Any, quantizers: LayerQuantizers, method: Scheme
) -> Tensor | None:
    """The layer as sums of integer codes, which are then scaled; None where it is not computed so."""
    if input.dtype == torch.bfloat16 or method.name.startswith("fp8"):
        return None
    try:
        x, w = (q.codes(t, *q.tensors()) for q, t in ((quantizers.input, input), (quantizers.weight, filters)))
    except TypeError:
        return None
    others = x.offset, x.negative_scale, w.offset, w.negative_scale
    if any(other is not None for other in others) or x.scale.numel() != 1:
        return None
    if getattr(op, "border_value", 0) and x.scale != 1:
        return None
    sums = composed(x.values.double(), w.values.double(), None, op, lambda v: v, lambda v: v)
    behind = filters.ndim - 2
    scale = (x.scale.double().flatten() * w.scale.double().flatten()).view(-1, *[1] * behind)
    output = sums.to(input.dtype) * scale.to(input.dtype)
    return output if bias is None else output + bias.view(-1, *[1] * behind)


def gradients(output: Tensor, leaves: list[Tensor]) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(1)
    grad_output = torch.randn(output.shape, generator=generator, dtype=output.dtype)
    return list(torch.autograd.grad(output, leaves, grad_output, allow_unused=True))


FUSED = [
    *product(METHODS, ["conv2d"], [torch.float32, torch.float64, torch.bfloat16]),
    *product(METHODS, [name for name in OPS if name != "conv2d"], [torch.float32]),
]


@pytest.mark.parametrize(
    ("name", "kind", "dtype"), mostly_nightly(FUSED, [row for row in FUSED if row[1] == "conv2d" or row[0] in SCHEMES])
)
def test_fused_equals_codes_or_composed_exactly(name: str, kind: str, dtype: torch.dtype) -> None:
    method, (op, input_shape, filter_shape) = METHODS[name], OPS[kind]
    input = torch.randn(input_shape).to(dtype).requires_grad_()
    filters = torch.randn(filter_shape).to(dtype).requires_grad_()
    bias = torch.randn(filter_shape[0]).to(dtype).requires_grad_()
    quantizers = made(method, filters.detach(), input.detach(), -1 if isinstance(op, Linear) else 1)
    output = quantized_op(input, filters, bias, op, quantizers)
    expected = composed(input, filters, bias, op, quantizers.input, quantizers.weight)
    of_codes = from_codes(input, filters, bias, op, quantizers, method)
    if of_codes is None:  # torch's sums may begin with the bias, those of codes end with it
        sums = composed(input, filters, None, op, quantizers.input, quantizers.weight)
        bias_last = sums + bias.view(-1, *[1] * (filters.ndim - 2))
        assert output.equal(expected) or output.equal(bias_last)
    else:
        assert output.equal(of_codes)
    learned = (*quantizers.input.tensors(), *quantizers.weight.tensors())
    leaves: list[Tensor] = [input, filters, bias, *(tensor for tensor in learned if tensor.requires_grad)]
    torch.testing.assert_close(gradients(output, leaves), gradients(expected, leaves), rtol=0, atol=0)


@pytest.mark.parametrize("grad", [DoReFaGradient, Int8Stochastic, partial(FP8, "e5m2")], ids=str)
def test_gradient_quantizers_with_every_scheme(method: Scheme, grad: Any) -> None:
    op, input_shape, filter_shape = OPS["conv2d"]
    input = torch.randn(input_shape, requires_grad=True)
    filters = torch.randn(filter_shape, requires_grad=True)
    bias = torch.randn(filter_shape[0], requires_grad=True)
    quantizers = made(method, filters.detach(), input.detach())._replace(grad=grad())
    assert quantizers.grad is not None
    quantize, tensors = quantizers.grad.quantize, quantizers.grad.tensors()
    output = quantized_op(input, filters, bias, op, quantizers)
    expected = composed(input, filters, bias, op, quantizers.input, quantizers.weight)
    expected.register_hook(lambda grad_output: quantize(grad_output, *tensors))
    learned = (*quantizers.input.tensors(), *quantizers.weight.tensors())
    leaves: list[Tensor] = [input, filters, bias, *(tensor for tensor in learned if tensor.requires_grad)]
    torch.testing.assert_close(gradients(output, leaves), gradients(expected, leaves), rtol=0, atol=0)


@EVERY_OP
@pytest.mark.parametrize("of", ["input", "filters"])
def test_nor_of_a_loss_that_is_linear_in_the_output(op: Any, input_shape: Any, filter_shape: Any, of: str) -> None:
    input = torch.randn(input_shape, requires_grad=True)
    filters = torch.randn(filter_shape, requires_grad=True)
    output = quantized_op(input, filters, None, op, LayerQuantizers(Identity(), Identity()))
    leaf = input if of == "input" else filters
    (grad,) = torch.autograd.grad(output.sum(), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        (output.mean() + grad.square().sum()).backward()


class Calls(TorchDispatchMode):
    """The output masks of all convolution_backward calls."""

    def __init__(self) -> None:
        super().__init__()
        self.masks: list[list[bool]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.convolution_backward.default:
            self.masks.append(list(args[-1]))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("needs", [(0, 1, 0), (1, 0, 0), (0, 0, 1), (1, 1, 1), (0, 1, 1)], ids=str)
def test_only_what_is_needed_is_computed(needs: tuple[int, int, int]) -> None:
    layer = qconv.QConv2d(3, 4, 3, scheme=schemes.xnor())
    input = torch.randn(2, 3, 6, 6, requires_grad=bool(needs[0]))
    layer.weight.requires_grad_(bool(needs[1]))
    assert layer.bias is not None
    layer.bias.requires_grad_(bool(needs[2]))
    with Calls() as calls:
        layer(input).sum().backward()
    assert calls.masks == ([list(map(bool, needs))] if any(needs[:2]) else [])  # a bias's gradient is a sum


@pytest.mark.parametrize(
    "layer",
    [
        qconv.QConv1d(3, 4, 3),
        qconv.QConv2d(3, 4, 3),
        qconv.QConv3d(3, 4, 3),
        qconv.QConvTranspose1d(3, 4, 3),
        qconv.QConvTranspose2d(3, 4, 3),
    ],
    ids=lambda layer: type(layer).__name__,
)
@pytest.mark.parametrize("scheme", [schemes.xnor(), schemes.identity()], ids=str)
def test_a_trained_bias_beside_a_frozen_weight(layer: Any, scheme: Scheme) -> None:
    layer = copy.deepcopy(layer)
    layer.set_scheme(scheme)
    layer.weight.requires_grad_(False)
    output = layer(torch.randn(2, 3, *[5] * (layer.weight.ndim - 2)))
    with Calls() as calls:
        output.square().sum().backward()
    assert calls.masks == []
    expected = 2 * output.detach().sum((0, *range(2, output.ndim)))
    torch.testing.assert_close(layer.bias.grad, expected, rtol=1e-5, atol=1e-5)


def test_learned_tensors_alone_are_reason_enough() -> None:
    layer = qconv.QConv2d(3, 4, 3, scheme=schemes.shift_ps(), bias=False)
    assert not layer.weight.requires_grad
    with Calls() as calls:
        layer(torch.randn(2, 3, 6, 6)).sum().backward()
    assert calls.masks == [[False, True, False]]
    assert isinstance(layer.weight_quantizer, ShiftPS)
    assert layer.weight_quantizer.shift.grad is not None


def test_float_backward_weight() -> None:
    scheme = Scheme("mine", Sign, ScaledSign, backward_weight="float")
    layer = qconv.QConv2d(3, 4, 3, padding=1, scheme=scheme, dtype=torch.float64)
    input = torch.randn(2, 3, 5, 5, dtype=torch.float64).mul(0.3).requires_grad_()
    layer(input).sum().backward()
    ones = torch.ones(2, 4, 5, 5, dtype=torch.float64)
    expected = F.conv_transpose2d(ones, layer.weight, padding=1)
    assert input.grad is not None
    torch.testing.assert_close(input.grad, expected * (input.abs() <= 1), rtol=1e-12, atol=1e-12)


class LearnedStep(Quantizer):
    """Rounds to multiples of a learned step: a quantizer of the input with a tensor of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.step = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.step,)

    def quantize(self, x: Tensor, *tensors: Tensor) -> Tensor:
        return torch.round(x / tensors[0]) * tensors[0]

    def backward(self, grad: Tensor, x: Tensor, *tensors: Tensor) -> tuple[Tensor | None, ...]:
        return grad, (grad * (torch.round(x / tensors[0]) - x / tensors[0])).sum()


class ScaledLinear:
    """An operation with two extra tensors: ``(input * scale) @ weight.T + bias + shift``."""

    def __init__(self) -> None:
        self.masks: list[tuple[bool, ...]] = []

    def forward(self, input: Tensor, weight: Tensor, bias: Tensor | None, *extra: Tensor) -> Tensor:
        scale, shift = extra
        return F.linear(input * scale, weight, bias) + shift

    def backward(
        self, grad_output: Tensor, input: Tensor, weight: Tensor, output_mask: tuple[bool, ...], *extra: Tensor
    ) -> tuple[Tensor | None, ...]:
        self.masks.append(output_mask)
        scale, _ = extra
        columns = grad_output @ weight
        grads = columns * scale, grad_output.t() @ (input * scale), grad_output.sum(0), columns * input, grad_output
        return tuple(grad if asked else None for grad, asked in zip(grads, output_mask, strict=True))


class ExchangedExtra(ScaledLinear):
    """A planted error: the gradients of the extra tensors are exchanged."""

    def backward(self, *arguments: Any) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        grads = super().backward(*arguments)
        return *grads[:3], grads[4], grads[3]


@pytest.mark.parametrize("planted", [False, True])
def test_extra_tensors_beside_learned_ones(planted: bool) -> None:
    input, weight = (torch.randn(5, 5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    bias = torch.randn(5, dtype=torch.float64, requires_grad=True)
    scale, shift = (torch.randn(5, 5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    quantizers = LayerQuantizers(LearnedStep(), LearnedStep())
    op: ScaledLinear = ExchangedExtra() if planted else ScaledLinear()
    output = quantized_op(input, weight, bias, op, quantizers, scale, shift)
    expected = F.linear(quantizers.input(input) * scale, quantizers.weight(weight), bias) + shift
    assert output.equal(expected)
    leaves = [input, weight, bias, scale, shift, *quantizers.input.tensors(), *quantizers.weight.tensors()]
    pairs = list(zip(gradients(output, leaves), gradients(expected, leaves), strict=True))
    close = [f is not None and r is not None and torch.allclose(f, r, rtol=1e-12) for f, r in pairs]
    assert close == [True] * 3 + [not planted] * 2 + [True] * 2


@pytest.mark.parametrize("needed", range(5), ids=["input", "weight", "bias", "scale", "shift"])
@pytest.mark.parametrize("backward_weight", ["quantized", "float"])
def test_each_extra_tensor_alone(needed: int, backward_weight: Any) -> None:
    sizes = (5, 5), (5, 5), (5,), (5, 5), (5, 5)
    tensors = [torch.randn(size, dtype=torch.float64).requires_grad_(i == needed) for i, size in enumerate(sizes)]
    input, weight, bias, scale, shift = tensors
    op = ScaledLinear()
    quantizers = LayerQuantizers(Sign(), ScaledSign(), None, backward_weight)
    output = quantized_op(input, weight, bias, op, quantizers, scale, shift)
    (found,) = gradients(output, [tensors[needed]])
    assert op.masks == [tuple(i == needed for i in range(5))]
    weight_q = weight if backward_weight == "float" and needed in (0, 3) else quantizers.weight(weight)
    expected = F.linear(quantizers.input(input) * scale, weight_q, bias) + shift
    torch.testing.assert_close(found, gradients(expected, [tensors[needed]])[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("channels_last", "autocast"), mostly_nightly(product([False, True], [False, True]), [(True, False)])
)
def test_saves_no_more_than_the_float_layer(channels_last: bool, autocast: bool) -> None:
    from qconv.bench.train_step import Case, Settings, measure

    settings = Settings(batch_size=2, rounds=1, warmup=0, autocast=autocast, channels_last=channels_last)
    for case in ("64@32", "resnet18"):
        result = measure(Case.named(case), schemes.bnn(), settings)
        assert 0 < result.quantized_saved_mib <= result.float_saved_mib


def test_gradients_keep_dtype_and_memory_format() -> None:
    layer = qconv.QConv2d(8, 8, 3, padding=1, scheme=schemes.bnn()).to(memory_format=torch.channels_last)
    seen: list[Tensor] = []
    input = torch.randn(2, 8, 6, 6).to(memory_format=torch.channels_last).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        low = input * 1.0
        low = low.to(torch.bfloat16)
        low.register_hook(seen.append)
        output = layer(low)
    output.backward(torch.ones_like(output))
    assert output.is_contiguous(memory_format=torch.channels_last)
    assert (output.dtype, seen[0].dtype) == (torch.bfloat16, torch.bfloat16)
    assert seen[0].is_contiguous(memory_format=torch.channels_last)
    assert layer.weight.grad is not None
    assert layer.weight.grad.stride() == layer.weight.stride()
    assert math.isfinite(layer.weight.grad.sum())


class Launches(TorchDispatchMode):
    """Counts the operators that start kernels on a GPU."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        starts_none = ("empty", "new_empty", "detach", "_local_scalar_dense", "_unsafe_view", "lift_fresh", "promote_")
        name = func._schema.name.partition("::")[2]
        if not func.is_view and not name.startswith(starts_none):
            self.count += 2 if name in ("step_backward", "convolution_backward") else 1
        return func(*args, **(kwargs or {}))


def launches(scheme: Scheme | None, half: bool) -> int:
    """Those of a training step of a small ResNet."""
    model = models.ResNet(3, 10, widths=(4, 8), blocks=(2, 1), downsample="A")
    if scheme is not None:
        qconv.convert(model, scheme, check=False, before_sign="keep")
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9, foreach=True)
    qconv.after_every_step(optimizer, model)
    for counts in (False, False, True):
        with Launches() if counts else nullcontext() as mode:
            with torch.autocast("cpu", torch.bfloat16, enabled=half):
                output = model(torch.rand(2, 3, 8, 8))
            output.float().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return cast(Launches, mode).count


LAUNCHES = {
    "bnn": (32, 26),
    "bireal": (96, 72),
    "reactnet": (120, 120),
    "dorefa": (90, 42),
    "lsq": (97, 43),
    "minmax": (162, 36),
    "shift_q": (17, 11),
}
"""By scheme: the operators of a step beyond those of the float network, in float32 and under autocast to bfloat16."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("half", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("name", "most"), LAUNCHES.items())
def test_a_step_starts_no_more_kernels_than_it_did(
    name: str, most: tuple[int, int], half: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in [module for path, module in sys.modules.items() if path.startswith("qconv.")]:
        for question, answer in (("is_eager_cuda", is_plain), ("is_plain_cpu", lambda _: False)):  # as on a GPU
            if hasattr(module, question):
                monkeypatch.setattr(module, question, answer)
    assert launches(getattr(schemes, name)(), half) - launches(None, half) <= most[half]
