"""Results by class: the confusion matrix, a row for each class, the worst pairs."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ClassRow:
    """A class in the test.

    Attributes:
        name: the name of the class.
        pictures: its number of test images.
        right: how many of these are predicted correctly.
        named: how many images of any class are predicted as this class.
        taken_for: the class most often predicted for its other images; empty if there are none.
        taken: how many of its images are predicted as `taken_for`.
    """

    name: str
    pictures: int
    right: int
    named: int
    taken_for: str
    taken: int

    @property
    def accuracy(self) -> float:
        """Correct predictions of the class over its images; 0 without images."""
        return self.right / max(1, self.pictures)

    @property
    def precision(self) -> float:
        """Correct predictions of the class over all its predictions; 0 without predictions."""
        return self.right / max(1, self.named)


@dataclass(frozen=True)
class Pair:
    """Images of one class for which another class is predicted."""

    label: str
    predicted: str
    count: int
    share: float


def confusion(labels: Tensor, predicted: Tensor, count: int) -> Tensor:
    """Return the number of images of each class (rows) by predicted class (columns)."""
    return torch.bincount(labels.long() * count + predicted.long(), minlength=count**2).view(count, count)


def class_rows(matrix: Tensor, names: list[str]) -> list[ClassRow]:
    """Return a row for each class, the least accurate first; classes without an image are left out."""
    off = matrix.clone().fill_diagonal_(0)
    counts, places = off.max(1)
    columns = torch.stack([matrix.sum(1), matrix.diagonal(), matrix.sum(0), counts, places], 1)
    rows = [
        ClassRow(name, pictures, right, named, names[place] if taken else "", taken)
        for name, (pictures, right, named, taken, place) in zip(names, columns.tolist(), strict=True)
        if pictures
    ]
    return sorted(rows, key=lambda row: row.accuracy)


def worst_pairs(matrix: Tensor, names: list[str], count: int) -> list[Pair]:
    """Return the most frequent mistakes, the most frequent first."""
    off = matrix.clone().fill_diagonal_(0).flatten()
    order = off.argsort(descending=True, stable=True)[:count]
    pictures, numbers = matrix.sum(1).tolist(), off.tolist()
    places = [divmod(place, len(names)) for place in order.tolist() if numbers[place]]
    pairs = [(i, j, numbers[i * len(names) + j]) for i, j in places]
    return [Pair(names[i], names[j], number, number / pictures[i]) for i, j, number in pairs]


def interval(share: float, count: int) -> tuple[float, float]:
    """Return the ends of Wilson's interval: 95 % of such tests find a share within it."""
    z = 1.96
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return max(0.0, middle - half), min(1.0, middle + half)
