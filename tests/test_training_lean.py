"""The option `lean` of `train.py`: when it is on, what it says, and that runs and checkpoints are the same."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from conftest import same
from runs import QUICK, config, last_state, stop
from torch import Tensor, nn

import qconv
from qconv import schemes
from qconv.lean.make_lean import is_lean
from qconv.training.leanness import make_lean
from qconv.training.run import evaluate, train

BNN, LSQ = schemes.bnn(), schemes.lsq(2, 2)


def network(*kinds: qconv.Scheme | None) -> nn.Sequential:
    """A convolution of each scheme; None is a float one."""
    layers = []
    for scheme in kinds:
        conv = nn.Sequential(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        layers.append(conv if scheme is None else qconv.convert(conv, scheme, skip=()))
    return nn.Sequential(*layers)


def lean_of(model: nn.Module, asked: Any, on_cpu: bool = True, compiled: bool = False) -> str:
    return make_lean(model, asked, on_cpu=on_cpu, compiled=compiled, takes_channels_last=True)


@pytest.mark.parametrize(
    ("asked", "on_cpu", "word", "mode"),
    [
        ("auto", True, "auto, on", "fast"),
        ("auto", False, "auto, off", None),
        (True, False, "true, on", "fast"),
        ("exact", False, "exact, on", "exact"),
        (False, True, "false, off", None),
    ],
)
def test_what_is_asked_is_done_and_said(asked: Any, on_cpu: bool, word: str, mode: str | None) -> None:
    model = network(BNN)
    assert lean_of(model, asked, on_cpu) == word
    assert {module.__dict__.get("lean") for module in model[0].children()} == {mode}


@pytest.mark.parametrize("asked", ["auto", True, "exact"])
@pytest.mark.parametrize("schemes_", [(None,), (schemes.identity(), None)], ids=["none", "identity"])
def test_float_networks_stay_as_they_are(asked: Any, schemes_: Any) -> None:
    model = network(*schemes_)
    kinds = [type(module) for module in model.modules()]
    assert lean_of(model, asked).endswith("off")
    assert [type(module) for module in model.modules()] == kinds
    assert not any(is_lean(module) for module in model.modules())


@pytest.mark.parametrize(
    ("kinds", "on"),
    [
        ((BNN, None), True),
        ((BNN, LSQ), True),
        ((BNN, LSQ, LSQ), False),
        ((schemes.two_stage(BNN),), False),
        ((schemes.bwn(),), True),
        ((schemes.bwn(), schemes.dorefa(1, 4), schemes.twn()), False),
        ((schemes.adabin(),), False),
    ],
)
def test_auto_is_on_where_half_of_the_layers_gain(kinds: Any, on: bool) -> None:
    model = network(*kinds)
    assert lean_of(model, "auto", compiled=True) == "auto, off"
    assert lean_of(model, "auto") == f"auto, {'on' if on else 'off'}"
    assert any(is_lean(module) for module in model.modules()) == on
    assert lean_of(model, True) == "true, on"


@pytest.mark.parametrize(
    ("layer", "on"),
    [
        (nn.Conv2d(64, 64, 3), True),
        (nn.Conv2d(64, 32, 3), False),
        (nn.Conv2d(128, 128, 3, groups=4), False),
        (nn.ConvTranspose2d(64, 64, 3), True),
        (nn.Linear(64, 64), True),
    ],
    ids=str,
)
def test_auto_is_on_for_wide_layers_of_codes(layer: nn.Module, on: bool) -> None:
    for scheme, gains in ((LSQ, on), (schemes.twn(), False)):
        model = qconv.convert(nn.Sequential(copy.deepcopy(layer)), scheme, skip=())
        assert lean_of(model, "auto") == f"auto, {'on' if gains else 'off'}"


@pytest.mark.parametrize("run", [train, evaluate])
def test_they_are_refused_before_the_run_is_built(run: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"lean \(=fast\) must be true, false, exact or auto"):
        run(config(*QUICK, "lean=fast", "evaluate=none.ckpt", f"run_dir={tmp_path / 'run'}"))
    assert not (tmp_path / "run").exists()


@pytest.mark.nightly
def test_runs_resume_and_evaluate_with_other_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Gradients that are exact give the same run, whichever part of it is lean."""
    half = f"resume={tmp_path}/half"
    results = []
    for name, words, said, mode in (
        ("whole", ("lean=false",), "lean: false, off", "off"),
        ("half", ("lean=exact", stop(1)), "lean: exact, on", "exact"),
        ("rest", ("lean=false", half), "lean: false, off", "off"),
        ("auto", (half,), "lean: auto, on", "fast"),
    ):
        results.append(train(config(*QUICK, *words, f"run_dir={tmp_path / name}")))
        assert said in capsys.readouterr().out
        assert json.loads((tmp_path / name / "result.json").read_text())["lean"] == mode
    assert same(last_state(tmp_path / "whole"), last_state(tmp_path / "rest"))
    best = tmp_path / "rest/checkpoints/best.ckpt"
    evaluation = evaluate(config(*QUICK, "lean=true", f"run_dir={tmp_path / 'eval'}", f"evaluate={best}"))
    assert evaluation.test_loss == results[0].test_loss


class Viewed(nn.Module):
    """A network of one's own that flattens its images by ``x.view``."""

    def __init__(self, in_channels: int, num_classes: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(in_channels, 8, 3), nn.Conv2d(8, 8, 3)
        self.norm, self.head = nn.BatchNorm2d(8), nn.Linear(8 * 4 * 4, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.second(self.first(x)))
        return self.head(x.view(x.size(0), -1))


@pytest.mark.parametrize(
    ("asked", "word", "mode"),
    [
        ("auto", "lean: auto, off: the forward does not accept channels_last images", "off"),
        ("true", "lean: true, on: slower, because the forward does not accept channels_last images", "fast"),
    ],
)
def test_a_network_that_views_images(
    asked: str, word: str, mode: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "~model.width", "model._target_=test_training_lean.Viewed", f"lean={asked}"
    train(config(*QUICK[1:], "trainer.max_epochs=1", *words, f"run_dir={tmp_path}"))
    assert word in capsys.readouterr().out
    assert json.loads((tmp_path / "result.json").read_text())["lean"] == mode
