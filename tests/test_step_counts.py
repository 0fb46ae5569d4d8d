"""A run that goes on to another end, or with another number of optimizer steps in an epoch."""

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
from qconv.training.step_counts import check_takes_steps
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


@pytest.mark.parametrize("place", [(1, 3), (1, BATCHES - 1)], ids=str)
def test_another_number_of_steps_in_an_epoch_is_refused(place: tuple[int, int], tmp_path: Path) -> None:
    rates = Rates(place, tmp_path / "a.ckpt")
    fitted(rates, schedules.constant)
    with pytest.raises(ValueError, match=r"an epoch has 4 optimizer steps now, 7 so far: go on with as many, by data"):
        fitted(rates, schedules.constant, ckpt_path=tmp_path / "a.ckpt", accumulate_grad_batches=2)
    fitted(rates, schedules.constant, ckpt_path=tmp_path / "a.ckpt")


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


def test_a_run_that_goes_on_with_other_batches(tmp_path: Path) -> None:
    words = ("model.width=4", "trainer=cpu", "scheduler=linear", "report=false", "trainer.max_epochs=4")
    cut = "+callbacks.send={_target_:test_train.Send,number:15,epoch:1,batch:5}"
    with pytest.raises(BaseException, match="stopped by SIGTERM"):
        program.train(config(*words, cut, f"run_dir={tmp_path}"))
    cfg = stored_config(tmp_path, ("+trainer.accumulate_grad_batches=2", "~callbacks.send"), configs())
    cfg.resume, cfg.ckpt_path = str(tmp_path), str(tmp_path / "checkpoints/last.ckpt")
    with pytest.raises(ValueError, match="an epoch has 10 optimizer steps now, 19 so far"):
        program.train(cfg)


def test_progress_counts_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    classifier = Classifier(nn.Linear(2, 2), torch.optim.SGD)
    trainer = SimpleNamespace(current_epoch=2, global_step=30, accumulate_grad_batches=2, estimated_stepping_batches=40)
    monkeypatch.setattr(Classifier, "trainer", trainer)
    assert classifier._progress(5) == 30 / 40  # max_steps ends it
    classifier.steps_per_epoch = 10
    assert classifier._progress(5) == 22 / 40
