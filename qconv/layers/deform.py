"""Quantized deformable convolutions, v1 (arXiv:1703.06211) and v2, which has a mask (arXiv:1811.11168).

This module imports torchvision; `qconv` and `qconv.layers` import it when one of its names is first used.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from ..grad.deform import check_sizes, deform_conv2d_backward, marked, readable, wide
from ..ground.checks import check_ints
from ..ground.extras import needed
from ..scheme import Factory, Scheme
from .arguments import as_node, autocast_dtype, check_input, chosen
from .base import QuantizedLayer
from .conv import check_groups, check_shape

with needed("deformable convolution"):
    from torchvision.ops import DeformConv2d, deform_conv2d

Size = int | tuple[int, int]


@dataclass(frozen=True)
class DeformConvolution:
    """Deformable convolution in 2 dimensions, with offsets and, for v2, a mask as extra tensors."""

    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]

    def forward(self, input: Tensor, weight: Tensor, bias: Tensor | None, *extra: Tensor) -> Tensor:
        offset, mask = cast("tuple[Tensor, Tensor | None]", (*map(wide, extra), None)[:2])
        geometry = self.stride, self.padding, self.dilation, mask
        bias = None if bias is None else wide(bias)
        output = deform_conv2d(wide(input), readable(offset), wide(weight), bias, *geometry)
        return marked(output, offset).to(input.dtype)

    def backward(
        self, grad_output: Tensor, input: Tensor, weight: Tensor, output_mask: tuple[bool, ...], *extra: Tensor
    ) -> tuple[Tensor | None, ...]:
        offset, factors = (*extra, None)[:2]
        needs_input, needs_weight, needs_bias, needs_offset, needs_factors = (*output_mask, False)[:5]
        grad_input, grad_weight, grad_offset, grad_factors, grad_bias = deform_conv2d_backward(
            grad_output,
            input,
            weight,
            cast(Tensor, offset),
            factors,
            self.stride,
            self.padding,
            self.dilation,
            output_mask=(needs_input, needs_weight, needs_offset, needs_factors, needs_bias),
        )
        return grad_input, grad_weight, grad_bias, *(grad_offset, grad_factors)[: len(extra)]


class QDeformConv2d(QuantizedLayer, DeformConv2d):
    """`torchvision.ops.DeformConv2d` with quantized weight and input, v1 and v2.

    ``output = deform_conv2d(input_q, offset, weight_q, bias, mask)``: the quantized input is sampled, bilinearly and as
    0 outside its bounds; offset and mask are not quantized. The formulas are in `qconv.grad.deform`. Shapes:
    input ``(N, C_in, H, W)``, offset ``(N, 2·kh·kw·D, H', W')`` for D groups of offsets, y before x for each tap, mask
    ``(N, kh·kw·D, H', W')`` or None, output ``(N, C_out, H', W')``; N may be 0. An offset of NaN makes its pixel NaN.

    float16 and bfloat16 are computed in float32 and rounded once. Under autocast everything runs in float32 and the
    output has the input's dtype, as for torchvision's operator on CUDA.

    The arguments are as in `torchvision.ops.DeformConv2d`, plus ``device`` and ``dtype`` of the parameters; sizes
    are ints or pairs. ``scheme`` is BWN by default. ``padding_value``, here and in the scheme, must be 0: that is the
    value outside the input.

    Raises:
        ValueError: channels that groups do not divide, a padding value other than 0, a scheme with a scale map, or
            tensors with sizes that do not fit each other.
        TypeError: ``scheme`` is not a scheme, or tensors' dtypes differ from the weight's without autocast.

    Example:
        >>> layer = QDeformConv2d(64, 128, 3, padding=1)
        >>> input, offset, mask = torch.randn(2, 64, 8, 8), torch.randn(2, 18, 8, 8), torch.rand(2, 9, 8, 8)
        >>> layer(input, offset, mask).shape
        torch.Size([2, 128, 8, 8])
    """

    float_type = DeformConv2d
    kernel_size: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Size,
        stride: Size = 1,
        padding: Size = 0,
        dilation: Size = 1,
        groups: int = 1,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        scheme: Scheme | None = None,
        padding_value: int | None = None,
        grad_quantizer: Factory | None = None,
    ) -> None:
        check_groups(in_channels, out_channels, groups)
        _check_padding_value(padding_value)
        geometry = _geometry(kernel_size, stride, padding, dilation)
        DeformConv2d.__init__(self, in_channels, out_channels, *geometry, groups, bias)
        self.to(device=device, dtype=dtype)
        self.set_scheme(chosen(scheme, grad_quantizer))

    @classmethod
    def check_scheme(cls, scheme: Scheme) -> None:
        if scheme.scale_map:
            raise ValueError("scale_map (=True) is defined for convolutions, not for deformable ones")
        _check_padding_value(scheme.padding_value)

    @property
    def op(self) -> DeformConvolution:
        """The deformable convolution of this layer."""
        return DeformConvolution(self.stride, self.padding, self.dilation)

    def forward(self, input: Tensor, offset: Tensor, mask: Tensor | None = None) -> Tensor:
        if isinstance(input, fx.Proxy):
            return as_node(self, input, offset, mask)
        check_input(self, input)
        check_shape(input, 4, self.in_channels, unbatched=False)
        extra = (offset,) if mask is None else (offset, mask)
        for name, tensor in zip(("offset", "mask"), extra, strict=False):
            check_input(self, tensor, name)
        weight_shape = self.out_channels, self.in_channels // self.groups, *self.kernel_size
        sizes = input.shape, weight_shape, offset.shape, None if mask is None else mask.shape
        check_sizes(*sizes, self.stride, self.padding, self.dilation)

        def run(input: Tensor, *extra: Tensor) -> Tensor:
            bias = None if self.bias is None else self.bias.to(input.dtype)
            return self.apply_op(input, self.op, bias, *extra)

        return _autocast(run, input, *extra)

    def extra_repr(self) -> str:
        text = f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={self.stride}"
        text += f", padding={self.padding}" if self.padding != (0, 0) else ""
        text += f", dilation={self.dilation}" if self.dilation != (1, 1) else ""
        text += f", groups={self.groups}" if self.groups != 1 else ""
        text += ", bias=False" if self.bias is None else ""
        return text + super().extra_repr()


class OffsetConv2d(nn.Conv2d):
    """`torch.nn.Conv2d` that starts at 0, so that a deformable layer starts as an undeformed one.

    It is a separate class, which `qconv.convert` leaves float: offsets are positions.
    """

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class DeformConv2dPack(DeformConv2d):
    """`torchvision.ops.DeformConv2d` with a convolution that computes its offsets and masks from the input.

    ``offset, m = split(conv_offset(input))``, ``mask = sigmoid(m)``, ``output = deform_conv2d(input, offset, weight,
    bias, mask)``. The convolution has the layer's kernel, stride, padding and dilation, ``3·kh·kw·D`` output channels
    for D groups of offsets (the last third for the mask) or, for v1, ``2·kh·kw·D``, and starts at 0: the first masks
    are ½. DCNv2 trains it with a tenth of the learning rate. Shapes: ``(N, C_in, H, W)`` to ``(N, C_out, H', W')``.

    It is the float twin of `QDeformConv2dPack`. Its parameters have the names of mmcv's layers of this kind.

    Args:
        in_channels: C_in.
        out_channels: C_out.
        kernel_size: an int or a pair, as are stride, padding and dilation.
        stride: step of the kernel's positions.
        padding: zeros on both sides.
        dilation: step of the kernel's taps.
        groups: blocks of channels.
        bias: whether there is a bias.
        device: device of the parameters.
        dtype: dtype of the parameters.
        modulated: whether there is a mask: v2 (arXiv:1811.11168) instead of v1 (arXiv:1703.06211).
        offset_groups: D, the blocks of channels that share their offsets.

    Raises:
        ValueError: channels that groups or offset_groups do not divide.
    """

    kernel_size: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Size,
        stride: Size = 1,
        padding: Size = 0,
        dilation: Size = 1,
        groups: int = 1,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        modulated: bool = True,
        offset_groups: int = 1,
    ) -> None:
        check_groups(in_channels, out_channels, groups)
        if offset_groups < 1 or in_channels % offset_groups:
            raise ValueError(f"offset_groups (={offset_groups}) must divide in_channels (={in_channels})")
        geometry = _geometry(kernel_size, stride, padding, dilation)
        DeformConv2d.__init__(self, in_channels, out_channels, *geometry, groups, bias)
        self.modulated = modulated
        self.offset_groups = offset_groups
        channels = (3 if modulated else 2) * offset_groups * self.kernel_size[0] * self.kernel_size[1]
        self.conv_offset = OffsetConv2d(in_channels, channels, *geometry)
        self.to(device=device, dtype=dtype)

    def offset_and_mask(self, input: Tensor) -> tuple[Tensor, ...]:
        """Compute the offsets and, if ``modulated``, the mask by ``conv_offset``; under autocast, too, in float32."""
        if _autocasts(input):
            with torch.autocast(input.device.type, enabled=False):
                predicted = self.conv_offset(input.float())
        else:
            predicted = self.conv_offset(input)
        if not self.modulated:
            return (predicted,)
        third = predicted.shape[1] // 3
        offset, mask = predicted.split((2 * third, third), 1)
        return offset, mask.sigmoid()

    def forward(self, input: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        check_shape(input, 4, self.in_channels, unbatched=False)
        op = DeformConvolution(self.stride, self.padding, self.dilation)
        return _autocast(
            lambda x, *extra: op.forward(x, self.weight, self.bias, *extra), input, *self.offset_and_mask(input)
        )


class QDeformConv2dPack(QDeformConv2d, DeformConv2dPack):
    """`DeformConv2dPack` with quantized weight and input; see there, and `QDeformConv2d` for ``scheme``.

    ``conv_offset`` is a float convolution of the float input: offsets are positions and need this precision.

    Example:
        >>> layer = QDeformConv2dPack(64, 128, 3, padding=1)
        >>> layer(torch.randn(2, 64, 8, 8)).shape
        torch.Size([2, 128, 8, 8])
    """

    float_type = DeformConv2dPack

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Size,
        stride: Size = 1,
        padding: Size = 0,
        dilation: Size = 1,
        groups: int = 1,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        modulated: bool = True,
        offset_groups: int = 1,
        scheme: Scheme | None = None,
        padding_value: int | None = None,
        grad_quantizer: Factory | None = None,
    ) -> None:
        _check_padding_value(padding_value)
        geometry = in_channels, out_channels, kernel_size, stride, padding, dilation, groups
        DeformConv2dPack.__init__(
            self, *geometry, bias, device, dtype, modulated=modulated, offset_groups=offset_groups
        )
        self.set_scheme(chosen(scheme, grad_quantizer))

    def forward(self, input: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        if isinstance(input, fx.Proxy):
            return as_node(self, input)
        check_input(self, input)
        check_shape(input, 4, self.in_channels, unbatched=False)
        return QDeformConv2d.forward(self, input, *self.offset_and_mask(input))


def _geometry(kernel_size: Size, stride: Size, padding: Size, dilation: Size) -> tuple[Any, Any, Any, Any]:
    """The pairs that torchvision's constructor accepts, although its annotation says int."""
    return (
        check_ints("kernel_size", kernel_size, 2, 1),
        check_ints("stride", stride, 2, 1),
        check_ints("padding", padding, 2, 0),
        check_ints("dilation", dilation, 2, 1),
    )


def _check_padding_value(padding_value: int | None) -> None:
    if padding_value:
        raise ValueError(
            f"padding_value (={padding_value}) must be 0: it is what a deformable convolution samples outside its input"
        )


def _autocasts(input: Tensor) -> bool:
    return autocast_dtype(input.device.type) is not None and input.dtype != torch.float64


def _autocast(run: Callable[..., Tensor], input: Tensor, *extra: Tensor) -> Tensor:
    """Call ``run`` as torchvision autocasts its operator on CUDA: in float32, with the output in the input's dtype."""
    if not _autocasts(input):
        return run(input, *extra)
    with torch.autocast(input.device.type, enabled=False):
        return run(input.float(), *(tensor.float() for tensor in extra)).to(input.dtype)
