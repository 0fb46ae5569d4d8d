"""The forward of layers with operands that are whole numbers times a scale: exact sums, then scaled.

``output = op(values_x, values_w) · s + bias``, where ``s``, the product of both scales, is rounded once to the dtype of
the sums; product and sum are then rounded in turn. Scaling before adding would leave a residue where a sum is 0, and
the next layer would take the sign of that residue. Frozen layers compute the same numbers (`qconv.inference`), so the
trained and the shipped network agree by construction.

float32 holds every sum below 2^24 exactly. For binary, ternary and nearly all layers of up to 4 bits, the number of
products times the largest codes stays below that, and 8-bit integers give the same numbers in a fraction of the time.
Larger sums are rounded like those of any convolution. So are those of a GPU whose library chooses a convolution by
transforms (Winograd, FFT).
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from ..kernels.onednn import conv2d_codes, has_fast_integers, is_large, is_wrong
from ..kernels.window import Window
from ..quantizers import Quantizer, Whole
from ..quantizers.base import is_plain_cpu, whole_of
from .held import form_of_weight
from .operations import Convolution, Linear, TransposedConvolution

HALF = torch.float16, torch.bfloat16
_BILINEAR = Convolution, TransposedConvolution, Linear  # other operations have offsets, which must not be scaled
_EXACT = 2**24  # float32 holds all smaller whole numbers
Quantized = tuple[Quantizer, Any]
"""A quantizer and its tensors."""


def scaled_sums(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    op: Any,
    of_input: Quantized,
    of_weight: Quantized,
    rounds: bool = True,
) -> Tensor | None:
    """Return the layer's output from sums of whole numbers; None if it can't be computed that way.

    It can't if a quantizer keeps real numbers, has an offset or two scales; if input channels or parts of a filter have
    their own scales; if the operation is none of `operations`; or in half precision, where a sum would be rounded
    before it is scaled, so scales stay with the operands. Signs whose sums are computed in 8-bit integers have exact
    sums in bfloat16, too, and give the result of its convolution.

    Sums that float32 may not hold are rounded as a float convolution rounds them, unless ``rounds`` is False: then they
    are exact where that is faster.
    """
    if not isinstance(op, _BILINEAR) or (input.dtype in HALF and not input.is_cpu):
        return None
    in_integers = runs_in_integers(input, weight, op, of_input[0], of_weight[0], rounds)
    if input.dtype in HALF and not (in_integers and bias is None and input.dtype == torch.bfloat16):
        return None
    if in_integers and (output := _of_integers(input, weight, cast(Convolution, op), of_input, of_weight)) is not None:
        return output if bias is None else plus(output, bias, weight)
    whole = _whole(input, weight, op, of_input, of_weight)
    if whole is None or input.dtype in HALF:
        return None
    (values_x, scale_x), (values_w, scale_w) = whole
    scale = output_scale(scale_x, scale_w, input.dtype)
    output = op.forward(values_x.to(input.dtype), values_w.to(input.dtype), None)
    if scale is not None:  # in place where `plus` is
        output.mul_(scale)
    return output if bias is None else plus(output, bias, weight)


def plus(output: Tensor, bias: Tensor, weight: Tensor) -> Tensor:
    """Add the bias to the output of a convolution, in place."""
    shift = bias.view(-1, *[1] * (weight.ndim - 2))
    return output.add_(shift)


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


def whole_input(input: Tensor, op: Any, of_input: Quantized) -> Whole | None:
    """Return the input's whole numbers and their scale, if the scale can be moved out of the sums."""
    whole = whole_of(of_input[0], input, of_input[1])
    return None if whole is None or not _moves_out(whole.scale, op) else whole


def _whole(
    input: Tensor, weight: Tensor, op: Any, of_input: Quantized, of_weight: Quantized
) -> tuple[Whole, Whole] | None:
    """Return both operands' whole numbers, if the scales can be moved out of the sums."""
    whole_x = whole_input(input, op, of_input)
    if whole_x is None:
        return None
    whole_w = whole_of(of_weight[0], weight, of_weight[1])
    return (whole_x, whole_w) if whole_w is not None and _is_of_filters(whole_w) else None


def scales_follow(of_input: Tensor | None, weight: Whole, op: Any) -> bool:
    """Whether the scales of an input and of a weight can be moved out of the sums."""
    return _moves_out(of_input, op) and _is_of_filters(weight)


def _moves_out(scale: Tensor | None, op: Any) -> bool:
    """Whether an input's scale can be moved out of the sums: it is one number, and applies to the border too."""
    is_padded = isinstance(op, Convolution) and op.border and op.border_value  # with ±1, not with ±scale
    return scale is None or (scale.numel() == 1 and not is_padded)


def _is_of_filters(weight: Whole) -> bool:
    """Whether the scale of a weight is one number, or one for each filter."""
    values, scale = weight
    return scale is None or scale.numel() == 1 or scale.shape == (len(values), *[1] * (values.ndim - 1))


def runs_in_integers(
    input: Tensor, weight: Tensor, op: Any, of_input: Quantizer, of_weight: Quantizer, rounds: bool = True
) -> bool:
    """Whether sums run in 8-bit integers unless an operand has NaN: faster, and equal if it ``rounds``."""
    if torch.compiler.is_compiling() or not isinstance(op, Convolution) or input.ndim != 4:
        return False
    if not (is_plain_cpu(input) and is_plain_cpu(weight) and is_large(input, weight, op.stride)):
        return False
    ends = of_input.whole_ends, of_weight.whole_ends
    ends_x, ends_w = (ends[0], ends[1] or (_BYTE if of_weight.at_work.code_dtype == torch.int8 else None))
    if ends_x is None or ends_w is None:
        return False
    is_byte = ends_x[0] <= 0 and ends_x[1] - ends_x[0] <= 255 and _BYTE[0] <= ends_w[0] <= ends_w[1] <= _BYTE[1]
    largest = max(map(abs, ends_x)) * max(map(abs, ends_w)) * weight.shape[1:].numel()
    dtypes = (torch.float32, torch.bfloat16) if of_input.signs else (torch.float32,)
    return (
        (is_byte and (largest < _EXACT or not rounds))
        and (input.dtype in dtypes and has_fast_integers())
        and not is_wrong(input.shape, weight.shape, cast(Window, op.window), -ends_x[0])
    )


_BYTE = -128, 127


def _of_integers(
    input: Tensor, weight: Tensor, op: Convolution, of_input: Quantized, of_weight: Quantized
) -> Tensor | None:
    """Return the output without bias; None if an operand has a NaN, or the scales can't be moved out of the sums."""
    (quantizer_x, tensors_x), (quantizer_w, tensors_w) = of_input, of_weight
    zero = -cast(tuple[int, int], quantizer_x.whole_ends)[0]
    whole_x = quantizer_x.whole_bytes(input, *tensors_x, offset=zero)
    if whole_x is None or not _moves_out(whole_x.scale, op):
        return None
    whole_w = _signed(weight, quantizer_w, tensors_w)
    if whole_w is None or not _is_of_filters(whole_w):
        return None
    scale = output_scale(whole_x.scale, whole_w.scale, input.dtype)
    scale = None if scale is None else scale.flatten().float().expand(len(weight)).contiguous()
    output = conv2d_codes(whole_x.values, zero, whole_w.values, cast(Window, op.window), scale, input.dtype)
    return output if _is_channels_last(whole_x.values) or _is_channels_last(weight) else output.contiguous()


def _signed(weight: Tensor, quantizer: Quantizer, tensors: Sequence[Tensor]) -> Whole | None:
    """Return the whole numbers of a weight as int8, and their scale; None if one is NaN."""

    def make() -> Whole | None:
        whole = quantizer.whole_bytes(weight, *tensors, offset=0)
        return None if whole is None else Whole(whole.values.view(torch.int8), whole.scale)

    return form_of_weight(make, weight, quantizer, torch.int8)


def quantized_weight(weight: Tensor, quantizer: Quantizer, tensors: Sequence[Tensor], in_integers: bool) -> Tensor:
    """Return the quantized weight in its dtype; from cached int8 codes if the sums run ``in_integers``."""
    whole = _signed(weight, quantizer, tensors) if in_integers else None
    if whole is None:
        return quantizer.quantize(weight, *tensors)
    values, scale = whole
    return (values if scale is None else values * scale).to(weight.dtype)


def _is_channels_last(x: Tensor) -> bool:
    return x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
