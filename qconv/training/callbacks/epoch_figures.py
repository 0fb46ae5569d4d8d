"""The figures logged in the present epoch, without leftovers of earlier epochs."""

from pytorch_lightning import Callback, LightningModule, Trainer


class EpochFigures(Callback):
    """A base of callbacks that read figures at the end of an epoch.

    In an epoch without validation Lightning still shows the figures of the last one that had one.
    """

    validated = False
    """Whether this epoch has been validated so far."""
    before: frozenset[str] = frozenset()
    of_validation: frozenset[str] = frozenset()
    """The names of the figures that validations have logged, and how they began."""

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note which figures there are without this validation."""
        self.before = frozenset(trainer.callback_metrics)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note that this epoch has validation figures, and which."""
        self.of_validation |= frozenset(trainer.callback_metrics) - self.before
        self.validated = not trainer.sanity_checking

    def figures(self, trainer: Trainer) -> dict[str, float]:
        """Return the figures of this epoch, sorted by name; call it once, at the end of the epoch."""
        metrics = {name: float(value) for name, value in sorted(trainer.callback_metrics.items())}
        own = {name: value for name, value in metrics.items() if self.validated or name not in self.of_validation}
        self.validated = False
        return own
