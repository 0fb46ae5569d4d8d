"""The callback that moves the schedules of quantizers on."""

from pytorch_lightning import Callback, LightningModule, Trainer

from ..steps import set_progress


class Progress(Callback):
    """Sets every schedule at the start of an epoch: ``qconv.set_progress(model, epoch / max_epochs)``.

    The published schedules (EDE, ReCU, ReSTE, INQ) move once an epoch. What is set depends on the epoch alone and is
    saved with the model: a resumed run goes on where it was.
    """

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Set the schedules of this epoch."""
        if trainer.max_epochs is None or trainer.max_epochs < 1:
            raise ValueError(f"max_epochs (={trainer.max_epochs}) must be given: schedules run over all epochs")
        set_progress(pl_module, trainer.current_epoch / trainer.max_epochs)
