"""Export of a trained model to an ONNX file."""

import copy
import logging
import os
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from .. import layers
from ..ground.extras import needed
from ..ground.files import atomic_file
from ..inference import FrozenModel
from ..inference.build import build
from ..inference.defaults import of_shipping
from ..inference.fixed_weight import FixedWeight
from ..inference.frozen_layers import IntegerConv2d, IntegerLayer, OffsetBinaryConv2d
from ..inference.one_magnitude import SignConv2d
from ..inference.parts import find, name_in_model
from ..packed.tensors import inner_model
from .any_size import compare_sizes, of_other_sizes, sides
from .eight_bit_codes import OPSET, zero_point
from .integer_sums import round_sums
from .layer_nodes import FloatConv2d, OffsetConv2d, QuantizedConv2d, StoredCodes
from .operator_check import check_operators
from .ranges import Ranges, ranges
from .runtime import ROUNDED, SATURATING, OnnxComparison, compare_onnx

_COMPARED = 64
TOLERANCE = 0.01  # of a step: the allowed error of a rounding to codes, apart from a runtime's own rounding


@torch.no_grad()
@of_shipping()
def export_onnx(
    model: nn.Module,
    path: str | os.PathLike[str],
    example: Tensor,
    *,
    round_outputs: bool = False,
    four_bits: bool = False,
    any_size: bool = False,
    metadata: Mapping[str, str] | None = None,
) -> OnnxComparison:
    """Write a trained model as an ONNX file of standard operators, with a batch of any size.

    The model is frozen (`qconv.freeze`): batch norm is folded, and layers pass on codes. A layer that outputs codes
    becomes Conv between QuantizeLinear and DequantizeLinear, with uint8 inputs and int8 weights, which runtimes compute
    in integers; if no whole bias gives the trained steps, as for many layers of 8 bits, a code may be off by one.
    Runtimes have no fast integer convolution with float outputs. So a layer with float outputs, signs or shifts is a
    Conv of whole float numbers: equal to the frozen layer up to float rounding, but not faster than a float layer. With
    `round_outputs`, float outputs of layers of 2 to 8 bits and values added to them are computed in integers too: they
    are rounded to 256 numbers over their range with `example`. With many channels that is much faster, and it can
    change decisions: `qconv.onnx.compare_onnx` counts them. Sums are recognized if `torch.fx` can trace the model.

    On x86 processors without VNNI (as AMD's before Zen 4), ONNX Runtime adds two products of 8-bit codes and weights in
    16 bits, where they can saturate, unless the session's option ``session.x64quantprecision`` is ``"1"``: its precise
    mode, which `OnnxModel` takes there. The result names the layers concerned. Codes of 7 bits can't saturate, nor can
    weights with whole numbers of at most 64.

    The file stores weights as integers of 8 or 16 bits (of 4 with `four_bits`), or as indices into a list of numbers,
    wherever that reproduces them exactly; otherwise as floats: those of fp8, of float inputs with 8-bit weights and of
    DSQ with more than 4 bits, into which the exporter multiplies a batch norm's factors.

    torch's exporter writes some operators wrongly, in version 2.15 ``AvgPool2d(divisor_override=3)``. So ONNX Runtime
    computes each operator that the exporter gets from the same numbers as torch; if one differs, no file is written.

    Args:
        model: the trained model.
        path: the file to write; it appears when it is complete.
        example: typical inputs (N, C, H, W); a few hundred with `round_outputs`.
        round_outputs: compute float outputs in integers, too, rounded to 8 bits.
        four_bits: store integers that fit in 4 bits so, which takes half of the bytes. ONNX Runtime reads that; other
            programs often do not, or compute wrong results from it.
        any_size: let the file take images of any height and width (any dimensions behind the channels) that the model
            takes, as super-resolution and fully convolutional networks do. It is compared with the model at two other
            sizes, too. Otherwise it takes only the example's size.
        metadata: more entries for the file's metadata, such as the classes; ``qconv export`` writes ``pictures`` (size,
            mean and std, as JSON) and ``classes``. Those of qconv's own names are replaced.

    Returns:
        The result of `compare_onnx` for the file and the trained model on up to 64 inputs of `example`.

    Raises:
        ImportError: onnx, onnxscript or ONNX Runtime is missing: ``pip install "qconv[onnx]"``.
        TypeError: `model` is not a module, or does not give a tensor; `example` is not a float tensor.
        ValueError: `qconv.freeze` refuses the model; ONNX has no operator for a layer, or computes it otherwise; the
            example is empty; with `any_size`, the model takes no other size, or its file would not or would give other
            numbers there.
        OSError: the file can't be written.
    """
    with needed("export to ONNX"):
        import onnx
        import onnx_ir
        import onnxruntime  # noqa: F401  # which runs the file
        import onnxscript  # noqa: F401  # torch.onnx needs it
    from .store import own_weights, store_integers

    path = Path(path)
    _check(path, example)
    for key, value in (metadata or {}).items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise TypeError(f"metadata[{key!r}] (={value!r}) must be a string, such as json.dumps makes")
    example = example.detach().float().cpu()
    model = inner_model(model)
    frozen = build(model, TOLERANCE, example)
    deformable = layers.QDeformConv2d if "torchvision.ops" in sys.modules else ()  # without it no model has one
    for told in frozen.layers:
        if isinstance(model.get_submodule(told.name), deformable):
            raise ValueError(f"'{told.name}' is deformable, which ONNX Runtime does not compute: it can't be exported")
    try:
        output: Any = frozen(example[:1])
    except (RuntimeError, IndexError) as error:
        raise ValueError(
            f"example (of shape {tuple(example.shape)}) does not suit the model: {str(error).splitlines()[0]}"
        ) from error
    if not isinstance(output, Tensor):
        raise TypeError(f"model returns {type(output).__name__}; it must return a tensor")
    network = in_onnx(frozen, example, round_outputs)
    others = of_other_sizes(model, example) if any_size else []
    one = example[:1].repeat(2, *[1] * (example.ndim - 1))  # a batch of 1 would become a constant
    dims = {0: "batch", **(sides(example) if any_size else {})}
    with warnings.catch_warnings(), _Quiet():
        warnings.simplefilter("ignore")
        try:
            program: Any = torch.onnx.export(
                *(network, (one,)),
                dynamo=True,
                verbose=False,
                opset_version=OPSET,
                input_names=["input"],
                output_names=["output"],
                dynamic_shapes=({dim: torch.export.Dim(name) for dim, name in dims.items()},),
            )
        except (torch.onnx.OnnxExporterError, RuntimeError) as error:
            raise ValueError(f"model ({type(model).__name__}) can't be written as ONNX: {_reason(error)}") from error
    for dim, name in dims.items():
        if isinstance(program.model.graph.inputs[0].shape[dim], int):
            what, made = ("batch's size", "len(x) or ") if dim == 0 else (name, "")
            raise ValueError(
                f"model ({type(model).__name__}) makes a Python number of the {what}, which would then be fixed in "
                f"the file: use x.shape[{dim}] as it is, in place of {made}int(x.shape[{dim}])"
            )
    for node in program.model.graph:  # where in Python it was made
        node.metadata_props.clear()
    own_weights(program.model)
    store_integers(program.model, four_bits)
    program.model.producer_name = "qconv"
    program.model.metadata_props.update(metadata or {})
    program.model.metadata_props[ROUNDED] = str(round_outputs).lower()
    saturating = [n for n, layer in network.named_modules() if isinstance(layer, QuantizedConv2d) and layer.saturates]
    program.model.metadata_props[SATURATING] = "\n".join(_name_of(name_in_model(name), frozen) for name in saturating)
    content = onnx_ir.to_proto(program.model)
    onnx.checker.check_model(content, full_check=True)
    written = content.SerializeToString()
    if any_size:
        compare_sizes(model, written, example, others)
    try:
        for images in (example[:1].repeat(3, *[1] * (example.ndim - 1)), *others):
            check_operators(content, program.exported_program, images)
    except ValueError as error:
        raise ValueError(
            f"model ({type(model).__name__}): its ONNX file would be wrong, so none was written: {error}. This is "
            "a fault of torch's exporter or ONNX Runtime: use another operator"
        ) from error
    with atomic_file(path) as file:
        file.write(written)
    return compare_onnx(model, path, example[:_COMPARED])


def _check(path: Path, example: Tensor) -> None:
    """Raise an error if an argument can't be used."""
    if not isinstance(example, Tensor) or not example.is_floating_point():
        kind = example.dtype if isinstance(example, Tensor) else type(example).__name__
        raise TypeError(f"example ({kind}) must be a float tensor (N, C, H, W)")
    if example.ndim < 2 or not example.numel():
        raise ValueError(f"example (of shape {tuple(example.shape)}) must be (N, C, H, W) and hold at least one sample")
    if not example.isfinite().all():
        raise ValueError("example has NaN or inf: pass typical inputs")
    if path.is_dir():
        raise IsADirectoryError(f"path (={path}) is a folder: name a file")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"path (={path}): there is no folder {path.parent}")


def in_onnx(frozen: FrozenModel, example: Tensor, round_outputs: bool) -> nn.Module:
    """Return the frozen network with its integer layers in ONNX's operators."""
    network = copy.deepcopy(frozen.network)
    reached = ranges(network, example) if round_outputs else Ranges({}, {})
    givers = {told.reader: _integer(network, told.name) for told in frozen.layers if told.gives == "codes"}
    made: dict[nn.Module, nn.Module] = {}  # of layers that two parts share, too
    for place, layer in list(network.named_modules(remove_duplicate=False)):
        if layer not in made and (new := _replacement(name_in_model(place), layer, givers, reached)) is not None:
            made[layer] = new
        if layer in made:
            network.set_submodule(place, made[layer])
    if round_outputs and isinstance(network, fx.GraphModule):
        round_sums(network, reached.nodes)
    return network.eval()


def _replacement(name: str, layer: nn.Module, givers: Mapping[str, Any], reached: Ranges) -> nn.Module | None:
    """The layer in ONNX's operators; None if it stays as it is."""
    if isinstance(layer, IntegerConv2d):
        if layer.encoder is None:  # what the layer before it gives
            low, high = (end - layer.zero for end in (givers[name].low, givers[name].high))
        else:
            low, high = layer.encoder.levels[:2]
        ends = reached.layers.get(name)
        gives_codes = layer.low is not None or ends is not None
        return QuantizedConv2d(layer, low, high, ends) if gives_codes else FloatConv2d(layer, zero_point(low))
    if isinstance(layer, OffsetBinaryConv2d):
        return OffsetConv2d(layer)
    if isinstance(layer, IntegerLayer):
        return FloatConv2d(layer)
    if isinstance(layer, SignConv2d):
        return layer.as_float()
    return StoredCodes(layer) if isinstance(layer, FixedWeight) and layer.codes_8 is not None else None


def _name_of(name: str, frozen: FrozenModel) -> str:
    """The name in the model of a layer that padding may have wrapped."""
    around = [told.name for told in frozen.layers if f"{name}.".startswith(f"{told.name}.")]
    return max(around, key=len, default=name)


def _integer(network: nn.Module, name: str) -> Any:
    """The integer layer of that name, which padding may have wrapped."""
    return next(module for module in find(network, name).modules() if isinstance(module, IntegerConv2d))


def _reason(error: BaseException) -> str:
    """The innermost cause, in one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


class _Quiet:
    """Context manager that hides the exporter's progress log."""

    def __enter__(self) -> None:
        self.loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir")]
        self.levels = [logger.level for logger in self.loggers]
        for logger in self.loggers:
            logger.setLevel(logging.ERROR)

    def __exit__(self, *_: object) -> None:
        for logger, level in zip(self.loggers, self.levels, strict=True):
            logger.setLevel(level)
