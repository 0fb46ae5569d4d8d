"""Where the elements of ``(N, C, *spatial)`` are in memory: rows of pixels, lanes of channels."""

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..native_bits import channels_last

ROWS = 32
"""Pixels of a program."""
LANES = 64
"""Channels of a program."""
CHUNK = 16
"""Blocks of rows that one program adds up."""
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_MOST = (1 << 31) - 512  # the last program's rows go up to 512 past the end
jit: Any = triton.jit


def launch(kernel: Any, programs: int, *arguments: Any, **constants: Any) -> None:
    """Run ``programs`` programs of a kernel; products and sums are rounded separately, as in torch's operators."""
    kernel[(programs,)](*arguments, **constants, enable_fp_fusion=False)


class Places(NamedTuple):
    """A tensor's pixels and strides.

    Attributes:
        rows: pixels of all images.
        places: pixels of an image.
        of_batch: the stride of an image.
        of_channel: the stride of a channel.
        of_place: the stride of a pixel.
    """

    rows: int
    places: int
    of_batch: int
    of_channel: int
    of_place: int

    @classmethod
    def of(cls, x: Tensor) -> "Places | None":
        """Return the places of ``x``; None if neither channels nor pixels are adjacent, or there are too many."""
        last = channels_last(x) if x.ndim > 1 and x.numel() else None
        if last is None or x.numel() // x.shape[1] >= _MOST:
            return None
        (batch, channels), places = x.shape[:2], math.prod(x.shape[2:])
        strides = (1, channels) if last else (places, 1)
        return cls(batch * places, places, channels * places, *strides)

    def programs(self, columns: int) -> int:
        """The number of programs for so many columns of blocks of rows."""
        return triton.cdiv(self.rows, ROWS) * columns


def sums_of_channels(kernel: Any, sums: int, places: Places, operands: tuple[Tensor, ...]) -> Tensor:
    """Return ``(sums, channels)``, float32: a kernel adds up parts of all pixels of ``operands``."""
    channels = operands[0].shape[1]
    columns, chunks = triton.cdiv(channels, LANES), triton.cdiv(places.rows, ROWS * CHUNK)
    partial = torch.empty((sums, chunks, channels), device=operands[0].device)
    arguments = *operands, partial, *places, channels, columns
    launch(kernel, chunks * columns, *arguments, CHUNK=CHUNK, ROWS=ROWS, LANES=LANES)
    return partial.sum(1)


@jit
def offsets(row, channel, places, of_batch, of_channel, of_place):
    """Return the offsets of ``(rows, channels)``."""
    batch = (row // places).to(tl.int64)
    place = (row % places).to(tl.int64)
    pixels = batch * of_batch + place * of_place
    return pixels[:, None] + channel.to(tl.int64)[None, :] * of_channel
