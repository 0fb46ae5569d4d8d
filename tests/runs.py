"""Runs of `train.py` in the tests: configs, how they are stopped, and what they leave."""

import csv
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import same
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.utilities.exceptions import SIGTERMException
from torch import Tensor

from qconv.training import load_checkpoint
from qconv.training.run import train

ROOT = Path(__file__).parent.parent
CONFIGS = ROOT / "configs"
QUICK = ("model.width=4", "trainer=cpu", "trainer.max_epochs=4", "report=false")


class StopAfter(Callback):
    """Ends the run after the epoch, as a time limit or EarlyStopping would."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.should_stop = trainer.current_epoch == self.epoch


class Send(Callback):
    """Sends the last process a signal before a batch; before batch -1: in the validation."""

    def __init__(self, number: int, epoch: int, batch: int) -> None:
        self.number, self.epoch, self.batch = number, epoch, batch

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if trainer.global_rank != trainer.world_size - 1:
            self.epoch = -1

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if (trainer.current_epoch, batch_idx) == (self.epoch, self.batch):
            os.kill(os.getpid(), self.number)

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if (trainer.current_epoch, batch_idx, -1) == (self.epoch, 0, self.batch):
            os.kill(os.getpid(), self.number)


def config(*overrides: str) -> DictConfig:
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return compose("config", [*overrides])


def command(*arguments: str) -> list[str]:
    return [sys.executable, str(ROOT / "train.py"), *arguments]


def stop(epoch: int) -> str:
    return f"+callbacks.stop={{_target_:runs.StopAfter,epoch:{epoch}}}"


def send(number: signal.Signals, epoch: int, batch: int) -> str:
    return f"+callbacks.send={{_target_:runs.Send,number:{number.value},epoch:{epoch},batch:{batch}}}"


def terminate(epoch: int, batch: int, folder: Path, *words: str) -> None:
    """Trains in this process until SIGTERM comes."""
    with pytest.raises(SIGTERMException):
        train(config(*words, send(signal.SIGTERM, epoch, batch), f"run_dir={folder}"))
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def run_until(signal_number: signal.Signals, epoch: int, batch: int, folder: Path, *more: str) -> str:
    """Starts a program that sends itself the signal; returns what it said on the error stream."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests")}
    arguments = command(*QUICK, send(signal_number, epoch, batch), f"run_dir={folder}", *more)
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    process = subprocess.run(arguments, cwd=folder.parent, env=environment, capture_output=True, text=True)
    signal.signal(signal.SIGINT, inherited)
    killed = signal_number == signal.SIGKILL
    assert process.returncode == (-signal_number if killed else 128 + signal_number), process.stderr
    return process.stderr


def place(checkpoint: Path) -> tuple[int, int]:
    """The epoch that the checkpoint was written in, and how many of its batches had been given."""
    (loader,) = load_checkpoint(checkpoint)["loops"]["fit_loop"]["state_dict"]["combined_loader"]
    return loader["epoch"], loader["batch"]


def last_state(run: Path) -> dict[str, Tensor]:
    """The tensors of the run's last checkpoint."""
    return load_checkpoint(run / "checkpoints/last.ckpt")["state_dict"]


def same_files(one: Path, other: Path) -> bool:
    """Whether two runs have ended alike, bit for bit: their weights, and their figures of each epoch."""
    return same(last_state(one), last_state(other)) and all(
        (one / name).read_text() == (other / name).read_text() for name in ("metrics.csv", "diagnostics.csv")
    )


def rows_of(file: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(file.read_text().splitlines()))
