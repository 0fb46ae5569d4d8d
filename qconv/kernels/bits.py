"""Bits of tensors, as `torch.library` operators: signs, where a gradient passes, and codes of few bits.

Each operator has a slow and exact definition by torch's operators, which runs on every device, a kernel in C
(`native_bits`), and one in Triton (`gpu`). None has a gradient.

**Bits** of ``(N, C, *spatial)`` are int64 ``(N, *spatial, groups · words)`` with ``words = ceil(C / groups / 64)``. Bit
i of a word belongs to the channel ``64 · word + i`` of its group; bits beyond the last channel are 0. **Signs** are 1
for −1. **Passes** are 1 where a gradient passes: everywhere but where ``x <= low`` or ``x >= high``; an end that is
None stops nothing, and NaN passes.

**Codes** of 1, 2, 4 or 8 bits are uint8 ``(N, *spatial, ceil(C · bits / 8))``; a byte holds those of neighbouring
channels, the first in its low bits.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from . import native_bits
from .library import LIBRARY, register

WORD = 64
LIBRARY.define("pack_signs(Tensor input, int groups=1) -> Tensor")
LIBRARY.define("pack_passes(Tensor input, float? low, float? high, int groups=1) -> (Tensor, Tensor)")
LIBRARY.define("pack_signs_and_passes(Tensor input, float? low, float? high, int groups=1) -> (Tensor, Tensor, Tensor)")
LIBRARY.define("clamp_and_pack(Tensor input, float? low, float? high) -> (Tensor, Tensor, Tensor)")
LIBRARY.define("unpack_signs(Tensor bits, int channels, int groups, ScalarType dtype, bool channels_last) -> Tensor")
LIBRARY.define("where_passes(Tensor grad, Tensor passes, int groups=1) -> Tensor")
LIBRARY.define("pack_codes(Tensor codes, int bits) -> Tensor")
LIBRARY.define("unpack_codes(Tensor packed, int channels, int bits, ScalarType dtype, bool channels_last) -> Tensor")


def pack_signs(input: Tensor, groups: int = 1) -> Tensor:
    """Return the signs of ``(N, C, *spatial)`` as bits; 0, −0.0 and NaN give +1.

    Example:
        >>> pack_signs(torch.tensor([-1.0, 1.0, -1.0]).view(1, 3, 1, 1)).item()
        5
    """
    return _pack(input < 0, groups)


def pack_passes(input: Tensor, low: float | None, high: float | None, groups: int = 1) -> tuple[Tensor, Tensor]:
    """Return bits of where the gradient passes, and whether it stops anywhere: a bool tensor without dimensions.

    Example:
        >>> passes, stops = pack_passes(torch.tensor([-2.0, 0.5, 1.0]).view(1, 3), -1.0, 1.0)
        >>> passes.item(), stops.item()
        (2, True)
    """
    passes = _passes(input, low, high)
    return _pack(passes, groups), ~passes.all()


def pack_signs_and_passes(
    input: Tensor, low: float | None, high: float | None, groups: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the results of `pack_signs` and of `pack_passes`."""
    return pack_signs(input, groups), *pack_passes(input, low, high, groups)


def clamp_and_pack(input: Tensor, low: float | None, high: float | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``clamp(input, low, high)``, in the memory format of ``input``, and the results of `pack_passes`."""
    clamped = input.clone() if low is None and high is None else input.clamp(low, high)
    return clamped, *pack_passes(input, low, high)


def unpack_signs(
    bits: Tensor, channels: int, groups: int = 1, dtype: torch.dtype = torch.int8, channels_last: bool = True
) -> Tensor:
    """The inverse of `pack_signs`: +1 and −1, ``(N, C, *spatial)``.

    ``channels_last``: whether the channels are adjacent in memory.
    """
    return _in_format(1 - 2 * _unpack(bits, channels, groups).to(dtype), channels_last)


def where_passes(grad: Tensor, passes: Tensor, groups: int = 1) -> Tensor:
    """Return ``grad`` where a bit of ``passes`` is 1, else 0, in the memory format of ``grad``."""
    return grad.clone().masked_fill_(~_unpack(passes, grad.shape[1], groups).movedim(-1, 1), 0)


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Return whole numbers from 0 to 2^bits − 1, of any dtype, as ``bits`` bits each.

    Example:
        >>> pack_codes(torch.tensor([[1, 2, 15]]), 4).tolist()
        [[33, 15]]
    """
    share = _per_byte(bits)
    values = codes.movedim(1, -1).to(torch.uint8)
    values = F.pad(values, (0, -values.shape[-1] % share)).unflatten(-1, (-1, share))
    places = bits * torch.arange(share, dtype=torch.uint8, device=codes.device)
    return (values << places).sum(-1, dtype=torch.uint8)


def unpack_codes(
    packed: Tensor, channels: int, bits: int, dtype: torch.dtype = torch.uint8, channels_last: bool = True
) -> Tensor:
    """The inverse of `pack_codes`, ``(N, C, *spatial)``."""
    share = _per_byte(bits)
    places = bits * torch.arange(share, dtype=torch.uint8, device=packed.device)
    values = (packed.unsqueeze(-1) >> places & (2**bits - 1)).flatten(-2)[..., :channels]
    return _in_format(values.to(dtype), channels_last)


def _per_byte(bits: int) -> int:
    if bits not in (1, 2, 4, 8):
        raise ValueError(f"bits (={bits}) must be 1, 2, 4 or 8")
    return 8 // bits


def _passes(input: Tensor, low: float | None, high: float | None) -> Tensor:
    stops = torch.zeros_like(input, dtype=torch.bool)
    if low is not None:
        stops |= input <= low
    if high is not None:
        stops |= input >= high
    return ~stops


def _pack(bits: Tensor, groups: int) -> Tensor:
    bits = bits.unflatten(1, (groups, -1)).movedim((1, 2), (-2, -1))
    words = F.pad(bits, (0, -bits.shape[-1] % WORD)).unflatten(-1, (-1, WORD)).long()
    return (words << torch.arange(WORD, device=bits.device)).sum(-1).flatten(-2)


def _unpack(bits: Tensor, channels: int, groups: int) -> Tensor:
    """Bools with the channels in the last dimension."""
    words = bits.unflatten(-1, (groups, -1, 1)) >> torch.arange(WORD, device=bits.device) & 1
    return words.flatten(-2)[..., : channels // groups].flatten(-2).bool()


def _in_format(values: Tensor, channels_last: bool) -> Tensor:
    values = values.contiguous().movedim(-1, 1)
    return values if channels_last else values.contiguous()


for _definition, _kernel in (
    (pack_signs, native_bits.pack_signs),
    (pack_passes, native_bits.pack_passes),
    (pack_signs_and_passes, native_bits.pack_signs_and_passes),
    (clamp_and_pack, native_bits.clamp_and_pack),
    (unpack_signs, native_bits.unpack_signs),
    (where_passes, native_bits.where_passes),
    (pack_codes, native_bits.pack_codes),
    (unpack_codes, native_bits.unpack_codes),
):
    register(_definition, _kernel, "codes" if _definition in (pack_codes, unpack_codes) else "bits")
