"""The callback that advances the schedules of quantizers."""

import math

from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.callbacks import Timer

from ...loop.optimizer_step import final_from, set_progress
from ...quantizers.part import has_begun


class Progress(Callback):
    """Sets every schedule at the start of an epoch: ``qconv.set_progress(model, epoch / max_epochs)``.

    The published schedules (EDE, ReCU, ReSTE, INQ) advance once per epoch. The values depend only on the epoch and are
    saved with the model, so a resumed run continues where it was.
    """

    def __init__(self) -> None:
        self.epochs: int | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Note the number of epochs: Lightning's StochasticWeightAveraging will add one in which nothing is trained."""
        self.epochs = trainer.max_epochs

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse what ends training before the schedules: too few epochs for stages, a number of steps, or a time."""
        if trainer.max_steps not in (-1, None) and not trainer.fast_dev_run:  # pyright: ignore[reportAttributeAccessIssue]
            raise ValueError(
                f"max_steps (={trainer.max_steps}) must not be given: quantizers' schedules count epochs, and would "
                "not reach their end. Use max_epochs, with limit_train_batches for shorter epochs"
            )
        timers = [each for each in trainer.callbacks if isinstance(each, Timer)]  # pyright: ignore[reportAttributeAccessIssue]
        if any(timer.time_remaining() is not None for timer in timers):
            raise ValueError(
                "max_time must not be given: training would end before the quantizers' schedules do. Stop the run "
                "with SIGTERM, for example by the command timeout, and continue it with resume="
            )
        begins, epochs = final_from(pl_module), self.epochs
        if epochs is not None and epochs > 0 and not has_begun(begins, 1 - 1 / epochs):
            needed = math.ceil(round(1 / (1 - begins), 6))
            raise ValueError(
                f"max_epochs (={epochs}) must be at least {needed}: the last stage begins at a progress of {begins:g}"
            )

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Set the schedules of this epoch."""
        if self.epochs is None or self.epochs < 1:
            raise ValueError(f"max_epochs (={self.epochs}) must be given: schedules run over all epochs")
        set_progress(pl_module, min(trainer.current_epoch / self.epochs, 1.0))
