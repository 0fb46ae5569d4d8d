"""The binary convolution and the packing of its weight in Triton.

A program computes a tile of pixels and output channels of one group. It unpacks the words of both operands to 8-bit
signs in registers and multiplies these by tensor cores, whose sums of 8-bit products are exact in int32, and so the
same as those of the bits that differ. On NVIDIA's processors from compute capability 8.0 on, tensor cores do 2048
such products a cycle and more, while the instruction that counts bits, 16 a cycle, stands for 512.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..bits import WORD
from ..library import Scaled
from ..native import BLOCK
from ..sizes import Sizes, must_be
from ..window import Window
from .places import jit, launch

_ROWS, _COLUMNS, _NARROW = 64, 64, 16
_MOST = (1 << 31) - 512  # the last program's rows go up to 512 past the end


def binary_conv2d(
    input: Tensor, weight: Tensor, tap_sums: Tensor, channels: tuple[int, int], window: Window, scaled: Scaled = None
) -> Tensor | None:
    """`qconv.kernels.operators.binary_conv2d`; None for images of too many pixels.

    Raises:
        ValueError: operands with other shapes, dtypes or devices than the window and the channels need.
    """
    if input.ndim != 4 or weight.ndim != 6:
        raise ValueError(
            f"input (of shape {tuple(input.shape)}) must be (N, C, H, W) or bits, and weight (of shape "
            f"{tuple(weight.shape)}) what pack_weight makes"
        )
    if input.is_floating_point():
        must_be("input", input, (len(input), channels[0], *input.shape[2:]), input.dtype, input.device)
        input = torch.ops.qconv.pack_signs(input, window.groups)
    batch, height, width, columns = input.shape
    sizes = Sizes(batch, channels, (height, width), (weight.shape[2], weight.shape[3]), window).checked()
    scale, bias = scaled or (None, None)
    for name, tensor, shape, dtype in (
        ("input", input, sizes.bits, torch.int64),
        ("weight", weight, sizes.packed, torch.int64),
        ("tap_sums", tap_sums, (window.groups, *sizes.kernel_size, sizes.packed[1] * BLOCK), torch.int32),
        ("scale", scale, channels[1:], torch.float32),
        ("bias", bias, channels[1:], torch.float32),
    ):
        if tensor is not None:
            must_be(name, tensor, shape, dtype, input.device)
    dtype = torch.int32 if scaled is None else torch.float32
    output = torch.empty(sizes.output, dtype=dtype, device=input.device, memory_format=torch.channels_last)
    rows, fan_out = output.numel() // channels[1], channels[1] // window.groups
    if max(rows, batch * height * width) >= _MOST:
        return None
    if rows:
        tile = min(_COLUMNS, max(_NARROW, triton.next_power_of_2(fan_out)))
        left, _, top, _ = window.padding
        launch(
            *(_convolve, triton.cdiv(rows, _ROWS) * window.groups * triton.cdiv(fan_out, tile)),
            *(input.contiguous().view(torch.int32), weight.contiguous().view(torch.int32)),
            *((output, output) if scaled is None else (scaled[0].contiguous(), scaled[1].contiguous())),
            *(output, rows, channels[0] // window.groups, fan_out, window.groups, columns // window.groups),
            *(sizes.packed[1], height, width, *sizes.output[2:], *sizes.kernel_size),
            *(*window.stride, *window.dilation, top, left, window.padding_value),
            SCALED=scaled is not None,
            ROWS=_ROWS,
            COLUMNS=tile,
            HALVES=2 if columns == window.groups else 4,
        )
    return output


def pack_weight(signs: Tensor, groups: int = 1) -> tuple[Tensor, Tensor] | None:
    """`qconv.kernels.operators.pack_weight`; None for float64, empty weights and unusual shapes."""
    if signs.dtype == torch.float64 or signs.ndim != 4 or not signs.numel() or groups < 1 or signs.shape[0] % groups:
        return None
    if signs.stride(2) != signs.shape[3] * signs.stride(3):
        signs = signs.contiguous()
    out_channels, in_channels, *kernel = signs.shape
    blocks, words, taps = -(-out_channels // groups // BLOCK), -(-in_channels // WORD), kernel[0] * kernel[1]
    packed = torch.empty((groups, blocks, *kernel, words, BLOCK), dtype=torch.int64, device=signs.device)
    sums = torch.empty((groups, *kernel, blocks * BLOCK), dtype=torch.int32, device=signs.device)
    launch(
        *(_pack_weight, groups * blocks * taps),
        *(signs, packed, sums, out_channels // groups, in_channels, blocks, taps, words),
        *(signs.stride(0), signs.stride(1), signs.stride(3)),
        BLOCK=BLOCK,
    )
    return packed, sums


@jit
def _convolve(
    input, weight, scale, bias, output,
    rows, fan_in, fan_out, groups, words, blocks, height, width, out_height, out_width, kernel_height, kernel_width,
    stride_y, stride_x, dilation_y, dilation_x, top, left, value,
    SCALED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, HALVES: tl.constexpr,  # noqa: N803
):  # fmt: skip
    tiles = tl.cdiv(fan_out, COLUMNS)
    program = tl.program_id(0)
    group = program // tiles % groups
    row = program // tiles // groups * ROWS + tl.arange(0, ROWS)
    column = program % tiles * COLUMNS + tl.arange(0, COLUMNS)
    taps = kernel_height * kernel_width
    picture = row // (out_height * out_width)
    first_y = row // out_width % out_height * stride_y - top
    first_x = row % out_width * stride_x - left
    bit = tl.arange(0, 32)[None, None, :]
    sums = tl.zeros((ROWS, COLUMNS), tl.int32)
    for tap in range(taps):
        y = first_y + tap // kernel_width * dilation_y
        x = first_x + tap % kernel_width * dilation_x
        inside = (row < rows) & (y >= 0) & (y < height) & (x >= 0) & (x < width)
        pixel = ((picture * height + y) * width + x).to(tl.int64) * groups + group
        block = ((group * blocks + column // 8) * taps + tap).to(tl.int64) * words
        for first in range(0, 2 * words, HALVES):
            half = first + tl.arange(0, HALVES)
            is_word = half < 2 * words
            of_input = tl.load(
                input + (pixel * (2 * words))[:, None] + half[None, :],
                mask=inside[:, None] & is_word[None, :],
                other=0,
            )
            of_weight = tl.load(
                weight
                + ((block[:, None] + (half // 2)[None, :]) * 8 + (column % 8)[:, None]) * 2
                + (half % 2)[None, :],
                mask=(column < fan_out)[:, None] & is_word[None, :],
                other=0,
            )
            a = 1 - 2 * ((of_input[:, :, None] >> bit) & 1)
            a = tl.where(inside[:, None, None], a, value)
            a = tl.where(half[None, :, None] * 32 + bit < fan_in, a, 0)
            b = 1 - 2 * ((of_weight[:, :, None] >> bit) & 1)
            a = tl.reshape(a.to(tl.int8), (ROWS, HALVES * 32))
            b = tl.reshape(b.to(tl.int8), (COLUMNS, HALVES * 32))
            sums = tl.dot(a, tl.trans(b), sums, out_dtype=tl.int32)
    channel = group * fan_out + column
    to = row.to(tl.int64)[:, None] * (groups * fan_out) + channel[None, :]
    mask = (row < rows)[:, None] & (column < fan_out)[None, :]
    if SCALED:
        factor = tl.load(scale + channel, mask=column < fan_out, other=0)
        summand = tl.load(bias + channel, mask=column < fan_out, other=0)
        tl.store(output + to, sums.to(tl.float32) * factor[None, :] + summand[None, :], mask=mask)
    else:
        tl.store(output + to, sums, mask=mask)


@jit
def _pack_weight(
    signs, packed, sums, fan_out, fan_in, blocks, taps, words, of_filter, of_channel, of_tap,
    BLOCK: tl.constexpr,  # noqa: N803
):  # fmt: skip
    program = tl.program_id(0)
    tap = program % taps
    block = program // taps % blocks
    group = program // taps // blocks
    lane = tl.arange(0, BLOCK)
    filter = block * BLOCK + lane
    at = signs + ((group * fan_out + filter).to(tl.int64) * of_filter + tap * of_tap)
    count = tl.zeros((BLOCK,), tl.int32)
    place = tl.arange(0, 64)
    for word in range(words):
        channel = word * 64 + place
        mask = (filter < fan_out)[:, None] & (channel < fan_in)[None, :]
        value = tl.load(at[:, None] + channel.to(tl.int64)[None, :] * of_channel, mask=mask, other=0)
        value = value.to(tl.float32) if value.dtype.is_floating() else value
        negative = (value < 0) & mask
        count += tl.sum(negative.to(tl.int32), axis=1)
        bits = tl.sum(negative.to(tl.int64) << place.to(tl.int64)[None, :], axis=1)
        tl.store(packed + (program.to(tl.int64) * words + word) * BLOCK + lane, bits)
    to = ((group * taps + tap) * blocks + block) * BLOCK + lane
    tl.store(sums + to, tl.where(filter < fan_out, fan_in - 2 * count, 0))
