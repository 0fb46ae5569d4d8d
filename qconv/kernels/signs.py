"""Convolution of signs in 8-bit integers, by oneDNN.

A sum of fewer than 2^24 values ±1 is exact in float32 too, and bfloat16 convolutions sum in float32. So the integer and
the float convolution are equal, bit for bit, and a training step may run whichever is faster. A scale is multiplied
with the exact sum, and rounded once.
"""

from collections.abc import Sequence
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

_Ints = tuple[int, ...]


@cache
def has_fast_integers() -> bool:
    """Whether this machine multiplies 8-bit integers faster than floats, and torch has the operator for it."""
    return torch.cpu.get_capabilities().get("avx512_vnni", False) and hasattr(torch.ops.onednn, "qconv_pointwise")


def signs_pay(input: Tensor, weight: Tensor, stride: _Ints) -> bool:
    """Whether the integer convolution of these float operands is the faster one.

    Three costs grow with other things than the multiplications: packing the weight, converting input and output, and
    calling operators. The bounds on what makes up for them were measured with AVX-512 VNNI on 2 cores: above them the
    integer convolution took 0.3 to 0.97 of the float one's time, from layouts to kernel sizes.
    """
    per_output = weight.shape[1:].numel()
    positions = input.shape[0] * input.shape[2:].numel() // torch.Size(stride).numel()
    return per_output >= 256 and positions >= 1024 and positions * weight.numel() >= 10**8 and per_output < 2**16


def conv2d_signs(
    input: Tensor,
    weight: Tensor,
    stride: _Ints,
    padding: _Ints,
    dilation: _Ints,
    groups: int,
    border: _Ints = (),
    border_value: int = 0,
    dtype: torch.dtype = torch.float32,
    scale: Tensor | None = None,
) -> Tensor:
    """`torch.nn.functional.conv2d` of an input that is +1 or -1 everywhere, without a bias, times ``scale``.

    Args:
        input: int8 ``(N, C_in, H, W)``.
        weight: int8 ``(C_out, C_in / groups, *kernel_size)``: signs, or other whole numbers.
        stride: of the convolution.
        padding: zeros on both sides.
        dilation: of the kernel.
        groups: of the channels.
        border: padding before the convolution in the order of `torch.nn.functional.pad`, filled with ``border_value``.
        border_value: -1, 0 or +1.
        dtype: of the output, float32 or bfloat16.
        scale: of each output channel, float32 ``(C_out,)``; None is 1.

    Returns:
        ``(N, C_out, *out)``; channels_last if an operand is.
    """
    zero = 1  # the operator takes unsigned inputs: -1, 0, +1 become 0, 1, 2
    codes = (input + zero).view(torch.uint8)
    if border:
        codes = F.pad(codes, border, value=border_value + zero)
    if may_lie_in_padding(weight.shape[2:], padding, dilation):
        codes, padding = F.pad(codes, (padding[1], padding[1], padding[0], padding[0]), value=zero), (0, 0)
    scale = torch.ones(weight.shape[0]) if scale is None else scale
    zeros = torch.zeros(weight.shape[0], dtype=torch.long)
    packed = torch.ops.onednn.qconv_prepack(
        weight, scale, 1.0, zero, stride, padding, dilation, groups, list(codes.shape)
    )
    output = torch.ops.onednn.qconv_pointwise(
        *(codes.contiguous(memory_format=torch.channels_last), 1.0, zero),
        *(packed, scale, zeros, None, stride, padding, dilation, groups),
        *(1.0, 0, dtype, "none", [], ""),
    )
    return output if _is_channels_last(input) or _is_channels_last(weight) else output.contiguous()


def may_lie_in_padding(kernel_size: Sequence[int], padding: Sequence[int], dilation: Sequence[int]) -> bool:
    """Whether all taps of a kernel can lie in the padding: oneDNN's sums are wrong there where its zero point is not 0.

    Not so for all geometries for which this is True: what counts is that the input is then padded before.
    """
    extents = [(size - 1) * step + 1 for size, step in zip(kernel_size, dilation, strict=True)]
    is_beside = any(side >= extent for side, extent in zip(padding, extents, strict=True))
    return any(padding) and (is_beside or max(dilation) > 1)


def _is_channels_last(x: Tensor) -> bool:
    return x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
