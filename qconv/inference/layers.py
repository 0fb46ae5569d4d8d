"""Layers of a frozen model: codes in, sums of integers inside, floats or the next layer's codes out."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from ..quantizers import Quantizer
from . import operators
from .native import Window


class Encode(nn.Module):
    """Codes of a float input, by the quantizer that the layer was trained with: equal to it, code for code.

    Args:
        quantizer: the trained one.
        dtype: of the codes.
        of_rows: inputs are (rows, features, 1, 1), and the quantizer is a linear layer's: of (rows, features).
    """

    def __init__(self, quantizer: Quantizer, dtype: torch.dtype, of_rows: bool = False) -> None:
        super().__init__()
        self.quantizer = copy.deepcopy(quantizer).eval().requires_grad_(False)
        self.dtype, self.of_rows = dtype, of_rows

    def forward(self, input: Tensor) -> Tensor:
        """Whole numbers of the shape of `input`."""
        rows = input.flatten(1) if self.of_rows else input
        return self.quantizer.codes(rows, *self.quantizer.tensors()).values.to(self.dtype).view(input.shape)


class IntegerLayer(nn.Module):
    """What frozen layers share.

    ``forward`` hands on ``acc · scale_c + bias_c``, or codes of the next layer; ``acc`` is `accumulate`.

    Attributes:
        negated: output channels whose weights have changed their sign, so that the next sign falls where the sum is
            small (batch norm with a negative gamma).
    """

    scale: Tensor
    bias: Tensor
    negated: Tensor

    def __init__(self, window: Window, groups: int, scale: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.window, self.groups = window, groups
        self.register_buffer("scale", scale)
        self.register_buffer("bias", bias)
        self.register_buffer("negated", torch.zeros(len(scale), dtype=torch.bool))

    def encode(self, input: Tensor) -> Tensor:
        """The codes of a float input; codes stay what they are."""
        raise NotImplementedError(f"{type(self).__name__} defines no encode()")

    def accumulate(self, input: Tensor) -> Tensor:
        """The integer sums, as of the weights that were trained."""
        sums = self.sums(input)
        return torch.where(self.negated.view(-1, 1, 1), -sums, sums)

    def sums(self, input: Tensor) -> Tensor:
        """The integer sums of the weights that are here."""
        raise NotImplementedError(f"{type(self).__name__} defines no sums()")

    def extra_repr(self) -> str:
        left, right, top, bottom = self.window.padding
        parts: dict[str, Any] = {
            "stride": (self.window.stride, (1, 1)),
            "padding": (self.window.padding if (left, top) != (right, bottom) else (top, left), (0, 0)),
            "padding_value": (self.window.padding_value, 0),
            "dilation": (self.window.dilation, (1, 1)),
            "groups": (self.groups, 1),
        }
        return ", ".join(f"{name}={value}" for name, (value, default) in parts.items() if value != default)


class BinaryConv2d(IntegerLayer):
    """Convolution of signs, by exclusive or and counting bits.

    It takes floats, whose signs it uses, or the bits of another binary layer; with `threshold` set it gives bits. Where
    the signs of floats fall elsewhere than at 0, `encoder` makes them (ReActNet's learned shifts).
    """

    weight: Tensor
    tap_sums: Tensor
    threshold: Tensor | None

    def __init__(
        self, signs: Tensor, window: Window, groups: int, scale: Tensor, bias: Tensor, encoder: Encode | None = None
    ) -> None:
        super().__init__(window, groups, scale, bias)
        self.encoder = encoder
        self.channels = signs.shape[1] * groups, signs.shape[0]
        weight, tap_sums = operators.pack_weight(signs, groups)
        self.register_buffer("weight", weight)
        self.register_buffer("tap_sums", tap_sums)
        self.register_buffer("threshold", None)

    def forward(self, input: Tensor) -> Tensor:
        """Floats (N, C_out, *out), or bits (N, *out, words)."""
        if self.threshold is not None:
            return self._run(input, None, None, self.threshold)
        return self._run(input, self.scale, self.bias, None)

    def encode(self, input: Tensor) -> Tensor:
        signs = torch.ops.qconv.pack_signs(self._signed(input), self.groups) if input.is_floating_point() else input
        return operators.unpack_signs(signs, self.channels[0], self.groups)

    def sums(self, input: Tensor) -> Tensor:
        return self._run(input, None, None, None)

    def _run(self, input: Tensor, scale: Tensor | None, bias: Tensor | None, threshold: Tensor | None) -> Tensor:
        return torch.ops.qconv.binary_conv2d(
            self._signed(input), self.weight, self.tap_sums, *self.channels, *self.window, scale, bias, threshold
        )

    def _signed(self, input: Tensor) -> Tensor:
        """What has the signs that are convolved."""
        return self.encoder(input) if self.encoder is not None and input.is_floating_point() else input

    @torch.no_grad()
    def compare_(self, threshold: Tensor, negated: Tensor) -> None:
        """Hand bits on: −1 where ``±acc < threshold_c``, with the minus sign where `negated`."""
        self.negate_(negated)
        groups, blocks = self.weight.shape[:2]
        bounds = torch.zeros(groups, blocks * operators.BLOCK, dtype=torch.int32)
        bounds[:, : self.channels[1] // groups] = threshold.view(groups, -1)
        self.threshold = bounds

    @torch.no_grad()
    def negate_(self, negated: Tensor) -> None:
        """Change the sign of the weights of output channels."""
        signs = operators.unpack_weight(self.weight, *self.channels)
        signs = torch.where(negated.view(-1, 1, 1, 1), -signs, signs)
        self.weight, self.tap_sums = operators.pack_weight(signs, self.groups)
        self.negated = self.negated ^ negated

    def extra_repr(self) -> str:
        handed = "floats" if self.threshold is None else "bits"
        size = tuple(self.weight.shape[2:4])
        parts = f"{self.channels[0]}", f"{self.channels[1]}", f"kernel_size={size}", super().extra_repr(), f"→ {handed}"
        return ", ".join(part for part in parts if part)


class IntegerConv2d(IntegerLayer):
    """Convolution of 8-bit codes with 32-bit sums.

    It takes floats, which `encoder` makes codes, or codes where that is None. With `low` and `high` set it gives the
    next layer's codes, ``clamp(round(acc · scale_c + bias_c), low, high)``.
    """

    weight: Tensor

    def __init__(
        self, codes: Tensor, window: Window, groups: int, scale: Tensor, bias: Tensor, encoder: Encode
    ) -> None:
        super().__init__(window, groups, scale, bias)
        self.register_buffer("weight", codes.to(torch.int8, memory_format=torch.contiguous_format))
        self.encoder: Encode | None = encoder
        self.low: int | None = None
        self.high: int | None = None

    def forward(self, input: Tensor) -> Tensor:
        """Floats, or codes (N, C_out, *out)."""
        return self._run(self.encode(input), self.scale, self.bias, self.low, self.high)

    def encode(self, input: Tensor) -> Tensor:
        return input if self.encoder is None else self.encoder(input)

    def sums(self, input: Tensor) -> Tensor:
        return self._run(input if not input.is_floating_point() else self.encode(input))

    def _run(self, codes: Tensor, *result: Any) -> Tensor:
        stride, padding, dilation, value = self.window
        return torch.ops.qconv.integer_conv2d(
            codes, self.weight, stride, padding, dilation, self.groups, value, *result
        )

    def round_(self, scale: Tensor, bias: Tensor, low: int, high: int) -> None:
        """Hand codes on."""
        self.scale, self.bias, self.low, self.high = scale, bias, low, high

    def extra_repr(self) -> str:
        groups, (out_channels, in_channels) = self.groups, self.weight.shape[:2]
        handed = "floats" if self.low is None else f"codes {self.low} to {self.high}"
        size = tuple(self.weight.shape[2:])
        parts = f"{in_channels * groups}", f"{out_channels}", f"kernel_size={size}", super().extra_repr(), f"→ {handed}"
        return ", ".join(part for part in parts if part)


class ShiftConv2d(IntegerLayer):
    """Convolution of fixed-point numbers with powers of two: shifts and 64-bit sums."""

    sign: Tensor
    shift: Tensor

    def __init__(
        self, codes: Tensor, window: Window, groups: int, scale: Tensor, bias: Tensor, encoder: Encode
    ) -> None:
        super().__init__(window, groups, scale, bias)
        self.encoder = encoder
        self.register_buffer("sign", codes.sign().to(torch.int8))
        self.register_buffer("shift", codes.abs().clamp(min=1).double().log2().to(torch.int8))

    def forward(self, input: Tensor) -> Tensor:
        """Floats (N, C_out, *out)."""
        scaled = self.sums(input) * self.scale.view(-1, 1, 1) + self.bias.view(-1, 1, 1)
        return scaled.to(torch.float32)

    def encode(self, input: Tensor) -> Tensor:
        return self.encoder(input)

    def sums(self, input: Tensor) -> Tensor:
        codes = self.encode(input) if input.is_floating_point() else input
        stride, padding, dilation, _ = self.window
        return torch.ops.qconv.shift_conv2d(codes, self.sign, self.shift, stride, padding, dilation, self.groups)

    def extra_repr(self) -> str:
        groups, (out_channels, in_channels) = self.groups, self.sign.shape[:2]
        size = tuple(self.sign.shape[2:])
        parts = f"{in_channels * groups}", f"{out_channels}", f"kernel_size={size}", super().extra_repr()
        return ", ".join(part for part in parts if part)
