"""The option `lean` of `train.py`: when it is on, what it says, and that runs and checkpoints are the same."""

import copy
import csv
import json
from pathlib import Path
from typing import Any

import pytest
from test_train import QUICK, SHORT, config
from torch import Tensor, nn
from torch._dynamo.utils import counters

import qconv
from qconv import schemes
from qconv.cli import train as program
from qconv.lean.make_lean import is_lean
from qconv.training import load_checkpoint
from qconv.training.leanness import check_lean, make_lean

BNN, LSQ = schemes.bnn(), schemes.lsq(2, 2)


def network(*kinds: qconv.Scheme | None) -> nn.Sequential:
    """A convolution of each scheme; None is a float one."""
    layers = []
    for scheme in kinds:
        conv = nn.Sequential(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        layers.append(conv if scheme is None else qconv.convert(conv, scheme, skip=()))
    return nn.Sequential(*layers)


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
    assert make_lean(model, asked, on_cpu=on_cpu, compiled=False, takes_channels_last=True) == word
    assert {module.__dict__.get("lean") for module in model[0].children()} == {mode}


@pytest.mark.parametrize("asked", ["auto", True, "exact"])
@pytest.mark.parametrize("schemes_", [(None,), (schemes.identity(), None)], ids=["none", "identity"])
def test_float_networks_stay_as_they_are(asked: Any, schemes_: Any) -> None:
    model = network(*schemes_)
    kinds = [type(module) for module in model.modules()]
    assert make_lean(model, asked, on_cpu=True, compiled=False, takes_channels_last=True).endswith("off")
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
    assert make_lean(model, "auto", on_cpu=True, compiled=True, takes_channels_last=True) == "auto, off"
    assert (
        make_lean(model, "auto", on_cpu=True, compiled=False, takes_channels_last=True)
        == f"auto, {'on' if on else 'off'}"
    )
    assert any(is_lean(module) for module in model.modules()) == on
    assert make_lean(model, True, on_cpu=True, compiled=False, takes_channels_last=True) == "true, on"


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
    model = qconv.convert(nn.Sequential(copy.deepcopy(layer)), LSQ, skip=())
    assert (
        make_lean(model, "auto", on_cpu=True, compiled=False, takes_channels_last=True)
        == f"auto, {'on' if on else 'off'}"
    )
    model = qconv.convert(nn.Sequential(copy.deepcopy(layer)), schemes.twn(), skip=())
    assert make_lean(model, "auto", on_cpu=True, compiled=False, takes_channels_last=True) == "auto, off"


@pytest.mark.parametrize("value", ["fast", "true", "", 1, 0, None, [True]])
def test_other_values_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"lean \(=.*\) must be true, false, exact or auto"):
        check_lean(value)


@pytest.mark.parametrize("run", [program.train, program.evaluate])
def test_they_are_refused_before_the_run_is_built(run: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"lean \(=fast\) must be true, false, exact or auto"):
        run(config(*QUICK, "lean=fast", "evaluate=none.ckpt", f"run_dir={tmp_path / 'run'}"))
    assert not (tmp_path / "run").exists()


def test_runs_resume_and_evaluate_with_other_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Gradients that are exact give the same run, whichever part of it is lean."""
    whole, half, rest = (tmp_path / name for name in ("whole", "half", "rest"))
    last = Path("checkpoints/last.ckpt")
    stop = "+callbacks.stop={_target_:test_train.StopAfter,epoch:1}"
    result = program.train(config(*QUICK, "lean=false", f"run_dir={whole}"))
    assert "lean: false, off" in capsys.readouterr().out
    assert json.loads((whole / "result.json").read_text())["lean"] == "off"
    program.train(config(*QUICK, "lean=exact", stop, f"run_dir={half}"))
    assert "lean: exact, on" in capsys.readouterr().out
    assert json.loads((half / "result.json").read_text())["lean"] == "exact"
    program.train(config(*QUICK, "lean=false", f"ckpt_path={half / last}", f"run_dir={rest}"))
    state, other = (load_checkpoint(folder / last)["state_dict"] for folder in (whole, rest))
    assert state.keys() == other.keys()
    assert all(value.equal(other[name]) for name, value in state.items())
    capsys.readouterr()
    program.train(config(*QUICK, f"ckpt_path={half / last}", f"run_dir={tmp_path / 'auto'}"))
    assert "lean: auto, on" in capsys.readouterr().out
    assert json.loads((tmp_path / "auto/result.json").read_text())["lean"] == "fast"
    best = rest / "checkpoints/best.ckpt"
    evaluation = program.evaluate(config(*QUICK, "lean=true", f"run_dir={tmp_path / 'eval'}", f"evaluate={best}"))
    assert evaluation.test_loss == result.test_loss


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
        ("auto", "lean: auto, off: the forward takes no images that are channels_last", "off"),
        ("true", "lean: true, on: slower, for the forward takes no images that are channels_last", "fast"),
        ("exact", "lean: exact, on\n", "exact"),
    ],
)
def test_a_network_that_views_images(
    asked: str, word: str, mode: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "~model.width", "model._target_=test_training_lean.Viewed", f"lean={asked}"
    program.train(config(*SHORT[1:], "trainer.max_epochs=1", *words, f"run_dir={tmp_path}"))
    assert word in capsys.readouterr().out
    assert json.loads((tmp_path / "result.json").read_text())["lean"] == mode


@pytest.mark.nightly
def test_a_compiled_run_that_is_lean_learns_the_same(tmp_path: Path) -> None:
    losses = []
    counters.clear()
    for compiled in (False, True):
        folder = tmp_path / str(compiled)
        words = ("lean=true", "data.batch_size=2000", f"compile={compiled}")  # one batch, compiled once
        program.train(config(*SHORT, *words, f"run_dir={folder}"))
        rows = csv.DictReader((folder / "metrics.csv").read_text().splitlines())
        losses.append([float(row[name]) for row in rows for name in ("train_loss", "val_loss")])
    assert counters["frames"]["ok"] > 0
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)
