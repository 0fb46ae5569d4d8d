"""Functions of torch for LiteRT: what the nodes that they have in ONNX become."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..onnx.floats import as_model
from ..onnx.shapes import Shape
from ..program.operations import Function

_SAME = {  # nodes of one input, and of its shape
    **dict(Tanh="TANH", Sigmoid="LOGISTIC", Relu="RELU", Abs="ABS", Neg="NEG", Exp="EXP", Log="LOG", Sqrt="SQRT"),
    **dict(Sin="SIN", Cos="COS", Floor="FLOOR", Ceil="CEIL", Round="ROUND", Sign="SIGN"),
}
_BROADCAST = {  # and their options
    **dict(Add=("ADD", "Add"), Sub=("SUB", "Sub"), Mul=("MUL", "Mul"), Div=("DIV", "Div"), Pow=("POW", "Pow")),
    **dict(Max=("MAXIMUM", "MaximumMinimum"), Min=("MINIMUM", "MaximumMinimum")),
}
_COMPARED = {
    **dict(Less=("LESS", "Less"), Greater=("GREATER", "Greater"), Equal=("EQUAL", "Equal")),
    **dict(LessOrEqual=("LESS_EQUAL", "LessEqual"), GreaterOrEqual=("GREATER_EQUAL", "GreaterEqual")),
}
_REDUCED = {
    **dict(ReduceMean="MEAN", ReduceSum="SUM", ReduceMax="REDUCE_MAX", ReduceMin="REDUCE_MIN"),
    "ReduceProd": "REDUCE_PROD",
}


def write_function(
    writer: Any, function: Function, given: Sequence[int], shapes: Sequence[Shape], images: Shape
) -> int:
    """Add the operators of a function; return the tensor of its value.

    Args:
        writer: of the file.
        function: of torch.
        given: the tensors of its inputs, channels first.
        shapes: of its inputs, for two images.
        images: the shape of two images.

    Raises:
        ValueError: LiteRT has no operators for it, or none that take any number of images.
    """
    import onnx

    models = [as_model(function, shapes, images, count) for count in (1, 2)]
    graph, (one, two) = models[0].graph, map(_inferred, models)
    values: dict[str, Any] = {str(place): tensor for place, tensor in enumerate(given)}
    values |= {each.name: onnx.numpy_helper.to_array(each) for each in graph.initializer}
    for node in graph.node:
        (name,) = node.output
        shape, of_two = one[name], two[name]
        if shape is None:  # of whole numbers, such as a shape
            continue
        inputs = [values.get(each) for each in node.input]
        is_made = shape != of_two and not any(isinstance(each, int) for each in inputs)  # for each image
        is_fixed = shape[1:] == of_two[1:] and of_two[:1] in (shape[:1], [2 * side for side in shape[:1]])
        own = {each.name: onnx.helper.get_attribute_value(each) for each in node.attribute}
        row = None if is_made or not is_fixed else _ROWS.get(node.op_type)
        values[name] = row and row(_Node(writer, inputs, shape, own))
        if values[name] is None:
            raise ValueError(f"'{function.origin}': {function.function} can't be written for LiteRT ({node.op_type})")
    return values[graph.node[-1].output[0]]


def _inferred(model: Any) -> dict[str, Any]:
    """Return the shapes of values; None for those that are not floats or truths."""
    import onnx

    graph = onnx.shape_inference.infer_shapes(model, strict_mode=True, data_prop=True).graph
    kinds = onnx.TensorProto.FLOAT, onnx.TensorProto.BOOL
    types = {each.name: each.type.tensor_type for each in [*graph.value_info, *graph.output]}
    return {
        name: [dim.dim_value for dim in kind.shape.dim] if kind.elem_type in kinds else None
        for name, kind in types.items()
    }


class _Node:
    """A node: its inputs, which are tensors of the file or constants, the shape of its output, and attributes."""

    def __init__(self, writer: Any, inputs: Sequence[Any], shape: list[int], own: dict[str, Any]) -> None:
        self.writer, self.inputs, self.shape, self.own = writer, inputs, shape, own

    def __getitem__(self, place: int) -> int:
        value = self.inputs[place]
        return value if isinstance(value, int) else self.writer.floats(torch.tensor(value))

    @property
    def axis(self) -> int:
        return self.own.get("axis", 0)

    def tensors(self) -> list[int]:
        return [self[place] for place in range(len(self.inputs))]

    def numbers(self, name: str, place: int) -> list[int]:
        """Return an attribute, or a constant input: which of them depends on the version."""
        return list(self.own[name]) if name in self.own else self.inputs[place].tolist()

    def end(self, place: int, default: float) -> float:
        """Return a constant input; some are missing."""
        given = self.inputs[place] if place < len(self.inputs) else None
        return default if given is None else float(given)

    def add(self, kind: str, *given: int, options: str = "", shape: Any = None, result: str = "FLOAT32", **own: Any):
        made = getattr(self.writer.schema, f"{options}OptionsT")() if options else None
        for name, value in own.items():
            setattr(made, name, value)
        return self.writer.add(kind, list(given), self.shape if shape is None else shape, made, kind=result)

    def reduced(self, kind: str, x: int, axes: list[int], keeps: bool = True) -> int:
        shape = [1 if axis in axes else side for axis, side in enumerate(self.writer.shape(x))] if keeps else self.shape
        return self.add(kind, x, self.writer.whole(axes), options="Reducer", shape=shape, keepDims=keeps)


def _reshaped(n: _Node) -> int:
    shape = [-1, *n.shape[1:]]
    return n.add("RESHAPE", n[0], n.writer.whole(shape), options="Reshape", newShape=shape)


def _compared(kind: str, options: str) -> Callable[[_Node], int]:
    return lambda n: n.add(kind, n[0], n[1], options=options, result="BOOL")


def _reduced(kind: str) -> Callable[[_Node], int]:
    return lambda n: n.reduced(kind, n[0], n.numbers("axes", 1), bool(n.own.get("keepdims", 1)))


def _norm(n: _Node) -> int:
    shape = n.writer.shape(n[0])
    squares = n.add("MUL", n[0], n[0], options="Mul", shape=shape)
    return n.add("SQRT", n.reduced("SUM", squares, n.numbers("axes", 1), bool(n.own.get("keepdims", 1))))


def _gathered(n: _Node) -> int:
    index = n.inputs[1] % n.writer.shape(n[0])[n.axis]
    return n.add("GATHER", n[0], n.writer.whole(index.tolist()), options="Gather", axis=n.axis)


def _prelu(n: _Node) -> int:
    below = n.add("MUL", n.writer.clamped(n[0], -math.inf, 0.0), n[1], options="Mul")
    return n.add("ADD", n.add("RELU", n[0]), below, options="Add")


def _batch_norm(n: _Node) -> int:
    weight, bias, mean, variance = (torch.tensor(each).double() for each in n.inputs[1:5])
    scale = weight / (variance + n.own["epsilon"]).sqrt()
    factor, shift = (each.float().view(-1, *[1] * (len(n.shape) - 2)) for each in (scale, bias - mean * scale))
    return n.add(
        "ADD", n.add("MUL", n[0], n.writer.floats(factor), options="Mul"), n.writer.floats(shift), options="Add"
    )


def _elu(n: _Node) -> int:
    """``max(x, 0) + α (e^min(x, 0) − 1)``: LiteRT's own has an α of 1."""
    powers = n.add("EXP", n.writer.clamped(n[0], -math.inf, 0.0))
    below = n.add("SUB", powers, n.writer.floats(torch.ones(())), options="Sub")
    scaled = n.add("MUL", below, n.writer.floats(torch.tensor(n.own["alpha"])), options="Mul")
    return n.add("ADD", n.add("RELU", n[0]), scaled, options="Add")


def _softmax(n: _Node) -> int:
    """``e^(x − max) / Σ e^(x − max)``: LiteRT's own is of the last dimension."""
    axes = [n.axis % len(n.shape)]
    powers = n.add("EXP", n.add("SUB", n[0], n.reduced("REDUCE_MAX", n[0], axes), options="Sub"))
    return n.add("DIV", powers, n.reduced("SUM", powers, axes), options="Div")


def _log_softmax(n: _Node) -> int:
    axes = [n.axis % len(n.shape)]
    less = n.add("SUB", n[0], n.reduced("REDUCE_MAX", n[0], axes), options="Sub")
    sums = n.reduced("SUM", n.add("EXP", less), axes)
    return n.add("SUB", less, n.add("LOG", sums, shape=n.writer.shape(sums)), options="Sub")


def _softplus(n: _Node) -> int:
    """``max(x, 0) + log(1 + e^−|x|)``."""
    power = n.add("EXP", n.add("NEG", n.add("ABS", n[0])))
    rest = n.add("LOG", n.add("ADD", power, n.writer.floats(torch.ones(())), options="Add"))
    return n.add("ADD", n.add("RELU", n[0]), rest, options="Add")


def _hard_sigmoid(n: _Node) -> int:
    scaled = n.add("MUL", n[0], n.writer.floats(torch.tensor(n.own["alpha"])), options="Mul")
    shifted = n.add("ADD", scaled, n.writer.floats(torch.tensor(n.own["beta"])), options="Add")
    return n.writer.clamped(shifted, 0.0, 1.0)


def _instance_norm(n: _Node) -> int:
    axes, shape = [*range(2, len(n.shape))], [-1, *[1] * (len(n.shape) - 2)]
    scale, bias = (n.writer.floats(torch.tensor(each).view(shape)) for each in n.inputs[1:])
    centred = n.add("SUB", n[0], n.reduced("MEAN", n[0], axes), options="Sub")
    variance = n.reduced("MEAN", n.add("MUL", centred, centred, options="Mul"), axes)
    eps, small = n.writer.floats(torch.tensor(n.own["epsilon"])), n.writer.shape(variance)
    root = n.add("SQRT", n.add("ADD", variance, eps, options="Add", shape=small), shape=small)
    scaled = n.add("MUL", n.add("DIV", centred, root, options="Div"), scale, options="Mul")
    return n.add("ADD", scaled, bias, options="Add")


def _padded(n: _Node) -> int:
    """With zeros, or with pixels of the image, which are gathered along each dimension."""
    import numpy as np

    count, pads, mode = len(n.shape), n.inputs[1].tolist(), n.own.get("mode", b"constant").decode()
    sides = [*zip(pads[:count], pads[count:], strict=True)]
    if mode == "constant":
        return n.add("PADV2", n[0], n.writer.whole(sides), n.writer.floats(torch.tensor(n.end(2, 0.0))))
    x, shape = n[0], [*n.writer.shape(n[0])]
    for axis, ends in enumerate(sides):
        if any(ends):
            index = np.pad(np.arange(shape[axis]), ends, mode).tolist()
            shape[axis] = n.shape[axis]
            x = n.add("GATHER", x, n.writer.whole(index), options="Gather", shape=[*shape], axis=axis)
    return x


def _resized(n: _Node) -> int | None:
    """Of images with channels last."""
    if len(n.shape) != 4 or n.own["mode"] == b"cubic":
        return None
    is_aligned = n.own["coordinate_transformation_mode"] == b"align_corners"
    given, scales = n.writer.shape(n[0])[2:], n.inputs[2]
    if not is_aligned and scales is not None and any(scales[2:] * given != n.shape[2:]):
        return None  # by 1.3, 8 pixels become 10; LiteRT's scale is that of the sizes
    x, size = n.writer.turned(n[0], (0, 2, 3, 1)), n.writer.whole(n.shape[2:])
    own: dict[str, Any] = dict(alignCorners=is_aligned, halfPixelCenters=not is_aligned, options="ResizeBilinear")
    resized = n.add("RESIZE_BILINEAR", x, size, shape=[n.shape[place] for place in (0, 2, 3, 1)], **own)
    return n.writer.turned(resized, (0, 3, 1, 2))


def _sliced(n: _Node) -> int | None:
    shape = n.writer.shape(n[0])
    begin, end, strides, first, last = [0] * len(shape), list(shape), [1] * len(shape), 0, 0
    starts, ends, axes, *rest = (each.tolist() for each in n.inputs[1:])
    for axis, start, stop, step in zip(axes, starts, ends, *(rest or [[1] * len(axes)]), strict=True):
        axis %= len(shape)
        if axis == 0 and not (start == 0 and stop >= 2**31 and step == 1):  # some of the images
            return None
        begin[axis], end[axis], strides[axis] = *slice(start, stop, step).indices(shape[axis])[:2], step
        last |= (end[axis] < 0) << axis  # backwards, to the first number
    for axis in range(len(shape)):  # whole, whatever the number of images
        if (begin[axis], end[axis], strides[axis]) == (0, shape[axis], 1):
            first, last = first | 1 << axis, last | 1 << axis
    given = [n.writer.whole(each) for each in (begin, end, strides)]
    return n.add("STRIDED_SLICE", n[0], *given, options="StridedSlice", beginMask=first, endMask=last)


def _tiled(n: _Node) -> int | None:
    times = n.inputs[1]
    return None if times is None else n.add("TILE", n[0], n.writer.whole(times.tolist()), options="Tile")


def _cast(n: _Node) -> int | None:
    to = {1: "FLOAT32", 9: "BOOL"}.get(n.own["to"])
    if to is None or n.inputs[0] is None:  # a number of images
        return None
    return n.add("CAST", n[0], result=to)


_ROWS: dict[str, Callable[[_Node], int | None]] = {
    "Identity": lambda n: n[0],
    **{node: lambda n, kind=kind: n.add(kind, n[0]) for node, kind in _SAME.items()},
    **{node: lambda n, row=row: n.add(row[0], n[0], n[1], options=row[1]) for node, row in _BROADCAST.items()},
    **{node: _compared(*row) for node, row in _COMPARED.items()},
    **{node: _reduced(kind) for node, kind in _REDUCED.items()},
    "Reciprocal": lambda n: n.add("DIV", n.writer.floats(torch.ones(())), n[0], options="Div"),
    "Where": lambda n: n.add("SELECT_V2", n[0], n[1], n[2], options="SelectV2"),
    "Cast": _cast,
    "Clip": lambda n: n.writer.clamped(n[0], n.end(1, -math.inf), n.end(2, math.inf)),
    "LeakyRelu": lambda n: n.add("LEAKY_RELU", n[0], options="LeakyRelu", alpha=n.own["alpha"]),
    **dict(Elu=_elu, Softmax=_softmax, Softplus=_softplus, HardSigmoid=_hard_sigmoid, LogSoftmax=_log_softmax),
    **dict(ReduceL2=_norm, InstanceNormalization=_instance_norm, Pad=_padded, Resize=_resized),
    "GlobalMaxPool": lambda n: n.reduced("REDUCE_MAX", n[0], [*range(2, len(n.shape))]),
    "GlobalAveragePool": lambda n: n.reduced("MEAN", n[0], [*range(2, len(n.shape))]),
    "CumSum": lambda n: n.add("CUMSUM", n[0], n.writer.whole(n.inputs[1].tolist()), options="Cumsum"),
    **dict.fromkeys(("Reshape", "Squeeze", "Unsqueeze"), _reshaped),
    "Transpose": lambda n: n.add("TRANSPOSE", n[0], n.writer.whole(n.own["perm"]), options="Transpose"),
    "Concat": lambda n: n.add("CONCATENATION", *n.tensors(), options="Concatenation", axis=n.axis),
    "Slice": _sliced,
    "Tile": _tiled,
    **dict(Gather=_gathered, BatchNormalization=_batch_norm),
    "PRelu": _prelu,
    "Expand": lambda n: n.add("MUL", n[0], n.writer.floats(torch.ones(1, *n.shape[1:])), options="Mul"),
    "MatMul": lambda n: n.add("BATCH_MATMUL", n[0], n[1], options="BatchMatMul"),
}
