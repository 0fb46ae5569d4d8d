"""qconv: train convolutional networks with binary, ternary, power-of-two and low-bit weights in PyTorch."""

from importlib import import_module
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
from .lean import lean as lean
from .lifecycle.calibrate import calibrate as calibrate
from .lifecycle.steps import (
    after_every_step as after_every_step,
    after_step as after_step,
    set_progress as set_progress,
)
from .optim import parameter_groups as parameter_groups
from .quantizers import Quantizer as Quantizer
from .scheme import Scheme as Scheme
from .sensitivity import Sensitivity as Sensitivity, sensitivity as sensitivity
from .summary import summarize as summarize, summary as summary
from .summary.table import Summary as Summary

if TYPE_CHECKING:
    from . import (
        bench as bench,
        cli as cli,
        data as data,
        environment as environment,
        hub as hub,
        images as images,
        inference as inference,
        models as models,
        onnx as onnx,
        packed as packed,
        predict as predict,
        training as training,
        zoo as zoo,
    )
    from .bench.model import compare_models as compare_models
    from .inference import freeze as freeze, verify as verify
    from .layers import (
        DeformConv2dPack as DeformConv2dPack,
        QDeformConv2d as QDeformConv2d,
        QDeformConv2dPack as QDeformConv2dPack,
    )
    from .onnx import export_onnx as export_onnx
    from .packed import PackedFileError as PackedFileError, load_packed as load_packed, save_packed as save_packed
    from .zoo import load as load

grad_composed, grad_deform = grad.composed, grad.deform
__version__ = "0.1.0"

_LATER = {
    # names that are imported on first use, and their modules; the first of these are modules themselves
    **{name: name for name in ("bench", "cli", "data", "environment", "images", "inference")},
    **{name: name for name in ("hub", "models", "onnx", "packed", "predict", "training", "zoo")},
    **dict.fromkeys(("DeformConv2dPack", "QDeformConv2d", "QDeformConv2dPack"), "layers"),
    **dict.fromkeys(("PackedFileError", "load_packed", "save_packed"), "packed"),
    **dict.fromkeys(("freeze", "verify"), "inference"),
    "export_onnx": "onnx",
    "compare_models": "bench.model",
    "load": "zoo",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    place = _LATER[name]
    try:
        module = import_module(f".{place}", __name__)
    except ModuleNotFoundError as error:
        raise ImportError(f'{__name__}.{name} needs {error.name}: pip install "qconv[train]"') from error
    return module if name == place else getattr(module, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER} - {"TYPE_CHECKING", "Any", "import_module"})
