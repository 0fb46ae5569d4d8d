"""Quantized convolutions, written once for 1, 2 and 3 dimensions."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal, cast

import torch.nn.functional as F
from torch import Tensor, fx, nn

from ..function.operations import Convolution, TransposedConvolution, exchange_channels
from ..ground.checks import check_ints, check_whole
from ..quantizers import input_scale
from ..scheme import Factory, Scheme
from .arguments import as_node, check_input, chosen
from .base import QuantizedLayer

Size = int | tuple[int, ...]
PaddingMode = Literal["zeros", "reflect", "replicate", "circular"]


class _QConv(QuantizedLayer):
    """Constructor and forward of `QConv1d`, `QConv2d` and `QConv3d`."""

    dimensions: ClassVar[int]
    in_channels: int
    groups: int
    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...] | str
    dilation: tuple[int, ...]
    padding_mode: PaddingMode
    padding_value: int

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Size,
        stride: Size = 1,
        padding: Size | str = 0,
        dilation: Size = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: PaddingMode = "zeros",
        device: Any = None,
        dtype: Any = None,
        *,
        scheme: Scheme | None = None,
        padding_value: int | None = None,
        grad_quantizer: Factory | None = None,
    ) -> None:
        check_groups(in_channels, out_channels, groups)
        _check_sizes(self.dimensions, padding, kernel_size=kernel_size, stride=stride, dilation=dilation)
        geometry = in_channels, out_channels, kernel_size, stride, padding, dilation, groups
        super().__init__(*geometry, bias, padding_mode, device, dtype)
        self.set_scheme(chosen(scheme, grad_quantizer))
        if padding_value is not None:
            replace(self.scheme, padding_value=padding_value)  # checks it
            if padding_value and padding_mode != "zeros":
                raise ValueError(f"padding_value (={padding_value}) needs padding_mode='zeros', not {padding_mode!r}")
            self.padding_value = padding_value

    def set_scheme(self, scheme: Scheme | None) -> None:
        super().set_scheme(scheme)
        self.padding_value = self.scheme.padding_value if self.padding_mode == "zeros" else 0

    @property
    def padding_sides(self) -> list[int]:
        """The padding in the order of `torch.nn.functional.pad`; follows changes of ``padding`` and ``dilation``."""
        return sides_of(self)

    @property
    def border_value(self) -> int:
        """Return the value around the quantized input: `padding_value` while the input is signs, else 0."""
        return self.padding_value if self.input_quantizer.at_work.signs else 0

    @property
    def op(self) -> Convolution:
        """The convolution of this layer, without the padding that `forward` adds to the float input."""
        if self.padding_mode != "zeros":
            return self.padded_op([0] * 2 * len(self.stride))
        return self.padded_op(self.padding_sides)

    def padded(self, input: Tensor) -> Tensor:
        batch = input.unsqueeze(0) if input.ndim == len(self.kernel_size) + 1 else input
        return batch if self.padding_mode == "zeros" else F.pad(batch, self.padding_sides, mode=self.padding_mode)

    @property
    def pads_by_size(self) -> bool:
        """Whether `sides_for` depends on the size."""
        return False

    def sides_for(self, size: Sequence[int]) -> list[int]:
        """Return `padding_sides`, for an input of this size; layers that pad by it override this."""
        return self.padding_sides

    def operation(self, input: Tensor) -> Convolution:
        """Return `op`, with the padding for this input."""
        return self.padded_op(self.sides_for(input.shape[2:])) if self.padding_mode == "zeros" else self.op

    def padded_op(self, both_sides: list[int]) -> Convolution:
        """Return the convolution with this padding around the quantized input."""
        zeros = (0,) * len(self.stride)
        if self.border_value and any(both_sides):
            value = float(self.border_value)
            return Convolution(self.stride, zeros, self.dilation, self.groups, tuple(both_sides), value)
        # "same" pads an odd total once more on the right; the convolution itself pads what is equal on both sides.
        left, right = both_sides[0::2], both_sides[1::2]
        border = tuple(side for a, b in zip(left, right, strict=True) for side in (0, b - a)) if left != right else ()
        return Convolution(self.stride, tuple(reversed(left)), self.dilation, self.groups, border)

    def forward(self, input: Tensor) -> Tensor:
        if isinstance(input, fx.Proxy):
            return as_node(self, input)
        check_input(self, input)
        ndim = len(self.kernel_size) + 2
        check_shape(input, ndim, self.in_channels)
        if input.ndim == ndim - 1:
            return _QConv.forward(self, input.unsqueeze(0)).squeeze(0)
        input = self.padded(input)
        op = self.operation(input)
        if not self.has_scale_map:
            return self.apply_op(input, op, self.bias)
        output = self.apply_op(input, op, None)
        output = output * self._scale_map(input, op).to(output.dtype)
        return output if self.bias is None else output + self.bias.to(output.dtype).view(-1, *[1] * len(self.stride))

    def _scale_map(self, input: Tensor, op: Convolution) -> Tensor:
        if op.border:
            input = F.pad(input, op.border)
        scale = input_scale(input, self.kernel_size, op.stride, op.padding, op.dilation, op.groups)
        return scale.repeat_interleave(cast(int, self.out_channels) // op.groups, 1)

    def extra_repr(self) -> str:
        return super().extra_repr() + (f", padding_value={self.padding_value}" if self.padding_value else "")


class QConv1d(_QConv, nn.Conv1d):
    """`torch.nn.Conv1d` with quantized weight and input.

    ``output = conv(pad(input_q), weight_q) + bias``; shapes ``(N, C_in, L)`` or ``(C_in, L)``. The arguments are those
    of `torch.nn.Conv1d`; ``scheme`` is BWN by default; ``padding_value`` (0, +1 or -1, by default the scheme's) pads
    the quantized input: 0 adds a third value to a binary input. The other padding modes pad the float input, so that a
    scale or a range that depends on all values counts those at the border again.

    Raises:
        ValueError: channels that groups do not divide, or a padding value that is none of the three.
        TypeError: a scheme that is none, or an integer input.
    """

    float_type = nn.Conv1d
    dimensions = 1


class QConv2d(_QConv, nn.Conv2d):
    """`torch.nn.Conv2d` with quantized weight and input.

    ``output = conv(pad(input_q), weight_q) + bias``; shapes ``(N, C_in, H, W)`` or ``(C_in, H, W)``. The arguments are
    as in `torch.nn.Conv2d`; ``scheme`` is BWN by default; ``padding_value`` (0, +1 or -1, by default the scheme's)
    pads the quantized input: 0 adds a third value to a binary input. The other padding modes pad the float input, so
    that a scale or a range that depends on all values counts those at the border again.

    Raises:
        ValueError: channels that groups do not divide, or a padding value that is none of the three.
        TypeError: a scheme that is none, or an integer input.

    Example:
        >>> layer = QConv2d(64, 128, 3, padding=1)
        >>> layer(torch.randn(2, 64, 8, 8)).shape
        torch.Size([2, 128, 8, 8])
        >>> layer.quantized_weight()[0].unique().numel()  # -alpha and +alpha
        2
    """

    float_type = nn.Conv2d
    dimensions = 2


class QConv3d(_QConv, nn.Conv3d):
    """`torch.nn.Conv3d` with quantized weight and input.

    ``output = conv(pad(input_q), weight_q) + bias``; shapes ``(N, C_in, D, H, W)`` or ``(C_in, D, H, W)``. The
    arguments are as in `torch.nn.Conv3d`; ``scheme`` is BWN by default; ``padding_value`` (0, +1 or -1, by default
    the scheme's) pads the quantized input: 0 adds a third value to a binary input. The other padding modes pad the
    float input, so that a scale or a range that depends on all values counts those at the border again.

    Raises:
        ValueError: channels that groups do not divide, or a padding value that is none of the three.
        TypeError: a scheme that is none, or an integer input.
    """

    float_type = nn.Conv3d
    dimensions = 3


class _QConvTranspose(QuantizedLayer):
    """Constructor and forward of `QConvTranspose1d`, `QConvTranspose2d` and `QConvTranspose3d`."""

    dimensions: ClassVar[int]
    in_channels: int
    groups: int
    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...] | str
    dilation: tuple[int, ...]

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Size,
        stride: Size = 1,
        padding: Size = 0,
        output_padding: Size = 0,
        groups: int = 1,
        bias: bool = True,
        dilation: Size = 1,
        padding_mode: PaddingMode = "zeros",
        device: Any = None,
        dtype: Any = None,
        *,
        scheme: Scheme | None = None,
        padding_value: int | None = None,
        grad_quantizer: Factory | None = None,
    ) -> None:
        check_groups(in_channels, out_channels, groups)
        _check_sizes(self.dimensions, padding, kernel_size=kernel_size, stride=stride, dilation=dilation)
        check_ints("output_padding", output_padding, self.dimensions, least=0)
        if padding_value:
            raise ValueError(
                f"padding_value (={padding_value}) must be 0: a transposed convolution's padding crops its output"
            )
        geometry = in_channels, out_channels, kernel_size, stride, padding, output_padding, groups
        super().__init__(*geometry, bias, dilation, padding_mode, device, dtype)
        self.set_scheme(chosen(scheme, grad_quantizer))

    @classmethod
    def check_scheme(cls, scheme: Scheme) -> None:
        if scheme.scale_map:
            raise ValueError("scale_map (=True) is defined for convolutions, not for transposed ones")

    def filters(self) -> Tensor:
        return exchange_channels(self.weight, self.groups)

    def from_filters(self, filters: Tensor) -> Tensor:
        return exchange_channels(filters, self.groups)

    def operation(self, input: Tensor, output_size: list[int] | None = None) -> TransposedConvolution:
        """The operation that runs on the quantized tensors."""
        padding = cast(tuple[int, ...], self.padding)
        output_padding = cast(nn.ConvTranspose2d, self)._output_padding(  # shared by the twins
            input,
            output_size,
            list(self.stride),
            list(padding),
            list(self.kernel_size),
            len(padding),
            list(self.dilation),
        )
        return TransposedConvolution(self.stride, padding, tuple(output_padding), self.dilation, self.groups)

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        if isinstance(input, fx.Proxy):
            return as_node(self, input, output_size)
        check_input(self, input)
        ndim = len(self.kernel_size) + 2
        check_shape(input, ndim, self.in_channels)
        op = self.operation(input, output_size)
        if input.ndim == ndim - 1:
            return self.apply_op(input.unsqueeze(0), op, self.bias).squeeze(0)
        return self.apply_op(input, op, self.bias)


class QConvTranspose1d(_QConvTranspose, nn.ConvTranspose1d):
    """`torch.nn.ConvTranspose1d` with quantized weight and input; see `QConv2d` for ``scheme``.

    Scales are per output channel. ``padding_value`` must be 0: the padding crops the output.
    """

    float_type = nn.ConvTranspose1d
    dimensions = 1


class QConvTranspose2d(_QConvTranspose, nn.ConvTranspose2d):
    """`torch.nn.ConvTranspose2d` with quantized weight and input; see `QConv2d` for ``scheme``.

    Scales are per output channel. ``padding_value`` must be 0: the padding crops the output.
    """

    float_type = nn.ConvTranspose2d
    dimensions = 2


class QConvTranspose3d(_QConvTranspose, nn.ConvTranspose3d):
    """`torch.nn.ConvTranspose3d` with quantized weight and input; see `QConv2d` for ``scheme``.

    Scales are per output channel. ``padding_value`` must be 0: the padding crops the output.
    """

    float_type = nn.ConvTranspose3d
    dimensions = 3


def sides_of(conv: Any) -> list[int]:
    """Return the padding of one of torch's convolutions, or of these, in the order of `torch.nn.functional.pad`."""
    if isinstance(conv.padding, str):
        spans = zip(conv.dilation, conv.kernel_size, strict=True)
        return same_sides([d * (k - 1) if conv.padding == "same" else 0 for d, k in spans])
    return [side for padding in reversed(conv.padding) for side in (padding, padding)]


def same_sides(totals: Sequence[int]) -> list[int]:
    """Split totals of padding, in the order of `torch.nn.functional.pad`; an odd one has one more at the end."""
    return [side for total in reversed(totals) for side in (total // 2, total - total // 2)]


def check_groups(in_channels: int, out_channels: int, groups: int) -> None:
    """Raise a ValueError unless the three are whole numbers, and groups divide the channels."""
    for name, value in (("in_channels", in_channels), ("out_channels", out_channels), ("groups", groups)):
        check_whole(name, value)
    if groups < 1:
        raise ValueError(f"groups (={groups}) must be positive")
    for name, channels in (("in_channels", in_channels), ("out_channels", out_channels)):
        if channels % groups:
            raise ValueError(f"groups (={groups}) must divide {name} (={channels})")


def _check_sizes(count: int, padding: Size | str, **sizes: Size) -> None:
    """Raise a ValueError that names the first of the sizes that is wrong; torch checks a padding that is a word."""
    for name, size in sizes.items():
        check_ints(name, size, count, least=1)
    if not isinstance(padding, str):
        check_ints("padding", padding, count, least=0)


def check_shape(input: Tensor, ndim: int, in_channels: int, unbatched: bool = True) -> None:
    """Raise a ValueError unless the input has ``ndim`` dimensions, or one less, and ``in_channels`` channels."""
    if input.ndim != ndim and not (unbatched and input.ndim == ndim - 1):
        less = f", or {ndim - 1} unbatched" if unbatched else ""
        raise ValueError(f"input has shape {tuple(input.shape)}; it must have {ndim} dimensions{less}")
    dim = input.ndim - ndim + 1
    if input.shape[dim] != in_channels:
        raise ValueError(
            f"input has shape {tuple(input.shape)}; its dimension {dim} must be in_channels (={in_channels})"
        )
