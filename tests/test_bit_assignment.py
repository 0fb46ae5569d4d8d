"""Bits for a budget, against the exact Hessian and all combinations."""

import copy
import itertools
import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import same
from torch import Tensor, nn
from torch.nn.utils import prune

import qconv
from qconv import schemes
from qconv.after_training.bit_assignment import BitAssignment, Choice
from qconv.after_training.hessian import traces
from qconv.after_training.integer_program import cheapest
from qconv.ground.table import read_csv
from qconv.layers import QuantizedLayer

CHOICES = [schemes.lsq(2, 4), schemes.lsq(4, 4), schemes.lsq(8, 8)]
STAGED = schemes.two_stage(schemes.lsq(2, 8))


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Tanh(),
        nn.Conv2d(3, 2, 3, stride=2), nn.Softplus(),
        nn.Flatten(), nn.Linear(8, 3),
    ).eval()  # fmt: skip


def pictures(count: int = 12) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.rand(count, 1, 7, 7, generator=generator), torch.arange(count) % 3


def assign(model: nn.Module, *data: Any, **options: Any) -> BitAssignment:
    return qconv.assign_bits(model, *data, **{"choices": CHOICES, "skip": (), "max_bytes": 10**6, **options})


@pytest.mark.nightly
@pytest.mark.parametrize("labelled", [True, False])
def test_traces_are_those_of_the_exact_hessian(labelled: bool) -> None:
    model = network().double()
    images, labels = pictures(4)
    images = images.double()
    converted = qconv.convert(copy.deepcopy(model), schemes.lsq(4, 8), skip=()).eval()
    found = traces(converted, [(images, labels if labelled else None)], 2000, 0)
    assert list(found) == ["0", "3", "6"]
    target = labels if labelled else model(images).detach().softmax(1)
    rest, weight = nn.Sequential(*list(model)[3:]), model.get_parameter("3.weight")

    def loss_of_weight(weight: Tensor) -> Tensor:
        return F.cross_entropy(torch.func.functional_call(model, {"3.weight": weight}, images), target)

    of_weight, (of_input,) = found["3"]  # of a sample, which has a quarter of the loss
    assert of_weight == pytest.approx(exact_trace(loss_of_weight, weight), rel=0.1)
    input = nn.Sequential(*list(model)[:3])(images)
    assert of_input / 4 == pytest.approx(exact_trace(lambda x: F.cross_entropy(rest(x), target), input), rel=0.1)


def exact_trace(loss: Callable[[Tensor], Tensor], at: Tensor) -> float:
    """The mean of the diagonal of the Hessian."""
    hessian: Any = torch.autograd.functional.hessian(loss, at.detach())
    exact = hessian.reshape(at.numel(), at.numel()).diagonal().mean().item()
    assert exact > 0
    return exact


class Shortcut(nn.Module):
    """The tensor that the convolution takes goes past it, too, and is written to later."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.conv, self.fc = nn.Conv2d(1, 2, 3), nn.Conv2d(2, 2, 3, padding=1), nn.Linear(50, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        y = self.conv(x).tanh()
        x += y
        return self.fc(x.flatten(1))


@pytest.mark.nightly
def test_the_curvature_of_a_shortcut_does_not_count() -> None:
    model = Shortcut().double().eval()
    images, labels = pictures(4)
    images = images.double()
    found = traces(qconv.convert(copy.deepcopy(model), schemes.lsq(4, 8), skip=()), [(images, labels)], 2000, 0)
    x = model.first(images).detach()

    def loss(input: Tensor) -> Tensor:
        return F.cross_entropy(model.fc((x + model.conv(input).tanh()).flatten(1)), labels)

    assert found["conv"][1][0] / 4 == pytest.approx(exact_trace(loss, x), rel=0.1)


@pytest.mark.nightly
def test_each_call_of_a_layer_counts() -> None:
    """With batches of several sizes: the estimate is that of one batch."""
    torch.manual_seed(0)
    conv = nn.Conv2d(2, 2, 3, padding=1)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), conv, nn.Tanh(), conv, nn.Tanh(), nn.Flatten(), nn.Linear(50, 3)).eval()
    images, labels = pictures(9)
    parts = [(images[:8], labels[:8]), (images[8:], labels[8:])]
    options: Any = {"probes": 400, "choices": [schemes.lsq(8, 2), schemes.lsq(8, 3)]}
    whole, split = (assign(model, [*data], **options) for data in ([(images, labels)], parts))
    for one, other in zip(whole.rows, split.rows, strict=True):
        assert other.cost == pytest.approx(one.cost, rel=0.25)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.3, 0.5, 0.8, 1.0])
def test_the_program_finds_the_best_of_all_combinations(share: float) -> None:
    generator = torch.Generator().manual_seed(3)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    others = {
        f"layer{number}": tuple(
            Choice(f"layer{number}", "", bits, bits, 4.0**-bits * draw(1, 50), bits * draw(9, 99), bits * draw(9, 99))
            for bits in (2, 4, 8)
        )
        for number in range(5)
    }  # fmt: skip
    sums = [sum(choice.packed_bytes for choice in each) for each in itertools.product(*others.values())]
    most = min(sums) + round(share * (max(sums) - min(sums)))
    of_bops = [sum(choice.bops for choice in each) for each in itertools.product(*others.values())]
    most_bops = round(1.2 * sum(of_bops) / len(of_bops))
    for budgets in ({"packed_bytes": (most + 7, 7)}, {"packed_bytes": (most, 0), "bops": (most_bops, 0)}):
        fits = [
            each
            for each in itertools.product(*others.values())
            if sum(choice.packed_bytes for choice in each) <= most
            and ("bops" not in budgets or sum(choice.bops for choice in each) <= most_bops)
        ]
        if not fits:
            with pytest.raises(ValueError, match="no assignment meets packed_bytes, bops together"):
                cheapest(others, budgets)
            continue
        taken = cheapest(others, budgets)
        chosen = [others[name][index] for name, index in taken.items()]
        assert sum(choice.packed_bytes for choice in chosen) <= most
        best = min(sum(choice.cost for choice in each) for each in fits)
        assert sum(choice.cost for choice in chosen) == pytest.approx(best, rel=1e-9)


@pytest.mark.parametrize("seed", range(8))
def test_costs_of_many_magnitudes(seed: int) -> None:
    """As of a layer that must not be binary, beside many to which it does little."""
    draw = torch.Generator().manual_seed(seed)
    exponents = (-9 + 4 * torch.rand(6, 3, generator=draw)).tolist()
    others = {
        f"layer{number}": tuple(
            Choice(f"layer{number}", "", bits, bits, 100.0 if number == 0 and not place else 10**exponent, bits, bits)
            for place, (bits, exponent) in enumerate(zip((1, 4, 8), each, strict=True))
        )
        for number, each in enumerate(exponents)
    }
    taken = cheapest(others, {"packed_bytes": (26, 0)})
    fits = (each for each in itertools.product(*others.values()) if sum(choice.packed_bytes for choice in each) <= 26)
    best = min(sum(choice.cost for choice in each) for each in fits)
    assert sum(others[name][index].cost for name, index in taken.items()) == pytest.approx(best, rel=1e-6)


@pytest.mark.parametrize(("below", "free"), [(1, False), (100, False), (0, True)])
def test_budgets_are_kept_to_the_last_operation(below: int, free: bool) -> None:
    """They are larger than what the solver tells apart."""
    sizes, costs = [(10**10, 2 * 10**10)] * 4 + [(1000, 2000)], (9, 1)
    others = {
        f"layer{number}": tuple(
            Choice(f"layer{number}", "", 1, 1, cost, size, size) for size, cost in zip(each, costs, strict=True)
        )
        for number, each in enumerate(sizes)
    }
    least = sum(each[0] for each in sizes)
    most = least if free else sum(each[1] for each in sizes) - below
    taken = cheapest(others, {"bops": (most, 0)})
    chosen = [others[name][index] for name, index in taken.items()]
    assert sum(choice.bops for choice in chosen) <= most
    assert sum(choice.cost for choice in chosen) == (45 if free else 13)


def test_nan_is_named() -> None:
    costs = {"first": (0.1, 0.2), "second": (0.1, math.nan)}
    others = {
        name: tuple(Choice(name, f"lsq{number}", 4, 4, cost, 1, 1) for number, cost in enumerate(each))
        for name, each in costs.items()
    }
    with pytest.raises(FloatingPointError, match="second with lsq1 costs nan: the model's outputs or second deriv"):
        cheapest(others, {"bops": (10, 0)})
    with pytest.raises(FloatingPointError, match="the outputs of the float model have NaN or inf on these images"):
        qconv.sensitivity(Poisoned(), pictures()[0], scheme=schemes.lsq(4, 4))


class Poisoned(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Conv2d(1, 3, 3), nn.Flatten(), nn.Linear(75, 3))

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * torch.nan


def test_a_layer_that_is_never_called_is_not_chosen_for() -> None:
    """Nor counted, as its weight is another layer's."""
    model = network()
    model.add_module("unused", nn.Conv2d(1, 3, 3, bias=False))
    model[-1].weight = model[0].weight
    model.__class__ = Leaves
    with pytest.warns(UserWarning, match="unused"):
        found = assign(model, *pictures())
    assert "unused" not in found.others


class Leaves(nn.Sequential):
    def forward(self, input: Tensor) -> Tensor:
        for module in [*self][:-1]:
            input = module(input)
        return input


@pytest.mark.parametrize(("measure", "labelled"), [("measured", True), ("hessian", False)])
def test_a_budget_is_kept_by_the_file(measure: Any, labelled: bool, tmp_path: Path) -> None:
    model = network()
    before = copy.deepcopy(model.state_dict())
    data = pictures() if labelled else pictures()[:1]
    free = assign(model, *data, measure=measure)
    assert free.cost == sum(min(choice.cost for choice in each) for each in free.others.values())
    cheapest = sum(min(choice.packed_bytes for choice in each) for each in free.others.values())
    least = free.packed_bytes - sum(row.packed_bytes for row in free.rows) + cheapest
    budget = (least + free.packed_bytes) // 2
    found = assign(model, *data, measure=measure, max_bytes=budget)
    assert found.packed_bytes <= budget
    assert found.cost >= free.cost
    assert same(model.state_dict(), before)
    converted = qconv.convert(copy.deepcopy(model), schemes.bnn(), skip=(), overrides=found.overrides)
    qconv.calibrate(converted, [data[0]])
    layers = [module for module in converted.modules() if isinstance(module, qconv.QuantizedLayer)]
    assert [layer.scheme.name for layer in layers] == [row.scheme for row in found.rows]
    assert qconv.summarize(converted, (1, 7, 7)).packed_bytes == found.packed_bytes
    qconv.save_packed(converted, tmp_path / "a.qconv")
    assert (tmp_path / "a.qconv").stat().st_size == found.packed_bytes
    assert (found.traces == {}) == (measure == "measured")


def test_costs_are_the_curvature_times_the_squared_error() -> None:
    model, (images, labels) = network(), pictures()
    found = assign(model, images, labels, probes=8)
    for scheme, place in zip(CHOICES, range(3), strict=True):
        converted = qconv.convert(copy.deepcopy(model), scheme, skip=()).eval()
        qconv.calibrate(converted, [images])
        known = traces(converted, [(images, labels)], 8, 0)
        layer: Any = converted[3]
        x = model[:3](images).detach()
        x_q = layer.input_quantizer.quantize(x, *layer.input_quantizer.tensors())
        of_weight = (layer.quantized_weight() - layer.weight).square().sum().item() * known["3"][0]
        of_input = (x_q - x).square().sum().item() * known["3"][1][0] / len(images)
        assert found.others["3"][place].cost == pytest.approx((of_weight + of_input) / 2, rel=1e-3)


def test_bit_operations_are_a_budget_too() -> None:
    model, data = network(), pictures()
    free = assign(model, *data, max_bytes=None, max_bops=10**9)
    found = assign(model, *data, max_bytes=None, max_bops=free.bops // 2)
    assert found.bops <= free.bops // 2
    converted = qconv.convert(copy.deepcopy(model), schemes.bnn(), skip=(), overrides=found.overrides)
    assert qconv.summarize(converted, (1, 7, 7)).bops == found.bops


def test_a_model_that_is_one_layer() -> None:
    torch.manual_seed(0)
    model, images, labels = nn.Linear(6, 4), torch.rand(8, 6), torch.arange(8) % 4
    whole = assign(model, images, labels)
    assert [(row.layer, row.weight_bits) for row in whole.rows] == [("", 8)]
    less = assign(model, images, labels, max_bytes=whole.packed_bytes - 1)
    assert less.rows[0].weight_bits == 4
    (saved,) = (more.packed_bytes - row.packed_bytes for more, row in zip(whole.rows, less.rows, strict=True))
    assert less.packed_bytes == pytest.approx(whole.packed_bytes - saved, abs=8)  # headers end at a multiple of 8


class Calls(nn.Module):
    def __init__(self, *, by_name: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.fc, self.by_name = nn.Conv2d(1, 2, 3), nn.Linear(50, 3), by_name

    def forward(self, x: Tensor) -> Tensor:
        return self.fc((self.conv(input=x) if self.by_name else self.conv(x)).flatten(1))


def test_a_layer_that_is_called_by_name_counts_as_another() -> None:
    by_name, by_position = (assign(Calls(by_name=named), *pictures(), probes=2) for named in (True, False))
    assert by_name.rows == by_position.rows
    assert by_name.others == by_position.others


@pytest.mark.drawn
def test_skipped_layers_stay_float_and_count(tmp_path: Path) -> None:
    found = assign(network(), *pictures(), skip=("first", "last"))
    assert [row.layer for row in found.rows] == ["3"]
    identity = qconv.convert(network(), schemes.identity())  # which quantizes nothing, and counts as float
    assert assign(identity, *pictures(), skip=("first", "last")).rows == found.rows
    assert found.packed_bytes > found.rows[0].packed_bytes + 4 * 27
    found.plot(tmp_path / "bits.png")
    assert (tmp_path / "bits.png").read_bytes().startswith(b"\x89PNG")
    found.to_csv(tmp_path / "bits.csv")
    rows = read_csv(tmp_path / "bits.csv")
    assert len(rows) == 3
    assert [row["taken"] for row in rows].count("True") == 1
    assert "lsq(weight_bits=8" in str(found)
    assert repr(found).startswith("BitAssignment(1 layers, ")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_bytes": None}, ValueError, "pass a budget: max_bytes, max_bops, or both"),
        ({"max_bytes": 10}, ValueError, r"max_bytes \(=10\) must be at least \d+, the cost of the cheapest choices"),
        ({"max_bops": 10}, ValueError, r"max_bops \(=10\) must be at least"),
        ({"max_bytes": 1.5}, ValueError, r"max_bytes \(=1.5\) must be a whole number"),
        ({"choices": []}, ValueError, r"choices \(=\[\]\) must hold at least one scheme"),
        (
            {"choices": [replace(each, name="mine") for each in CHOICES]},
            ValueError,
            "'mine' is the name of several schemes",
        ),
        ({"choices": ["lsq"]}, TypeError, r"choices: 'lsq' must be a scheme"),
        ({"measure": "trace"}, ValueError, r"measure \(='trace'\) must be 'hessian' or 'measured'"),
        ({"probes": 0}, ValueError, r"probes \(=0\) must be at least 1"),
        (
            {"choices": [CHOICES[2], STAGED]},
            ValueError,
            r"'0' .*two_stage.* changes during training.* of its last stage",
        ),
        ({"choices": [schemes.inq(2)]}, ValueError, r"choices: .*inq.* changes during training"),
        ({"overrides": {"3": None}}, ValueError, "overrides must not be given: assign_bits chooses them"),
        ({"skip": (".*",)}, ValueError, "has nothing left to convert"),
        ({"model": qconv.convert(network(), CHOICES[1])}, ValueError, "is already converted: pass the float model"),
    ],
)
def test_bad_arguments_are_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        assign(options.pop("model", network()), *pictures(), **options)


def test_inference_mode_and_several_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    learn = partial(qconv.reconstruct, qconv.convert(network(), CHOICES[1], skip=()), *pictures()[:1], iterations=1)
    for call, name in ((partial(assign, network(), *pictures()), "assign_bits"), (learn, "reconstruct")):
        with torch.inference_mode(), pytest.raises(RuntimeError, match=rf"{name} needs gradients.*inference_mode\(\)"):
            call()
        with monkeypatch.context() as patch:
            patch.setattr("qconv.ground.processes.process_count", lambda: 2)
            with pytest.raises(RuntimeError, match=f"{name} works in one process, but there are 2"):
                call()


@pytest.mark.nightly
def test_a_residual_network_in_batches() -> None:
    """With shortcuts, ReLUs in place, and batches as a loader gives them; the estimates repeat with the seed."""
    torch.manual_seed(0)
    model = qconv.models.resnet20(activation=nn.ReLU, shortcut="normal").eval()
    images = torch.rand(6, 3, 8, 8)
    batches = [(images[:4], torch.arange(4)), (images[4:], torch.arange(2))]
    options: Any = {"choices": CHOICES[:2], "skip": ("first", "last"), "probes": 2, "max_bytes": 125_000}
    runs = [assign(model, batches, **options) for _ in range(2)]
    assert runs[0] == runs[1]
    assert len(runs[0].rows) == 18
    assert {row.weight_bits for row in runs[0].rows} == {2, 4}
    assert all(math.isfinite(row.cost) for row in runs[0].rows)


@pytest.mark.parametrize("choices", [CHOICES, CHOICES[:1]], ids=len)
def test_layers_with_a_scheme_of_their_own_are_not_chosen_for(choices: list[qconv.Scheme]) -> None:
    """Those of ``first_last`` keep their 8 bits, and count as what is not chosen for."""
    images, labels = pictures()
    options: Any = {"first_last": "w8a8", "skip": ("first", "last")}
    found = assign(network(), images, labels, probes=1, choices=choices, **options)
    assert list(found.others) == ["3"]
    model: Any = qconv.convert(network(), CHOICES[0], overrides=found.overrides, before_sign="keep", **options)
    assert [model[place].weight_quantizer.bits for place in (0, 6)] == [8, 8]
    qconv.calibrate(model, [images])
    assert found.bops == qconv.summarize(model, (1, 7, 7)).bops


class Gated(nn.Module):
    """A gate and attention, as MobileNetV3 and transformers have them."""

    def __init__(self, gate: nn.Module) -> None:
        super().__init__()
        self.first, self.second, self.gate, self.fc = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 3), gate, nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.gate(self.second(self.first(x))).flatten(2).mT
        return self.fc(F.scaled_dot_product_attention(tokens, tokens, tokens).mean(1))


def test_operators_without_a_second_derivative_of_torch() -> None:
    found = []
    for gate in (nn.Hardsigmoid(), Sixth()):
        torch.manual_seed(0)
        found.append(traces(qconv.convert(Gated(gate), schemes.lsq(8, 8)), [pictures()], 8, seed=0))
    for name, (of_weight, of_inputs) in found[0].items():
        torch.testing.assert_close((of_weight, *of_inputs), (found[1][name][0], *found[1][name][1]))
    assert len(found[0]) == 1


class Sixth(nn.Module):
    """Hardsigmoid, written out."""

    def forward(self, x: Tensor) -> Tensor:
        return (x + 3).clamp(0, 6) / 6


class NoSecond(nn.Module):
    """A function without a second derivative."""

    def forward(self, x: Tensor) -> Tensor:
        lengths = torch.full((len(x),), x[0, 0].numel()), torch.ones(len(x)).long()
        return F.ctc_loss(x.flatten(2).movedim(2, 0).log_softmax(2), torch.ones(len(x), 1).long(), *lengths) * x


def test_an_operator_that_cannot_be_differentiated_twice() -> None:
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.Conv2d(3, 3, 3), NoSecond(), nn.Flatten(), nn.Linear(27, 3))
    with pytest.raises(ValueError, match=r"model computes \S*ctc_loss, which can't be differentiated twice: "):
        assign(model, *pictures())


def test_every_budget_that_one_scheme_meets_is_met() -> None:
    """The header of a file of several schemes is larger, which is nothing to those of one."""
    torch.manual_seed(0)
    inner = [nn.Conv2d(8, 8, 1) for _ in range(4)]
    model = nn.Sequential(nn.Conv2d(3, 8, 1), *inner, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)).eval()
    images, choices = torch.rand(4, 3, 8, 8), [schemes.bwn(), schemes.ttq(), schemes.sawb(3, 3)]
    whole = [qconv.summarize(qconv.convert(copy.deepcopy(model), choice), (3, 8, 8)).packed_bytes for choice in choices]
    costs = []
    for most in (*sorted(whole), 3400, 10**6):
        found = qconv.assign_bits(model, images, choices=choices, max_bytes=most, measure="measured")
        assert found.packed_bytes <= most
        costs.append(found.cost)
    assert costs[0] >= costs[1] >= costs[2] >= costs[4]
    with pytest.raises(ValueError, match=r"max_bytes \(=2000\) must be at least"):
        qconv.assign_bits(model, images, choices=choices, max_bytes=2000, measure="measured")


# Sensitivity: each layer alone


def test_pixels_and_labels_that_are_no_classes() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 5, 1)).eval()
    images, masks = torch.randn(4, 3, 8, 8), torch.randint(5, (4, 8, 8))
    masks[0, 0] = -100
    found = qconv.sensitivity(model, images, masks, scheme=schemes.lsq(2, 2))
    assert found.loss == pytest.approx(F.cross_entropy(model(images), masks).item(), rel=1e-6)
    assert all(row.accuracy is not None and -1 <= row.accuracy <= 1 for row in found.rows)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 1)).eval()
    found = qconv.sensitivity(model, [(images, torch.rand(4, 1))], scheme=schemes.lsq(2, 2))
    assert found.loss is None
    assert all(cost > 0 for cost in found.costs.values())
    with pytest.raises(ValueError, match=r"outputs \(of shape \(4, 1\)\) have no classes to compare"):
        qconv.assign_bits(model, images, choices=[schemes.lsq(2, 2), schemes.lsq(8, 8)], max_bytes=10**6, skip=())


class TwoHeads(nn.Module):
    """Its outputs are in a dictionary with a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU())
        self.maps, self.fc = nn.Conv2d(8, 3, 1), nn.Linear(128, 4)

    def forward(self, x: Tensor) -> dict[str, Any]:
        y = self.body(x)
        return {"maps": (self.maps(y), y.argmax(1)), "classes": self.fc(y.flatten(1))}


def test_several_outputs_are_all_compared() -> None:
    torch.manual_seed(0)
    model, images, labels = TwoHeads().eval(), torch.randn(8, 3, 8, 8), torch.randint(4, (8,))
    options: dict[str, Any] = {"scheme": schemes.lsq(2, 2)}
    every = qconv.sensitivity(model, images, **options)
    one, other = (
        qconv.sensitivity(model, images, output=each, **options)
        for each in ("classes", lambda outputs: outputs["maps"][0])
    )
    assert every.together.error == pytest.approx((one.together.error + other.together.error) / 2)
    of_fc = next(row for row in one.rows if row.layer == "fc")
    assert every.costs["fc"] == pytest.approx(one.together.error and of_fc.error / 2)
    assert every.together.kl is every.loss is every.together.loss is None

    def loss(outputs: dict[str, Any], labels: Tensor | None) -> Tensor:
        assert labels is not None
        return F.cross_entropy(outputs["classes"], labels) + outputs["maps"][0].square().mean()

    found = qconv.sensitivity(model, images, labels, loss=loss, **options)
    assert found.loss == pytest.approx(loss(model(images), labels).item(), rel=1e-6)
    assert found.rows[0].cost == found.rows[0].loss
    budget: dict[str, Any] = {"choices": [schemes.lsq(2, 2), schemes.lsq(8, 8)], "max_bytes": 10**5, "skip": ()}
    for extra in ({"measure": "measured"}, {"loss": loss}, {"output": "classes"}):
        assert len(qconv.assign_bits(model, images, labels, **extra, **budget).rows) == 4
    with pytest.raises(TypeError, match="choose one by output="):
        qconv.assign_bits(model, images, **budget)
    with pytest.raises(TypeError, match="loss must return a tensor of one number"):
        qconv.sensitivity(model, images, loss=lambda outputs, labels: outputs["classes"], **options)
    for limit, words in (
        (0.0, r"outputs \(of shapes .* must keep their shapes"),
        (100.0, "must have numbers on these"),
    ):

        def above(outputs: Any, limit: float = limit) -> Tensor:
            return outputs["classes"][outputs["classes"] > limit]

        with pytest.raises(ValueError, match=words):
            qconv.sensitivity(model, images, output=above, **options)


def test_a_budget_is_refused_before_anything_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(128, 4)).eval()
    for name in ("calibrate", "traces"):
        monkeypatch.setattr(f"qconv.after_training.bit_assignment.{name}", None)
    with pytest.raises(ValueError, match=r"of it has no choice, .* first_last='w8a8' makes those smaller"):
        qconv.assign_bits(model, torch.randn(8, 3, 8, 8), choices=[schemes.lsq(2, 2)], max_bytes=10)


def test_pruned_and_normalized_models_are_copied() -> None:
    model = three_layers()
    prune.l1_unstructured(model[0], "weight", 0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch about weight_norm
        nn.utils.weight_norm(model[2])
        model(IMAGES).sum().backward()  # they have computed weights with gradients, which can't be copied as they are
        found = qconv.sensitivity(model, IMAGES, scheme=schemes.lsq(4, 4), skip=("0", "2"))
    assert [row.layer for row in found.rows] == ["5"]


def three_layers() -> nn.Sequential:
    torch.manual_seed(0)
    middle = [nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), *middle, nn.Linear(4 * 36, 5)).eval()


IMAGES = torch.randn(40, 3, 8, 8, generator=torch.Generator().manual_seed(1))
LABELS = torch.arange(40) % 5


def test_each_layer_is_quantized_alone() -> None:
    model = three_layers()
    before = copy.deepcopy(model.state_dict())
    found = qconv.sensitivity(model, IMAGES, LABELS, scheme=schemes.minmax(2, None), batch_size=16)
    assert same(model.state_dict(), before)
    assert not any(isinstance(module, QuantizedLayer) for module in model.modules())
    assert sorted(found.costs) == ["0", "2", "5"]
    with torch.no_grad():
        y = model(IMAGES)
        for row in found.rows:
            alone = three_layers()
            layer: Any = alone.get_submodule(row.layer)
            layer.weight.copy_(schemes.minmax(2, None).weight()(layer.weight))
            y_q = alone(IMAGES)
            assert row.error == pytest.approx(((y_q - y).square().sum() / y.square().sum()).item(), rel=1e-4)
            p = y.softmax(1)
            assert row.kl == pytest.approx((p * (p / y_q.softmax(1)).log()).sum(1).mean().item(), rel=1e-3)
            expected = F.cross_entropy(y_q, LABELS) - F.cross_entropy(y, LABELS)
            assert row.loss == pytest.approx(expected.item(), abs=1e-5)
            changed = (y_q.argmax(1) == LABELS).float().mean() - (y.argmax(1) == LABELS).float().mean()
            assert row.accuracy == pytest.approx(changed.item(), abs=1e-6)
    assert [row.cost for row in found.rows] == sorted((row.cost for row in found.rows), reverse=True)
    assert found.together.error > min(row.error for row in found.rows)


def test_a_converted_model_is_measured_against_its_latent_weights_and_other_samples_do_not_count() -> None:
    model = qconv.convert(three_layers(), schemes.lsq(3, 3), skip=())
    qconv.calibrate(model, [IMAGES])
    batches = [(IMAGES[:24], LABELS[:24]), (IMAGES[24:], LABELS[24:])]
    found = qconv.sensitivity(model, batches, max_samples=32)
    assert (found.samples, len(found.rows)) == (32, 3)
    assert found.together.loss is not None
    with torch.no_grad():
        y, y_q = three_layers()(IMAGES[:32]), model.eval()(IMAGES[:32])
    expected = ((y_q - y).square().sum() / y.square().sum()).item()
    assert found.together.error == pytest.approx(expected, rel=1e-4)
    nothing = qconv.sensitivity(three_layers(), [IMAGES], scheme=schemes.identity())
    assert {row.error for row in nothing.rows} == {0.0}
    assert (nothing.rows[0].sqnr, nothing.loss) == (float("inf"), None)
    of_float = qconv.sensitivity(qconv.convert(three_layers(), schemes.identity()), [IMAGES], scheme=schemes.lsq(2, 2))
    assert of_float.costs == qconv.sensitivity(three_layers(), [IMAGES], scheme=schemes.lsq(2, 2)).costs


class Same(nn.Conv2d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input)


def test_a_subclass_that_calls_its_parent_is_measured_as_its_parent() -> None:
    model = three_layers()
    model[2] = Same(4, 4, 3, padding=1)
    model.load_state_dict(three_layers().state_dict())
    found = qconv.sensitivity(model, IMAGES, scheme=schemes.lsq(2, 2), subclasses={Same: qconv.QConv2d})
    assert found.rows == qconv.sensitivity(three_layers(), IMAGES, scheme=schemes.lsq(2, 2)).rows


@pytest.mark.drawn
def test_what_it_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = qconv.sensitivity(three_layers(), IMAGES, scheme=schemes.bnn())
    found.to_csv(tmp_path / "s.csv")
    rows = read_csv(tmp_path / "s.csv")
    assert [row["layer"] for row in rows] == [*(row.layer for row in found.rows), "(all together)"]
    found.plot(tmp_path / "s.png")
    assert (tmp_path / "s.png").read_bytes()[:4] == b"\x89PNG"
    assert "by KL divergence, 40 samples" in str(found)
    plan = qconv.plan(three_layers(), schemes.bnn(), costs=found.costs)
    shown = capsys.readouterr().out
    worst = found.rows[0]
    assert shown.splitlines()[-1].startswith(f"costs most: {worst.layer} ({worst.cost:.4g})")
    assert f"{found.costs['2']:.4g}" in next(line for line in shown.splitlines() if line.startswith("2 "))
    assert plan.costs == found.costs
    qconv.summary(three_layers(), (3, 8, 8), costs=found.costs)
    assert "costs most: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("scheme", "data", "error", "message"),
    [
        (None, 0, ValueError, r"is float: pass scheme="),
        ("converted", 0, ValueError, "is converted already: leave scheme out"),
        (schemes.two_stage(schemes.lsq(4, 4)), 0, ValueError, r"scheme: layer .*two_stage.* changes during training"),
        (schemes.bwn(), 1, TypeError, "labels go with a tensor"),
    ],
)
def test_wrong_arguments(scheme: Any, data: int, error: type[Exception], message: str) -> None:
    model = qconv.convert(three_layers(), schemes.bwn()) if scheme == "converted" else three_layers()
    scheme = schemes.bwn() if scheme == "converted" else scheme
    given: Any = ([IMAGES], LABELS) if data else (IMAGES,)
    with pytest.raises(error, match=message):
        qconv.sensitivity(model, *given, scheme=scheme)
