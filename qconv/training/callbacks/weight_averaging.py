"""The callback that averages the weights of the steps, and tests and ships the average."""

from typing import Any

import torch
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.callbacks import WeightAveraging
from pytorch_lightning.trainer.states import TrainerFn
from torch import Tensor

from ...ground.checks import check_numbers

Tensors = tuple[Tensor, ...] | list[Tensor]


class MovingAverage(WeightAveraging):
    """Exponential moving average of weights, quantizer parameters and statistics: ``a ← d·a + (1 − d)·w`` each step.

    ``a`` is w after the first step; then ``d = min(decay, (1 + n) / (10 + n))`` with n = 1, 2, …, so that a short
    run does not keep its start. Latent weights are averaged, and then quantized. Buffers of schedules are averaged,
    too. A flag counts as set once any averaged step had it set. Whole numbers are copied from the step. Validation,
    `best.ckpt` and the test use the average; a checkpoint also holds the weights with which training continues
    (`current_model_state`).

    Args:
        decay: d, at least 0 and below 1.

    Raises:
        ValueError: `decay` is out of its range, or weights have 16 bits, in which ``(1 − d)·w`` is rounded away.
    """

    def __init__(self, decay: float = 0.999) -> None:
        check_numbers(decay=decay)
        if decay is None or not 0 <= decay < 1:
            raise ValueError(f"decay (={decay}) must be at least 0 and below 1")
        super().__init__(use_buffers=True, multi_avg_fn=self._average)
        self.decay = decay

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Make the average, in the dtype and on the device that the network will have: Lightning moves that later."""
        if stage == "fit" and trainer.precision in ("16-true", "bf16-true"):
            raise ValueError(
                f"trainer.precision (={trainer.precision}) keeps weights in 16 bits, where the small steps of a "
                f"moving average are lost: use {trainer.precision.replace('true', 'mixed')}, or leave out "
                "callbacks=ema"
            )
        super().setup(trainer, pl_module, stage)
        if stage == "fit" and self._average_model is not None:
            trainer.precision_plugin.convert_module(self._average_model)
            self._average_model.to(trainer.strategy.root_device)

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Validate the average during the training; afterwards the given weights."""
        if trainer.state.fn == TrainerFn.FITTING:
            super().on_validation_epoch_start(trainer, pl_module)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The inverse of `on_validation_epoch_start`."""
        if trainer.state.fn == TrainerFn.FITTING:
            super().on_validation_epoch_end(trainer, pl_module)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Store the average with the weights; tensors that can't be averaged come from the weights."""
        super().on_save_checkpoint(trainer, pl_module, checkpoint)
        averaged = {name for name, _ in (*pl_module.named_parameters(), *pl_module.named_buffers())}
        for name, value in checkpoint.get("current_model_state", {}).items():
            if name not in averaged or not value.is_floating_point():
                checkpoint["state_dict"][name] = value

    def _average(self, averages: Tensors, values: Tensors, steps: Tensor | int) -> None:
        """Move averages towards values, all of one dtype."""
        if averages[0].is_floating_point():
            done = int(steps)  # read from the device once
            decay = min(self.decay, (1 + done) / (10 + done))
            torch._foreach_lerp_(averages, values, 1 - decay)  # pyright: ignore[reportPrivateImportUsage]
        else:
            torch._foreach_copy_(averages, values)  # pyright: ignore[reportPrivateImportUsage]
