"""How a quantized layer is computed on integers, and why not."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.native import Window
from ..kernels.operators import code_dtype
from ..layers import QConv2d, QLinear, QuantizedLayer
from ..quantizers import Identity
from .layers import BinaryConv2d, Encode, IntegerConv2d, IntegerLayer, ShiftConv2d

LARGEST_SUM = 2**31 - 1
LARGEST_WEIGHT = 255
LARGEST_DIGITS = 255 * 64  # the product of the 8-bit parts of a fixed-point input and of a shift
LARGEST_EXACT = 2**53  # sums of shifted numbers, as the definition adds them
_HUGE = 1e30


class Arithmetic(NamedTuple):
    """How a quantized layer is computed.

    Attributes:
        kind: "binary", "integer", "shift" or "float".
        reason: why it is float.
        weight: the codes, output channels first.
        scale: what a sum of products of codes is worth, float64 for each output channel.
        low: the smallest code of the input.
        high: its largest code.
        zero: what is added to codes, so that they are 8-bit numbers.
        bound: of the magnitude of sums.
        is_plain: the codes of a binary input are its signs, with no learned shift.
    """

    kind: str
    reason: str = ""
    weight: Tensor = torch.zeros(0, device="cpu")
    scale: Tensor = torch.zeros(0, device="cpu")
    low: int = 0
    high: int = 0
    zero: int = 0
    bound: int = 0
    is_plain: bool = True


def arithmetic(layer: QuantizedLayer) -> Arithmetic:
    """How a layer can be computed, and why not on integers."""
    if isinstance(layer.input_quantizer, Identity):
        return Arithmetic("float", "its input is not quantized")
    if not isinstance(layer, QConv2d | QLinear):
        return Arithmetic("float", f"{type(layer).__name__} has no integer operator")
    if layer.pads_by_input:
        return Arithmetic("float", "its padding depends on the size of its input")
    channels, dim = layer.input_channels()
    shape = [1] * (2 if dim == -1 else 4)
    shape[dim] = channels
    quantizer = layer.input_quantizer
    ends = [quantizer.codes(torch.full(shape, end), *quantizer.tensors()) for end in (-_HUGE, _HUGE)]
    weight = layer.weight_codes()
    for what, codes in (("input", ends[0]), ("weight", weight)):
        if codes.offset is not None or codes.negative_scale is not None or codes.zero:
            return Arithmetic("float", f"the codes of its {what} have an offset, or two scales")
    if ends[0].scale.numel() != 1:
        return Arithmetic("float", "its input channels have scales of their own")
    low, high = int(ends[0].values.min()), int(ends[1].values.max())
    per_filter = weight.scale.double().expand(len(weight.values), *[1] * (weight.values.ndim - 1))
    scale = per_filter.flatten() * ends[0].scale.double().flatten()
    values = weight.values.long()
    largest = int(values.abs().max()) if values.numel() else 0
    bound = max(abs(low), abs(high)) * int(values.abs().flatten(1).sum(1).max()) if values.numel() else 0
    is_int8 = low >= -128 and high <= 127
    zero = 0 if is_int8 or low >= 0 else -low
    found = Arithmetic("integer", "", values, scale, low, high, zero, bound)
    is_sign = (values.abs() == 1).all()
    if quantizer.signs and is_sign:
        edge = [quantizer.codes(torch.full(shape, near), *quantizer.tensors()).values for near in (-1e-30, 0.0)]
        return found._replace(kind="binary", is_plain=bool((edge[0] < 0).all() and (edge[1] > 0).all()))
    if (not is_int8 and high + zero > 255) or largest > LARGEST_WEIGHT:
        magnitudes = weight.values.abs().double()
        is_shift = ((magnitudes == 0) | (magnitudes.log2() % 1 == 0)).all()
        if is_shift and bound < LARGEST_EXACT and LARGEST_DIGITS * values[:1].numel() <= LARGEST_SUM:
            return found._replace(kind="shift")
        return Arithmetic("float", f"its codes, {low} to {high} and weights of up to {largest}, are not 8-bit numbers")
    if bound > LARGEST_SUM:
        return Arithmetic("float", f"its sums, of up to {bound}, are not 32-bit numbers")
    return found


def frozen_layer(layer: QuantizedLayer, found: Arithmetic) -> IntegerLayer:
    """The integer layer of a quantized one, which gives what its convolution gives."""
    bias = torch.zeros(len(found.scale)) if layer.bias is None else layer.bias.detach().clone()
    codes, of_rows = found.weight, isinstance(layer, QLinear)
    if isinstance(layer, QConv2d):
        sides = (0, 0, 0, 0) if layer.padding_mode != "zeros" else tuple(layer.padding_sides)
        window = Window(layer.stride, sides, layer.dilation, layer.padding_value)  # pyright: ignore
        groups = layer.groups
    else:
        codes, window, groups = codes[..., None, None], Window((1, 1), (0, 0, 0, 0), (1, 1), 0), 1
    if found.kind == "binary":
        signs = None if found.is_plain else Encode(layer.input_quantizer, torch.float32, of_rows)
        return BinaryConv2d(codes.to(torch.int8), window, groups, found.scale.float(), bias, signs)
    if found.kind == "shift":
        encoder = Encode(layer.input_quantizer, torch.int64, of_rows)
        return ShiftConv2d(codes, window, groups, found.scale, bias.double(), encoder)
    encoder = Encode(layer.input_quantizer, code_dtype(found.low + found.zero), of_rows, found.zero)
    return IntegerConv2d(codes, window, groups, found.scale.float(), bias, encoder, found.zero)
