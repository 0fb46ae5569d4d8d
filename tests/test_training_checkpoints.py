"""Checkpoint files: whole or absent, read with care, compared with the run that reads them."""

import json
import math
import os
import re
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hydra.core.override_parser.overrides_parser import OverridesParser

import qconv
from qconv import schemes
from qconv.ground.files import atomic_file
from qconv.training import AtomicCheckpointIO, CheckpointError, Checkpoints, load_checkpoint
from qconv.training.resume import check_config, check_tensors, override
from qconv.training.run_folder import same_run

CHECKPOINT = {"state_dict": {"weight": torch.arange(6.0)}, "epoch": 3, "config": {"seed": 1}}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "deep" / "last.ckpt"
    AtomicCheckpointIO().save_checkpoint(CHECKPOINT, path)
    return path


def test_a_failing_save_leaves_the_old_file_and_nothing_else(saved: Path) -> None:
    before = saved.read_bytes()
    with pytest.raises(Exception, match="pickle"):
        AtomicCheckpointIO().save_checkpoint({"state_dict": {}, "half": torch.ones(1000), "bad": lambda: None}, saved)
    assert saved.read_bytes() == before
    assert [file.name for file in saved.parent.iterdir()] == ["last.ckpt"]


def test_what_a_killed_process_left_is_removed_when_it_is_old(tmp_path: Path) -> None:
    stays = [".best.ckpt.7.tmp", ".last.ckpt.8.tmp", ".last.ckpt.a.7.tmp"]
    hours_ago = time.time() - 7200
    for name in (".last.ckpt.7.tmp", ".last.ckpt.7-0a1b2c3d.tmp", *stays):
        (tmp_path / name).write_bytes(b"half")
        if name != ".last.ckpt.8.tmp":
            os.utime(tmp_path / name, (hours_ago, hours_ago))
    with atomic_file(tmp_path / "last.ckpt") as file:
        file.write(b"whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == [*stays, "last.ckpt"]


def test_processes_of_two_machines_with_one_number(tmp_path: Path) -> None:
    with atomic_file(tmp_path / "last.ckpt") as one, atomic_file(tmp_path / "last.ckpt") as other:
        one.write(b"one")
        other.write(b"another")
    assert (tmp_path / "last.ckpt").read_bytes() == b"one"  # which ended last
    assert [path.name for path in tmp_path.iterdir()] == ["last.ckpt"]


def test_the_new_name_is_taken_only_when_the_file_is_complete(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    replace = Path.replace

    def spy(self: Path, target: Path) -> Path:
        seen.append((load_checkpoint(self)["epoch"], load_checkpoint(target)["epoch"]))
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", spy)
    AtomicCheckpointIO().save_checkpoint({**CHECKPOINT, "epoch": 4}, saved)
    assert seen == [(4, 3)]
    assert load_checkpoint(saved)["epoch"] == 4


class FakeTrainer:
    """Notes what is saved."""

    def __init__(self) -> None:
        self.saved: list[tuple[int, str]] = []
        self.current_epoch, self.callback_metrics = 0, {}
        self.strategy = self
        self.sanity_checking = False

    def save_checkpoint(self, path: Path) -> None:
        self.saved.append((self.current_epoch, path.name))

    def reduce_boolean_decision(self, decision: bool, all: bool) -> bool:
        return decision


@pytest.mark.parametrize(
    ("scores", "final_from", "best"),
    [
        ([0.5, 0.7, 0.6], 0, [0, 1]),
        ([0.5, 0.5, 0.4], 0, [0]),  # of equal ones the earliest
        ([0.9, 0.2, 0.3, 0.3], 1, [0, 1, 2]),  # the first final epoch counts more than any before
        ([0.9, 0.2, 0.95], 2, [0, 2]),
        ([math.nan, math.nan, 0.4, math.nan, 0.5], 0, [0, 1, 2, 4]),
        ([None, 0.4, None, 0.3], 0, [1]),  # without a validation there is no score
    ],
)
def test_what_is_best(scores: list[float | None], final_from: int, best: list[int], tmp_path: Path) -> None:
    trainer: Any = FakeTrainer()
    checkpoints = Checkpoints(tmp_path)
    model = qconv.QConv2d(2, 2, 1, scheme=schemes.two_stage(schemes.bnn(), start=0.5))
    for epoch, score in enumerate(scores):
        trainer.current_epoch = epoch
        if score is not None:  # Lightning keeps the figures of an epoch until there are others
            trainer.callback_metrics = {"val_accuracy": torch.tensor(score)}
            checkpoints.on_validation_end(trainer, model)  # pyright: ignore[reportArgumentType]
        qconv.set_progress(model, 0.0 if epoch < final_from else 0.6)
        checkpoints.on_train_epoch_end(trainer, model)  # pyright: ignore[reportArgumentType]
    assert [epoch for epoch, name in trainer.saved if name == "best.ckpt"] == best
    assert [epoch for epoch, name in trainer.saved if name == "last.ckpt"] == list(range(len(scores)))
    assert checkpoints.best_epoch == best[-1]


def test_a_monitor_that_is_no_figure_is_named(tmp_path: Path) -> None:
    trainer: Any = FakeTrainer()
    checkpoints, model = Checkpoints(tmp_path, monitor="val_acc"), torch.nn.Linear(1, 1)
    checkpoints.on_train_epoch_end(trainer, model)  # pyright: ignore[reportArgumentType]
    trainer.callback_metrics = {"val_accuracy": torch.tensor(0.5)}
    checkpoints.on_validation_end(trainer, model)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"monitor \(=val_acc\) must be one of the run's figures: val_accuracy"):
        checkpoints.on_train_epoch_end(trainer, model)  # pyright: ignore[reportArgumentType]


def test_only_validated_epochs_are_the_best(tmp_path: Path) -> None:
    """The run's result has the validation accuracy of the best epoch, whatever decides."""
    trainer: Any = FakeTrainer()
    checkpoints, model = Checkpoints(tmp_path, monitor="train_accuracy"), torch.nn.Linear(1, 1)
    for trainer.current_epoch, train_accuracy in enumerate([0.7, 0.5, 0.9, 0.6]):
        trainer.callback_metrics = {"train_accuracy": torch.tensor(train_accuracy), "val_accuracy": torch.tensor(0.5)}
        if trainer.current_epoch % 2 == 1:
            checkpoints.on_validation_end(trainer, model)  # pyright: ignore[reportArgumentType]
        checkpoints.on_train_epoch_end(trainer, model)  # pyright: ignore[reportArgumentType]
    assert [epoch for epoch, name in trainer.saved if name == "best.ckpt"] == [1, 3]


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_best_checkpoint_of_another_epoch_is_not_taken(elsewhere: bool, tmp_path: Path) -> None:
    """Such as that of a kill between the two files, or of another run."""
    for epoch in (5, 7):
        AtomicCheckpointIO().save_checkpoint({**CHECKPOINT, "epoch": epoch}, tmp_path / "best.ckpt")
        checkpoints = Checkpoints(tmp_path / "new" if elsewhere else tmp_path)
        checkpoints.load_state_dict({"best_score": 0.8, "best_epoch": 5, "best_is_final": True})
        trainer: Any = SimpleNamespace(ckpt_path=tmp_path / "last.ckpt", is_global_zero=True)
        checkpoints.on_fit_start(trainer, torch.nn.Linear(1, 1))  # pyright: ignore[reportArgumentType]
        assert checkpoints.best_epoch == (5 if epoch == 5 else None)
        assert load_checkpoint(checkpoints.best)["epoch"] == (5 if elsewhere else epoch)  # the file stays


def without_directory(path: Path) -> None:
    data = bytearray(path.read_bytes())
    start = data.index(b"PK\x01\x02")
    data[start : start + 40] = b"\0" * 40
    path.write_bytes(data)


CUT = "cut off or no checkpoint"
DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing": (Path.unlink, "there is no such file"),
    "a folder": (lambda path: (path.unlink(), path.mkdir()), "it is a folder"),
    **{
        f"cut at {keep}": (lambda path, keep=keep: path.write_bytes(path.read_bytes()[:keep]), CUT)
        for keep in (0, 1, 100, -1, -200)
    },
    "text": (lambda path: path.write_text("hello " * 100), rf"{CUT} \(600 bytes"),
    "without directory": (without_directory, ""),
    "a module": (
        lambda path: torch.save(torch.nn.Linear(2, 2), path),
        "not loaded, because it holds more than tensors and plain values",
    ),
    "others' keys": (lambda path: torch.save({"weights": 1}, path), "not written by qconv train"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_what_is_no_checkpoint_is_named(kind: str, saved: Path) -> None:
    damage, message = DAMAGE[kind]
    damage(saved)
    with pytest.raises(CheckpointError, match=rf"checkpoint {saved}: {message}"):
        load_checkpoint(saved)
    assert issubclass(CheckpointError, ValueError)


BWN = {"_target_": "qconv.schemes.bwn"}
SHIFT = {"_target_": "qconv.schemes.shift_q", "weight_bits": 5}


@pytest.mark.parametrize("folder", ["", "runs/a b/checkpoints/"])
def test_another_config_is_told(folder: str) -> None:
    path = Path(f"{folder}a.ckpt")
    checkpoint = {"state_dict": {}, "config": {"scheme": BWN, "other": 1}}
    check_config(path, checkpoint, {"scheme": BWN, "other": 2}, ("scheme",))
    with pytest.raises(CheckpointError) as error:
        check_config(path, checkpoint, {"scheme": SHIFT}, ("scheme",))
    said, _, remedy = str(error.value).rpartition(": ")
    assert said == (
        f"checkpoint {path} was trained with scheme qconv.schemes.bwn(), "
        "but this run has qconv.schemes.shift_q(weight_bits=5)"
    )
    assert ("resume='runs/a b' continues" in remedy) if folder else (remedy == "give the arguments of its run")


@pytest.mark.parametrize(
    "value",
    [
        *("plain", "a/b-c_d.ckpt", "two words", " led", "", "3", "1e-3", "true", "null", "nan", "a=b", "a,b", "a:b"),
        *("{0000..0146}.tar", "glob(*)", "[a]", 'said "so"', "it's", "back\\slash", 'both \\" of', "at the end\\", "é"),
        *(3, 1e-05, True, None, ["a, b", "1"], {"layer[1].conv": {"path": "x y={}"}}, {"a": ["true", True]}),
    ],
)
def test_words_that_hydra_reads_as_they_were_meant(value: Any) -> None:
    for each in (value, [value], {"key": value}):
        assert OverridesParser.create().parse_override(f"key={override(each)}").value() == each


MOVING, EWGS = {"_target_": "qconv.training.MovingAverage"}, {"_target_": "qconv.training.EWGSDelta"}
BEST = {"_target_": "qconv.training.Checkpoints", "folder": "a"}
DEEP = "qconv.training.callbacks.weight_averaging"


@pytest.mark.parametrize(
    ("found", "asked", "told"),
    [
        ({"swa": {**MOVING, "decay": 0.5}}, {}, "callbacks [MovingAverage(decay=0.5)], but this run has []"),
        ({}, {"swa": MOVING}, "callbacks [], but this run has [MovingAverage(decay=0.999)]"),
        ({"ema": {**MOVING, "decay": 0.5}}, {"ema": MOVING}, "callbacks [MovingAverage(decay=0.5)]"),
        ({"ewgs": EWGS}, {"ewgs": {**EWGS, "every_epochs": 5}}, "callbacks [EWGSDelta(every_epochs=10, "),
        (
            {"ema": {"_target_": "pytorch_lightning.callbacks.EMAWeightAveraging"}},
            {},
            "callbacks [EMAWeightAveraging(use_buffers=True, decay=0.999, update_every_n_steps=1)]",
        ),
        ({"best": BEST}, {"best": {**BEST, "monitor": "train_accuracy"}}, "callbacks [Checkpoints(monitor='val_acc"),
        ({"best": BEST}, {"best": {**BEST, "monitor": "val_accuracy", "folder": "b", "every_steps": 9}}, None),
        ({"ema": MOVING}, {"swa": {**MOVING, "decay": 0.999}, "own": {"_target_": "nowhere.Own"}}, None),
        ({"ema": {"_target_": f"{DEEP}.MovingAverage"}, "best": BEST}, {"best": BEST, "ema": MOVING}, None),
    ],
)
def test_callbacks_that_change_the_numbers(found: Any, asked: Any, told: str | None, tmp_path: Path) -> None:
    stored, wanted = {"callbacks": found}, {"callbacks": asked}
    (tmp_path / "config.yaml").write_text(json.dumps(stored))
    assert same_run(tmp_path / "config.yaml", wanted) == (told is None)
    with nullcontext() if told is None else pytest.raises(CheckpointError, match=re.escape(f"trained with {told}")):
        check_config(Path("a.ckpt"), {"config": stored}, wanted, ("callbacks",))


def test_other_tensors_are_told() -> None:
    checkpoint = {"state_dict": {"a": torch.zeros(2), "b": torch.zeros(3)}}
    check_tensors(Path("a.ckpt"), checkpoint, {"a": torch.ones(2), "b": torch.ones(3)})
    for now, told in (({"b": torch.ones(4)}, r"\(4,\)"), ({}, "absent")):
        with pytest.raises(CheckpointError, match=rf"'b' is \(3,\) in it, {told} in this run"):
            check_tensors(Path("a.ckpt"), checkpoint, {"a": torch.ones(2), **now})
    with pytest.raises(CheckpointError, match=r"not written by qconv train"):
        check_config(Path("a.ckpt"), checkpoint, {}, ())
