"""qconv: train convolutional networks with binary, ternary, power-of-two and low-bit weights in PyTorch."""

from typing import TYPE_CHECKING, Any

from . import (
    distillation as distillation,
    grad as grad,
    layers as layers,
    optim as optim,
    quantizers as quantizers,
    schemes as schemes,
)
from .convert import (
    Plan as Plan,
    convert as convert,
    float_state_dict as float_state_dict,
    plan as plan,
    to_float as to_float,
)
from .layers import (
    BNNConv2d as BNNConv2d,
    BWNConv2d as BWNConv2d,
    Conv2dShift as Conv2dShift,
    Conv2dShiftQ as Conv2dShiftQ,
    QConv1d as QConv1d,
    QConv2d as QConv2d,
    QConv3d as QConv3d,
    QConvTranspose1d as QConvTranspose1d,
    QConvTranspose2d as QConvTranspose2d,
    QConvTranspose3d as QConvTranspose3d,
    QLinear as QLinear,
    QuantizedLayer as QuantizedLayer,
    XNORConv2d as XNORConv2d,
)
from .lifecycle.calibrate import calibrate as calibrate
from .lifecycle.steps import (
    after_every_step as after_every_step,
    after_step as after_step,
    set_progress as set_progress,
)
from .optim import parameter_groups as parameter_groups
from .quantizers import Quantizer as Quantizer
from .scheme import Scheme as Scheme
from .summary import summarize as summarize, summary as summary
from .summary.table import Summary as Summary

if TYPE_CHECKING:
    from .inference import freeze as freeze, verify as verify
    from .layers import (
        DeformConv2dPack as DeformConv2dPack,
        QDeformConv2d as QDeformConv2d,
        QDeformConv2dPack as QDeformConv2dPack,
    )
    from .onnx import export_onnx as export_onnx
    from .packed import PackedFileError as PackedFileError, load_packed as load_packed, save_packed as save_packed

grad_composed, grad_deform = grad.composed, grad.deform
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
