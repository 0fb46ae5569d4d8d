"""Quantized layers, each a subclass of its float twin."""

from typing import TYPE_CHECKING, Any

from .base import QuantizedLayer as QuantizedLayer
from .conv import (
    QConv1d as QConv1d,
    QConv2d as QConv2d,
    QConv3d as QConv3d,
    QConvTranspose1d as QConvTranspose1d,
    QConvTranspose2d as QConvTranspose2d,
    QConvTranspose3d as QConvTranspose3d,
)
from .linear import QLinear as QLinear
from .named import (
    BNNConv2d as BNNConv2d,
    BWNConv2d as BWNConv2d,
    Conv2dShift as Conv2dShift,
    Conv2dShiftQ as Conv2dShiftQ,
    XNORConv2d as XNORConv2d,
)
from .variants import (
    ComputedFilters as ComputedFilters,
    SamePadded as SamePadded,
    StandardizedFilters as StandardizedFilters,
)

OF_TIMM = ("QConv2dSame", "QStdConv2d", "QStdConv2dSame", "QScaledStdConv2d", "QScaledStdConv2dSame", "QTimmLinear")
"""The quantized forms of timm's layers; to look one up imports timm."""

if TYPE_CHECKING:
    from .deform import (
        DeformConv2dPack as DeformConv2dPack,
        QDeformConv2d as QDeformConv2d,
        QDeformConv2dPack as QDeformConv2dPack,
    )
    from .of_timm import (
        QConv2dSame as QConv2dSame,
        QScaledStdConv2d as QScaledStdConv2d,
        QScaledStdConv2dSame as QScaledStdConv2dSame,
        QStdConv2d as QStdConv2d,
        QStdConv2dSame as QStdConv2dSame,
        QTimmLinear as QTimmLinear,
    )


def __getattr__(name: str) -> Any:
    if name in ("DeformConv2dPack", "QDeformConv2d", "QDeformConv2dPack"):
        from . import deform  # imports torchvision, which the other layers do without

        return getattr(deform, name)
    if name in OF_TIMM:
        from . import of_timm

        return getattr(of_timm, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
