"""Quantized forms of timm's convolutions and linear layer; importing this imports timm.

``QStdConv2d(…, scheme=…)`` takes the arguments of ``timm.layers.StdConv2d``, and so on; `qconv.convert` finds them.
"""

from typing import Any

from timm.layers.conv2d_same import Conv2dSame
from timm.layers.linear import Linear
from timm.layers.std_conv import ScaledStdConv2d, ScaledStdConv2dSame, StdConv2d, StdConv2dSame
from torch import nn

from ..scheme import Factory, Scheme
from .arguments import chosen
from .base import QuantizedLayer
from .conv import QConv2d
from .linear import QLinear
from .variants import SamePadded, StandardizedFilters


class _OfTimm(QuantizedLayer):
    """Constructor: timm's arguments, then the scheme."""

    described_as = nn.Conv2d

    def __init__(
        self, *args: Any, scheme: Scheme | None = None, grad_quantizer: Factory | None = None, **kwargs: Any
    ) -> None:
        self.float_type.__init__(self, *args, **kwargs)
        self.set_scheme(chosen(scheme, grad_quantizer))


class QConv2dSame(_OfTimm, SamePadded, Conv2dSame):
    """``timm.layers.Conv2dSame`` with quantized weight and input; see `SamePadded`."""

    float_type = Conv2dSame


class QStdConv2d(_OfTimm, StandardizedFilters, QConv2d, StdConv2d):  # pyright: ignore
    """``timm.layers.StdConv2d`` with quantized weight and input; see `StandardizedFilters`."""

    float_type = StdConv2d
    own_arguments = ("eps",)


class QStdConv2dSame(_OfTimm, StandardizedFilters, SamePadded, StdConv2dSame):
    """``timm.layers.StdConv2dSame`` with quantized weight and input; see `StandardizedFilters` and `SamePadded`."""

    float_type = StdConv2dSame
    own_arguments = ("eps", "same_pad")


class QScaledStdConv2d(_OfTimm, StandardizedFilters, QConv2d, ScaledStdConv2d):  # pyright: ignore
    """``timm.layers.ScaledStdConv2d`` with quantized weight and input; see `StandardizedFilters`."""

    float_type = ScaledStdConv2d
    own_arguments = ("eps", "scale")


class QScaledStdConv2dSame(_OfTimm, StandardizedFilters, SamePadded, ScaledStdConv2dSame):
    """``timm.layers.ScaledStdConv2dSame`` with quantized weight and input; see there and `SamePadded`."""

    float_type = ScaledStdConv2dSame
    own_arguments = ("eps", "scale", "same_pad")


class QTimmLinear(_OfTimm, QLinear, Linear):
    """``timm.layers.Linear`` with quantized weight and input, as `QLinear`."""

    float_type = Linear
    described_as = nn.Linear
