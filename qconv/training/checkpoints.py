"""The callback that keeps `best.ckpt` and `last.ckpt`."""

import shutil
from pathlib import Path
from typing import Any

from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.callbacks import Checkpoint

from ..files import atomic_file
from ..steps import is_final


class Checkpoints(Checkpoint):
    """After each epoch: `last.ckpt`, and `best.ckpt` if `monitor` has risen; of equal epochs the earlier stays.

    Epochs in which all quantizers are final count more than any before: with float weights still in it, a network of
    two stages is better than what will ship.

    Names are fixed and files replaced in place (atomically, by `AtomicCheckpointIO`). A run that resumes in a new
    folder takes the best checkpoint so far from beside the one it resumes from; if there is none, "best" means the best
    of the epochs from there on.

    Args:
        folder: where the two files go.
        monitor: the logged metric that says what is best; higher is better.
    """

    def __init__(self, folder: str | Path, monitor: str = "val_accuracy") -> None:
        self.folder, self.monitor = Path(folder), monitor
        self.best, self.last = self.folder / "best.ckpt", self.folder / "last.ckpt"
        self.best_score: float | None = None
        self.best_is_final = False
        self.best_epoch: int | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Bring the best checkpoint of a resumed run along."""
        del pl_module
        if trainer.ckpt_path is None or self.best_epoch is None:
            return
        source = Path(trainer.ckpt_path).with_name("best.ckpt")
        if not source.is_file():
            self.best_score = self.best_epoch = None
        elif trainer.is_global_zero and source.resolve() != self.best.resolve():
            self.folder.mkdir(parents=True, exist_ok=True)
            with source.open("rb") as old, atomic_file(self.best) as new:
                shutil.copyfileobj(old, new)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the checkpoints."""
        final = is_final(pl_module)
        metric = trainer.callback_metrics.get(self.monitor)
        score = None if metric is None else float(metric)
        if score is not None and (self.best_score is None or (final, score) > (self.best_is_final, self.best_score)):
            self.best_is_final, self.best_score, self.best_epoch = final, score, trainer.current_epoch
            # Before last.ckpt: a kill between the two leaves a best.ckpt that the resumed epoch writes once more.
            trainer.save_checkpoint(self.best)
        trainer.save_checkpoint(self.last)

    def state_dict(self) -> dict[str, Any]:
        """What is best so far."""
        return {"best_score": self.best_score, "best_epoch": self.best_epoch, "best_is_final": self.best_is_final}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The inverse of `state_dict`."""
        self.best_score, self.best_epoch = state_dict["best_score"], state_dict["best_epoch"]
        self.best_is_final = state_dict["best_is_final"]
