"""Rounding to evenly spaced levels, described so that a kernel can run it in one pass over memory."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.level_rounding import divisor as divisor, part, range_levels as range_levels, unit_and_divisor
from ..kernels.pointwise import round_log2 as round_log2, round_power_of_two as round_power_of_two
from .codes import Whole
from .numbers import wide

_ops = torch.ops.qconv


class Rounding(NamedTuple):
    """``values = round(clamp(x / unit, low, high) · factor)``, half to even, and ``x_q = values · (unit / factor)``.

    Attributes:
        unit: one number, or one for each filter, in at least float32; it broadcasts against ``x``. None is 1. By a unit
            of 0 nothing is divided, and ``x_q`` is 0.
        low: the smallest of the clamped numbers.
        high: the largest one.
        factor: what they are multiplied with; times both ends it gives whole numbers.
        least: smaller units count as this.
    """

    unit: Tensor | None
    low: float
    high: float
    factor: float = 1
    least: float = 0

    def whole(self, x: Tensor) -> Whole:
        """Return the whole numbers of ``x``, in at least float32, and the step between levels."""
        z, unit = wide(x), None
        if self.unit is not None:
            unit, divisor = unit_and_divisor(self.unit, self.least)
            z = z / divisor
        values = z.clamp(self.low, self.high)
        return Whole((values if self.factor == 1 else values.mul_(self.factor)).round_(), self._scale(x, unit))

    def scale(self, x: Tensor) -> Tensor:
        """Return the step between levels, which broadcasts against ``x``."""
        return self._scale(x, None if self.unit is None else unit_and_divisor(self.unit, self.least)[0])

    def _scale(self, x: Tensor, unit: Tensor | None) -> Tensor:
        if unit is None:
            return level_step(self.factor, x)
        return part(unit, self.factor)

    def quantized(self, x: Tensor) -> Tensor:
        """Return ``x_q`` in the dtype of ``x``, in one pass on a GPU."""
        return _ops.round_values(x, *self)

    def codes(self, x: Tensor, offset: int) -> tuple[Tensor, Tensor]:
        """Return the values plus ``offset`` as uint8, modulo 256, and whether one is NaN; its code is arbitrary."""
        divisor = None if self.unit is None else unit_and_divisor(self.unit, self.least)[1]
        return _codes(x, offset, self.low, self.high, self.factor, divisor)

    def bytes(self, x: Tensor, offset: int) -> Tensor | None:
        """Return the `codes`; None if one is of NaN, which has to be read from the device."""
        codes, is_nan = self.codes(x, offset)
        return None if is_nan.item() else codes


def level_step(count: float, like: Tensor) -> Tensor:
    """The step ``1 / count`` in at least float32, as a tensor on the device of ``like``."""
    dtype = torch.promote_types(like.dtype, torch.float32)
    return torch.full((), 1 / count, dtype=dtype, device=like.device)


def bytes_of(values: Tensor, offset: int, low: float, high: float) -> Tensor | None:
    """`Rounding.bytes` of whole numbers from ``low`` to ``high``."""
    codes, is_nan = _codes(values, offset, low, high, 1, None)
    return None if is_nan.item() else codes


def _codes(
    x: Tensor, offset: int, low: float, high: float, factor: float, divisor: Tensor | None
) -> tuple[Tensor, Tensor]:
    one = torch.ones((), device=x.device) if divisor is None else divisor
    return _ops.round_codes(x, one, low, high, factor, offset)
