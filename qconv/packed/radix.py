"""Whole numbers from 0 to ``radix − 1`` in as few bytes as their number of bits needs.

A power of two is written bit by bit, the lowest bit first, across byte borders. For three values, five of them share a
byte (3⁵ = 243 of 256), 1.6 bits each. Two bits would take a quarter more; the entropy of three values is 1.585 at most.
"""

import math

import torch
from torch import Tensor

TRITS = 5
"""Numbers of three values in a byte."""
LARGEST_RADIX = 2**16
CHUNK = 8 * TRITS * 2**14
"""Numbers that are unpacked at once: a whole number of bytes in each radix."""


def radix_of(bits: float, count: int) -> int:
    """Return the radix for a quantizer of `bits` bits with `count` values: 3, or a power of two."""
    if count <= 3 and bits == math.log2(3):
        return 3
    return 2 ** max(math.ceil(bits), (count - 1).bit_length(), 1)


def packed_length(count: int, radix: int) -> int:
    """The number of bytes for `count` numbers."""
    if radix == 3:
        return -(-count // TRITS)
    return -(-count * _width(radix) // 8)


def pack(numbers: Tensor, radix: int) -> Tensor:
    """Pack whole numbers from 0 to ``radix − 1``, in their order, into bytes (uint8, one dimension)."""
    _check_radix(radix)
    flat = numbers.detach().cpu().flatten()
    if flat.numel() and not 0 <= int(flat.min()) <= int(flat.max()) < radix:
        raise ValueError(f"numbers must be from 0 to {radix - 1}; they are from {flat.min()} to {flat.max()}")
    return torch.cat([_pack(part, radix) for part in flat.split(CHUNK)]) if flat.numel() else flat.to(torch.uint8)


def unpack(data: Tensor, count: int, radix: int) -> Tensor:
    """The inverse of `pack`: `count` numbers as int16, or as int32 if int16 is too small."""
    _check_radix(radix)
    if data.dtype != torch.uint8 or data.ndim != 1 or data.numel() != packed_length(count, radix):
        raise ValueError(
            f"{count} numbers of radix {radix} must be {packed_length(count, radix)} bytes, not {tuple(data.shape)} "
            f"of {data.dtype}"
        )
    size = packed_length(CHUNK, radix)
    dtype = torch.int16 if radix < LARGEST_RADIX // 2 else torch.int32
    parts = [_unpack(part, radix).to(dtype) for part in data.split(size)]
    numbers = torch.cat(parts) if parts else data.to(dtype)
    if numbers[count:].any():
        raise ValueError("the bits after the last number must be 0")
    return numbers[:count]


def _pack(numbers: Tensor, radix: int) -> Tensor:
    if radix == 3:
        trits = _padded(numbers.to(torch.int32), TRITS).view(-1, TRITS)
        return (trits * _powers(3, TRITS)).sum(1).to(torch.uint8)
    bits = (numbers.to(torch.int32).unsqueeze(1) >> torch.arange(_width(radix), device="cpu")) & 1
    return (_padded(bits.flatten(), 8).view(-1, 8) * _powers(2, 8)).sum(1).to(torch.uint8)


def _unpack(data: Tensor, radix: int) -> Tensor:
    wide = data.to(torch.int32).unsqueeze(1)
    if radix == 3:
        if (data >= 3**TRITS).any():
            raise ValueError(f"five trits must give a byte below {3**TRITS}, not {int(data.max())}")
        return (wide // _powers(3, TRITS) % 3).flatten()
    bits = ((wide >> torch.arange(8, device="cpu")) & 1).flatten()
    width = _width(radix)
    whole = bits.numel() // width * width  # what is left over is less than a number
    numbers = (bits[:whole].view(-1, width) * _powers(2, width)).sum(1, dtype=torch.int32)
    rest = bits[whole:].any().to(torch.int32).view(1) if whole < bits.numel() else numbers[:0]
    return torch.cat([numbers, rest])  # not 0 where a bit is set that belongs to no number


def _padded(numbers: Tensor, multiple: int) -> Tensor:
    return torch.cat([numbers, numbers.new_zeros(-numbers.numel() % multiple)])


def _powers(base: int, count: int) -> Tensor:
    return torch.tensor([base**exponent for exponent in range(count)], dtype=torch.int32, device="cpu")


def _width(radix: int) -> int:
    return (radix - 1).bit_length()


def _check_radix(radix: int) -> None:
    if radix != 3 and (radix < 2 or radix > LARGEST_RADIX or radix & (radix - 1)):
        raise ValueError(f"radix (={radix}) must be 3 or a power of two from 2 to 65536")
