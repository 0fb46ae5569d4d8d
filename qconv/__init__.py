"""qconv: train convolutional networks with binary, ternary, power-of-two and low-bit weights in PyTorch.

Begin with these names:

- quantize a network: `schemes`, `plan`, `convert`, `to_float`
- train it in your own loop: `after_every_step`, `set_progress`, `calibrate`, `check`, `lean`
- measure it: `summary`
- ship it: `save_packed`, `load_packed`, `freeze`, `verify`, `export_onnx`

The command ``qconv train --help`` trains without code. `qconv.layers` has the layers, such as `QConv2d`.

Nothing but this file is imported before it is used, so that the program ``qconv`` answers at once.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import (
        bench as bench,
        cli as cli,
        data as data,
        distillation as distillation,
        grad as grad,
        images as images,
        inference as inference,
        layers as layers,
        methods as methods,
        models as models,
        onnx as onnx,
        optim as optim,
        packed as packed,
        program as program,
        quantizers as quantizers,
        schemes as schemes,
        training as training,
        zoo as zoo,
    )
    from .after_training.bias_correction import BiasCorrection as BiasCorrection, correct_bias as correct_bias
    from .after_training.bit_assignment import BitAssignment as BitAssignment, assign_bits as assign_bits
    from .after_training.ewgs_deltas import set_ewgs_deltas as set_ewgs_deltas
    from .after_training.reconstruct import Reconstruction as Reconstruction, reconstruct as reconstruct
    from .after_training.sensitivity import Sensitivity as Sensitivity, sensitivity as sensitivity
    from .bench.forms import compare_models as compare_models
    from .check import check as check
    from .check.diagnostics import Diagnostics as Diagnostics
    from .convert import (
        Plan as Plan,
        convert as convert,
        float_state_dict as float_state_dict,
        plan as plan,
        to_float as to_float,
    )
    from .export import export as export, verify_export as verify_export
    from .grad import composed, deform
    from .ground import environment as environment
    from .inference import freeze as freeze, save_program as save_program, verify as verify
    from .layers import (
        BNNConv2d as BNNConv2d,
        BWNConv2d as BWNConv2d,
        Conv2dShift as Conv2dShift,
        Conv2dShiftQ as Conv2dShiftQ,
        DeformConv2dPack as DeformConv2dPack,
        QConv1d as QConv1d,
        QConv2d as QConv2d,
        QConv3d as QConv3d,
        QConvTranspose1d as QConvTranspose1d,
        QConvTranspose2d as QConvTranspose2d,
        QConvTranspose3d as QConvTranspose3d,
        QDeformConv2d as QDeformConv2d,
        QDeformConv2dPack as QDeformConv2dPack,
        QLinear as QLinear,
        QuantizedLayer as QuantizedLayer,
        XNORConv2d as XNORConv2d,
    )
    from .lean import lean as lean
    from .loop.calibrate import calibrate as calibrate
    from .loop.optimizer_step import (
        after_every_step as after_every_step,
        after_step as after_step,
        set_progress as set_progress,
    )
    from .onnx import export_onnx as export_onnx
    from .optim import parameter_groups as parameter_groups
    from .packed import PackedFileError as PackedFileError, load_packed as load_packed, save_packed as save_packed
    from .quantizers import Quantizer as Quantizer
    from .scheme import Scheme as Scheme
    from .summary import summarize as summarize, summary as summary
    from .summary.costs_table import Summary as Summary
    from .zoo import hub as hub, load as load, predict as predict

    grad_composed = composed
    grad_deform = deform

__version__ = "0.1.0"

# The same at run time: the names that other modules than those of their own name define.
_PLACES = {
    "after_training.bias_correction": ("BiasCorrection", "correct_bias"),
    "after_training.bit_assignment": ("BitAssignment", "assign_bits"),
    "after_training.ewgs_deltas": ("set_ewgs_deltas",),
    "after_training.reconstruct": ("Reconstruction", "reconstruct"),
    "after_training.sensitivity": ("Sensitivity", "sensitivity"),
    "bench.forms": ("compare_models",),
    "check": ("check",),
    "check.diagnostics": ("Diagnostics",),
    "convert": ("Plan", "convert", "float_state_dict", "plan", "to_float"),
    "export": ("export", "verify_export"),
    "inference": ("freeze", "save_program", "verify"),
    "layers": (
        *("BNNConv2d", "BWNConv2d", "Conv2dShift", "Conv2dShiftQ", "XNORConv2d", "QuantizedLayer"),
        *("QConv1d", "QConv2d", "QConv3d", "QConvTranspose1d", "QConvTranspose2d", "QConvTranspose3d", "QLinear"),
        *("DeformConv2dPack", "QDeformConv2d", "QDeformConv2dPack"),
    ),
    "lean": ("lean",),
    "loop.calibrate": ("calibrate",),
    "loop.optimizer_step": ("after_every_step", "after_step", "set_progress"),
    "onnx": ("export_onnx",),
    "optim": ("parameter_groups",),
    "packed": ("PackedFileError", "load_packed", "save_packed"),
    "quantizers": ("Quantizer",),
    "scheme": ("Scheme",),
    "summary": ("summarize", "summary"),
    "summary.costs_table": ("Summary",),
    "zoo": ("load",),
}
_OF_EXTRAS = {
    *("data", "hub", "images", "predict", "training"),
    *("DeformConv2dPack", "QDeformConv2d", "QDeformConv2dPack"),
}
_LATER = {name: place for place, names in _PLACES.items() for name in names}
_PUBLIC = (
    *("bench", "cli", "data", "distillation", "grad", "images", "inference", "layers", "methods", "models"),
    *("onnx", "optim", "packed", "program", "quantizers", "schemes", "training", "zoo"),
)
_MODULES = {
    **{name: name for name in _PUBLIC},
    "environment": "ground.environment",
    "hub": "zoo.hub",
    "predict": "zoo.predict",
    "grad_composed": "grad.composed",
    "grad_deform": "grad.deform",
}


class _Package(ModuleType):
    """A package that keeps its functions of the same names as modules: to import `qconv.convert` assigns the module."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _LATER and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    if name == "__all__":  # for `from qconv import *`: what needs no extra
        return [each for each in __dir__() if not each.startswith("__") and each not in _OF_EXTRAS]
    if name not in _LATER and name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .ground.extras import needed

    with needed(f"{__name__}.{name}"):
        if name in _MODULES:
            return import_module(f".{_MODULES[name]}", __name__)
        found = getattr(import_module(f".{_LATER[name]}", __name__), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({"__version__", "__doc__", "__name__", "__path__", "__file__", *_LATER, *_MODULES})
