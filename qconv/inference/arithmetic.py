"""The integer arithmetic of a quantized layer, or the reason for computing on floats."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.operators import code_dtype
from ..kernels.window import Window
from ..layers import QConv2d, QLinear, QuantizedLayer, SamePadded
from ..quantizers import Identity
from ..quantizers.levels import Levels
from .frozen_layers import BinaryConv2d, Encode, IntegerConv2d, IntegerLayer, OffsetBinaryConv2d, ShiftConv2d

LARGEST_SUM = 2**31 - 1
LARGEST_WEIGHT = 255
LARGEST_DIGITS = 255 * 64  # the product of the 8-bit parts of a fixed-point input and of a shift
LARGEST_EXACT = 2**53  # sums of shifted numbers, added in float64


class Arithmetic(NamedTuple):
    """The arithmetic of a quantized layer.

    Attributes:
        kind: "binary", "offset" (signs around a centre), "integer", "shift" or "float".
        reason: why it is float.
        weight: the codes, output channels first.
        scale: the value of 1 in a sum of products of codes, float64 for each output channel.
        levels: the levels of the input.
        zero: added to codes to make them 8-bit numbers.
        bound: the bound of the magnitude of sums.
        centre: the value of 1 in a sum of the input's codes, as `scale`: the offset of "offset" weights.
    """

    kind: str
    reason: str = ""
    weight: Tensor = torch.zeros(0, device="cpu")
    scale: Tensor = torch.zeros(0, device="cpu")
    levels: Levels = Levels(0, 0, torch.ones((), device="cpu"))
    zero: int = 0
    bound: int = 0
    centre: Tensor = torch.zeros(0, device="cpu")


def arithmetic(layer: QuantizedLayer) -> Arithmetic:
    """Choose the arithmetic of a layer, or return why it can't be computed on integers."""
    if isinstance(layer.input_quantizer, Identity):
        return Arithmetic("float", "its input is not quantized")
    if not isinstance(layer, QConv2d | QLinear):
        return Arithmetic("float", f"{type(layer).__name__} has no integer operator")
    if type(layer).forward not in (QConv2d.forward, QLinear.forward):
        return Arithmetic("float", f"{type(layer).__name__} has a forward of its own")
    if isinstance(layer, SamePadded) and layer.same_pad:
        return Arithmetic("float", "its padding depends on the size of its input")
    quantizer = layer.input_quantizer
    levels = quantizer.levels(*quantizer.tensors())
    if levels is None:
        return Arithmetic("float", f"the levels of its input are not fixed: {type(quantizer).__name__} states none")
    if not quantizer.at_work.is_elementwise and isinstance(layer, QLinear):  # which is frozen as a layer of its rows
        return Arithmetic("float", f"{type(quantizer).__name__} quantizes a sample as a whole")
    try:
        weight = layer.weight_codes()
    except TypeError as error:
        return Arithmetic("float", str(error))
    is_plain = weight.offset is None and levels.offset is None
    is_around = quantizer.bits == 1 and levels[:2] == (-1, 1) and bool((weight.values.abs() == 1).all())
    if weight.negative_scale is not None or weight.zero != 0 or not (is_plain or is_around):
        what = "weight" if levels.offset is None else "input"
        return Arithmetic("float", f"the codes of its {what} have an offset, or two scales")
    for what, numbers in (("scales", levels.scale), ("offsets", levels.offset)):
        if numbers is not None and numbers.numel() != 1:
            return Arithmetic("float", f"its input channels have {what} of their own")
    by_filter = len(weight.values), *[1] * (weight.values.ndim - 1)
    for what, numbers in (("scales", weight.scale), ("offsets", weight.offset)):
        if numbers is not None and numbers.numel() != 1 and numbers.shape != by_filter:
            return Arithmetic("float", f"its weight has {what} {tuple(numbers.shape)}, not one for each filter")
    low, high = levels.low, levels.high
    unit = levels.scale.detach().double().flatten()

    def of_filters(numbers: Tensor) -> Tensor:
        return numbers.double().expand(by_filter).flatten() * unit

    scale = of_filters(weight.scale)
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
    if not is_plain:
        centre = torch.zeros_like(scale) if weight.offset is None else of_filters(weight.offset)
        return integer._replace(kind="offset", centre=centre)
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
    if arithmetic.kind == "offset":
        encoder = Encode(layer.input_quantizer, torch.float32, of_rows)
        return OffsetBinaryConv2d(
            codes.to(torch.int8), window, arithmetic.scale.float(), arithmetic.centre.float(), bias, encoder
        )
    if arithmetic.kind == "shift":
        encoder = Encode(layer.input_quantizer, torch.int64, of_rows)
        return ShiftConv2d(codes, window, arithmetic.scale, bias.double(), encoder)
    encoder = Encode(
        layer.input_quantizer, code_dtype(arithmetic.levels.low + arithmetic.zero), of_rows, arithmetic.zero
    )
    return IntegerConv2d(codes, window, arithmetic.scale.float(), bias, encoder, arithmetic.zero)
