"""The callback that keeps `best.ckpt` and `last.ckpt`."""

import math
import shlex
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.callbacks import Checkpoint

from ...ground.checks import check_whole
from ...ground.files import atomic_file
from ...loop.optimizer_step import is_final
from ...runs.run_files import BEST, CONFIG, LAST
from ..checkpoint_io import load_checkpoint
from .epoch_figures import EpochFigures
from .termination import Termination


class Checkpoints(EpochFigures, Checkpoint):
    """After each epoch: `last.ckpt`, and `best.ckpt` if `monitor` has risen; of equal epochs the earlier stays.

    Ctrl-C, and SIGTERM, with which schedulers announce that they will stop a run, end it after the optimizer step, with
    a `last.ckpt` from which the epoch continues; during a validation, after the epoch; during the test, at once.

    An epoch with final quantizers beats any epoch before they were final: with float weights, a network of two stages
    is more accurate than the one that will ship.

    Names are fixed and files replaced in place (atomically, by `AtomicCheckpointIO`). A run that resumes in a new
    folder copies the best checkpoint from the folder of the checkpoint that it resumes from. If that has none, or one
    of another epoch, "best" means the best of the epochs from then on.

    Args:
        folder: folder of the two files.
        monitor: the logged metric that decides the best epoch among those with a validation; higher is better.
        every_steps: also write `last.ckpt` within epochs, after this number of optimizer steps.

    Raises:
        ValueError: `every_steps` is not a whole number from 1 on; `monitor` is a loss; or, at the end of an epoch that
            was validated, it is none of the logged figures.
    """

    def __init__(self, folder: str | Path, monitor: str = "val_accuracy", every_steps: int | None = None) -> None:
        if every_steps is not None and check_whole("every_steps", every_steps) < 1:
            raise ValueError(f"every_steps (={every_steps}) must be at least 1")
        if "loss" in monitor:
            raise ValueError(f"monitor (={monitor}) must be a figure where higher is better, such as val_accuracy")
        self.folder, self.monitor, self.every_steps = Path(folder), monitor, every_steps
        self.termination = Termination()
        self.best_score: float | None = None
        self.best_is_final = False
        self.best_epoch: int | None = None
        self.is_own = False  # whether last.ckpt is from this run, not from an earlier one in the same folder

    @property
    def best(self) -> Path:
        """The file of the best checkpoint."""
        return self.folder / BEST.name

    @property
    def last(self) -> Path:
        """The file of the last checkpoint."""
        return self.folder / LAST.name

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Take the folder of the process that writes: others may have named theirs by the second of their own start."""
        self.folder = trainer.strategy.broadcast(self.folder)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Copy the best checkpoint of a resumed run."""
        self.is_own = trainer.ckpt_path is not None and Path(trainer.ckpt_path).resolve() == self.last.resolve()
        if trainer.ckpt_path is None or self.best_epoch is None:
            return
        source = Path(trainer.ckpt_path).with_name(BEST.name)
        if not source.is_file() or load_checkpoint(source)["epoch"] != self.best_epoch:
            # Of a kill between best.ckpt and last.ckpt, or of another run: its weights are not those of the score.
            self.best_score = self.best_epoch = None
        elif trainer.is_global_zero and source.resolve() != self.best.resolve():
            self.folder.mkdir(parents=True, exist_ok=True)
            with source.open("rb") as old, atomic_file(self.best) as new:
                shutil.copyfileobj(old, new)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the checkpoints."""
        final = is_final(pl_module)
        validated, figures = self.validated, self.figures(trainer)
        # Without a validation an epoch can't be the best: the run's result has the figures of one.
        score = figures.get(self.monitor) if validated else None
        if score is None and validated:
            raise ValueError(f"monitor (={self.monitor}) must be one of the run's figures: {', '.join(figures)}")
        is_first = self.best_score is None or math.isnan(self.best_score)
        if score is not None and (is_first or (final, score) > (self.best_is_final, self.best_score)):
            self.best_is_final, self.best_score, self.best_epoch = final, score, trainer.current_epoch
            # Before last.ckpt: a kill between the two leaves a best.ckpt that the resumed epoch writes again.
            trainer.save_checkpoint(self.best)
        self._save_last(trainer)
        if self.termination.asked(trainer):
            self.termination.end(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Make SIGTERM and Ctrl-C wait for a checkpoint from now on."""
        self.termination.notice(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Write `last.ckpt` within the epoch, if the step has left only finite numbers."""
        batches = batch_idx + 1
        # After the last batch comes the checkpoint of the epoch. Between optimizer steps gradients would be lost.
        if batches == trainer.num_training_batches or batches % trainer.accumulate_grad_batches != 0:
            return
        stop = self.termination.asked(trainer)
        due = self.every_steps is not None and trainer.global_step % self.every_steps == 0
        if (stop or due) and all(parameter.isfinite().all() for parameter in pl_module.parameters()):
            self._save_last(trainer)
        if stop:
            self.termination.end(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End the run here if a signal came after the last epoch's checkpoint."""
        stop = self.termination.asked(trainer)
        if stop:
            self.termination.end(trainer)
        self.termination.give_back()

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Make signals end the process at once from now on: nothing is left to save."""
        self.termination.end_at_once()

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore the handlers of signals."""
        self.termination.give_back()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Restore the handlers of signals."""
        self.termination.give_back()

    def _save_last(self, trainer: Trainer) -> None:
        trainer.save_checkpoint(self.last)
        self.is_own = True

    def state_dict(self) -> dict[str, Any]:
        """Return the best value so far."""
        return {"best_score": self.best_score, "best_epoch": self.best_epoch, "best_is_final": self.best_is_final}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The inverse of `state_dict`."""
        self.best_score, self.best_epoch = state_dict["best_score"], state_dict["best_epoch"]
        self.best_is_final = state_dict["best_is_final"]


def where_to_go_on(trainer: Trainer) -> str:
    """Say how an interrupted run can be resumed."""
    callbacks: Iterable[Any] = trainer.checkpoint_callbacks
    for callback in callbacks:
        if isinstance(callback, Checkpoints) and callback.is_own and callback.last.is_file():
            folder = callback.folder.parent
            is_run = (folder / CONFIG).is_file() and callback.folder.name == LAST.parent.name
            word = f"resume={folder}" if is_run else f"ckpt_path={callback.last}"
            return f"{shlex.quote(word)} continues from the last checkpoint"
    return "there is no checkpoint yet"
