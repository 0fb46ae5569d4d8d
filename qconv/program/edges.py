"""The exact edges of a quantizer's codes: the smallest float of each, found among all floats in their order."""

from collections.abc import Callable

import torch
from torch import Tensor

_LEAST, _MOST = -(2**31) + (1 << 23) - 1, 2**31 - (1 << 23)  # places of -inf and +inf
_NEAR = 8  # floats on each side of a guess

Codes = Callable[[Tensor], Tensor]


class NotMonotone(ValueError):  # noqa: N818  # not an error: the reason why a network stays as it is
    """Raised if a larger number may have a smaller code."""


def float_at(place: Tensor) -> Tensor:
    """Return the float at a place in the order of floats: 0.0 is at place 0, -0.0 at -1."""
    bits = torch.where(place >= 0, place, (-place - 1) | 0x80000000)
    return torch.where(bits >= 2**31, bits - 2**32, bits).to(torch.int32).view(torch.float32)


def place_of(x: Tensor) -> Tensor:
    """Return the place of a float; the inverse of `float_at`."""
    bits = x.contiguous().view(torch.int32).long()
    return torch.where(bits >= 0, bits, -(bits & 0x7FFFFFFF) - 1)


def first_floats(reaches: Codes, shape: tuple[int, ...]) -> Tensor:
    """Return, element by element, the first float where ``reaches`` is True, which it stays; NaN if there is none."""
    below = torch.full(shape, _LEAST - 1, dtype=torch.int64)
    reached = torch.full(shape, _MOST + 1, dtype=torch.int64)
    while bool((reached - below > 1).any()):
        middle = torch.div(below + reached, 2, rounding_mode="floor").clamp(_LEAST, _MOST)
        found = reaches(float_at(middle))
        is_open = reached - below > 1
        reached = torch.where(is_open & found, middle, reached)
        below = torch.where(is_open & ~found, middle, below)
    return torch.where(reached > _MOST, torch.nan, float_at(reached.clamp(max=_MOST)))


def edges_of(codes: Codes, low: int, high: int, step: float) -> Tensor:
    """Return the smallest float with a code of at least ``c``, for each c from low + 1 to high.

    Floats near half steps are tried first: most quantizers change there.

    Raises:
        NotMonotone: the codes fall somewhere on a grid of floats, or the last one is not reached.
    """
    levels = torch.arange(low + 1, high + 1)
    grid = torch.linspace((low - 1.25) * step, (high + 1.25) * step, 64 * (high - low + 3))
    if not rises(codes(grid)):
        raise NotMonotone("a larger number has a smaller code")
    near = place_of((levels.double() - 0.5).mul(step).float()).unsqueeze(1) + torch.arange(-_NEAR, _NEAR + 1)
    reaches = codes(float_at(near).flatten()).view(near.shape) >= levels.unsqueeze(1)
    first = reaches.int().argmax(1, keepdim=True)
    edges = float_at(near.gather(1, first).squeeze(1))
    if bool(reaches[:, 0].any()) or not bool(reaches[:, -1].all()):  # some edge lies elsewhere
        edges = first_floats(lambda x: codes(x) >= levels, (high - low,))
    if bool(edges.isnan().any()):
        raise NotMonotone("a code is never reached")
    return edges


def rises(codes: Tensor) -> bool:
    """Whether codes never fall along the last dimension."""
    return bool((codes.diff() >= 0).all())


def are_edges_of(codes: Codes, edges: Tensor, low: int) -> bool:
    """Whether rising ``codes`` from ``low`` on change at these edges: at each float, and not at the one before it."""
    levels = torch.arange(low + 1, low + 1 + len(edges))
    before = float_at(place_of(edges) - 1)
    return bool((codes(edges) >= levels).all() and (codes(before) < levels).all())
