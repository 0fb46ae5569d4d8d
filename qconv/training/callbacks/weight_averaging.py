"""The callback that averages the weights of the steps, and tests and ships the average."""

from typing import Any

import torch
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.callbacks import WeightAveraging
from torch import Tensor

from ...checks import check_numbers

Tensors = tuple[Tensor, ...] | list[Tensor]


class MovingAverage(WeightAveraging):
    """Exponential moving average of weights, quantizer parameters and statistics: ``a ← d·a + (1 − d)·w`` each step.

    ``a`` is w after the first step; then ``d = min(decay, (1 + n) / (10 + n))`` with n = 1, 2, …, so that a short
    run does not keep its start. Latent weights are averaged, and then quantized. Buffers of schedules are averaged,
    too. A flag counts as set once any averaged step had it set. Whole numbers are those of the step. Validation,
    `best.ckpt` and the test use the average; a checkpoint also holds the weights with which training continues
    (`current_model_state`).

    Args:
        decay: d, at least 0 and below 1.

    Raises:
        ValueError: `decay` is out of its range.
    """

    def __init__(self, decay: float = 0.999) -> None:
        check_numbers(decay=decay)
        if decay is None or not 0 <= decay < 1:
            raise ValueError(f"decay (={decay}) must be at least 0 and below 1")
        super().__init__(use_buffers=True, multi_avg_fn=self._average)
        self.decay = decay

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Store the average beside the weights; what can't be averaged is taken from the weights."""
        super().on_save_checkpoint(trainer, pl_module, checkpoint)
        averaged = {name for name, _ in (*pl_module.named_parameters(), *pl_module.named_buffers())}
        for name, value in checkpoint.get("current_model_state", {}).items():
            if name not in averaged or not value.is_floating_point():
                checkpoint["state_dict"][name] = value

    def _average(self, averages: Tensors, values: Tensors, steps: Tensor | int) -> None:
        """Move averages towards values, all of one dtype."""
        if averages[0].is_floating_point():
            decay = min(self.decay, (1 + int(steps)) / (10 + int(steps)))
            torch._foreach_lerp_(averages, values, 1 - decay)  # pyright: ignore[reportPrivateImportUsage]
        else:
            torch._foreach_copy_(averages, values)  # pyright: ignore[reportPrivateImportUsage]
