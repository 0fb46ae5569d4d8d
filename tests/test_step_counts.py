"""A run that goes on with another number of optimizer steps in an epoch."""

import csv
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pytorch_lightning import Callback, Trainer
from test_train import config
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

from qconv.cli import train as program
from qconv.cli.configs import folder as configs
from qconv.training import Classifier, load_checkpoint, make_trainer, schedules
from qconv.training.step_counts import check_length, check_takes_steps, scale_steps_, steps_before, steps_done
from qconv.training.stored_config import stored_config

pytestmark = pytest.mark.filterwarnings("ignore::lightning_fabric.utilities.warnings.PossibleUserWarning")  # of workers
EPOCHS, BATCHES = 4, 7
SCHEDULES = {
    "linear": schedules.linear,
    "one cycle": lambda optimizer, total_steps: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=total_steps),
    "several steps": lambda optimizer, total_steps: lr_scheduler.MultiStepLR(
        optimizer, [total_steps // 2 + 3, total_steps - 2]
    ),
    "cosine": lambda optimizer, total_steps: lr_scheduler.CosineAnnealingLR(optimizer, total_steps),
    "a step": lambda optimizer, total_steps: lr_scheduler.StepLR(optimizer, total_steps * 3 // 4),
}


@pytest.mark.parametrize("make", [lr_scheduler.StepLR, partial(lr_scheduler.CosineAnnealingLR, T_max=5)])
def test_a_schedule_that_counts_epochs(make: Any) -> None:
    with pytest.raises(
        ValueError, match=r"scheduler \((StepLR|CosineAnnealingLR)\) must take total_steps: schedules ch"
    ):
        check_takes_steps(make)
    for fits in (*SCHEDULES.values(), partial(lr_scheduler.OneCycleLR, max_lr=0.1), lambda optimizer, **options: None):
        check_takes_steps(fits)


class Rates(Callback):
    """Keeps the learning rate of each batch, and a checkpoint after one of them."""

    def __init__(self, place: tuple[int, int] | None = None, path: Path | None = None) -> None:
        self.rates: dict[tuple[int, int], float] = {}
        self.place, self.path = place, path

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        self.rates[trainer.current_epoch, batch_idx] = rate

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (trainer.current_epoch, batch_idx) == self.place:
            trainer.save_checkpoint(self.path or "")


def fitted(rates: Rates, schedule: Any, **options: Any) -> None:
    resumed, path = options.pop("ckpt_path", None), options.pop("path", None)
    trainer = make_trainer(accelerator="cpu", callbacks=[rates], **{"max_epochs": EPOCHS, **options})
    pictures = TensorDataset(torch.rand(BATCHES, 1, 2, 2), torch.zeros(BATCHES, dtype=torch.long))
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
    classifier = Classifier(model, partial(torch.optim.SGD, lr=0.1), schedule)
    trainer.fit(classifier, DataLoader(pictures), DataLoader(pictures), ckpt_path=resumed, weights_only=True)
    if path is not None:
        trainer.save_checkpoint(path)


@pytest.mark.parametrize("place", [(1, 3), (1, BATCHES - 1), (2, 0)], ids=str)
@pytest.mark.parametrize("accumulate", [(1, 2), (2, 1), (3, 2)], ids=str)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules_go_on_as_with_these_steps_from_the_start(
    schedule: str, accumulate: tuple[int, int], place: tuple[int, int], tmp_path: Path
) -> None:
    before, now = accumulate
    first, expected, found = Rates(place, tmp_path / "a.ckpt"), Rates(), Rates()
    fitted(first, SCHEDULES[schedule], accumulate_grad_batches=before)
    fitted(expected, SCHEDULES[schedule], accumulate_grad_batches=now)
    fitted(found, SCHEDULES[schedule], accumulate_grad_batches=now, ckpt_path=tmp_path / "a.ckpt")
    whole = {at: rate for at, rate in expected.rates.items() if at > (2, now)}
    assert len(whole) > BATCHES
    assert {at: found.rates[at] for at in whole} == pytest.approx(whole, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("place", [(1, 3), (1, BATCHES - 1), (EPOCHS - 1, BATCHES - 1)], ids=str)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_more_epochs_follow_the_longer_schedule(schedule: str, place: tuple[int, int], tmp_path: Path) -> None:
    """From the first step on, although the rate was 0 at the end of the shorter one."""
    first, expected, found = Rates(place, tmp_path / "a.ckpt"), Rates(), Rates()
    fitted(first, SCHEDULES[schedule])
    fitted(expected, SCHEDULES[schedule], max_epochs=2 * EPOCHS)
    fitted(found, SCHEDULES[schedule], max_epochs=2 * EPOCHS, ckpt_path=tmp_path / "a.ckpt")
    assert len(found.rates) == 2 * EPOCHS * BATCHES - (place[0] * BATCHES + place[1] + 1)
    assert found.rates == pytest.approx({at: expected.rates[at] for at in found.rates}, rel=1e-6, abs=1e-9)


def test_schedules_that_cannot_follow(tmp_path: Path) -> None:
    def restarts(optimizer: Any, total_steps: int) -> Any:
        return lr_scheduler.CosineAnnealingWarmRestarts(optimizer, total_steps)

    rates = Rates((1, BATCHES - 1), tmp_path / "a.ckpt")
    fitted(rates, restarts)
    with pytest.raises(
        ValueError, match=r"has 4 optimizer steps from here on, 7 so far: scheduler \(CosineAnnealingWarm"
    ):
        fitted(rates, restarts, ckpt_path=tmp_path / "a.ckpt", accumulate_grad_batches=2)
    fitted(rates, restarts, ckpt_path=tmp_path / "a.ckpt")


def test_schedules_that_keep_their_length(tmp_path: Path) -> None:
    def warm(optimizer: Any, total_steps: int) -> Any:
        parts = [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)]
        parts.append(lr_scheduler.CosineAnnealingLR(optimizer, total_steps - 2))  # pyright: ignore[reportArgumentType]
        return lr_scheduler.SequentialLR(optimizer, parts, [2])  # pyright: ignore[reportArgumentType]

    def exponential(optimizer: Any, total_steps: int) -> Any:
        parts = [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2), lr_scheduler.ExponentialLR(optimizer, 0.9)]
        return lr_scheduler.SequentialLR(optimizer, parts, [2])

    rates = Rates((1, BATCHES - 1), tmp_path / "a.ckpt")
    fitted(rates, warm)
    with pytest.raises(ValueError, match=r"has 56 optimizer steps now, 28 so far: scheduler \(SequentialLR\) can't"):
        fitted(rates, warm, ckpt_path=tmp_path / "a.ckpt", max_epochs=2 * EPOCHS)
    fitted(rates, warm, ckpt_path=tmp_path / "a.ckpt")
    older = load_checkpoint(tmp_path / "a.ckpt")
    del older["total_steps"]
    check_length(older, 56, warm(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1), 56), warm)
    older["config"] = {"trainer": {"max_epochs": EPOCHS}}
    with pytest.raises(ValueError, match=r"has 56 optimizer steps now, 28 so far"):
        check_length(older, 56, warm(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1), 56), warm)
    fitted(rates, exponential)
    fitted(rates, exponential, ckpt_path=tmp_path / "a.ckpt", max_epochs=2 * EPOCHS)


def test_steps_that_epochs_do_not_decide(tmp_path: Path) -> None:
    """`max_steps` ends a training of one's own."""
    rates = Rates((1, 3), tmp_path / "a.ckpt")
    fitted(rates, schedules.linear, max_epochs=-1, max_steps=20)
    assert "steps_per_epoch" not in load_checkpoint(tmp_path / "a.ckpt")
    again = Rates()
    fitted(again, schedules.linear, max_epochs=-1, max_steps=20, ckpt_path=tmp_path / "a.ckpt")
    assert again.rates == pytest.approx({at: rate for at, rate in rates.rates.items() if at > (1, 3)})


def test_a_checkpoint_that_was_saved_after_the_last_epoch(tmp_path: Path) -> None:
    expected, found = Rates(), Rates()
    fitted(expected, schedules.constant, path=tmp_path / "a.ckpt", max_epochs=2)
    saved = load_checkpoint(tmp_path / "a.ckpt")
    assert (steps_before(saved), steps_done(saved, 4, 2)) == (BATCHES, 8)
    fitted(expected, schedules.linear, accumulate_grad_batches=2)
    fitted(found, schedules.linear, accumulate_grad_batches=2, ckpt_path=tmp_path / "a.ckpt")
    assert {at: found.rates[at] for at in found.rates if at > (2, 1)} == pytest.approx(
        {at: rate for at, rate in expected.rates.items() if at > (2, 1)}
    )
    assert min(found.rates) == (2, 0)


def test_a_checkpoint_from_before() -> None:
    progress: dict[str, Any] = {"is_last_batch": True, "current": {"processed": 7}}
    loop = {"epoch_loop.batch_progress": progress, "epoch_progress": {"current": {"ready": 2}}}
    checkpoint = {"global_step": 8, "loops": {"fit_loop": loop}}
    assert (steps_before(checkpoint), steps_done(checkpoint, 7, 1)) == (4, 14)
    progress["is_last_batch"] = False
    assert (steps_before(checkpoint), steps_done(checkpoint, 7, 2)) == (None, 10)


def test_a_run_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    words = ("model.width=4", "trainer=cpu", "scheduler=linear", "report=false", "trainer.max_epochs=4")
    cut = "+callbacks.send={_target_:test_train.Send,number:15,epoch:1,batch:5}"
    with pytest.raises(BaseException, match="stopped by SIGTERM"):
        program.train(config(*words, cut, f"run_dir={tmp_path}"))
    cfg = stored_config(tmp_path, ("+trainer.accumulate_grad_batches=2", "~callbacks.send"), configs())
    cfg.resume, cfg.ckpt_path = str(tmp_path), str(tmp_path / "checkpoints/last.ckpt")
    program.train(cfg)
    assert "an epoch has 10 optimizer steps from here on, 19 so far: schedules go on" in caplog.text
    rates = [float(row["lr"]) for row in csv.DictReader((tmp_path / "metrics.csv").read_text().splitlines())]
    before, after = ([0.01 * (1 - step / (count - 1)) for step in range(count)] for count in (76, 40))
    epochs = before[:19], before[19:25] + after[13:20], after[20:30], after[30:]
    assert rates == pytest.approx([sum(steps) / len(steps) for steps in epochs], rel=1e-5)
    assert load_checkpoint(tmp_path / "checkpoints/last.ckpt")["lr_schedulers"][0]["last_epoch"] == 40


def test_rules_and_dampening_count_epochs_too(monkeypatch: pytest.MonkeyPatch) -> None:
    state: dict[int, dict[str, Any]] = {0: {"OvSW_steps": 20, "step": 20.0}, 1: {"step": 20.0}}
    rates: list[dict[str, Any]]
    for rates in ([{"last_epoch": 20}], []):
        state[0]["OvSW_steps"] = 20
        checkpoint = {"global_step": 20, "lr_schedulers": rates, "optimizer_states": [{"state": state}]}
        scale_steps_(checkpoint, 10, ["OvSW_steps"])
        assert state == {0: {"OvSW_steps": 10, "step": 20.0}, 1: {"step": 20.0}}
        assert all(each == {"last_epoch": 10} for each in rates)
    classifier = Classifier(nn.Linear(2, 2), torch.optim.SGD)
    trainer = SimpleNamespace(current_epoch=2, global_step=30, accumulate_grad_batches=2, estimated_stepping_batches=40)
    monkeypatch.setattr(Classifier, "trainer", trainer)
    assert classifier._progress(5) == 30 / 40  # max_steps ends it
    classifier.steps_per_epoch = 10
    assert classifier._progress(5) == 22 / 40
