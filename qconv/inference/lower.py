"""Lowering: the graph of a frozen network to a `Program`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.modules.conv import _ConvNd
from torch.utils._pytree import tree_leaves, tree_map

from ..layers import QConv2d, QLinear, QuantizedLayer
from ..layers.bypassed import has_own_forward
from ..layers.conv import sides_of
from ..program import operations as ops
from ..program.edges import NotMonotone, edges_of, first_floats, rises
from ..program.operations import Operation, Program, Size, Window
from ..quantizers import Identity
from .adapters import Distance, OfLastDimension
from .defaults import of_shipping
from .frozen_layers import BinaryConv2d, Encode, IntegerConv2d, IntegerLayer
from .functional import Clamp
from .one_magnitude import SignConv2d
from .tracing import writes_in_place

_EXACT = 1 << 24  # sums up to here are exact as floats
_BYTE = 255
_SAME = ("contiguous", "detach", "dropout", "float", "alias")
_SHAPES = ("flatten", "view", "reshape", "squeeze", "unsqueeze")
_SUMS = ("add", "add_", "iadd")
_PRODUCTS = ("mul", "mul_", "imul", "multiply")
_WITH_NUMBERS = (*_SUMS, *_PRODUCTS, "sub", "sub_", "isub")
_PASSING = (nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d)
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d)


class Refused(Exception):  # noqa: N818  # not an error: the reason why a network stays as it is
    """Raised with the reason why a program can't hold a network."""


@dataclass(eq=False)
class Value:
    """A value in the graph: the number of its operation, and what the network makes of the sample."""

    place: int
    sample: Tensor


@torch.no_grad()
@of_shipping()
def lower(network: nn.Module, sample: Tensor) -> Program:
    """Return the program of a frozen network.

    Whether it holds for images of any size is tried at three other sizes; else `Program.size` is that of the sample.

    Args:
        network: of a `FrozenModel`.
        sample: images (N, C, H, W).

    Raises:
        Refused: the program has no operation for a part of it.
    """
    if not isinstance(network, fx.GraphModule):
        raise Refused("its forward stays Python")
    if sample.ndim != 4 or sample.dtype != torch.float32 or not sample.numel():
        raise Refused(f"its input ({sample.dtype}, of shape {tuple(sample.shape)}) is not images of float32")
    program = _lowered(network, sample)
    if program.size is None and not _is_of_any_size(program, network, sample):
        program.size = sample.shape[2], sample.shape[3]
    return program


def _is_of_any_size(program: Program, network: fx.GraphModule, sample: Tensor) -> bool:
    """Whether images of other sizes have the same program: padding, for example, may depend on the size."""
    height, width = sample.shape[2:]
    for size in ((height + 1, width + 1), (2 * height, 2 * width), (height // 2, width // 2)):
        try:
            other = _lowered(network, F.interpolate(sample[:1], size))
        except Exception:  # noqa: BLE001  # a network may take one size only, and raise anything
            return False
        pairs = list(zip(program.operations, other.operations, strict=False))
        is_equal = len(pairs) == len(program.operations) == len(other.operations) and all(
            type(a) is type(b) and _equal(a, b) for a, b in pairs
        )
        if not is_equal:
            return False
    return True


def _lowered(network: fx.GraphModule, sample: Tensor) -> Program:
    program = Program(sample.shape[1])
    two = sample[:1].repeat(2, 1, 1, 1)  # two images: a dimension of 1 is another one
    output = _Lowering(network, program, [(sample.shape[2], sample.shape[3])], "").run(Value(0, two))
    if not isinstance(output, Value) or output.sample.ndim not in (2, 4):
        raise Refused("it returns something else than a tensor of rows or images")
    if isinstance(program.operations[output.place], ops.Sign | ops.Quantize):
        raise Refused("it returns codes")
    program.output, program.is_flat = output.place, output.sample.ndim == 2
    if program.is_flat and output.sample.shape[1] != program.operations[output.place].channels:
        raise Refused("it returns flattened images")
    return program.pruned()


class _Lowering(fx.Interpreter):
    """Runs a graph on a sample, and adds an operation for each node that depends on it.

    Args:
        network: the graph.
        program: takes the operations.
        sizes: height and width of each operation's value for the sample.
        prefix: of the names in `network`.
    """

    def __init__(self, network: fx.GraphModule, program: Program, sizes: list[Size], prefix: str) -> None:
        super().__init__(network)
        self.network, self.program, self.sizes, self.prefix = network, program, sizes, prefix
        self.name = ""

    def run_node(self, n: fx.Node) -> Any:
        self.name = f"{self.prefix}{n.target if n.op == 'call_module' else n.name}"
        result = super().run_node(n)
        first = self.env.get(n.all_input_nodes[0]) if n.all_input_nodes else None
        if isinstance(result, Value) and isinstance(first, Value) and writes_in_place(self.network, n):
            before = first.place
            if isinstance(self.program.operations[before], ops.Take):
                raise self._refused("a write to a view")
            for value in self.env.values():
                if isinstance(value, Value) and value.place == before:
                    value.place = result.place
        return result

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        module = self.fetch_attr(target)
        if not _is_known(module) and any(isinstance(leaf, Value) for leaf in tree_leaves((args, kwargs))):
            return self._inside(module, args, kwargs)
        return self._called(module, args, kwargs, lambda sample: self._module(module, args[0], sample))

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = getattr(getattr(target, "overloadpacket", target), "__name__", str(target))
        return self._called(target, args, kwargs, lambda sample: self._function(name, args, kwargs, sample))

    def call_method(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        def call(first: Any, *rest: Any, **named: Any) -> Any:
            return getattr(first, target)(*rest, **named)

        return self._called(call, args, kwargs, lambda sample: self._function(target, args, kwargs, sample))

    def _called(self, call: Any, args: Any, kwargs: Any, lowered: Callable[[Tensor], int]) -> Any:
        """Call on samples; a tensor that depends on the images gets an operation, all else is a constant."""
        result = call(*tree_map(_unwrapped, args), **tree_map(_unwrapped, kwargs))
        if not any(isinstance(leaf, Value) for leaf in tree_leaves((args, kwargs))):
            return result
        if isinstance(result, Tensor):
            try:
                return Value(lowered(result), result)
            except (TypeError, ValueError, IndexError, KeyError, AttributeError, RuntimeError) as error:
                what = getattr(call, "__name__", type(call).__name__)
                raise self._refused(f"{what}, called with other arguments than usual") from error
        if any(isinstance(leaf, Tensor) for leaf in tree_leaves(result)):
            raise self._refused("several tensors")
        return result

    def _inside(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Lower a module by the operators that it calls on the sample."""
        if has_own_forward(module) or kwargs or not all(isinstance(arg, Value) for arg in args):
            raise self._refused(type(module).__name__)
        drawn = torch.get_rng_state()
        try:
            inner = make_fx(module)(*map(_unwrapped, args))
        except Exception as error:  # a foreign forward may raise anything
            raise self._refused(type(module).__name__) from error
        targets: list[Any] = [node.target for node in inner.graph.nodes if node.op == "call_function"]
        operators = [target for target in targets if isinstance(target, torch._ops.OpOverload)]
        writes = [target for target in operators if target._schema.is_mutable and "as_strided" not in str(target)]
        if writes or not torch.equal(drawn, torch.get_rng_state()):
            raise self._refused(f"{type(module).__name__} writes in place, or draws random numbers")
        return _Lowering(inner, self.program, self.sizes, f"{self.name}.").run(*args)

    def _refused(self, what: str) -> Refused:
        return Refused(f"'{self.name}': a program has no operation for it ({what})")

    def _add(self, operation: Operation) -> int:
        self.sizes.append(operation.size(self.sizes[operation.inputs[0]]))
        return self.program.add(operation)

    def _given(self, place: int) -> dict[str, Any]:
        """Return the fields of an operation that keeps the channels of its input."""
        return {"inputs": (place,), "channels": self.program.operations[place].channels, "origin": self.name}

    # Functions

    def _function(self, name: str, args: Any, kwargs: Any, sample: Tensor) -> int:
        x = args[0]
        values = [arg for arg in args if isinstance(arg, Value)]
        if name in ("cat", "concat", "concatenate"):
            return self._joined(*args, **kwargs)
        if name == "addmm" and len(args) == 3 and not kwargs:
            bias, x, weight = args
            name, args, values = "linear", (x, weight.mT, bias), [x]
        if name in (*_SUMS, *_PRODUCTS) and len(args) == 2 and not isinstance(x, Value):
            args = x, _ = args[1], x
        if not isinstance(x, Value) or len(values) != sum(isinstance(v, Value) for v in tree_leaves((args, kwargs))):
            raise self._refused(name)
        if name == "dropout" and (args[2] if len(args) > 2 else kwargs.get("training", True)):
            raise self._refused("dropout in evaluation")
        if name in _SAME:
            return x.place
        if name == "squeeze" and len(args) + len(kwargs) == 1:
            raise self._refused("squeeze() of any dimension, that of one image too")
        if name in _SHAPES:
            return self._reshaped(x, sample)
        if name in _SUMS and len(values) == 2 and not kwargs:
            if values[0].sample.shape != values[1].sample.shape:
                raise self._refused("a sum of two shapes")
            given = self._given(x.place)
            return self._add(ops.Add(**{**given, "inputs": (x.place, values[1].place)}))
        if name in _PRODUCTS and len(values) == 2 and not kwargs:
            return self._multiply(*values)
        if name in _WITH_NUMBERS and len(args) == 2 and len(values) == 1 and not kwargs:
            return self._with_constant(name, x, args[1])
        if name == "relu":
            return self._add(ops.Clamp(**self._given(x.place), low=0.0))
        if name in ("hardsigmoid", "hardswish"):
            return self._hard(x, is_swish=name == "hardswish")
        if name == "as_strided_" and isinstance(self.program.operations[x.place], ops.Mean):
            return x.place  # of one pixel, whatever its strides are
        if name == "mean":
            return self._mean(x, *args[1:], **kwargs)
        if name == "linear":
            return self._linear(*args, **kwargs)
        if name == "conv2d":
            return self._convolution(*args, **kwargs)
        if name == "convolution" and not args[6]:  # torch's operator for all kinds: this one is not transposed
            return self._convolution(*args[:6], groups=args[8])
        if name in ("prelu", "_prelu_kernel"):
            return self._prelu(*args, **kwargs)
        if name == "getitem":
            return self._strided(x, args[1])
        if name == "slice":
            dim, start, end, step = (*args[1:], *(0, 0, 2**63 - 1, 1)[len(args) - 1 :])
            index = [slice(None)] * 4
            index[dim] = slice(start or None, None if end >= x.sample.shape[dim] else end, step)
            return self._strided(x, tuple(index))
        if name in ("pad", "constant_pad_nd"):
            return self._padded(x, *args[1:], **kwargs)
        if name == "adaptive_avg_pool2d" and _pair(args[1] if len(args) > 1 else kwargs["output_size"]) == (1, 1):
            return self._add(ops.Mean(**self._given(x.place)))
        raise self._refused(name)

    def _multiply(self, a: Value, b: Value) -> int:
        """A product of two values, one of which may be a gate: a number for each channel."""
        if a.sample.shape != b.sample.shape and a.sample.shape[2:].numel() == 1:
            a, b = b, a
        is_gate = a.sample.shape != b.sample.shape
        if is_gate and b.sample.shape != (*a.sample.shape[:2], 1, 1):
            raise self._refused(f"a product of {tuple(a.sample.shape)} and {tuple(b.sample.shape)}")
        given = {**self._given(a.place), "inputs": (a.place, b.place)}
        return self._add(ops.Multiply(**given, is_gate=is_gate))

    def _hard(self, x: Value, is_swish: bool) -> int:
        """``min(max(x + 3, 0), 6) / 6``, and its product with x."""
        given = self._given(x.place)
        ones, zeros = torch.ones(given["channels"]), torch.zeros(given["channels"])
        place = self._add(ops.Affine(**given, scale=ones, bias=3 * ones))
        place = self._add(ops.Clamp(**self._given(place), low=0.0, high=6.0))
        place = self._add(ops.Affine(**self._given(place), scale=ones / 6, bias=zeros))
        return self._add(ops.Multiply(**{**given, "inputs": (x.place, place)})) if is_swish else place

    def _reshaped(self, x: Value, sample: Tensor) -> int:
        """A new shape of the same pixels: rows of whole images, or images of one pixel."""
        rows = (len(x.sample), x.sample[0].numel())
        if tuple(sample.shape) not in (rows, (*rows, 1, 1), tuple(x.sample.shape)):
            raise self._refused(f"{tuple(x.sample.shape)} in another shape")
        return x.place

    def _with_constant(self, name: str, x: Value, constant: Any) -> int:
        given = self._given(x.place)
        number = torch.as_tensor(constant, dtype=torch.float32).detach()
        is_per_channel = number.numel() == 1 or number.shape[-3:] == (given["channels"], 1, 1)
        if number.ndim > 4 or not is_per_channel or number.numel() not in (1, given["channels"]):
            raise self._refused(f"{name} of shape {tuple(number.shape)}")
        of_channels = number.flatten().expand(given["channels"]).clone()
        ones, zeros = torch.ones(given["channels"]), torch.zeros(given["channels"])
        if name in _PRODUCTS:
            return self._add(ops.Affine(**given, scale=of_channels, bias=zeros))
        return self._add(ops.Affine(**given, scale=ones, bias=-of_channels if "sub" in name else of_channels))

    def _mean(self, x: Value, dim: Any = None, keepdim: bool = False) -> int:
        dims = sorted(d % 4 for d in ((dim,) if isinstance(dim, int) else dim or ()))
        if x.sample.ndim != 4 or dims != [2, 3]:
            raise self._refused(f"mean over {dim}")
        return self._add(ops.Mean(**self._given(x.place)))

    def _joined(self, values: Any, dim: int = 0) -> int:
        """Channels one after the other: a sum of values with channels of zeros before and behind theirs."""
        if not all(isinstance(value, Value) for value in values) or dim % values[0].sample.ndim != 1:
            raise self._refused("cat")
        if any(value.sample.ndim != 4 for value in values):
            raise self._refused("cat of rows")
        total, first, joined = sum(value.sample.shape[1] for value in values), 0, -1
        for value in values:
            given = {**self._given(value.place), "channels": total}
            taken = self._add(ops.Take(**given, first=first))
            first += value.sample.shape[1]
            joined = taken if joined < 0 else self._add(ops.Add(**{**given, "inputs": (joined, taken)}))
        return joined

    def _linear(self, input: Value, weight: Tensor, bias: Tensor | None = None) -> int:
        if input.sample.ndim != 2:
            raise self._refused("a linear layer of more than rows")
        return self._floats(weight[..., None, None], bias, Window(), 1, input)

    def _convolution(
        self,
        input: Value,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> int:
        """A convolution by a constant weight."""
        if weight.ndim != 4 or isinstance(padding, str):
            raise self._refused("convolution")
        rows, columns = _pair(padding)
        kernel = weight.shape[2], weight.shape[3]
        window = Window(kernel, _pair(stride), (columns, columns, rows, rows), _pair(dilation))
        return self._floats(weight, bias, window, groups, input)

    def _prelu(self, x: Value, weight: Tensor) -> int:
        given = self._given(x.place)
        return self._add(ops.PReLU(**given, slope=weight.detach().flatten().expand(given["channels"]).clone()))

    def _strided(self, x: Value, index: Any) -> int:
        is_whole = (
            isinstance(index, tuple)
            and len(index) == 4
            and all(isinstance(part, slice) and (part.start, part.stop) == (None, None) for part in index)
        )
        if x.sample.ndim != 4 or not is_whole or any(part.step not in (None, 1) for part in index[:2]):
            raise self._refused(f"[{index}]")
        stride = index[2].step or 1, index[3].step or 1
        return x.place if stride == (1, 1) else self._add(ops.Take(**self._given(x.place), stride=stride))

    def _padded(self, x: Value, pad: Any, mode: Any = "constant", value: float | None = None) -> int:
        """Channels of zeros, or zeros around the images: those are what a convolution by 1 pads with."""
        left, right, top, bottom, first, last = (*pad, *[0] * 6)[:6]
        if len(pad) > 6 or min(pad) < 0 or mode not in ("constant", 0) or value or x.sample.ndim != 4:
            raise self._refused("pad")
        if first or last:
            given = self._given(x.place)
            place = self._add(ops.Take(**{**given, "channels": given["channels"] + first + last}, first=first))
            x = Value(place, x.sample)
        if not any(pad[:4]):
            return x.place
        given, window = self._given(x.place), Window(padding=(left, right, top, bottom))
        ones = torch.ones(given["channels"], 1, 1, 1)
        return self._add(ops.ConvFloats(**given, weight=ones, window=window, groups=given["channels"]))

    # Modules

    def _module(self, module: Any, x: Value, sample: Tensor) -> int:
        if has_own_forward(module):
            raise self._refused(f"{type(module).__name__} with a forward of its own")
        given = self._given(x.place)
        if isinstance(module, _PASSING):
            return x.place
        if isinstance(module, nn.Flatten | nn.Unflatten):
            return self._reshaped(x, sample)
        if isinstance(module, nn.ReLU):
            return self._add(ops.Clamp(**given, low=0.0))
        if isinstance(module, nn.Hardtanh):  # and ReLU6
            return self._add(ops.Clamp(**given, low=float(module.min_val), high=float(module.max_val)))
        if isinstance(module, Clamp):
            low, high = (None if end is None else float(end) for end in (module.min, module.max))
            return self._add(
                ops.Clamp(**given, low=-torch.inf if low is None else low, high=torch.inf if high is None else high)
            )
        if isinstance(module, nn.Hardsigmoid | nn.Hardswish):
            return self._hard(x, is_swish=isinstance(module, nn.Hardswish))
        if isinstance(module, nn.PReLU):
            return self._prelu(x, module.weight)
        if isinstance(module, nn.LeakyReLU):
            return self._prelu(x, torch.tensor(module.negative_slope))
        if isinstance(module, nn.ZeroPad2d):
            return self._padded(x, module.padding)
        if isinstance(module, nn.AdaptiveAvgPool2d):
            if _pair(module.output_size) == (1, 1):
                return self._add(ops.Mean(**given))
            if x.sample.shape != sample.shape:
                raise self._refused(f"{module}")
            self.program.size = self.sizes[0]  # at which it changes nothing
            return self._add(ops.Take(**given))
        if isinstance(module, nn.AvgPool2d | nn.MaxPool2d):
            return self._pooled(module, given)
        if isinstance(module, _NORMS):
            return self._norm(module, x)
        if isinstance(module, Distance):
            return self._add(ops.Affine(**given, scale=module.factor.flatten(), bias=module.shift.flatten()))
        return self._layer(module, x)

    def _pooled(self, pool: Any, given: dict[str, Any]) -> int:
        rows, columns = _pair(pool.padding)
        stride = pool.kernel_size if pool.stride is None else pool.stride
        padding = (columns, columns, rows, rows)
        window = Window(_pair(pool.kernel_size), _pair(stride), padding, ceil=pool.ceil_mode)
        if isinstance(pool, nn.MaxPool2d):
            if _pair(pool.dilation) != (1, 1):
                raise self._refused(f"{pool}")
            return self._add(ops.Maximum(**given, window=window))
        if pool.divisor_override is not None or (pool.count_include_pad and any(padding)):
            raise self._refused(f"{pool}")
        return self._add(ops.Average(**given, window=window))

    def _norm(self, norm: Any, x: Value) -> int:
        if norm.running_mean is None or (x.sample.ndim == 2 and self.sizes[x.place] != (1, 1)):
            raise self._refused(f"{norm}")
        factor = (norm.running_var.double() + norm.eps).rsqrt() * (1 if norm.weight is None else norm.weight.double())
        bias = -norm.running_mean.double() * factor + (0 if norm.bias is None else norm.bias.double())
        return self._add(ops.Affine(**self._given(x.place), scale=factor.float().detach(), bias=bias.float().detach()))

    def _layer(self, layer: Any, x: Value) -> int:
        if isinstance(layer, OfLastDimension):
            if x.sample.ndim != 2:
                raise self._refused("a linear layer of more than rows")
            return self._integers(layer.conv, x)
        if isinstance(layer, IntegerLayer):
            return self._integers(layer, x)
        if getattr(layer, "border_value", 0) or (isinstance(layer, SignConv2d) and layer.window.padding_value):
            raise self._refused("floats that are padded with another number than 0")
        if type(layer) is SignConv2d:
            window = _window(layer.weight.shape[2:4], layer.window)
            return self._floats(layer.float_weight(), layer.bias, window, layer.window.groups, x)
        if isinstance(layer, QuantizedLayer) and not isinstance(layer.input_quantizer, Identity):
            raise self._refused(f"{type(layer).__name__} on floats of quantized values")
        weight: Any = layer.quantized_weight() if isinstance(layer, QuantizedLayer) else getattr(layer, "weight", None)
        if type(layer) in (nn.Linear, QLinear):
            return self._linear(x, weight, layer.bias)
        if type(layer) in (nn.Conv2d, QConv2d) and layer.padding_mode == "zeros" and x.sample.ndim == 4:
            window = Window(layer.kernel_size, layer.stride, tuple(sides_of(layer)), layer.dilation)  # pyright: ignore
            return self._floats(weight, layer.bias, window, layer.groups, x)  # pyright: ignore
        raise self._refused(type(layer).__name__)

    def _floats(self, weight: Tensor, bias: Tensor | None, window: Window, groups: int, x: Value) -> int:
        weight, window = self._on_pixels(weight.detach(), window, x)
        given = {"channels": len(weight), "origin": self.name}
        weight = weight.contiguous().clone()
        sums = self._add(ops.ConvFloats(**given, inputs=(x.place,), weight=weight, window=window, groups=groups))
        if bias is None:
            return sums
        ones = torch.ones(len(weight))
        return self._add(ops.Affine(**given, inputs=(sums,), scale=ones, bias=bias.detach().clone()))

    def _on_pixels(self, weight: Tensor, window: Window, x: Value) -> tuple[Tensor, Window]:
        """Return the weight and window of a linear layer on flattened images: one window over the whole image."""
        size = self.sizes[x.place]
        if x.sample.ndim != 2 or size == (1, 1):
            return weight, window
        self.program.size = self.sizes[0]
        return weight.reshape(len(weight), -1, *size), Window(size)

    def _integers(self, layer: IntegerLayer, x: Value) -> int:
        weight, groups = layer.whole_weight(), layer.window.groups
        window = _window(weight.shape[2:], layer.window)
        weight, window = self._on_pixels(weight, window, x)
        given = {"channels": layer.channels[1], "origin": self.name, "window": window, "groups": groups}
        if type(layer) is BinaryConv2d:
            if weight[0].numel() >= _EXACT:
                raise self._refused(f"sums of {weight[0].numel()} signs")
            bits = self._signs(layer.encoder, x)
            pads = layer.window.padding_value
            sums = self._add(ops.ConvBits(**given, inputs=(bits,), weight=weight, pad_value=pads))
            if layer.threshold is not None:
                edge = layer.threshold[:, : layer.channels[1] // groups].flatten().float()
                return self._add(ops.Sign(**self._given(sums), edge=edge))
        elif type(layer) is IntegerConv2d and layer.window.padding_value == 0:
            if weight.min() < -128 or weight.max() > 127:
                raise self._refused("weights of more than 8 bits")
            codes = x.place if layer.encoder is None else self._codes(layer.encoder, x)
            quantize: Any = self.program.operations[codes]
            zero = quantize.zero + (layer.zero if layer.encoder is None else 0)
            sums = self._add(ops.ConvCodes(**given, inputs=(codes,), weight=weight, zero=zero))
        else:
            raise self._refused(type(layer).__name__)
        behind = self._given(sums)
        result = self._add(ops.Affine(**behind, scale=layer.scale.float(), bias=layer.bias.float()))
        if isinstance(layer, IntegerConv2d) and layer.low is not None and layer.high is not None:
            low, high = layer.low, layer.high
            return self._quantized(result, lambda v: v.clamp(low, high).round().long(), low, high, 1.0)
        return result

    # Quantizers

    def _signs(self, encode: Encode | None, x: Value) -> int:
        given = self._given(x.place)
        if isinstance(self.program.operations[x.place], ops.Sign):
            return x.place
        if encode is None:
            return self._shared(ops.Sign(**given, edge=torch.zeros(given["channels"])))
        if not encode.quantizer.at_work.is_elementwise:
            raise self._refused("signs that depend on more than one number")
        shape = (1, x.sample.shape[1], 1, -1)

        def reaches(v: Tensor) -> Tensor:
            return encode(v.view(*shape[:2], 1, 1)).flatten() >= 0

        grid = torch.linspace(-8, 8, 257).expand(1, shape[1], 1, -1)
        edge = first_floats(reaches, (shape[1],))
        if shape[1] != given["channels"] or not rises(encode(grid)) or bool(edge.isnan().any()):
            raise self._refused("signs that do not change once")
        return self._shared(ops.Sign(**given, edge=edge))

    def _codes(self, encode: Encode, x: Value) -> int:
        quantizer, (low, high, step, *_) = encode.quantizer, encode.levels
        if step.numel() != 1 or not quantizer.at_work.is_elementwise:
            raise self._refused("codes that depend on more than one number")

        def codes(v: Tensor) -> Tensor:
            return quantizer.codes(v.view(1, 1, 1, -1), *quantizer.tensors()).values.flatten().long()

        return self._quantized(x.place, codes, low, high, float(step))

    def _quantized(self, place: int, codes: Callable[[Tensor], Tensor], low: int, high: int, step: float) -> int:
        zero = max(0, -low)
        if high + zero > _BYTE or low > 0:
            raise self._refused(f"codes from {low} to {high}")
        try:
            edges = edges_of(codes, low, high, step)
        except NotMonotone as error:
            raise self._refused(str(error)) from None
        is_level = torch.cat([edges[1:] != edges[:-1], torch.ones(1, dtype=torch.bool)])  # uneven levels skip codes
        levels = torch.cat([torch.tensor([low]), torch.arange(low + 1, high + 1)[is_level]]) + zero
        levels = levels.to(torch.uint8)
        return self._shared(
            ops.Quantize(**self._given(place), edges=edges[is_level], codes=levels, zero=zero, step=step)
        )

    def _shared(self, operation: ops.Sign | ops.Quantize) -> int:
        """Add an operation unless the program has it already."""
        for place, other in enumerate(self.program.operations):
            if type(other) is type(operation) and other.inputs == operation.inputs and _equal(other, operation):
                return place
        return self._add(operation)


def _equal(one: Operation, other: Operation) -> bool:
    """Whether two operations of a class have the same tensors, and the same zero."""
    pairs = zip(vars(one).items(), vars(other).values(), strict=True)
    return all(torch.equal(a, b) if isinstance(a, Tensor) else name == "origin" or a == b for (name, a), b in pairs)


def _is_known(module: nn.Module) -> bool:
    kinds = (IntegerLayer, OfLastDimension, SignConv2d, QuantizedLayer, Clamp, Distance, _ConvNd, nn.Linear)
    return isinstance(module, kinds) or type(module).__module__.startswith("torch.nn")


def _unwrapped(value: Any) -> Any:
    return value.sample if isinstance(value, Value) else value


def _pair(value: Any) -> Size:
    return (value, value) if isinstance(value, int) else tuple(value)  # pyright: ignore


def _window(kernel: Any, window: Any) -> Window:
    return Window(tuple(kernel), window.stride, window.padding, window.dilation)
