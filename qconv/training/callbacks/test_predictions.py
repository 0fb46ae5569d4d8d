"""The callback that keeps the predictions of the test for the report."""

from typing import Any

import torch.distributed as dist
from pytorch_lightning import Callback, LightningModule, Trainer

from ...ground.processes import is_distributed
from ..report.predictions import Predictions

PARTS = 32  # batches whose mistakes are kept until they are joined


class TestPredictions(Callback):
    """Collects the predictions of the test, so that the report needs no second pass over the images.

    Each of several processes sees a share of the images; at the end each has all predictions.
    """

    __test__ = False  # it is no test of pytest's

    def __init__(self) -> None:
        self.parts: list[Predictions] = []
        self.problem = ""

    def predictions(self) -> Predictions:
        """Return the predictions of all images; a ValueError says why they could not be kept."""
        if self.problem or not self.parts:
            raise ValueError(self.problem or "there was no test")
        return Predictions.joined(self.parts)

    def on_test_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Keep the predictions of the batch; `outputs` are the logits."""
        data: Any = trainer.datamodule  # pyright: ignore[reportAttributeAccessIssue]
        try:
            images, labels = batch
            self.parts.append(Predictions.of_batch(outputs, images, labels, getattr(data, "normalize", None)))
            if len(self.parts) == PARTS:
                self.parts = [Predictions.joined(self.parts)]
        except Exception as error:  # noqa: BLE001  # whatever the data are: the test goes on without a report
            self.problem = f"the predictions of the test were not kept: {error}"

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Get the shares of the other processes."""
        if is_distributed() and trainer.world_size > 1:
            shares: list[Any] = [None] * trainer.world_size
            dist.all_gather_object(shares, (self.parts, self.problem))
            self.parts = [part for parts, _ in shares for part in parts]
            self.problem = next((problem for _, problem in shares if problem), "")
