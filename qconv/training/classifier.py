"""The LightningModule: cross-entropy over a network, with the optimizer and schedule it is given."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from pytorch_lightning import LightningModule
from pytorch_lightning.accelerators import CUDAAccelerator
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..optim import ModelOptimizer, shift_penalty
from ..steps import after_every_step
from .initial_weights import describe_quantizers
from .losses import CrossEntropy

Batch = tuple[Tensor, Tensor]
MakeOptimizer = Callable[[Iterator[nn.Parameter]], Optimizer] | ModelOptimizer
MakeScheduler = Callable[..., LRScheduler]
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


class Classifier(LightningModule):
    """Trains `model` to name the class of a picture.

    Logged once an epoch: train_loss, train_accuracy, lr (the mean over the epoch's steps), val_loss, val_accuracy; at
    the end test_loss, test_accuracy.

    Args:
        model: gives `(N, num_classes)` logits of `(N, C, H, W)` pictures.
        optimizer: builds the optimizer from the parameters, as `functools.partial(torch.optim.Adam, lr=0.01)` does; or
            a `qconv.optim.ModelOptimizer`, which gets the model and sorts its parameters into groups.
        scheduler: builds the schedule from `(optimizer, total_steps=…)`, see `qconv.training.schedules`; None keeps the
            learning rate.
        config: plain dictionary that is stored with every checkpoint; `check_config` compares it.
        loss: of `(logits, labels, images)`, what is minimized (`qconv.training.losses`); None is cross-entropy, as
            which validation and test always show.
        channels_last: the memory format of network and pictures; None is True on a GPU.
        shift_decay: weight decay of DeepShift-PS in the loss, times `qconv.optim.shift_penalty`.
        compile: runs the network through `torch.compile`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: MakeOptimizer,
        scheduler: MakeScheduler | None = None,
        config: dict[str, Any] | None = None,
        loss: Loss | None = None,
        channels_last: bool | None = None,
        shift_decay: float = 0.0,
        compile: bool = False,
    ) -> None:
        super().__init__()
        self._channels_last, self.shift_decay = channels_last, shift_decay
        self.model = model
        if compile:
            model.compile()  # in place: names in the checkpoint stay
        self.loss = CrossEntropy() if loss is None else loss
        self.make_optimizer, self.make_scheduler = optimizer, scheduler
        self.config = config

    def forward(self, images: Tensor) -> Tensor:
        """Logits of the pictures."""
        if self.channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        return self.model(images)

    @property
    def channels_last(self) -> bool:
        """As asked for; else on GPUs, whose convolutions are fastest so."""
        if self._channels_last is not None:
            return self._channels_last
        return self._trainer is not None and isinstance(self.trainer.accelerator, CUDAAccelerator)

    def setup(self, stage: str) -> None:
        """Bring the weights into the memory format of the device."""
        del stage
        if self.channels_last:
            self.model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The loss of one batch."""
        del batch_idx
        optimizer = self.optimizers(use_pl_optimizer=False)
        self._log({"lr": optimizer.param_groups[0]["lr"]}, len(batch[1]))  # pyright: ignore
        loss = self._step("train", batch)
        return loss if self.shift_decay == 0 else loss + self.shift_decay * shift_penalty(self.model)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Log loss and accuracy."""
        del batch_idx
        self._step("val", batch)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Log loss and accuracy."""
        del batch_idx
        self._step("test", batch)

    def configure_optimizers(self) -> Any:
        """The optimizer, which clamps latent weights after its steps, and the schedule over all steps of the run."""
        make = self.make_optimizer
        optimizer = make(self.model) if isinstance(make, ModelOptimizer) else make(self.model.parameters())
        after_every_step(optimizer, self.model)
        if self.make_scheduler is None:
            return optimizer
        scheduler = self.make_scheduler(optimizer, total_steps=int(self.trainer.estimated_stepping_batches))
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Store the config and what the quantizers are beside the weights."""
        checkpoint["quantizers"] = describe_quantizers(self.model)
        if self.config is not None:
            checkpoint["config"] = self.config

    def _step(self, split: str, batch: Batch) -> Tensor:
        images, labels = batch
        logits = self(images)
        loss = self.loss(logits, labels, images) if split == "train" else F.cross_entropy(logits, labels)
        accuracy = (logits.detach().argmax(1) == labels).float().mean()
        self._log({f"{split}_loss": loss.detach(), f"{split}_accuracy": accuracy}, len(labels))
        return loss

    def _log(self, values: dict[str, Any], batch_size: int) -> None:
        bar = any(name.endswith("accuracy") for name in values)
        self.log_dict(values, on_step=False, on_epoch=True, batch_size=batch_size, sync_dist=True, prog_bar=bar)
