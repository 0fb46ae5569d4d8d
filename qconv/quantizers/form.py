"""Shape, dtype and memory format of a tensor that is kept only as bits."""

from collections.abc import Sequence
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
        strides: that an operator of elements gives its result, without the gaps of a part of a larger tensor.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    channels_last: bool
    groups: int = 1
    strides: tuple[int, ...] = ()

    @classmethod
    def of(cls, x: Tensor, groups: int = 1) -> Self:
        """Return the form of ``x``."""
        dense = x if x.is_contiguous() else torch.empty_like(x, device="meta")
        channels_last = not dense.is_contiguous() and dense.movedim(1, -1).is_contiguous()
        return cls(tuple(x.shape), x.dtype, channels_last, groups, dense.stride())

    @property
    def picture_is_last(self) -> bool:
        """Whether torch's convolution treats the quantized input as channels_last."""
        return is_like_channels_last(self.shape, self.strides) if len(self.shape) == 4 else self.channels_last

    @property
    def channels(self) -> int:
        """The number of channels of all groups."""
        return self.shape[1]

    def signs(self, bits: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return +1 and −1 from the bits of signs, in ``dtype`` or the input's dtype."""
        dtype = dtype or self.dtype
        signs = _ops.unpack_signs(bits, self.channels, self.groups, dtype, self.channels_last)
        return signs if signs.stride() == self.strides else self._empty(dtype, bits.device).copy_(signs)

    def codes(self, packed: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
        """Return whole numbers of ``dtype`` from codes of so many bits each."""
        codes = _ops.unpack_codes(packed, self.channels, bits, dtype, self.channels_last)
        if self.channels_last:
            return codes
        dense = self._empty(dtype, packed.device)
        # Sides of 1, whose strides say nothing, have those of a fresh tensor: torch chooses operators by them.
        if not dense.is_contiguous():
            return dense.copy_(codes)
        return codes.clone(memory_format=torch.contiguous_format) if 1 in self.shape else codes

    def _empty(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty_strided(self.shape, self.strides, dtype=dtype, device=device)


def is_like_channels_last(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether torch treats an image as channels_last: it looks at the strides, also of gaps and of sides of 1.

    Example:
        >>> is_like_channels_last((2, 8, 1, 1), (8, 1, 8, 8)), is_like_channels_last((2, 8, 1, 1), (8, 1, 1, 1))
        (True, False)
    """
    (_, channels, height, width), (of_batch, of_channels, of_height, of_width) = shape, strides
    ordered = of_channels * channels <= of_width and of_width * width <= of_height and of_height * height <= of_batch
    return ordered and 0 < of_channels < of_batch


def has_usual_strides(x: Tensor) -> bool:
    """Whether a tensor with sides of 1 has a fresh tensor's strides: contiguous, or else channels_last."""
    if 1 not in x.shape:
        return True
    fresh = torch.empty(x.shape, device="meta")
    if not x.is_contiguous():
        batch, channels, *spatial = x.shape
        fresh = fresh.new_empty((batch, *spatial, channels)).movedim(-1, 1)
    return x.stride() == fresh.stride()


def has_own_strides(x: Tensor) -> bool:
    """Whether only sides of 1 have other strides than in a fresh tensor: some operators keep them, others don't."""
    is_last = x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last)
    return (is_last or x.is_contiguous()) and not has_usual_strides(x)


def with_fresh_strides(x: Tensor) -> Tensor:
    """Give sides of 1 the strides of a fresh tensor, as products of tensors have them."""
    if not has_own_strides(x):
        return x
    return x.clone(memory_format=torch.contiguous_format if x.is_contiguous() else torch.channels_last)
