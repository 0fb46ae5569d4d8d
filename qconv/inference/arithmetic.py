"""The integer arithmetic of a quantized layer, or the reason why there is none."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.operators import code_dtype
from ..kernels.window import Window
from ..layers import QConv2d, QLinear, QuantizedLayer, SamePadded
from ..quantizers import Identity
from ..quantizers.levels import Levels
from .layers import BinaryConv2d, Encode, IntegerConv2d, IntegerLayer, ShiftConv2d

LARGEST_SUM = 2**31 - 1
LARGEST_WEIGHT = 255
LARGEST_DIGITS = 255 * 64  # the product of the 8-bit parts of a fixed-point input and of a shift
LARGEST_EXACT = 2**53  # sums of shifted numbers, added in float64


class Arithmetic(NamedTuple):
    """The arithmetic of a quantized layer.

    Attributes:
        kind: "binary", "integer", "shift" or "float".
        reason: why it is float.
        weight: the codes, output channels first.
        scale: the value of 1 in a sum of products of codes, float64 for each output channel.
        levels: those of the input.
        zero: added to codes to make them 8-bit numbers.
        bound: the bound of the magnitude of sums.
    """

    kind: str
    reason: str = ""
    weight: Tensor = torch.zeros(0, device="cpu")
    scale: Tensor = torch.zeros(0, device="cpu")
    levels: Levels = Levels(0, 0, torch.ones((), device="cpu"))
    zero: int = 0
    bound: int = 0


def arithmetic(layer: QuantizedLayer) -> Arithmetic:
    """Choose the arithmetic of a layer, or tell why it can't be computed on integers."""
    if isinstance(layer.input_quantizer, Identity):
        return Arithmetic("float", "its input is not quantized")
    if not isinstance(layer, QConv2d | QLinear):
        return Arithmetic("float", f"{type(layer).__name__} has no integer operator")
    if isinstance(layer, SamePadded) and layer.same_pad:
        return Arithmetic("float", "its padding depends on the size of its input")
    quantizer = layer.input_quantizer
    levels = quantizer.levels(*quantizer.tensors())
    if levels is None:
        return Arithmetic("float", f"the levels of its input are not fixed: {type(quantizer).__name__} states none")
    if not quantizer.is_elementwise and isinstance(layer, QLinear):  # which is frozen as a layer of its rows
        return Arithmetic("float", f"{type(quantizer).__name__} quantizes a sample as a whole")
    try:
        weight = layer.weight_codes()
    except TypeError as error:
        return Arithmetic("float", str(error))
    is_plain = weight.offset is None and weight.negative_scale is None and weight.zero == 0
    for what, fits in (("input", levels.offset is None), ("weight", is_plain)):
        if not fits:
            return Arithmetic("float", f"the codes of its {what} have an offset, or two scales")
    if levels.scale.numel() != 1:
        return Arithmetic("float", "its input channels have scales of their own")
    if weight.scale.numel() != 1 and weight.scale.shape != (len(weight.values), *[1] * (weight.values.ndim - 1)):
        return Arithmetic("float", f"its weight has scales {tuple(weight.scale.shape)}, not one for each filter")
    low, high = levels.low, levels.high
    per_filter = weight.scale.double().expand(len(weight.values), *[1] * (weight.values.ndim - 1))
    scale = per_filter.flatten() * levels.scale.detach().double().flatten()
    magnitudes = weight.values.abs().double()  # shifts of 7 and 8 bits are powers of two beyond 64-bit numbers
    largest = int(magnitudes.max()) if magnitudes.numel() else 0
    bound = max(abs(low), abs(high)) * int(magnitudes.flatten(1).sum(1).max()) if magnitudes.numel() else 0
    if largest >= LARGEST_EXACT:
        return Arithmetic("float", f"its weights, of up to {largest:.3g}, are not exact in float64 sums")
    values = weight.values.long()
    is_int8 = low >= -128 and high <= 127
    zero = 0 if is_int8 or low >= 0 else -low
    integer = Arithmetic("integer", "", values, scale, levels, zero, bound)
    is_sign = (magnitudes == 1).all()
    if quantizer.signs and is_sign:
        return integer._replace(kind="binary")
    if (not is_int8 and high + zero > 255) or largest > LARGEST_WEIGHT:
        is_shift = ((magnitudes == 0) | (magnitudes.log2() % 1 == 0)).all()
        if is_shift and bound < LARGEST_EXACT and LARGEST_DIGITS * values[:1].numel() <= LARGEST_SUM:
            return integer._replace(kind="shift")
        return Arithmetic("float", f"its codes, {low} to {high} and weights of up to {largest}, are not 8-bit numbers")
    if bound > LARGEST_SUM:
        return Arithmetic("float", f"its sums, of up to {bound}, are not 32-bit numbers")
    return integer


def frozen_layer(layer: QuantizedLayer, arithmetic: Arithmetic) -> IntegerLayer:
    """Return the integer layer that computes the same as the quantized one."""
    bias = torch.zeros(len(arithmetic.scale)) if layer.bias is None else layer.bias.detach().clone()
    codes, of_rows = arithmetic.weight, isinstance(layer, QLinear)
    if isinstance(layer, QConv2d):
        sides = (0, 0, 0, 0) if layer.padding_mode != "zeros" else layer.padding_sides
        window = Window.of(layer.stride, sides, layer.dilation, layer.groups, layer.border_value)
    else:
        codes, window = codes[..., None, None], Window()
    if arithmetic.kind == "binary":
        signs = None if arithmetic.levels.rounding == "sign" else Encode(layer.input_quantizer, torch.float32, of_rows)
        return BinaryConv2d(codes.to(torch.int8), window, arithmetic.scale.float(), bias, signs)
    if arithmetic.kind == "shift":
        encoder = Encode(layer.input_quantizer, torch.int64, of_rows)
        return ShiftConv2d(codes, window, arithmetic.scale, bias.double(), encoder)
    encoder = Encode(
        layer.input_quantizer, code_dtype(arithmetic.levels.low + arithmetic.zero), of_rows, arithmetic.zero
    )
    return IntegerConv2d(codes, window, arithmetic.scale.float(), bias, encoder, arithmetic.zero)
