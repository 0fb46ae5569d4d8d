"""Observers of the data from which quantizers start, batch by batch in constant memory."""

import torch
from torch import Tensor

from .numbers import wide


def rows_of(x: Tensor, dim: int | None) -> Tensor:
    """``(1, n)`` with all values, or ``(R, n)`` with a row for each index of dimension ``dim``."""
    return x.reshape(1, -1) if dim is None else x.movedim(dim, 0).unsqueeze(-1).flatten(1)


class Observer:
    """Sees data batch by batch and keeps the statistics from which a quantizer starts.

    A subclass writes `update`. The memory it uses must not grow with the number of batches.

    Attributes:
        low: the smallest value so far, a tensor without dimensions; None before the first batch.
        high: the largest value so far.
    """

    low: Tensor | None = None
    high: Tensor | None = None

    @torch.no_grad()
    def observe(self, x: Tensor) -> None:
        """Take in a batch; an empty one is ignored."""
        if not x.numel():
            return
        low, high = x.detach().aminmax()
        self.low = low if self.low is None else torch.minimum(self.low, low)
        self.high = high if self.high is None else torch.maximum(self.high, high)
        self.update(x.detach())

    def update(self, x: Tensor) -> None:
        """Take in a batch of at least one value."""

    @property
    def is_empty(self) -> bool:
        """Whether no value has been seen yet."""
        return self.low is None

    @property
    def is_finite(self) -> bool:
        """Whether neither NaN nor infinity has been seen."""
        return self.low is None or self.high is None or bool(self.low.isfinite() & self.high.isfinite())

    @property
    def is_blank(self) -> bool:
        """Whether the range is empty: no value or only equal ones have been seen, so nothing can start from it."""
        return self.low is None or self.high is None or bool(self.low == self.high)


class Samples(Observer):
    """Keeps the first samples whole, up to ``most`` values in total, but at least one sample."""

    def __init__(self, most: int = 2**22) -> None:
        self.most = most
        self.kept: list[Tensor] = []

    def update(self, x: Tensor) -> None:
        left = self.most - sum(part.numel() for part in self.kept)
        per_sample = max(x[:1].numel(), 1) if x.ndim else 1
        count = max(left // per_sample, 0 if self.kept else 1)
        if count:
            self.kept.append((x[:count] if x.ndim else x).clone())

    def joined(self) -> Tensor:
        """The kept samples in one tensor."""
        return torch.cat(self.kept) if len(self.kept) > 1 else self.kept[0]


class Values(Observer):
    """Keeps single values, evenly spaced over all batches; uses no random numbers.

    Attributes:
        kept: a row of at most ``most`` values, of all or at each index of dimension ``dim``.
    """

    kept: Tensor

    def __init__(self, most: int, dim: int | None = None) -> None:
        self.most = most
        self.dim = dim
        self.every = 0
        self.seen = 0

    def update(self, x: Tensor) -> None:
        rows = rows_of(x, self.dim)
        if self.seen == 0:
            # Odd: an even number could take the same columns of all images.
            self.every = -(-rows.shape[1] // self.most) | 1
            self.kept = rows[:, :: self.every].clone()
        else:
            self.kept = torch.cat([self.kept, rows[:, -self.seen % self.every :: self.every]], dim=1)
        self.seen += rows.shape[1]
        while self.kept.shape[1] > self.most:
            self.every *= 3
            self.kept = self.kept[:, ::3].clone()


class Magnitudes(Observer):
    """The mean magnitude of all values, or at each index of dimension ``dim``.

    Attributes:
        mean: ``(1,)`` or ``(R,)``; after a single batch exactly its mean.
    """

    mean: Tensor

    def __init__(self, dim: int | None = None) -> None:
        self.dim = dim
        self.count = 0

    def update(self, x: Tensor) -> None:
        rows = rows_of(wide(x), self.dim)
        mean, count = rows.abs().mean(dim=1), rows.shape[1]
        self.count += count
        self.mean = mean if self.count == count else self.mean + (mean - self.mean) * (count / self.count)


class Extremes(Observer):
    """The smallest and the largest value, of all or at each index of dimension ``dim``."""

    lows: Tensor
    highs: Tensor

    def __init__(self, dim: int | None = None, symmetric: bool = False) -> None:
        self.dim = dim
        self.symmetric = symmetric

    def update(self, x: Tensor) -> None:
        lows, highs = rows_of(x, self.dim).aminmax(dim=1)
        seen = "lows" in self.__dict__
        self.lows = torch.minimum(self.lows, lows) if seen else lows
        self.highs = torch.maximum(self.highs, highs) if seen else highs

    def extent(self) -> tuple[Tensor, Tensor]:
        """The range of each row, widened to contain 0: ``low <= 0`` and ``high >= 0``."""
        low, high = wide(self.lows), wide(self.highs)
        if self.symmetric:
            high = torch.maximum(-low, high)
            low = -high
        return low.clamp(max=0), high.clamp(min=0)


class Signs(Observer):
    """Counts the negative values.

    Attributes:
        negative: their number.
        total: the number of all values.
    """

    negative: int = 0
    total: int = 0

    def update(self, x: Tensor) -> None:
        self.negative += int((x < 0).sum())
        self.total += x.numel()


class Several(Observer):
    """Passes each batch to several other observers."""

    def __init__(self, observers: list[Observer]) -> None:
        self.observers = observers

    def update(self, x: Tensor) -> None:
        for observer in self.observers:
            observer.observe(x)
