"""The positions of a convolution's kernel on its input: geometry and padding, for every operator on codes."""

from collections.abc import Sequence
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor


class Window(NamedTuple):
    """Geometry and padding of a two-dimensional convolution.

    Attributes:
        stride: of rows and columns.
        padding: left, right, top and bottom, the order of `torch.nn.functional.pad`.
        dilation: of the kernel's rows and columns.
        groups: of the channels.
        padding_value: what the padding is filled with, as a value and not as a code.
    """

    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int, int, int] = (0, 0, 0, 0)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1
    padding_value: int = 0

    @classmethod
    def of(cls, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], *rest: int) -> "Window":
        """Make a window from lists, as operators receive them."""
        return cls(tuple(stride), tuple(padding), tuple(dilation), *rest)  # pyright: ignore

    def __str__(self) -> str:
        """Show the fields that differ from a convolution's defaults."""
        padding = (self.padding[2], self.padding[0]) if self.is_symmetric else self.padding
        parts = {**self._asdict(), "padding": padding}
        defaults = {**Window()._asdict(), "padding": (0, 0)}
        return ", ".join(f"{name}={value}" for name, value in parts.items() if value != defaults[name])

    @property
    def is_symmetric(self) -> bool:
        """Whether opposite sides are padded equally."""
        left, right, top, bottom = self.padding
        return left == right and top == bottom

    def output_size(self, size: Sequence[int], kernel_size: Sequence[int]) -> tuple[int, int]:
        """Return height and width of the output.

        Raises:
            ValueError: a negative padding; a stride or dilation below 1; a kernel that is larger than the padded input.
        """
        if min(self.padding) < 0 or min(self.stride) < 1 or min(self.dilation) < 1:
            raise ValueError(f"{self!r} must have a padding of at least 0, stride and dilation of at least 1")
        left, right, top, bottom = self.padding
        padded = size[0] + top + bottom, size[1] + left + right
        spans = self._spans(kernel_size)
        if spans[0] > padded[0] or spans[1] > padded[1]:
            kernel = tuple(kernel_size)
            raise ValueError(f"kernel_size (={kernel}, {spans} dilated) must not exceed the padded input {padded}")
        return (padded[0] - spans[0]) // self.stride[0] + 1, (padded[1] - spans[1]) // self.stride[1] + 1

    def pad(self, input: Tensor, zero: int = 0) -> Tensor:
        """Return the padded input; `zero` is the code of 0."""
        return F.pad(input, self.padding, value=self.padding_value + zero) if any(self.padding) else input

    def pad_but_zeros(self, input: Tensor, zero: int = 0, pads: bool = True) -> tuple[Tensor, tuple[int, int]]:
        """Return the input, and the rows and columns with which a convolution still has to pad it on both sides.

        It is padded here, around ``zero``, the code of 0, if the convolution can't, or may not (``pads``).
        """
        if self.padding_value or not self.is_symmetric or not pads:
            return self.pad(input, zero), (0, 0)
        return input, (self.padding[2], self.padding[0])

    def may_lie_in_padding(self, kernel_size: Sequence[int]) -> bool:
        """Whether all taps of a kernel can lie in the padding.

        Not so for all dilated kernels for which this is True.
        """
        if not any(self.padding):
            return False
        height, width = self._spans(kernel_size)
        left, right, top, bottom = self.padding
        return max(left, right) >= width or max(top, bottom) >= height or max(self.dilation) > 1

    def _spans(self, kernel_size: Sequence[int]) -> tuple[int, int]:
        """Rows and columns from the first tap to the last."""
        return (kernel_size[0] - 1) * self.dilation[0] + 1, (kernel_size[1] - 1) * self.dilation[1] + 1
