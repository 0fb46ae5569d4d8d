"""Rounding to evenly spaced levels, described so that a kernel can run it in one pass over memory."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.level_rounding import range_levels as range_levels

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

    def quantized(self, x: Tensor) -> Tensor:
        """Return `values` times the scale in the dtype of ``x``, in one pass on a GPU."""
        return _ops.round_values(x, self.divisor, self.scale, self.low, self.high, self.factor)

    def codes(self, x: Tensor, offset: int) -> tuple[Tensor, Tensor]:
        """Return `values` plus ``offset`` as uint8, modulo 256, and whether one is NaN; its code is arbitrary."""
        return _codes(x, offset, self.low, self.high, self.factor, self.divisor)

    def bytes(self, x: Tensor, offset: int) -> Tensor | None:
        """Return the `codes`; None if one is of NaN, which has to be read from the device."""
        codes, is_nan = self.codes(x, offset)
        return None if is_nan.item() else codes


def bytes_of(values: Tensor, offset: int, low: float, high: float) -> Tensor | None:
    """`Rounding.bytes` of whole numbers from ``low`` to ``high``."""
    codes, is_nan = _codes(values, offset, low, high, 1, None)
    return None if is_nan.item() else codes


def _codes(
    x: Tensor, offset: int, low: float, high: float, factor: float, divisor: Tensor | None
) -> tuple[Tensor, Tensor]:
    one = torch.ones((), device=x.device) if divisor is None else divisor
    return _ops.round_codes(x, one, low, high, factor, offset)
