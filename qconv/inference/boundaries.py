"""The integer sums at which the next layer's codes change: batch norm and quantizer become comparisons of sums.

Only monotone functions lie between the integer sum of a channel and the next layer's code: a scale, batch norm, an
activation, the quantizer. So the code is a staircase over the sum. Bisection finds its edges, with the trained modules
themselves in float64; then the frozen layer's arithmetic is proved to have its edges at the same sums.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Staircase(NamedTuple):
    """The codes of each channel: ``low`` plus the number of `edges` that ``u = ±acc`` has reached.

    Attributes:
        edges: int64 (high − low, channels), sorted; above `bound` if the code is never reached.
        falling: whether a channel's codes fall as ``acc`` grows, so that ``u = −acc``.
        low: the smallest code.
        bound: the bound of ``|acc|``.
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
    """Return float32 ``scale_c, bias_c`` with ``clamp(round(acc · scale_c + bias_c), low, high)`` as these codes.

    Product and sum may each be rounded, or only the sum: no sum is so close to a half that it matters. None if no
    straight line has these edges: after an activation with a bend, for codes that are not evenly spaced, or if 8-bit
    codes are so fine that a float's rounding matters.

    Args:
        stairs: the staircase.
        values: what is rounded, in codes, as a function of int64 sums.
        tolerance: how far the line may miss the edges, in codes. A code may then be off by one where the value lies
            within the tolerance of an edge.
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
    # The line must be at least a half at an edge and below it one sum earlier. `margin` covers the rounding of the sum
    # to a float, of the product and of the second sum, each half a unit in the last place.
    margin = 2.0**-24 * (2 * slope * edges.abs() + levels.abs() + 1) * 1.125
    lowest = torch.where(edges <= bound, levels - slope * edges.clamp(-bound, bound) + margin, -torch.inf).amax(0)
    highest = torch.where(edges > -bound, levels - slope * (edges - 1).clamp(-bound, bound) - margin, torch.inf).amin(0)
    bias = ((lowest + highest) / 2).float().double()
    bias = torch.where(lowest.isinf(), highest - 1, torch.where(highest.isinf(), lowest + 1, bias)).float().double()
    if not bool(((lowest - tolerance / 2 <= bias) & (bias <= highest + tolerance / 2)).all()):
        return None
    if not bool(((lowest <= bias) & (bias <= highest)).all()):
        # Sums may be coarse: an edge that the line misses by little may lie between two values that it should not.
        met = torch.where(slope > 0, (levels - bias) / slope, 0).ceil().clamp(-bound, bound + 1).long()
        met = torch.where(slope > 0, met, edges)
        differs = (met != edges) & inside
        others = torch.stack([edges, edges - 1, torch.where(met < edges, met, met - 1)]).clamp(-bound, bound)
        above, below, farthest = (values(sums * direction) for sums in others)
        is_near = (
            (above >= levels - tolerance) & (below <= levels + tolerance) & ((farthest - levels).abs() <= tolerance)
        )
        if not bool((is_near | ~differs).all()):
            return None
    return (slope * direction).float(), bias.float()
