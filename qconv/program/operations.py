"""The operations of a program, each with its definition in torch.

Values are (N, C, H, W): floats (float32), signs (±1), or codes (whole numbers that fit in a byte); around a `Function`
also floats of other shapes. Sums of signs and of codes are exact. Each operation on floats is rounded once, in the
order that its definition gives, so every runtime that neither contracts nor reorders them gives the same bits.
Tensors "of channels" are (C,) float32.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import chain
from typing import Any, ClassVar, NamedTuple, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten_with_path, tree_unflatten

Size = tuple[int, int]
_LONGEST = 1 << 24  # rows or columns of an image that C takes
_TAYLOR = [1 / math.factorial(k) for k in range(7, -1, -1)]
_NORMAL = [-0.11202044, 0.436400741, -0.306797355, 0.316277772, 0.0489801988, 0.117159113]


class Length(NamedTuple):
    """How an output's height or width follows from that of an input: ``(length · times + plus) // over``."""

    plus: int = 0
    over: int = 1
    times: int = 1

    def of(self, length: int) -> int:
        """Return the output's length."""
        return (length * self.times + self.plus) // self.over

    def behind(self, first: "Length") -> "list[Length]":
        """Return the lengths behind both operations, in order: one, unless a division comes before a product."""
        if self.times == 1:
            return [Length(first.plus + first.over * self.plus, first.over * self.over, first.times)]
        if first.over == 1:
            return [Length(first.plus * self.times + self.plus, self.over, first.times * self.times)]
        return [first, self]


class Window(NamedTuple):
    """The window of a convolution or pooling: rows first; ``padding`` is left, right, top, bottom."""

    kernel: Size = (1, 1)
    stride: Size = (1, 1)
    padding: tuple[int, int, int, int] = (0, 0, 0, 0)
    dilation: Size = (1, 1)
    ceil: bool = False

    def lengths(self) -> tuple[Length, Length]:
        """Return how height and width of the output follow from those of the input."""
        left, right, top, bottom = self.padding
        return self._along(0, top, bottom), self._along(1, left, right)

    def size(self, size: Size) -> Size:
        """Return height and width of the output for an input of this size."""
        height, width = self.lengths()
        return height.of(size[0]), width.of(size[1])

    def _along(self, axis: int, before: int, after: int) -> Length:
        stride, reach = self.stride[axis], self.dilation[axis] * (self.kernel[axis] - 1) + 1
        if not self.ceil:
            return Length(before + after - reach + stride, stride)
        # As in torch, no window begins in the padding at the end.
        return Length(before + stride - 1 + min(0, after - reach + stride), stride)

    def reached(self, size: Size) -> tuple[int, int, int, int]:
        """Return the padding that all windows reach: with `ceil` the last may reach further than `padding`."""
        left, right, top, bottom = self.padding
        sides = zip(self.size(size), size, self.stride, self.kernel, (top, left), strict=True)
        further = [(out - 1) * stride + kernel - before - given for out, given, stride, kernel, before in sides]
        return left, max(further[1], right), top, max(further[0], bottom)

    def taps(self, padded: Tensor, out: Size) -> list[Tensor]:
        """Return the pixels of each tap for all outputs, (N, C, *out) each, rows first."""
        if min(out) < 1:
            raise ValueError(f"images are too small for a window of {self.kernel[0]} x {self.kernel[1]} pixels")
        found = []
        for i in range(self.kernel[0]):
            for j in range(self.kernel[1]):
                rows = padded.narrow(2, i * self.dilation[0], (out[0] - 1) * self.stride[0] + 1)[
                    :, :, :: self.stride[0]
                ]
                columns = rows.narrow(3, j * self.dilation[1], (out[1] - 1) * self.stride[1] + 1)
                found.append(columns[..., :: self.stride[1]])
        return found


@dataclass(frozen=True, eq=False, kw_only=True)
class Operation:
    """An operation of a program.

    Attributes:
        inputs: the numbers of the operations whose values it takes.
        channels: of its output.
        origin: the name of the module or function in the trained network.
    """

    inputs: tuple[int, ...]
    channels: int
    origin: str = ""

    def run(self, *values: Tensor) -> Tensor:
        """Return the output: the definition."""
        raise NotImplementedError(f"{type(self).__name__} defines no run()")

    def lengths(self) -> tuple[Length, Length]:
        """Return how height and width of the output follow from those of the first input."""
        return Length(), Length()

    def size(self, size: Size) -> Size:
        """Return height and width of the output for the first input's."""
        height, width = self.lengths()
        return height.of(size[0]), width.of(size[1])


@dataclass(frozen=True, eq=False, kw_only=True)
class Input(Operation):
    """The images, floats."""


@dataclass(frozen=True, eq=False, kw_only=True)
class _Windowed(Operation):
    window: Window

    def lengths(self) -> tuple[Length, Length]:
        return self.window.lengths()


@dataclass(frozen=True, eq=False, kw_only=True)
class _Conv(_Windowed):
    weight: Tensor  # (C_out, C / groups, kh, kw)
    groups: int = 1

    def _exact(self, padded: Tensor) -> Tensor:
        stride, dilation = self.window.stride, self.window.dilation
        return F.conv2d(padded.double(), self.weight.double(), None, stride, 0, dilation, self.groups).float()


@dataclass(frozen=True, eq=False, kw_only=True)
class ConvBits(_Conv):
    """Sums of signs times signs; the padding counts as `pad_value`, −1, 0 or 1."""

    pad_value: int = 0

    def run(self, *values: Tensor) -> Tensor:
        return self._exact(F.pad(values[0].double(), self.window.padding, value=self.pad_value))


@dataclass(frozen=True, eq=False, kw_only=True)
class ConvCodes(_Conv):
    """Sums of ``(code − zero) · weight`` with whole weights of up to 8 bits; the padding counts as 0."""

    zero: int = 0

    def run(self, *values: Tensor) -> Tensor:
        return self._exact(F.pad(values[0].double() - self.zero, self.window.padding))


@dataclass(frozen=True, eq=False, kw_only=True)
class ConvFloats(_Conv):
    """Sums of floats times floats from 0 on: a fused multiply-add for each tap, by rows, columns, input channels."""

    def run(self, *values: Tensor) -> Tensor:
        (x,), weight = values, self.weight.double()
        taps = self.window.taps(F.pad(x, self.window.padding), self.size((x.shape[2], x.shape[3])))
        inputs, outputs = weight.shape[1], len(weight) // self.groups
        sums = torch.zeros(len(x), self.channels, *taps[0].shape[2:], device=x.device)
        for tap, of_tap in zip(taps, weight.flatten(2).unbind(2), strict=True):
            of_groups = tap.unflatten(1, (self.groups, inputs)).double()
            for c in range(inputs):  # the product of two floats is exact in float64
                products = of_groups[:, :, c].repeat_interleave(outputs, 1) * of_tap[:, c].view(-1, 1, 1)
                sums = _fused_sum(products, sums)
        return sums


def _adds_floats(conv: _Conv) -> bool:
    """Whether it multiplies floats with signs, times one number for each filter."""
    if type(conv) is not ConvFloats:
        return False
    magnitudes = conv.weight.flatten(1).abs()
    return bool((magnitudes == magnitudes[:, :1]).all())


@dataclass(frozen=True, eq=False, kw_only=True)
class Affine(Operation):
    """``round(round(x · scale_c) + bias_c)``, of channels."""

    scale: Tensor
    bias: Tensor

    def run(self, *values: Tensor) -> Tensor:
        return values[0] * _per_channel(self.scale) + _per_channel(self.bias)


@dataclass(frozen=True, eq=False, kw_only=True)
class Add(Operation):
    """``round(a + b)`` of two values of one shape."""

    def run(self, *values: Tensor) -> Tensor:
        return values[0] + values[1]


@dataclass(frozen=True, eq=False, kw_only=True)
class Multiply(Operation):
    """``round(a · b)``; b has the shape of a, or one pixel for all of its image (`is_gate`)."""

    is_gate: bool = False

    def run(self, *values: Tensor) -> Tensor:
        return values[0] * values[1]


@dataclass(frozen=True, eq=False, kw_only=True)
class PReLU(Operation):
    """``x`` if ``x > 0``, else ``round(x · slope_c)``, of channels."""

    slope: Tensor

    def run(self, *values: Tensor) -> Tensor:
        (x,) = values
        return torch.where(x > 0, x, x * _per_channel(self.slope))


@dataclass(frozen=True, eq=False, kw_only=True)
class Sigmoid(Operation):
    """``1 / (1 + e^−x)``, of x in −87 to 87."""

    def run(self, *values: Tensor) -> Tensor:
        return 1 / (1 + _power((-values[0]).clamp(-87, 87)))


@dataclass(frozen=True, eq=False, kw_only=True)
class SiLU(Sigmoid):
    """``round(x · sigmoid(x))``."""

    def run(self, *values: Tensor) -> Tensor:
        return values[0] * super().run(*values)


@dataclass(frozen=True, eq=False, kw_only=True)
class GELU(Operation):
    """``x / 2 · (1 + erf(x / √2))``; for ``z ≥ 0`` erf is ``1 − 2 e^−z² · t · P(t)`` with ``t = 1 / (1 + 0.39 z)``.

    P, of degree 5, was fitted: erf is off by at most 4e-7. As torch's, it is 1 where that is the nearest float.
    """

    def run(self, *values: Tensor) -> Tensor:
        (x,) = values
        z = x.abs() * 0.7071067690849304
        t = 1 / (1 + z * 0.39)
        tail = _polynomial(_NORMAL, t) * t * _power((-(z * z)).clamp(min=-87))
        erf = 1 - 2 * tail
        return x * 0.5 * torch.where(x > 0, 1 + erf, 1 - erf)


@dataclass(frozen=True, eq=False, kw_only=True)
class Clamp(Operation):
    """``min(max(x, low), high)``."""

    low: float = -torch.inf
    high: float = torch.inf

    def run(self, *values: Tensor) -> Tensor:
        return values[0].clamp(self.low, self.high)


@dataclass(frozen=True, eq=False, kw_only=True)
class Quantize(Operation):
    """``codes[k]`` for ``k`` the number of edges that are at most ``x``.

    Attributes:
        edges: rising, (levels − 1,) float32.
        codes: of the levels, rising, (levels,) from 0 to 255.
        zero: the code of 0.
        step: between two codes, if they are even; it says how a runtime may round instead of searching the edges.
    """

    edges: Tensor
    codes: Tensor
    zero: int
    step: float

    @property
    def ends(self) -> tuple[int, int]:
        """The lowest and the highest code, less the zero."""
        return int(self.codes[0]) - self.zero, int(self.codes[-1]) - self.zero

    @property
    def has_gaps(self) -> bool:
        """Whether some codes do not follow each other."""
        return len(self.codes) != int(self.codes[-1]) - int(self.codes[0]) + 1

    def run(self, *values: Tensor) -> Tensor:
        return self.codes[torch.searchsorted(self.edges, values[0].contiguous(), right=True)]


@dataclass(frozen=True, eq=False, kw_only=True)
class Sign(Operation):
    """−1 where ``x < edge_c``, else +1, of channels."""

    ends: ClassVar[tuple[int, int]] = (-1, 1)
    edge: Tensor

    def run(self, *values: Tensor) -> Tensor:
        return torch.where(values[0] < _per_channel(self.edge), -1.0, 1.0)


@dataclass(frozen=True, eq=False, kw_only=True)
class Take(Operation):
    """Every `stride`-th row and column; channel c is channel ``c − first``, or 0 if there is none."""

    stride: Size = (1, 1)
    first: int = 0

    def run(self, *values: Tensor) -> Tensor:
        (x,) = values
        rest = self.channels - self.first - x.shape[1]
        return F.pad(x[:, :, :: self.stride[0], :: self.stride[1]], (0, 0, 0, 0, self.first, rest))

    def lengths(self) -> tuple[Length, Length]:
        height, width = self.stride
        return Length(height - 1, height), Length(width - 1, width)


@dataclass(frozen=True, eq=False, kw_only=True)
class Select(Operation):
    """Channel c is channel ``index_c``."""

    index: Tensor  # int64

    def run(self, *values: Tensor) -> Tensor:
        return values[0].index_select(1, self.index)


@dataclass(frozen=True, eq=False, kw_only=True)
class Repeat(Operation):
    """Each pixel, this many times down and across."""

    times: Size

    @property
    def resize(self) -> dict[str, str]:
        """The attributes of ONNX's Resize."""
        return {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}

    def run(self, *values: Tensor) -> Tensor:
        return values[0].repeat_interleave(self.times[0], 2).repeat_interleave(self.times[1], 3)

    def lengths(self) -> tuple[Length, Length]:
        return Length(times=self.times[0]), Length(times=self.times[1])


@dataclass(frozen=True, eq=False, kw_only=True)
class Bilinear(Repeat):
    """Upsampling by ``round(round(a · (1 − t)) + round(b · t))`` of neighbours in a row, then of two such rows.

    Pixel i of `times` · n lies at ``(i + ½) / times − ½``, but not below 0; with `align_corners` at
    ``i · (n − 1) / (times · n − 1)``. The fraction of that, rounded, is t.
    """

    align_corners: bool = False

    @property
    def resize(self) -> dict[str, str]:
        corners = "align_corners" if self.align_corners else "half_pixel"
        return {"mode": "linear", "coordinate_transformation_mode": corners}

    def run(self, *values: Tensor) -> Tensor:
        rows, columns = self.times
        return self._between(self._between(values[0], 3, columns), 2, rows)

    def _between(self, x: Tensor, dim: int, times: int) -> Tensor:
        length = x.shape[dim]
        pixels, over = torch.arange(times * length, device=x.device), 2 * times
        places = (2 * pixels + 1 - times).clamp(min=0)
        if self.align_corners:
            places, over = pixels * (length - 1), max(times * length - 1, 1)
        t = (places % over).float() / over
        first, t = places // over, t if dim == 3 else t.unsqueeze(1)
        a, b = (x.index_select(dim, each.clamp(max=length - 1)) for each in (first, first + 1))
        return a * (1 - t) + b * t


@dataclass(frozen=True, eq=False, kw_only=True)
class Shuffle(Operation):
    """Channels as blocks of t = `times` pixels squared: ``out[c, t·y + i, t·x + j] = in[c·t² + i·t + j, y, x]``."""

    times: int

    def run(self, *values: Tensor) -> Tensor:
        return F.pixel_shuffle(values[0], self.times)

    def lengths(self) -> tuple[Length, Length]:
        return Length(times=self.times), Length(times=self.times)


@dataclass(frozen=True, eq=False, kw_only=True)
class Average(_Windowed):
    """The mean of the window's pixels inside of the image: added by rows and columns, then divided by their number."""

    def run(self, *values: Tensor) -> Tensor:
        (x,) = values
        out = self.size((x.shape[2], x.shape[3]))
        taps = self.window.taps(_padded(x, self.window, 0.0), out)
        counts = self.window.taps(_padded(torch.ones_like(x[:1, :1]), self.window, 0.0), out)
        return _in_turn(taps) / _in_turn(counts)


@dataclass(frozen=True, eq=False, kw_only=True)
class Maximum(_Windowed):
    """The largest of the window's pixels inside of the image."""

    def run(self, *values: Tensor) -> Tensor:
        (x,) = values
        out = self.size((x.shape[2], x.shape[3]))
        return torch.stack(self.window.taps(_padded(x, self.window, -torch.inf), out)).amax(0)


@dataclass(frozen=True, eq=False, kw_only=True)
class LayerNorm(Operation):
    """``(x − mean) / √(var + eps)`` over the channels of a pixel.

    Sums are of every 16th channel in turn, and then of these 16 in turn; var is the mean of ``(x − mean)²``.
    """

    eps: float

    def run(self, *values: Tensor) -> Tensor:
        rest = values[0] - self._mean(values[0])
        return rest / (self._mean(rest * rest) + self.eps).double().sqrt().float()  # torch rounds roots of floats badly

    def _mean(self, x: Tensor) -> Tensor:
        padded = F.pad(x, (0, 0, 0, 0, 0, -self.channels % 16)).unflatten(1, (-1, 16))
        return _in_turn(_in_turn(padded.unbind(1)).split(1, 1)) / self.channels


@dataclass(frozen=True, eq=False, kw_only=True)
class Mean(Operation):
    """The mean of all pixels: each row is added up, then the rows; divided by their number; (N, C, 1, 1)."""

    def run(self, *values: Tensor) -> Tensor:
        (x,) = values
        rows = _in_turn(x.unbind(3))
        return (_in_turn(rows.unbind(2)) / (x.shape[2] * x.shape[3]))[..., None, None]

    def lengths(self) -> tuple[Length, Length]:
        return Length(_LONGEST, _LONGEST), Length(_LONGEST, _LONGEST)


class Given(NamedTuple):
    """An argument of a `Function`: its input of this place."""

    place: int


class Images(NamedTuple):
    """An argument of a `Function`: this many times the number of images."""

    times: int


@dataclass(frozen=True, eq=False, kw_only=True)
class Function(Operation):
    """A function of torch on floats, of any shape; another library, or another processor, may round it otherwise.

    Attributes:
        function: an operator such as ``torch.ops.aten.sigmoid.default``, or a module that stays Python.
        arguments: tensors and numbers, with `Given` and `Images` for what depends on the images.
        named: arguments by name.
        result: which one of several results it is; None if there is one.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...] = (Given(0),)
    named: Mapping[str, Any] = field(default_factory=dict)
    result: int | None = None

    def __getstate__(self) -> dict[str, Any]:
        name = str(self.function) if isinstance(self.function, torch._ops.OpOverload) else ""
        return {**vars(self), "function": name or self.function}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if isinstance(state["function"], str):
            state = {**state, "function": reduce(getattr, state["function"].split("."), torch.ops)}
        vars(self).update(state)

    def run(self, *values: Tensor) -> Tensor:
        named = {name: filled(argument, values) for name, argument in self.named.items()}
        results = self.function(*filled(self.arguments, values), **named)
        return results if self.result is None else results[self.result]


@dataclass(frozen=True, eq=False, kw_only=True)
class Pad(Function):
    """Torch's padding around images, by a mode or with a number: the function that C has, too.

    Its second argument has the sides: left, right, top, bottom.
    """

    function: Callable[..., Any] = torch.ops.aten.pad.default

    def lengths(self) -> tuple[Length, Length]:
        left, right, top, bottom = self.arguments[1]
        return Length(top + bottom), Length(left + right)


@dataclass(frozen=True, eq=False, kw_only=True)
class Largest(Function):
    """The maximum over all pixels; C has it, too."""

    function: Callable[..., Any] = torch.ops.aten.amax.default
    arguments: tuple[Any, ...] = (Given(0), [2, 3], True)

    def lengths(self) -> tuple[Length, Length]:
        return Length(_LONGEST, _LONGEST), Length(_LONGEST, _LONGEST)


def needs_torch(operation: Operation) -> TypeGuard[Function]:
    """Whether it is a function that C does not have."""
    return isinstance(operation, Function) and not isinstance(operation, Pad | Largest)


def _power(z: Tensor) -> Tensor:
    """Return ``e^z = 2^n · e^r`` of z in −87 to 87, with Taylor's polynomial of degree 7 in r."""
    n = (z * 1.4426950216293335 + 12582912) - 12582912  # to the nearest whole number
    r = (z - n * 0.693359375) - n * -2.1219444170128554e-4  # the first product, of log 2 in 9 bits, is exact
    return _polynomial(_TAYLOR, r) * ((n.int() + 127) << 23).view(torch.float32)


def _polynomial(factors: Sequence[float], x: Tensor) -> Tensor:
    """Return the polynomial with these factors, that of the highest power first, by Horner's rule."""
    return reduce(lambda sums, factor: sums * x + factor, factors[1:], torch.full_like(x, factors[0]))


def as_images(input: Tensor) -> Tensor:
    """Return what programs take: signals (N, C, L) as images of one row, rows (N, C) as images of one pixel."""
    if input.ndim == 2:
        return input[..., None, None]
    return input.unsqueeze(2) if input.ndim == 3 else input


def filled(argument: Any, values: Sequence[Tensor]) -> Any:
    """Return an argument of a `Function` of these values; torch's `tree_map` takes as long as a small convolution."""
    if isinstance(argument, Given):
        return values[argument.place]
    if isinstance(argument, Images):
        return argument.times * values[0].shape[0]  # len() is no symbol in torch.export
    return [filled(each, values) for each in argument] if isinstance(argument, list | tuple) else argument


def _fused_sum(products: Tensor, floats: Tensor) -> Tensor:
    """Return the sums of exact products in float64 and of floats, rounded once, to float32.

    The sum in float64 is rounded to odd: its last bit is 1 if it is not exact. So the second rounding sees on which
    side of a midpoint between two floats the exact sum lies (Boldo and Melquiond, 2008). An infinite sum has no error.
    """
    other = floats.double()
    total = products + other
    rest = total - products
    error = (products - (total - rest)) + (other - rest)
    bits = total.view(torch.int64)
    towards = torch.where((error > 0) == (total > 0), 1, -1)
    odd = torch.where((error.abs() > 0) & (bits % 2 == 0), bits + towards, bits)
    return odd.view(torch.float64).float()


def _per_channel(values: Tensor) -> Tensor:
    return values.view(-1, 1, 1)


def _padded(x: Tensor, window: Window, value: float) -> Tensor:
    """Pad for a pooling window."""
    return F.pad(x, window.reached((x.shape[2], x.shape[3])), value=value)


def _in_turn(parts: Sequence[Tensor]) -> Tensor:
    total = torch.zeros_like(parts[0])
    for part in parts:
        total = total + part
    return total


def _defined(operation: Operation, *values: Tensor) -> Tensor:
    return operation.run(*values)


class LayerCall(NamedTuple):
    """A call of a quantized layer: the numbers of its input, and of the signs or codes of that; None on floats.

    Attributes:
        is_last: whether the layer takes them with channels last.
    """

    name: str
    input: int
    codes: int | None
    is_last: bool = False


class Program:
    """A frozen network as a flat list of operations; `run` defines what it computes.

    Attributes:
        operations: in an order in which each follows its inputs; the first is the `Input`.
        outputs: the numbers of the operations whose values are the outputs.
        structure: how the outputs are put together; None for a single tensor.
        ranks: for each output, how many dimensions the network gives it: 2 of one pixel, 3 of one row.
        size: the only height and width, or other dimensions behind the channels, that it takes; None for any.
        layers: the calls of quantized layers.
    """

    def __init__(self, channels: int) -> None:
        self.operations: list[Operation] = [Input(inputs=(), channels=channels)]
        self.outputs: tuple[int, ...] = (0,)
        self.structure: TreeSpec | None = None
        self.ranks: tuple[int, ...] = (4,)
        self.size: tuple[int, ...] | None = None
        self.layers: list[LayerCall] = []

    def names(self) -> list[str]:
        """Return names of the outputs: "output", or the keys, fields and numbers of several; each only once."""
        if self.structure is None:
            return ["output"]
        paths, _ = tree_flatten_with_path(tree_unflatten(list(self.outputs), self.structure))
        parts = (
            [str(next(getattr(key, kind) for kind in ("key", "name", "idx") if hasattr(key, kind))) for key in path]
            for path, _ in paths
        )
        names = ["input"]
        for path in parts:
            name = "_".join(path if path and not path[0].isdigit() else ["output", *path]) or "output"
            while name in names:
                name += "_"
            names.append(name)
        return names[1:]

    def add(self, operation: Operation) -> int:
        """Append an operation; return its number."""
        self.operations.append(operation)
        return len(self.operations) - 1

    def readers(self) -> list[list[int]]:
        """Return for each operation the numbers of those that take its value."""
        found: list[list[int]] = [[] for _ in self.operations]
        for number, operation in enumerate(self.operations):
            for given in operation.inputs:
                found[given].append(number)
        return found

    def pruned(self) -> "Program":
        """Return the program without operations that no output needs."""
        needed = {0, *self.outputs}
        for place in range(max(needed), 0, -1):
            needed |= {*self.operations[place].inputs} if place in needed else set()
        kept = Program(self.operations[0].channels)
        places = {old: new for new, old in enumerate(sorted(needed))}
        for old in sorted(needed)[1:]:
            operation = self.operations[old]
            kept.add(replace(operation, inputs=tuple(places[given] for given in operation.inputs)))
        kept.outputs, kept.structure = tuple(places[output] for output in self.outputs), self.structure
        kept.ranks, kept.size = self.ranks, self.size
        for call in self.layers:
            if call.input in places:
                codes = None if call.codes is None else places.get(call.codes)
                kept.layers.append(call._replace(input=places[call.input], codes=codes))
        return kept

    def sizes(self, size: Size) -> list[Size]:
        """Return height and width of each operation's value for images of this size, which a `Function` keeps."""
        found: list[Size] = []
        for operation in self.operations:
            found.append(operation.size(found[operation.inputs[0]] if operation.inputs else size))
        return found

    def shape(self) -> tuple[int, ...]:
        """Return (C,) of an output (N, C), else C, the numbers of each `Length` of its rows, and of its columns."""
        operation = self.operations[self.outputs[0]]
        channels, sides = operation.channels, [[length] for length in operation.lengths()]
        while operation.inputs:
            operation = self.operations[operation.inputs[0]]
            for side, length in zip(sides, operation.lengths(), strict=True):
                side[:1] = side[0].behind(length)
        for side in sides:
            side += [Length()] * (max(map(len, sides)) - len(side))
        return (channels,) if self.ranks[0] == 2 else (channels, *chain.from_iterable(sides[0] + sides[1]))

    def multiplications(self, size: Size) -> tuple[int, int]:
        """Return how many multiplications an image of this size takes: of floats with signs, and others."""
        signs = others = 0
        for operation, (height, width) in zip(self.operations, self.sizes(size), strict=True):
            if isinstance(operation, _Conv):
                count = operation.weight.numel() * height * width
                signs, others = (signs + count, others) if _adds_floats(operation) else (signs, others + count)
        return signs, others

    @torch.no_grad()
    def values(self, input: Tensor, run: Callable[..., Tensor] = _defined) -> list[Tensor]:
        """Return the values of all operations for images (N, C, H, W); `run` computes one from its inputs."""
        found: list[Tensor] = []
        for operation in self.operations:
            found.append(run(operation, *(found[place] for place in operation.inputs)) if operation.inputs else input)
        return found

    def run(self, input: Tensor) -> Any:
        """Return the output for images (N, C, H, W)."""
        values = self.values(input)
        return self.put_together([values[place] for place in self.outputs])

    def put_together(self, outputs: Sequence[Tensor]) -> Any:
        """Return the output of the network that has these values."""
        pairs = zip(outputs, self.ranks, strict=True)
        outputs = [each.flatten(rank - 1) if rank < each.ndim == 4 else each for each, rank in pairs]
        return outputs[0] if self.structure is None else tree_unflatten(outputs, self.structure)

    def __str__(self) -> str:
        lines = []
        for number, operation in enumerate(self.operations):
            given = ", ".join(map(str, operation.inputs))
            lines.append(f"{number:>4}  {type(operation).__name__}({given}) → {operation.channels}  {operation.origin}")
        return "\n".join(lines)
