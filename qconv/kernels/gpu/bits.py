"""`qconv.kernels.bits` in Triton: each operator in one pass over memory.

A program takes a block of pixels and the 64 channels of a word. float32, bfloat16 and float16; comparisons are those of
float32 with bounds that are rounded to the dtype. Whether a gradient stops anywhere is written by every program that
finds one: all write the same.
"""

import torch
import triton.language as tl
from torch import Tensor

from ..bits import WORD
from ..native_bits import rounded_ends
from .places import FLOATS, ROWS, Places, jit, launch, offsets

_INTEGERS = (torch.int8, torch.uint8)


def pack_signs(input: Tensor, groups: int = 1) -> Tensor | None:
    """`bits.pack_signs`."""
    packed = _packed(input, groups, (None, None), signs=True, passes=False)
    return None if packed is None else packed[0]


def pack_passes(input: Tensor, low: float | None, high: float | None, groups: int = 1) -> tuple[Tensor, Tensor] | None:
    """`bits.pack_passes`."""
    packed = _packed(input, groups, (low, high), signs=False, passes=True)
    return None if packed is None else (packed[1], packed[2])


def pack_signs_and_passes(
    input: Tensor, low: float | None, high: float | None, groups: int = 1
) -> tuple[Tensor, Tensor, Tensor] | None:
    """`bits.pack_signs_and_passes`."""
    packed = _packed(input, groups, (low, high), signs=True, passes=True)
    return None if packed is None else packed[:3]


def clamp_and_pack(input: Tensor, low: float | None, high: float | None) -> tuple[Tensor, Tensor, Tensor] | None:
    """`bits.clamp_and_pack`."""
    if Places.of(input) is None:
        return None
    packed = _packed(input, 1, (low, high), signs=False, passes=True, clamps=True)
    return None if packed is None else (packed[3], packed[1], packed[2])


def unpack_signs(
    bits: Tensor, channels: int, groups: int = 1, dtype: torch.dtype = torch.int8, channels_last: bool = True
) -> Tensor | None:
    """`bits.unpack_signs`."""
    fits = groups > 0 and channels % groups == 0 and bits.shape[-1] == groups * -(-channels // groups // WORD)
    if not fits or bits.dtype != torch.int64 or dtype not in (*FLOATS, *_INTEGERS):
        return None
    output = like_packed(bits, channels, dtype, channels_last)
    if (places := Places.of(output)) is None:
        return None
    words = bits.shape[-1]
    launch(
        *(_unpack, places.programs(words)),
        *(bits.contiguous(), output, *places, channels // groups, words // groups, words),
        FLOATS=dtype in FLOATS,
        ROWS=ROWS,
    )
    return output


def where_passes(grad: Tensor, passes: Tensor, groups: int = 1) -> Tensor | None:
    """`bits.where_passes`."""
    places, shape = Places.of(grad), _words_shape(grad, groups)
    if places is None or passes.shape != shape or passes.dtype != torch.int64 or passes.device != grad.device:
        return None
    output, words = torch.empty_like(grad), passes.shape[-1]
    launch(
        *(_where, places.programs(words)),
        *(grad, passes.contiguous(), output, *places, grad.shape[1] // groups, words // groups, words),
        ROWS=ROWS,
    )
    return output


def like_packed(packed: Tensor, channels: int, dtype: torch.dtype, channels_last: bool) -> Tensor:
    """Return an empty ``(N, channels, *spatial)`` for the values of ``(N, *spatial, …)``."""
    values = torch.empty((*packed.shape[:-1], channels), dtype=dtype, device=packed.device).movedim(-1, 1)
    return values if channels_last or values.is_contiguous() else values.new_empty(values.shape)


def _words_shape(x: Tensor, groups: int) -> tuple[int, ...] | None:
    """The shape of the bits of a tensor that the kernels take."""
    if x.dtype not in FLOATS or x.ndim < 2 or not x.numel() or groups < 1 or x.shape[1] % groups:
        return None
    return len(x), *x.shape[2:], groups * -(-x.shape[1] // groups // WORD)


def _packed(
    input: Tensor,
    groups: int,
    ends: tuple[float | None, float | None],
    *,
    signs: bool,
    passes: bool,
    clamps: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """Return signs, passes, whether a gradient stops, and the clamped input; those not asked for are meaningless."""
    shape, found = _words_shape(input, groups), rounded_ends(*ends, input.dtype)
    if shape is None or found is None:
        return None
    if (places := Places.of(input)) is None:
        input = input.contiguous()
        if (places := Places.of(input)) is None:
            return None
    words = [torch.empty(shape, dtype=torch.int64, device=input.device) for _ in range(signs + passes)]
    stops = torch.zeros((), dtype=torch.uint8, device=input.device) if passes else words[0]
    clamped = torch.empty_like(input) if clamps else input
    columns = shape[-1]
    launch(
        *(_pack, places.programs(columns)),
        *(input, words[0], words[-1], stops, clamped, *places, input.shape[1] // groups, columns // groups, columns),
        *found,
        SIGNS=signs,
        PASSES=passes,
        CLAMPS=clamps,
        ROWS=ROWS,
    )
    return words[0], words[-1], stops.view(torch.bool) if passes else stops, clamped


@jit
def _block(rows, fan, words, columns, ROWS: tl.constexpr):  # noqa: N803
    """Return a program's rows, its column of words, its 64 channels, and which elements exist."""
    program = tl.program_id(0)
    row = program // columns * ROWS + tl.arange(0, ROWS)
    column = program % columns
    lane = column % words * 64 + tl.arange(0, 64)
    return row, column, column // words * fan + lane, (row < rows)[:, None] & (lane < fan)[None, :]


@jit
def _store_words(bits, words, row, column, rows, columns):
    """Store a word for each row, from bits in the order of its channels."""
    shifted = bits.to(tl.int64) << tl.arange(0, 64).to(tl.int64)[None, :]
    tl.store(words + row.to(tl.int64) * columns + column, tl.sum(shifted, axis=1), mask=row < rows)


@jit
def _bits_of(words, row, column, rows, columns):
    """Load a word for each row and return its bits as 0 and 1."""
    word = tl.load(words + row.to(tl.int64) * columns + column, mask=row < rows, other=0)
    return ((word[:, None] >> tl.arange(0, 64).to(tl.int64)[None, :]) & 1).to(tl.int32)


@jit
def _pack(
    input, signs, passes, stops, clamped,
    rows, places, of_batch, of_channel, of_place, fan, words, columns, low, high,
    SIGNS: tl.constexpr, PASSES: tl.constexpr, CLAMPS: tl.constexpr, ROWS: tl.constexpr,  # noqa: N803
):  # fmt: skip
    row, column, channel, mask = _block(rows, fan, words, columns, ROWS)
    at = offsets(row, channel, places, of_batch, of_channel, of_place)
    x = tl.load(input + at, mask=mask, other=0).to(tl.float32)
    if SIGNS:
        _store_words((x < 0) & mask, signs, row, column, rows, columns)
    if PASSES:
        stop = ((x <= low) | (x >= high)) & mask
        _store_words((stop == 0) & mask, passes, row, column, rows, columns)
        tl.store(stops, 1, mask=tl.max(tl.max(stop.to(tl.int32), axis=1), axis=0) != 0)
    if CLAMPS:
        x = tl.where(x < low, low, x)
        x = tl.where(x > high, high, x)
        tl.store(clamped + at, x.to(clamped.dtype.element_ty), mask=mask)


@jit
def _unpack(
    bits, output, rows, places, of_batch, of_channel, of_place, fan, words, columns,
    FLOATS: tl.constexpr, ROWS: tl.constexpr,  # noqa: N803
):  # fmt: skip
    row, column, channel, mask = _block(rows, fan, words, columns, ROWS)
    sign = 1 - 2 * _bits_of(bits, row, column, rows, columns)
    if FLOATS:
        sign = sign.to(tl.float32)
    at = offsets(row, channel, places, of_batch, of_channel, of_place)
    tl.store(output + at, sign.to(output.dtype.element_ty), mask=mask)


@jit
def _where(
    grad, passes, output, rows, places, of_batch, of_channel, of_place, fan, words, columns,
    ROWS: tl.constexpr,  # noqa: N803
):  # fmt: skip
    row, column, channel, mask = _block(rows, fan, words, columns, ROWS)
    at = offsets(row, channel, places, of_batch, of_channel, of_place)
    passing = _bits_of(passes, row, column, rows, columns) != 0
    value = tl.load(grad + at, mask=mask & passing, other=0)
    tl.store(output + at, value, mask=mask)
