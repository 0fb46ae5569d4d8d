"""Fusing: the operations of a program as kernels, each with what follows it on the way to memory."""

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from . import operations as ops
from .operations import Operation, Program, Window

_CONVS = ops.ConvBits, ops.ConvCodes, ops.ConvFloats
_ON_PIXELS = ops.Select, ops.Repeat, ops.Shuffle, ops.LayerNorm, ops.Pad
_SOURCES = *_CONVS, ops.Input, ops.Mean, ops.Largest, ops.Average, ops.Maximum, *_ON_PIXELS
CURVE_OF: dict[type[Operation], str] = {ops.Sigmoid: "sigmoid", ops.SiLU: "SiLU", ops.GELU: "GELU"}
_MOST_CODES = 2


class NotFused(ValueError):  # noqa: N818  # not an error: the reason why a network stays as it is
    """Raised with the reason why kernels can't run a program."""


class Residual(NamedTuple):
    """A stored value that a kernel adds, or multiplies by.

    Attributes:
        value: the number of its operation.
        stride: of its rows and columns; 0 takes the first pixel for all.
        first: channel c is its channel ``c − first``, or 0 if there is none.
        is_factor: whether it multiplies.
    """

    value: int
    stride: int = 1
    first: int = 0
    is_factor: bool = False


class Shifted(NamedTuple):
    """``PReLU(x + before_c, slope_c) + after_c``, up to the operation `last`."""

    before: Tensor
    slope: Tensor
    after: Tensor
    last: int


@dataclass
class Kernel:
    """An operation that makes numbers, and what is done to them before they are stored, in this order.

    Attributes:
        source: the operation; a `Maximum` of one pixel where a stored value is changed alone.
        value: the number of the operation whose value is stored.
        affine: a scale and a bias.
        residual: what is added, or multiplied by.
        prelu: with shifts around it.
        curve: in place of that: "sigmoid", "SiLU", "GELU" or "hard swish".
        clamp: the ends.
        floats: whether the value is stored as floats.
        codes: the operations whose codes of it are stored, by number; two at most.
        signs: the operation whose signs of it are stored, by number; one at most.
    """

    source: Operation
    value: int
    affine: ops.Affine | None = None
    residual: Residual | None = None
    prelu: Shifted | None = None
    curve: str | None = None
    clamp: ops.Clamp | None = None
    floats: bool = False
    codes: dict[int, ops.Quantize] = field(default_factory=dict)
    signs: dict[int, ops.Sign] = field(default_factory=dict)

    @property
    def stage(self) -> int:
        """How many stages are closed: 0 if all may be taken, 4 if none."""
        taken = self.affine, self.residual, self.prelu or self.curve, self.clamp
        return max((place + 1 for place, stage in enumerate(taken) if stage is not None), default=0)


def fuse(program: Program) -> list[Kernel]:
    """Return the kernels of a program, in order; each takes in what follows it while nothing else reads the value.

    A `Take` with zeros before its channels becomes two, the first of which is added to the program.

    Raises:
        NotFused: a kernel can't store what the program asks for.
    """
    return _Fusing(program).run()


def missing(program: Program) -> str:
    """Return the first function that C does not have; empty if it has all."""
    for operation in program.operations:
        if ops.needs_torch(operation):
            name = getattr(operation.function, "__name__", type(operation.function).__name__).partition(".")[0]
            if name != "contiguous":  # before the function that needs it
                return f"'{operation.origin}': C has no {name}"
    return ""


class _Fusing:
    def __init__(self, program: Program) -> None:
        self.program, self.operations, self.readers = program, program.operations, program.readers()
        self.shifted = dict(map(self._shifted, (p for p, o in enumerate(self.operations) if isinstance(o, ops.PReLU))))
        self.swish = dict(filter(None, map(self._hard_swish, range(4, len(self.operations)))))
        self.kernels: list[Kernel] = []
        self.stored: dict[int, Kernel] = {}
        self.folded: set[int] = set()

    def run(self) -> list[Kernel]:
        if reason := missing(self.program):
            raise NotFused(reason)
        for place, operation in enumerate(self.operations):
            if place in self.folded:
                continue
            if isinstance(operation, _SOURCES):
                is_coded = isinstance(operation, ops.ConvBits | ops.ConvCodes)
                if is_coded and not isinstance(self.operations[operation.inputs[0]], ops.Quantize | ops.Sign):
                    raise NotFused(f"'{operation.origin}': its codes are a function of torch")
                if operation.inputs:
                    self._read(operation.inputs[0])
                self._start(Kernel(operation, place))
            elif isinstance(operation, ops.Quantize | ops.Sign):
                self._coded(place, operation)
            elif not isinstance(operation, ops.Take):  # which is stored only if something needs it so
                given = operation.inputs[0]
                self._read(given)
                if place in self.folded:
                    continue
                kernel = Kernel(_passing(given, operation.channels, operation.origin), given)
                if not self._extend(kernel, place):
                    raise NotFused(f"'{operation.origin}': C has no {type(operation).__name__} there")
                self._start(kernel)
        for output in self.program.outputs:
            self._read(output)
        return self.kernels

    def _start(self, kernel: Kernel) -> None:
        """Add a kernel, after folding what follows into it."""
        while not isinstance(kernel.source, ops.Input):
            following = self.swish.get(kernel.value, self._only_reader(kernel.value))
            if following is None or not self._extend(kernel, following):
                break
        self.kernels.append(kernel)
        self.stored[kernel.value] = kernel

    def _only_reader(self, value: int) -> int | None:
        readers = self.readers[value]
        return readers[0] if len(readers) == 1 and value not in self.program.outputs else None

    def _extend(self, kernel: Kernel, place: int) -> bool:
        """Make an operation the next stage of a kernel, if it can be."""
        operation, last = self.operations[place], place
        if place in self.shifted and kernel.stage < 3:
            kernel.prelu, last = self.shifted[place], self.shifted[place].last
        elif self.swish.get(kernel.value) == place and kernel.stage < 3:
            kernel.curve = "hard swish"
            self.folded.update(range(place - 3, place))
        elif isinstance(operation, ops.Affine) and kernel.stage < 1:
            kernel.affine = operation
        elif isinstance(operation, ops.Add) and kernel.stage < 2:
            first, second = operation.inputs
            kernel.residual = self._residual(second if first == kernel.value else first)
            if kernel.residual is None:
                return False
        elif isinstance(operation, ops.Multiply) and kernel.stage < 2:
            kernel.residual = self._factor(operation, kernel.value)
            if kernel.residual is None:
                return False
        elif type(operation) in CURVE_OF and kernel.stage < 3:
            kernel.curve = CURVE_OF[type(operation)]
        elif isinstance(operation, ops.Clamp) and kernel.stage < 4:
            kernel.clamp = operation
        else:
            return False
        kernel.value = last
        self.folded.update(range(place, last + 1))
        return True

    def _shifted(self, place: int) -> tuple[int, Shifted]:
        """Return a PReLU with the additions of numbers around it, and the first operation of the three."""
        prelu: Any = self.operations[place]
        nothing = torch.zeros(prelu.channels)
        first, before, last, after = place, nothing, place, nothing
        given: Any = self.operations[prelu.inputs[0]]
        if place == prelu.inputs[0] + 1 and _is_shift(given) and self._only_reader(place - 1) == place:
            first, before = place - 1, given.bias
        if self._only_reader(place) == place + 1 and _is_shift(following := cast(Any, self.operations[place + 1])):
            last, after = place + 1, following.bias
        return first, Shifted(before, prelu.slope, after, last)

    def _hard_swish(self, place: int) -> tuple[int, int] | None:
        """Return x and this place, if it is ``x · (min(max(x + 3, 0), 6) / 6)``, and nothing else reads the parts."""
        first, clamp, last, product = cast(Any, self.operations[place - 3 : place + 1])
        kinds = tuple(map(type, (first, clamp, last, product)))
        is_relu6 = kinds == (ops.Affine, ops.Clamp, ops.Affine, ops.Multiply) and (clamp.low, clamp.high) == (0, 6)
        if not is_relu6 or not _is_shift(first):
            return None
        (x,), sixth = first.inputs, torch.ones(()) / 6
        follow = [(place - 3,), (place - 2,), (x, place - 1)] == [clamp.inputs, last.inputs, product.inputs]
        is_so = bool((first.bias == 3).all() and (last.scale == sixth).all() and not last.bias.any())
        alone = self.readers[x] == [place - 3, place] and all(map(self._only_reader, range(place - 3, place)))
        return (x, place) if follow and is_so and alone and x not in self.program.outputs else None

    def _factor(self, operation: ops.Multiply, value: int) -> Residual | None:
        """Return what a value is multiplied by; None if that is not stored yet, or has more pixels."""
        first, second = operation.inputs
        other = second if first == value else first
        if other not in self.stored or (operation.is_gate and first != value):
            return None
        self.stored[other].floats = True
        return Residual(other, 0 if operation.is_gate else 1, 0, True)

    def _residual(self, value: int) -> Residual | None:
        """Return a stored value, perhaps behind takes; None if it is not stored yet."""
        rows = columns = 1
        base, first = value, 0
        while isinstance(take := self.operations[base], ops.Take) and base not in self.stored:
            rows, columns, first = rows * take.stride[0], columns * take.stride[1], first + take.first
            base = take.inputs[0]
        if base not in self.stored:
            return None
        if rows != columns:
            self._read(value)
            return Residual(value)
        self.stored[base].floats = True
        return Residual(base, rows, first)

    def _read(self, value: int) -> None:
        """Make the value stored in the form that its operation gives, or what follows it folded behind it."""
        operation = self.operations[value]
        if isinstance(operation, ops.Quantize | ops.Sign):
            return  # a kernel stores it already
        if value not in self.stored:
            if not isinstance(operation, ops.Take):
                raise NotFused(f"'{operation.origin}': C has no {type(operation).__name__} there")
            given: dict[str, Any] = {"inputs": operation.inputs, "channels": operation.channels}
            source: Operation = ops.Maximum(**given, origin=operation.origin, window=Window(stride=operation.stride))
            if operation.first:  # C puts zeros behind the channels; from there they move before them
                given["inputs"] = (self.program.add(replace(operation, first=0)),)
                self.readers.append([])
                index = (torch.arange(operation.channels) - operation.first) % operation.channels
                source = ops.Select(**given, origin=operation.origin, index=index)
            self._read(source.inputs[0])
            self._start(Kernel(source, value))
        if value in self.stored:
            self.stored[value].floats = True

    def _coded(self, place: int, operation: ops.Quantize | ops.Sign) -> None:
        """Let the kernel that stores a value store its codes or signs, too; else a kernel of its own."""
        (value,) = operation.inputs
        kernel = self.stored.get(value)
        if kernel is None or isinstance(kernel.source, ops.Input) or not _add_coded(kernel, place, operation):
            self._read(value)
            kernel = Kernel(_passing(value, operation.channels, operation.origin), value)
            self.kernels.append(kernel)
            _add_coded(kernel, place, operation)


def _add_coded(kernel: Kernel, place: int, operation: ops.Quantize | ops.Sign) -> bool:
    """Add an output to a kernel; return whether there is room for it."""
    if isinstance(operation, ops.Sign):
        if not kernel.signs:
            kernel.signs[place] = operation
        return place in kernel.signs
    if len(kernel.codes) < _MOST_CODES:
        kernel.codes[place] = operation
    return place in kernel.codes


def _passing(value: int, channels: int, origin: str) -> ops.Maximum:
    return ops.Maximum(inputs=(value,), channels=channels, origin=origin, window=Window())


def _is_shift(operation: Operation) -> bool:
    """Whether it only adds a number to each channel."""
    return isinstance(operation, ops.Affine) and bool((operation.scale == 1).all())
