"""The callbacks that write `metrics.csv`, one row per epoch, and `curves.png`."""

import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from pytorch_lightning import LightningModule, Trainer

from ...ground.table import write_csv
from ...runs.curves import draw_curves
from ...runs.run_files import METRICS
from .epoch_figures import EpochFigures

Row = dict[str, float]


class History(EpochFigures):
    """Collects the logged figures, one row per epoch, and writes `metrics.csv` and `curves.png`.

    The rows are part of the checkpoint: a resumed run's file and figure show all epochs. Lightning's CSVLogger writes
    two half-empty rows per epoch and starts over on resuming.

    Args:
        folder: folder of the two files.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.rows: list[Row] = []
        self.earlier_seconds, self.start = 0.0, 0.0

    @property
    def seconds(self) -> float:
        """Wall time of the run's parts up to the last checkpoint, and since then."""
        return self.earlier_seconds + time.perf_counter() - self.start

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock."""
        self.start = time.perf_counter()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Add the epoch's row and write the file."""
        self.rows.append({"epoch": trainer.current_epoch, "step": trainer.global_step, **self.figures(trainer)})
        if trainer.is_global_zero:
            write_csv(self.rows, self.folder / METRICS)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write both files; a run resumed after its last epoch has rows, too."""
        if trainer.is_global_zero and self.rows:
            write_csv(self.rows, self.folder / METRICS)
            self.draw()

    def complete(self, figures: dict[str, float], trainer: Trainer) -> None:
        """Add figures to the row of the last epoch, and write the file."""
        self.rows[-1] |= figures
        if trainer.is_global_zero:
            write_csv(self.rows, self.folder / METRICS)

    def draw(self, best_epoch: int | None = None, test: dict[str, float] | None = None) -> None:
        """Draw the curves; after the test also its figures, for the checkpoint of `best_epoch`."""
        draw_curves(self.rows, self.folder / "curves.png", best_epoch=best_epoch, test=test)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Draw the epochs so far; an error in drawing must not hide the error that ended the run."""
        if trainer.is_global_zero and self.rows:
            with suppress(OSError):
                self.draw()

    def state_dict(self) -> dict[str, Any]:
        """Return the rows and the time so far."""
        return {"rows": self.rows, "seconds": self.seconds}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The inverse of `state_dict`."""
        self.rows, self.earlier_seconds = list(state_dict["rows"]), state_dict["seconds"]
