"""The form of a tensor of which only bits are kept."""

from typing import NamedTuple, Self

import torch
from torch import Tensor

from ..kernels import bits as _registered  # noqa: F401

_ops = torch.ops.qconv


class Form(NamedTuple):
    """Shape, dtype and memory format of an input ``(N, C, *spatial)``, to restore it from bits.

    Attributes:
        shape: of the input.
        dtype: of the input.
        channels_last: whether its channels are adjacent in memory.
        groups: of channels; the bits of each begin with a word of their own (`qconv.kernels.bits`).
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    channels_last: bool
    groups: int = 1

    @classmethod
    def of(cls, x: Tensor, groups: int = 1) -> Self:
        """Return the form of ``x``."""
        channels_last = not x.is_contiguous() and x.movedim(1, -1).is_contiguous()
        return cls(tuple(x.shape), x.dtype, channels_last, groups)

    @property
    def channels(self) -> int:
        """The number of channels of all groups."""
        return self.shape[1]

    def signs(self, bits: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return +1 and −1 from the bits of signs, in ``dtype`` or that of the input."""
        dtype = dtype or self.dtype
        return self._strided(_ops.unpack_signs(bits, self.channels, self.groups, dtype, self.channels_last))

    def codes(self, packed: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
        """Return whole numbers of ``dtype`` from codes of so many bits each."""
        return self._strided(_ops.unpack_codes(packed, self.channels, bits, dtype, self.channels_last))

    def _strided(self, x: Tensor) -> Tensor:
        """Give sides of 1, whose strides say nothing, those of a fresh tensor: torch chooses operators by them."""
        return x.clone(memory_format=torch.contiguous_format) if 1 in self.shape and not self.channels_last else x
