"""Convolution of numbers with a weight of signs, as a `torch.library` operator.

The weight is bits, as `pack_weight` makes them, 1 for −1. The definition is torch's convolution with the unpacked signs
times the scale. On the CPU a C kernel looks sums of several numbers up in tables of float32, and scales the sums; its
result does not depend on the number of threads. The operator has no gradient.

>>> weight, _ = pack_weight(torch.tensor([[1, -1], [-1, -1]]).view(2, 2, 1, 1))
>>> input = torch.tensor([3.0, 5.0]).view(1, 2, 1, 1)
>>> torch.ops.qconv.sign_conv2d(input, weight, None, None, 2, (1, 1), (0, 0, 0, 0), (1, 1)).flatten()
tensor([-2., -8.])
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .library import LIBRARY, register
from .look_up import look_up_conv2d
from .operators import pack_weight as pack_weight, unpack_weight
from .sizes import Sizes, must_be
from .window import Window

LIBRARY.define(
    "sign_conv2d(Tensor input, Tensor weight, Tensor? scale, Tensor? bias, int out_channels, int[2] stride, "
    "int[4] padding, int[2] dilation, int padding_value=0) -> Tensor"
)


def _operands(
    input: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    out_channels: int,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    padding_value: int = 0,
) -> tuple[Tensor, Sizes, Tensor, Tensor | None, Tensor | None]:
    if not input.is_floating_point():
        raise TypeError(f"input (of dtype {input.dtype}) must be floating point")
    if input.ndim != 4 or weight.ndim != 6:
        raise ValueError(
            f"input (of shape {tuple(input.shape)}) must be (N, C, H, W), and weight (of shape {tuple(weight.shape)}) "
            "what pack_weight makes"
        )
    window = Window.of(stride, padding, dilation, weight.shape[0], padding_value)
    size, kernel_size = (input.shape[2], input.shape[3]), (weight.shape[2], weight.shape[3])
    sizes = Sizes(input.shape[0], (input.shape[1], out_channels), size, kernel_size, window).checked()
    must_be("weight", weight, sizes.packed, torch.int64, input.device)
    for name, each in (("scale", scale), ("bias", bias)):
        if each is not None:
            must_be(name, each, (out_channels,), torch.float32, input.device)
    return input, sizes, weight, scale, bias


def sign_conv2d(
    input: Tensor, sizes: Sizes, weight: Tensor, scale: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """Return ``scale_o · Σ sign · input + bias_o``, ``(N, C_out, *out)``, channels_last.

    The kernel scales the sum of what this adds up scaled. The two differ by rounding errors alone, but where a scale is
    inf, or where sums exceed float32 and scaled ones do not.

    Args:
        input: ``(N, C_in, H, W)``, of any floating-point dtype; the result has the same.
        sizes: of the convolution; the padding of the input counts as `padding_value`.
        weight: the signs, as `pack_weight` makes them.
        scale: ``(C_out,)`` float32; None is 1.
        bias: ``(C_out,)`` float32; None is 0.
    """
    window = sizes.window
    filters = unpack_weight(weight, *sizes.channels).to(input.dtype)
    if scale is not None:
        filters = filters * scale.to(input.dtype).view(-1, 1, 1, 1)
    padded, padding = window.pad_but_zeros(input)
    geometry = window.stride, padding, window.dilation, False, (0, 0), window.groups
    output = torch.convolution(padded, filters, None if bias is None else bias.to(input.dtype), *geometry)
    return output.contiguous(memory_format=torch.channels_last)


def _shape(input: Tensor, sizes: Sizes, *_: Any) -> Tensor:
    return torch.empty(sizes.output, dtype=input.dtype, device=input.device, memory_format=torch.channels_last)


register(sign_conv2d, look_up_conv2d, operands=_operands, shape=_shape)
