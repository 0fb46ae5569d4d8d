"""Convolutions of signs, as `torch.library` operators: each has a slow and exact definition.

A definition uses torch's operators and runs on every device; for tensors without values it computes the shape. Faster
kernels (`native`, and `gpu` on a GPU) give the same integers. A kernel for another device is registered in the same
way, and callers see no difference. All are functional and have no gradient. Outputs are channels_last.

**Signs** are bits (`qconv.kernels.bits`), ``(N, H, W, groups · words)``. `pack_weight` makes ``(groups, blocks, kh, kw,
words, 8)`` of ``(C_out, C / groups, kh, kw)``. ``in_channels`` and ``out_channels`` are totals of all groups.

The operators' schemas spell a `Window` out; the padding of signs is filled with −1, 0 or +1.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import native, native_weight
from .bits import WORD, pack_signs, unpack_signs
from .library import LIBRARY, Scaled, register
from .native import BLOCK
from .window import Window

LIBRARY.define("pack_weight(Tensor signs, int groups=1) -> (Tensor, Tensor)")
LIBRARY.define(
    "binary_conv2d(Tensor input, Tensor weight, Tensor tap_sums, int in_channels, int out_channels, int[2] stride, "
    "int[4] padding, int[2] dilation, int padding_value, Tensor? scale=None, Tensor? bias=None) -> Tensor"
)


def pack_weight(signs: Tensor, groups: int = 1) -> tuple[Tensor, Tensor]:
    """Return the signs of ``(C_out, C / groups, kh, kw)``, of any dtype, as bits, and the sums of each tap's signs.

    Bits are 1 where a weight is below 0. Output channels that fill the last block up are +1 in the bits and 0 in the
    sums, which are ``(groups, kh, kw, blocks · 8)`` int32.
    """
    kernel = signs.shape[2:]
    negative = (signs < 0).unflatten(0, (groups, -1))
    missing = -negative.shape[1] % BLOCK
    sums = signs.shape[1] - 2 * negative.sum(2, dtype=torch.int32)
    sums = F.pad(sums, (0, 0, 0, 0, 0, missing)).movedim(1, -1)
    words = pack_signs(signs).view(groups, -1, *kernel, -(-signs.shape[1] // WORD))
    words = F.pad(words.movedim(1, -1), (0, missing)).unflatten(-1, (-1, BLOCK))
    return words.movedim(-2, 1).contiguous(), sums.contiguous()


def unpack_weight(weight: Tensor, in_channels: int, out_channels: int, dtype: torch.dtype = torch.int8) -> Tensor:
    """The inverse of `pack_weight`: signs ``(C_out, C / groups, kh, kw)``."""
    groups = len(weight)
    words = weight.movedim(-1, 2).flatten(1, 2)[:, : out_channels // groups].flatten(0, 1)
    return torch.ops.qconv.unpack_signs(words, in_channels // groups, 1, dtype, True)


def binary_conv2d(
    input: Tensor, weight: Tensor, tap_sums: Tensor, channels: tuple[int, int], window: Window, scaled: Scaled = None
) -> Tensor:
    """Convolve signs, given as bits or as floats.

    Returns:
        The sums ``acc`` (N, C_out, *out), int32; `scaled`, ``acc · scale_c + bias_c``, float32,
        rounded after the product and after the sum.
    """
    groups = window.groups
    signs = torch.where(input < 0, -1, 1) if input.is_floating_point() else unpack_signs(input, channels[0], groups)
    # Sums below 2^24 are exact in float32; but a GPU's library may choose a convolution by transforms, which rounds.
    dtype = torch.float32 if input.is_cpu else torch.float64
    padded, filters = window.pad(signs.to(dtype)), unpack_weight(weight, *channels, dtype)
    with torch.autocast(input.device.type, enabled=False):
        sums = F.conv2d(padded, filters, None, window.stride, 0, window.dilation, groups)
    sums = sums.contiguous(memory_format=torch.channels_last)
    if scaled is None:
        return sums.to(torch.int32)
    scale, bias = (each.view(-1, 1, 1) for each in scaled)
    return sums.float() * scale + bias


def _binary_operands(input: Tensor, weight: Tensor, tap_sums: Tensor, *arguments: Any) -> tuple[Any, ...]:
    *channels, stride, padding, dilation, value = arguments[:6]
    window = Window.of(stride, padding, dilation, len(weight), value)
    return input, weight, tap_sums, tuple(channels), window, _both(*arguments[6:])


def _both(scale: Tensor | None = None, bias: Tensor | None = None) -> Scaled:
    """A scale or a bias alone counts as none."""
    return None if scale is None or bias is None else (scale, bias)


register(pack_weight, native_weight.pack_weight, "convolution")
register(binary_conv2d, native.binary_conv2d, "convolution", _binary_operands)
