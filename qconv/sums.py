"""The forward of layers whose operands are whole numbers times a scale: exact sums, which are then scaled.

``output = op(values_x, values_w) · s + bias``, where ``s``, the product of both scales, is rounded once to the dtype of
the sums; product and sum are then rounded in turn. Scaling before adding would leave a residue where a sum is 0, and
the next layer would take the sign of that residue. Frozen layers compute the same numbers (`qconv.inference`), so the
trained and the shipped network agree by construction.

float32 holds every sum below 2^24 exactly. For binary, ternary and nearly all layers of up to 4 bits, the number of
products times the largest codes stays below that. Larger sums are rounded like those of any convolution. So are those
of a GPU whose library chooses a convolution by transforms (Winograd, FFT).
"""

from typing import Any

import torch
from torch import Tensor

from .kernels.onednn import has_fast_integers, signs_pay
from .operations import Convolution, Linear, TransposedConvolution
from .quantizers import Quantizer, Whole
from .quantizers.base import is_plain_cpu, whole_of

_HALF = torch.float16, torch.bfloat16
_BILINEAR = Convolution, TransposedConvolution, Linear  # other operations have offsets, which must not be scaled
Quantized = tuple[Quantizer, Any]
"""A quantizer and its tensors."""


def scaled_sums(
    input: Tensor, weight: Tensor, bias: Tensor | None, op: Any, of_input: Quantized, of_weight: Quantized
) -> Tensor | None:
    """Return the layer's output from sums of whole numbers; None if it can't be computed that way.

    It can't if a quantizer keeps real numbers, has an offset or two scales; if input channels or parts of a filter have
    their own scales; if the operation is none of `qconv.operations`; or in half precision, where a sum would be rounded
    before it is scaled, so scales stay with the operands. Signs whose sums are computed in 8-bit integers have exact
    sums in bfloat16, too, and give the result of its convolution.
    """
    if not isinstance(op, _BILINEAR):
        return None
    in_integers = _in_integers(input, weight, op, of_input[0], of_weight[0])
    if input.dtype in _HALF and not (in_integers and bias is None and input.dtype == torch.bfloat16):
        return None
    whole = _whole(input, weight, op, of_input, of_weight)
    if whole is None:
        return None
    return of_whole(*whole, bias, op, input.dtype, in_integers)


def of_whole(
    whole_x: Whole, whole_w: Whole, bias: Tensor | None, op: Any, dtype: torch.dtype, in_integers: bool
) -> Tensor:
    """Return the output from the whole numbers and scales of both operands, ``in_integers`` or in floats."""
    (values_x, scale_x), (values_w, scale_w) = whole_x, whole_w
    scale = output_scale(scale_x, scale_w, dtype)
    if in_integers and isinstance(op, Convolution):
        scale = None if scale is None else scale.flatten().float().expand(len(values_w)).contiguous()
        output = op.forward_signs(values_x.to(torch.int8), values_w.to(torch.int8), scale, dtype)
    else:
        output = op.forward(values_x.to(dtype), values_w.to(dtype), None)
        if scale is not None:
            output.mul_(scale)
    return output if bias is None else output.add_(bias.view(-1, *[1] * (values_w.ndim - 2)))


def output_scale(of_input: Tensor | None, of_weight: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """The product of the input's scale and the weight's scale or scales per filter, rounded to ``dtype`` once.

    It broadcasts against the output: its channels are followed by as many dimensions as a weight has after the second.
    """
    if of_weight is not None:
        of_weight = of_weight.reshape(()) if of_weight.numel() == 1 else of_weight.squeeze(1)
    if of_input is None or of_weight is None:
        scale = of_weight if of_input is None else of_input.reshape(())
    else:
        wide = torch.promote_types(torch.promote_types(of_input.dtype, of_weight.dtype), dtype)
        scale = of_input.reshape(()).to(wide) * of_weight.to(wide)
    return None if scale is None else scale.to(dtype)


def _whole(
    input: Tensor, weight: Tensor, op: Any, of_input: Quantized, of_weight: Quantized
) -> tuple[Whole, Whole] | None:
    """Return both operands' whole numbers, if the scales can be moved out of the sums."""
    whole_x = whole_of(of_input[0], input, of_input[1])
    if whole_x is None:
        return None
    is_padded = isinstance(op, Convolution) and op.border and op.border_value  # with ±1, not with ±scale
    if whole_x.scale is not None and (whole_x.scale.numel() != 1 or is_padded):
        return None
    whole_w = whole_of(of_weight[0], weight, of_weight[1])
    if whole_w is None:
        return None
    scale, by_filter = whole_w.scale, (len(weight), *[1] * (weight.ndim - 1))
    return (whole_x, whole_w) if scale is None or scale.numel() == 1 or scale.shape == by_filter else None


def _in_integers(input: Tensor, weight: Tensor, op: Any, of_input: Quantizer, of_weight: Quantizer) -> bool:
    """Whether sums of signs are computed in 8-bit integers."""
    return (
        isinstance(op, Convolution)
        and (of_input.signs and of_weight.code_dtype == torch.int8)
        and (input.ndim == 4 and input.dtype in (torch.float32, torch.bfloat16))
        and (is_plain_cpu(input) and is_plain_cpu(weight))
        and not torch.compiler.is_compiling()
        and has_fast_integers()
        and signs_pay(input, weight, op.stride)
    )
