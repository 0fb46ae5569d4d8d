"""Rounding to evenly spaced levels, as a description that a kernel can run in one pass over memory."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels import levels as _registered  # noqa: F401

_ops = torch.ops.qconv


class Rounding(NamedTuple):
    """``values = round(clamp(x / divisor, low, high) · factor)``, half to even, and ``x_q = values · scale``.

    Attributes:
        scale: the step between levels, which broadcasts against ``x``.
        divisor: one number, or one for each filter, which broadcasts against ``x``; None is 1.
        low: the smallest of the clamped numbers.
        high: the largest one.
        factor: what they are multiplied with; times both ends it gives whole numbers.
    """

    scale: Tensor
    divisor: Tensor | None
    low: float
    high: float
    factor: float = 1

    def values(self, x: Tensor) -> Tensor:
        """Return the whole numbers of ``x``, in its dtype."""
        clamped = (x if self.divisor is None else x / self.divisor).clamp(self.low, self.high)
        return (clamped if self.factor == 1 else clamped.mul_(self.factor)).round_()

    def bytes(self, x: Tensor, offset: int) -> Tensor | None:
        """Return `values` plus ``offset`` as uint8, modulo 256; None if one is NaN."""
        return bytes_of(x, offset, self.low, self.high, self.factor, self.divisor)


def bytes_of(
    x: Tensor, offset: int, low: float, high: float, factor: float = 1, divisor: Tensor | None = None
) -> Tensor | None:
    """`Rounding.bytes`; without ``factor`` and ``divisor`` of whole numbers from ``low`` to ``high``."""
    one = torch.ones((), device=x.device) if divisor is None else divisor
    codes, is_nan = _ops.round_codes(x, one, low, high, factor, offset)
    return None if is_nan.item() else codes
