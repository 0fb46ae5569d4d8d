"""Codes of `qconv.kernels.bits` in Triton. A program takes a block of pixels and 64 channels, whole bytes of codes."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .bits import like_packed
from .places import FLOATS, ROWS, Places, jit, launch, offsets

_LANES = 64
_TYPES = (*FLOATS, torch.int8, torch.uint8, torch.int32, torch.int64)


def pack_codes(codes: Tensor, bits: int) -> Tensor | None:
    """`bits.pack_codes`."""
    if bits not in (1, 2, 4, 8) or codes.dtype not in _TYPES or codes.ndim < 2 or not codes.numel():
        return None
    if (places := Places.of(codes)) is None:
        codes = codes.contiguous()
        if (places := Places.of(codes)) is None:
            return None
    channels = codes.shape[1]
    size = -(-channels * bits // 8)
    packed = torch.empty((len(codes), *codes.shape[2:], size), dtype=torch.uint8, device=codes.device)
    columns = triton.cdiv(channels, _LANES)
    launch(*(_pack, places.programs(columns)), *(codes, packed, *places, channels, columns, size), BITS=bits, ROWS=ROWS)
    return packed


def unpack_codes(
    packed: Tensor, channels: int, bits: int, dtype: torch.dtype = torch.uint8, channels_last: bool = True
) -> Tensor | None:
    """`bits.unpack_codes`."""
    fits = bits in (1, 2, 4, 8) and packed.ndim > 1 and packed.shape[-1] == -(-channels * bits // 8)
    if not fits or packed.dtype != torch.uint8 or dtype not in _TYPES:
        return None
    output = like_packed(packed, channels, dtype, channels_last)
    if (places := Places.of(output)) is None:
        return None
    columns = triton.cdiv(channels, _LANES)
    launch(
        *(_unpack, places.programs(columns)),
        *(packed.contiguous(), output, *places, channels, columns, packed.shape[-1]),
        BITS=bits,
        FLOATS=dtype in FLOATS,
        ROWS=ROWS,
    )
    return output


@jit
def _pack(
    codes, packed, rows, places, of_batch, of_channel, of_place, channels, columns, size,
    BITS: tl.constexpr, ROWS: tl.constexpr,  # noqa: N803
):  # fmt: skip
    SHARE: tl.constexpr = 8 // BITS  # noqa: N806
    BYTES: tl.constexpr = 64 // SHARE  # noqa: N806
    program = tl.program_id(0)
    row = program // columns * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, 64)
    channel = program % columns * 64 + lane
    at = offsets(row, channel, places, of_batch, of_channel, of_place)
    mask = (row < rows)[:, None] & (channel < channels)[None, :]
    code = tl.load(codes + at, mask=mask, other=0)
    code = code.to(tl.float32).to(tl.int32) if code.dtype.is_floating() else code.to(tl.int32)
    shifted = (code & 255) << (lane % SHARE * BITS)[None, :]
    bytes = tl.sum(tl.reshape(shifted, (ROWS, BYTES, SHARE)), axis=2)
    place = program % columns * BYTES + tl.arange(0, BYTES)
    to = row.to(tl.int64)[:, None] * size + place[None, :]
    tl.store(packed + to, bytes.to(tl.uint8), mask=(row < rows)[:, None] & (place < size)[None, :])


@jit
def _unpack(
    packed, output, rows, places, of_batch, of_channel, of_place, channels, columns, size,
    BITS: tl.constexpr, FLOATS: tl.constexpr, ROWS: tl.constexpr,  # noqa: N803
):  # fmt: skip
    SHARE: tl.constexpr = 8 // BITS  # noqa: N806
    program = tl.program_id(0)
    row = program // columns * ROWS + tl.arange(0, ROWS)
    channel = program % columns * 64 + tl.arange(0, 64)
    mask = (row < rows)[:, None] & (channel < channels)[None, :]
    byte = tl.load(packed + row.to(tl.int64)[:, None] * size + (channel // SHARE)[None, :], mask=mask, other=0)
    code = (byte.to(tl.int32) >> (channel % SHARE * BITS)[None, :]) & ((1 << BITS) - 1)  # pyright: ignore
    if FLOATS:
        code = code.to(tl.float32)
    at = offsets(row, channel, places, of_batch, of_channel, of_place)
    tl.store(output + at, code.to(output.dtype.element_ty), mask=mask)
