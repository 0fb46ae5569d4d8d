"""Levels that quantized values lie on."""

import torch
from torch import Tensor


def ternary(x: Tensor, threshold: Tensor) -> Tensor:
    """+1 where ``x > threshold``, -1 where ``x < -threshold``, else 0, at NaN too; int8.

    Example:
        >>> ternary(torch.tensor([-2.0, -0.5, -0.0, 0.5, 0.6]), torch.tensor(0.5))
        tensor([-1,  0,  0,  0,  1], dtype=torch.int8)
    """
    return (x > threshold).to(torch.int8) - (x < -threshold).to(torch.int8)


def divisor(step: Tensor) -> Tensor:
    """The step, or 1 where it is 0, as of a row of zeros."""
    return torch.where(step == 0, 1.0, step)  # a NaN stays


def level_step(count: float, like: Tensor) -> Tensor:
    """The step ``1 / count`` as a tensor of the dtype and device of ``like``."""
    return torch.full((), 1 / count, dtype=like.dtype, device=like.device)
