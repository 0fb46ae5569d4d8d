"""The callback that examines the quantized layers once per epoch: `diagnostics.csv` and `diagnostics.png`."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

from pytorch_lightning import Callback, LightningModule, Trainer
from torch import nn

from ...check import diagnostics
from ...ground.table import write_csv
from ...runs.diagnostics_figure import draw_diagnostics
from ...runs.run_files import DIAGNOSTICS


class Diagnostics(Callback):
    """Writes the rows of `qconv.Diagnostics` at the end of each epoch, of the weights and of one validation batch.

    With a logger, the figures also go there as `<figure>/<layer>`. It runs only in the first process.

    Args:
        folder: folder of the two files.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.measured: diagnostics.Diagnostics | None = None
        self.batch = ExitStack()
        self.within_epoch = False
        self.resumed: dict[str, Any] = {}

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remember the levels at the start."""
        if trainer.is_global_zero:
            state = self.state_dict()
            self.measured = diagnostics.Diagnostics(cast(nn.Module, pl_module.model))
            if state:
                self.measured.load_state_dict(state)

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Record the layers' inputs of the first batch."""
        if batch_idx == 0 and self.measured and not trainer.sanity_checking:
            self.batch.enter_context(self.measured.recording())

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Examine the inputs."""
        self.batch.close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Stop recording if the batch failed."""
        self.batch.__exit__(type(exception), exception, exception.__traceback__)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save the levels at the start of the epoch from now on."""
        self.within_epoch = True

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Add a row for each layer."""
        self.within_epoch = False
        if self.measured is None:
            return
        for row in self.measured.step(epoch=trainer.current_epoch, optimizers=trainer.optimizers):
            figures = {f"{key}/{row['layer']}": value for key, value in row.items() if key not in ("epoch", "layer")}
            for logger in trainer.loggers:
                logger.log_metrics(figures, trainer.global_step)
        if self.measured.rows:
            write_csv(self.measured.rows, self.folder / DIAGNOSTICS)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Draw the figure."""
        if self.measured and self.measured.rows:
            draw_diagnostics(self.measured.rows, self.folder / "diagnostics.png")

    def state_dict(self) -> dict[str, Any]:
        """Return the rows so far, the weights that changed their level, and the levels at the start of the epoch."""
        if self.measured is None:
            return self.resumed
        return self.measured.state_dict() | ({} if self.within_epoch else {"levels": {}})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The inverse of `state_dict`."""
        self.resumed = state_dict
