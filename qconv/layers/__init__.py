"""Quantized layers, each a subclass of its float twin."""

from typing import TYPE_CHECKING, Any

from .base import QuantizedLayer as QuantizedLayer
from .conv import QConv1d as QConv1d
from .conv import QConv2d as QConv2d
from .conv import QConv3d as QConv3d
from .conv import QConvTranspose1d as QConvTranspose1d
from .conv import QConvTranspose2d as QConvTranspose2d
from .conv import QConvTranspose3d as QConvTranspose3d
from .linear import QLinear as QLinear
from .named import BNNConv2d as BNNConv2d
from .named import BWNConv2d as BWNConv2d
from .named import Conv2dShift as Conv2dShift
from .named import Conv2dShiftQ as Conv2dShiftQ
from .named import XNORConv2d as XNORConv2d

if TYPE_CHECKING:
    from .deform import DeformConv2dPack as DeformConv2dPack
    from .deform import QDeformConv2d as QDeformConv2d
    from .deform import QDeformConv2dPack as QDeformConv2dPack


def __getattr__(name: str) -> Any:
    if name in ("DeformConv2dPack", "QDeformConv2d", "QDeformConv2dPack"):
        from . import deform  # imports torchvision, which the other layers do without

        return getattr(deform, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
