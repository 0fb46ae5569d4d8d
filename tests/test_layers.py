"""Quantized layers against their torch.nn twins, and everything that PyTorch users do with a layer."""

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn
from torch._dynamo.exc import Unsupported
from torch.func import functional_call
from torch.fx.proxy import TraceError
from torch.utils.checkpoint import checkpoint
from torchvision.models.feature_extraction import create_feature_extractor

import qconv
from qconv import QuantizedLayer, Scheme, schemes
from qconv.convert.decisions import QUANTIZED
from qconv.quantizers import DoReFaGradient

LAYERS: dict[str, tuple[type[nn.Module], dict[str, Any], tuple[int, ...]]] = {
    # float layer, arguments, input shape
    "1d": (nn.Conv1d, dict(kernel_size=3), (2, 4, 9)),
    "1d strided": (nn.Conv1d, dict(kernel_size=4, stride=3, padding=2, dilation=2), (2, 4, 17)),
    "2d": (nn.Conv2d, dict(kernel_size=3), (2, 4, 7, 6)),
    "2d padded": (nn.Conv2d, dict(kernel_size=(3, 2), padding=(1, 2), bias=False), (2, 4, 7, 6)),
    "2d strided": (nn.Conv2d, dict(kernel_size=3, stride=(2, 3), padding=1, dilation=(1, 2)), (2, 4, 9, 11)),
    "2d grouped": (nn.Conv2d, dict(kernel_size=3, groups=2, padding=1), (2, 4, 5, 5)),
    "2d depthwise": (nn.Conv2d, dict(kernel_size=3, groups=4, padding="same"), (2, 4, 5, 5)),
    "2d same, even, dilated": (nn.Conv2d, dict(kernel_size=(4, 3), dilation=(3, 2), padding="same"), (2, 4, 9, 8)),
    "2d valid": (nn.Conv2d, dict(kernel_size=3, padding="valid"), (2, 4, 5, 5)),
    "2d reflect": (nn.Conv2d, dict(kernel_size=3, padding=(1, 2), padding_mode="reflect"), (2, 4, 6, 6)),
    "2d replicate": (nn.Conv2d, dict(kernel_size=4, padding="same", padding_mode="replicate"), (2, 4, 6, 6)),
    "2d circular": (nn.Conv2d, dict(kernel_size=3, padding=1, padding_mode="circular"), (2, 4, 6, 6)),
    "3d": (nn.Conv3d, dict(kernel_size=(2, 3, 3), padding=1), (2, 4, 4, 5, 3)),
    "3d circular": (nn.Conv3d, dict(kernel_size=3, padding=1, padding_mode="circular", groups=2), (2, 4, 4, 5, 3)),
    "transposed 1d": (nn.ConvTranspose1d, dict(kernel_size=3, stride=2, output_padding=1), (2, 4, 5)),
    "transposed 2d": (nn.ConvTranspose2d, dict(kernel_size=3, stride=2, padding=1), (2, 4, 4, 5)),
    "transposed 2d grouped": (nn.ConvTranspose2d, dict(kernel_size=3, groups=2, dilation=2), (2, 4, 4, 5)),
    "transposed 3d": (nn.ConvTranspose3d, dict(kernel_size=2, stride=2, bias=False), (2, 4, 2, 3, 3)),
    "linear": (nn.Linear, {}, (6, 4)),
    "linear, more dimensions": (nn.Linear, {}, (2, 3, 4)),
}
# torch tells of the copy that it makes for an even kernel and padding="same"
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")
EVERY = pytest.mark.parametrize(("twin", "arguments", "shape"), LAYERS.values(), ids=LAYERS.keys())


def pair(twin: type[nn.Module], arguments: dict[str, Any], scheme: Scheme, **more: Any) -> tuple[Any, Any]:
    """A float layer and the quantized one with the same weights."""
    theirs = twin(4, 8, **arguments, **more)
    ours = QUANTIZED[twin](4, 8, **arguments, **more, scheme=scheme)
    assert isinstance(ours, twin)
    result = ours.load_state_dict(theirs.state_dict())
    assert not result.missing_keys
    assert not result.unexpected_keys
    return theirs, ours


@pytest.mark.parametrize("mode", [True, False], ids=["training", "evaluation"])
def test_tracers_take_a_quantized_layer_for_a_whole(mode: bool) -> None:
    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = qconv.QConv2d(4, 8, 3, scheme=schemes.bnn())
            self.up = qconv.QConvTranspose2d(8, 4, 2, scheme=schemes.ttq())
            self.deform = qconv.QDeformConv2dPack(4, 4, 3, padding=1, scheme=schemes.bwn())
            self.last = qconv.QLinear(4, 2, scheme=schemes.xnor())

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.deform(self.up(torch.tanh(self.conv(x)))).mean((2, 3)))

    network, input = Network().train(mode), torch.randn(2, 4, 7, 6, requires_grad=True)
    traced = torch.fx.symbolic_trace(network)
    called = [node.target for node in traced.graph.nodes if node.op == "call_module"]
    assert called == ["conv", "up", "deform", "last"]
    (expected,) = torch.autograd.grad(network(input).square().sum(), input)
    assert torch.equal(torch.autograd.grad(traced(input).square().sum(), input)[0], expected)
    with pytest.raises(TraceError, match=r"trace nn\.Sequential\(layer\)"):
        torch.fx.symbolic_trace(network.conv)


def test_features_of_a_converted_torchvision_network_are_extracted() -> None:
    model: Any = qconv.convert(torchvision.models.resnet18(num_classes=3), schemes.bnn()).eval()
    seen: dict[str, Tensor] = {}
    model.layer2[1].conv1.register_forward_hook(lambda module, args, output: seen.update(x=output))
    input = torch.randn(1, 3, 32, 32)
    model(input)
    extract = create_feature_extractor(model, {"layer2.1.conv1": "x"})
    assert torch.equal(extract(input)["x"], seen["x"])


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace.*is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")  # of shapes, as torch's own layers
def test_a_traced_layer_is_the_layer(method: Scheme) -> None:
    layer = qconv.QConv2d(4, 8, 3, scheme=method)
    input = torch.randn(2, 4, 6, 6, requires_grad=True)
    qconv.calibrate(layer, [input.detach()])
    traced: Any = torch.jit.trace(layer.eval(), input)
    for other in (torch.randn(2, 4, 6, 6), torch.full((2, 4, 6, 6), -0.0)):  # the trace has seen no -0.0
        assert torch.equal(traced(other), layer(other))
    (expected,) = torch.autograd.grad(layer(input).square().sum(), input)
    torch.testing.assert_close(torch.autograd.grad(traced(input).square().sum(), input)[0], expected)


@EVERY
def test_identity_equals_the_twin(twin: Any, arguments: Any, shape: Any) -> None:
    theirs, ours = pair(twin, arguments, schemes.identity())
    inputs = [torch.randn(shape, generator=torch.Generator().manual_seed(1)).requires_grad_() for _ in range(2)]
    outputs = [layer(input) for layer, input in zip((theirs, ours), inputs, strict=True)]
    assert outputs[1].equal(outputs[0])
    for output in outputs:
        output.square().sum().backward()
    grads = [[leaf.grad for leaf in (inputs[i], *net.parameters())] for i, net in enumerate((theirs, ours))]
    torch.testing.assert_close(*grads, rtol=1e-6, atol=1e-6)
    unbatched = torch.randn(shape[1:])
    assert ours(unbatched).equal(theirs(unbatched))


@EVERY
def test_empty_batch(twin: Any, arguments: Any, shape: Any) -> None:
    theirs, ours = pair(twin, arguments, schemes.bnn())
    input = torch.empty(0, *shape[1:], requires_grad=True)
    output = ours(input)
    if arguments.get("padding_mode") not in ("reflect", "replicate", "circular"):  # of which torch takes no empty batch
        assert output.shape == theirs(input).shape
    output.sum().backward()
    assert ours.weight.grad.eq(0).all()


@pytest.mark.parametrize("groups", [1, 2])
def test_transposed_scales_are_per_output_channel(groups: int) -> None:
    layer = qconv.QConvTranspose2d(4, 6, 3, groups=groups)
    w = layer.weight.detach()
    for out in range(6):
        group, channel = divmod(out, 6 // groups)
        filter = w[group * (4 // groups) : (group + 1) * (4 // groups), channel]
        found = layer.quantized_weight()[group * (4 // groups) : (group + 1) * (4 // groups), channel]
        torch.testing.assert_close(found, filter.abs().mean() * torch.where(filter >= 0, 1.0, -1.0))


def test_transposed_output_size() -> None:
    theirs, ours = pair(nn.ConvTranspose2d, dict(kernel_size=3, stride=2, padding=1), schemes.identity())
    input = torch.randn(2, 4, 5, 5)
    assert ours(input, output_size=[10, 9]).equal(theirs(input, output_size=[10, 9]))
    assert ours(input[0], output_size=[6, 10, 9]).equal(theirs(input[0], output_size=[6, 10, 9]))


@pytest.mark.parametrize("value", [0, 1, -1])
@pytest.mark.parametrize("padding", [1, (2, 0), "same"], ids=str)
def test_padding_value_surrounds_the_quantized_input(value: int, padding: Any) -> None:
    layer = qconv.QConv2d(3, 4, 4, padding=padding, scheme=schemes.bnn(), padding_value=value, dtype=torch.float64)
    input = torch.randn(2, 3, 6, 7, dtype=torch.float64, requires_grad=True)
    sides = layer._reversed_padding_repeated_twice
    leaf = torch.where(input >= 0, 1.0, -1.0).double().detach().requires_grad_()
    expected = F.conv2d(F.pad(leaf, sides, value=value), layer.quantized_weight(), layer.bias)
    output = layer(input)
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
    grad = torch.randn_like(output)
    expected.backward(grad)
    output.backward(grad)
    assert leaf.grad is not None
    torch.testing.assert_close(input.grad, leaf.grad * (input.abs() <= 1), rtol=1e-12, atol=1e-12)


def test_scale_map_against_unfold() -> None:
    layer = qconv.QConv2d(4, 6, (3, 2), 2, 1, groups=2, scheme=schemes.xnor(scale_map=True), dtype=torch.float64)
    input = torch.randn(2, 4, 7, 6, dtype=torch.float64)
    plain = copy.deepcopy(layer)
    plain.set_scheme(schemes.xnor())
    assert layer.bias is not None
    bias = layer.bias.view(-1, 1, 1)
    without = plain(input) - bias
    windows = F.unfold(input.abs(), (3, 2), padding=1, stride=2).view(2, 2, 2 * 6, -1).mean(2)
    expected = without * windows.view(2, 2, *without.shape[2:]).repeat_interleave(3, 1) + bias
    torch.testing.assert_close(layer(input), expected, rtol=1e-12, atol=1e-12)


# --- state


def test_float_checkpoint_there_and_back(method: Scheme) -> None:
    def quantized() -> nn.Sequential:
        return nn.Sequential(qconv.QConv2d(3, 4, 3, scheme=method), qconv.QLinear(4, 2, scheme=method))

    theirs, back = (nn.Sequential(nn.Conv2d(3, 4, 3), nn.Linear(4, 2)) for _ in range(2))
    ours, again = quantized(), quantized()
    ours.load_state_dict(theirs.state_dict())
    layer: Any
    for layer in ours:
        layer.weight_quantizer.settle_()  # until then, learned tensors replace no weight
    back.load_state_dict(qconv.float_state_dict(ours))
    for name, weight in back.state_dict().items():
        expected = theirs.state_dict()[name]
        if method.name.startswith("shift_ps") and name.endswith("weight"):  # what was learned, and is rounded
            smallest = -14 if "weight_bits=5" in method.name else -6
            expected = qconv.quantizers.round_power_of_two(expected, smallest, 0)
        assert weight.equal(expected)
    again.load_state_dict(ours.state_dict())
    assert all(a.equal(b) for a, b in zip(again.state_dict().values(), ours.state_dict().values(), strict=True))


@pytest.mark.parametrize("kind", [qconv.QConv2d, qconv.QConvTranspose2d, qconv.QLinear])
def test_a_quantizer_of_the_gradient(kind: Any) -> None:
    linear = kind is qconv.QLinear
    layer = kind(4, 4, *(() if linear else (3,)), scheme=schemes.bnn(), grad_quantizer=DoReFaGradient)
    assert isinstance(layer.grad_quantizer, DoReFaGradient)
    assert layer.scheme.name == "bnn() + grad DoReFaGradient(bits=6)"
    output = layer(torch.randn(4, 4) if linear else torch.randn(2, 4, 5, 5))
    grad = torch.randn_like(output)
    output.backward(grad)
    quantized = layer.grad_quantizer(grad)
    assert not quantized.equal(grad)
    torch.testing.assert_close(layer.bias.grad, quantized.sum(0 if linear else (0, 2, 3)))


def test_reset_parameters_sets_the_learned_tensors() -> None:
    layer = qconv.Conv2dShift(3, 4, 3)
    before = layer.quantized_weight()
    layer.reset_parameters()
    expected = qconv.quantizers.round_power_of_two(layer.weight.detach(), -14, 0)
    assert not layer.quantized_weight().equal(before)
    assert layer.quantized_weight().equal(expected)


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_device_and_dtype(method: Scheme, device: str) -> None:
    layer = qconv.QConv2d(3, 4, 3, device=device, dtype=torch.float64, scheme=method)
    for name, tensor in layer.state_dict().items():
        assert tensor.device.type == device or name.endswith(("calibrated", "_extra_state")), name  # Python's
        assert tensor.dtype == torch.float64 or not tensor.is_floating_point(), name
    output = layer(torch.ones(2, 3, 5, 5, device=device, dtype=torch.float64))
    assert (output.shape, output.device.type) == ((2, 4, 3, 3), device)


@pytest.mark.parametrize(
    ("layer", "name"),
    [
        (qconv.BNNConv2d(3, 4, 3, padding=1), "bnn()"),
        (qconv.BNNConv2d(3, 4, 3, padding=1, padding_value=1), "bnn(padding_value=1)"),
        (qconv.BWNConv2d(3, 4, 3, padding=1), "bwn()"),
        (qconv.QConv2d(3, 4, 3, padding=1), "bwn()"),
        (qconv.XNORConv2d(3, 4, 3, padding=1, scale_map=True), "xnor(scale_map=True)"),
        (qconv.Conv2dShift(3, 4, 3, padding=1), "shift_ps(weight_bits=5)"),
        (qconv.Conv2dShiftQ(3, 4, 3, padding=1, weight_bits=3), "shift_q(weight_bits=3)"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_named_layers(layer: qconv.QConv2d, name: str) -> None:
    assert layer.scheme.name == name
    assert layer(torch.randn(2, 3, 5, 5)).shape == (2, 4, 5, 5)
    assert name in repr(layer)


def test_conv2d_shift_takes_the_known_arguments() -> None:
    layer = qconv.Conv2dShift(
        4, 6, 3, stride=2, padding=1, dilation=1, groups=2, bias=False, padding_mode="circular", check_grad=True
    )
    assert layer.weight.dtype == torch.float64
    assert layer(torch.randn(2, 4, 8, 8, dtype=torch.float64)).shape == (2, 6, 4, 4)
    with pytest.raises(ValueError, match=r"dtype \(=torch.float32\) must be torch.float64 with check_grad=True"):
        qconv.Conv2dShift(4, 6, 3, check_grad=True, dtype=torch.float32)


# --- PyTorch's transformations, each against the plain run


def network(scheme: Scheme) -> nn.Sequential:
    return nn.Sequential(
        qconv.QConv2d(3, 8, 3, padding=1, scheme=scheme),
        nn.BatchNorm2d(8),
        qconv.QConv2d(8, 8, 4, padding="same", groups=2, scheme=scheme),
        nn.Flatten(),
        qconv.QLinear(8 * 36, 5, scheme=scheme),
    )


def run(model: Any, input: Tensor, owner: nn.Module | None = None) -> list[Tensor]:
    """Output, then the gradient of the input and of every parameter that is trained."""
    input = input.clone().requires_grad_()
    parameters = [p for p in (owner or model).parameters() if p.requires_grad]
    output = model(input)
    return [output.detach(), *torch.autograd.grad(output.float().square().mean(), [input, *parameters])]


INDUCTOR = "identity()", "xnor(scale_map=True)", "shift_q(weight_bits=3, fixed_point=(4, 6))"
"""Schemes whose networks are compiled to machine code, which takes seconds; quantizers are in test_quantizers.py."""


@pytest.mark.nightly
def test_compile(scheme: Scheme) -> None:
    # In float64, since the gradient of a bias before a batch norm is rounding and nothing else.
    model, input = network(scheme).double(), torch.randn(4, 3, 6, 6, dtype=torch.float64)
    expected = run(model, input)
    backend = "inductor" if scheme.name in INDUCTOR else "aot_eager"
    compiled = torch.compile(copy.deepcopy(model), fullgraph=True, backend=backend)
    for found, reference in zip(run(compiled, input), expected, strict=True):
        torch.testing.assert_close(found, reference, rtol=1e-9, atol=1e-10 * max(1.0, float(reference.abs().max())))


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo looks at it where a graph is broken
def test_compile_before_calibration() -> None:
    model = network(schemes.lsq(signed_input=True)).double()
    input = torch.randn(4, 3, 6, 6, dtype=torch.float64)
    eager = copy.deepcopy(model)
    torch._dynamo.reset()
    with pytest.raises(Unsupported, match=r"call qconv.calibrate\(model, batches\) before"):
        torch.compile(copy.deepcopy(model), fullgraph=True)(input)
    torch._dynamo.reset()
    for _ in range(2):
        compiled = torch.compile(model, backend="aot_eager")
        torch.testing.assert_close(run(compiled, input), run(eager, input), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(("scheme", "bias"), [(schemes.bnn(), False), (schemes.lsq(4, 4), True)], ids=str)
def test_outputs_that_the_model_changes_in_place(scheme: Scheme, bias: bool) -> None:
    """In compiled code, too, and with the gradients of a model that leaves them alone."""
    conv = qconv.QConv2d(3, 4, 3, padding=1, bias=bias, scheme=scheme).double()
    input = torch.randn(2, 3, 5, 5, dtype=torch.float64)
    qconv.calibrate(conv, [input])
    model, plain = nn.Sequential(conv, nn.ReLU(inplace=True)), nn.Sequential(copy.deepcopy(conv), nn.ReLU())
    expected = run(plain, input)
    for made in (model, torch.compile(copy.deepcopy(model), fullgraph=True, backend="aot_eager")):
        torch.testing.assert_close(run(made, input), expected, rtol=1e-12, atol=1e-12)


def test_compile_without_gradients() -> None:
    model, input = network(schemes.bnn()).eval(), torch.randn(4, 3, 6, 6)
    with torch.no_grad():
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")(input)
        torch.testing.assert_close(compiled, model(input), rtol=1e-5, atol=1e-5)


def test_autocast_runs_in_that_dtype(method: Scheme) -> None:
    layer = qconv.QConv2d(3, 4, 3, padding=1, scheme=method)
    input = torch.randn(2, 3, 5, 5)
    qconv.calibrate(layer, [input])
    with torch.autocast("cpu", torch.bfloat16):
        found = run(layer, input)
        again = run(layer, input.bfloat16())
    assert found[0].dtype == torch.bfloat16
    assert all(parameter.dtype == torch.float32 for parameter in layer.parameters())
    assert method.scale_map or found[0].equal(again[0])  # the map is taken from the input before it is rounded


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_is_near_float32(scheme: Scheme, dtype: torch.dtype) -> None:
    layer = qconv.QConv2d(3, 4, 3, padding=1, scheme=scheme)
    input = torch.randn(2, 3, 5, 5)
    with torch.autocast("cpu", dtype):
        found = run(layer, input)
    for mine, reference in zip(found, run(layer, input), strict=True):
        torch.testing.assert_close(mine.float(), reference, rtol=0.1, atol=0.03 * float(reference.abs().max()))


def test_channels_last(method: Scheme) -> None:
    # One layer in float64: what a sum in another order leaves could take the next layer's input to another level.
    layer = qconv.QConv2d(4, 8, 4, padding="same", groups=2, scheme=method, dtype=torch.float64)
    input = torch.randn(3, 4, 6, 6, dtype=torch.float64)
    expected = run(layer, input)
    found = run(layer.to(memory_format=torch.channels_last), input.to(memory_format=torch.channels_last))
    for mine, reference in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-9, atol=1e-10 * max(1.0, float(reference.abs().max())))


def test_activation_checkpointing(method: Scheme) -> None:
    model, input = network(method), torch.randn(4, 3, 6, 6)
    expected = run(model, input)
    found = run(lambda x: checkpoint(model, x, use_reentrant=False), input, owner=model)
    assert all(map(torch.equal, found, expected))


def test_a_checkpoint_in_a_graph_that_is_differentiated() -> None:
    """Whose saved tensors may be read once."""
    model, input = network(schemes.bnn()), torch.randn(4, 3, 6, 6)
    expected = torch.autograd.grad(model(input).square().sum(), list(model.parameters()))
    output = checkpoint(model, input, use_reentrant=False)
    found = torch.autograd.grad(output.square().sum(), list(model.parameters()), create_graph=True)
    assert all(map(torch.equal, found, expected))


def test_buffers_stay_in_their_order(method: Scheme) -> None:
    """By which averages of models and broadcasts between processes pair them up."""
    model, other = network(method), network(method)
    before = [name for name, _ in model.named_buffers()]
    for assign in (False, True):
        model.load_state_dict(other.state_dict(), assign=assign)
        assert [name for name, _ in model.named_buffers()] == before
    assert list(model.state_dict()) == list(other.state_dict())


def test_weights_reset_before_a_compiled_forward() -> None:
    models, input = [], torch.randn(4, 3, 6, 6)
    for _ in range(2):
        torch.manual_seed(1)
        models.append(network(schemes.lsq(2, None)))
        for module in models[-1].modules():
            if isinstance(module, QuantizedLayer):
                nn.init.normal_(module.weight, std=3)
    assert torch.compile(models[0], backend="eager", fullgraph=True)(input).equal(models[1](input))


def test_functional_call(method: Scheme) -> None:
    model, other, input = network(method), network(method), torch.randn(4, 3, 6, 6)
    state = {**dict(other.named_parameters()), **dict(other.named_buffers())}
    assert functional_call(model, state, (input,)).equal(other(input))
    assert not model(input).equal(other(input))


def test_a_range_is_not_lost_with_the_parameters_of_a_call() -> None:
    layer = qconv.QConv2d(3, 4, 3, scheme=schemes.lsq(4, 4))
    with pytest.raises(
        RuntimeError, match=r"QConv2d.* runs with other tensors .*: call qconv.calibrate\(model, batches\)"
    ):
        functional_call(layer, {name: p.clone() for name, p in layer.named_parameters()}, (torch.randn(2, 3, 5, 5),))
    assert not layer.input_quantizer.calibrated


@pytest.mark.parametrize("scheme", [schemes.minmax(), schemes.lsq(), schemes.ewgs(2, 2)], ids=str)
def test_a_range_is_not_lost_with_the_buffers_of_a_call(scheme: Scheme) -> None:
    """They are cloned so that batch norm keeps its statistics; memory of the clones may be used again."""
    layer, x = qconv.QConv2d(3, 4, 3, scheme=scheme), torch.randn(4, 3, 8, 8)
    other = copy.deepcopy(layer)
    for _ in range(3):
        output = functional_call(layer, {name: b.clone() for name, b in layer.named_buffers()}, (x,))
        assert output.equal(copy.deepcopy(other)(x))
    assert layer(3 * x).equal(other(3 * x))
    assert layer.input_quantizer.calibrated
    assert layer.state_dict().keys() == other.state_dict().keys()
    assert all(layer.state_dict()[name].equal(value) for name, value in other.state_dict().items())


def test_a_transform_sets_no_range() -> None:
    layer = qconv.QConv2d(3, 4, 3, scheme=schemes.lsq())
    with pytest.raises(RuntimeError, match=r"QConv2d.* runs inside a transform of torch.func, .*call qconv.calibrate"):
        torch.func.grad(lambda x: layer(x).sum())(torch.randn(2, 3, 5, 5))


@pytest.mark.parametrize("scheme", [schemes.lsq(), schemes.lsq_plus(), schemes.dsq(2, 2), schemes.ewgs(2, 2)], ids=str)
@pytest.mark.parametrize("lean", [False, True])
def test_a_layer_that_is_called_again_after_a_blank_input(scheme: qconv.Scheme, lean: bool) -> None:
    """As a recurrent network does at its first step: the second call sets the range that the first one waited for."""
    layer: Any = qconv.QLinear(8, 8, scheme=scheme)
    if lean:
        layer = qconv.lean(layer)
    output = layer(torch.zeros(4, 8))
    output = layer(torch.tanh(output + torch.randn(4, 8)))
    assert layer.input_quantizer.calibrated
    output.square().mean().backward()
    assert layer.weight.grad.isfinite().all()


@pytest.mark.parametrize("scheme", [schemes.reactnet(), schemes.lsq(per_channel=True), schemes.minmax()], ids=str)
def test_one_sample_without_a_batch(scheme: qconv.Scheme) -> None:
    layer = qconv.QLinear(64, 8, scheme=scheme)
    layer(torch.randn(4, 64))
    x = torch.randn(64)
    torch.testing.assert_close(layer(x), layer(x[None])[0])


def test_inputs_with_the_negative_bit() -> None:
    x = torch.randn(2, 3, 5, 5, dtype=torch.complex64).conj().imag
    assert x.is_neg()
    layer = qconv.QConv2d(3, 4, 3, scheme=schemes.bnn())
    assert layer(x).equal(layer(x.resolve_neg()))


@pytest.mark.parametrize("scheme", [schemes.bnn(), schemes.dorefa(2, 2), schemes.lsq(4, None)], ids=str)
@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (partial(qconv.QLinear, 4, 3), (2, 4)),
        (partial(qconv.QLinear, 4, 3), (2, 3, 4)),
        (partial(qconv.QLinear, 4, 3), (4,)),
        (partial(qconv.QConvTranspose2d, 4, 6, 2, groups=2), (2, 4, 3, 3)),
        (partial(qconv.QConv2d, 4, 6, 2, groups=2), (2, 4, 3, 3)),
    ],
    ids=["rows", "sequences", "one", "transposed", "grouped"],
)
def test_gradients_in_batches(make: Any, shape: tuple[int, ...], scheme: qconv.Scheme) -> None:
    layer, x = make(scheme=scheme).eval(), torch.randn(shape, requires_grad=True)
    output = layer(x)
    grads = torch.randn(3, *output.shape)
    tensors = [x, *(parameter for parameter in layer.parameters() if parameter.requires_grad)]
    found = torch.autograd.grad(output, tensors, grads, is_grads_batched=True, retain_graph=True)
    for number, grad in enumerate(grads):
        expected = torch.autograd.grad(output, tensors, grad, retain_graph=True)
        torch.testing.assert_close([own[number] for own in found], [*expected])


def test_func_grad() -> None:
    model, input = network(schemes.bnn()).eval(), torch.randn(4, 3, 6, 6)
    parameters = dict(model.named_parameters())
    grads = torch.func.grad(lambda p: functional_call(model, p, (input,)).square().mean())(parameters)
    expected = torch.autograd.grad(model(input).square().mean(), list(parameters.values()))
    assert all(found.equal(reference) for found, reference in zip(grads.values(), expected, strict=True))


def test_every_float_type_has_its_layer() -> None:
    assert all(issubclass(ours, theirs) and issubclass(ours, QuantizedLayer) for theirs, ours in QUANTIZED.items())
    assert {twin for twin, _, _ in LAYERS.values()} == QUANTIZED.keys(), "name a new one here and in qconv/layers"
    assert {kind.__name__ for kind in QUANTIZED.values()} <= {*dir(qconv)}, "name them in qconv/__init__.py"


@pytest.mark.parametrize(("twin", "arguments", "shape"), {row[0]: row for row in LAYERS.values()}.values())
def test_a_frozen_layer_and_its_file_are_the_layer(twin: Any, arguments: Any, shape: Any, tmp_path: Path) -> None:
    layer, input, file = QUANTIZED[twin](4, 8, **arguments, scheme=schemes.bnn()), torch.randn(shape), tmp_path / "file"
    for parameter in layer.parameters():
        nn.init.normal_(parameter)  # what starts at 0 would not be missed
    model = nn.Sequential(layer).eval()
    expected = model(input)
    torch.testing.assert_close(qconv.freeze(model)(input), expected)
    qconv.save_packed(model, file)
    assert qconv.load_packed(file, nn.Sequential(twin(4, 8, **arguments)))(input).equal(expected)
