"""Export of a trained model to an ONNX file."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..ground.extras import needed
from ..ground.files import write_file
from ..inference.build import build
from ..inference.defaults import of_shipping
from ..program.operations import Function, Program
from .runtime import ROUNDED, SATURATING, OnnxComparison, compare_onnx
from .shapes import shapes_of

_COMPARED = 64


@torch.no_grad()
@of_shipping()
def export_onnx(
    model: nn.Module,
    path: str | os.PathLike[str],
    example: Tensor,
    *,
    round_outputs: bool = False,
    four_bits: bool = False,
    signed: bool = False,
    clamp_by_saturation: bool = False,
    opset: int | None = None,
    metadata: Mapping[str, str] | None = None,
) -> OnnxComparison:
    """Write a trained model as an ONNX file of standard operators, for a batch of any size.

    The file is the program of the frozen model (`qconv.freeze`), operation by operation. Several outputs have the names
    of the model's: keys, fields or ``output_0``. It takes images of any height and width if the program does. A layer
    whose sums become codes is a Conv between QuantizeLinear and DequantizeLinear, which runtimes compute in integers.
    If no whole bias gives the trained steps, it is a float Conv with up to 4 bits; with more, a code may be off by one.
    Other codes are those of the program for the same floats. Runtimes have no fast integer convolution with float
    outputs, so other sums are a float Conv of whole numbers: exact, but not faster than a float layer.

    On x86 processors without VNNI (as AMD's before Zen 4), ONNX Runtime adds two products of 8-bit codes and weights in
    16 bits, where they can saturate, unless the session's option ``session.x64quantprecision`` is ``"1"``: its precise
    mode, which `OnnxModel` takes there. The result names the layers concerned.

    Args:
        model: the trained model.
        path: the file to write; it appears when it is complete.
        example: typical images (N, C, H, W), signals (N, C, L) or rows (N, C); a few hundred with `round_outputs`.
        round_outputs: compute the float outputs of layers of codes, and values added to them, in integers, too, rounded
            to 256 numbers over their range with `example`. That is faster, and can change decisions.
        four_bits: store integers that fit in 4 bits so, not as int8. ONNX Runtime (1.32) and onnx's reference evaluator
            read that; TVM, tinygrad, MNN and IREE do not.
        signed: let codes be int8 with zero point 0, for runtimes that have no others, such as TensorRT.
        clamp_by_saturation: let codes end at 255, so that QuantizeLinear clamps them, without a Min behind it, which
            some runtimes do not fuse; ONNX Runtime is faster with it.
        opset: of the file, from 13 to 25. None is 17, which most runtimes read, or 21, the first with 4 bits.
        metadata: more entries for the file's metadata, such as the classes; ``qconv export`` writes ``pictures`` (size,
            mean and std, as JSON) and ``classes``. Those of qconv's own names are replaced.

    Returns:
        The result of `compare_onnx` for the file and the trained model on up to 64 images of `example`.

    Raises:
        ImportError: onnx or ONNX Runtime is missing: ``pip install "qconv[onnx]"``.
        TypeError: `model` is not a module; `example` is not a float tensor.
        ValueError: `qconv.freeze` refuses the model, or it has no program; ONNX has nothing for a function;
            the example is empty; options that exclude each other.
        OSError: the file can't be written.
    """
    path = Path(path)
    _check(path, example)
    for key, value in (metadata or {}).items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise TypeError(f"metadata[{key!r}] (={value!r}) must be a string, such as json.dumps makes")
    opset = (21 if four_bits else 17) if opset is None else opset
    if not (21 if four_bits else 13) <= opset <= 25:
        raise ValueError(f"opset (={opset}) must be from 13 to 25, and from 21 on with four_bits")
    if signed and clamp_by_saturation:
        raise ValueError(
            "signed and clamp_by_saturation exclude each other: zero points are 0, or such that codes saturate"
        )
    with needed("export to ONNX"):
        import onnx
        import onnxruntime  # noqa: F401  # which runs the file
    from .graph import Form
    from .write import Writer

    example = example.detach().float().cpu()
    frozen = build(model, example)
    if frozen.untraced:
        raise ValueError(f"model ({type(model).__name__}) can't be written as ONNX: {frozen.untraced}")
    program = frozen.program(example)
    form = Form(opset, four_bits, signed, clamp_by_saturation)
    is_open = program.size is None and _takes_all_sizes(program, example, form)
    content = written(Writer(program, form, example, round_outputs), program, is_open, metadata or {})
    onnx.checker.check_model(content, full_check=True)
    write_file(path, content.SerializeToString())
    return compare_onnx(model, path, example[:_COMPARED])


def _takes_all_sizes(program: Program, example: Tensor, form: Any) -> bool:
    """Whether functions have the same nodes for larger images: they may hold sizes, such as the count of a variance."""
    from .functions import write_function
    from .graph import Graph

    functions, graphs = [each for each in program.operations if isinstance(each, Function)], (Graph(form), Graph(form))
    larger = example[:1].repeat(1, 1, *[2] * (example.ndim - 2))
    for graph, images in zip(graphs, (example, larger) if functions else (), strict=False):
        shapes = shapes_of(program, images)
        for each in functions:
            graph.origin = each.origin
            write_function(graph, each, [str(place) for place in each.inputs], [shapes[place] for place in each.inputs])
    return graphs[0].nodes == graphs[1].nodes and graphs[0].constants == graphs[1].constants


def written(writer: Any, program: Program, is_open: bool, metadata: Mapping[str, str]) -> Any:
    """Return the file of a program whose operations are written; an open one takes images of all sizes."""
    from onnx import TensorProto, helper

    def value(name: str, shape: Any) -> Any:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)

    channels, *sides = writer.shapes[0][1:]
    sides = ["height", "width"] if is_open and len(sides) == 2 else sides
    sides = sides[max(4 - writer.rank, 0) :]
    input = value("input", ["batch", channels, *sides])
    names = program.names()
    ends = [helper.make_node("Identity", [given], [name]) for given, name in zip(writer.outputs, names, strict=True)]
    outputs: list[Any] = []
    for name, place, rank in zip(names, program.outputs, program.ranks, strict=True):
        _, *sizes = writer.shapes[place]
        channels, rest = sizes[:1], sizes[5 - rank :] if len(sizes) == 3 else sizes[1:]
        outputs.append(value(name, ["batch", *channels, *(None if is_open else side for side in rest)]))
    nodes = [*writer.graph.nodes, *ends]
    read = {name for node in nodes for name in node.input}  # ONNX Runtime warns of constants that nothing reads
    constants = [each for each in writer.graph.constants if each.name in read]
    graph = helper.make_graph(nodes, "qconv", [input], outputs, constants)
    opsets = [helper.make_opsetid("", writer.form.opset)]
    version = helper.find_min_ir_version_for(opsets)
    model = helper.make_model(graph, opset_imports=opsets, producer_name="qconv", ir_version=version)
    own = {ROUNDED: str(bool(writer.rounded)).lower(), SATURATING: "\n".join(writer.saturating)}
    helper.set_model_props(model, {**metadata, **own})
    return model


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
