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
from settings import default_dtype, mostly_nightly
from test_freeze import trained
from torch import Tensor, nn
from torchvision.ops import DeformConv2d

import qconv
from qconv import schemes
from qconv.inference import FrozenModel, freeze, verify
from qconv.inference.build import build
from qconv.inference.verify import UNIT, compared, other_decisions, rounded
from qconv.scheme import Scheme

WIDTH = 32


def same(input: Tensor) -> Tensor:
    return input


class Net(nn.Module):
    """A residual network with random activations, groups and pooling; ``bn3`` stands where it can't be folded.

    `before` and `after` change what goes into a module, or comes out.
    """

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
        self.before: dict[str, Callable[[Tensor], Tensor]] = {}
        self.after: dict[str, Callable[[Tensor], Tensor]] = {}

    def apply_to(self, input: Tensor, *names: str) -> Tensor:
        for name in names:
            input = self.before.get(name, same)(input)
            input = self.after.get(name, same)(self.get_submodule(name)(input))
        return input

    def forward(self, input: Tensor) -> Tensor:
        first = self.apply_to(input, "stem", "bn0")
        inner = self.apply_to(first, "conv1", "bn1", "act1")
        summed = self.before.get("sum", same)(first) + self.apply_to(inner, "conv2", "bn2", "act2")
        last = self.apply_to(summed, "bn3", "pool", "act3", "conv3", "bn4", "act4")
        return self.head(last.mean((2, 3)))


def after(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Any], None]:
    return lambda network: network.after.update({name: change})


def before(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Any], None]:
    return lambda network: network.before.update({name: change})


def of(name: str, tensor: str, change: Callable[[Tensor], Any]) -> Callable[[Any], None]:
    return lambda network: change(getattr(network.get_submodule(name), tensor))


def off(name: str, tensor: str, part: float) -> Callable[[Any], None]:
    """A part of a tensor, in every third channel."""
    return of(name, tensor, lambda values: values[1::3].add_(part * values.abs().max()))


def set_one_code(weight: Tensor) -> None:
    weight[4, 5, 1, 1] = -weight.abs().max() * (1 if weight[4, 5, 1, 1] > 0 else -1)


def swap(values: Tensor) -> None:
    values[[2, 3]] = values[[3, 2]].clone()


def window(**change: Any) -> Callable[[Any], None]:
    """Another geometry of the last convolution."""
    return lambda network: [setattr(network.conv3, name, value) for name, value in change.items()]  # pyright: ignore


def swapped_layers(network: Any) -> None:
    network.conv2.weight, network.conv3.weight = network.conv3.weight, network.conv2.weight


FAULTS: dict[str, Callable[[Any], Any]] = {
    "one code": of("conv3", "weight", set_one_code),
    "one threshold": of("bn1", "bias", lambda bias: bias[4].add_(2)),
    "two channels": of("conv2", "weight", swap),
    "padding value": before("conv3", lambda x: nn.functional.pad(x[..., 1:-1], (1, 1), value=1.0)),
    "no residual": before("sum", torch.zeros_like),
    "another activation": lambda network: setattr(network, "act3", nn.Sigmoid()),
    "no activation": lambda network: setattr(network, "act4", nn.Identity()),
    "gamma": off("bn3", "weight", 0.2),
    "beta": off("bn3", "bias", 0.2),
    "mean": off("bn3", "running_mean", 0.2),
    "variance": off("bn3", "running_var", 0.2),
    "epsilon": lambda network: setattr(network.bn3, "eps", 0.1),
    "overwritten channel": of("bn3", "running_mean", lambda mean: mean[7].fill_(5)),
    "a scale": after("conv3", lambda x: x * 1.0001),
    "a bias": off("conv3", "bias", 1e-3),
    "stride": window(stride=(2, 2)),
    "dilation": window(dilation=(2, 2), padding=(2, 2)),
    "order of groups": before("conv3", lambda x: x.roll(WIDTH // 2, 1)),
    "order of outputs": after("conv2", lambda x: x.roll(1, 1)),
    "flipped sign": of("conv3", "weight", lambda weight: weight[6].neg_()),
    "another pooling": lambda network: setattr(network, "pool", nn.AvgPool2d(2)),
    "another layer": after("conv3", lambda x: x.flip(1)),
    "swapped layers": swapped_layers,
    "clipped range": before("conv3", lambda x: x.clamp(0.1, 0.5)),
    "zero point": before("conv3", lambda x: x - 0.3),
    "three channels negated": before("conv3", lambda x: torch.cat([-x[:, :3], x[:, 3:]], 1)),
    "transposed input": before("stem", lambda x: x.transpose(2, 3)),
    "first weights": of("stem", "weight", lambda weight: weight[::2].mul_(1.1)),
    "last weights": of("head", "weight", swap),
    "last bias": off("head", "bias", 1e-3),
}

BNN = schemes.bnn()


@pytest.fixture(scope="module", params=mostly_nightly([BNN, schemes.lsq(4, 4)], [BNN]), ids=str)
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
        assert all(part in shown for part in ("codes ≠", "error", *(layer.name for layer in checked.layers)))


@pytest.mark.parametrize("name", mostly_nightly(FAULTS, ("one threshold", "flipped sign", "no residual", "a scale")))
def test_planted_faults_are_found(network: tuple[nn.Module, FrozenModel, Tensor], name: str) -> None:
    """In a copy of the trained network, which is frozen instead."""
    model, frozen, input = network
    faulty = copy.deepcopy(model)
    with torch.no_grad():
        FAULTS[name](faulty)
    planted = build(faulty, input)
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
    for model_, shipped in ((frozen, model), (model, model), (frozen, frozen)):
        with pytest.raises(TypeError, match=r"model \(\w+\), frozen \(\w+\) must be the trained model, and what qconv"):
            verify(model_, shipped, input)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="inputs have NaN or inf in batch 1: pass typical inputs"):
        verify(model, frozen, [input, input.index_fill(3, torch.tensor(4), torch.nan)])


def test_outputs_that_are_no_floats() -> None:
    class Decides(nn.Sequential):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) > 0

    input = torch.randn(4, 3, 8, 8)
    model = trained(Decides(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(288, 4)), schemes.lsq(4, 4), input, skip=())
    assert freeze(model, example=input)(input).dtype == torch.bool


class Returns(nn.Sequential):
    """Returns more than a tensor."""

    more: Any = None

    def forward(self, input: Tensor) -> Any:
        return {"output": super().forward(input), "more": self.more}


@pytest.mark.parametrize(
    ("more", "words"), [(None, r"NoneType at \['more'\] of its dict"), ([3.0], r"float at \['more'\]\[0\] of its dict")]
)
def test_outputs_that_are_no_tensors(more: Any, words: str) -> None:
    input = torch.randn(4, 3, 8, 8)
    model: Any = trained(Returns(nn.Conv2d(3, 8, 3)), schemes.lsq(4, 4), input, skip=())
    model.more = more
    with pytest.raises(TypeError, match=f"model returns {words}; it must return tensors"):
        freeze(model, example=input)


class Recurrent(nn.Module):
    """A layer before one that refuses inputs of another dtype than its weights'."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.conv, self.rnn = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.GRU(8, 4)

    def forward(self, input: Tensor) -> Tensor:
        return self.rnn(self.conv(self.stem(input)).mean(2).permute(2, 0, 1))[0][-1]


def test_recurrent_layers() -> None:
    input = torch.randn(2, 3, 8, 8)
    freeze(trained(Recurrent(), schemes.lsq(4, 4), input, skip=()), example=input)  # which verifies it


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
    checked = verify(model, build(model, input), input)
    assert checked.equal, f"\n{checked}"
    assert sum(each.drift for each in checked.layers) == 0


def test_whole_numbers_as_inputs() -> None:
    """Their first function makes floats of them, which the exact run has in float64."""
    tokens = torch.randint(0, 10, (8, 5))
    model = nn.Sequential(nn.Embedding(10, 8), nn.Flatten(), nn.Linear(40, 16), nn.ReLU(), nn.Linear(16, 3))
    freeze(trained(model, schemes.lsq(4, 4), tokens, skip=()), example=tokens)  # which verifies it


class Masked(nn.Module):
    """Writes into tensors of float32 by places and by a mask, as attention does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 3, 3, padding=1)

    def forward(self, input: Tensor) -> Tensor:
        mask = torch.full((8, 8), -torch.inf)
        mask.masked_fill_(torch.ones(8, 8).tril().bool(), 0.0)
        hidden, kept = self.first(input), torch.zeros(len(input), 4, 8, 8)
        kept[:, :3] = hidden[:, 1:]
        return self.last(kept @ (hidden.mean(1) + mask).softmax(-1)[:, None]).mean((2, 3))


def test_writes_into_tensors_are_kept() -> None:
    input = torch.randn(6, 3, 8, 8)
    model = trained(Masked(), schemes.lsq(4, 4), input, skip=())
    found = verify(model, build(model, input), input)
    assert found.equal, f"\n{found}"
    assert max(each.error for each in found.layers) < 1e-5


class Step(nn.Module):
    def forward(self, input: Tensor) -> Tensor:
        return torch.where(input >= 0, 1.0, -1.0)


def test_codes_that_cancel_out_leave_no_residue() -> None:
    """Their sum is 0, of which a step takes the sign; with weights that were rounded, it would not be."""
    input, conv = torch.randn(64, 3, 12, 12), nn.Conv2d(8, 8, 3, bias=False)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), conv, Step(), nn.Conv2d(8, 4, 3))
    qconv.convert(model, schemes.lsq(4, 4), skip=("first",), check=False)
    qconv.calibrate(model, [input])
    found = verify(model.eval(), build(model, input), input)
    assert (conv(model[0](input)) == 0).any()
    assert found.equal, f"\n{found}"


def test_terms_that_cancel_out_explain_their_rounding() -> None:
    layer, exact = nn.Conv2d(1, 2, 1), torch.full((2, 2, 3, 3), 1e-6, dtype=torch.float64)
    nn.init.constant_(cast(Tensor, layer.bias), -1.0)  # of sums of 1.000001
    error = (rounded(exact, layer).double() - exact).abs()
    assert 2 * UNIT < error.min() <= error.max() < 8 * UNIT


def test_decisions_of_each_place() -> None:
    one = torch.zeros(3, 2, 2, 2)
    other = one.clone()
    other[1, 1, 0, 1], other[2, 0, 1, 1] = 1, 1  # another class in one place, and the same one
    assert other_decisions(one, other, 3).tolist() == [False, True, False]
    assert other_decisions(torch.tensor([[1.0], [1.0]]), torch.tensor([[2.0], [-1.0]]), 2).tolist() == [False, True]
    assert other_decisions(torch.tensor([1.0, 1.0]), torch.tensor([2.0, -1.0]), 2).tolist() == [False, True]
    assert other_decisions(torch.eye(3)[:2], torch.eye(3)[[0, 2]], 2).tolist() == [False, True]
    assert other_decisions(torch.eye(3), -torch.eye(3), 2).tolist() == [True, True]  # no rows of samples
    numbers = torch.tensor([1, 2])
    assert other_decisions(numbers, torch.tensor([1, 3]), 2).tolist() == [False, True]
    assert other_decisions(numbers == 1, torch.tensor([True, True]), 2).tolist() == [False, True]
    masks = torch.tensor([[True, False], [True, True]])
    assert other_decisions(masks.float(), masks[:1].expand(2, 2), 2).tolist() == [False, True]
    rows = torch.tensor([[[5.0, -0.01, 1.0]], [[0.0, 1.0, 2.0]]])
    assert other_decisions(rows, rows + torch.tensor([0.0, 0.02, 0.0]), 2).tolist() == [False, False]


def test_a_sample_with_nan_explains_no_other() -> None:
    wanted = torch.tensor([[1.0, torch.nan], [1.0, 2.0], [1.0, 2.0]])
    got = torch.tensor([[1.0, torch.nan], [1.0, 2.5], [torch.inf, 2.0]])
    others, is_close, off, largest = compared([got], [wanted], 3)
    assert (others.tolist(), is_close.tolist()) == ([False, False, True], [True, False, False])
    assert (off, largest) == (torch.inf, 2.0)


class Single(nn.Module):
    def __init__(self, sign: int) -> None:
        super().__init__()
        self.conv, self.sign = nn.Conv2d(3, 4, 3), sign

    def forward(self, x: Tensor) -> Tensor:
        return self.sign * self.conv(x).square().mean()


def test_one_number_for_all_samples() -> None:
    input = torch.randn(4, 3, 8, 8)
    model, opposite = (trained(Single(sign), schemes.lsq(4, 4), input, skip=()) for sign in (1, -1))
    assert verify(model, build(model, input), input).decisions == 0
    opposite.load_state_dict(model.state_dict())
    assert verify(model, build(opposite, input), input).decisions == 4


def small(scheme: Scheme, input: Tensor) -> nn.Module:
    layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten(), nn.Linear(64, 4)
    return trained(nn.Sequential(*layers), scheme, input)


def test_other_settings_of_torch(tmp_path: Path) -> None:
    input = torch.randn(4, 3, 8, 8)
    model = small(schemes.lsq(4, 4), input)
    expected = build(model, input)(input)
    with default_dtype(torch.float64), torch.device("meta"):
        frozen = build(model, input)
        assert verify(model, frozen, input).equal
        assert "0 of 4 predicted classes differ" in str(qconv.export_onnx(model, tmp_path / "model.onnx", input))
    assert torch.equal(frozen(input), expected)
    with torch.autocast("cpu", torch.bfloat16):
        checked = verify(model, build(model, input), input)
    assert checked.equal, f"\n{checked}"
    assert checked.difference < 1e-5


def test_a_forward_that_a_copy_would_share() -> None:
    input = torch.randn(6, 3, 5, 5)
    model: Any = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1))
    model = trained(model, schemes.lsq(4, 4), input, skip=())
    frozen, inner = build(model, input), model[1]
    forward = inner.forward
    message = r"^'1' \(ReLU\): its forward is a function that was put on the module. A copy would share it"
    for changed in (
        lambda x: 2 * forward(x),
        MethodType(lambda self, x: 2 * forward(x), inner),
        partial(lambda factor, x: factor * forward(x), 2),
    ):
        inner.forward = changed
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
    assert verify(model, build(model, input), input).equal
    assert qconv.summarize(model, (3, 5, 5)).macs > 0


def test_wrapped_models() -> None:
    input = torch.randn(2, 3, 8, 8)
    model = small(schemes.bnn(), input)
    frozen = build(model, input)
    for each in cast(tuple[nn.Module, ...], (torch.compile(model, backend="eager"), nn.DataParallel(model))):
        assert [told.name for told in build(each, input).layers] == ["3"]
        assert verify(each, frozen, input).equal
    part: Any = copy.deepcopy(model)
    part[1] = cast(Any, torch.compile)(part[1], backend="eager")
    assert verify(part, build(part, input), input).equal


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


def test_layers_of_more_arguments_than_an_input() -> None:
    input = torch.randn(2, 3, 8, 8)
    freeze(trained(Deformed(), schemes.lsq(4, 4), input), example=input)  # which verifies it


class Keeping(nn.Module):
    """It keeps a table of its first call, as EfficientViT's attention does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.table = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Parameter(torch.randn(5, 8))
        self.kept: dict[str, Tensor] = {}

    def forward(self, input: Tensor) -> Tensor:
        table = self.kept.setdefault("table", self.table[torch.tensor([4, 0, 1, 2, 1, 3, 0, 2])])
        return self.last(self.first(input)).mean((2, 3)) @ table


def test_a_network_that_keeps_a_tensor_of_its_first_call() -> None:
    input = torch.randn(2, 3, 8, 8)
    keeping = Keeping()
    model = trained(keeping, schemes.lsq(4, 4), input, skip=())
    keeping.kept.clear()
    assert verify(model, build(model, input), input).equal


def test_long_sums_of_floats_may_err_more() -> None:
    """Sums of 4,608 floats, one after the other, have errors of up to 13 times those of torch's."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 512, 1), nn.ReLU(), *(nn.Conv2d(512, 512, 3, padding=1) for _ in range(3))]
    model = qconv.convert(nn.Sequential(*layers), schemes.shift_q(), skip=["0"]).eval()
    images = torch.randn(4, 3, 4, 4)
    assert qconv.verify(model, qconv.freeze(model), images).equal
