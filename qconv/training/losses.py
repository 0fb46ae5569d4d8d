"""Losses to minimize: modules `(logits, labels, images) -> loss`. Validation and test always report cross-entropy."""

import logging
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..distillation import distribution_loss
from ..ground.checks import check_module, check_positive
from .checkpoint_io import CheckpointError
from .initial_weights import load


class CrossEntropy(nn.Module):
    """Cross-entropy with the labels.

    Args:
        label_smoothing: share of the target that is spread evenly over all classes, from 0 to 1 (arXiv:1512.00567).
    """

    def __init__(self, label_smoothing: float = 0.0) -> None:
        super().__init__()
        if not 0 <= label_smoothing <= 1:
            raise ValueError(f"label_smoothing (={label_smoothing}) must be from 0 to 1")
        self.label_smoothing = label_smoothing

    def forward(self, logits: Tensor, labels: Tensor, images: Tensor) -> Tensor:
        """Return the mean over the batch."""
        return F.cross_entropy(logits, labels, label_smoothing=self.label_smoothing)


class Distillation(nn.Module):
    """``share · T² · distribution_loss(logits, teacher(images), T) + (1 − share) · cross-entropy``.

    ``share=1`` and ``temperature=1`` are ReActNet's (arXiv:2003.03488): only the teacher, no labels. The teacher runs
    in evaluation without gradients; it is not part of the state dict, so checkpoints hold only the student.

    Args:
        teacher: a network with the student's classes.
        weights: file with all of the teacher's weights, see `load_weights`; None keeps those it has.
        share: weight of the teacher's term in the loss, from 0 to 1.
        temperature: T for both distributions.

    Raises:
        CheckpointError: the file is not of this network, or its last layer is of another size.
    """

    def __init__(
        self, teacher: nn.Module, weights: str | None = None, share: float = 1.0, temperature: float = 1.0
    ) -> None:
        super().__init__()
        check_module(teacher, "teacher")
        if not 0 <= share <= 1:
            raise ValueError(f"share (={share}) must be from 0 to 1")
        check_positive(temperature=temperature)
        if weights is not None:
            averaged, left_out = load(teacher, weights)
            if left_out:
                raise CheckpointError(f"loss.weights (={weights}) do not fit the teacher: {left_out}")
            if averaged:
                logging.getLogger("qconv").warning("loss.weights=%s: %s", weights, averaged)
        self._teacher = [teacher.eval().requires_grad_(False)]  # in a list, so that it is not a child
        self.share, self.temperature = share, temperature

    @property
    def teacher(self) -> nn.Module:
        """The network that the student imitates."""
        return self._teacher[0]

    def forward(self, logits: Tensor, labels: Tensor, images: Tensor) -> Tensor:
        """Return the mean over the batch."""
        with torch.no_grad():
            target = self.teacher(images)
        loss = self.share * self.temperature**2 * distribution_loss(logits, target, self.temperature)
        return loss + (1 - self.share) * F.cross_entropy(logits, labels)

    def _apply(self, fn: Any, recurse: bool = True) -> "Distillation":
        self.teacher._apply(fn, recurse)  # it follows to the device
        return super()._apply(fn, recurse)
