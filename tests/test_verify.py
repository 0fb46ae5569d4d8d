"""`qconv.verify`: right models are equal, planted faults are found."""

import copy
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any, cast

import pytest
import torch
from settings import default_dtype
from test_freeze import trained
from torch import Tensor, nn
from torchvision.ops import DeformConv2d

import qconv
from qconv import schemes
from qconv.inference import FrozenModel, freeze, verify
from qconv.inference.float_error import SURE, Rounded, Rounding, difference
from qconv.inference.frozen_layers import BinaryConv2d, IntegerConv2d, IntegerLayer
from qconv.inference.layer_check import LayerPair
from qconv.inference.layer_input import check_input
from qconv.inference.one_magnitude import SignConv2d
from qconv.inference.rounding_rules import UNIT
from qconv.inference.verify import other_decisions
from qconv.kernels.operators import pack_weight, unpack_weight
from qconv.scheme import Scheme

WIDTH = 32


class Net(nn.Module):
    """A residual network with random activations, groups and pooling; ``bn3`` stands where it can't be folded."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        activations = nn.ReLU, nn.Hardtanh, nn.PReLU, nn.Hardswish
        self.stem, self.bn0 = nn.Conv2d(3, WIDTH, 3, padding=1), nn.BatchNorm2d(WIDTH)
        self.conv1 = nn.Conv2d(WIDTH, WIDTH, 3, padding=1, groups=draw.choice((1, 2)))
        self.bn1, self.act1 = nn.BatchNorm2d(WIDTH), nn.Hardtanh()
        self.conv2 = nn.Conv2d(WIDTH, WIDTH, 3, padding=1)
        self.bn2, self.act2 = nn.BatchNorm2d(WIDTH), draw.choice(activations)()
        self.bn3, self.pool = nn.BatchNorm2d(WIDTH), nn.MaxPool2d(2)
        self.act3 = draw.choice(activations[1:])()
        self.conv3 = nn.Conv2d(WIDTH, WIDTH, 3, padding=1)
        self.bn4, self.act4 = nn.BatchNorm2d(WIDTH), draw.choice(activations)()
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, input: Tensor) -> Tensor:
        first = self.bn0(self.stem(input))
        inner = self.act1(self.bn1(self.conv1(first)))
        summed = first + self.act2(self.bn2(self.conv2(inner)))
        last = self.act4(self.bn4(self.conv3(self.act3(self.pool(self.bn3(summed))))))
        return self.head(last.mean((2, 3)))


class Last(nn.Module):
    """A function behind a module."""

    def __init__(self, module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.module, self.change = module, change

    def forward(self, input: Tensor) -> Tensor:
        return self.change(self.module(input))


class First(Last):
    """A function before a module."""

    def forward(self, input: Tensor) -> Tensor:
        return self.module(self.change(input))


def around(name: str, change: Callable[[Tensor], Tensor], kind: type[Last] = Last) -> Callable[[Any], None]:
    return lambda network: network.set_submodule(name, kind(network.get_submodule(name), change))


def weights(network: Any, name: str, change: Callable[[Tensor], Any]) -> None:
    """Change the weights of a frozen convolution: signs, codes or floats."""
    conv = network.get_submodule(name)
    if isinstance(conv, BinaryConv2d):
        signs = unpack_weight(conv.weight, *conv.channels)
        change(signs)
        conv.weight, conv.tap_sums = pack_weight(signs, conv.window.groups)
    elif isinstance(conv, SignConv2d):
        signs = unpack_weight(conv.weight, *conv.channels)
        change(signs)
        conv.weight, _ = pack_weight(signs, conv.window.groups)
    else:
        change(conv.weight)


def set_one_code(weight: Tensor) -> None:
    weight[4, 5, 1, 1] = -1 if weight[4, 5, 1, 1] > 0 else 1  # of one filter


def swap(values: Tensor) -> None:
    values[[2, 3]] = values[[3, 2]]


def one_threshold(network: Any) -> None:
    conv = network.conv1
    if isinstance(conv, BinaryConv2d):
        cast(Tensor, conv.threshold)[0, 4] += 2
    else:  # of codes, the rounding
        conv.bias[4] += 0.25


def window(name: str, **change: Any) -> Callable[[Any], None]:
    """Another geometry."""

    def plant(network: Any) -> None:
        conv = network.get_submodule(name)
        if isinstance(conv, IntegerLayer | SignConv2d):
            conv.window = conv.window._replace(**change)
        elif "padding_value" in change:
            network.set_submodule(name, First(conv, lambda x: nn.functional.pad(x, (1, 1, 1, 1), value=1.0)))
            conv.padding = (0, 0)
        else:
            for key, value in change.items():
                setattr(conv, key, value[::2] if key == "padding" else value)

    return plant


def no_residual(network: Any) -> None:
    add = next(node for node in network.graph.nodes if "add" in str(node.target) and len(node.args) == 2)
    add.replace_all_uses_with(add.args[1])
    network.graph.erase_node(add)
    network.recompile()


def swapped_layers(network: Any) -> None:
    for name in ("weight", "tap_sums"):
        if hasattr(network.conv2, name):
            first, second = getattr(network.conv2, name), getattr(network.conv3, name)
            setattr(network.conv2, name, second)
            setattr(network.conv3, name, first)


def clipped(network: Any) -> None:
    conv = network.conv1
    if isinstance(conv, IntegerConv2d) and conv.high is not None:
        conv.high -= 1
    else:
        around("conv3", lambda x: x.clamp(0.1, 0.5), First)(network)


def other(name: str, module: nn.Module) -> Callable[[Any], None]:
    return lambda network: network.set_submodule(name, module)


def off(name: str, tensor: str, part: float) -> Callable[[Any], None]:
    """A part of a tensor, in every third channel."""

    def plant(network: Any) -> None:
        values = getattr(network.get_submodule(name), tensor)
        values[1::3] += part * values.abs().max()

    return plant


FAULTS: dict[str, Callable[[Any], Any]] = {
    "one code": lambda network: weights(network, "conv3", set_one_code),
    "one threshold": one_threshold,
    "two channels": lambda network: weights(network, "conv2", swap),
    "padding value": window("conv3", padding_value=1),
    "no residual": no_residual,
    "another activation": other("act3", nn.Sigmoid()),
    "no activation": other("act4", nn.Identity()),
    "gamma": off("bn3", "weight", 0.2),
    "beta": off("bn3", "bias", 0.2),
    "mean": off("bn3", "running_mean", 0.2),
    "variance": off("bn3", "running_var", 0.2),
    "epsilon": lambda network: setattr(network.bn3, "eps", 0.1),
    "overwritten channel": lambda network: network.bn3.running_mean.__setitem__(7, 5),
    "a scale": lambda network: (network.conv3.scale if hasattr(network.conv3, "scale") else network.conv3.weight).mul_(
        1.0001
    ),
    "a bias": off("conv3", "bias", 1e-3),
    "stride": window("conv3", stride=(2, 2)),
    "dilation": window("conv3", dilation=(2, 2), padding=(2, 2, 2, 2)),
    "order of groups": around("conv3", lambda x: x.roll(WIDTH // 2, 1), First),
    "order of outputs": around("conv2", lambda x: x.roll(1, 1)),
    "flipped sign": lambda network: weights(network, "conv3", lambda weight: weight[6].neg_()),
    "another pooling": other("pool", nn.AvgPool2d(2)),
    "a missing layer": other("conv3", nn.Identity()),
    "swapped layers": swapped_layers,
    "clipped range": clipped,
    "zero point": around("conv3", lambda x: x - 0.3, First),
    "three channels negated": around("conv3", lambda x: torch.cat([-x[:, :3], x[:, 3:]], 1), First),
    "transposed input": around("stem", lambda x: x.transpose(2, 3), First),
    "exchanged samples": around("stem", lambda x: x.flip(0), First),
    "first weights": lambda network: network.stem.weight[::2].mul_(1.1),
    "last weights": lambda network: swap(network.head.weight),
    "last bias": off("head", "bias", 1e-3),
}


@pytest.fixture(scope="module", params=[schemes.bnn(), schemes.lsq(4, 4), schemes.bwn()], ids=str)
def network(request: pytest.FixtureRequest) -> tuple[nn.Module, FrozenModel, Tensor]:
    """Trained and frozen, with an input."""
    torch.manual_seed(len(str(request.param)))
    input = torch.randn(2, 3, 8, 8)
    model = trained(Net(len(str(request.param))), request.param, input)
    return model, freeze(model), input


def test_without_a_fault_they_are_equal(network: tuple[nn.Module, FrozenModel, Tensor]) -> None:
    checked = verify(*network)
    assert checked.equal, f"\n{checked}"
    assert checked.of_bound < 0.5
    for width in (72, 80, 100):
        shown = checked.text(width)
        assert max(map(len, shown.splitlines())) <= width
        assert all(part in shown for part in ("unexplained", "error", *(layer.name for layer in checked.layers)))


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_found(network: tuple[nn.Module, FrozenModel, Tensor], name: str) -> None:
    model, frozen, input = network
    planted: Any = copy.deepcopy(frozen)
    with torch.no_grad():
        FAULTS[name](planted.network)
        assert not torch.equal(planted(input), frozen(input))
    checked = verify(model, planted, input)
    assert not checked.equal, f"\n{checked}"
    assert "not equal: " in str(checked)


def test_batches_as_loaders_give_them(network: tuple[nn.Module, FrozenModel, Tensor]) -> None:
    model, frozen, input = network
    labeled = input, torch.zeros(len(input), dtype=torch.long)
    counts = [verify(model, frozen, inputs).samples for inputs in (labeled, [labeled], [labeled, input])]
    assert counts == [2, 2, 4]
    with pytest.raises(TypeError, match=r"inputs must be tensors, or \(tensor, labels\), not dict"):
        verify(model, frozen, [{"image": input}])
    with pytest.raises(ValueError, match="inputs have NaN or inf in batch 1: pass typical inputs"):
        verify(model, frozen, [input, input.index_fill(3, torch.tensor(4), torch.nan)])


def test_outputs_that_are_no_floats() -> None:
    class Decides(nn.Sequential):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) > 0

    input = torch.randn(4, 3, 8, 8)
    model = trained(Decides(nn.Conv2d(3, 8, 3), *head(8)), schemes.lsq(4, 4), input, skip=())
    assert freeze(model, example=input)(input).dtype == torch.bool


def head(width: int) -> tuple[nn.Module, ...]:
    return nn.BatchNorm2d(width), nn.Hardtanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 4)


def test_a_few_codes_of_a_small_layer_are_found() -> None:
    input = torch.randn(16, 3, 4, 4)
    stem = nn.Conv2d(3, 8, 4), nn.BatchNorm2d(8), nn.PReLU()
    model = trained(nn.Sequential(*stem, nn.Conv2d(8, 8, 1), *head(8)), schemes.bnn(), input)
    frozen = freeze(model)
    sample = input[:1]
    assert verify(model, frozen, sample).equal
    frozen = copy.deepcopy(frozen)
    frozen.network.set_submodule("2", Last(nn.PReLU(), lambda x: torch.cat([-x[:, :3], x[:, 3:]], 1)))
    checked = verify(model, frozen, sample)
    assert not checked.equal
    assert checked.layers[0].unexplained == 3
    assert "not equal: '3' is the first layer that differs: 3 of its 8 inputs differ by more than rounding" in str(
        checked
    )


def test_one_channel_of_many_is_found() -> None:
    input = torch.randn(8, 3, 4, 4)
    stem = nn.Conv2d(3, 512, 4), nn.PReLU(), nn.BatchNorm2d(512)
    model = trained(nn.Sequential(*stem, nn.Conv2d(512, 64, 1), *head(64)), schemes.bnn(), input)
    frozen = freeze(model)
    assert verify(model, frozen, input).equal
    before, frozen = frozen(input), copy.deepcopy(frozen)
    network = frozen.network
    norm: Any = network.get_submodule("2")
    with torch.no_grad():
        values = norm(network.get_submodule("1")(network.get_submodule("0")(input)))[:, 5].flatten().sort().values
        norm.bias[5] -= values[3:5].mean()  # half of the samples get one sign
        count = int((values > 0).sum())
        assert not torch.equal(frozen(input), before)
    checked = verify(model, frozen, input)
    assert not checked.equal
    assert checked.layers[0].unexplained == abs(count - 4) > 0


EIGHT_BITS = {
    "dorefa": schemes.dorefa(8, 8),
    "pact": schemes.pact(8, 8),
    "n2uq": schemes.n2uq(8, 8),
    "dsq": schemes.dsq(8, 8),
    "lsq_plus": schemes.lsq_plus(8, 8),
    "fp8": schemes.fp8(),
    "adabin": schemes.adabin(),
}


@pytest.mark.parametrize("name", EIGHT_BITS)
def test_codes_at_an_edge(name: str) -> None:
    input = torch.randn(2, 3, 16, 16)
    model = trained(Net(1), EIGHT_BITS[name], input)
    frozen = freeze(model)
    stem: Any = frozen.find("stem")
    with torch.no_grad():
        stem.weight.mul_(1 + 2**-22)  # two units of rounding, and some codes fall to the other side
    checked = verify(model, frozen, input)
    assert checked.equal, f"\n{checked}"
    kinds = {"dorefa": "integer", "pact": "integer", "n2uq": "integer", "adabin": "offset"}
    assert checked.layers[0].arithmetic == kinds.get(name, "float")
    frozen = copy.deepcopy(frozen)
    stem = frozen.find("stem")
    with torch.no_grad():
        stem.weight.mul_(1.01)
    checked = verify(model, frozen, input)
    assert "not equal: 'conv1' is the first layer that differs" in str(checked)


class InPlace(nn.Module):
    """Changes what its layers were given, and what they gave."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.conv, self.last = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3)
        self.norm = nn.BatchNorm2d(8)

    def forward(self, input: Tensor) -> Tensor:
        input = self.stem(input)
        output = self.norm(self.conv(input))
        input += output
        input[:, :4].mul_(0.5)
        output = self.last(input)
        return nn.functional.relu_(output).mean((2, 3))


@pytest.mark.parametrize("scheme", [schemes.bnn(), schemes.lsq(4, 4), schemes.bwn()], ids=str)
def test_operations_in_place(scheme: Scheme) -> None:
    input = torch.randn(2, 3, 12, 12)
    model = trained(InPlace(), scheme, input)
    checked = verify(model, freeze(model), input)
    assert checked.equal, f"\n{checked}"
    assert sum(each.drift for each in checked.layers) == 0


def test_decisions_of_each_place() -> None:
    one = torch.zeros(3, 2, 2, 2)
    other = one.clone()
    other[1, 1, 0, 1], other[2, 0, 1, 1] = 1, 1  # another class in one place, and the same one
    assert other_decisions(one, other).tolist() == [False, True, False]
    assert other_decisions(torch.tensor([[1.0], [1.0]]), torch.tensor([[2.0], [-1.0]])).tolist() == [False, True]
    assert other_decisions(torch.tensor([1.0, 1.0]), torch.tensor([2.0, -1.0])).tolist() == [False, True]
    assert other_decisions(torch.eye(3)[:2], torch.eye(3)[[0, 2]]).tolist() == [False, True]
    rows = torch.tensor([[[5.0, -0.01, 1.0]], [[0.0, 1.0, 2.0]]])
    assert other_decisions(rows, rows + torch.tensor([0.0, 0.02, 0.0])).tolist() == [False, False]


@pytest.mark.parametrize("scheme", [schemes.bnn(), schemes.lsq(4, 4)], ids=str)
def test_other_defaults_of_torch(scheme: Scheme, tmp_path: Path) -> None:
    input = torch.randn(4, 3, 8, 8)
    model = trained(Net(0), scheme, input)
    expected = freeze(model)(input)
    with default_dtype(torch.float64), torch.device("meta"):
        frozen = freeze(model)
        assert verify(model, frozen, input).equal
        assert "0 of 4 predicted classes differ" in str(qconv.export_onnx(model, tmp_path / "model.onnx", input))
    assert torch.equal(frozen(input), expected)


@pytest.mark.parametrize("how", ["closure", "method", "partial"])
def test_a_forward_that_a_copy_would_share(how: str) -> None:
    input = torch.randn(6, 3, 5, 5)
    model: Any = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1))
    model = trained(model, schemes.lsq(4, 4), input, skip=())
    frozen, inner = freeze(model), model[1]
    forward = inner.forward
    inner.forward = {
        "closure": lambda x: 2 * forward(x),
        "method": MethodType(lambda self, x: 2 * forward(x), inner),
        "partial": partial(lambda factor, x: factor * forward(x), 2),
    }[how]
    message = r"^'1' \(ReLU\): its forward is a function that was put on the module. A copy would share it"
    with pytest.raises(TypeError, match=message):
        freeze(model)
    with pytest.raises(TypeError, match=message):
        verify(model, frozen, input)
    with pytest.raises(TypeError, match=message):
        qconv.sensitivity(model, input)
    with pytest.raises(TypeError, match=message):
        qconv.summarize(model, (3, 5, 5))


def test_a_forward_that_needs_no_tensor_is_no_hindrance() -> None:
    input = torch.randn(6, 3, 5, 5)
    model: Any = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Dropout(), nn.ReLU(), nn.Conv2d(8, 4, 1))
    model = trained(model, schemes.lsq(4, 4), input, skip=())
    model[1].forward = lambda x: x
    model[2].forward = partial(torch.clamp, min=0)
    assert verify(model, freeze(model), input).equal
    assert qconv.summarize(model, (3, 5, 5)).macs > 0


def test_wrapped_models() -> None:
    input = torch.randn(2, 3, 8, 8)
    model = trained(Net(0), schemes.bnn(), input)
    wrapped = model, torch.compile(model, backend="eager"), nn.DataParallel(model)
    for each in cast(tuple[nn.Module, ...], wrapped):
        assert [told.name for told in freeze(each).layers] == ["conv1", "conv2", "conv3"]
        assert verify(each, freeze(model), input).equal
    part = copy.deepcopy(model)
    part.act4 = cast(Any, torch.compile)(part.act4, backend="eager")
    assert verify(part, freeze(part), input).equal


@pytest.mark.parametrize("scheme", [schemes.bnn(), schemes.lsq(4, 4)], ids=str)
def test_autocast_is_switched_off(scheme: Scheme) -> None:
    input = torch.randn(2, 3, 8, 8)
    with torch.autocast("cpu", torch.bfloat16):
        model = trained(Net(0), scheme, input)
        checked = verify(model, freeze(model), input)
    assert checked.equal, f"\n{checked}"
    assert checked.difference < 1e-5


def test_calls_that_one_model_alone_makes() -> None:
    input = torch.randn(2, 3, 8, 8)
    model = trained(Net(0), schemes.bnn(), input)
    frozen = freeze(model)
    frozen.network.set_submodule("act4", Last(frozen.find("conv3"), nn.functional.relu))
    checked = verify(model, frozen, input)
    assert checked.layers[-1].unexplained == 2 * WIDTH * 4 * 4


@pytest.mark.parametrize(
    "module",
    [
        *(nn.Conv2d(16, 24, 3, groups=2), nn.ConvTranspose2d(16, 8, 3), nn.BatchNorm2d(16), nn.GroupNorm(4, 16)),
        *(nn.PReLU(16), nn.Hardswish(), nn.GELU(), nn.SiLU(), nn.Hardtanh(inplace=True), nn.Softmax(1)),
        *(nn.MaxPool2d(3, 2, 1), nn.AvgPool2d(2), nn.AdaptiveAvgPool2d(1), nn.Upsample(scale_factor=2)),
        *(nn.LayerNorm(9), nn.Linear(9, 5), nn.Flatten(), nn.ReflectionPad2d(1), nn.PixelShuffle(2)),
    ],
    ids=lambda module: type(module).__name__,
)
@torch.no_grad()
def test_the_error_of_float32_is_estimated(module: nn.Module) -> None:
    input = torch.randn(2, 16, 9, 9) + 1
    model = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), module).eval()
    with Rounding() as rounding:
        output = model(input)
        exact, error = rounding.of(output)
    wanted = copy.deepcopy(model).double()(input.double())
    torch.testing.assert_close(exact, wanted, rtol=1e-12, atol=1e-12)
    assert bool((difference(output, wanted) <= SURE * error).all())
    assert 0 < float(error.max()) < 1e-5 * float(wanted.abs().max())


def test_codes_of_one_channel_that_all_fall_to_one_side() -> None:
    layer = qconv.QConv2d(2, 2, 1, scheme=schemes.bnn())
    exact = torch.linspace(2, 6, 100, dtype=torch.float64).view(1, 1, 10, 10).repeat(1, 2, 1, 1)
    exact[:, 1] += 100
    wanted = Rounded(exact, torch.ones_like(exact))  # each may be off by 8, but rarely is by more than 1
    own = exact.float().clone()
    own[0, 0, :2] -= 7
    found = check_input(layer, wanted, own, False)
    assert found["unexplained"] == 0 < found["drift"] == 20
    assert found["of_drift"] == 20 / (3 + 100 / 4)
    own[0, 0] -= 7
    assert check_input(layer, wanted, own, False)["of_drift"] > 1


class Averaged(nn.Module):
    """The mean of each channel."""

    def forward(self, input: Tensor) -> Tensor:
        return input.flatten(2).mean(2)


@pytest.mark.parametrize("length", [20, 16])
@pytest.mark.parametrize("dim", [1, 3])
@pytest.mark.parametrize("scheme", [schemes.twn(), schemes.bwn(), schemes.dorefa(4, None)], ids=str)
def test_batch_norm_behind_float_layers_of_other_dimensions(scheme: Scheme, dim: int, length: int) -> None:
    conv: Any = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dim - 1]
    norm: Any = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[dim - 1](16)
    input = torch.randn(2, 3, length, *[4] * (dim - 1))
    layers = conv(3, 16, 3, padding=1), conv(16, 16, 3, padding=1), norm, nn.ReLU(), Averaged(), nn.Linear(16, 4)
    model = trained(nn.Sequential(*layers), scheme, input)
    norm.running_mean.copy_(2.0 ** torch.arange(16))
    frozen = freeze(model, example=input)
    (told,) = (each for each in frozen.layers if each.folded)
    pair = LayerPair(model, frozen, told, False)
    value = torch.zeros(1, 16, length, *[4] * (dim - 1), dtype=torch.float64)
    error = pair._folded(value, value).error[0].flatten(1)
    assert torch.equal(error, error[:, :1].expand_as(error))  # it is a channel's, wherever
    assert error.unique().numel() > 1


class Deformed(nn.Module):
    """A layer that is called with three arguments, one of them by its name."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.offset = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 18, 3, padding=1)
        self.deform, self.head = DeformConv2d(8, 8, 3, padding=1), nn.Linear(8, 4)

    def forward(self, input: Tensor) -> Tensor:
        first = self.stem(input)
        output = self.deform(first, self.offset(first), mask=first[:, :1].sigmoid().expand(-1, 9, -1, -1))
        return self.head(output.relu().mean((2, 3)))


@pytest.mark.parametrize("scheme", [schemes.lsq(4, 4), schemes.bnn(), schemes.bwn()], ids=str)
def test_layers_of_more_arguments_than_an_input(scheme: Scheme) -> None:
    input = torch.randn(2, 3, 8, 8)
    model = trained(Deformed(), scheme, input)
    frozen = freeze(model, example=input)
    checked = verify(model, frozen, input)
    assert checked.equal, f"\n{checked}"
    layer: Any = frozen.find("deform")
    getattr(layer, "weight_quantizer", layer).weight[3, 5, 1, 1] += 0.5  # where the input is quantized, too, or alone
    found = verify(model, frozen, input).first_difference
    assert found is not None
    assert found.name == "deform"


def test_the_number_of_terms_of_a_transposed_convolution() -> None:
    input, layer = torch.randn(2, 256, 4, 4), nn.ConvTranspose2d(256, 1, 2, stride=2)
    with torch.no_grad(), Rounding() as rounding:
        error = rounding.of(layer(input)).error
    with torch.no_grad():
        exact = layer.double()(input.double())
        layer.weight.square_(), layer.bias.square_()  # pyright: ignore
        sums = layer(input.double().square())
    torch.testing.assert_close(error, UNIT * (1024 * (exact.square() + sums) + exact.square()).sqrt())


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("skip", [("0",), ()])
def test_float_sums_may_begin_with_what_a_batch_norm_behind_them_takes_away(
    skip: tuple[str, ...], affine: bool
) -> None:
    """Each of their terms is then rounded at the size of its mean, as without AVX-512."""
    input = torch.randn(2, 64, 6, 6, 6)
    layers = nn.Conv3d(64, 16, 3, padding=1), nn.BatchNorm3d(16, affine=affine), nn.Conv3d(16, 4, 1)
    model: Any = trained(nn.Sequential(*layers), schemes.bwn(), input, skip=skip)
    model[1].running_mean.fill_(100)
    assert verify(model, freeze(model), input).equal
    rounding, sums = Rounding(), torch.randn(2, 16, 6, 6, 6)
    with torch.no_grad(), rounding:
        plain, behind = model[1](sums), model[1](layers[0](input))
    with torch.no_grad():
        at_zero = model[1](torch.zeros(1, 16, 1, 1, 1)).double()[0]
    allowed = 0.99 * UNIT * (64 * 27) ** 0.5 * at_zero.abs()
    assert (rounding.of(behind).error >= allowed).all()
    assert (rounding.of(plain).error < allowed).all()
