"""The levels of quantized values, and how a quantizer describes them."""

from typing import Literal, NamedTuple

import torch
from torch import Tensor


class Levels(NamedTuple):
    """The levels of a quantizer for any ``x``: ``code · scale + offset``, with whole codes from low to high.

    Attributes:
        low: the smallest code, for −inf.
        high: the largest code, for +inf.
        scale: the value of one unit of a code: one number, or one for each channel or filter.
        rounding: how the code of ``x`` is chosen. ``"nearest"``: ``clamp(round(x / scale), low, high)``, half to even,
            up to rounding errors of the division; the levels are then evenly spaced. ``"sign"``: ``sign(x)``, with
            ``sign(±0) = +1``. ``"own"``: the method's own rule.
        offset: added to the product; None stands for 0.
    """

    low: int
    high: int
    scale: Tensor
    rounding: Literal["nearest", "sign", "own"] = "own"
    offset: Tensor | None = None


def ternary(x: Tensor, threshold: Tensor) -> Tensor:
    """+1 where ``x > threshold``, -1 where ``x < -threshold``, else 0, at NaN too; int8.

    Example:
        >>> ternary(torch.tensor([-2.0, -0.5, -0.0, 0.5, 0.6]), torch.tensor(0.5))
        tensor([-1,  0,  0,  0,  1], dtype=torch.int8)
    """
    return (x > threshold).to(torch.int8) - (x < -threshold).to(torch.int8)
