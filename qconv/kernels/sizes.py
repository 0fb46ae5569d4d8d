"""The sizes of a convolution and of its packed operands."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .bits import WORD
from .native import BLOCK
from .window import Window


class Sizes(NamedTuple):
    """The sizes of a convolution; `channels`, in and out, are totals of all groups."""

    batch: int
    channels: tuple[int, int]
    input_size: tuple[int, int]
    kernel_size: tuple[int, int]
    window: Window

    @property
    def words(self) -> int:
        """Words of the bits of a group's input channels."""
        return -(-self.channels[0] // self.window.groups // WORD)

    @property
    def input(self) -> tuple[int, int, int, int]:
        """The shape of the input."""
        return self.batch, self.channels[0], *self.input_size

    @property
    def bits(self) -> tuple[int, int, int, int]:
        """The shape of the input's bits."""
        return self.batch, *self.input_size, self.window.groups * self.words

    @property
    def weight(self) -> tuple[int, int, int, int]:
        """The shape of the weight."""
        return self.channels[1], self.channels[0] // self.window.groups, *self.kernel_size

    @property
    def packed(self) -> tuple[int, ...]:
        """The shape of the weight's bits."""
        groups = self.window.groups
        return groups, -(-self.channels[1] // groups // BLOCK), *self.kernel_size, self.words, BLOCK

    @property
    def output(self) -> tuple[int, int, int, int]:
        """The shape of the output."""
        return self.batch, self.channels[1], *self.window.output_size(self.input_size, self.kernel_size)

    @property
    def products(self) -> int:
        """Multiplications of the convolution, or of either gradient."""
        batch, channels, height, width = self.output
        _, fan_in, kernel_h, kernel_w = self.weight
        return batch * channels * height * width * fan_in * kernel_h * kernel_w

    def padded_but_zeros(self, input: Tensor) -> tuple[Tensor, "Sizes"]:
        """Return the input and the sizes for a convolution that pads with zeros; others are padded here."""
        if not self.window.padding_value or not any(self.window.padding):
            return input, self
        input = self.window.pad(input)
        size = input.shape[2], input.shape[3]
        return input, self._replace(input_size=size, window=self.window._replace(padding=(0, 0, 0, 0)))

    def checked(self) -> "Sizes":
        """Return self.

        Raises:
            ValueError: groups, channels, a padding value or a geometry that no binary convolution has.
        """
        groups = self.window.groups
        for name, channels in zip(("in_channels", "out_channels"), self.channels, strict=True):
            if groups < 1 or channels < 1 or channels % groups:
                raise ValueError(f"{name} (={channels}) must be a positive multiple of groups (={groups})")
        if self.window.padding_value not in (-1, 0, 1):
            raise ValueError(f"padding_value (={self.window.padding_value}) must be -1, 0 or 1")
        self.window.output_size(self.input_size, self.kernel_size)
        return self


def must_be(name: str, tensor: Tensor, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
    """Raise a ValueError unless a tensor has this shape and dtype, on this device."""
    if tuple(tensor.shape) != tuple(shape) or tensor.dtype != dtype or tensor.device != device:
        raise ValueError(
            f"{name} ({tensor.dtype}, {tuple(tensor.shape)} on {tensor.device}) must be {dtype}, {tuple(shape)} "
            f"on {device}"
        )
