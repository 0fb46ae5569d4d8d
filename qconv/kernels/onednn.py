"""Convolution of 8-bit codes by oneDNN, through torch's operator for quantized models."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from .exact_sums import are_floats_exact
from .signs import has_fast_integers, may_lie_in_padding

_MOST = 4  # of one weight: sizes of pictures that come in turn
_packed: Any = WeakTensorKeyDictionary()  # weights as oneDNN wants them, while the weight lives


def integer_conv2d(
    input: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    padding_value: int,
    scale: Tensor | None = None,
    bias: Tensor | None = None,
    low: int | None = None,
    high: int | None = None,
    zero: int = 0,
) -> Tensor | None:
    """`qconv.kernels.operators.integer_conv2d` with 32-bit sums, then float32; None where it would not be exact.

    That is without VNNI, where sums of two products saturate; for a weight of more than 8 bits; for sums that are asked
    for and need not be exact in float32, in which the operator gives them; and where oneDNN is wrong, as random layers
    have shown: outputs of one column with a stride along the rows.
    """
    if not has_fast_integers() or input.dtype not in (torch.uint8, torch.int8) or 0 in (*input.shape, len(weight)):
        return None
    left, right, top, bottom = padding
    columns = (input.shape[3] + left + right - (weight.shape[3] - 1) * dilation[1] - 1) // stride[1] + 1
    if weight.dtype != torch.int8 or (columns == 1 and stride[1] > 1):
        return None
    is_sums = scale is None or bias is None
    if is_sums and not are_floats_exact(input, weight, zero):
        return None
    if scale is None or bias is None:
        scale, bias = torch.ones(len(weight)), torch.zeros(len(weight))
    sides = [top, left]
    is_beside = may_lie_in_padding(weight.shape[2:], sides, dilation)
    if padding_value or is_beside or (left, top) != (right, bottom):
        input, sides = F.pad(input, tuple(padding), value=padding_value + zero), [0, 0]
    if input.dtype == torch.int8:  # the operator takes unsigned inputs
        zero += 128
        input = input.view(torch.uint8) ^ 128
    packed = _prepacked(weight, zero, tuple(stride), tuple(sides), tuple(dilation), groups, tuple(input.shape))
    is_codes = low is not None and high is not None
    shift = 128 if low is not None and low < 0 else 0  # so are its outputs
    output = torch.ops.onednn.qconv_pointwise(
        *(input.contiguous(memory_format=torch.channels_last), 1.0, zero),
        *(packed, scale, torch.zeros(len(weight), dtype=torch.long), bias),
        *(list(stride), sides, list(dilation), groups, 1.0, shift),
        *(torch.uint8 if is_codes else torch.float32, "hardtanh" if is_codes else "none"),
        *([float(low), float(high)] if low is not None and high is not None else [], ""),
    )
    if is_sums:
        return output.to(torch.int32)
    return (output ^ 128).view(torch.int8) if shift else output


def _prepacked(
    weight: Tensor,
    zero: int,
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    groups: int,
    shape: tuple[int, ...],
) -> Tensor:
    """The weight in oneDNN's layout, made once for each way in which it is used.

    Tensors of inference mode don't tell that they have changed: theirs is made for each call.
    """
    is_kept = not weight.is_inference()
    key = zero, stride, padding, dilation, groups, shape, weight._version if is_kept else 0
    known: dict[Any, Tensor] = _packed.get(weight, {}) if is_kept else {}
    if key in known:
        return known[key]
    geometry = list(stride), list(padding), list(dilation), groups, list(shape)
    # Not with the scale of a call: one of 0 would spoil the layout for other calls.
    packed = torch.ops.onednn.qconv_prepack(weight, torch.ones(len(weight)), 1.0, zero, *geometry)
    if is_kept:
        # A new dictionary: other threads may be reading the one that is there. What two add at once is made again.
        _packed[weight] = {**(known if len(known) < _MOST else {}), key: packed}
    return packed
