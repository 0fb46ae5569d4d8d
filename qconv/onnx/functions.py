"""What torch's functions become in ONNX: a table by the names of aten's operators; torch decomposes all others."""

import math
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from onnx import TensorProto
from torch import Tensor, fx, nn
from torch._decomp import core_aten_decompositions, get_decompositions
from torch._subclasses.functional_tensor import dispatch_functionalize
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.utils._pytree import tree_leaves, tree_map

from ..program.operations import Function, Given, Images
from .graph import Graph
from .shapes import Shape


class _Call:
    """A called function: its arguments, as attributes too, and the shape of the first one for two images."""

    def __init__(self, graph: Graph, function: Function, given: Sequence[str], shapes: Sequence[Shape]) -> None:
        self.function: Any = function.function
        schema = self.function._schema
        names = [argument.name for argument in schema.arguments]
        self.values = {argument.name: argument.default_value for argument in schema.arguments}
        self.values |= dict(zip(names, function.arguments, strict=False)) | dict(function.named)
        self.values = {name: _float(value) for name, value in self.values.items()}
        self.args = [self.values[name] for name in names]
        self.graph, self.given, self.result = graph, given, function.result or 0
        first: Any = self.args[0]
        self.x = "" if isinstance(first, list) else self.name(first)
        first = first[0] if isinstance(first, list) and first else first
        self.shape: tuple[int, ...] = tuple(
            shapes[first.place] if isinstance(first, Given) else getattr(first, "shape", ())
        )
        self.rank = len(self.shape)

    def __getattr__(self, name: str) -> Any:
        return self.values.get(name)

    def name(self, value: Any) -> str:
        """Return the name of a value; a string is one, a list one of whole numbers."""
        if isinstance(value, Images):
            return _cast(self, self.sizes([value], False), "FLOAT")
        if isinstance(value, str | Given):
            return value if isinstance(value, str) else self.given[value.place]
        is_whole = isinstance(value, list) or (isinstance(value, Tensor) and not value.is_floating_point())
        return self.graph.constant(value, "int64" if is_whole else "float32")

    def __call__(self, kind: str, *values: Any, **attributes: Any) -> str:
        return self.graph.node(kind, *map(self.name, values), **attributes)

    def dims(self, value: Any) -> list[int]:
        return [dim % self.rank for dim in ([value] if isinstance(value, int) else value)]

    def sides(self, value: Any) -> list[int]:
        """Return a number for each dimension of a window."""
        return [value] * (self.rank - 2) if isinstance(value, int) else list(value) * ((self.rank - 2) // len(value))

    def sizes(self, sizes: Sequence[Any], is_new: bool = True) -> str:
        """Return a shape in which some sizes are numbers of images; of a new shape, one may be left open."""
        if is_new and -1 not in sizes and sum(isinstance(size, Images) for size in sizes) == 1:
            sizes = [-1 if isinstance(size, Images) else size for size in sizes]
        if all(isinstance(size, int) for size in sizes):
            return self.name(list(sizes))
        images = self("Slice", self("Shape", "input"), [0], [1])
        parts = (self("Mul", images, [size.times]) if isinstance(size, Images) else [size] for size in sizes)
        return self("Concat", *parts, axis=0)


def write_function(graph: Graph, function: Function, given: Sequence[str], shapes: Sequence[Shape]) -> str:
    """Add the nodes of a function of inputs with these names and shapes; return the name of its output.

    Raises:
        ValueError: there are none for it.
    """
    target: Any = function.function
    is_aten = isinstance(target, torch._ops.OpOverload)
    kind = target._schema.name.partition("::")[2].rstrip("_") if is_aten else ""
    name, row = None, _TABLE.get(re.sub("[13]d", "2d", kind))  # which is of any number of dimensions
    if isinstance(target, _InstanceNorm):  # which torch computes as channels of one image
        name = _instance_norm(graph, target, given[0], shapes[0])
    elif row is not None and (function.result in (None, 0) or kind.startswith(("split", "unbind", "var_mean"))):
        call = _Call(graph, function, given, shapes)
        name = row(call) if callable(row) else call(row, *call.args[: 2 if row in _OF_TWO else 1])
    if name is None and (isinstance(target, nn.Module) or target in _decompositions()):
        name = _write_parts(graph, function, given, shapes)
    if name is None:
        of_opset = f" of opset {graph.form.opset}" if row else ""
        what = str(target) if is_aten else getattr(target, "__name__", type(target).__name__)
        what += " with these arguments" if row else ""
        raise ValueError(f"'{function.origin}': {what} can't be written as ONNX{of_opset}: use another function there")
    return name


def _write_parts(graph: Graph, function: Function, given: Sequence[str], shapes: Sequence[Shape]) -> str:
    """Add what a module does, or what torch decomposes a function into, function by function."""
    target: Any = function.function
    is_module = isinstance(target, nn.Module)
    run = getattr(target, "on_floats", target) if is_module else _decompositions()[target]
    run = replace(function, function=dispatch_functionalize(run)).run  # without changes in place
    recorded, more = (make_fx(run)(*(torch.zeros(shape.of(images)) for shape in shapes)) for images in (2, 3))
    names, shapes, place = list(given), list(shapes), dict[Any, Any]()
    for node, other in zip(recorded.graph.nodes, more.graph.nodes, strict=True):
        own = (node.args, node.kwargs), (other.args, other.kwargs)
        own = tree_map(partial(_of_images, function.origin), *own, is_leaf=_is_node)
        arguments, named = tree_map(
            lambda leaf: place.get(leaf, leaf) if _is_node(leaf) else leaf, own, is_leaf=_is_node
        )
        if node.op == "placeholder":
            place[node] = Given(len(place))
        elif node.op == "get_attr":
            place[node] = getattr(recorded, node.target)
        elif node.op != "output" and not node.users:  # such as a tensor of which only the strides were read
            continue
        elif node.op == "output":
            result = arguments[0]
            return graph.constant(result) if isinstance(result, Tensor) else names[result.place]
        elif not any(isinstance(leaf, _OF_IMAGES) for leaf in tree_leaves((arguments, named), is_leaf=_is_value)):
            place[node] = node.target(*arguments, **named)
        else:
            is_one = node.target is operator.getitem  # of several results
            part = arguments[0] if is_one else replace(function, function=node.target, arguments=arguments, named=named)
            part = replace(part, result=arguments[1] if is_one else None)
            place[node], result = part, node.meta["val"]
            if isinstance(result, Tensor):
                names.append(write_function(graph, part, names, shapes))
                shapes.append(Shape(result.shape, other.meta["val"].shape))
                place[node] = Given(len(names) - 1)
    raise AssertionError("a graph ends in an output")


@cache
def _decompositions() -> dict[Any, Callable[..., Any]]:
    aten = torch.ops.aten
    more = [aten.elu, aten.any, aten._adaptive_avg_pool2d, aten._native_batch_norm_legit, aten.native_layer_norm]
    return dict(core_aten_decompositions()) | get_decompositions(more)


def _is_value(leaf: Any) -> bool:
    return isinstance(leaf, _OF_IMAGES)


def _is_node(leaf: Any) -> bool:
    return isinstance(leaf, fx.Node | Images)


def _of_images(origin: str, leaf: Any, other: Any) -> Any:
    """Return a number of two images that grows with their number as one of all images."""
    if type(leaf) is not int or leaf == other:
        return leaf
    if 3 * leaf != 2 * other:
        raise ValueError(f"'{origin}': a number that is {leaf} for two images and {other} for three can't be written")
    return Images(leaf // 2)


def _float(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) else value


def _sum(kind: str) -> Callable[[_Call], str]:
    return lambda c: c(kind, c.x, c.args[1] if c.alpha in (None, 1) else c("Mul", c.args[1], c.alpha))


def _product(c: _Call) -> str:
    """Multiply a constant by a value: the other way round, ONNX Runtime (1.32) multiplies weights by it."""
    x, y = c.args[:2]
    return c("Mul", *((y, x) if isinstance(x, Given) else (x, y)))


def _clip(*names: str) -> Callable[[_Call], str]:
    """Write a clamp, of which each end is a number, or a value that is broadcast."""

    def write(c: _Call) -> str:
        ends, x = [c.values.get(name) for name in names], c.x
        if not any(isinstance(end, Tensor | Given) for end in ends):
            return c("Clip", x, *("" if end is None else float(end) for end in ends))
        for kind, end in zip(("Max", "Min"), ends, strict=False):
            x = x if end is None else c(kind, x, end)
        return x

    return write


def _gelu(c: _Call) -> str:
    inner = c("Mul", c.x, math.sqrt(0.5))
    if c.approximate == "tanh":
        cube = c("Mul", c("Mul", c("Mul", c.x, c.x), c.x), 0.044715)
        inner = c("Mul", c("Add", c.x, cube), math.sqrt(2 / math.pi))
    inner = c("Tanh" if c.approximate == "tanh" else "Erf", inner)
    return c("Mul", c("Mul", c.x, 0.5), c("Add", inner, 1.0))


def _flatten(c: _Call) -> str:
    (first,), (last,) = c.dims(c.start_dim), c.dims(c.end_dim)
    return c("Reshape", c.x, [0] * first + [-1] + list(c.shape[last + 1 :]))


def _transpose(c: _Call) -> str:
    order, (one, other) = list(range(c.rank)), c.args[1:] or (0, 1)
    order[one], order[other] = order[other], order[one]
    return c("Transpose", c.x, perm=order)


def _expand(c: _Call) -> str:
    given = [1] * (len(c.size) - c.rank) + list(c.shape)
    are_whole = [
        size == -1 or (isinstance(size, Images) and side > 1) for size, side in zip(c.size, given, strict=True)
    ]
    return c("Expand", c.x, c.sizes([1 if done else size for done, size in zip(are_whole, c.size, strict=True)], False))


def _split(c: _Call) -> str:
    sizes = c.args[1]
    sizes = [sizes] * (c.result + 1) if isinstance(sizes, int) else sizes
    start = sum(sizes[: c.result])
    return c("Slice", c.x, [start], [start + sizes[c.result]], [c.dim])


def _glu(c: _Call) -> str:
    (dim,) = c.dims(c.dim)
    first, second = (c("Slice", c.x, [at], [at + c.shape[dim] // 2], [dim]) for at in (0, c.shape[dim] // 2))
    return gated(c.graph, first, second)


_MODES = {"constant": "constant", "reflect": "reflect", "replicate": "edge"}  # of torch's padding


def _circular(c: _Call) -> str:
    """Pad each of the last dimensions by its other end."""
    name, sides = c.x, c.args[1]
    for place in range(len(sides) // 2):
        dim, (before, after) = c.rank - 1 - place, sides[2 * place : 2 * place + 2]
        first = [c("Slice", name, [-before], [2**62], [dim])] if before else []
        last = [c("Slice", name, [0], [after], [dim])] if after else []
        name = c("Concat", *first, name, *last, axis=dim)
    return name


def _pad(mode: str) -> Callable[[_Call], str | None]:
    def write(c: _Call) -> str | None:
        sides, before, after = c.args[1], [0] * c.rank, [0] * c.rank
        for place in range(len(sides) // 2):
            before[-1 - place], after[-1 - place] = sides[2 * place : 2 * place + 2]
        return None if min(sides) < 0 else c("Pad", c.x, before + after, float(c.value or 0), mode=mode)

    return write


def _pooled(c: _Call) -> str | None:
    if c.divisor_override is not None:
        return None
    kind, own = "AveragePool", {"count_include_pad": int(c.count_include_pad or 0)}
    if c.dilation is not None:
        kind, own = "MaxPool", {"dilations": c.sides(c.dilation)}
    pads, kernel = c.sides(c.padding) * 2, c.sides(c.kernel_size)
    own |= dict(kernel_shape=kernel, strides=c.sides(c.stride or kernel), ceil_mode=int(c.ceil_mode))
    return c(kind, c.x, pads=pads, **own)


def _adaptive(kind: str) -> Callable[[_Call], str | None]:
    def write(c: _Call) -> str | None:
        size, given = c.sides(c.output_size), list(c.shape[2:])
        kernel = [side // wanted for side, wanted in zip(given, size, strict=True)]
        if {*size} == {1}:
            return c(f"Global{kind}", c.x)
        is_even = [side * wanted for side, wanted in zip(kernel, size, strict=True)] == given
        return c(kind, c.x, kernel_shape=kernel, strides=kernel) if is_even else None

    return write


def _nearest(c: _Call) -> str:
    """Gather torch's pixels: a Resize takes others where a place is nearly whole, as ONNX Runtime's (1.32) by 1/7."""
    x, sides = c.x, c.shape[2:]
    for axis, side in enumerate(sides, 2):
        places = torch.arange(float(side)).view(-1, *[1] * (c.rank - axis - 1)).expand(1, 1, *sides)
        x = c("Gather", x, c.function(places, *c.args[1:]).movedim(axis, 0).flatten(1)[:, 0].long(), axis=axis)
    return x


def _resized(mode: str) -> Callable[[_Call], str]:
    def write(c: _Call) -> str:
        way = "align_corners" if c.align_corners else "half_pixel"
        scales = c.scale_factors or [c.values[name] for name in c.values if name.startswith("scales")] or [None]
        is_scaled = None not in scales
        if is_scaled and c.output_size:
            # onnx (1.23) says that 10 pixels times 1.3, which float32 rounds down, are 12; torch and runtimes make 13.
            scaled = torch.tensor(scales).double() * torch.tensor(c.shape[2:])
            is_scaled = scaled.int().tolist() == list(c.output_size)
        sizes: tuple[Any, ...] = "", torch.tensor([1.0, 1.0, *scales]) if is_scaled else ""
        if not is_scaled:
            sizes = *sizes, c("Concat", c("Slice", c("Shape", c.x), [0], [2]), list(c.output_size), axis=0)
        return c("Resize", c.x, *sizes, mode=mode, coordinate_transformation_mode=way)

    return write


def _reduce(kind: str) -> Callable[[_Call], str | None]:
    return lambda c: c.graph.reduced(kind, c.x, c.dims(c.dim), c.keepdim) if c.dim else None


def _linear(c: _Call) -> str:
    weight = c.graph.weight(c.weight) if isinstance(c.weight, Tensor) else c.weight
    return c(
        *("Add", c.bias) if c.bias is not None else ("Identity",), c("MatMul", c.x, c("Transpose", weight, perm=[1, 0]))
    )


def _convolution(c: _Call) -> str | None:
    if not isinstance(c.weight, Tensor) or isinstance(c.padding, str):
        return None
    own: dict[str, Any] = {"output_padding": c.output_padding} if c.transposed else {}
    own |= dict(kernel_shape=c.weight.shape[2:], strides=c.stride, pads=list(c.padding) * 2, dilations=c.dilation)
    names = c.x, c.graph.weight(c.weight), *([] if c.bias is None else [c.bias])
    return c("ConvTranspose" if c.transposed else "Conv", *names, group=c.groups, **own)


def _deformed(c: _Call) -> str | None:
    if not isinstance(c.weight, Tensor):
        return None
    if c.graph.form.opset < 19:
        raise ValueError(f"'{c.graph.origin}': deformable convolutions need an ONNX file with opset=19 or more")
    *sides, groups, offset_groups, has_mask = c.args[5:]
    own = dict(zip(("strides", "pads", "dilations"), (sides[:2], sides[2:4] * 2, sides[4:]), strict=True))
    given = c.x, c.graph.weight(c.weight), c.offset, c.bias, *([c.mask] if has_mask else [])
    return c("DeformConv", *given, kernel_shape=c.weight.shape[2:], group=groups, offset_group=offset_groups, **own)


def gated(graph: Graph, x: str, gate: str) -> str:
    """Add ``x / (1 + e^−gate)``, whose sign is that of x: ONNX Runtime's Sigmoid (1.32) is 0 below −18."""
    return graph.node("Div", x, graph.node("Add", graph.node("Exp", graph.node("Neg", gate)), graph.constant(1.0)))


def normalized(graph: Graph, x: str, axes: list[int], eps: float) -> str:
    """Add ``(x − mean) / √(var + eps)`` over some axes."""
    centred = graph.node("Sub", x, graph.reduced("ReduceMean", x, axes))
    variance = graph.reduced("ReduceMean", graph.node("Mul", centred, centred), axes)
    return graph.node("Div", centred, graph.node("Sqrt", graph.node("Add", variance, graph.constant(eps))))


def _instance_norm(graph: Graph, module: Any, x: str, shape: Sequence[int]) -> str:
    numbers = (module.weight, module.bias) if module.affine else (torch.ones(shape[1]), torch.zeros(shape[1]))
    return graph.node("InstanceNormalization", x, *map(graph.constant, numbers), epsilon=module.eps)


def _variance(c: _Call) -> str | None:
    """Write the variance; the second result is the mean."""
    dims = c.dims(c.dim or [0])
    if 0 in dims and c.shape[0] > 1:  # the number of images
        return None
    if c.result:
        return c.graph.reduced("ReduceMean", c.x, dims, c.keepdim)
    centred = c("Sub", c.x, c.graph.reduced("ReduceMean", c.x, dims))
    count = math.prod(c.shape[dim] for dim in dims)
    rest = max(count - (1 if c.correction is None else c.correction), 0)
    factor = count / rest if rest else math.inf  # 0 times inf is NaN, as in torch
    return c("Mul", c.graph.reduced("ReduceMean", c("Mul", centred, centred), dims, c.keepdim), factor)


def _indexed(c: _Call) -> str | None:
    """Gather by whole numbers for some dimensions in a row, which become one."""
    places = [dim for dim, index in enumerate(c.indices) if index is not None]
    if 0 in places or places != list(range(places[0], places[-1] + 1)):
        return None
    index: Any = 0
    for dim in places:
        index = index * c.shape[dim] + c.indices[dim].long() % c.shape[dim]
    x = c.x if len(places) == 1 else c("Reshape", c.x, [0] * places[0] + [-1] + list(c.shape[places[-1] + 1 :]))
    gathered = c("Gather", x, index.flatten(), axis=places[-1] - c.rank)  # from the end, as `floats` does
    if index.ndim == 1:
        return gathered
    # OpenVINO (2026.4.1) takes no other number of dimensions of codes.
    return c("Reshape", gathered, [0] * places[0] + [*index.shape, *c.shape[places[-1] + 1 :]])


def _replaced(c: _Call) -> str | None:
    """Put a value in the place of a part that isn't some of the images."""
    if c.step != 1 or c.dims(c.dim) == [0]:
        return None
    size = c.shape[c.dim]
    start, end, _ = slice(c.start, c.end).indices(size)
    before = [c("Slice", c.x, [0], [start], [c.dim])] if start else []
    after = [c("Slice", c.x, [end], [size], [c.dim])] if end < size else []
    return c("Concat", *before, c.src, *after, axis=c.dim)


def _flipped(c: _Call) -> str:
    count = len(c.args[1])
    return c("Slice", c.x, [-1] * count, [-(2**62)] * count, c.args[1], [-1] * count)


def _sampled(c: _Call) -> str | None:
    opset = c.graph.form.opset
    modes = ("linear", "nearest", "cubic") if opset >= 20 else ("bilinear", "nearest", "bicubic")
    own = dict(mode=modes[c.interpolation_mode], padding_mode=("zeros", "border", "reflection")[c.padding_mode])
    return c("GridSample", c.x, c.grid, align_corners=int(c.align_corners), **own) if opset >= 16 else None


def _extremes(kind: str) -> Callable[[_Call], str]:
    """Write the largest or smallest numbers of all, or of a dimension."""
    return lambda c: c.graph.reduced(kind, c.x, list(range(c.rank)) if c.dim is None else c.dims(c.dim), c.keepdim or 0)


def _batch_norm(c: _Call) -> str | None:
    given = c.running_mean, c.running_var
    if not isinstance(given[0], Tensor):
        return None
    scale = torch.ones_like(given[0]) if c.weight is None else c.weight
    bias = torch.zeros_like(given[0]) if c.bias is None else c.bias
    return c("BatchNormalization", c.x, scale, bias, *given, epsilon=float(c.eps))


def _group_norm(c: _Call) -> str:
    groups = c("Reshape", c.x, [0, c.group or c.num_groups, -1])
    x = c("Reshape", normalized(c.graph, groups, [2], c.eps), c("Shape", c.x))
    for kind, numbers in (("Mul", c.weight), ("Add", c.bias)):
        x = x if numbers is None else c(kind, x, numbers.reshape(-1, *[1] * (c.rank - 2)))
    return x


def _attention(c: _Call) -> str | None:
    if c.is_causal:
        return None
    query = c("Mul", c.x, c.shape[-1] ** -0.5 if c.scale is None else float(c.scale))
    scores = c("MatMul", query, c("Transpose", c.key, perm=[*range(c.rank - 2), c.rank - 1, c.rank - 2]))
    scores = scores if c.attn_mask is None else c("Add", scores, c.attn_mask)
    return c("MatMul", c("Softmax", scores, axis=-1), c.value)


def _compared(kind: str) -> Callable[[_Call], str]:
    return lambda c: _cast(c, c(kind, c.x, c.args[1]), "FLOAT")


def _cast(c: _Call, x: Any, *kinds: str) -> str:
    for kind in kinds:
        x = c("Cast", c.name(x), to=TensorProto.DataType.Value(kind))
    return x


def _copysign(c: _Call) -> str:
    magnitude = c("Abs", c.args[0])
    return c("Where", c("Less", c.other, 0.0), c("Neg", magnitude), magnitude)


def _copy(c: _Call) -> str | None:
    """Round to a dtype; whole numbers and truths are floats, too."""
    if c.dtype in (None, torch.float32, torch.float64):
        return c.x
    if c.dtype in _EIGHT_BITS and c.graph.form.opset < 19:
        raise ValueError(f"'{c.graph.origin}': floats of 8 bits need opset=19 or more")
    return _cast(c, c.x, _EIGHT_BITS.get(c.dtype) or _KINDS.get(c.dtype, "INT64"), "FLOAT")


_KINDS = {torch.bool: "BOOL", torch.float16: "FLOAT16", torch.bfloat16: "BFLOAT16"}
_EIGHT_BITS = {torch.float8_e4m3fn: "FLOAT8E4M3FN", torch.float8_e5m2: "FLOAT8E5M2"}  # from opset 19 on


_OF_IMAGES = Given, Images, Function
_OF_TWO = "Mul", "Max", "Min", "Pow", "MatMul"
_NAMES = {  # of operators with the same arguments
    **dict(relu="Relu", sigmoid="Sigmoid", tanh="Tanh", exp="Exp", log="Log", sqrt="Sqrt", abs="Abs"),
    **dict(neg="Neg", erf="Erf", floor="Floor", ceil="Ceil", sin="Sin", cos="Cos", atan="Atan"),
    **dict(reciprocal="Reciprocal", maximum="Max", minimum="Min", pow="Pow", matmul="MatMul"),
    **dict(mm="MatMul", bmm="MatMul", sign="Sign"),
}
_TABLE: dict[str, str | Callable[[_Call], str | None]] = {
    **_NAMES,
    **dict.fromkeys(("clone", "contiguous", "alias", "detach", "dropout"), lambda c: c.x),
    "mul": _product,
    **dict(add=_sum("Add"), sub=_sum("Sub"), var=_variance, var_mean=_variance),
    **dict.fromkeys(("index", "_unsafe_index"), _indexed),
    "index_select": lambda c: c("Gather", c.x, c.index.long(), axis=c.dim % c.rank - c.rank),
    "full": lambda c: c("Expand", float(c.fill_value), c.sizes(c.size, False)),
    "full_like": lambda c: c("Expand", float(c.fill_value), c("Shape", c.x)),
    **dict(empty=lambda c: c("Expand", 0.0, c.sizes(c.size, False)), exp2=lambda c: c("Pow", 2.0, c.x)),
    "copy": lambda c: c("Expand", c.src, c("Shape", c.x)),
    **dict(flip=_flipped, slice_scatter=_replaced),
    "cumsum": lambda c: c("CumSum", c.x, torch.tensor(c.dim)),
    **dict(log1p=lambda c: c("Log", c("Add", c.x, 1.0)), expm1=lambda c: c("Sub", c("Exp", c.x), 1.0)),
    "div": lambda c: c("Div", c.x, c.args[1]) if c.rounding_mode is None else None,
    **dict(lt=_compared("Less"), gt=_compared("Greater"), eq=_compared("Equal"), _to_copy=_copy),
    **dict(le=_compared("LessOrEqual"), ge=_compared("GreaterOrEqual")),
    "ne": lambda c: c("Sub", 1.0, _compared("Equal")(c)),
    "where": lambda c: c("Where", _cast(c, c.x, "BOOL"), *c.args[1:]),
    "masked_fill": lambda c: c("Where", _cast(c, c.mask, "BOOL"), c.value, c.x),
    "copysign": _copysign,
    "isnan": lambda c: _cast(c, c("IsNaN", c.x), "FLOAT"),
    "any": lambda c: c.graph.reduced("ReduceMax", c.x, c.dims(c.dim), c.keepdim),
    "rsqrt": lambda c: c("Reciprocal", c("Sqrt", c.x)),
    **dict(clamp=_clip("min", "max"), clamp_min=_clip("min"), clamp_max=_clip("", "max")),
    **dict(hardtanh=_clip("min_val", "max_val"), gelu=_gelu),
    "hardsigmoid": lambda c: c("HardSigmoid", c.x, alpha=1 / 6, beta=0.5),
    "hardswish": lambda c: c("Mul", c.x, c("HardSigmoid", c.x, alpha=1 / 6, beta=0.5)),
    "silu": lambda c: gated(c.graph, c.x, c.x),
    "round": lambda c: None if c.decimals else c("Round", c.x),
    "softplus": lambda c: c("Softplus", c.x) if (c.beta, c.threshold) == (1, 20) else None,
    "elu": lambda c: c("Elu", c.x, alpha=float(c.alpha)) if c.scale == c.input_scale == 1 else None,
    "leaky_relu": lambda c: c("LeakyRelu", c.x, alpha=float(c.negative_slope)),
    **dict.fromkeys(("prelu", "_prelu_kernel"), lambda c: c("PRelu", c.x, c.weight.reshape(-1, *[1] * (c.rank - 2)))),
    **dict.fromkeys(("softmax", "_softmax", "_safe_softmax"), lambda c: c("Softmax", c.x, axis=c.dim)),
    **dict.fromkeys(("log_softmax", "_log_softmax"), lambda c: c("LogSoftmax", c.x, axis=c.dim)),
    **dict.fromkeys(("view", "_unsafe_view", "reshape"), lambda c: c("Reshape", c.x, c.sizes(c.args[1]))),
    **dict(flatten=_flatten, expand=_expand, split=_split, split_with_sizes=_split, glu=_glu),
    "squeeze": lambda c: c("Squeeze", c.x, d) if (d := [e for e in c.dims(c.dim or []) if c.shape[e] == 1]) else None,
    "unsqueeze": lambda c: c("Unsqueeze", c.x, [c.dim]),
    "slice": lambda c: c("Slice", c.x, [c.start or 0], [2**62 if c.end is None else c.end], [c.dim], [c.step]),
    "unbind": lambda c: c("Gather", c.x, torch.tensor(c.result), axis=c.dim),
    "select": lambda c: c("Gather", c.x, torch.tensor(c.index), axis=c.dim),
    **dict(transpose=_transpose, t=_transpose, permute=lambda c: c("Transpose", c.x, perm=c.dims(c.args[1]))),
    "cat": lambda c: c("Concat", *c.args[0], axis=c.dim),
    "repeat": lambda c: c("Tile", c.x, c.sizes(c.repeats, False)) if len(c.repeats) == c.rank else None,
    "linalg_vector_norm": lambda c: _reduce("ReduceL2")(c) if c.ord == 2 else None,
    "argmax": lambda c: _cast(c, c("ArgMax", c.x, axis=c.dim, keepdims=int(c.keepdim)), "FLOAT") if c.dim else None,
    "pixel_shuffle": lambda c: c("DepthToSpace", c.x, blocksize=c.args[1], mode="CRD"),
    **dict(constant_pad_nd=_pad("constant"), reflection_pad2d=_pad("reflect"), replication_pad2d=_pad("edge")),
    **dict(group_norm=_group_norm, native_group_norm=_group_norm),
    "pad": lambda c: _circular(c) if c.mode == "circular" else _pad(_MODES[c.mode])(c),
    **dict.fromkeys(("avg_pool2d", "max_pool2d", "max_pool2d_with_indices"), _pooled),
    **dict.fromkeys(("adaptive_avg_pool2d", "_adaptive_avg_pool2d"), _adaptive("AveragePool")),
    "adaptive_max_pool2d": _adaptive("MaxPool"),
    **dict.fromkeys(("upsample_nearest2d", "_upsample_nearest_exact2d"), _nearest),
    **dict.fromkeys(("upsample_linear2d", "upsample_bilinear2d", "upsample_trilinear2d"), _resized("linear")),
    "upsample_bicubic2d": _resized("cubic"),
    **dict(mean=_reduce("ReduceMean"), amax=_reduce("ReduceMax"), amin=_reduce("ReduceMin"), sum=_reduce("ReduceSum")),
    **dict(max=_extremes("ReduceMax"), min=_extremes("ReduceMin"), prod=_extremes("ReduceProd")),
    "grid_sampler_2d": _sampled,
    "linear": _linear,
    "addmm": lambda c: c("Add", c("MatMul", c.mat1, c.mat2), c.x) if c.alpha == c.beta == 1 else None,
    **dict(convolution=_convolution, conv2d=_convolution, deform_conv2d=_deformed),
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_native_batch_norm_legit_no_training": _batch_norm,
}
