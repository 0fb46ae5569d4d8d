"""qconv: train convolutional networks with binary, ternary, power-of-two and low-bit weights in PyTorch."""

from typing import TYPE_CHECKING, Any

from . import distillation as distillation
from . import grad as grad
from . import grad_composed as grad_composed
from . import grad_deform as grad_deform
from . import layers as layers
from . import optim as optim
from . import quantizers as quantizers
from . import schemes as schemes
from .calibrate import calibrate as calibrate
from .convert import Plan as Plan
from .convert import convert as convert
from .convert import float_state_dict as float_state_dict
from .convert import plan as plan
from .convert import to_float as to_float
from .layers import BNNConv2d as BNNConv2d
from .layers import BWNConv2d as BWNConv2d
from .layers import Conv2dShift as Conv2dShift
from .layers import Conv2dShiftQ as Conv2dShiftQ
from .layers import QConv1d as QConv1d
from .layers import QConv2d as QConv2d
from .layers import QConv3d as QConv3d
from .layers import QConvTranspose1d as QConvTranspose1d
from .layers import QConvTranspose2d as QConvTranspose2d
from .layers import QConvTranspose3d as QConvTranspose3d
from .layers import QLinear as QLinear
from .layers import QuantizedLayer as QuantizedLayer
from .layers import XNORConv2d as XNORConv2d
from .optim import parameter_groups as parameter_groups
from .quantizers import Quantizer as Quantizer
from .schemes import Scheme as Scheme
from .steps import after_every_step as after_every_step
from .steps import after_step as after_step
from .steps import set_progress as set_progress
from .summary import summarize as summarize
from .summary import summary as summary
from .summary_table import Summary as Summary

if TYPE_CHECKING:
    from .inference import freeze as freeze
    from .inference import verify as verify
    from .layers import DeformConv2dPack as DeformConv2dPack
    from .layers import QDeformConv2d as QDeformConv2d
    from .layers import QDeformConv2dPack as QDeformConv2dPack
    from .onnx import export_onnx as export_onnx
    from .packed import PackedFileError as PackedFileError
    from .packed import load_packed as load_packed
    from .packed import save_packed as save_packed

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name in ("DeformConv2dPack", "QDeformConv2d", "QDeformConv2dPack"):
        return getattr(layers, name)  # imports torchvision
    if name in ("PackedFileError", "load_packed", "save_packed"):
        from . import packed  # imports pydantic and safetensors

        return getattr(packed, name)
    if name in ("freeze", "verify"):
        from . import inference

        return getattr(inference, name)
    if name == "export_onnx":
        from . import onnx

        return onnx.export_onnx
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
