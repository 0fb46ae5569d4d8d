"""Convolution of 8-bit codes by oneDNN, through torch's operator for quantized models."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ..integer import has_fast_integers

_MOST = 4  # of one weight: sizes of pictures that come in turn
_packed: Any = WeakTensorKeyDictionary()  # weights as oneDNN wants them, while the weight lives


def takes(input: Tensor, weight: Tensor) -> bool:
    """Whether this machine multiplies and adds such codes exactly: without VNNI, sums of two products saturate."""
    return has_fast_integers() and input.dtype in (torch.uint8, torch.int8) and 0 not in (*input.shape, len(weight))


def convolve(
    input: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    padding_value: int,
    scale: Tensor,
    bias: Tensor,
    low: int | None,
    high: int | None,
) -> Tensor:
    """`qconv.inference.operators.integer_conv2d` with a scale: 32-bit sums, then float32."""
    left, right, top, bottom = padding
    sides = [top, left]
    if padding_value or (left, top) != (right, bottom):
        input, sides = F.pad(input, tuple(padding), value=padding_value), [0, 0]
    zero = 0
    if input.dtype == torch.int8:  # the operator takes unsigned inputs
        zero = 128
        input = (input.view(torch.uint8) ^ 128).contiguous(memory_format=torch.channels_last)
    packed = _prepacked(weight, scale, zero, tuple(stride), tuple(sides), tuple(dilation), groups, list(input.shape))
    is_codes = low is not None and high is not None
    shift = 0 if low is None or low >= 0 else 128  # so are its outputs
    output = torch.ops.onednn.qconv_pointwise(
        *(input.contiguous(memory_format=torch.channels_last), 1.0, zero),
        *(packed, scale, torch.zeros(len(weight), dtype=torch.long), bias),
        *(list(stride), sides, list(dilation), groups, 1.0, shift),
        *(torch.uint8 if is_codes else torch.float32, "hardtanh" if is_codes else "none"),
        *([float(low), float(high)] if low is not None and high is not None else [], ""),
    )
    if shift:
        output = (output ^ 128).view(torch.int8)
    return output


def _prepacked(weight: Tensor, scale: Tensor, zero: int, *geometry: Any) -> Tensor:
    """The weight in oneDNN's layout, made once for each way in which it is used."""
    version = 0 if weight.is_inference() else weight._version
    key = zero, *geometry[:-1], tuple(geometry[-1]), version
    known = _packed.setdefault(weight, {})
    if key not in known:
        if len(known) >= _MOST:
            known.clear()
        stride, padding, dilation, groups, shape = geometry
        known[key] = torch.ops.onednn.qconv_prepack(
            weight, scale, 1.0, zero, list(stride), list(padding), list(dilation), groups, shape
        )
    return known[key]
