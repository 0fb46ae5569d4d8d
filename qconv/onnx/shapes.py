"""Shapes of values, and how they follow from the number of images."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..program.operations import Program
from .integers import fast


class Shape(tuple[int, ...]):
    """The shape of a value for two images, with that for three."""

    of_three: tuple[int, ...]

    def __new__(cls, of_two: Sequence[int], of_three: Sequence[int]) -> "Shape":
        shape = super().__new__(cls, of_two)
        shape.of_three = tuple(of_three)
        return shape

    def of(self, images: int) -> tuple[int, ...]:
        """Return the shape for a number of images."""
        return tuple(two + (images - 2) * (three - two) for two, three in zip(self, self.of_three, strict=True))


def shapes_of(program: Program, example: Tensor) -> list[Shape]:
    """Return the shapes of a program's values for images like the first one of these."""
    of_two, of_three = (program.values(torch.cat([example[:1]] * images), fast) for images in (2, 3))
    return [Shape(two.shape, three.shape) for two, three in zip(of_two, of_three, strict=True)]
