"""8-bit codes in ONNX's operators: from floats, and to floats."""

from typing import Any

import torch
from torch import Tensor, nn

from ..inference.frozen_layers import Encode

OPSET = 21  # the first with 4-bit integers
LEAST = 1e-30  # the smallest step


def operator(name: str, input: Tensor, *others: Tensor, dtype: torch.dtype, **attributes: Any) -> Tensor:
    """ONNX's operator of this name; its output has the shape of `input`."""
    return torch.onnx.ops.symbolic(name, (input, *others), attributes, dtype=dtype, shape=input.shape, version=OPSET)


def zero_point(low: int) -> int:
    """The zero point of uint8 codes from `low` on: small codes stay small, which some processors need."""
    return max(-low, 0)


def even_steps(low: float, high: float) -> tuple[float, int]:
    """``step, zero point`` of 256 codes that cover `low`, `high` and 0."""
    low, high = min(low, 0.0), max(high, 0.0)
    step = max((high - low) / 255, LEAST)
    return step, round(-low / step)


class _EvenSteps(nn.Module):
    """Base of modules with evenly spaced codes.

    Args:
        step: the difference between the numbers of adjacent codes.
        zero: the code of 0.
    """

    step: Tensor
    zero: Tensor

    def __init__(self, step: float, zero: int) -> None:
        super().__init__()
        self.register_buffer("step", torch.tensor(step))
        self.register_buffer("zero", torch.tensor(zero, dtype=torch.uint8))


class Quantize(_EvenSteps):
    """Converts floats to uint8 codes."""

    def forward(self, input: Tensor) -> Tensor:
        """(*) to (*)."""
        return operator("QuantizeLinear", input, self.step, self.zero, dtype=torch.uint8)


class Dequantize(_EvenSteps):
    """Converts uint8 codes to the floats that they represent."""

    def forward(self, input: Tensor) -> Tensor:
        """(*) to (*)."""
        return operator("DequantizeLinear", input, self.step, self.zero, dtype=torch.float32)


class Clip(nn.Module):
    """Clamps uint8 codes to a range, if they could leave it."""

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


class LinearEncode(nn.Module):
    """Converts floats to evenly spaced codes.

    Attributes:
        of_codes: whether the input comes from codes with other even steps. Runtimes use a table of 256 numbers for an
            activation between two such codes; this activation does nothing.
    """

    def __init__(self, step: float, low: int, high: int) -> None:
        super().__init__()
        self.step, self.low, self.high = step, low, high
        self.quantize, self.clip = Quantize(step, zero_point(low)), Clip(low, high)
        self.of_codes = False

    def forward(self, input: Tensor) -> Tensor:
        """Floats to uint8."""
        if self.of_codes:
            input = operator("LeakyRelu", input, dtype=torch.float32, alpha=1.0)
        return self.clip(self.quantize(input))


class OtherEncode(nn.Module):
    """Converts floats to codes as the quantizer does, by torch's operators."""

    def __init__(self, encode: Encode, low: int) -> None:
        super().__init__()
        self.quantizer, self.offset = encode.quantizer, zero_point(low)

    def forward(self, input: Tensor) -> Tensor:
        """Floats to uint8."""
        codes = self.quantizer.codes(input, *self.quantizer.tensors()).values
        return (codes.to(torch.int32) + self.offset).to(torch.uint8)


def encoder(encode: Encode) -> nn.Module:
    """Return the module that makes the codes in ONNX: QuantizeLinear if the steps are even."""
    low, high, scale, rounding, _ = encode.levels
    if rounding != "nearest" or scale.numel() != 1 or not scale.item() > 0:
        return OtherEncode(encode, low)
    return LinearEncode(scale.detach().float().item(), low, high)
