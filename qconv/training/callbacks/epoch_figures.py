"""The figures that were logged in an epoch, without those of an epoch before it."""

from pytorch_lightning import Callback, LightningModule, Trainer


class EpochFigures(Callback):
    """A base of callbacks that read figures at the end of an epoch.

    In an epoch without validation Lightning still shows the figures of the last one that had one.
    """

    validated = False

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note that this epoch has validation figures."""
        del pl_module
        self.validated = not trainer.sanity_checking

    def figures(self, trainer: Trainer) -> dict[str, float]:
        """Return those of this epoch, by their names in order; to be called once, at its end."""
        metrics = {name: float(value) for name, value in sorted(trainer.callback_metrics.items())}
        own = {name: value for name, value in metrics.items() if self.validated or not name.startswith("val_")}
        self.validated = False
        return own
