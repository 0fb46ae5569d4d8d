"""A rounding of sums whose bias is a whole number, as integer convolutions of runtimes have it."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..inference.boundaries import Staircase, staircase
from ..inference.layers import IntegerConv2d

_AROUND = 2  # sums on both sides of the bias that is looked for


class WholeBias(NamedTuple):
    """``round(scale_c · (finer · acc + bias_c))``, for each channel.

    Attributes:
        scale: float64, positive or, where codes fall with the sum, negative.
        bias: a whole number of the sums' units, divided by `finer`.
    """

    scale: Tensor
    bias: Tensor


def whole_bias(layer: IntegerConv2d, bound: int, finer: int) -> WholeBias:
    """The rounding by which a layer hands codes on, with the same edges wherever there is one.

    A line ``slope · (acc + k / finer)`` has the edges of the staircase if ``slope`` lies between the largest and the
    smallest ratio that its edges allow: the ``k`` is taken for which that interval is the widest. Where there is none,
    as for many levels on few sums, the bias is rounded, and a code may be off by one.

    Args:
        layer: it hands codes on.
        bound: of the magnitude of its sums.
        finer: by how much its sums are multiplied.
    """
    low, high = layer.low, layer.high
    if low is None or high is None:
        raise ValueError("layer must hand codes on")
    scale, bias = layer.scale.double(), layer.bias.double()

    def codes(sums: Tensor) -> Tensor:
        return (sums.double() * scale + bias).round().clamp(low, high).long()

    stairs = staircase(codes, len(scale), bound, low, high)
    # A slope of 0 or nearly 0 grows to one that does not matter, so that its whole bias can be said.
    slope = torch.maximum(scale.abs(), (bias.abs() * 1e-12).clamp(min=1e-30))
    direction = torch.where(stairs.falling, -1, 1)
    middle = (bias / slope * finer).round()
    best_width, best_slope, best = torch.full_like(slope, 0.0), slope.clone(), middle.clone()
    for offset in range(-_AROUND * finer, _AROUND * finer + 1):
        first, last = _slopes(stairs, (middle + offset) / finer)
        width = (last - first) / slope
        is_better = (width > best_width) & last.isfinite()
        best_width = torch.where(is_better, width, best_width)
        best_slope = torch.where(is_better, (first + last) / 2, best_slope)
        best = torch.where(is_better, middle + offset, best)
    return WholeBias(best_slope * direction, best * direction / finer)


def _slopes(stairs: Staircase, shift: Tensor) -> tuple[Tensor, Tensor]:
    """Between which slopes the rounding of ``slope · (u + shift)`` has the edges, for each channel."""
    edges, _, low, bound = stairs
    levels = torch.arange(low + 1, low + 1 + len(edges)).unsqueeze(1) - 0.5
    first, last = torch.zeros_like(shift), torch.full_like(shift, torch.inf)
    reached, below = edges + shift, edges - 1 + shift
    for at, is_met, sign in ((reached, edges <= bound, 1), (below, edges > -bound, -1)):
        # sign · slope · at ≥ sign · level: a bound from below where sign · at is positive, else from above.
        ratio = levels / at
        is_lower = is_met & (sign * at > 0)
        is_upper = is_met & (sign * at < 0)
        is_never = is_met & (at == 0) & (sign * levels > 0)
        first = torch.maximum(first, torch.where(is_lower, ratio, 0).amax(0))
        last = torch.minimum(last, torch.where(is_upper, ratio, torch.inf).amin(0))
        last = torch.where(is_never.any(0), -torch.inf, last)
    return first, last
