"""What goes wrong is told once: by hooks in the first training batches, and by `qconv.check` at any time."""

import copy
import math
import pickle
import re
import warnings
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import qconv
from qconv import schemes
from qconv.check import watch

IMAGES = torch.randn(4, 3, 8, 8)


def network(*before: nn.Module) -> nn.Sequential:
    """Three convolutions, with ``before`` in front of the second, which alone is quantized."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), *before, nn.Conv2d(4, 4, 3), nn.Conv2d(4, 2, 3))


class Reads(nn.Sequential):
    """Computes with the weight of its second module, which it never calls."""

    def forward(self, input: Tensor) -> Tensor:
        first, second, last = cast(tuple[Any, Any, Any], tuple(self))
        return last(F.conv2d(first(input), second.weight, second.bias))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-3)


def early(model: nn.Sequential, scheme: qconv.Scheme) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model, converted after its optimizer was made."""
    optimizer = optimizer_of(model)
    return qconv.convert(model, scheme), optimizer


def calibrated(model: nn.Module) -> nn.Module:
    with warnings.catch_warnings(action="ignore"):
        qconv.calibrate(model, [IMAGES])
    return model


MADE: dict[str, tuple[Callable[[], Any], str, str]] = {
    "sign behind a ReLU": (
        lambda: (qconv.convert(network(nn.ReLU()), schemes.bnn(), before_sign="keep"), IMAGES),
        "2",
        "100.0% of the inputs.*leave out a ReLU before it",
    ),
    "inputs in one level": (
        lambda: (qconv.convert(network(nn.ReLU()), schemes.pact(2, 2, alpha=1000.0)), IMAGES),
        "2",
        ".* became 0 in PACT: .*range is too wide",
    ),
    "negative inputs clipped": (
        lambda: (qconv.convert(network(), schemes.pact()), IMAGES),
        "1",
        r"\d\d% of its inputs are negative and clipped to 0: schemes for negative inputs are lsq",
    ),
    "bypassed": (
        lambda: (qconv.convert(Reads(*network()), schemes.bnn()), IMAGES),
        "1",
        "Reads computes with its float weight and never calls it: convert the float model with it in skip",
    ),
    "no data": (
        lambda: (qconv.convert(network(), schemes.lsq(4, 4)), None),
        "1",
        r"LSQInput has had no data: call qconv.calibrate\(model, batches\) before evaluation",
    ),
    "no after_every_step": (
        lambda: ((model := qconv.convert(network(), schemes.bnn())), None, optimizer_of(model)),
        "optimizer",
        "its steps do not end with qconv.after_step, which keeps latent weights in their range: call qconv.after_every",
    ),
    "an optimizer from before": (
        lambda: ((made := early(network(), schemes.ttq()))[0], None, made[1]),
        "1.weight_quantizer.positive",
        "not in the optimizer of the weights: create it after qconv.convert",
    ),
}


@pytest.mark.parametrize("situation", MADE)
def test_the_table_has_it(situation: str, capsys: pytest.CaptureFixture[str]) -> None:
    make, name, sentence = MADE[situation]
    model, *others = make()
    state = copy.deepcopy(model.state_dict())
    with warnings.catch_warnings(action="error"):
        found = qconv.check(model, *others)
    problems = [row.problem for row in found if row.name == name]
    assert re.match(sentence, problems[0])
    printed = capsys.readouterr().out
    assert printed.split()[:2] == ["name", "problem"]
    assert " ".join(problems[0].split()[:2]) in printed
    assert model.training
    assert all(tensor.equal(state[key]) for key, tensor in model.state_dict().items())
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_nothing_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    model = calibrated(qconv.convert(network(), schemes.lsq(4, 4)))
    optimizer = optimizer_of(model)
    qconv.after_every_step(optimizer, model)
    assert qconv.check(model, IMAGES, optimizer) == []
    assert capsys.readouterr().out == "nothing found\n"
    with pytest.raises(ValueError, match="has no quantized layer"):
        qconv.check(network())


def told(model: nn.Module, batches: int = 5) -> list[str]:
    """Train without `after_step`, and return the warnings."""
    optimizer = optimizer_of(model)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(batches):
            model(IMAGES).square().mean().backward()
            optimizer.step()
    return [str(each.message) for each in found]


def test_three_batches_are_watched_and_nothing_is_left() -> None:
    plain = {name: set(vars(module)) for name, module in network().named_modules()}
    model = qconv.convert(network(nn.ReLU()), schemes.bnn(), before_sign="keep")
    assert [len(module._forward_hooks) for module in model] == [0, 0, 1, 0]
    twins = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    for each in (model, *twins):
        said = told(each, 2)
        assert len(said) == 1
        assert said[0].startswith("an optimizer's step did not end with qconv.after_step, which keeps latent weights")
        (crowded,) = told(each)
        assert crowded.startswith("layer '2' (QConv2d, bnn()): in each of its first 3 training batches 100.0% of the")
        assert not any(module._forward_hooks for module in each.modules())
        assert len(set(vars(each[2])) - plain["1"] - {"before_sign"}) <= 3
        assert told(each) == []
    watch(model)
    assert len(told(model)) == 2  # counted anew


@pytest.mark.parametrize(("layer", "sample"), [(nn.Conv2d(3, 4, 3), (3, 8, 8)), (nn.Linear(5, 4), (5,))], ids=str)
def test_samples_without_a_batch(layer: nn.Module, sample: tuple[int, ...]) -> None:
    model = qconv.convert(nn.Sequential(layer), schemes.reactnet(), skip=())
    for _ in range(4):
        model(torch.linspace(-1, 1, math.prod(sample)).view(sample))
    assert not model[0]._forward_hooks
    assert qconv.check(model, torch.linspace(-1, 1, math.prod(sample)).view(sample)) == []


def test_it_can_be_turned_off() -> None:
    model = qconv.convert(network(nn.ReLU()), schemes.bnn(), before_sign="keep", check=False)
    assert not any(module._forward_hooks for module in model.modules())
    assert told(model) == []
    with pytest.raises(TypeError, match="check"):
        qconv.convert(network(), schemes.bnn(), check=1)  # pyright: ignore[reportArgumentType]
    qconv.to_float(watched := qconv.convert(network(), schemes.bnn()))
    assert not any(module._forward_hooks for module in watched.modules())


def test_what_is_no_training_is_not_counted() -> None:
    model = qconv.convert(network(), schemes.lsq(4, 4))
    calibrated(model)
    with torch.no_grad():
        model(IMAGES)
    qconv.summarize(model, (3, 8, 8))
    model.eval()(IMAGES)
    torch.compile(model.train(), backend="eager")(IMAGES)
    assert len(model[1]._forward_hooks) == 1
    hook: Any = next(iter(model[1]._forward_hooks.values()))
    assert hook.batches == 0
