"""The callback that sets EWGS's δ from the Hessian in the course of a training."""

from typing import Any

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from torch import Tensor

from ...checks import check_at_least_one, check_whole
from ...ewgs_deltas import check, deltas_of, write_deltas


class EWGSDelta(Callback):
    """Sets δ of all EWGS quantizers every few epochs, from the Hessian on the first batches (`qconv.set_ewgs_deltas`).

    The first update is after ``every_epochs`` epochs; before it δ is the scheme's. Batches are those of the epoch, with
    the weights that they meet: the mean over them counts from the last of them on. With a logger, each δ goes there as
    ``delta/<quantizer>``.

    Args:
        every_epochs: epochs from one update to the next.
        batches: of the epoch, all of them if it has fewer.
        probes: the most random vectors for each trace.

    Raises:
        ValueError: an argument below 1; a model without EWGS quantizers, or with others that have no second derivative.
    """

    def __init__(self, every_epochs: int = 10, batches: int = 3, probes: int = 50) -> None:
        numbers = {"every_epochs": every_epochs, "batches": batches, "probes": probes}
        for name, number in numbers.items():
            check_whole(name, number)
        check_at_least_one(**numbers)
        self.every_epochs, self.batches, self.probes = every_epochs, batches, probes
        self.found: list[dict[str, float]] = []

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Raise now if δ can't be measured later."""
        del trainer
        check(pl_module.model)  # pyright: ignore[reportArgumentType]

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: tuple[Tensor, Tensor], batch_idx: int
    ) -> None:
        """Measure, and write with the last batch that counts."""
        epoch = trainer.current_epoch
        if epoch == 0 or epoch % self.every_epochs != 0 or batch_idx >= self.batches:
            return
        module: Any = pl_module
        images, labels = module.as_weights(batch[0]), batch[1]
        generator = torch.Generator().manual_seed(trainer.global_step)
        self.found.append(
            deltas_of(
                module.model,
                (images, labels),
                self.probes,
                generator,
                lambda logits, labels: module.loss(logits, labels, images),
            )
        )
        if batch_idx + 1 in (self.batches, trainer.num_training_batches):
            deltas = write_deltas(module.model, self.found)
            self.found = []
            for logger in trainer.loggers:
                logger.log_metrics({f"delta/{name}": delta for name, delta in deltas.items()}, trainer.global_step)

    def state_dict(self) -> dict[str, Any]:
        """Return what batches of an unfinished update have given."""
        return {"found": self.found}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The inverse of `state_dict`."""
        self.found = list(state_dict["found"])
