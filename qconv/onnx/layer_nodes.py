"""Layers of a frozen model in ONNX's standard operators.

`torch.export` traces them; those with ONNX's own operators do not run in torch.
"""

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..inference.fixed_weight import FixedWeight
from ..inference.frozen_layers import BinaryConv2d, Encode, IntegerConv2d, IntegerLayer, OffsetBinaryConv2d
from ..kernels.operators import of_8_bits
from ..quantizers import Quantizer
from .eight_bit_codes import Clip, Dequantize, encoder, even_steps, operator, zero_point
from .ranges import Ends
from .requantize import whole_bias

_MOST = 2**30  # of a bias, and of sums: their total must be a 32-bit integer
_MOST_OF_TWO = 2**15 - 1
"""Of two products: x86 processors without VNNI add them in 16 bits, with saturation."""


def may_saturate(weight: Tensor, highest: int) -> bool:
    """Whether uint8 codes up to ``highest``, times two weights of one filter, can exceed 16 bits in either direction.

    Which two are added depends on the runtime, so that any two may be.
    """
    if not weight.numel():
        return False
    filters = weight.flatten(1).int()
    two = (part.clamp(min=0).topk(min(2, part.shape[1])).values.sum(1).max() for part in (filters, -filters))
    return highest * int(max(two)) > _MOST_OF_TWO


class FloatConv2d(nn.Module):
    """A frozen layer with its integers as whole float32 numbers: equal to it up to float rounding.

    Args:
        layer: the frozen layer.
        offset: the offset of the uint8 codes from the previous layer.
    """

    weight: Tensor
    scale: Tensor
    bias: Tensor

    def __init__(self, layer: IntegerLayer, offset: int = 0) -> None:
        super().__init__()
        self.window = layer.window
        self.encoder: Encode | None = getattr(layer, "encoder", None)
        self.offset = offset if self.encoder is None else self.encoder.zero
        self.is_binary = isinstance(layer, BinaryConv2d)
        self.register_buffer("weight", layer.whole_weight().float())
        self.register_buffer("scale", layer.scale.float().view(-1, 1, 1).clone())
        self.register_buffer("bias", layer.bias.float().view(-1, 1, 1).clone())
        self.register_buffer("threshold", None)
        if isinstance(layer, BinaryConv2d) and layer.threshold is not None:
            outputs = layer.channels[1]
            self.threshold = layer.threshold[:, : outputs // self.window.groups].reshape(-1, 1, 1).float()

    def forward(self, input: Tensor) -> Tensor:
        """Floats, signs, or uint8 codes to floats or signs."""
        codes = (input if self.encoder is None else self.encoder(input)).float()
        if self.is_binary:
            codes = torch.where(codes < 0, -1.0, 1.0)
        elif self.offset:
            codes = codes - self.offset
        stride, _, dilation, groups, _ = self.window
        sums = F.conv2d(self.window.pad(codes), self.weight, None, stride, 0, dilation, groups)
        if self.threshold is not None:
            return torch.where(sums < self.threshold, -1.0, 1.0)
        # The scale comes first: after a convolution, runtimes multiply it into the weights, whose sums are then not
        # exact.
        return self.scale * sums + self.bias


class OffsetConv2d(nn.Module):
    """A frozen layer of signs around centres with their values as floats: equal to it up to float rounding.

    Args:
        layer: the frozen layer.
    """

    weight: Tensor
    bias: Tensor
    centre: Tensor

    def __init__(self, layer: OffsetBinaryConv2d) -> None:
        super().__init__()
        self.window, self.encoder = layer.window, cast(Encode, layer.encoder)
        scale, centre = (factor.view(-1, 1, 1, 1) for factor in (layer.scale, layer.centre))
        self.register_buffer("weight", layer.whole_weight() * scale + centre)
        self.register_buffer("bias", layer.bias.clone())
        self.register_buffer("centre", layer.inputs_centre().float())

    def forward(self, input: Tensor) -> Tensor:
        """Floats to floats."""
        values, sides = self.window.pad_but_zeros(self.encoder(input) + self.centre)
        stride, _, dilation, groups, _ = self.window
        return F.conv2d(values, self.weight, self.bias, stride, sides, dilation, groups)


class StoredCodes(Quantizer):
    """A fixed weight of 8-bit codes kept apart from their scale; the exporter would multiply them.

    Args:
        fixed: the weight, with one scale or one for each output channel.
    """

    codes_8: Tensor
    scale: Tensor
    zero: Tensor

    def __init__(self, fixed: FixedWeight) -> None:
        super().__init__()
        if fixed.codes_8 is None:
            raise ValueError("fixed must have codes_8")
        scale = torch.ones(()) if fixed.scale is None else fixed.scale
        scale = scale.reshape(-1) if scale.numel() > 1 else scale.reshape(())
        self.register_buffer("codes_8", fixed.codes_8)
        self.register_buffer("scale", scale.float())
        self.register_buffer("zero", torch.zeros_like(scale, dtype=torch.int8))

    def quantize(self, x: Tensor, *tensors: Tensor) -> Tensor:
        return operator("DequantizeLinear", self.codes_8, self.scale, self.zero, dtype=torch.float32, axis=0)


class QuantizedConv2d(nn.Module):
    """A frozen layer of codes between QuantizeLinear and DequantizeLinear, the form that runtimes recognize.

    Codes are uint8, with a zero point if they can be negative. A float output is rounded to 256 numbers over its range,
    so that a runtime can multiply integers.

    Attributes:
        saturates: whether ONNX Runtime, left to itself, can get wrong sums on x86 processors without VNNI.

    Args:
        layer: the frozen layer.
        low: the smallest code of the input.
        high: its largest code.
        ends: the smallest and the largest output of a layer that does not output codes.
    """

    weight: Tensor
    taken: Tensor | None
    weight_zero: Tensor
    scale: Tensor
    bias: Tensor
    bias_zero: Tensor
    one: Tensor
    zero: Tensor
    out_zero: Tensor

    def __init__(self, layer: IntegerConv2d, low: int, high: int, ends: Ends | None) -> None:
        super().__init__()
        self.window = layer.window
        self.encoder = None if layer.encoder is None else encoder(layer.encoder)
        layer_weight, taken = of_8_bits(layer.whole_weight(), self.window.groups)
        self.register_buffer("taken", taken)
        self.offset = zero_point(low)
        scale, bias = layer.scale.double(), layer.bias.double()
        # The bias is a whole number in units of the sums. With few bits that is coarse, so the weights are multiplied.
        magnitudes = layer_weight.long().abs()
        bound = int(magnitudes.flatten(1).sum(1).max()) * max(high, -low) if magnitudes.numel() else 0
        highest = high + self.offset  # as uint8
        largest = min(127, _MOST_OF_TWO // max(2 * highest, 1))
        finer = largest // max(int(magnitudes.max()), 1) if magnitudes.numel() else 1
        finer = max(min(finer, _MOST // max(bound, 1)), 1)
        if layer.low is not None and layer.high is not None:
            self.after: nn.Module = Clip(layer.low, layer.high)
            out_zero = zero_point(layer.low)
            scale, bias = whole_bias(layer, bound, finer)
            bias = bias * scale
        elif ends is None:
            raise ValueError("ends must be given of a layer that hands no codes on")
        else:
            step, out_zero = even_steps(*ends)
            self.after = Dequantize(step, out_zero)
            scale, bias = scale / step, bias / step
        # ONNX's scales are positive, so the sign of a folded batch norm goes into the weight.
        weight = layer_weight * torch.where(scale < 0, -1, 1).to(torch.int8).view(-1, 1, 1, 1)
        weight, scale = weight * finer, scale / finer
        # If a scale of 0 or nearly 0 makes the sums vanish beside the bias, the scale grows and the weight becomes 0.
        least = (bias.abs() / _MOST).clamp(min=2.0**-100)
        vanishes = scale.abs() < least
        weight[vanishes] = 0
        self.saturates = may_saturate(weight, highest)
        scale = torch.where(vanishes, least, scale.abs()).float()
        tensors = {
            "weight": weight,
            "weight_zero": torch.zeros(len(scale), dtype=torch.int8),
            "scale": scale,
            "bias": (bias / scale.double()).round().to(torch.int32),
            "bias_zero": torch.zeros(len(scale), dtype=torch.int32),
            "one": torch.tensor(1.0),
            "zero": torch.tensor(self.offset, dtype=torch.uint8),
            "out_zero": torch.tensor(out_zero, dtype=torch.uint8),
        }
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)

    def forward(self, input: Tensor) -> Tensor:
        """Floats or uint8 codes to floats or uint8 codes."""
        codes = input if self.encoder is None else self.encoder(input)
        codes = codes if self.taken is None else codes.index_select(1, self.taken)
        codes, sides = self.window.pad_but_zeros(codes, self.offset)
        input = operator("DequantizeLinear", codes, self.one, self.zero, dtype=torch.float32)
        weight, bias = (
            operator("DequantizeLinear", values, self.scale, zero, dtype=torch.float32, axis=0)
            for values, zero in ((self.weight, self.weight_zero), (self.bias, self.bias_zero))
        )
        stride, _, dilation, groups, _ = self.window
        output = F.conv2d(input, weight, bias, stride, sides, dilation, groups)
        return self.after(operator("QuantizeLinear", output, self.one, self.out_zero, dtype=torch.uint8))
