"""The LightningModule: cross-entropy of a network, with the optimizer and schedule given."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from pytorch_lightning import LightningModule
from pytorch_lightning.accelerators import CUDAAccelerator
from pytorch_lightning.callbacks import GradientAccumulationScheduler
from pytorch_lightning.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torchmetrics import Metric

from ..check import watch
from ..ground.checks import check_flags, check_not_negative
from ..layers import QuantizedLayer
from ..loop.optimizer_step import after_every_step
from ..optim import ModelOptimizer, StepRule, dampening_penalty, shift_penalty, sine_penalty
from ..optim.penalty import DAMPENING_START
from ..optim.step_rules import at, since
from .compilation import Mode, check_mode, compile_, fix_size, replays, starts
from .initial_weights import describe_quantizers
from .losses import CrossEntropy
from .step_counts import (
    STEPS,
    TOTAL,
    check_steps,
    follow_length,
    schedule_of,
    steps_per_epoch,
)
from .trained_on import TRAINED_ON, check_same, trained_on

Batch = tuple[Tensor, Tensor]
MakeOptimizer = Callable[[Iterator[nn.Parameter]], Optimizer] | ModelOptimizer
MakeScheduler = Callable[..., LRScheduler]
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]

TRAINING_FIGURES = ("lr", "train_loss", "train_accuracy")
EVALUATION_FIGURES = ("val_loss", "val_accuracy", "test_loss", "test_accuracy")
CROSS_ENTROPY = CrossEntropy()


class WeightedMean(Metric):
    """Weighted mean of numbers over all processes."""

    sums: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("sums", torch.zeros(2), dist_reduce_fx="sum")

    def update(self, value: Tensor | float, weight: float) -> None:
        """Add a number."""
        # `self.sums[0] += …` would also copy the sum onto itself.
        self.sums[0].add_(weight * (value.to(self.sums.dtype) if isinstance(value, Tensor) else value))
        self.sums[1].add_(weight)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        before = self.sums
        applied = super()._apply(*args, **kwargs)
        # A cast of the network to fewer bits is none of its figures, which would be rounded.
        self.sums = before.to(self.sums.device, torch.promote_types(before.dtype, self.sums.dtype))
        return applied

    def reset(self) -> None:
        super().reset()
        # In 16 bits the sums would soon stop growing.
        self.sums = self.sums.to(torch.promote_types(self.sums.dtype, torch.float32))

    def compute(self) -> Tensor:
        """The mean."""
        return self.sums[0] / self.sums[1]


class Classifier(LightningModule):
    """Trains `model` to classify images.

    Logged once an epoch: train_loss, train_accuracy, lr (the mean over the epoch's steps), val_loss, val_accuracy; at
    the end test_loss, test_accuracy.

    Args:
        model: returns `(N, num_classes)` logits for `(N, C, H, W)` images.
        optimizer: builds the optimizer from the parameters, as `functools.partial(torch.optim.Adam, lr=0.01)` does; or
            a `qconv.optim.ModelOptimizer`, which gets the model and sorts its parameters into groups.
        scheduler: builds the schedule from `(optimizer, total_steps=…)`, see `qconv.training.schedules`; None keeps the
            learning rate constant.
        config: plain dictionary stored in every checkpoint; `check_config` compares it.
        loss: the loss of `(logits, labels, images)` to minimize (`qconv.training.losses`); None is cross-entropy, which
            validation and test always report.
        channels_last: whether network and images have this memory format; None means True on a GPU, if the network
            takes it.
        shift_decay: weight decay of DeepShift-PS in the loss, the factor of `qconv.optim.shift_penalty`.
        compile: whether to run the network through `torch.compile`, or the mode to use.
        step_rules: what else happens to weights around each optimizer step, see `qconv.optim.StepRule`.
        dampening: the factor of `qconv.optim.dampening_penalty` in the loss at the end of training, to which it rises
            from 0 as half a cosine, from a quarter of the training on.
        sine_penalty: the factor of `qconv.optim.sine_penalty` in the loss, BiPer's.
        takes_channels_last: whether the network does; one whose forward calls ``x.view`` on images does not.
        check: whether the first three training batches are watched, as by `qconv.convert`.
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
        compile: bool | Mode = False,
        step_rules: Sequence[StepRule] = (),
        dampening: float = 0.0,
        sine_penalty: float = 0.0,
        takes_channels_last: bool = True,
        check: bool = True,
    ) -> None:
        super().__init__()
        check_mode(compile)
        check_flags(check=check)
        self.watches_first_batches = check
        if channels_last is not None:
            check_flags(channels_last=channels_last)
        self._channels_last, self.shift_decay, self.dampening = channels_last, shift_decay, dampening
        self.sine_penalty, self.takes_channels_last = sine_penalty, takes_channels_last
        check_not_negative(shift_decay=shift_decay, dampening=dampening, sine_penalty=sine_penalty)
        self.step_rules = list(step_rules)
        self.model = model
        self.is_compiled = compile is not False
        self.fixes_size, self.replays = self.is_compiled and not starts(model), replays(compile)
        if compile is not False:
            compile_(model, None if compile is True else compile)
        self.loss = CrossEntropy() if loss is None else loss
        self.make_optimizer, self.make_scheduler = optimizer, scheduler
        self.config = config
        self.steps_per_epoch: int | None = None
        self.total_steps: int | None = None
        self.goes_on_from: dict[str, Any] | None = None
        self.is_logged = False  # whether the figures of training were logged in this epoch
        # Lightning's own means would lose the first part of an interrupted epoch.
        self.means: Any = nn.ModuleDict({name: WeightedMean() for name in TRAINING_FIGURES})
        # They would also divide the number of images by that of processes, in whole numbers.
        self.evaluated: Any = nn.ModuleDict({name: WeightedMean() for name in EVALUATION_FIGURES})

    def forward(self, images: Tensor) -> Tensor:
        """Logits of the images."""
        images = self.as_weights(images)
        if self.fixes_size:
            fix_size(images)
        if not (self.replays and images.is_cuda):
            return self.model(images)
        torch.compiler.cudagraph_mark_step_begin()
        return self.model(images).clone()  # for who keeps them: the next step overwrites the graph's

    def as_weights(self, images: Tensor) -> Tensor:
        """Give images the format and dtype of the weights; the data don't know of ``trainer.precision=64-true``."""
        memory_format = torch.channels_last if self.channels_last else torch.contiguous_format
        return images.to(next(self.model.parameters()).dtype).contiguous(memory_format=memory_format)

    @property
    def channels_last(self) -> bool:
        """The requested memory format; by default channels_last on GPUs, where convolutions are fastest with it."""
        if self._channels_last is not None:
            return self._channels_last
        return (
            self.takes_channels_last
            and self._trainer is not None
            and isinstance(self.trainer.accelerator, CUDAAccelerator)
        )

    def setup(self, stage: str) -> None:
        """Convert the weights to the memory format for the device, and to the dtype of ``trainer.precision``.

        Lightning would do the second after it has loaded a checkpoint, which would be rounded to float32.
        """
        if self._trainer is not None:
            self.trainer.precision_plugin.convert_module(self)
        if self.channels_last:
            self.model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the loss of one batch."""
        # A layer that calibrates itself breaks a compiled graph, which would then stay in pieces.
        layers = (module for module in self.model.modules() if isinstance(module, QuantizedLayer))
        waits = not all(layer.input_quantizer.calibrated for layer in layers)
        with torch.compiler.set_stance("force_eager") if waits else nullcontext():
            loss, accuracy, _ = self._step(batch, self.loss)
        for name, value in {"train_loss": loss.detach(), "train_accuracy": accuracy}.items():
            self.means[name].update(value, len(batch[1]))
        # Lightning reads the means at the end of the epoch, and each call of `log` takes a millisecond.
        if not self.is_logged:
            for name in TRAINING_FIGURES:
                self.log(name, self.means[name], on_step=False, on_epoch=True, prog_bar="accuracy" in name)
            self.is_logged = True
        if self.shift_decay != 0:
            loss = loss + self.shift_decay * shift_penalty(self.model)
        if self.sine_penalty != 0:
            loss = loss + self.sine_penalty * sine_penalty(self.model)
        if self.dampening != 0:
            # The trainer's number of steps may have grown by an epoch in which nothing is trained.
            progress = self.trainer.global_step / (self.total_steps or self.trainer.estimated_stepping_batches)
            factor = at((0.0, self.dampening), since(DAMPENING_START, progress))
            loss = loss + factor * dampening_penalty(self.model)
        return loss

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Count the learning rate of the step: several batches may make one."""
        self.means["lr"].update(optimizer.param_groups[0]["lr"], 1)

    def on_validation_epoch_start(self) -> None:
        """Clear the sums of an interrupted evaluation."""
        for mean in self.evaluated.values():
            mean.reset()

    on_test_epoch_start = on_validation_epoch_start

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Log loss and accuracy."""
        self._evaluate("val", batch)

    def test_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Log loss and accuracy, and return the logits for callbacks."""
        return self._evaluate("test", batch)

    def configure_optimizers(self) -> Any:
        """Return the optimizer, which clamps latent weights after its steps, and the schedule over all steps.

        Raises:
            ValueError: a schedule that gives all groups one learning rate where the optimizer's rules give several;
                dampening without an end of the training; gradients that are summed over batches in memory that each
                batch overwrites.
        """
        make = self.make_optimizer
        self._check_accumulation()
        optimizer = make(self.model) if isinstance(make, ModelOptimizer) else make(self.model.parameters())
        if self.watches_first_batches:
            watch(self.model)
        after_every_step(optimizer, self.model)
        steps = self.trainer.estimated_stepping_batches
        self.steps_per_epoch = steps_per_epoch(self.trainer)
        self.total_steps = None if steps == math.inf else int(steps)
        if self.dampening and steps == math.inf:
            raise ValueError(f"dampening (={self.dampening}) rises to the end of training: set trainer.max_epochs")
        for rule in self.step_rules:
            if not isinstance(rule, StepRule):
                raise TypeError(
                    f"step_rules: {rule!r} must be a qconv.optim.StepRule, such as {{_target_: qconv.optim.OvSW}}"
                )
            rule.attach(self.model, optimizer, total_steps=self.total_steps)
        if self.make_scheduler is None:
            return optimizer
        rates = {float(group["lr"]) for group in optimizer.param_groups}
        scheduler = schedule_of(self.make_scheduler, optimizer, int(self.trainer.estimated_stepping_batches))
        started = {float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups}
        if len(rates) > 1 and len(started) == 1:
            raise ValueError(
                f"scheduler ({type(scheduler).__name__}) sets the learning rate of all groups of parameters to "
                f"{started.pop()}, but the rules of the optimizer ask for {', '.join(map(str, sorted(rates)))}: pass "
                "a list, such as scheduler.max_lr=[…] of OneCycleLR, or use a schedule of qconv.training.schedules"
            )
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def _check_accumulation(self) -> None:
        """Refuse invalid or changing numbers of accumulated batches, and several if each overwrites gradients."""
        batches = self.trainer.accumulate_grad_batches
        if type(batches) is not int or batches < 1:
            raise ValueError(f"trainer.accumulate_grad_batches (={batches}) must be a whole number of at least 1")
        if any(isinstance(callback, GradientAccumulationScheduler) for callback in self.trainer.callbacks):  # pyright: ignore
            raise ValueError(
                "callbacks: GradientAccumulationScheduler changes the number of steps in an epoch after schedules have "
                "been made for them: set one number of batches, +trainer.accumulate_grad_batches=N"
            )
        if self.replays and batches > 1 and isinstance(self.trainer.accelerator, CUDAAccelerator):
            raise ValueError(
                f"trainer.accumulate_grad_batches (={batches}) must be 1 where compile replays CUDA graphs, which "
                "overwrite the gradients of the last batch: compile=true does not"
            )

    def on_train_start(self) -> None:
        """Make the loader continue where the epoch stopped, and schedules follow the number of steps of this run.

        Raises:
            ValueError: the run has had other training images, or another number of steps in an epoch.
        """
        checkpoint, self.goes_on_from, self.is_logged = self.goes_on_from, None, False
        if checkpoint is not None:
            check_same(checkpoint, getattr(self.trainer, "datamodule", None), self.trainer.train_dataloader)
            check_steps(checkpoint, self.trainer)
            if self.make_scheduler and self.total_steps is not None and checkpoint.get(TOTAL) != self.total_steps:
                for config in self.trainer.lr_scheduler_configs:
                    optimizer, done = config.scheduler.optimizer, self.trainer.global_step
                    config.scheduler = follow_length(optimizer, self.make_scheduler, self.total_steps, done)
        # Lightning set the loader up before it read the checkpoint, to count the steps.
        self.trainer.fit_loop._load_combined_loader_states()

    def on_train_epoch_start(self) -> None:
        """Reset the epoch's means; Lightning does not call this in a resumed epoch."""
        self.is_logged = False
        for mean in self.means.values():
            mean.reset()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Store the config, what the images are, the quantizers, and the epoch's sums of each process."""
        sums = torch.stack([mean.sums for mean in self.means.values()])
        alone = self._trainer is None or self.trainer.world_size == 1
        checkpoint["sums"] = sums.unsqueeze(0) if alone else self.all_gather(sums)
        checkpoint["quantizers"] = describe_quantizers(self.model)
        data = None if self._trainer is None else getattr(self.trainer, "datamodule", None)
        if data is not None:
            checkpoint[TRAINED_ON] = trained_on(data, self.trainer.train_dataloader)
        if self.steps_per_epoch is not None:
            checkpoint[STEPS] = self.steps_per_epoch
        if self.total_steps is not None:
            checkpoint[TOTAL] = self.total_steps
        if self.config is not None:
            checkpoint["config"] = self.config

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the sums of each process; if the number of processes has changed, the first one gets all."""
        if self._trainer is not None and self.trainer.state.fn == TrainerFn.FITTING:
            self.goes_on_from = checkpoint  # until training starts
        rank, world_size = (self.trainer.global_rank, self.trainer.world_size) if self._trainer else (0, 1)
        sums = checkpoint["sums"]
        mine = sums[rank] if len(sums) == world_size else sums.sum(0) * (rank == 0)
        for mean, values in zip(self.means.values(), mine, strict=True):
            mean.sums.copy_(values)

    def _step(self, batch: Batch, loss: Loss) -> tuple[Tensor, Tensor, Tensor]:
        images, labels = batch
        images = self.as_weights(images)
        logits = self(images)
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))  # 8 bits of a loss are too few
        return loss(wide, labels, images), (logits.detach().argmax(1) == labels).float().mean(), logits

    def _evaluate(self, split: str, batch: Batch) -> Tensor:
        loss, accuracy, logits = self._step(batch, CROSS_ENTROPY)
        for name, value in {f"{split}_loss": loss, f"{split}_accuracy": accuracy}.items():
            self.evaluated[name].update(value, len(batch[1]))
            self.log(name, self.evaluated[name], on_step=False, on_epoch=True, prog_bar="accuracy" in name)
        return logits
