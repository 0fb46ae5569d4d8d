"""What torch's functions become in ONNX: a table by the names of aten's operators."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..program.operations import Function, Given, Images
from .graph import Graph


class _Call:
    """A function that is called: its arguments, and the shapes that its inputs and its output have for two images."""

    def __init__(self, graph: Graph, function: Function, given: Sequence[str], shapes: Sequence[Sequence[int]]) -> None:
        schema: Any = function.function._schema  # pyright: ignore[reportFunctionMemberAccess]
        self.graph, self.given, self.shapes, self.result = graph, given, shapes, function.result or 0
        names = [argument.name for argument in schema.arguments]
        self.values = {argument.name: argument.default_value for argument in schema.arguments}
        self.values |= dict(zip(names, function.arguments, strict=False)) | dict(function.named)
        self.args = [self.values[name] for name in names]
        is_list = isinstance(self.args[0], list | tuple) and not isinstance(self.args[0], Given)
        first: Any = self.args[0][0] if is_list else self.args[0]
        self.shape = self.shapes[first.place] if isinstance(first, Given) else tuple(first.shape)
        self.rank = len(self.shape)
        self.x = "" if is_list else self.name(first)

    def __getattr__(self, name: str) -> Any:
        """Return an argument by its name in the operator's schema; None if it has none of that name."""
        return self.values.get(name)

    def name(self, value: Any) -> str:
        """Return the name of a value, which may be one already; a list is one of whole numbers."""
        if isinstance(value, str):
            return value
        if isinstance(value, Given):
            return self.given[value.place]
        whole = isinstance(value, list) or (isinstance(value, Tensor) and not value.is_floating_point())
        return self.graph.constant(value, "int64" if whole else "float32")

    def __call__(self, kind: str, *values: Any, **attributes: Any) -> str:
        """Add a node."""
        return self.graph.node(kind, *map(self.name, values), **attributes)

    def dims(self, value: Any) -> list[int]:
        """Return dimensions as a list of numbers from 0 on."""
        return [dim % self.rank for dim in ([value] if isinstance(value, int) else value)]

    def sizes(self, sizes: Sequence[Any], may_be_open: bool = True) -> str:
        """Return a shape in which some sizes are numbers of images; one of a new shape may be left open."""
        if may_be_open and -1 not in sizes and sum(isinstance(size, Images) for size in sizes) == 1:
            sizes = [-1 if isinstance(size, Images) else size for size in sizes]
        if all(isinstance(size, int) for size in sizes):
            return self.name(list(sizes))
        images = self("Slice", self("Shape", "input"), [0], [1])
        parts = (self("Mul", images, [size.times]) if isinstance(size, Images) else [size] for size in sizes)
        return self("Concat", *parts, axis=0)

    def reduced(self, kind: str, x: str, axes: list[int], keep: Any = True) -> str:
        """Add a reduction; until opset 18 most have the axes as an attribute."""
        if self.graph.form.opset < 18 and kind != "ReduceSum":
            return self(kind, x, axes=axes, keepdims=int(keep))
        return self(kind, x, axes, keepdims=int(keep))


def write_function(graph: Graph, function: Function, given: Sequence[str], shapes: Sequence[Sequence[int]]) -> str:
    """Add the nodes of a function; return the name of its output.

    Args:
        graph: takes the nodes.
        function: the function.
        given: the names of its inputs.
        shapes: of its inputs.

    Raises:
        ValueError: there are none for it.
    """
    target: Any = function.function
    is_aten = isinstance(target, torch._ops.OpOverload)
    kind = target._schema.name.partition("::")[2].rstrip("_") if is_aten else ""
    written = _TABLE.get(kind)
    name = None
    if written is not None and (function.result in (None, 0) or kind in _PARTS):
        call = _Call(graph, function, given, shapes)
        name = call(written, *call.args[: _INPUTS.get(kind, 1)]) if isinstance(written, str) else written(call)
    if name is None:
        what = f"{target} with these arguments" if written else str(target) if is_aten else type(target).__name__
        raise ValueError(f"'{function.origin}': {what} can't be written as ONNX: use another function there")
    return name


def _sum(kind: str) -> Callable[[_Call], str]:
    def write(c: _Call) -> str:
        other = c.args[1] if c.alpha in (None, 1) else c("Mul", c.args[1], c.alpha)
        return c(kind, c.x, other)

    return write


def _clip(low: str, high: str) -> Callable[[_Call], str]:
    return lambda c: c("Clip", c.x, *("" if c.values.get(end) is None else float(c.values[end]) for end in (low, high)))


def _gelu(c: _Call) -> str:
    if c.approximate == "tanh":
        cube = c("Mul", c("Mul", c("Mul", c.x, c.x), c.x), 0.044715)
        inner = c("Tanh", c("Mul", c("Add", c.x, cube), math.sqrt(2 / math.pi)))
    else:
        inner = c("Erf", c("Mul", c.x, math.sqrt(0.5)))
    return c("Mul", c("Mul", c.x, 0.5), c("Add", inner, 1.0))


def _hardsigmoid(c: _Call) -> str:
    return c("HardSigmoid", c.x, alpha=1 / 6, beta=0.5)


def _flatten(c: _Call) -> str:
    (first,), (last,) = c.dims(c.start_dim), c.dims(c.end_dim)
    return c("Reshape", c.x, [0] * first + [-1] + list(c.shape[last + 1 :]))


def _squeeze(c: _Call) -> str | None:
    dims = [] if c.dim is None else [dim for dim in c.dims(c.dim) if c.shape[dim] == 1]
    return c("Squeeze", c.x, dims) if dims else None if c.dim is None else c.x


def _transpose(c: _Call) -> str:
    order = list(range(c.rank))
    one, other = c.args[1:] if len(c.args) > 1 else (-2, -1)
    order[one], order[other] = order[other], order[one]
    return c("Transpose", c.x, perm=order)


def _expand(c: _Call) -> str:
    new = len(c.size) - c.rank
    sizes = [
        1 if size == -1 or (place >= new and isinstance(size, Images) and c.shape[place - new] > 1) else size
        for place, size in enumerate(c.size)
    ]
    return c("Expand", c.x, c.sizes(sizes, may_be_open=False))


def _slice(c: _Call) -> str:
    return c("Slice", c.x, [c.start or 0], [2**63 - 1 if c.end is None else c.end], [c.dim], [c.step])


def _split(c: _Call) -> str:
    sizes = c.args[1]
    start = c.result * sizes if isinstance(sizes, int) else sum(sizes[: c.result])
    return c("Slice", c.x, [start], [start + (sizes if isinstance(sizes, int) else sizes[c.result])], [c.dim])


def _pad(mode: str) -> Callable[[_Call], str | None]:
    def write(c: _Call) -> str | None:
        before, after = [0] * c.rank, [0] * c.rank
        for place in range(len(c.pad or c.padding) // 2):
            before[-1 - place], after[-1 - place] = (c.pad or c.padding)[2 * place : 2 * place + 2]
        return None if min(before + after) < 0 else c("Pad", c.x, before + after, float(c.value or 0), mode=mode)

    return write


def _pair(value: Any) -> list[int]:
    return [value] * 2 if isinstance(value, int) else list(value) * (2 // len(value))


def _pooled(kind: str) -> Callable[[_Call], str | None]:
    def write(c: _Call) -> str | None:
        if c.divisor_override is not None:
            return None
        own = {"dilations": _pair(c.dilation)} if kind == "MaxPool" else {"count_include_pad": int(c.count_include_pad)}
        pads, kernel = _pair(c.padding) * 2, _pair(c.kernel_size)
        strides = _pair(c.stride or kernel)
        return c(kind, c.x, kernel_shape=kernel, strides=strides, pads=pads, ceil_mode=int(c.ceil_mode), **own)

    return write


def _adaptive(c: _Call) -> str | None:
    size = _pair(c.output_size)
    if size == [1, 1]:
        return c("GlobalAveragePool", c.x)
    kernel = [side // wanted for side, wanted in zip(c.shape[2:], size, strict=True)]
    is_even = [side * wanted for side, wanted in zip(kernel, size, strict=True)] == list(c.shape[2:])
    return c("AveragePool", c.x, kernel_shape=kernel, strides=kernel) if is_even else None


def _resized(mode: str) -> Callable[[_Call], str]:
    def write(c: _Call) -> str:
        way = "asymmetric" if mode == "nearest" else "align_corners" if c.align_corners else "half_pixel"
        own = {"nearest_mode": "floor"} if mode == "nearest" else {"cubic_coeff_a": -0.75} if mode == "cubic" else {}
        scales = c.scale_factors or [c.scales_h, c.scales_w]
        if None not in scales:
            sizes = "", torch.tensor([1.0, 1.0, *scales])
        else:
            sizes = "", "", c("Concat", c("Slice", c("Shape", c.x), [0], [2]), list(c.output_size), axis=0)
        return c("Resize", c.x, *sizes, mode=mode, coordinate_transformation_mode=way, **own)

    return write


def _reduce(kind: str) -> Callable[[_Call], str | None]:
    return lambda c: c.reduced(kind, c.x, c.dims(c.dim), c.keepdim) if c.dim and 0 not in c.dims(c.dim) else None


def _linear(c: _Call) -> str:
    weight = c.graph.weight(c.weight) if isinstance(c.weight, Tensor) else c.weight
    product = c("MatMul", c.x, c("Transpose", weight, perm=[1, 0]))
    return product if c.bias is None else c("Add", product, c.bias)


def _convolution(c: _Call) -> str | None:
    if not isinstance(c.weight, Tensor) or isinstance(c.padding, str):
        return None
    own = {"output_padding": c.output_padding} if c.transposed else {}
    names = c.graph.weight(c.weight), *([] if c.bias is None else [c.bias])
    kind, pads, kernel = "ConvTranspose" if c.transposed else "Conv", list(c.padding) * 2, c.weight.shape[2:]
    return c(
        *(kind, c.x, *names),
        **dict(kernel_shape=kernel, strides=c.stride, pads=pads, dilations=c.dilation, group=c.groups, **own),
    )


def _normalized(c: _Call, x: str, axes: list[int]) -> str:
    centred = c("Sub", x, c.reduced("ReduceMean", x, axes))
    variance = c.reduced("ReduceMean", c("Mul", centred, centred), axes)
    return c("Div", centred, c("Sqrt", c("Add", variance, c.eps)))


def _scaled(c: _Call, x: str, shape: Sequence[int]) -> str:
    x = x if c.weight is None else c("Mul", x, c.weight.reshape(shape))
    return x if c.bias is None else c("Add", x, c.bias.reshape(shape))


def _layer_norm(c: _Call) -> str:
    axes = list(range(c.rank - len(c.normalized_shape), c.rank))
    return _scaled(c, _normalized(c, c.x, axes), c.normalized_shape)


def _group_norm(c: _Call) -> str:
    x = c("Reshape", c.x, [0, c.group or c.num_groups, -1])
    x = c("Reshape", _normalized(c, x, [2]), c("Shape", c.x))
    return _scaled(c, x, [-1, *[1] * (c.rank - 2)])


_INPUTS: dict[str, int] = dict.fromkeys(("mul", "maximum", "minimum", "pow", "matmul", "mm", "bmm"), 2)
_PARTS = "split", "split_with_sizes"
_TABLE: dict[str, str | Callable[[_Call], str | None]] = {
    "relu": "Relu",
    "sigmoid": "Sigmoid",
    "tanh": "Tanh",
    "exp": "Exp",
    "log": "Log",
    "sqrt": "Sqrt",
    "abs": "Abs",
    "neg": "Neg",
    "erf": "Erf",
    "floor": "Floor",
    "ceil": "Ceil",
    "sin": "Sin",
    "cos": "Cos",
    "mul": "Mul",
    "reciprocal": "Reciprocal",
    "maximum": "Max",
    "minimum": "Min",
    "pow": "Pow",
    **dict.fromkeys(("matmul", "mm", "bmm"), "MatMul"),
    **dict.fromkeys(("clone", "contiguous", "alias", "detach", "dropout"), lambda c: c.x),
    "add": _sum("Add"),
    "sub": _sum("Sub"),
    "rsub": lambda c: c("Sub", c.args[1], c.x) if c.alpha == 1 else None,
    "div": lambda c: c("Div", c.x, c.args[1]) if c.rounding_mode is None else None,
    "rsqrt": lambda c: c("Reciprocal", c("Sqrt", c.x)),
    "clamp": _clip("min", "max"),
    "clamp_min": _clip("min", ""),
    "clamp_max": _clip("", "max"),
    "hardtanh": _clip("min_val", "max_val"),
    "gelu": _gelu,
    "hardsigmoid": _hardsigmoid,
    "hardswish": lambda c: c("Mul", c.x, _hardsigmoid(c)),
    "silu": lambda c: c("Mul", c.x, c("Sigmoid", c.x)),
    "mish": lambda c: c("Mul", c.x, c("Tanh", c("Softplus", c.x))),
    "softplus": lambda c: c("Softplus", c.x) if c.beta == 1 else None,
    "elu": lambda c: c("Elu", c.x, alpha=float(c.alpha)) if c.scale == c.input_scale == 1 else None,
    "leaky_relu": lambda c: c("LeakyRelu", c.x, alpha=float(c.negative_slope)),
    **dict.fromkeys(("prelu", "_prelu_kernel"), lambda c: c("PRelu", c.x, c.weight.reshape(-1, *[1] * (c.rank - 2)))),
    **dict.fromkeys(("softmax", "_softmax"), lambda c: c("Softmax", c.x, axis=c.dim)),
    **dict.fromkeys(("log_softmax", "_log_softmax"), lambda c: c("LogSoftmax", c.x, axis=c.dim)),
    **dict.fromkeys(("view", "_unsafe_view", "reshape"), lambda c: c("Reshape", c.x, c.sizes(c.args[1]))),
    "flatten": _flatten,
    "squeeze": _squeeze,
    "expand": _expand,
    "slice": _slice,
    "unsqueeze": lambda c: c("Unsqueeze", c.x, [c.dim]),
    **dict.fromkeys(("transpose", "t", "mT"), _transpose),
    "permute": lambda c: c("Transpose", c.x, perm=c.dims(c.args[1])),
    "select": lambda c: c("Gather", c.x, torch.tensor(c.index), axis=c.dim),
    **dict.fromkeys(_PARTS, _split),
    "cat": lambda c: c("Concat", *c.args[0], axis=c.dim),
    "pixel_shuffle": lambda c: c("DepthToSpace", c.x, blocksize=c.args[1], mode="CRD"),
    **dict.fromkeys(("constant_pad_nd",), _pad("constant")),
    **dict.fromkeys(("reflection_pad1d", "reflection_pad2d"), _pad("reflect")),
    **dict.fromkeys(("replication_pad1d", "replication_pad2d"), _pad("edge")),
    "avg_pool2d": _pooled("AveragePool"),
    **dict.fromkeys(("max_pool2d", "max_pool2d_with_indices"), _pooled("MaxPool")),
    **dict.fromkeys(("adaptive_avg_pool2d", "_adaptive_avg_pool2d"), _adaptive),
    "upsample_nearest2d": _resized("nearest"),
    "upsample_bilinear2d": _resized("linear"),
    "upsample_bicubic2d": _resized("cubic"),
    "mean": _reduce("ReduceMean"),
    "sum": _reduce("ReduceSum"),
    "amax": _reduce("ReduceMax"),
    "amin": _reduce("ReduceMin"),
    "linear": _linear,
    "addmm": lambda c: c("Add", c("MatMul", c.mat1, c.mat2), c.x) if c.alpha == c.beta == 1 else None,
    **dict.fromkeys(("convolution", "conv1d", "conv2d", "conv3d"), _convolution),
    **dict.fromkeys(("layer_norm", "native_layer_norm"), _layer_norm),
    **dict.fromkeys(("group_norm", "native_group_norm"), _group_norm),
}
