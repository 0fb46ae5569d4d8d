"""Lean layers of signs and numbers, which look sums up, against the same layers that multiply."""

import copy
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from test_layers import LAYERS as LAYERS, pair
from test_lean import assert_same, error, gradients
from torch import Tensor, nn

import qconv
from qconv import schemes
from qconv.function import number_operations
from qconv.kernels import look_up, native
from qconv.models.activations import RPReLU

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")
if native.instruction_sets()[-1:] in ((), ("portable",)):
    pytest.skip("needs a C kernel", allow_module_level=True)
FLOATS = {
    "bwn": schemes.bwn(),
    "dorefa": schemes.dorefa(1, None),
    "lsq": schemes.lsq(1, None),
    "lsq_plus": schemes.lsq_plus(1, None),
    "pact": schemes.pact(1, None),
    "irnet": schemes.irnet(binary_input=False),
    "reste": schemes.reste(binary_input=False),
}
CODES = {
    **{f"dorefa, {bits} bits": schemes.dorefa(1, bits) for bits in (1, 4, 8)},
    **{f"lsq, {bits} bits": schemes.lsq(1, bits) for bits in (1, 4, 8)},
    "lsq_plus": schemes.lsq_plus(1, 4),
    "pact": schemes.pact(1, 4),
}
PAYING: dict[str, Any] = dict(in_channels=32, out_channels=48, kernel_size=3, padding=1)


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look up where it does not pay as well."""
    monkeypatch.setattr(look_up, "weight_pays", lambda sizes: True)
    monkeypatch.setattr(number_operations, "weight_pays", lambda sizes: True)
    monkeypatch.setattr(number_operations, "_PACKED", 0)


def sizes_of(output: Tensor) -> Any:
    """The sizes of the convolution that was looked up; None if it was multiplied."""
    node: Any = output.grad_fn
    while node is not None and not hasattr(node, "sizes"):
        node = node.next_functions[0][0] if node.next_functions else None
    return getattr(node, "sizes", None)


def layers(scheme: qconv.Scheme) -> Iterator[tuple[str, Any, Any, Tensor]]:
    """Small layers of all geometries, and the same ones made lean."""
    for name, (twin, arguments, shape) in LAYERS.items():
        torch.manual_seed(0)
        _, layer = pair(twin, arguments, scheme)
        input = torch.randn(shape) * 1.5
        layer(input).sum().backward()  # which sets the learned numbers
        layer.zero_grad()
        layer.weight.data = layer.weight.data.bfloat16().float()  # the same numbers in float64
        yield name, layer, qconv.lean(copy.deepcopy(layer)), input


def is_two_dimensional(name: str) -> bool:
    return not any(other in name for other in ("transposed", "3d"))


def assert_as_right(name: str, layer: nn.Module, lean: nn.Module, input: Tensor, of_sums: float = 2e-6) -> None:
    """The error against float64 is at most twice that of torch's own convolution, or in learned numbers ``of_sums``."""
    plain, fast = gradients(layer, input), gradients(lean, input)
    exact = gradients(copy.deepcopy(layer).double(), input.double())
    pairs = zip(
        error([fast[0], *fast[1]], [exact[0], *exact[1]]),
        error([plain[0], *plain[1]], [exact[0], *exact[1]]),
        strict=True,
    )
    for (ours, theirs), grad in zip(pairs, [fast[0], *fast[1]], strict=True):
        least = 4e-7 if grad is None or grad.numel() > 1 else of_sums  # a step's is a long sum
        assert ours <= max(2 * theirs, least), (name, ours, theirs)
    assert [None if g is None else g.shape for g in plain[1]] == [None if g is None else g.shape for g in fast[1]]


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("scheme", FLOATS.values(), ids=FLOATS.keys())
def test_layers_of_floats(scheme: qconv.Scheme) -> None:
    looked_up = 0
    for name, layer, lean, input in layers(scheme):
        for given in (input, *([input.to(memory_format=torch.channels_last)] if input.ndim == 4 else [])):
            assert_as_right(name, layer, lean, given)
            looked_up += sizes_of(lean(given)) is not None
            assert (sizes_of(lean(given)) is not None) == is_two_dimensional(name), name
    assert looked_up > 10


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("scheme", CODES.values(), ids=CODES.keys())
def test_layers_of_codes(scheme: qconv.Scheme) -> None:
    """Sums of whole numbers are exact, in any order."""
    has_whole = scheme.input().has_whole and type(scheme.input()).__name__ != "LSQPlusInput"  # which has an offset
    for name, layer, lean, input in layers(scheme):
        assert (sizes_of(lean(input)) is not None) == is_two_dimensional(name), name
        if not has_whole:
            assert_as_right(name, layer, lean, input, of_sums=1e-5)  # an offset's sum nearly cancels
            continue
        plain, fast = gradients(qconv.lean(layer, exact=True), input), gradients(lean, input)
        assert torch.equal(plain[0], fast[0]), name
        for one, other in zip(plain[1], fast[1], strict=True):
            assert one is None or (other is not None and (one - other).norm() <= 1e-5 * one.norm() + 1e-12), name


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("scheme", [schemes.bwn(), schemes.lsq(1, 4)], ids=str)
def test_bfloat16(scheme: qconv.Scheme) -> None:
    for name, layer, lean, input in layers(scheme):
        plain = gradients(qconv.lean(layer, exact=True), input, autocast=True)
        fast = gradients(lean, input, autocast=True)
        assert plain[0].dtype == fast[0].dtype == torch.bfloat16
        for one, other in zip((plain[0], *plain[1]), (fast[0], *fast[1]), strict=True):
            assert one is None or (other is not None and (one - other).norm() <= 0.02 * one.norm() + 1e-3), name


class Block(nn.Module):
    """Two layers with batch norm and an activation, which find each other's recipes."""

    def __init__(self, scheme: qconv.Scheme, activation: nn.Module) -> None:
        super().__init__()
        self.convs = nn.ModuleList(qconv.QConv2d(32, 32, 3, padding=1, bias=False, scheme=scheme) for _ in range(2))
        self.norms, self.activation = nn.ModuleList(nn.BatchNorm2d(32) for _ in range(2)), activation

    def forward(self, x: Tensor) -> Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = self.activation(norm(conv(x)) + x)
        return x


@pytest.mark.parametrize("scheme", [schemes.bwn(), schemes.dorefa(1, 4), schemes.lsq(1, 8)], ids=str)
@pytest.mark.parametrize("activation", [nn.ReLU(), nn.ReLU(inplace=True), nn.PReLU(), RPReLU(32)], ids=str)
def test_networks(scheme: qconv.Scheme, activation: nn.Module) -> None:
    """What a batch norm computes again is what the forward gave, bit for bit, or it would raise."""
    torch.manual_seed(0)
    model, input = Block(scheme, activation), torch.randn(8, 32, 12, 12)
    model(input)
    lean = qconv.lean(copy.deepcopy(model))
    assert sizes_of(lean.convs[0](input)) is not None
    plain, fast = gradients(model, input), gradients(lean, input)
    assert torch.allclose(plain[0], fast[0], atol=1e-3 if scheme.input().bits < 32 else 1e-5)
    for one, other in zip(plain[1], fast[1], strict=True):
        assert one is not None
        assert other is not None
        assert (one - other).norm() < 0.02 * one.norm() + 1e-3


@pytest.mark.parametrize("frozen", ["weight", "bias", "input"])
def test_what_needs_no_gradient(frozen: str) -> None:
    layer = qconv.QConv2d(**PAYING)
    lean, input = qconv.lean(copy.deepcopy(layer)), torch.randn(4, 32, 16, 16)
    for each in (layer, lean):
        for name, parameter in each.named_parameters():
            parameter.requires_grad_(name != frozen)
    outputs = [each(input.clone().requires_grad_(frozen != "input")) for each in (layer, lean)]
    for output in outputs:
        output.square().sum().backward()
    assert sizes_of(outputs[1]) is not None
    grads = ([p.grad for p in each.parameters()] for each in (layer, lean))
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-3)


def test_memory_formats() -> None:
    """Output and gradient of the input have those of a layer that is not lean; the gradient of a weight has its own."""
    formats = torch.contiguous_format, torch.channels_last
    for of_weight, of_input in product(formats, formats):
        layer = qconv.QConv2d(**PAYING).to(memory_format=of_weight)  # pyright: ignore
        strides = []
        for net in (layer, qconv.lean(copy.deepcopy(layer))):
            input = torch.randn(4, 32, 16, 16).contiguous(memory_format=of_input).requires_grad_()
            copied = input * 1  # a parameter's gradient would get the format of the parameter
            output = net(copied)
            grad_input, grad_weight = torch.autograd.grad(output.square().sum(), (copied, net.weight))
            strides.append((output.stride(), grad_input.stride()))
        assert grad_weight.stride() == net.weight.stride()  # pyright: ignore
        assert strides[0] == strides[1], (of_weight, of_input)


def test_where_it_multiplies() -> None:
    """Not in an exact layer, nor one that is not lean, in evaluation, in other dtypes, or where it does not pay."""
    layer, input = qconv.QConv2d(**PAYING), torch.randn(4, 32, 16, 16)
    expected = gradients(layer, input)
    assert sizes_of(layer(input)) is None
    exact = qconv.lean(copy.deepcopy(layer), exact=True)
    assert sizes_of(exact(input)) is None
    assert_same(expected, gradients(exact, input))
    fast = qconv.lean(copy.deepcopy(layer))
    assert sizes_of(fast(input)) is not None
    with torch.no_grad():
        assert torch.equal(fast(input), expected[0])
    assert sizes_of(fast(input[:, :, :4, :4])) is None
    assert sizes_of(copy.deepcopy(fast).double()(input.double())) is None
    assert sizes_of(torch.compile(fast, backend="eager")(input)) is None


def test_a_float_backward_weight() -> None:
    scheme = qconv.Scheme(weight=schemes.bwn().weight, backward_weight="float")
    layer = qconv.QConv2d(**PAYING, scheme=scheme)
    plain, fast = (gradients(each, torch.ones(4, 32, 16, 16)) for each in (layer, qconv.lean(copy.deepcopy(layer))))
    torch.testing.assert_close(fast[1], plain[1], rtol=0, atol=0)


@pytest.mark.parametrize("scheme", [schemes.bwn(), schemes.dorefa(1, 4)], ids=str)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, -0.0])
def test_odd_values(scheme: qconv.Scheme, value: float) -> None:
    layer = qconv.QConv2d(**PAYING, scheme=scheme)
    lean, input = qconv.lean(copy.deepcopy(layer)), torch.randn(4, 32, 16, 16)
    input[1, 3, 2, 2:5] = value
    plain, fast = gradients(qconv.lean(layer, exact=True), input), gradients(lean, input)
    assert torch.equal(plain[0].isnan(), fast[0].isnan())
    assert torch.equal(plain[0][plain[0].isinf()], fast[0][fast[0].isinf()])
    torch.testing.assert_close(*([None if g is None else g.isnan() for g in grads] for _, grads in (plain, fast)))


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("shape", [(0, 32, 16, 16), (1, 32, 1, 1), (0, 32, 3, 3)])
def test_odd_batches(shape: tuple[int, ...]) -> None:
    layer = qconv.QConv2d(**PAYING)
    plain, fast = (gradients(each, torch.randn(shape)) for each in (layer, qconv.lean(copy.deepcopy(layer))))
    assert plain[0].shape == fast[0].shape
    for one, other in zip(plain[1], fast[1], strict=True):
        assert one is not None
        assert other is not None
        assert one.shape == other.shape
        assert bool(other.isfinite().all())
