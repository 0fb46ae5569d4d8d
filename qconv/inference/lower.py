"""Lowering: the recorded graph of a trained network to a `Program`."""

import copy
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from ..layers import QuantizedLayer
from ..layers.bypassed import has_own_forward
from ..program import operations as ops
from ..program.operations import Program, Window, as_images
from .builder import Builder, Shape, Value, blocks_of, is_equal, is_same, pair
from .defaults import of_shipping
from .integers import Arithmetic, Quantized, arithmetic, lower_layer
from .record import RECORDING, NotRecorded, record

_IMAGES = 2, 3  # numbers of images for which a network is recorded
_SAME = ("clone", "alias", "detach", "contiguous", "lift_fresh", "lift_fresh_copy", "_to_copy", "as_strided_", "expand")
_MOVES = ("_unsafe_view", "channel_shuffle", "clone", "flip", "index", "index_select", "reshape", "roll")  # and views
_OF_PIXELS = (  # what they do to a number depends on its channel alone
    *("add", "add_", "sub", "mul", "div", "neg", "relu", "clamp", "clamp_min", "clamp_max", "hardtanh", "hardsigmoid"),
    *("hardswish", "leaky_relu", "sigmoid", "silu", "gelu"),
)
_ALONG_LAST = "addmm", "mm", "linear", "native_layer_norm"  # which find the pixels themselves
_SHAPES = ("view", "reshape", "_unsafe_view", "squeeze", "unsqueeze", "flatten")
_OF_MEMORY = (  # what they return, or whether they do, depends on strides
    *("as_strided", "view_as_complex", "view.dtype", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"),
    "_scaled_dot_product_flash_attention_for_cpu",
    *("_native_batch_norm_legit", "native_group_norm"),
)
Lowered = Callable[..., int | None]


@of_shipping()
def lower(network: nn.Module, sample: Tensor) -> Program:
    """Return the program of a trained network.

    What has no operation of its own becomes a `Function`. Whether the program holds for images of any size is tried at
    larger sizes, and at half of the sample's if the network takes it; else `Program.size` is that of the sample.

    Args:
        network: in evaluation.
        sample: its input; the program takes `as_images` of it.

    Raises:
        NotRecorded: no program can stand for the network.
    """
    with RECORDING, _taking_images(network, sample.ndim):  # other threads would meet the hooks of a recording
        is_rows, sample = sample.ndim == 2, as_images(sample)
        lowering = _Lowering(network, sample, {})
        lowering.scope.check_one_image()
        program = lowering.run()
        if program.size is None and (is_rows or not _is_of_any_size(program, network, sample, lowering.chosen)):
            program.size = tuple(sample.shape[2:])
        return program


@contextmanager
def _taking_images(network: nn.Module, rank: int) -> Iterator[None]:
    """Let a network of signals take images of one row, and one of rows images of one pixel."""
    seen = {2: lambda _, args: (args[0].squeeze(3).squeeze(2),), 3: lambda _, args: (args[0].squeeze(2),)}
    hook = network.register_forward_pre_hook(seen[rank]) if rank in seen else None
    try:
        yield
    finally:
        if hook is not None:
            hook.remove()


def _is_of_any_size(program: Program, network: nn.Module, sample: Tensor, chosen: dict[nn.Module, Arithmetic]) -> bool:
    """Whether images of other sizes have the same program: padding, for example, may depend on the size."""
    if sample.ndim != 4:
        return sample.ndim == 1
    height, width = sample.shape[2:]
    half = max(height // 2, 1), width // 2
    heights = (1 + _flipped(height - 1), _flipped(height)) if height > 1 else (1, 1)  # a signal has one row
    for size in (half, (heights[0], 1 + _flipped(width - 1)), (heights[1], _flipped(width))):  # the fastest first
        try:
            other = _Lowering(network, F.interpolate(sample[:1], size), chosen).run()
        except Exception:  # noqa: BLE001  # a network may take one size only, and raise anything
            if size == half:  # which is too small for a window
                continue
            return False
        pairs = list(zip(program.operations, other.operations, strict=False))
        is_equal = len(pairs) == len(program.operations) == len(other.operations)
        if not is_equal or not all(type(a) is type(b) and is_same(a, b) for a, b in pairs):
            return False
    return True


def _flipped(side: int) -> int:
    """Return a larger number whose last six bits are the others: halves are odd where those of `side` are even.

    Sizes that are halved and rounded down are odd where a bit is 1, and rounded up, where one of `side - 1` is 0.
    """
    return ((side | 63) + 1) | (~side & 63)


class _Scope:
    """A network, or a layer of it, and what it does with a sample.

    Attributes:
        prefix: the name of a layer.
        rows: how many samples it has for each image, such as windows.
        graph: the recording.
        of_one_image: nodes of a recording with one image, by the names of those of `graph` that compute the same.
    """

    def __init__(
        self, network: nn.Module, sample: Tensor, whole: Mapping[str, nn.Module], prefix: str = "", rows: int = 1
    ) -> None:
        self.network, self.sample, self.whole, self.prefix, self.rows = network, sample, whole, prefix, rows
        self.graph = self._recorded(_IMAGES[0])
        self.of_one_image: dict[str, fx.Node] = {}

    def _recorded(self, images: int) -> fx.GraphModule:
        sample = self.sample[:1].repeat(images * self.rows, *[1] * (self.sample.ndim - 1))
        return record(self.network, sample, self.whole)

    def check_one_image(self) -> None:
        """Raise `NotRecorded` if one image alone takes another way; torch may view it where it copies several."""
        alone = self._recorded(1)
        one, several = ([each for each in of.graph.nodes if _computes(each.target)] for of in (alone, self.graph))
        if [each.target for each in one] != [each.target for each in several]:
            raise NotRecorded("it does something else for one image than for several")
        self.of_one_image = {b.name: a for a, b in zip(one, several, strict=True)}
        are_same = all(is_equal(_numbers(a, float), _numbers(b, float)) for a, b in zip(one, several, strict=True))
        if not are_same or not is_equal(_held(alone), _held(self.graph)):
            raise NotRecorded("it computes with the number of images")

    @staticmethod
    def _targets(graph: fx.GraphModule) -> list[Any]:
        return [node.target for node in graph.graph.nodes]

    @cached_property
    def of_more_images(self) -> tuple[fx.GraphModule, Mapping[str, fx.Node]]:
        """A recording with more images, whose numbers may be larger, and its nodes by the names of this one's."""
        more = self._recorded(_IMAGES[1])
        if self._targets(more) != self._targets(self.graph):
            raise NotRecorded("it does something else for another number of images")
        return more, {a.name: b for a, b in zip(self.graph.graph.nodes, more.graph.nodes, strict=True)}


class _Several:
    """Several results of a function, each of which becomes an operation when it is taken."""

    def __init__(self, take: Callable[[int], Value]) -> None:
        self.take = take


class _Lowering:
    """Adds an operation for each node of a recorded graph that depends on the sample.

    Args:
        network: in evaluation.
        sample: its input.
        chosen: the arithmetic of layers, which other sizes of images share.
    """

    def __init__(self, network: nn.Module, sample: Tensor, chosen: dict[nn.Module, Arithmetic]) -> None:
        self.chosen = chosen
        self.whole = {name: module for name, module in network.named_modules() if _stays_whole(module)}
        self.build = Builder((_IMAGES[0], *sample.shape[1:]))
        self.scope = _Scope(network, sample, self.whole)
        self.env: dict[fx.Node, Any] = {}
        self.table: dict[str, Lowered] = {
            **dict.fromkeys(("native_batch_norm", "_native_batch_norm_legit_no_training", "batch_norm"), self._norm),
            **dict.fromkeys(("max_pool2d_with_indices", "max_pool2d"), self._maximum),
            **dict.fromkeys(("add", "add_"), self._sum),
            "sub": self._difference,
            "mul": self._product,
            "div": self._quotient,
            "neg": lambda x: self.build.affine(x.place, -1.0, 0.0) if self.build.is_image(x) else None,
            "relu": lambda x: self._clamp(x, 0.0),
            "clamp": self._clamp,
            "clamp_min": self._clamp,
            "clamp_max": lambda x, high: self._clamp(x, None, high),
            "hardtanh": lambda x, low=-1.0, high=1.0: self._clamp(x, low, high),
            "hardsigmoid": lambda x: self._hard(x, is_swish=False),
            "hardswish": lambda x: self._hard(x, is_swish=True),
            "leaky_relu": lambda x, slope=0.01: self._prelu(x, torch.tensor(slope)),
            "abs": lambda x: self._prelu(x, torch.tensor(-1.0)),
            "prelu": self._prelu,
            "_prelu_kernel": self._prelu,
            "mean": partial(self._over_image, ops.Mean),
            "amax": partial(self._over_image, ops.Largest),
            "avg_pool2d": self._average,
            "_adaptive_avg_pool2d": partial(self._adaptive, ops.Average),
            "adaptive_max_pool2d": partial(self._adaptive, ops.Maximum),
            "convolution": self._convolution,
            "addmm": self._addmm,
            "mm": lambda x, weight: self._linear(x, weight.mT),
            "linear": self._linear,
            "cat": self._joined,
            "native_layer_norm": self._layer_norm,
            "sigmoid": lambda x: self._elementwise(ops.Sigmoid, x),
            "silu": lambda x: self._elementwise(ops.SiLU, x),
            "gelu": lambda x, *, approximate="none": self._elementwise(ops.GELU, x) if approximate == "none" else None,
            "upsample_nearest2d": self._repeated,
            "upsample_bilinear2d": self._between,
            "pixel_shuffle": lambda x, times: self.build.shuffled(x.place, times) if self.build.is_image(x) else None,
            "constant_pad_nd": self._padded,
            "reflection_pad2d": partial(self._padded_by, mode="reflect"),
            "reflection_pad1d": partial(self._padded_by, mode="reflect"),
            "replication_pad2d": partial(self._padded_by, mode="replicate"),
            "replication_pad1d": partial(self._padded_by, mode="replicate"),
        }

    def run(self) -> Program:
        sample = Value(0, self.build.stored[0])
        return self._output(self._followed(sample))

    def _followed(self, input: Value) -> Any:
        """Add the operations of the graph in scope; return its output."""
        output = None
        for node in self.scope.graph.graph.nodes:
            if node.op == "placeholder":
                self.env[node] = input
            elif node.op == "get_attr":
                self.env[node] = self._constant(str(node.target))
            elif node.op == "call_function":
                self.env[node] = self._node(node)
            else:
                output = tree_map(self._of, node.args[0], is_leaf=_is_node)
        return output

    def _constant(self, target: str) -> Tensor | Value:
        """Return a tensor that the network holds; one that was repeated for each image is a value."""
        tensor = getattr(self.scope.graph, target)
        if tensor.ndim == 0 or len(tensor) != _IMAGES[0]:
            return tensor
        more = getattr(self.scope.of_more_images[0], target)
        if more.shape == tensor.shape:
            return tensor
        if more.shape != (_IMAGES[1], *tensor.shape[1:]) or not torch.equal(more, tensor[:1].expand_as(more)):
            raise NotRecorded(f"'{target}': it is another tensor for another number of images")
        arguments = tensor[:1].clone(), [ops.Images(1), *tensor.shape[1:]]
        return Value(self.build.call(torch.ops.aten.expand.default, tensor.shape, 0, arguments=arguments), tensor.shape)

    def _of(self, argument: Any) -> Any:
        return self.env[argument] if isinstance(argument, fx.Node) else argument

    def _output(self, output: Any) -> Program:
        program, leaves = self.build.program, tree_leaves(output)
        if not leaves or not all(isinstance(leaf, Value) for leaf in leaves):
            raise NotRecorded("it returns something that its input does not decide, or no tensor")
        self.build.origin = "output"
        if not isinstance(output, Value):
            program.structure = tree_flatten(self.scope.network(self.scope.sample[:1]))[1]
        program.ranks = tuple(len(leaf.shape) for leaf in leaves)
        program.outputs = tuple(leaf.place if self.build.is_image(leaf) else self.build.raw(leaf) for leaf in leaves)
        return program.pruned()

    def _node(self, node: fx.Node) -> Any:
        target: Any = node.target
        args: Any
        args, kwargs = tree_map(self._of, (node.args, node.kwargs), is_leaf=_is_node)
        if target is operator.getitem:
            return args[0].take(args[1]) if isinstance(args[0], _Several) else args[0][args[1]]
        if isinstance(target, type):  # a named tuple
            return target(*args, **kwargs)
        name = _name(target)
        self.build.origin = self._origin(node, name)
        if name.startswith("new_"):  # of the dtype alone
            args = torch.empty(0, dtype=_dtype(node.args[0])), *args[1:]
        is_constant = not any(isinstance(leaf, Value) for leaf in tree_leaves((args, kwargs), is_leaf=_is_value))
        if name == "recorded_layer":
            if is_constant:
                return [*self.whole.values()][args[1]](args[0])
            return self._layer(args[0], args[1], self._free(node) if len(args[0].shape) > 2 else 0)
        if is_constant:
            is_of_images = _numbers(node, int) != _numbers(self._more(node), int)
            if not is_of_images:
                return target(*args, **kwargs)
            return self._function(node, args, kwargs, tuple(node.meta["val"].shape))
        if name == "squeeze" and len(node.args) == 1:
            raise NotRecorded(f"'{self.build.origin}': squeeze() of any dimension, that of one image too")
        result = node.meta["val"]
        if isinstance(result, Tensor):
            return self._one(node, name, args, kwargs, tuple(result.shape))
        shape = tuple(result[0].shape) if result and isinstance(result[0], Tensor) else ()
        first = self._special(node, name, args, kwargs, shape) if shape else None

        def take(number: int) -> Value:
            if first is not None and number == 0:
                return first
            moved = self._moved(node, args, kwargs, number)
            return moved or self._function(node, args, kwargs, tuple(result[number].shape), number)

        return _Several(take)

    def _origin(self, node: fx.Node, name: str) -> str:
        module = node.meta.get("origin", "")
        if self.scope.prefix:  # in a layer
            return self.scope.prefix
        is_leaf = module and not any(True for _ in self.scope.network.get_submodule(module).children())
        return module if is_leaf else f"{module}.{name}".removeprefix(".")

    def _one(self, node: fx.Node, name: str, args: Any, kwargs: Any, shape: Shape) -> Value:
        x = args[0] if args and isinstance(args[0], Value) else None
        if x is not None and name in _SAME and x.shape == shape and node.meta["val"].dtype == _dtype(node.args[0]):
            return x
        if x is not None and name in _SHAPES and (self.build.is_image(x) or self.build.is_flattened(x)):
            seen = Value(x.place, shape)
            if self.build.is_image(seen) or self.build.is_flattened(seen):
                return seen
        image = self.build.image_of(x) if x is not None and name in _SHAPES else None
        if image is not None and shape[-1] == image.shape[1]:
            more = self.scope.of_more_images[1][node.name].meta["val"]
            if more.shape[1:] == shape[1:]:
                return self.build.pixels(image.place, shape)
        found = self._special(node, name, args, kwargs, shape) or self._moved(node, args, kwargs)
        return found or self._function(node, args, kwargs, shape)

    def _moved(self, node: fx.Node, args: Any, kwargs: Any, result: int | None = None) -> Value | None:
        """Return the value of a function that moves numbers of images, but does not change them; None of others."""
        target: Any = node.target
        name = _name(target)
        values = [each for each in tree_leaves((args, kwargs), is_leaf=_is_value) if _is_value(each)]
        if not (target.is_view or name in _MOVES) or values != [args[0]]:
            return None
        target = torch.ops.aten.reshape.default if name in _SHAPES[:3] else target  # of any strides
        moved = self.build.moved(args[0])
        is_floats = all(_dtype(each) in (torch.float32, None) for each in (node.args[0], node))
        if moved is None or not is_floats or _is_of_some_images(target, args, kwargs):
            return None
        index = target(moved[1], *args[1:], **kwargs)
        index = index if result is None else index[result]
        shape, each = tuple(index.shape), torch.Size(self.build.stored[moved[0]][1:]).numel()
        if shape[:1] != (_IMAGES[0],) or not torch.equal(index[0] + each, index[1]):
            return None
        image = index[..., None, None] if len(shape) == 2 else index.unsqueeze(2) if len(shape) == 3 else index
        place = self.build.selected(moved[0], image) if image.ndim == 4 and image.numel() else None
        if place is not None:
            return Value(place, shape)
        value = self._function(node, args, kwargs, shape, result)
        return Value(value.place, shape, (moved[0], index))

    def _special(self, node: fx.Node, name: str, args: Any, kwargs: Any, shape: Shape) -> Value | None:
        """Add an operation for a node on images of float32; None if it needs a `Function`."""
        given = [*node.all_input_nodes, node]
        if name not in self.table or any(_dtype(each) not in (torch.float32, None) for each in given):
            return None
        if _numbers(node, int) != _numbers(self.scope.of_one_image.get(node.name, node), int):  # a number of images
            return None
        leaves = tree_leaves((args, kwargs), is_leaf=_is_value)
        values = [leaf for leaf in leaves if isinstance(leaf, Value)]
        if not self._are_pixels(node, name, values):
            if name in _OF_PIXELS and any(map(self.build.is_signal, values)):
                args, kwargs = tree_map(self._as_row, (args, kwargs), is_leaf=_is_value)
            place = self.table[name](*args, **kwargs)
            return None if place is None else Value(place, shape)
        if name in _OF_PIXELS:
            tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.numel() != 1]
            if any(each.shape[-1] != each.numel() or each.numel() != shape[-1] for each in tensors):
                return None
            args, kwargs = tree_map(self._as_image, (args, kwargs), is_leaf=_is_value)
        place = self.table[name](*args, **kwargs)
        return None if place is None else self.build.pixels(place, shape)

    def _are_pixels(self, node: fx.Node, name: str, values: Sequence[Value]) -> bool:
        """Whether a function of pixels takes channels last, of which an operation takes images."""
        is_known = name in _OF_PIXELS and any(map(self.build.image_of, values))
        if not is_known and name not in _ALONG_LAST:
            return False
        if any(value.shape[:-1] != values[0].shape[:-1] for value in values) or self._free(node) != 0:
            return False
        return None not in map(self.build.image_from, values)

    def _free(self, node: fx.Node) -> int | None:
        """Return which dimension of a function's inputs depends on the number of images; None if several do."""
        inputs = [each for each in node.all_input_nodes if isinstance(self.env[each], Value)]
        if all(self.build.has_images_first(self.env[each]) for each in inputs):  # most, without another recording
            return 0
        more = self.scope.of_more_images[1]
        pairs = [(each.meta["val"].shape, more[each.name].meta["val"].shape) for each in inputs]
        found = {dim for few, many in pairs for dim in range(len(few)) if few[dim] != many[dim]}
        return max(found, default=0) if len(found) < 2 else None

    def _as_row(self, argument: Any) -> Any:
        """Return a signal as an image of one row, and numbers of its channels as those of an image."""
        if isinstance(argument, Value):
            return Value(argument.place, self.build.stored[argument.place])
        return argument.unsqueeze(-1) if isinstance(argument, Tensor) and argument.ndim > 1 else argument

    def _as_image(self, argument: Any) -> Any:
        """Return pixels with channels last as an image, and numbers of channels as those of an image."""
        if isinstance(argument, Value):
            return self.build.image_of(argument)
        return argument.view(-1, 1, 1) if isinstance(argument, Tensor) else argument

    def _function(self, node: fx.Node, args: Any, kwargs: Any, shape: Shape, result: int | None = None) -> Value:
        """Add torch's own function, on values in the shapes that the network sees."""
        name, inputs = _name(node.target), list[int]()
        of_images, counts = list[ops.Images](), list[bool]()  # whether an input's first length is that of the images
        if name == "as_strided" and not node.all_input_nodes[0].meta["val"].is_contiguous():
            raise NotRecorded(f"'{self.build.origin}': it reads the memory of a tensor that is not contiguous")

        def given(argument: Any, other: Any) -> Any:
            if isinstance(argument, Value):
                place = self.build.raw(argument)
                if name in _OF_MEMORY:  # parts in C give channels last
                    place = self.build.call(torch.ops.aten.contiguous.default, argument.shape, place)
                inputs.append(place)
                counts.append(other.meta["val"].shape[:1] == _IMAGES[1:])
                return ops.Given(len(inputs) - 1)
            if type(argument) is not int or argument == other:
                return argument
            of_images.append(_of_images(argument, other))
            return of_images[-1]

        more = self._more(node)
        arguments, named = _plain(tree_map(given, (args, kwargs), (more.args, more.kwargs), is_leaf=_is_value))
        if name in _SHAPES[:3] and len(of_images) == 1 and -1 not in arguments[1]:  # whatever the number of images
            arguments = [ops.Given(0), [-1 if isinstance(size, ops.Images) else size for size in arguments[1]]]
            of_images.clear()
        if not inputs or (of_images and not counts[0]):  # as of windows: several for each image
            inputs = [0, *inputs]
            arguments, named = _behind_images((arguments, named))
        function: Any = torch.ops.aten.reshape.default if name in _SHAPES[:3] else node.target  # of any strides
        if name == "native_group_norm" and result == 0:  # which holds the number of pixels
            x, weight, bias, _, _, _, groups, eps = arguments
            function, arguments, result = torch.ops.aten.group_norm.default, (x, groups, weight, bias, eps, False), None
        place = self.build.call(function, shape, *inputs, arguments=tuple(arguments), named=named, result=result)  # pyright: ignore
        return Value(place, shape)

    def _more(self, node: fx.Node) -> fx.Node:
        """Return the node of a recording with more images; itself if it has no whole numbers."""
        return self.scope.of_more_images[1][node.name] if _numbers(node, int) else node

    def _layer(self, x: Value, place: int, free: int | None) -> Value:
        name, layer = list(self.whole.items())[place]
        self.build.origin = name
        if not isinstance(layer, QuantizedLayer):
            found = self._norm(x, layer.weight, layer.bias, layer.running_mean, layer.running_var, False, layer.eps)
            given = () if found is not None else (self.build.raw(x),)
            return Value(self.build.call(copy.deepcopy(layer), x.shape, *given) if found is None else found, x.shape)
        if layer not in self.chosen:
            self.chosen[layer] = arithmetic(layer)
        how = self.chosen[layer]
        if len(how.weight):
            if free is None:
                raise NotRecorded(f"'{name}': several lengths of its input depend on the number of images")
            return lower_layer(self.build, layer, how, x, name, free)
        self.build.program.layers.append(ops.LayerCall(name, x.place, None))
        quantized = Quantized(layer)
        sample, (rows, rest) = torch.zeros(x.shape), divmod(x.shape[0], _IMAGES[0])
        try:
            if free or rest:
                raise NotRecorded("its first length is not that of the images, or of several windows of each")
            scope = _Scope(quantized, sample, {}, name, rows)
        except NotRecorded:
            shape = tuple(quantized(sample).shape)
            return Value(self.build.call(quantized, shape, self.build.raw(x)), shape)
        outer, self.scope = self.scope, scope
        output = self._followed(x)
        self.scope = outer
        return output

    # Arithmetic

    def _sum(self, a: Any, b: Any, alpha: float = 1) -> int | None:
        if isinstance(a, Value) and isinstance(b, Value):
            if a.shape != b.shape or not (self.build.is_image(a) and self.build.is_image(b)):
                return None
            second = b.place if alpha == 1 else self.build.affine(b.place, float(alpha), 0.0)
            return self.build.add(ops.Add, a.place, second)
        x, number = (a, b) if isinstance(a, Value) else (b, a)
        if alpha != 1:
            return None
        return self._with_number(x, number, lambda place, numbers: self.build.affine(place, 1.0, numbers))

    def _difference(self, a: Any, b: Any, alpha: float = 1) -> int | None:
        if isinstance(a, Value):
            return self._sum(a, b, -alpha) if isinstance(b, Value) else self._sum(a, -b, alpha)
        return self._with_number(b, a, lambda place, numbers: self.build.affine(place, -1.0, numbers))

    def _product(self, a: Any, b: Any) -> int | None:
        if not (isinstance(a, Value) and isinstance(b, Value)):
            x, number = (a, b) if isinstance(a, Value) else (b, a)
            return self._with_number(x, number, lambda place, numbers: self.build.affine(place, numbers, 0.0))
        if a.shape != b.shape and a.shape[2:] == (1, 1):
            a, b = b, a
        is_gate = a.shape != b.shape
        if not (self.build.is_image(a) and self.build.is_image(b)) or len(a.shape) != len(b.shape):
            return None
        if is_gate and b.shape != (*a.shape[:2], 1, 1):
            return None
        return self.build.add(ops.Multiply, a.place, b.place, is_gate=is_gate)

    def _quotient(self, a: Any, b: Any, *, rounding_mode: str | None = None) -> int | None:
        if isinstance(a, Value) and not isinstance(b, Value) and rounding_mode is None:
            return self._product(a, 1 / b if isinstance(b, Tensor) else 1 / float(b) if b else None)
        return None

    def _with_number(self, x: Value, number: Any, add: Callable[[int, Tensor], int]) -> int | None:
        """Add an operation with one number, or one for each channel."""
        if number is None or not self.build.is_image(x):
            return None
        numbers = torch.as_tensor(number, dtype=torch.float32).detach()
        channels = x.shape[1]
        of_channels = numbers.numel() == channels and numbers.shape[-len(x.shape) + 1 :] == (channels, *x.shape[2:])
        of_channels |= numbers.shape[-3:] == (channels, 1, 1) and numbers.numel() == channels and len(x.shape) == 4
        if numbers.numel() != 1 and not of_channels:
            return None
        return add(x.place, numbers)

    def _clamp(self, x: Value, low: Any = None, high: Any = None) -> int | None:
        if isinstance(low, Tensor | Value) or isinstance(high, Tensor | Value) or not self.build.is_image(x):
            return None
        ends = (-torch.inf if low is None else float(low)), (torch.inf if high is None else float(high))
        return self.build.add(ops.Clamp, x.place, low=ends[0], high=ends[1])

    def _hard(self, x: Value, is_swish: bool) -> int | None:
        """``min(max(x + 3, 0), 6) / 6``, and its product with x."""
        if not self.build.is_image(x):
            return None
        place = self.build.affine(x.place, 1.0, 3.0)
        place = self.build.affine(self.build.add(ops.Clamp, place, low=0.0, high=6.0), torch.ones(()) / 6, 0.0)
        return self.build.add(ops.Multiply, x.place, place) if is_swish else place

    def _elementwise(self, kind: type[ops.Operation], x: Value) -> int | None:
        return self.build.add(kind, x.place) if self.build.is_image(x) else None

    def _prelu(self, x: Any, weight: Any) -> int | None:
        if isinstance(weight, Value) or not self.build.is_image(x) or weight.numel() not in (1, x.shape[1]):
            return None
        slope = weight.detach().float().flatten().expand(x.shape[1]).clone()
        return self.build.add(ops.PReLU, x.place, slope=slope)

    def _norm(self, x: Value, weight: Any, bias: Any, mean: Any, var: Any, *rest: Any) -> int | None:
        parts = [part for part in (weight, bias, mean, var) if part is not None]
        is_fixed = rest[0] is not True and all(isinstance(part, Tensor) for part in parts)
        if mean is None or var is None or not is_fixed or not self.build.is_image(x):
            return None
        factor = (var.double() + rest[-1]).rsqrt() * (1 if weight is None else weight.double())
        shift = -mean.double() * factor + (0 if bias is None else bias.double())
        return self.build.norm(x.place, factor, shift)

    def _layer_norm(self, x: Value, shape: Any, weight: Any, bias: Any, eps: float) -> int | None:
        """Over channels: of images that are seen with channels last, or of rows."""
        image = self.build.image_of(x) or (x if len(x.shape) == 2 and self.build.is_image(x) else None)
        is_constant = not any(isinstance(each, Value) for each in (weight, bias))
        if image is None or not is_constant or list(shape) != [image.shape[1]]:
            return None
        place = self.build.add(ops.LayerNorm, image.place, eps=eps)
        scale, shift = 1.0 if weight is None else weight, 0.0 if bias is None else bias
        return place if weight is bias is None else self.build.affine(place, scale, shift)

    # Windows

    def _over_image(
        self, kind: type[ops.Operation], x: Value, dim: Any = None, keepdim: bool = False, dtype: Any = None
    ) -> int | None:
        dims = sorted(d % len(x.shape) for d in ((dim,) if isinstance(dim, int) else dim or ()))
        if len(x.shape) < 3 or dims != [*range(2, len(x.shape))] or not self.build.is_image(x):
            return None
        return self.build.add(kind, x.place)

    def _maximum(
        self, x: Value, kernel: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1, ceil: bool = False
    ):
        if len(x.shape) != 4 or pair(dilation) != (1, 1) or not self.build.is_image(x):
            return None
        return self.build.add(ops.Maximum, x.place, window=_window(kernel, stride, padding, ceil))

    def _average(
        self,
        x: Value,
        kernel: Any,
        stride: Any = (),
        padding: Any = 0,
        ceil: bool = False,
        counts_padding: bool = True,
        divisor: int | None = None,
    ) -> int | None:
        if len(x.shape) != 4 or not self.build.is_image(x):
            return None
        window = _window(kernel, stride, padding, ceil)
        if divisor is None and not (counts_padding and any(window.padding)):
            return self.build.add(ops.Average, x.place, window=window)
        if ceil:
            return None
        rows, columns = window.kernel  # zeros count: a convolution by the same number everywhere
        weight = torch.full((x.shape[1], 1, rows, columns), 1 / (divisor or rows * columns))
        return self.build.floats(x.place, weight, None, window, x.shape[1])

    def _adaptive(self, pool: type[ops.Operation], x: Value, size: Any) -> int | None:
        rows, columns = size
        if pool is ops.Maximum and rows == columns == 1:
            return self._over_image(ops.Largest, x, (2, 3)) if len(x.shape) == 4 else None
        if not self.build.is_image(x) or len(x.shape) != 4 or x.shape[2] % rows or x.shape[3] % columns:
            return None
        self.build.fix_size()
        kernel = x.shape[2] // rows, x.shape[3] // columns
        if kernel == (1, 1):
            return x.place
        return self.build.add(pool, x.place, window=_window(kernel, (), 0, False))

    def _convolution(
        self,
        x: Any,
        weight: Any,
        bias: Any,
        stride: Any,
        padding: Any,
        dilation: Any,
        transposed: bool,
        output_padding: Any,
        groups: int,
    ) -> int | None:
        """A convolution by a constant weight."""
        is_constant = isinstance(weight, Tensor) and (bias is None or isinstance(bias, Tensor))
        if not is_constant or not isinstance(x, Value):
            return None
        if transposed:
            return self._transposed(x, weight, bias, stride, padding, dilation, output_padding, groups)
        if weight.ndim == 3 and len(x.shape) == 3:  # a signal is an image of one row
            sides = padding[0], padding[0], 0, 0
            window = Window((1, weight.shape[2]), (1, stride[0]), sides, (1, dilation[0]))
            return self.build.floats(self.build.row(x), weight.unsqueeze(2), bias, window, groups)
        if weight.ndim != 4 or not self.build.is_image(x):
            return None
        rows, columns = pair(padding)
        sides = columns, columns, rows, rows
        window = Window(pair(weight.shape[2:]), pair(stride), sides, pair(dilation))
        return self.build.floats(x.place, weight, bias, window, groups)

    def _transposed(self, x: Value, weight: Tensor, bias: Any, stride: Any, padding: Any, *rest: Any) -> int | None:
        """A transposed convolution by a constant weight."""
        *geometry, groups = stride, padding, *rest
        if weight.ndim != 4 or not self.build.is_image(x):
            return None
        filters = weight.detach().unflatten(0, (groups, -1)).transpose(1, 2).flatten(0, 1)  # output channels first
        blocks = blocks_of(filters, *geometry)
        if blocks is None:
            return None
        bias = None if bias is None else bias.repeat_interleave(stride[0] ** 2)
        return self.build.shuffled(self.build.floats(x.place, blocks[0], bias, blocks[1], groups), stride[0])

    def _addmm(self, bias: Any, x: Any, weight: Any, *, beta: float = 1, alpha: float = 1) -> int | None:
        is_linear = isinstance(x, Value) and isinstance(weight, Tensor) and isinstance(bias, Tensor)
        return self._linear(x, weight.mT, bias) if is_linear and beta == alpha == 1 and bias.ndim == 1 else None

    def _linear(self, x: Any, weight: Any, bias: Any = None) -> int | None:
        if not isinstance(x, Value) or not isinstance(weight, Tensor):
            return None
        if (image := self.build.image_of(x)) is not None:
            return self.build.floats(image.place, weight[..., None, None], bias, Window(), 1)
        if len(x.shape) != 2:
            return None
        if not (self.build.is_image(x) or self.build.is_flattened(x)):
            return None
        weight, window = self.build.on_pixels(weight[..., None, None], x)
        return self.build.floats(x.place, weight, bias, window, 1)

    # Channels and pixels

    def _joined(self, values: Any, dim: int = 0) -> int | None:
        """Channels one after the other: a sum of values with channels of zeros before and behind theirs."""
        if not all(isinstance(value, Value) and self.build.is_image(value) for value in values):
            return None
        ranks = {len(value.shape) for value in values}
        if not ranks <= {3, 4} or dim % max(ranks) != 1:
            return None
        total, first, joined = sum(value.shape[1] for value in values), 0, -1
        for value in values:
            taken = self.build.add(ops.Take, value.place, channels=total, first=first)
            first += value.shape[1]
            joined = taken if joined < 0 else self.build.add(ops.Add, joined, taken)
        return joined

    def _repeated(self, x: Value, size: Any, *scales: float | None) -> int | None:
        """Each pixel several times."""
        times = _whole_times(x, size, scales)
        # For 41 times torch, multiplying by 1 / 41 in floats, begins some pixels late.
        is_so = times is not None and max(times) < 41 and self.build.is_image(x)
        return self.build.add(ops.Repeat, x.place, times=times) if is_so else None

    def _between(self, x: Value, size: Any, align_corners: bool, *scales: float | None) -> int | None:
        """Pixels between others."""
        times = _whole_times(x, size, scales)
        is_so = times is not None and self.build.is_image(x)
        return self.build.add(ops.Bilinear, x.place, times=times, align_corners=align_corners) if is_so else None

    def _padded(self, x: Value, pad: Any, value: float = 0) -> int | None:
        """Channels of zeros, or numbers around the images."""
        pad = (*pad[:2], 0, 0, *pad[2:]) if len(x.shape) == 3 else pad
        left, right, top, bottom, first, last = (*pad, *[0] * 6)[:6]
        if len(pad) > 6 or min(pad) < 0 or len(x.shape) < 3 or not self.build.is_image(x):
            return None
        if value and (first or last):
            return None
        place, channels = x.place, x.shape[1] + first + last
        if first or last:
            place = self.build.add(ops.Take, place, channels=channels, first=first)
        return self.build.padded(place, (left, right, top, bottom), value=value) if any(pad[:4]) else place

    def _padded_by(self, x: Value, pad: Any, mode: str) -> int | None:
        if len(x.shape) < 3 or min(pad) < 0 or not self.build.is_image(x):
            return None
        return self.build.padded(x.place, (*pad, 0, 0)[:4], mode=mode)


def _whole_times(x: Value, size: Any, scales: tuple[float | None, ...]) -> tuple[int, int] | None:
    """Return how many times an image is enlarged to a size, down and across; None if it is not a whole number."""
    times = size[0] // x.shape[2], size[1] // x.shape[3]
    is_whole = list(size) == [times[0] * x.shape[2], times[1] * x.shape[3]] and scales in ((), times)
    return times if is_whole else None


def _stays_whole(module: nn.Module) -> bool:
    """Whether a recording keeps a module whole: a quantized layer, a batch norm by statistics, an instance norm."""
    is_norm = type(module) in (nn.BatchNorm1d, nn.BatchNorm2d) and module.running_mean is not None
    is_norm |= type(module) in (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d) and module.running_mean is None
    return (is_norm or isinstance(module, QuantizedLayer)) and not has_own_forward(module)


def _computes(target: Any) -> bool:
    """Whether an operator makes other numbers than its input has."""
    is_aten = isinstance(target, torch._ops.OpOverload)
    return is_aten and not target.is_view and target._schema.name.rpartition("::")[2] not in (*_SAME, *_SHAPES)


def _is_node(argument: Any) -> bool:
    return isinstance(argument, fx.Node)


def _is_value(argument: Any) -> bool:
    return isinstance(argument, Value | _Several)


def _dtype(node: Any) -> torch.dtype | None:
    """Return the dtype of a node's result; None if that is not a single tensor of floats, or is a constant."""
    value = node.meta.get("val") if isinstance(node, fx.Node) and node.op != "get_attr" else None
    return value.dtype if isinstance(value, Tensor) else None


def _name(target: Any) -> str:
    """Return the name of an operator; a view of the same bits in another dtype has one of its own."""
    return "view.dtype" if target is torch.ops.aten.view.dtype else target._schema.name.rpartition("::")[2]


def _is_of_some_images(target: Any, args: Any, kwargs: Any) -> bool:
    """Whether a function takes or moves samples; which ones may show only with more than a recording has."""
    names = [each.name for each in target._schema.arguments]
    defaults = {each.name: each.default_value for each in target._schema.arguments}
    given = defaults | dict(zip(names, args, strict=False)) | kwargs
    dims = given.get("dim", given.get("dims", ()))
    is_permuted = target._schema.name == "aten::permute"  # whatever the number of samples
    is_indexed = given.get("indices", (None,))[0] is not None
    of_first = any(d % len(args[0].shape) == 0 for d in ((dims,) if isinstance(dims, int) else dims))
    return is_indexed or (of_first and not is_permuted)


def _plain(argument: Any) -> Any:
    """Return an argument with lists in place of torch.fx's, which Dynamo does not take."""
    if isinstance(argument, list):
        return [_plain(each) for each in argument]
    if isinstance(argument, dict):
        return {key: _plain(each) for key, each in argument.items()}
    return tuple(map(_plain, argument)) if type(argument) is tuple else argument


def _behind_images(argument: Any) -> Any:
    """Return an argument of a function with the images as its first input, before the others."""
    if isinstance(argument, dict):
        return {key: _behind_images(each) for key, each in argument.items()}
    if type(argument) in (list, tuple):
        return [_behind_images(each) for each in argument]
    return ops.Given(argument.place + 1) if isinstance(argument, ops.Given) else argument


def _numbers(node: fx.Node, kind: type) -> list[Any]:
    return [leaf for leaf in tree_leaves((node.args, node.kwargs)) if type(leaf) is kind]


def _held(graph: fx.GraphModule) -> list[Any]:
    return [getattr(graph, node.target) for node in graph.graph.nodes if node.op == "get_attr"]  # pyright: ignore


def _of_images(number: int, other: Any) -> ops.Images:
    """Return a number that grows with the number of images; raise if it does so in another way."""
    if type(other) is not int or number * _IMAGES[1] != other * _IMAGES[0] or number % _IMAGES[0]:
        raise NotRecorded("it does something else for another number of images")
    return ops.Images(number // _IMAGES[0])


def _window(kernel: Any, stride: Any, padding: Any, ceil: bool) -> Window:
    rows, columns = pair(padding)
    return Window(pair(kernel), pair(stride if stride else kernel), (columns, columns, rows, rows), ceil=ceil)
