"""Convolutions of 8-bit integers by oneDNN, through torch's operators for quantized models.

Training convolves codes: sums below 2^24 are exact in float32, and bfloat16 convolutions sum in float32. So the integer
and the float convolution are equal, bit for bit, and a training step may run whichever is faster. A scale is multiplied
with the exact sum, and rounded once.
"""

import math
import os
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from . import bits as _registered  # noqa: F401
from .window import Window

_WITHOUT_VNNI = ("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE")
"""The values of ONEDNN_MAX_CPU_ISA, or by its old name DNNL_MAX_CPU_ISA, that keep oneDNN from using AVX-512 VNNI."""


def overruns(channels: int, kernel: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether torch's gradient for such a weight and a channels_last input writes beyond its memory on some CPUs.

    Seen in torch 2.15 (oneDNN 3.13) without AVX-512, with `torch.nn.Conv2d` alone: kernels of 1×1 with fewer than 8
    channels in a group and a horizontal stride above 1. What chooses the memory format here leaves these contiguous.
    """
    return channels < 8 and tuple(kernel) == (1, 1) and stride[-1] > 1


@cache
def has_fast_integers() -> bool:
    """Whether oneDNN is faster with 8-bit integers than with floats here, and torch has the operator for it."""
    if any(os.environ.get(f"{name}_MAX_CPU_ISA", "").upper() in _WITHOUT_VNNI for name in ("ONEDNN", "DNNL")):
        return False
    return torch.cpu.get_capabilities().get("avx512_vnni", False) and hasattr(torch.ops.onednn, "qconv_pointwise")


def conv2d_codes(
    codes: Tensor,
    zero: int,
    weight: Tensor,
    window: Window,
    scale: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """The convolution of ``codes − zero``, times ``scale``.

    Args:
        codes: uint8 ``(N, C_in, H, W)``.
        zero: the code of 0.
        weight: int8 ``(C_out, C_in / groups, *kernel_size)``.
        window: of the kernel; `is_wrong` says whether oneDNN errs with it.
        scale: of each output channel, float32 ``(C_out,)``; None is 1.
        dtype: of the output, float32 (None) or bfloat16.

    Returns:
        ``(N, C_out, *out)``, channels_last.
    """
    codes, sides = window.pad_but_zeros(codes, zero, _can_pad(window, weight.shape[2:], zero))
    scale = _ones(len(weight)) if scale is None else scale
    packed = _prepack(weight, zero, window, sides, codes.shape)
    return _pointwise(codes, zero, packed, window, sides, scale, None, dtype)


def is_large(input: Tensor, weight: Tensor, stride: Sequence[int]) -> bool:
    """Whether the integer convolution of these float operands is faster, if the machine `has_fast_integers`.

    Three costs grow with other things than the multiplications: packing the weight, converting input and output, and
    calling operators. The bounds on what makes up for them were measured with AVX-512 VNNI on 2 cores: above them the
    integer convolution of signs took 0.3 to 0.97 of the float one's time, from layouts to kernel sizes.
    """
    per_output = weight.shape[1:].numel()
    positions = input.shape[0] * input.shape[2:].numel() // math.prod(stride)
    return 256 <= per_output < 2**16 and positions >= 1024 and positions * weight.numel() >= 10**8


def is_wrong(input: Sequence[int], weight: Sequence[int], window: Window, zero: int) -> bool:
    """Whether oneDNN gives wrong sums, ``zero`` the code of 0, as found with random layers (oneDNN 3.13, AVX-512 VNNI).

    So it is for outputs of one column with a stride along the rows; and for a zero point other than 0 with groups of
    several channels, of input or output, where it reads what lies beyond its memory.
    """
    is_column = window.stride[1] > 1 and window.output_size(input[2:], weight[2:])[1] == 1
    is_depthwise = weight[1] == 1 and weight[0] == window.groups
    return is_column or (zero != 0 and window.groups > 1 and not is_depthwise)


def _can_pad(window: Window, kernel_size: Sequence[int], zero: int) -> bool:
    """Whether oneDNN pads correctly: with a nonzero zero point, some sums in the padding are wrong.

    Of 7,284 random layers with kernels wider than 1, 9 were; of 4,742 that are padded before, none.
    """
    return zero == 0 and not window.may_lie_in_padding(kernel_size)


def _ones(count: int) -> Tensor:
    """Return scales of 1 on the CPU in float32, whatever torch's defaults are."""
    return torch.ones(count, dtype=torch.float32, device="cpu")


def _prepack(weight: Tensor, zero: int, window: Window, sides: tuple[int, int], shape: Sequence[int]) -> Tensor:
    """The weight in oneDNN's layout, not with the scale of a call: one of 0 would spoil the layout for other calls."""
    geometry = window.stride, sides, window.dilation, window.groups, shape
    return torch.ops.onednn.qconv_prepack(weight, _ones(1), 1.0, zero, *geometry)


def _pointwise(
    codes: Tensor,
    zero: int,
    packed: Tensor,
    window: Window,
    sides: tuple[int, int],
    scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """``acc · scale_c + bias_c`` in float32 or `dtype`."""
    return torch.ops.onednn.qconv_pointwise(
        *(_channels_last(codes), 1.0, zero),
        *(packed, scale, torch.zeros(len(scale), dtype=torch.long, device="cpu"), bias),
        *(window.stride, sides, window.dilation, window.groups, 1.0, 0),
        *(dtype or torch.float32, "none", [], ""),
    )


def _channels_last(codes: Tensor) -> Tensor:
    if codes.is_contiguous(memory_format=torch.channels_last):
        return codes
    # Codes of 8 bits are packed as channels_last: a copy, but several times as fast as torch's.
    return torch.ops.qconv.pack_codes(codes.contiguous(), 8).movedim(-1, 1)
