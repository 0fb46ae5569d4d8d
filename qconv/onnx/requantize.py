"""A rounding of sums with a whole bias, the form of integer convolutions in runtimes."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..inference.boundaries import Staircase, staircase
from ..inference.frozen_layers import IntegerConv2d

_AROUND = 2  # sums on both sides of the bias that are searched


class WholeBias(NamedTuple):
    """``round(scale_c · (finer · acc + bias_c))``, for each channel.

    Attributes:
        scale: float64, positive, or negative if codes fall as the sum grows.
        bias: a whole number in units of the sums, divided by `finer`.
    """

    scale: Tensor
    bias: Tensor


def whole_bias(layer: IntegerConv2d, bound: int, finer: int) -> WholeBias:
    """Return the rounding by which a layer outputs codes, with the same edges if that is possible.

    A line ``slope · (acc + k / finer)`` has the edges of the staircase if ``slope`` lies between the largest and the
    smallest ratio that its edges allow; the ``k`` with the widest interval is taken. If there is none, as for many
    levels on few sums, the bias is rounded, and a code may be off by one.

    Args:
        layer: a layer that outputs codes.
        bound: the bound of the magnitude of its sums.
        finer: the factor by which its sums are multiplied.
    """
    low, high = layer.low, layer.high
    if low is None or high is None:
        raise ValueError("layer must hand codes on")
    scale, bias = layer.scale.double(), layer.bias.double()

    def codes(sums: Tensor) -> Tensor:
        return (sums.double() * scale + bias).round().clamp(low, high).long()

    stairs = staircase(codes, len(scale), bound, low, high)
    # A slope of 0 or nearly 0 is raised to one that makes no difference, so that its whole bias can be expressed.
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
    """The slopes between which the rounding of ``slope · (u + shift)`` has the edges, for each channel."""
    edges, _, low, bound = stairs
    levels = torch.arange(low + 1, low + 1 + len(edges)).unsqueeze(1) - 0.5
    first, last = torch.zeros_like(shift), torch.full_like(shift, torch.inf)
    reached, below = edges + shift, edges - 1 + shift
    for at, is_met, sign in ((reached, edges <= bound, 1), (below, edges > -bound, -1)):
        # sign · slope · at ≥ sign · level: a lower bound if sign · at is positive, else an upper one.
        ratio = levels / at
        is_lower = is_met & (sign * at > 0)
        is_upper = is_met & (sign * at < 0)
        is_never = is_met & (at == 0) & (sign * levels > 0)
        first = torch.maximum(first, torch.where(is_lower, ratio, 0).amax(0))
        last = torch.minimum(last, torch.where(is_upper, ratio, torch.inf).amin(0))
        last = torch.where(is_never.any(0), -torch.inf, last)
    return first, last
