"""Ranges between percentiles: exact for a tensor, from a histogram for a stream."""

import math

import torch
from torch import Tensor

from .numbers import wide
from .observers import Extremes, rows_of

OCTAVES = 24
"""`Percentiles` tells magnitudes from 2^-24 to 2^24 apart; smaller ones count as 0, larger ones as the largest."""
CHUNK = 2**22
"""The number of values of which `Percentiles` makes indices of 8 bytes at once."""


def extent(rows: Tensor, percentile: float, symmetric: bool) -> tuple[Tensor, Tensor]:
    """The range of each row, widened to contain 0.

    ``high`` is the value of rank ``ceil(percentile / 100 · n)`` of the n in a row, so the maximum for 100; ``low`` has
    the same rank from above. If symmetric, ``high`` is that of the magnitudes and ``low = −high``. Without values both
    are 0. ``rows`` is ``(R, n)``, and ``low <= 0 <= high`` are ``(R,)``.
    """
    count = rows.shape[1]
    if count == 0:
        return rows.new_zeros(rows.shape[0]), rows.new_zeros(rows.shape[0])
    if symmetric and percentile == 100:
        high = torch.linalg.vector_norm(rows, math.inf, 1)
        return -high, high
    if symmetric:
        rows = rows.abs()
    if percentile == 100:
        low, high = rows.amin(1), rows.amax(1)
    else:
        beyond = int(count) + 1 - _rank(percentile, count)  # ONNX has no kthvalue
        high = rows.topk(beyond, 1).values[:, -1]
        low = -high if symmetric else rows.topk(beyond, 1, largest=False).values[:, -1]
    return low.clamp(max=0), high.clamp(min=0)


def quantile(values: Tensor, share: float) -> Tensor:
    """The value at ``share`` of the way from the smallest to the largest of some values, linear between neighbours.

    NumPy's percentile; `torch.quantile` takes at most 2^24 values.
    """
    place = share * (values.numel() - 1)
    rank = math.floor(place) + 1
    low = values.kthvalue(rank).values
    return low if place == rank - 1 else low + (values.kthvalue(rank + 1).values - low) * (place - rank + 1)


def _rank(percentile: float, count: int) -> int:
    return max(math.ceil(round(percentile * int(count) / 100, 6)), 1)  # 99.9 % of 1000 is a little more than 999


class Percentiles(Extremes):
    """A histogram of all values, or at each index of dimension ``dim``, for `extent` at a percentile.

    One batch gives the exact range. Several batches are counted in bins whose width follows the magnitude, so a few
    very large values cost the others no resolution: 2^8 bins per factor of 2, or 2^4 with a histogram for each index.
    Within a bin, values count as evenly spread.
    """

    counts: Tensor
    exact: tuple[Tensor, Tensor] | None

    def __init__(self, percentile: float, dim: int | None = None, symmetric: bool = False) -> None:
        super().__init__(dim, symmetric)
        self.percentile = percentile
        self.bits = 8 if dim is None else 4

    def update(self, x: Tensor) -> None:
        rows = wide(rows_of(x, self.dim))
        self.exact = None if "counts" in self.__dict__ else extent(rows, self.percentile, self.symmetric)
        super().update(x)
        counts = self._counted(rows)
        self.counts = self.counts + counts if "counts" in self.__dict__ else counts

    def extent(self) -> tuple[Tensor, Tensor]:
        if self.exact is not None:
            return self.exact
        lowest, highest = (wide(end) for end in (self.lows, self.highs))
        middle = self.counts.shape[1] // 2
        if self.symmetric:
            counts = self.counts[:, middle:] + self.counts[:, :middle].flip(1)
            highest = torch.maximum(-lowest, highest)
            high = self._value(counts, torch.zeros_like(highest), highest)
            return -high, high
        # From above, the rank is the same for the negated values.
        low = -self._value(self.counts.flip(1), -highest, -lowest)
        return low.clamp(max=0), self._value(self.counts, lowest, highest).clamp(min=0)

    def _counted(self, rows: Tensor) -> Tensor:
        """Count the values in each bin: first the negative ones, the largest magnitude first."""
        half = 2 * OCTAVES << self.bits
        first = (127 - OCTAVES) << self.bits  # the bits of 2^-24, without those that distinguish values within a bin
        offsets = torch.arange(len(rows), device=rows.device).unsqueeze(1) * (2 * half)
        counts = torch.zeros(len(rows) * 2 * half, dtype=torch.long, device=rows.device)
        for part in rows.float().split(max(CHUNK // len(rows), 1), dim=1):
            place = (part.abs().view(torch.int32) >> (23 - self.bits)) - first
            place = place.clamp_(0, half - 1)
            index = torch.where(part < 0, half - 1 - place, half + place) + offsets
            counts += torch.bincount(index.flatten(), minlength=len(counts))
        return counts.view(len(rows), 2 * half)

    def _value(self, counts: Tensor, lowest: Tensor, highest: Tensor) -> Tensor:
        """The value of the percentile's rank in each row of ``counts``, between the smallest and the largest one."""
        total = int(counts[0].sum())
        rank = _rank(self.percentile, total)
        upto = counts.cumsum(1)
        index = (upto < rank).sum(1, keepdim=True)  # the bin in which the rank lies
        inside = counts.gather(1, index)
        share = (rank - (upto.gather(1, index) - inside) - 0.5) / inside
        edges = self._edges(counts.shape[1], lowest)
        left, right = edges[index[:, 0]], edges[index[:, 0] + 1]
        value = (left + (right - left) * share[:, 0]).clamp(lowest, highest).to(lowest.dtype)
        return torch.where(left * right == 0, 0.0, value)

    def _edges(self, count: int, like: Tensor) -> Tensor:
        """The ``count + 1`` edges of the bins; for one sign's number of bins, the edges of magnitudes."""
        half = 2 * OCTAVES << self.bits
        bits = torch.arange(half + 1, dtype=torch.int32, device=like.device) + ((127 - OCTAVES) << self.bits)
        edges = (bits << (23 - self.bits)).view(torch.float32).to(like.dtype)
        edges[0] = 0
        return edges if count == half else torch.cat([-edges.flip(0), edges[1:]])
