"""Layers of a frozen model: codes in, integer sums inside, floats or the next layer's codes out."""

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels import onednn, operators
from ..kernels.bits import unpack_signs
from ..kernels.window import Window
from ..quantizers import Quantizer
from ..quantizers.levels import Levels


class Encode(nn.Module):
    """Computes codes of a float input, equal to those of the layer's trained quantizer.

    Args:
        quantizer: the trained quantizer.
        dtype: the dtype of the codes.
        of_rows: whether inputs are (rows, features, 1, 1) for the quantizer of a linear layer, (rows, features).
        zero: added to the codes, so it is the code of 0.
    """

    def __init__(self, quantizer: Quantizer, dtype: torch.dtype, of_rows: bool = False, zero: int = 0) -> None:
        super().__init__()
        self.quantizer = copy.deepcopy(quantizer).eval().requires_grad_(False)
        self.dtype, self.of_rows, self.zero = dtype, of_rows, zero

    @property
    def levels(self) -> Levels:
        """The levels of the quantizer, before `zero` is added.

        Raises:
            TypeError: it states no levels.
        """
        levels = self.quantizer.levels(*self.quantizer.tensors())
        if levels is None:
            raise TypeError(f"{self.quantizer} states no levels: its codes depend on the input")
        return levels

    def forward(self, input: Tensor) -> Tensor:
        """Whole numbers of the shape of `input`."""
        rows = input.flatten(1) if self.of_rows else input
        values = self.quantizer.codes(rows, *self.quantizer.tensors()).values
        return (values + self.zero if self.zero else values).to(self.dtype).view(input.shape)


class IntegerLayer(nn.Module):
    """Base of frozen layers.

    ``forward`` returns ``acc · scale_c + bias_c``, or codes of the next layer; ``acc`` is `accumulate`.

    Attributes:
        channels: the numbers of input and output channels.
        negated: the output channels whose weights have changed sign, because the next sign flips as the sum grows
            (batch norm with a negative gamma).
    """

    scale: Tensor
    bias: Tensor
    negated: Tensor
    channels: tuple[int, int]

    def __init__(self, window: Window, scale: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.window = window
        self.register_buffer("scale", scale)
        self.register_buffer("bias", bias)
        self.register_buffer("negated", torch.zeros(len(scale), dtype=torch.bool))

    def codes(self, input: Tensor) -> Tensor:
        """Return the whole numbers to multiply, from a float input or from another layer's output."""
        raise NotImplementedError(f"{type(self).__name__} defines no codes()")

    def whole_weight(self) -> Tensor:
        """Return the whole weights, (C_out, C / groups, kh, kw)."""
        raise NotImplementedError(f"{type(self).__name__} defines no whole_weight()")

    def accumulate(self, input: Tensor) -> Tensor:
        """Return the integer sums with the trained weights."""
        sums = self.sums(input)
        return torch.where(self.negated.view(-1, 1, 1), -sums, sums)

    def sums(self, input: Tensor) -> Tensor:
        """Return the integer sums with the stored weights."""
        raise NotImplementedError(f"{type(self).__name__} defines no sums()")

    def extra_repr(self) -> str:
        inputs, outputs = self.channels
        kernel_size = tuple(self.whole_weight().shape[2:])
        parts = f"{inputs}", f"{outputs}", f"{kernel_size=}", str(self.window), f"→ {self.gives()}"
        return ", ".join(part for part in parts if part)

    def gives(self) -> str:
        """Return the kind of the output."""
        return "floats"


class BinaryConv2d(IntegerLayer):
    """Convolution of signs by exclusive or and counting bits.

    It takes floats, whose signs it uses, or if `takes_bits` the bits of another binary layer; with `threshold` set it
    returns bits. If the signs of floats do not change at 0 (ReActNet's learned shifts), `encoder` makes them.
    """

    weight: Tensor
    tap_sums: Tensor
    threshold: Tensor | None
    takes_bits: bool = False

    def __init__(
        self, signs: Tensor, window: Window, scale: Tensor, bias: Tensor, encoder: Encode | None = None
    ) -> None:
        super().__init__(window, scale, bias)
        self.encoder = encoder
        self.channels = signs.shape[1] * window.groups, signs.shape[0]
        weight, tap_sums = operators.pack_weight(signs, window.groups)
        self.register_buffer("weight", weight)
        self.register_buffer("tap_sums", tap_sums)
        self.register_buffer("threshold", None)

    def forward(self, input: Tensor) -> Tensor:
        """Floats (N, C_out, *out), or bits (N, *out, words)."""
        if self.threshold is not None:
            return self._run(input, None, None, self.threshold)
        return self._run(input, self.scale, self.bias, None)

    def codes(self, input: Tensor) -> Tensor:
        groups = self.window.groups
        signed = self._signed(input)
        signs = torch.ops.qconv.pack_signs(signed, groups) if signed.is_floating_point() else signed
        return unpack_signs(signs, self.channels[0], groups)

    def whole_weight(self) -> Tensor:
        return operators.unpack_weight(self.weight, *self.channels)

    def sums(self, input: Tensor) -> Tensor:
        return self._run(input, None, None, None)

    def _run(self, input: Tensor, scale: Tensor | None, bias: Tensor | None, threshold: Tensor | None) -> Tensor:
        return self._convolve(
            self._signed(input), (self.weight, self.tap_sums), self.channels[1], scale, bias, threshold
        )

    def _convolve(self, signs: Tensor, packed: tuple[Tensor, Tensor], outputs: int, *result: Tensor | None) -> Tensor:
        """Convolve signs with a packed weight."""
        stride, padding, dilation, _, value = self.window
        operands = signs, *packed, self.channels[0], outputs
        return torch.ops.qconv.binary_conv2d(*operands, stride, padding, dilation, value, *result)

    def _signed(self, input: Tensor) -> Tensor:
        """Return values with the signs to convolve."""
        if not input.is_floating_point() and not (self.takes_bits and input.dtype == torch.int64):  # images
            raise _not_floating(input)
        return self.encoder(input) if self.encoder is not None else input

    @torch.no_grad()
    def compare_(self, threshold: Tensor, negated: Tensor) -> None:
        """Switch to bits as outputs: −1 where ``±acc < threshold_c``, with the minus sign where `negated`."""
        self.negate_(negated)
        groups, blocks = self.weight.shape[:2]
        bounds = torch.zeros(groups, blocks * operators.BLOCK, dtype=torch.int32)
        bounds[:, : self.channels[1] // groups] = threshold.view(groups, -1)
        self.threshold = bounds

    @torch.no_grad()
    def negate_(self, negated: Tensor) -> None:
        """Change the sign of the weights of output channels."""
        signs = self.whole_weight()
        signs = torch.where(negated.view(-1, 1, 1, 1), -signs, signs)
        self.weight, self.tap_sums = operators.pack_weight(signs, self.window.groups)
        self.negated = self.negated ^ negated

    def gives(self) -> str:
        return "floats" if self.threshold is None else "bits"


class OffsetBinaryConv2d(BinaryConv2d):
    """Convolution of two values around a centre with two values around a centre (AdaBin), by counting bits.

    With r the centre of the input, in units of its distance, and outside of the image neither value but 0, it returns
    ``(scale_c · acc + centre_c · box) + (r · (scale_c · W + centre_c · n) + bias_c)``: ``acc`` is the sum of products
    of signs, ``box`` that of the input's signs in the group, ``W`` that of the weight's signs whose taps lie inside,
    and ``n`` their number. The second bracket depends on the image's size alone; that of the last size is kept.
    """

    centre: Tensor
    ones: Tensor
    ones_sums: Tensor

    def __init__(
        self, signs: Tensor, window: Window, scale: Tensor, centre: Tensor, bias: Tensor, encoder: Encode
    ) -> None:
        super().__init__(signs, window, scale, bias, encoder)
        ones, ones_sums = operators.pack_weight(torch.ones_like(signs[: window.groups]), window.groups)
        self.register_buffer("centre", centre)
        self.register_buffer("ones", ones)
        self.register_buffer("ones_sums", ones_sums)
        self._last: tuple[Any, Tensor] | None = None

    def forward(self, input: Tensor) -> Tensor:
        """Floats (N, C_out, *out)."""
        groups = self.window.groups
        bits = torch.ops.qconv.pack_signs(self._signed(input), groups)
        one, zero = torch.ones_like(self.scale), torch.zeros_like(self.scale)
        box = self._convolve(bits, (self.ones, self.ones_sums), groups, one[:groups], zero[:groups])
        if groups > 1:
            box = box.repeat_interleave(self.channels[1] // groups, 1)
        output = self._convolve(bits, (self.weight, self.tap_sums), self.channels[1], self.scale, zero)
        return output.addcmul_(box, self.centre.view(-1, 1, 1)).add_(self._constant(input.shape[2:]))

    def inputs_centre(self) -> Tensor:
        """Return the centre of the input, in units of its distance; float64."""
        encoder: Any = self.encoder
        levels = encoder.levels
        offset = torch.zeros_like(levels.scale) if levels.offset is None else levels.offset
        return (offset.double() / levels.scale.double()).reshape(())

    def _load_from_state_dict(self, *args: Any, **options: Any) -> None:
        self._last = None
        super()._load_from_state_dict(*args, **options)

    def _constant(self, size: torch.Size) -> Tensor:
        """The part of the output that no input changes, (C_out, *out)."""
        if torch.compiler.is_compiling():
            return self._constant_of(size)
        key, last = (size, self.bias.device), self._last
        if last is None or last[0] != key:
            self._last = last = key, self._constant_of(size)
        return last[1]

    def _constant_of(self, size: torch.Size) -> Tensor:
        scale, centre = (factor.double().view(-1, 1, 1, 1) for factor in (self.scale, self.centre))
        taps = self.inputs_centre() * (self.whole_weight() * scale + centre).sum(1, keepdim=True)
        inside = F.pad(torch.ones(1, 1, *size, dtype=taps.dtype, device=taps.device), self.window.padding)
        constant = F.conv2d(inside, taps, self.bias.double(), self.window.stride, 0, self.window.dilation)
        return constant.squeeze(0).to(self.bias.dtype)


class IntegerConv2d(IntegerLayer):
    """Convolution of 8-bit codes with 32-bit sums.

    It takes floats, which `encoder` turns into codes, or codes if that is None; `zero` is the code of 0. With `low` and
    `high` set it returns the next layer's codes, ``clamp(round(acc · scale_c + bias_c), low, high)``.

    A weight beyond 8 bits, such as one with 2^8 levels around 0, is the sum of several: its input channels are taken
    that many times (`taken`). Without a fast multiplication of 8-bit integers it stays a single 16-bit weight.
    """

    weight: Tensor
    taken: Tensor | None

    def __init__(
        self, codes: Tensor, window: Window, scale: Tensor, bias: Tensor, encoder: Encode, zero: int = 0
    ) -> None:
        super().__init__(window, scale, bias)
        weight, taken = operators.of_8_bits(codes, window.groups)
        if taken is not None and not onednn.has_fast_integers():
            weight, taken = codes.to(torch.int16), None
        self.register_buffer("weight", weight)
        self.register_buffer("taken", taken)
        self.channels = codes.shape[1] * window.groups, len(codes)
        self.encoder: Encode | None = encoder
        self.zero = zero
        self.low: int | None = None
        self.high: int | None = None

    def forward(self, input: Tensor) -> Tensor:
        """Floats, or codes (N, C_out, *out)."""
        return self._run(self._encoded(input), self.scale, self.bias, self.low, self.high)

    def codes(self, input: Tensor) -> Tensor:
        return self._encoded(input).to(torch.int16) - self.zero

    def handed(self, values: Tensor) -> Tensor:
        """Return the whole numbers as passed to the next layer; the inverse of `codes`."""
        return (values + self.zero).to(operators.code_dtype(int(values.min()) + self.zero if values.numel() else 0))

    def sums(self, input: Tensor) -> Tensor:
        return self._run(self._encoded(input))

    def whole_weight(self) -> Tensor:
        if self.taken is None:
            return self.weight
        (inputs, outputs), groups = self.channels, self.window.groups
        of_group = (self.taken.view(groups, -1) % (inputs // groups)).repeat_interleave(outputs // groups, 0)
        places = of_group[..., None, None].expand(self.weight.shape)
        whole = torch.zeros(outputs, inputs // groups, *self.weight.shape[2:], dtype=torch.int16)
        return whole.scatter_add_(1, places, self.weight.to(torch.int16))

    def _encoded(self, input: Tensor) -> Tensor:
        if self.encoder is None:
            return input
        if not input.is_floating_point():  # images, which would be taken for codes
            raise _not_floating(input)
        return self.encoder(input)

    def _run(self, codes: Tensor, *result: Any) -> Tensor:
        codes = codes if self.taken is None else codes.index_select(1, self.taken)
        return torch.ops.qconv.integer_conv2d(codes, self.weight, *self.window, *result, zero=self.zero)

    def round_(self, scale: Tensor, bias: Tensor, low: int, high: int) -> None:
        """Switch to codes as outputs."""
        self.scale, self.bias, self.low, self.high = scale, bias, low, high

    def gives(self) -> str:
        return "floats" if self.low is None else f"codes {self.low} to {self.high}"


def _not_floating(input: Tensor) -> TypeError:
    """Return the trained layer's error for an input that is not floating."""
    return TypeError(f"input has dtype {input.dtype}; it must be a floating dtype: call input.to(torch.float32)")


class ShiftConv2d(IntegerLayer):
    """Convolution of fixed-point numbers with powers of two: 8-bit convolutions, shifts and 64-bit sums."""

    def __init__(self, codes: Tensor, window: Window, scale: Tensor, bias: Tensor, encoder: Encode) -> None:
        super().__init__(window, scale, bias)
        self.encoder = encoder
        self.channels = codes.shape[1] * window.groups, len(codes)
        weights, self.places = operators.digits_of_shifts(codes)
        for index, weight in enumerate(weights):  # not in one tensor: kernels keep what they make of each
            self.register_buffer(f"weight_{index}", weight)

    def forward(self, input: Tensor) -> Tensor:
        """Floats (N, C_out, *out)."""
        scaled = self.sums(input) * self.scale.view(-1, 1, 1) + self.bias.view(-1, 1, 1)
        return scaled.to(torch.float32)

    def codes(self, input: Tensor) -> Tensor:
        if not input.is_floating_point():
            raise _not_floating(input)
        return self.encoder(input)

    def sums(self, input: Tensor) -> Tensor:
        stride, padding, dilation, groups, value = self.window
        codes = self.codes(input)
        if value != 0:  # the operator pads with zeros
            codes, padding = self.window.pad(codes), (0, 0, 0, 0)
        return torch.ops.qconv.shift_conv2d(codes, self._weights(), self.places, stride, padding, dilation, groups)

    def whole_weight(self) -> Tensor:
        return sum(weight.long() << place for weight, place in zip(self._weights(), self.places, strict=True))  # pyright: ignore

    def _weights(self) -> list[Tensor]:
        return [self.get_buffer(f"weight_{index}") for index in range(len(self.places))]
