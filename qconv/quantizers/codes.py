"""Quantized tensors as integers and scales."""

from typing import NamedTuple

import torch
from torch import Tensor


class Codes(NamedTuple):
    """A quantized tensor as integers; `dequantize` returns ``quantize(x)`` from it exactly.

    Attributes:
        values: whole numbers in the shape of ``x``; an integer dtype, or a floating one where NaN must be kept.
        scale: float tensor that broadcasts against ``values``.
        zero: the code of 0, an integer.
        offset: float tensor added at the end, for methods with levels that are not centred on 0 (AdaBin, LSQ+).
        negative_scale: the scale of negative values where it differs (TTQ).
    """

    values: Tensor
    scale: Tensor
    zero: int = 0
    offset: Tensor | None = None
    negative_scale: Tensor | None = None

    def dequantize(self) -> Tensor:
        """``(values − zero) · scale + offset``, in the dtype of ``scale``."""
        centred = self.values - self.zero
        scale = self.scale
        if self.negative_scale is not None:
            scale = torch.where(centred < 0, self.negative_scale, scale)
        return centred * scale if self.offset is None else centred * scale + self.offset


class Whole(NamedTuple):
    """The two factors of a quantized tensor: ``x_q = values · scale``.

    Attributes:
        values: whole numbers, or whole multiples of one power of two, in a floating dtype of at least that of ``x``.
        scale: float tensor that broadcasts against ``values``; None stands for 1.
    """

    values: Tensor
    scale: Tensor | None = None


def integer_dtype(bits: float) -> torch.dtype:
    """The dtype of codes of so many bits, with or without a sign."""
    return torch.int16 if bits < 16 else torch.int32


def in_bytes(whole: Whole | Tensor, offset: int) -> Whole | None:
    """Return `whole` numbers plus ``offset`` as uint8 modulo 256, and their scale; None for a tensor of other ones."""
    if isinstance(whole, Tensor):
        return None
    return Whole((whole.values.to(torch.int16) + offset).to(torch.uint8), whole.scale)
