"""Lean models against the same models that are not: outputs, gradients, state, and what is kept."""

import copy
import gc
import pickle
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from methods import SCHEMES
from settings import Recomputed, default_dtype, mostly_nightly
from test_layers import LAYERS as LAYERS, pair
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import qconv
from qconv import schemes
from qconv.function import recipes
from qconv.layers import QuantizedLayer
from qconv.lean.activation import LeanHardtanh
from qconv.models import resnet20
from qconv.models.activations import Maxout, RPReLU
from qconv.quantizers import HardClip

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")


def gradients(model: nn.Module, input: Tensor, autocast: bool = False) -> tuple[Tensor, list[Tensor | None]]:
    """The output, and the gradients of the input and of all parameters."""
    model.zero_grad()
    input = input.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    with torch.autocast(input.device.type, torch.bfloat16, enabled=autocast):
        output = model(input)
    weights = torch.linspace(-1, 2, output.numel(), device=input.device).view_as(output)
    (output.float() * weights).sum().backward()
    grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    return output.detach(), [input.grad, *grads]


def assert_same(one: Any, other: Any) -> None:
    assert torch.equal(one[0].isnan(), other[0].isnan())
    assert are_equal(one[0].nan_to_num(7), other[0].nan_to_num(7))
    for a, b in zip(one[1], other[1], strict=True):
        assert (a is None) == (b is None)
        assert a is None or are_equal(a.nan_to_num(7), b.nan_to_num(7))


def are_equal(one: Tensor, other: Tensor) -> bool:
    """Bit for bit; on a GPU, whose convolutions may be made by transforms, up to rounding errors."""
    if one.is_cuda and one.is_floating_point() and one.numel():
        return torch.allclose(one, other, rtol=1e-2, atol=1e-2 * one.abs().max().item())
    return torch.equal(one, other)


def assert_near(ones: list[Tensor | None], others: list[Tensor | None]) -> None:
    for one, other in zip(ones, others, strict=True):
        assert one is not None
        assert other is not None
        assert (one - other).norm() < 1e-5 * one.norm() + 1e-3


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES.keys())
def test_exact_layers(scheme: qconv.Scheme, device: str) -> None:
    for name, (twin, arguments, shape) in LAYERS.items():
        if scheme.scale_map and "transposed" in name:
            continue
        torch.manual_seed(0)
        layer = pair(twin, arguments, scheme)[1].to(device)
        input = torch.randn(shape).to(device) * 1.5
        layer(input)  # takes its ranges from the first batch
        other = qconv.lean(copy.deepcopy(layer), exact=True)
        for given in (input, *([input.to(memory_format=torch.channels_last)] if len(shape) == 4 else [])):
            plain, lean = gradients(layer, given), gradients(other, given)
            assert_same(plain, lean)
            assert plain[0].stride() == lean[0].stride(), name


BINARY = {name: scheme for name, scheme in SCHEMES.items() if scheme.input().signs and not scheme.scale_map}


def error(grads: list[Tensor | None], exact: list[Tensor | None]) -> list[float]:
    """Of each gradient, as a part of the largest one."""
    pairs = [(a, b) for a, b in zip(grads, exact, strict=True) if a is not None and b is not None and b.numel()]
    return [float((a.double() - b).norm() / b.norm().clamp(min=1e-30)) for a, b in pairs]


@pytest.mark.parametrize("scheme", BINARY.values(), ids=BINARY.keys())
def test_fast_layers(scheme: qconv.Scheme, device: str) -> None:
    """The error against float64 is at most twice that of torch's own convolution."""
    for name, (twin, arguments, shape) in LAYERS.items():
        torch.manual_seed(0)
        layer = pair(twin, arguments, scheme)[1].to(device)
        input = torch.randn(shape).to(device) * 1.5
        layer(input)
        layer.weight.data = layer.weight.data.bfloat16().float()  # the same numbers in float64
        other = qconv.lean(copy.deepcopy(layer))
        (output, plain), (fast_output, fast) = gradients(layer, input), gradients(other, input)
        assert are_equal(output, fast_output), name
        _, exact = gradients(copy.deepcopy(layer).double(), input.double())
        for ours, theirs in zip(error(fast, exact), error(plain, exact), strict=True):
            assert ours <= max(2 * theirs, 4e-7), (name, ours, theirs)


class Block(nn.Module):
    """Convolutions with shortcuts, in a forward that `torch.fx` can't trace, with a sum in place."""

    def __init__(self, activation: Callable[[], nn.Module], scheme: qconv.Scheme, inplace: bool) -> None:
        super().__init__()
        self.stem, self.stem_norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.convs = nn.ModuleList(qconv.QConv2d(8, 8, 3, padding=1, bias=i == 1, scheme=scheme) for i in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm2d(8, affine=i != 1, momentum=[0.1, None, 0.3][i]) for i in range(3))
        self.acts = nn.ModuleList(activation() for _ in range(3))
        self.inplace = inplace

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem_norm(self.stem(x))
        for conv, norm, act in zip(self.convs, self.norms, self.acts, strict=True):
            y = norm(conv(x))
            if self.inplace and len(y) > 1:
                y += x
            else:
                y = y + x
            x = act(y)
        return x


ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "none": nn.Identity,
    **{kind.__name__: kind for kind in (nn.ReLU, nn.ReLU6, nn.Hardtanh, nn.PReLU, nn.LeakyReLU)},
    **{f"{kind.__name__} in place": partial(kind, inplace=True) for kind in (nn.ReLU, nn.Hardtanh, nn.LeakyReLU)},
    **{kind.__name__: partial(kind, 8) for kind in (RPReLU, Maxout)},
}


def passes(scheme: qconv.Scheme, activation: str) -> bool:
    """Whether any information passes from the activation to the layer behind it."""
    is_one_signed = activation.startswith("ReLU")
    return not (is_one_signed and scheme.input().splits_at_zero)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize(
    ("scheme", "activation"),
    [
        (scheme, activation)
        for scheme in (schemes.bnn(), schemes.bireal(), schemes.lsq())
        for activation in ACTIVATIONS
        if passes(scheme, activation)
    ],
    ids=str,
)
def test_exact_networks(scheme: qconv.Scheme, activation: str, inplace: bool, device: str) -> None:
    torch.manual_seed(0)
    model = Block(ACTIVATIONS[activation], scheme, inplace).to(device)
    input = torch.randn(4, 3, 6, 6).to(device)
    model(input)
    lean = qconv.lean(copy.deepcopy(model), exact=True)
    for autocast in (False, True):
        assert_same(gradients(model, input, autocast), gradients(lean, input, autocast))
    for (name, a), b in zip(model.state_dict().items(), lean.state_dict().values(), strict=True):
        assert are_equal(a, b), name
    assert_same(gradients(model.eval(), input), gradients(lean.eval(), input))


class Means(nn.Module):
    """Of each channel; between two blocks the layout changes. The gradients of means have strides of 0."""

    def __init__(self, first: Block, second: Block, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        second.stem = nn.Conv2d(8, 8, 1)
        self.first, self.second, self.change = first, second, change

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.change(self.first(x))).mean((2, 3))


def last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def transposed(x: Tensor) -> Tensor:
    return x.transpose(2, 3)


@pytest.mark.parametrize("change", [last, transposed, Tensor.contiguous])
@pytest.mark.parametrize("activation", ["ReLU", "ReLU6", "RPReLU", "Hardtanh in place"])
@pytest.mark.parametrize("scheme", [schemes.bnn(stochastic=True), schemes.lsq()], ids=str)
def test_exact_layouts(scheme: qconv.Scheme, activation: str, change: Callable[[Tensor], Tensor]) -> None:
    if not passes(scheme, activation):
        return
    torch.manual_seed(0)
    first, second = (Block(ACTIVATIONS[activation], scheme, False) for _ in range(2))
    model = Means(first, second, change)
    input = torch.randn(4, 3, 6, 6)
    model(input)
    for form in (torch.contiguous_format, torch.channels_last):
        model, input = model.to(memory_format=form), input.contiguous(memory_format=form)
        lean = qconv.lean(copy.deepcopy(model), exact=True)
        assert_same(gradients(model, input), gradients(lean, input))


def test_ends_that_half_precision_rounds() -> None:
    """torch compares with them in float32."""
    x = torch.tensor([[-0.7, 0.7, 0.6, -0.6, 0.71, -0.71]], dtype=torch.bfloat16)
    plain = nn.Hardtanh(-0.7, 0.7)
    found = [gradients(each, x.clone()) for each in (plain, LeanHardtanh(-0.7, 0.7))]
    assert_same(*found)


def block(
    exact: bool = True, activation: str = "none", inplace: bool = False, device: str = "cpu"
) -> tuple[Block, Block, Tensor]:
    """A network of Bi-Real's layers, whose sums are computed again, the same one made lean, and a batch."""
    torch.manual_seed(0)
    model = Block(ACTIVATIONS[activation], schemes.bireal(), inplace).to(device)
    return model, qconv.lean(copy.deepcopy(model), exact=exact), torch.randn(4, 3, 6, 6).to(device)


@pytest.mark.parametrize("activation", ["none", "Hardtanh", "RPReLU"])
@pytest.mark.parametrize("inplace", [False, True])
def test_what_users_do_with_a_model(activation: str, inplace: bool, device: str) -> None:
    model, lean, input = block(activation=activation, inplace=inplace, device=device)
    expected = gradients(model, input)

    assert_same(expected, gradients(lean, input))
    assert_same(expected, gradients(copy.deepcopy(lean), input))
    assert_same(expected, gradients(pickle.loads(pickle.dumps(lean)), input))
    assert_same(expected, gradients(qconv.lean(qconv.lean(copy.deepcopy(lean), False), exact=True), input))
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x):
        assert_same(expected, gradients(lean, input))
    with torch.autograd.graph.save_on_cpu():
        assert_same(expected, gradients(lean, input))
    assert_same(expected, gradients(Recomputed(copy.deepcopy(lean)), input))
    assert_same(expected, gradients(Recomputed(Recomputed(copy.deepcopy(lean))), input))


class Triangle(HardClip):
    """A derivative of one's own, which is not 1 or 0."""

    def backward(self, grad: Tensor, x: Tensor, *tensors: Tensor) -> Tensor:
        return grad * (1 - x.abs() / self.clip).clamp(min=0)


@pytest.mark.parametrize("exact", [True, False])
def test_a_surrogate_of_ones_own(exact: bool) -> None:
    model = nn.Sequential(qconv.QConv2d(3, 8, 3, scheme=schemes.bnn(surrogate=Triangle)), nn.BatchNorm2d(8))
    lean, input = qconv.lean(copy.deepcopy(model), exact=exact), torch.randn(4, 3, 6, 6, requires_grad=True)
    found, expected = (torch.autograd.grad(each(input)[..., :2].square().sum(), input)[0] for each in (lean, model))
    assert expected.abs().max() > 1
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("scheme", [schemes.bnn(), schemes.bireal(), schemes.lsq(4, 4)], ids=str)
def test_a_checkpoint_beside_a_shortcut(scheme: qconv.Scheme) -> None:
    """Whose backward runs first, and drops the recipe of the stem's output."""
    stem, branch = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)), nn.Sequential(nn.Conv2d(8, 8, 3, padding=1))
    model: Any = nn.ModuleList(
        [stem, nn.Sequential(*branch, nn.BatchNorm2d(8), nn.PReLU()), nn.Conv2d(8, 8, 1, bias=False)]
    )
    model = qconv.lean(qconv.convert(model, scheme, skip=("first",)), exact=True)
    qconv.calibrate(model[1][0], [torch.randn(2, 8, 6, 6)])
    qconv.calibrate(model[2], [torch.randn(2, 8, 6, 6)])
    input, grads = torch.randn(2, 3, 8, 8), []
    for kept in (True, False):
        x = model[0](input)
        y = model[1](x) if kept else checkpoint(model[1], x, use_reentrant=False)
        grads.append(torch.autograd.grad((y + model[2](x)).square().sum(), list(model.parameters())))
    assert all(map(torch.equal, *grads))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_another_default_dtype(dtype: torch.dtype) -> None:
    _, lean, input = block()
    expected = torch.autograd.grad(lean(input).square().sum(), list(lean.parameters()))
    with default_dtype(dtype):
        found = torch.autograd.grad(lean(input).square().sum(), list(lean.parameters()))
    assert all(map(torch.equal, found, expected))


def test_many_channels_with_a_short_default_dtype() -> None:
    """Sizes that bfloat16 rounds up, by which the places of samples would lie outside."""
    with default_dtype(torch.bfloat16):
        model = qconv.lean(nn.Sequential(qconv.QConv2d(8, 300, 1, scheme=schemes.bnn()), nn.BatchNorm2d(300)))
        model(torch.randn(2, 8, 3, 3)).square().sum().backward()


@pytest.mark.parametrize("kind", [qconv.QLinear, partial(qconv.QConv1d, kernel_size=1)], ids=["linear", "conv"])
def test_a_backward_under_autocast_of_a_forward_without(kind: Any) -> None:
    torch.manual_seed(0)
    layer = kind(8, 16, scheme=schemes.lsq(signed_input=True))
    model = nn.Sequential(layer, nn.BatchNorm1d(16), nn.Hardtanh())
    input = torch.randn(4, 8) if isinstance(layer, nn.Linear) else torch.randn(4, 8, 5)
    model(input)
    lean, grads = qconv.lean(copy.deepcopy(model), exact=True), []
    for network in (model, lean):
        with torch.autocast("cpu", torch.bfloat16):
            with torch.autocast("cpu", enabled=False):
                output = network(input)
            grads.append(torch.autograd.grad(output.pow(3).mean(), list(network.parameters())))
    assert all(map(torch.equal, *grads))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scheme", [schemes.dorefa(2, 2), schemes.pact(4, 4)], ids=str)
def test_gradients_at_zero_if_denormals_are_flushed(scheme: qconv.Scheme, dtype: torch.dtype) -> None:
    layer = qconv.QConv2d(4, 4, 3, scheme=scheme)
    input = torch.randn(2, 4, 6, 6).relu().requires_grad_()
    if not torch.set_flush_denormal(True):
        pytest.skip("the processor does not flush denormal numbers")
    with default_dtype(dtype):
        found = [
            torch.autograd.grad(network(input * 1).square().sum(), input)[0]
            for network in (layer, qconv.lean(copy.deepcopy(layer), exact=True))
        ]
        torch.set_flush_denormal(False)
    assert torch.equal(*found)
    assert found[0][input == 0].any()


def test_gradients_of_two_batches_add_up() -> None:
    model, lean, input = block()
    for network in (model, lean):
        (network(input).square().mean() + network(input.flip(0)).square().mean()).backward()
        network(2 * input).square().mean().backward()
    grads = ([p.grad for p in network.parameters()] for network in (model, lean))
    torch.testing.assert_close(*grads, rtol=0, atol=0)


def test_parameters_given_from_outside() -> None:
    model, lean, input = block()
    parameters = {name: (p.detach() * 1.1).requires_grad_() for name, p in model.named_parameters()}
    learned = list(parameters.values())
    outputs: list[Tensor] = [functional_call(network, parameters, (input,)) for network in (model, lean)]
    assert all(map(torch.equal, *(torch.autograd.grad(output.square().sum(), learned) for output in outputs)))


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(
    "arguments",
    [
        dict(kernel_size=3, stride=2, padding=1),
        dict(kernel_size=(2, 3)),
        dict(kernel_size=(3, 2), stride=(1, 2), padding=(1, 0), dilation=(2, 3), ceil_mode=True),
        dict(kernel_size=1, stride=3),
        dict(kernel_size=17, padding=8),
    ],
    ids=str,
)
def test_pooling(arguments: dict[str, Any], last: bool) -> None:
    input = torch.randn(2, 5, 20, 19).round(decimals=0)  # with ties
    input[0, 0, 3, 3] = torch.nan
    input = input.to(memory_format=torch.channels_last if last else torch.contiguous_format)
    model = nn.MaxPool2d(**arguments)
    lean = qconv.lean(copy.deepcopy(model))
    plain, ours = gradients(model, input), gradients(lean, input)
    assert_same(plain, ours)
    assert plain[1][0].stride() == ours[1][0].stride()  # pyright: ignore
    assert kept(lean, input.clone().requires_grad_()) <= plain[0].numel() or arguments["kernel_size"] == 17


@pytest.mark.parametrize("frozen", ["convs.0", "convs.1.weight", "norms", "norms.0.weight", "stem", "convs", "acts"])
def test_frozen_parameters(frozen: str) -> None:
    model, lean, input = block(activation="RPReLU")
    for network in (model, lean):
        for name, parameter in network.named_parameters():
            parameter.requires_grad_(not name.startswith(frozen))
    for given in (input, input.to(memory_format=torch.channels_last)):  # by which convolutions choose how they add up
        assert_same(gradients(model, given), gradients(lean, given))


@pytest.mark.parametrize("scheme", [schemes.bnn(), schemes.lsq(), schemes.reactnet()], ids=str)
def test_a_frozen_weight_of_images_that_are_channels_last(scheme: qconv.Scheme) -> None:
    model = nn.Sequential(qconv.QConv2d(32, 48, 3, padding=1, scheme=scheme))
    input = torch.randn(2, 32, 14, 14).to(memory_format=torch.channels_last)
    model(input)
    model.requires_grad_(False)
    lean = qconv.lean(copy.deepcopy(model), exact=True)
    assert_same(gradients(model, input), gradients(lean, input))


def test_one_image_that_is_channels_last() -> None:
    for scheme in (schemes.siman(), schemes.bnn()):
        model = nn.Sequential(qconv.QConv2d(16, 5, 3, padding=1, scheme=scheme))
        input = torch.randn(1, 16, 6, 7).to(memory_format=torch.channels_last)
        assert_same(gradients(model, input), gradients(qconv.lean(copy.deepcopy(model), exact=True), input))


@pytest.mark.parametrize("activation", ["ReLU", "Hardtanh", "ReLU6", "PReLU", "RPReLU"])
def test_gradients_in_batches(activation: str) -> None:
    model, lean, input = block(activation=activation)
    found = []
    for network in (model, lean):
        x = input.clone().requires_grad_()
        output = network(x)
        grads = torch.randn(3, *output.shape, generator=torch.Generator().manual_seed(0))
        found.append(torch.autograd.grad(output, [x, *network.parameters()], grads, is_grads_batched=True))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layer", ["convs.0", "norms.0", "acts.0", "convs.1", "stem", "stem_norm"])
def test_frozen_modes(layer: str) -> None:
    model, lean, input = block(activation="RPReLU")
    for network in (model, lean):
        network(input)
        network.get_submodule(layer).eval()
    assert_same(gradients(model, input), gradients(lean, input))


def double(x: Tensor) -> None:
    x.mul_(2)


def double_unseen(x: Tensor) -> None:
    with torch.no_grad():
        x.mul_(2)


@pytest.mark.parametrize("change", [double, double_unseen])
@pytest.mark.parametrize("layer", ["stem", "stem_norm", "convs.0", "norms.0", "acts.0", "convs.1", "norms.1"])
@pytest.mark.parametrize("inplace", [False, True])
def test_outputs_that_a_hook_changes(layer: str, change: Callable[[Tensor], None], inplace: bool) -> None:
    model, lean, input = block(activation="PReLU" if layer == "acts.0" else "none", inplace=inplace)

    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        change(output)

    for network in (model, lean):
        network.get_submodule(layer).register_forward_hook(hook)
    try:
        expected = gradients(model, input)
    except RuntimeError:  # autograd has noticed
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            gradients(lean, input)
        return
    assert_same(expected, gradients(lean, input))


@pytest.mark.parametrize("layer", ["convs.0", "norms.0", "convs.1", "norms.1"])
@pytest.mark.parametrize("exact", [True, False])
def test_changes_that_no_version_counts(layer: str, exact: bool) -> None:
    _, lean, input = block(exact)

    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        output.data.mul_(2)

    lean.get_submodule(layer).register_forward_hook(hook)
    for name, module in lean.named_modules():
        if isinstance(module, QuantizedLayer):
            module.__dict__["name_in_model"] = name  # as `qconv.convert` does
    names = r"layer 'convs\.\d' \(QConv2d, bireal\(\)\)|LeanBatchNorm2d\(.*\)"
    with pytest.raises(RuntimeError, match=rf"input of ({names}) can't be computed again: .* changed through \.data"):
        gradients(lean, input)


def test_hooks_of_gradients() -> None:
    model, lean, input = block()
    seen: list[list[Tensor]] = []
    for network in (model, lean):
        seen.append([])
        for module in (network.convs[1], network.norms[0]):
            module.register_full_backward_hook(lambda m, g, grads, to=seen[-1]: to.append(grads[0].clone()))
    assert_same(gradients(model, input), gradients(lean, input))
    assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))


@pytest.mark.parametrize("name", ["convs.0.weight", "norms.0.weight", "stem.weight", "acts.0.slope"])
def test_a_parameter_changed_between_forward_and_backward(name: str) -> None:
    _, lean, input = block(activation="RPReLU")
    output = lean(input)
    with torch.no_grad():
        lean.get_parameter(name).add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("part", [nn.BatchNorm2d(4), nn.ReLU(), nn.Hardtanh(), nn.MaxPool2d(2), RPReLU(4)], ids=str)
def test_no_lean_module_drops_a_second_derivative(part: nn.Module, exact: bool) -> None:
    """Nor where the gradient that comes in is a constant, as that of a sum."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), copy.deepcopy(part), nn.Conv2d(4, 4, 3))
    qconv.lean(qconv.convert(model, schemes.bwn(), skip=("first",), before_sign="keep"), exact=exact)
    x = torch.randn(2, 3, 8, 8, requires_grad=True)
    (grad,) = torch.autograd.grad(model[:2](x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice through a quantized or lean layer"):
        grad.square().sum().backward()


@pytest.mark.parametrize("shape", [(0, 3, 6, 6), (1, 3, 1, 1), (2, 3, 1, 7)])
def test_odd_batches(shape: tuple[int, ...]) -> None:
    model, lean, _ = block()
    input = torch.randn(shape)
    try:
        expected = gradients(model, input)
    except ValueError as error:
        with pytest.raises(ValueError, match=re.escape(str(error))):
            gradients(lean, input)
        return
    assert_same(expected, gradients(lean, input))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, -0.0])
def test_odd_values(value: float) -> None:
    """A gradient that meets NaN is 0 or NaN."""
    model, lean, input = block(activation="Hardtanh")
    input[1, :, 2] = value
    expected, got = gradients(model, input), gradients(lean, input)
    if value == 0:
        assert_same(expected, got)
    assert torch.equal(expected[0].isnan(), got[0].isnan())


def test_one_activation_in_many_places() -> None:
    model, lean, input = block(activation="Hardtanh")
    for network in (model, lean):
        network.acts = nn.ModuleList([network.acts[0]] * 3)
        network.convs = nn.ModuleList([network.convs[0]] * 3)
    assert_same(gradients(model, input), gradients(lean, input))


@pytest.mark.parametrize("exact", [False, True])
def test_an_optimizer_that_steps_within_the_backward(exact: bool) -> None:
    """It changes layers while those below them still compute their inputs again."""
    torch.manual_seed(0)
    model = Block(ACTIVATIONS["none"], schemes.irnet(), False)
    input, states = torch.randn(4, 3, 6, 6), []
    for network in (copy.deepcopy(model), qconv.lean(model, exact=exact)):
        optimizers: dict[Any, torch.optim.SGD] = {p: torch.optim.SGD([p], lr=0.1) for p in network.parameters()}

        def step(p: Tensor, optimizers: dict[Any, torch.optim.SGD] = optimizers) -> None:
            optimizers[p].step()
            optimizers[p].zero_grad()

        for p in network.parameters():
            p.register_post_accumulate_grad_hook(step)
        network(input).square().mean().backward()
        states.append(network.state_dict())
    torch.testing.assert_close(*states, **(dict(rtol=0, atol=0) if exact else dict(rtol=1e-4, atol=1e-5)))


class Chunks(nn.Module):
    """Outputs of one node of the graph, each with a layer, and sums with them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.convs = nn.ModuleList(qconv.QConv2d(8, 8, 3, padding=1, scheme=schemes.bireal()) for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        first, *others = self.stem(x).chunk(3)
        y = self.norms[0](self.convs[0](first))
        for conv, norm, part in zip(self.convs[1:], self.norms[1:], others, strict=True):
            y = norm(conv(y + part))
        return y


def test_samples_of_several_rows() -> None:
    layer, input = qconv.QLinear(8, 6, scheme=schemes.lsq()), torch.randn(2, 5, 8)
    layer(input)
    assert_same(gradients(layer, input), gradients(qconv.lean(copy.deepcopy(layer), exact=True), input))


def test_parts_of_one_tensor() -> None:
    torch.manual_seed(0)
    model, input = Chunks(), torch.randn(12, 3, 6, 6)
    assert_same(gradients(model, input), gradients(qconv.lean(copy.deepcopy(model), exact=True), input))


def test_a_stream_whose_rounding_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tensors are computed from the start of their stage."""
    monkeypatch.setattr(recipes, "_ROUNDING", 0.0)
    monkeypatch.setattr(recipes, "_ROUNDINGS", 0.0)
    model, lean, input = block(False)
    assert_near(gradients(model, input)[1], gradients(lean, input)[1])


def test_nothing_is_kept_after_the_backward() -> None:
    def hung(others: Sequence[Any] = ()) -> list[Any]:
        found = [each for each in gc.get_objects() if type(each).__name__ == "_Hung"]
        return [each for each in found if not any(each is other for other in others)]

    gc.collect()
    others = hung()  # of other tests, whose graphs may still be there
    _, lean, input = block(activation="RPReLU")
    loss = lean(input).sum()
    assert hung(others)
    loss.backward()
    assert not [x for each in hung(others) for x in each.tensors]


@pytest.mark.parametrize("activation", ["none", "Hardtanh", "PReLU", "RPReLU"])
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("scheme", [schemes.bnn(), schemes.bireal()], ids=str)
def test_fast_networks(scheme: qconv.Scheme, activation: str, inplace: bool, device: str) -> None:
    torch.manual_seed(0)
    model = Block(ACTIVATIONS[activation], scheme, inplace).to(device).to(memory_format=torch.channels_last)
    input = torch.randn(4, 3, 6, 6).to(device, memory_format=torch.channels_last)
    plain, fast = gradients(model, input), gradients(qconv.lean(copy.deepcopy(model)), input)
    assert are_equal(plain[0], fast[0])
    assert_near(plain[1], fast[1])  # a bias before a batch norm has a gradient of rounding errors alone


def test_codes_of_nan() -> None:
    """They are arbitrary numbers, and what is computed again from them is not compared."""
    torch.manual_seed(0)
    lean = qconv.lean(Block(nn.ReLU, schemes.lsq(), False))
    input = torch.randn(4, 3, 6, 6)
    lean(input).sum().backward()
    input[1, 0, 2, 3] = torch.nan
    gradients(lean, input)


def test_a_fork_keeps_bits_once() -> None:
    stem = nn.Conv2d(3, 64, 3)
    layers = [qconv.QConv2d(64, 8, 1, scheme=schemes.dorefa(4, 4)) for _ in range(3)]
    input = torch.randn(2, 3, 18, 18)
    sizes: list[int] = []

    class Fork(nn.Module):
        def __init__(self, count: int) -> None:
            super().__init__()
            self.layers, self.stem = nn.ModuleList(layers[:count]), stem

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            return torch.cat([layer(x) for layer in self.layers], 1)

    for count in (1, 3):
        model = Fork(count)
        expected, lean = gradients(model, input), qconv.lean(copy.deepcopy(model), exact=True)
        assert_same(expected, gradients(lean, input))
        sizes.append(kept(lean, input))
    assert sizes[1] == sizes[0]


def kept(model: nn.Module, input: Tensor) -> int:
    """The bytes that autograd keeps, without parameters and the input."""
    known = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), input)}
    sizes: dict[int, int] = {}
    alive: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            sizes[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(input).sum().backward()
    return sum(sizes.values())


@pytest.mark.parametrize("exact", mostly_nightly([False, True], (False,)))
@pytest.mark.parametrize(
    ("scheme", "activation", "times"),
    [
        (schemes.bnn(), nn.Hardtanh, 14),
        (schemes.bireal(), nn.Identity, 4),
        (schemes.reactnet(), RPReLU, 2),
        (schemes.lsq(4, 4), nn.ReLU, 3.3),
        (schemes.pact(4, 4), nn.ReLU, 6),
        (schemes.minmax(8, 8), nn.ReLU, 5),
    ],
    ids=str,
)
def test_what_is_kept(scheme: qconv.Scheme, activation: Any, times: float, exact: bool) -> None:
    model = qconv.convert(resnet20(3, 10, activation=activation, shortcut="per_conv"), scheme)
    input = torch.randn(16, 3, 32, 32)
    before = kept(model, input)
    assert kept(qconv.lean(model, exact=exact), input) * times < before


@pytest.mark.parametrize("quantized_stem", [False, True])
@pytest.mark.parametrize("exact", [False, True])
def test_narrow_strided_convolutions_of_one_pixel(exact: bool, quantized_stem: bool) -> None:
    """RepVGG's stem: with channels_last, torch's own gradient of its weight writes beyond its memory on some CPUs."""
    stem = qconv.QConv2d(3, 16, 1, stride=2, scheme=schemes.bnn()) if quantized_stem else nn.Conv2d(3, 16, 1, stride=2)
    model = nn.Sequential(stem, nn.Hardtanh(), qconv.QConv2d(16, 16, 3, padding=1, scheme=schemes.bnn()))
    plain, model = model, qconv.lean(copy.deepcopy(model), exact=exact)
    for size in (32, 33):
        input = torch.randn(4, 3, size, size)
        for _ in range(3):
            for each in (plain, model):
                each.zero_grad()
                each(input).sum().backward()
            for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-3)
