"""`qconv.calibrate` batch by batch: what it reads, what it keeps, and with which batch norm."""

import copy
import gc
import sys
from collections import UserDict
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from conftest import same
from torch import Tensor, nn

import qconv
from qconv import Scheme, schemes
from qconv.loop.norms import is_trained
from qconv.quantizers import (
    LSQ,
    DSQInput,
    LSQInput,
    LSQPlus,
    LSQPlusInput,
    MinMaxInput,
    PercentileInput,
    Quantizer,
    Stages,
)
from qconv.quantizers.observers import Samples, Values
from qconv.quantizers.percentiles import Percentiles, extent

PICTURES = torch.randn(48, 3, 6, 6, generator=torch.Generator().manual_seed(1)) * torch.tensor([0.2, 1, 3]).view(
    3, 1, 1
)


def layer_with(make: Any) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(qconv.QConv2d(3, 4, 3, scheme=Scheme("input", make, schemes.bwn().weight)))


def quantizer_of(model: nn.Sequential) -> Quantizer:
    layer: Any = model[0]
    return layer.input_quantizer


# What is read, and what is kept


def test_it_stops_reading_at_max_samples() -> None:
    asked = []

    def batches() -> Iterator[tuple[Tensor, int]]:
        for number, batch in enumerate(PICTURES.split(8)):
            asked.append(number)
            yield batch, number

    model, expected = layer_with(MinMaxInput), layer_with(MinMaxInput)
    qconv.calibrate(model, batches(), max_samples=20)
    assert asked == [0, 1, 2]
    qconv.calibrate(expected, [PICTURES[:20]])  # of the third batch the first four
    assert quantizer_of(model).state_dict() == quantizer_of(expected).state_dict()


EXACT = {
    "minmax": MinMaxInput,
    "minmax symmetric": partial(MinMaxInput, symmetric=True),
    "minmax per channel": partial(MinMaxInput, per_channel=True),
    "dsq": DSQInput,
}
CLOSE = {
    "lsq": (partial(LSQInput, signed=True), 0.2),  # another sample of values
    "lsq per channel": (partial(LSQInput, signed=True, per_channel=True), 0.2),
    "lsq_plus": (LSQPlusInput, 0.2),  # another sample of values
    "percentile": (partial(PercentileInput, percentile=95.0), 0.005),
    "percentile symmetric": (partial(PercentileInput, percentile=95.0, symmetric=True), 0.005),
    "percentile per channel": (partial(PercentileInput, percentile=95.0, per_channel=True), 0.07),
    "stages": (partial(Stages, [(0, LSQInput), (0.5, partial(PercentileInput, percentile=95.0))]), 0.2),
}


@pytest.mark.parametrize("name", [*EXACT, *CLOSE])
def test_many_batches_give_what_one_gives(name: str) -> None:
    make, tolerance = (EXACT[name], 0.0) if name in EXACT else CLOSE[name]
    once, streamed, first = (layer_with(make) for _ in range(3))
    qconv.calibrate(once, [PICTURES])
    qconv.calibrate(streamed, PICTURES.split(7))
    first(PICTURES).sum().backward()  # the first training batch
    for key, value in quantizer_of(once).state_dict().items():
        torch.testing.assert_close(quantizer_of(streamed).state_dict()[key], value, rtol=tolerance, atol=0)
        searched = key.endswith("step") and name != "lsq_plus"  # LSQ's formula is meant for training
        assert quantizer_of(first).state_dict()[key].equal(value) is not searched


@pytest.mark.parametrize("make", [partial(LSQInput, 4), partial(LSQInput, 3, signed=True), LSQ, LSQPlus])
@pytest.mark.parametrize("per_channel", [False, True])
def test_calibrated_steps_have_the_least_error(make: Any, per_channel: bool) -> None:
    """Among 32 steps, to the fourth power; zeros and infinities keep what they had."""
    torch.manual_seed(0)
    x = torch.randn(4, 500) ** 3
    if "LSQInput" in str(make):
        quantizer = make(per_channel=per_channel)
        quantizer.build(4, 0)
        observer = quantizer.observer()
        observer.observe(x)
        quantizer.initialize_from(observer)
    else:
        quantizer = make(per_channel=per_channel)
        quantizer.initialize(x)
        quantizer.search_(x)
    rows = x if per_channel else x.view(1, -1)
    low, high = quantizer.ends
    for row, step in zip(rows, quantizer.step.flatten(), strict=True):
        tried = row.abs().max() / high * torch.arange(1, 33) / 32
        errors = [((row / each).round().clamp(low, high) * each - row).pow(4).mean() for each in tried]
        torch.testing.assert_close(step, tried[torch.stack(errors).argmin()])
    if "LSQInput" not in str(make):
        before = quantizer.step.clone()
        for value in (0.0, torch.inf, torch.nan):
            quantizer.search_(torch.full_like(x, value))
            assert quantizer.step.equal(before)


@pytest.mark.parametrize("p", [60.0, 90.0, 99.0, 99.9])
@pytest.mark.parametrize("symmetric", [False, True])
def test_a_streamed_percentile_is_that_of_all_values(p: float, symmetric: bool) -> None:
    x = torch.randn(50, 400).exp() - 1.2  # a long tail
    x[3, 7] = 1e7  # and one value that is wrong: it costs the others no resolution
    observer = Percentiles(p, symmetric=symmetric)
    for part in x.split(9):
        observer.observe(part)
    low, high = extent(x.view(1, -1), p, symmetric)
    torch.testing.assert_close(observer.extent(), (low, high), rtol=2**-8, atol=0)
    zeros = Percentiles(p, symmetric=symmetric)
    for part in x.clamp(min=0, max=0).split(9):
        zeros.observe(part)
    assert zeros.extent() == (0, 0)


def alive() -> int:
    """The bytes of all tensors; what is not young is frozen by the caller, and not looked at."""
    tensors = [each for each in gc.get_objects() if type(each) is Tensor]
    return sum({tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}.values())


class Own(Quantizer):
    """Has `initialize` alone, and is handed a bounded sample."""

    roles = ("input",)

    def __init__(self) -> None:
        super().__init__()
        self.calibrated = False
        self.seen = 0

    def initialize(self, x: Tensor) -> None:
        self.seen = len(x)
        self.calibrated = True

    def quantize(self, x: Tensor, *tensors: Tensor) -> Tensor:
        return x


class OwnRange(MinMaxInput):
    """Sets the range of another class by its own rule, from the tensor."""

    def initialize(self, x: Tensor) -> None:
        super().initialize(x.clamp(max=0.5))


def test_the_memory_does_not_grow_with_the_samples() -> None:
    per_channel = partial(PercentileInput, per_channel=True)
    kinds = MinMaxInput, PercentileInput, LSQInput, LSQPlusInput, DSQInput, per_channel
    schemes = [Scheme("input", kind) for kind in kinds]
    model = nn.Sequential(*(qconv.QConv2d(3, 3, 3, padding=1, scheme=scheme) for scheme in schemes))
    found = []

    def batches() -> Iterator[Tensor]:
        for number in range(40):
            if number in (4, 39):
                found.append(alive())
            yield torch.randn(8, 3, 32, 32)

    gc.freeze()
    try:
        assert len(qconv.calibrate(model, batches())) == len(kinds)
    finally:
        gc.unfreeze()
    assert found[1] <= found[0] + 2**16  # of the 24 MB that went by


def test_a_quantizer_with_initialize_alone_gets_a_bounded_sample() -> None:
    model = layer_with(Own)
    assert isinstance(quantizer_of(model).observer(), Samples)
    qconv.calibrate(model, [PICTURES[:5], PICTURES[:0], PICTURES[5:9]])
    assert quantizer_of(model).seen == 9
    samples = Samples(most=3 * 36 * 7)
    for part in PICTURES.split(3):
        samples.observe(part)
    assert samples.joined().equal(PICTURES[:7])
    large = Samples(most=5)
    large.observe(PICTURES)
    assert large.joined().equal(PICTURES[:1])


def test_an_initialize_of_a_subclass_is_called() -> None:
    model = layer_with(OwnRange)
    assert qconv.calibrate(model, PICTURES.split(8)) == ["0"]
    assert quantizer_of(model).get_buffer("high") == 0.5


def test_single_values_are_evenly_spaced_over_all_batches() -> None:
    values = Values(most=50)
    for part in torch.arange(1000.0).split(130):
        values.observe(part)
    assert 15 < values.kept.numel() <= 50
    assert values.kept.diff().unique().numel() == 1


class Keywords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = layer_with(MinMaxInput)[0]

    def forward(self, pictures: Tensor, scale: float = 1.0) -> Tensor:
        return self.conv(input=pictures * scale)


def test_keyword_inputs() -> None:
    model = Keywords()
    expected = layer_with(MinMaxInput)
    qconv.calibrate(expected, [2 * PICTURES[:16]])
    for kind in (dict, UserDict):
        batches = (kind(scale=2.0, pictures=part) for part in PICTURES.split(8))
        assert qconv.calibrate(model, batches, max_samples=16) == ["conv"]
        found: Any = model.conv
        assert found.input_quantizer.state_dict() == quantizer_of(expected).state_dict()


def test_a_single_picture_without_a_batch() -> None:
    model = layer_with(partial(MinMaxInput, per_channel=True))
    qconv.calibrate(model, [PICTURES[0]])
    expected = PICTURES[0].amax((1, 2))
    assert quantizer_of(model).get_buffer("high").equal(expected)


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    qconv.calibrate(layer_with(MinMaxInput), PICTURES.split(8))
    assert "calibrating" in capsys.readouterr().err
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False)
    qconv.calibrate(layer_with(MinMaxInput), PICTURES.split(8))
    assert capsys.readouterr().err == ""


# Batch norm


def deep(scheme: Scheme, *, layers: int = 6) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Conv2d(3 if first else 8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        for first in [True] + [False] * (layers - 1)
    ]
    model = nn.Sequential(*blocks, nn.Dropout(0.5), nn.Flatten(), nn.Linear(8 * 36, 5))
    return qconv.convert(model, scheme)


def highs(model: nn.Module) -> Tensor:
    return torch.stack([m.high for m in model.modules() if isinstance(m, MinMaxInput)])


def buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.named_buffers() if "quantizer" not in name}


def hooks_of(model: nn.Module) -> list[int]:
    return [len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules()]


@pytest.mark.parametrize("training", [True, False])
def test_untrained_batch_norm_gives_the_ranges_of_training(training: bool) -> None:
    by_hand, by_training = deep(schemes.minmax(8, 8)), deep(schemes.minmax(8, 8))
    before = buffers(by_hand)
    modes = [module.training for module in by_hand.train(training).modules()]
    qconv.calibrate(by_hand, [PICTURES])
    assert [module.training for module in by_hand.modules()] == modes
    assert same(buffers(by_hand), before)
    by_training(PICTURES)
    # Up to what 8 bits change in the layers before: with the untrained statistics the last range was a 30th of it.
    torch.testing.assert_close(highs(by_hand), highs(by_training), rtol=0.05, atol=0)


def test_a_batch_norm_that_gets_its_input_by_name() -> None:
    class Named(nn.BatchNorm2d):
        def __call__(self, input: Tensor) -> Tensor:
            return super().__call__(input=input)

    by_place, by_name = deep(schemes.minmax(8, 8)), deep(schemes.minmax(8, 8))
    for module in by_name.modules():
        if type(module) is nn.BatchNorm2d:
            module.__class__ = Named
    for model in (by_place, by_name):
        qconv.calibrate(model, [PICTURES])
    assert highs(by_name).equal(highs(by_place))


def test_trained_statistics_in_evaluation() -> None:
    model = deep(schemes.minmax(8, 8))
    for _ in range(60):
        model(PICTURES)
    in_training, in_evaluation, frozen = (copy.deepcopy(model) for _ in range(3))
    few = 2 * PICTURES[:4]
    qconv.calibrate(in_training, [few])
    qconv.calibrate(in_evaluation.eval(), [few])
    norms = [module for module in frozen.modules() if isinstance(module, nn.BatchNorm2d)]
    for norm in norms:
        norm.eval()
    qconv.calibrate(frozen, [few])
    assert frozen.training
    assert highs(frozen).equal(highs(in_evaluation))
    assert highs(in_evaluation)[0] > 1.5 * highs(in_training)[0]  # the batch itself divides by its own deviation


def test_a_single_value_of_a_channel_has_no_deviation() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Linear(4, 2))
    qconv.convert(model, schemes.minmax(8, 8), skip=["0"])
    assert qconv.calibrate(model, [torch.randn(6, 4), torch.randn(1, 4)]) == ["2", "3"]


def test_an_error_gives_batch_norm_its_statistics_back() -> None:
    model = deep(schemes.minmax(8, 8))
    before, hooks = buffers(model), hooks_of(model)
    with pytest.raises(RuntimeError, match="channels"):
        qconv.calibrate(model, [PICTURES, PICTURES[:, :2]])
    assert same(buffers(model), before)
    assert hooks_of(model) == hooks


def test_statistics_that_may_be_trained_are_named() -> None:
    images = torch.randn(64, 3, 8, 8)
    model: Any = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3))
    nn.init.constant_(model[0].weight, 0.5)
    torch.optim.swa_utils.update_bn([images] * 20, model)
    qconv.convert(model, schemes.minmax(8, 8), skip=("0",)).eval()
    with pytest.warns(UserWarning, match=r"batch norm has seen only few batches: '1' \(20 with momentum 0.1\)"):
        qconv.calibrate(model, [4 * images])
    model[1].num_batches_tracked.fill_(10**9)
    qconv.calibrate(model, [4 * images])
    assert torch.equal(model[3].input_quantizer.high, model[:3](4 * images).max())


def test_which_statistics_are_trained() -> None:
    norm = nn.BatchNorm2d(3)
    assert not is_trained(norm)
    for _ in range(43):
        norm(PICTURES)
    assert not is_trained(norm)  # 0.9^43 of them is what they were made with
    norm(PICTURES)
    assert is_trained(norm)
    assert norm.num_batches_tracked is not None
    norm.num_batches_tracked.zero_()  # as from a checkpoint that never had it
    assert is_trained(norm)
    for momentum in (None, 1.0):
        mean = nn.BatchNorm2d(3, momentum=momentum)
        mean(PICTURES)
        assert is_trained(mean)
    still = nn.BatchNorm2d(3, momentum=0.0)
    still.num_batches_tracked.fill_(5)  # pyright: ignore[reportOptionalMemberAccess]
    assert not is_trained(still)
    still.load_state_dict({**still.state_dict(), "running_mean": torch.ones(3)})
    assert is_trained(still)
    small = nn.BatchNorm2d(3)
    small(torch.zeros(2, 3, 4, 4))
    assert not is_trained(small)
    small.running_var[1] = 0.5  # pyright: ignore[reportOptionalSubscript]  # one batch leaves 0.9 of the 1
    assert is_trained(small)
    assert not is_trained(nn.BatchNorm2d(3, track_running_stats=False))
    assert not is_trained(nn.LazyBatchNorm2d())


def test_several_inputs_are_given_by_name() -> None:
    class OfTwo(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = qconv.QConv2d(3, 4, 3, scheme=schemes.lsq())

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.conv(x) + y

    model, x, y = OfTwo(), torch.rand(2, 3, 5, 5), torch.rand(2, 4, 3, 3)
    with pytest.raises(TypeError, match=r"model \(OfTwo\) can't be called with the first of a batch alone .*mappings"):
        qconv.calibrate(model, [(x, y)])
    assert qconv.calibrate(model, [{"x": x, "y": y}]) == ["conv"]
