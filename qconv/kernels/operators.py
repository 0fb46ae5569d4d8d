"""Operators of integer inference, as `torch.library` operators: each has a slow and exact definition.

A definition uses torch's operators and runs on every device; for tensors without values it computes the shape. Faster
kernels (`native`, `onednn`, and `gpu` on a GPU) give the same integers. A kernel for another device is registered in
the same way, and callers see no difference. All are functional and have no gradient. Outputs are channels_last.

**Signs** are bits (`qconv.kernels.bits`), ``(N, H, W, groups · words)``. `pack_weight` makes ``(groups, blocks, kh, kw,
words, 8)`` of ``(C_out, C / groups, kh, kw)``. ``in_channels`` and ``out_channels`` are totals of all groups.

**Codes** are uint8 or int8 numbers ``(N, C, H, W)``; ``zero`` is the code of 0. Their weights, ``(C_out, C / groups,
kh, kw)``, are int8, for which there is a kernel, or int16.

The operators' schemas spell a `Window` out; the padding of signs is filled with −1, 0 or +1.

Definitions add up in float32 if every sum is below 2^24 and thus exact, else in several such sums or in float64.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import native, native_weight, onednn
from .bits import WORD, pack_signs, unpack_signs
from .exact_sums import sums_of_products
from .library import LIBRARY, Scaled, register
from .native import BLOCK
from .window import Window

LIBRARY.define("pack_weight(Tensor signs, int groups=1) -> (Tensor, Tensor)")
LIBRARY.define(
    "binary_conv2d(Tensor input, Tensor weight, Tensor tap_sums, int in_channels, int out_channels, int[2] stride, "
    "int[4] padding, int[2] dilation, int padding_value, Tensor? scale=None, Tensor? bias=None) -> Tensor"
)
LIBRARY.define(
    "integer_conv2d(Tensor input, Tensor weight, int[2] stride, int[4] padding, int[2] dilation, int groups, "
    "int padding_value, Tensor? scale=None, Tensor? bias=None, int zero=0) -> Tensor"
)
LIBRARY.define(
    "shift_conv2d(Tensor input, Tensor[] weights, int[] places, int[2] stride, int[4] padding, int[2] dilation, "
    "int groups) -> Tensor"
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


def _of_sums(accumulators: Tensor, scaled: Scaled) -> Tensor:
    if scaled is None:
        return accumulators
    scale, bias = (each.view(-1, 1, 1) for each in scaled)
    return accumulators.float() * scale + bias


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
    filters = unpack_weight(weight, *channels)
    accumulators = sums_of_products(signs.to(torch.int8), filters, window).to(torch.int32)
    return _of_sums(accumulators, scaled)


def integer_conv2d(input: Tensor, weight: Tensor, window: Window, scaled: Scaled = None, zero: int = 0) -> Tensor:
    """Convolve codes, as ``input − zero``.

    Returns:
        The sums ``acc`` (N, C_out, *out), which must fit int32; `scaled`, ``acc · scale_c + bias_c``,
        float32, whose last bits may differ between kernels.
    """
    return _of_sums(sums_of_products(input, weight, window, zero).to(torch.int32), scaled)


def code_dtype(low: int) -> torch.dtype:
    """The dtype of codes from `low` on: unsigned if possible, which CPUs multiply faster."""
    return torch.int8 if low < 0 else torch.uint8


def shift_conv2d(input: Tensor, weights: Sequence[Tensor], places: Sequence[int], window: Window) -> Tensor:
    """Convolve int64 inputs with ``Σ weight << place``: int64 sums, which must be below 2^53.

    `weights` are int8, with a `place` for each. The input is split into 8-bit numbers; integer convolutions of all
    pairs are shifted and added up.
    """
    total: Tensor | None = None
    for place, digit in _digits(input):
        for weight, more in zip(weights, places, strict=True):
            sums = torch.ops.qconv.integer_conv2d(digit, weight, *window)
            part = sums.long() << (place + more)
            total = part if total is None else total.add_(part)
    return _shift_shape(input, weights, places, window).zero_() if total is None else total


def _digits(input: Tensor) -> list[tuple[int, Tensor]]:
    """Split ``input = Σ digit << place``: uint8, the last int8 if a number is negative; none for an empty input."""
    if not input.numel():
        return []
    digits: list[tuple[int, Tensor]] = []
    low, high = (int(end) for end in input.aminmax())
    while low < -128 or high > (127 if low < 0 else 255):
        digits.append((8 * len(digits), (input & 255).to(torch.uint8)))
        input, low, high = input >> 8, low >> 8, high >> 8
    return [*digits, (8 * len(digits), input.to(code_dtype(low)))]


def digits_of_shifts(codes: Tensor) -> tuple[list[Tensor], list[int]]:
    """int8 ``weights`` and ``places`` of zeros and ±2^s for `shift_conv2d`: ±2^(s % 7) at the place s − s % 7."""
    shift = codes.abs().clamp(min=1).double().log2().long()
    places = (shift - shift % 7)[codes != 0].unique().tolist() or [0]
    parts = [torch.where(shift - shift % 7 == place, codes.long() >> place, 0).to(torch.int8) for place in places]
    return [part.contiguous() for part in parts], places


def of_8_bits(codes: Tensor, groups: int) -> tuple[Tensor, Tensor | None]:
    """Return whole numbers ``(C_out, C / groups, kh, kw)`` as an int8 weight, and the input channels that it takes.

    Channels with numbers beyond −127 to 127 are taken several times, and represent the sum of their weights; None if
    each channel is taken once.
    """
    parts, left = [], codes
    while not parts or left.any():
        parts.append(left.clamp(-127, 127))
        left = left - parts[-1]
    own = torch.arange(codes.shape[1], device=codes.device)
    taken, weights = [own.expand(groups, -1)], [parts[0]]
    for part in parts[1:]:
        of_groups = part.unflatten(0, (groups, -1)).abs().sum((1, 3, 4)) > 0  # (groups, C / groups)
        count = int(of_groups.sum(1).max())
        index = of_groups.int().argsort(1, descending=True)[:, :count]  # a group of fewer takes zeros along
        places = index.repeat_interleave(len(codes) // groups, 0)[..., None, None].expand(-1, -1, *codes.shape[2:])
        taken.append(index)
        weights.append(part.gather(1, places))
    weight = torch.cat(weights, 1).to(torch.int8, memory_format=torch.contiguous_format)
    if len(parts) == 1:
        return weight, None
    first = codes.shape[1] * torch.arange(groups, device=codes.device).unsqueeze(1)
    return weight, (torch.cat(taken, 1) + first).flatten()


def _shift_shape(input: Tensor, weights: Sequence[Tensor], places: Sequence[int], window: Window) -> Tensor:
    """Its definition looks at the numbers that there are, which a tensor without values does not say."""
    return sums_of_products(input, weights[0], window).long()


def _binary_operands(input: Tensor, weight: Tensor, tap_sums: Tensor, *arguments: Any) -> tuple[Any, ...]:
    *channels, stride, padding, dilation, value = arguments[:6]
    window = Window.of(stride, padding, dilation, len(weight), value)
    return input, weight, tap_sums, tuple(channels), window, _both(*arguments[6:])


def _integer_operands(input: Tensor, weight: Tensor, *arguments: Any) -> tuple[Any, ...]:
    return input, weight, Window.of(*arguments[:5]), _both(*arguments[5:7]), *arguments[7:]


def _both(scale: Tensor | None = None, bias: Tensor | None = None) -> Scaled:
    """A scale or a bias alone counts as none."""
    return None if scale is None or bias is None else (scale, bias)


def _shift_operands(input: Tensor, weights: Sequence[Tensor], places: Sequence[int], *geometry: Any) -> tuple[Any, ...]:
    return input, weights, places, Window.of(*geometry)


register(pack_weight, native_weight.pack_weight, "convolution")
register(binary_conv2d, native.binary_conv2d, "convolution", _binary_operands)
register(integer_conv2d, onednn.integer_conv2d, operands=_integer_operands)
register(shift_conv2d, operands=_shift_operands, shape=_shift_shape)
