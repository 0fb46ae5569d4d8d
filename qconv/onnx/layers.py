"""Layers of a frozen model in ONNX's standard operators.

They are traced by `torch.export`, and do not run in torch where they hold ONNX's own operators.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..inference.layers import BinaryConv2d, Encode, IntegerConv2d, IntegerLayer, ShiftConv2d
from ..inference.operators import unpack_weight
from .rounding import whole_bias

OPSET = 21  # the first one with integers of 4 bits
LEAST = 1e-30  # of a step
_MOST = 2**30  # of a bias, and of sums: both together are integers of 32 bits


def zero_point(low: int) -> int:
    """What stands for 0 in uint8 codes from `low` on: small codes stay small, which some processors need."""
    return max(-low, 0)


def _operator(name: str, inputs: tuple[Tensor, ...], like: Tensor, dtype: torch.dtype, **attributes: Any) -> Tensor:
    """ONNX's operator of this name; its output has the shape of `like`."""
    return torch.onnx.ops.symbolic(name, inputs, attributes, dtype=dtype, shape=like.shape, version=OPSET)


class FloatConv2d(nn.Module):
    """A frozen layer whose integers are whole float32 numbers: equal to it within the rounding of floats.

    Args:
        layer: the frozen layer.
        offset: of the uint8 codes that a layer before it hands on.
    """

    weight: Tensor
    scale: Tensor
    bias: Tensor

    def __init__(self, layer: IntegerLayer, offset: int = 0) -> None:
        super().__init__()
        self.offset, self.window, self.groups = offset, layer.window, layer.groups
        self.encoder: Encode | None = getattr(layer, "encoder", None)
        self.is_binary = isinstance(layer, BinaryConv2d)
        self.register_buffer("weight", whole_weight(layer).float())
        self.register_buffer("scale", layer.scale.float().view(-1, 1, 1).clone())
        self.register_buffer("bias", layer.bias.float().view(-1, 1, 1).clone())
        self.register_buffer("threshold", None)
        if isinstance(layer, BinaryConv2d) and layer.threshold is not None:
            outputs = layer.channels[1]
            self.threshold = layer.threshold[:, : outputs // layer.groups].reshape(-1, 1, 1).float()

    def forward(self, input: Tensor) -> Tensor:
        """Floats, signs, or uint8 codes to floats or signs."""
        codes = (input if self.encoder is None else self.encoder(input)).float()
        if self.is_binary:
            codes = torch.where(codes < 0, -1.0, 1.0)
        elif self.encoder is None:
            codes = codes - self.offset
        padded = F.pad(codes, self.window.padding, value=self.window.padding_value)
        sums = F.conv2d(padded, self.weight, None, self.window.stride, 0, self.window.dilation, self.groups)
        if self.threshold is not None:
            return torch.where(sums < self.threshold, -1.0, 1.0)
        return sums * self.scale + self.bias


class QuantizedConv2d(nn.Module):
    """A frozen layer of codes between QuantizeLinear and DequantizeLinear, as runtimes look for it.

    Codes are uint8, with a zero point where they can be negative. An output that others read as floats is rounded
    to 256 numbers over its range, which is what lets a runtime multiply integers.

    Args:
        layer: the frozen layer.
        ends: the smallest and the largest output; of no use to a layer that hands codes on.
        low: the smallest code of the input.
        high: its largest code.
    """

    weight: Tensor
    weight_zero: Tensor
    scale: Tensor
    bias: Tensor
    bias_zero: Tensor
    one: Tensor
    zero: Tensor
    out_zero: Tensor

    def __init__(self, layer: IntegerConv2d, ends: tuple[float, float], low: int, high: int) -> None:
        super().__init__()
        self.window, self.groups = layer.window, layer.groups
        self.encoder = None if layer.encoder is None else encoder(layer.encoder, low, high)
        self.offset = zero_point(low)
        scale, bias = layer.scale.double(), layer.bias.double()
        # The bias is a whole number of the sums' units, which a few bits make coarse: the weights are multiplied.
        bound = int(layer.weight.long().abs().flatten(1).sum(1).max()) * max(high, -low) if layer.weight.numel() else 0
        finer = 127 // max(int(layer.weight.abs().max()), 1) if layer.weight.numel() else 1
        finer = max(min(finer, _MOST // max(bound, 1)), 1)
        if layer.low is not None and layer.high is not None:
            self.after: nn.Module = Clip(layer.low, layer.high)
            out_zero = zero_point(layer.low)
            scale, bias = whole_bias(layer, bound, finer)
            bias = bias * scale
        else:
            step, out_zero = even_steps(*ends)
            self.after = Dequantize(step, out_zero)
            scale, bias = scale / step, bias / step
        # ONNX's scales are positive: the sign of a folded batch norm goes into the weight.
        weight = layer.weight * torch.where(scale < 0, -1, 1).to(torch.int8).view(-1, 1, 1, 1)
        weight, scale = weight * finer, scale / finer
        # Sums that a scale of 0 or nearly 0 makes vanish beside the bias: the scale grows, the weight goes.
        least = (bias.abs() / _MOST).clamp(min=2.0**-100)
        vanishes = scale.abs() < least
        weight[vanishes] = 0
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
        left, right, top, bottom = self.window.padding
        sides, value = (top, left), self.window.padding_value
        if value or (left, top) != (right, bottom):
            codes, sides = F.pad(codes, self.window.padding, value=value + self.offset), (0, 0)
        input = _operator("DequantizeLinear", (codes, self.one, self.zero), codes, torch.float32)
        weight, bias = (
            _operator("DequantizeLinear", (values, self.scale, zero), values, torch.float32, axis=0)
            for values, zero in ((self.weight, self.weight_zero), (self.bias, self.bias_zero))
        )
        output = F.conv2d(input, weight, bias, self.window.stride, sides, self.window.dilation, self.groups)
        return self.after(_operator("QuantizeLinear", (output, self.one, self.out_zero), output, torch.uint8))


class Clip(nn.Module):
    """Keeps uint8 codes between two, where they could be others."""

    low: Tensor | None
    high: Tensor | None

    def __init__(self, low: int, high: int) -> None:
        super().__init__()
        offset = zero_point(low)
        self.register_buffer("low", torch.tensor(low + offset, dtype=torch.uint8) if low + offset > 0 else None)
        self.register_buffer("high", torch.tensor(high + offset, dtype=torch.uint8) if high + offset < 255 else None)

    def forward(self, codes: Tensor) -> Tensor:
        """(*) to (*)."""
        codes = codes if self.low is None else torch.maximum(codes, self.low)
        return codes if self.high is None else torch.minimum(codes, self.high)


def even_steps(low: float, high: float) -> tuple[float, int]:
    """``step, zero point`` of the 256 codes that reach from `low` to `high`, and hold 0."""
    low, high = min(low, 0.0), max(high, 0.0)
    step = max((high - low) / 255, LEAST)
    return step, round(-low / step)


class Dequantize(nn.Module):
    """The floats that uint8 codes at even steps stand for."""

    step: Tensor
    zero: Tensor

    def __init__(self, step: float, zero: int) -> None:
        super().__init__()
        self.register_buffer("step", torch.tensor(step))
        self.register_buffer("zero", torch.tensor(zero, dtype=torch.uint8))

    def forward(self, input: Tensor) -> Tensor:
        """uint8 to floats."""
        return _operator("DequantizeLinear", (input, self.step, self.zero), input, torch.float32)


class Quantize(Dequantize):
    """uint8 codes at even steps."""

    def forward(self, input: Tensor) -> Tensor:
        """Floats to uint8."""
        return _operator("QuantizeLinear", (input, self.step, self.zero), input, torch.uint8)


class LinearEncode(nn.Module):
    """Codes at even steps.

    Attributes:
        of_codes: the input is what codes of other even steps stand for. Runtimes have a table of 256 numbers for an
            activation between them; this one does nothing.
    """

    def __init__(self, step: float, low: int, high: int) -> None:
        super().__init__()
        self.step, self.low, self.high = step, low, high
        self.quantize, self.clip = Quantize(step, zero_point(low)), Clip(low, high)
        self.of_codes = False

    def forward(self, input: Tensor) -> Tensor:
        """Floats to uint8."""
        if self.of_codes:
            input = _operator("LeakyRelu", (input,), input, torch.float32, alpha=1.0)
        return self.clip(self.quantize(input))


class OtherEncode(nn.Module):
    """Codes as the quantizer makes them, by torch's operators."""

    def __init__(self, encode: Encode, low: int) -> None:
        super().__init__()
        self.quantizer, self.offset = encode.quantizer, zero_point(low)

    def forward(self, input: Tensor) -> Tensor:
        """Floats to uint8."""
        codes = self.quantizer.codes(input, *self.quantizer.tensors()).values
        return (codes.to(torch.int32) + self.offset).to(torch.uint8)


def encoder(encode: Encode, low: int, high: int) -> nn.Module:
    """What makes the codes in ONNX: QuantizeLinear where the steps are even."""
    step = encode.quantizer.codes(torch.zeros(1, 1, 1, 1), *encode.quantizer.tensors()).scale
    if step.numel() != 1 or not step.item() > 0:
        return OtherEncode(encode, low)
    step = step.detach().float().item()
    levels = torch.arange(low, high)
    below, above = ((levels + 0.5 + side).float() * step for side in (-1e-3, 1e-3))
    ends = torch.tensor([-1e30, 1e30])
    points = torch.cat([below, above, ends]).view(1, 1, 1, -1)
    codes = encode(points).flatten().long()
    wanted = torch.cat([levels, levels + 1, torch.tensor([low, high])])
    return LinearEncode(step, low, high) if torch.equal(codes, wanted) else OtherEncode(encode, low)


def whole_weight(layer: IntegerLayer) -> Tensor:
    """The integers of a frozen layer's weight."""
    if isinstance(layer, BinaryConv2d):
        return unpack_weight(layer.weight, *layer.channels)
    if isinstance(layer, ShiftConv2d):
        return layer.sign.long() << layer.shift.long()
    weight: Any = layer.weight
    return weight
