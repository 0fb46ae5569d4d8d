"""The callback that sets EWGS's δ from the Hessian in the course of a training."""

import warnings
from typing import Any

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from torch import Tensor

from ...after_training.ewgs_deltas import deltas_of, obstacle, waits_for_data, write_deltas
from ...ground.checks import check_at_least_one


class EWGSDelta(Callback):
    """Sets δ of all EWGS quantizers every few epochs, from the Hessian (`qconv.set_ewgs_deltas`).

    It measures on an epoch's first batches, each just before its step, and sets δ after the last of them: first when
    ``every_epochs`` epochs are over. Until then δ is the scheme's. It measures in float32 under mixed precision.

    While a network is in a stage that quantizes inputs in another way, or has no EWGS quantizer yet, δ stays; while a
    layer waits for its first batch, the next batch is taken. With a logger, each δ goes there as
    ``delta/<quantizer>``.

    Args:
        every_epochs: epochs from one update to the next.
        batches: of the epoch; all of them if it has fewer.
        probes: at most this many random vectors for each trace.

    Raises:
        ValueError: an argument below 1; a model whose last stage has no EWGS quantizers, or layers without a second
            derivative.
    """

    def __init__(self, every_epochs: int = 10, batches: int = 3, probes: int = 50) -> None:
        check_at_least_one(every_epochs=every_epochs, batches=batches, probes=probes)
        self.every_epochs, self.batches, self.probes = every_epochs, batches, probes
        self.found: list[dict[str, float]] = []
        self.last_update = 0

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Raise now if δ can't be measured later, and warn if it will not be."""
        model: Any = pl_module.model
        if why := obstacle(model, at_last=True):
            raise ValueError(why)
        if trainer.max_epochs is not None and 0 < trainer.max_epochs <= self.every_epochs:
            warnings.warn(
                f"EWGSDelta: every_epochs (={self.every_epochs}) is not below the {trainer.max_epochs} epochs of the "
                "run, so delta is never measured and keeps the scheme's value",
                stacklevel=2,
            )

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: tuple[Tensor, Tensor], batch_idx: int
    ) -> None:
        """Measure, and write with the last batch that counts."""
        epoch = trainer.current_epoch
        if epoch % self.every_epochs != 0 or epoch <= self.last_update:
            return
        module: Any = pl_module
        if not waits_for_data(module.model) and not obstacle(module.model):
            images, labels = module.as_weights(batch[0]), batch[1]
            generator = torch.Generator().manual_seed((epoch << 20) + batch_idx)

            def loss(logits: Tensor, labels: Tensor) -> Tensor:
                return module.loss(logits, labels, images)

            self.found.append(deltas_of(module.model, (images, labels), self.probes, generator, loss))
        if len(self.found) < self.batches and batch_idx + 1 < trainer.num_training_batches:
            return
        self.last_update = epoch
        if self.found:
            deltas, self.found = write_deltas(module.model, self.found), []
            for logger in trainer.loggers:
                logger.log_metrics({f"delta/{name}": delta for name, delta in deltas.items()}, trainer.global_step)

    def state_dict(self) -> dict[str, Any]:
        """Return the results of an unfinished update, and the epoch of the last one."""
        return {"found": self.found, "last_update": self.last_update}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The inverse of `state_dict`."""
        self.found, self.last_update = list(state_dict["found"]), int(state_dict["last_update"])
