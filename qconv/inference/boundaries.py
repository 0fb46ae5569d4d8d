"""Where the next layer's codes change, as integers: what makes batch norm and quantizer a comparison of sums.

Between the integer sum of a channel and the next layer's code lie only monotone functions: a scale, batch norm, an
activation, the quantizer. So the code is a staircase over the sum. Its edges are found by bisection, with the trained
modules themselves in float64, and the frozen layer's arithmetic is then proved to have its edges at the same sums.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Staircase(NamedTuple):
    """The codes of each channel: ``low`` plus the number of `edges` that ``u = ±acc`` has reached.

    Attributes:
        edges: int64 (high − low, channels), sorted; one above `bound` where the code is never reached.
        falling: channels whose codes fall with ``acc``, so that ``u = −acc``.
        low: the smallest code.
        bound: of ``|acc|``.
    """

    edges: Tensor
    falling: Tensor
    low: int
    bound: int


def staircase(codes: Callable[[Tensor], Tensor], channels: int, bound: int, low: int, high: int) -> Staircase:
    """Find the edges of ``codes``, a monotone function of int64 sums (rows, channels), for ``|acc| ≤ bound``."""
    ends = torch.full((1, channels), bound)
    falling = (codes(ends) < codes(-ends)).squeeze(0)
    direction = torch.where(falling, -1, 1)
    levels = torch.arange(low + 1, high + 1).unsqueeze(1)
    below = torch.full((high - low, channels), -bound - 1)
    reached = torch.full((high - low, channels), bound + 1)
    while (open := reached - below > 1).any():
        middle = torch.div(below + reached, 2, rounding_mode="floor").clamp(-bound, bound)
        is_reached = codes(middle * direction) >= levels
        reached = torch.where(open & is_reached, middle, reached)
        below = torch.where(open & ~is_reached, middle, below)
    return Staircase(reached, falling, low, bound)


def as_rounding(
    stairs: Staircase, values: Callable[[Tensor], Tensor], tolerance: float = 0.0
) -> tuple[Tensor, Tensor] | None:
    """Float32 ``scale_c, bias_c`` so that ``clamp(round(acc · scale_c + bias_c), low, high)`` are the same codes.

    The product and the sum may each be rounded, or only the sum: no sum lies so near to a half that it matters. None
    where no straight line has these edges: behind an activation with a bend, for codes that are not evenly spaced, or
    where 8 bits of codes are so fine that a float's rounding matters.

    Args:
        stairs: the staircase.
        values: what is rounded, as a function of int64 sums; only its slope between the edges is used.
        tolerance: by how much the line may miss the edges, in codes, of which it then may be off by one.
    """
    edges, falling, low, bound = stairs
    levels = torch.arange(low + 1, low + 1 + len(edges)).unsqueeze(1) - 0.5
    inside = (edges > -bound) & (edges <= bound)
    direction = torch.where(falling, -1, 1)
    first = torch.where(inside, edges, bound).amin(0)
    last = torch.where(inside, edges, -bound).amax(0)
    single = last <= first
    before, after = torch.where(single, first - 1, first), torch.where(single, first, last)
    before, after = before.clamp(-bound, bound), after.clamp(-bound, bound)
    rise = values((after * direction).unsqueeze(0)) - values((before * direction).unsqueeze(0))
    slope = (rise.squeeze(0) / (after - before).clamp(min=1)).float().double()
    slope = torch.where(inside.any(0) & (slope > 0), slope, 0)
    # The line must be at least a half at an edge and below it one before. `margin` is what rounding can cost: that of
    # the sum to a float, of the product and of the second sum, each half a unit in the last place.
    margin = 2.0**-24 * (2 * slope * edges.abs() + levels.abs() + 1) * 1.125
    lowest = torch.where(edges <= bound, levels - slope * edges.clamp(-bound, bound) + margin, -torch.inf).amax(0)
    highest = torch.where(edges > -bound, levels - slope * (edges - 1).clamp(-bound, bound) - margin, torch.inf).amin(0)
    bias = ((lowest + highest) / 2).float().double()
    bias = torch.where(lowest.isinf(), highest - 1, torch.where(highest.isinf(), lowest + 1, bias)).float().double()
    if not bool(((lowest - tolerance / 2 <= bias) & (bias <= highest + tolerance / 2)).all()):
        return None
    return (slope * direction).float(), bias.float()
