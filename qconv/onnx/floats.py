"""Operations of a program on floats as ONNX nodes, the same for every dialect of ONNX."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from onnx import TensorProto, helper

from ..program import operations as ops
from ..program.operations import Window
from .functions import gated, normalized, write_function
from .graph import Form, Graph
from .shapes import Shape


def write_floats(graph: Graph, operation: Any, given: Sequence[str], shapes: Sequence[Any]) -> str | None:
    """Add the nodes of an operation; return the name of its value, or None if it is of another kind.

    `given` are the names of its inputs, of these shapes.
    """
    node = graph.node
    match operation:
        case ops.Add() | ops.Multiply():
            return node("Add" if isinstance(operation, ops.Add) else "Mul", *given)
        case ops.PReLU():
            return node("PRelu", *given, graph.constant(operation.slope.float().view(-1, 1, 1)))
        case ops.Clamp(low=0, high=torch.inf):
            return node("Relu", *given)
        case ops.Clamp():
            ends = operation.low, operation.high
            return node("Clip", *given, *("" if abs(end) == torch.inf else graph.constant(end) for end in ends))
        case ops.Take():
            return write_take(graph, operation, given[0], shapes[0][1])
        case ops.Select():
            # From the end: OpenVINO (2026.4.1) reverses other orders of channels once it moves them into the weights of
            # a convolution, and only with a dimension counted from the start.
            return node("Gather", *given, graph.constant(operation.index), axis=1 - len(shapes[0]))
        case ops.Repeat():
            scales = graph.constant(torch.tensor([1.0, 1.0, *operation.times]))
            return node("Resize", *given, "", scales, **operation.resize)
        case ops.Shuffle():
            return node("DepthToSpace", *given, blocksize=operation.times, mode="CRD")
        case ops.GELU():
            curve, half = node("Erf", node("Mul", *given, graph.constant(math.sqrt(0.5)))), graph.constant(0.5)
            return node("Mul", *given, node("Add", node("Mul", curve, half), half))
        case ops.SiLU():
            return gated(graph, *given, *given)
        case ops.Sigmoid():
            return node("Sigmoid", *given)
        case ops.LayerNorm():
            return normalized(graph, given[0], [1], operation.eps)
        case ops.Mean():
            return node("GlobalAveragePool", *given)
        case _:
            return None


def as_model(operation: Any, shapes: Sequence[Shape], images: Shape, count: int | None = None) -> Any:
    """Return the ONNX model of an operation on floats.

    Args:
        operation: of inputs with these shapes, for two images; their names in the model are "0", "1" and so on.
        shapes: of its inputs.
        images: the shape of two images, on whose number sizes may depend; their name is "input".
        count: how many images the model takes; any number by default.

    Raises:
        ValueError: ONNX has no nodes for it.
    """
    graph, sizes = Graph(Form(17)), {str(place): shape for place, shape in enumerate(shapes)}
    graph.origin = operation.origin
    name = write_floats(graph, operation, [*sizes], shapes) or write_function(graph, operation, [*sizes], shapes)
    graph.node("Identity", name)
    sizes["input"] = images
    read = {name for node in graph.nodes for name in node.input}
    inputs = [_input(name, shape, count) for name, shape in sizes.items() if name in read]
    output = helper.make_tensor_value_info(graph.nodes[-1].output[0], TensorProto.FLOAT, None)
    made = helper.make_graph(graph.nodes, "operation", inputs, [output], graph.constants)
    opsets = [helper.make_opsetid("", graph.form.opset)]
    return helper.make_model(made, opset_imports=opsets)


def _input(name: str, shape: Shape, count: int | None) -> Any:
    whole = shape.of(count or 2)
    is_open = [count is None and two != three for two, three in zip(shape, shape.of_three, strict=True)]
    dims = [f"images of {name}" if is_free else side for is_free, side in zip(is_open, whole, strict=True)]
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, dims)


def write_take(graph: Graph, take: ops.Take, name: str, channels: int, *zero: str) -> str:
    """Add a stride and channels of zeros; of codes, `zero` names that of 0."""
    last = take.channels - take.first - channels
    if take.stride != (1, 1):
        parts = [0, 0], [2**62] * 2, [2, 3], [*take.stride]
        name = graph.node("Slice", name, *(graph.constant(part, "int64") for part in parts))
    if not take.first and not last:
        return name
    return graph.node("Pad", name, graph.constant([0, take.first, 0, 0, 0, last, 0, 0], "int64"), *zero)


def padded(graph: Graph, name: str, window: Window, value: str) -> tuple[str, Window]:
    """Pad with a value that is not 0; return the window that is left."""
    left, right, top, bottom = window.padding
    if not value or not any(window.padding):
        return name, window
    sides = graph.constant([0, 0, top, left, 0, 0, bottom, right], "int64")
    return graph.node("Pad", name, sides, value), window._replace(padding=(0, 0, 0, 0))


def attributes(window: Window) -> dict[str, Any]:
    """Return the attributes of a convolution or of pooling."""
    left, right, top, bottom = window.padding
    found: dict[str, Any] = dict(kernel_shape=window.kernel, strides=window.stride, pads=[top, left, bottom, right])
    return found if window.dilation == (1, 1) else {**found, "dilations": window.dilation}
