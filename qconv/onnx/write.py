"""A program as an ONNX graph: which nodes each operation becomes."""

from typing import Any

import torch
from onnx import TensorProto
from torch import Tensor

from ..program import operations as ops
from ..program.edges import are_edges_of, float_at, place_of
from ..program.operations import Program
from .floats import attributes, padded, write_floats, write_take
from .functions import write_function
from .graph import Form, Graph
from .integers import Chains, Integers, is_even, may_saturate, roundings
from .shapes import shapes_of

_NUDGES = sorted(range(-4, 5), key=abs)  # floats beside a step, among which one with the right edges is searched
_FEW_EDGES = 15  # of 4 bits, which one line with a whole bias nearly always meets


class Writer:
    """Writes the operations of a program as nodes of `graph`.

    Codes are those of the program, in uint8: small ones, which some processors need. With `Form.signed` they are int8
    with zero point 0. Sums of codes or signs that become codes again are a Conv between DequantizeLinear and
    QuantizeLinear with a whole weight and bias, which runtimes compute in integers. They have no fast integer
    convolution with float outputs: other sums are a Conv of whole float numbers, which is exact.

    Attributes:
        floats: the names of values as floats, by the numbers of their operations.
        codes: the names of those that are codes; signs are 0 and 2 there.
        outputs: the names of the outputs.
        saturating: the layers with sums that may be wrong on x86 processors without VNNI.
    """

    def __init__(self, program: Program, form: Form, example: Tensor, round_outputs: bool) -> None:
        self.operations, self.form, self.graph, self.chains = program.operations, form, Graph(form), Chains(program)
        self.rank = example.ndim  # of the input, of which the program takes images
        example = ops.as_images(example)
        self.shapes = shapes_of(program, example)
        self.rounded = roundings(program, example, self.chains, form.signed) if round_outputs else {}
        self.kind, self.ends = (torch.int8, (-128, 127)) if form.signed else (torch.uint8, (0, 255))
        ones = self.graph.constant([*range(2, 6 - self.rank)], "int64")
        input = self.graph.node("Unsqueeze", "input", ones) if self.rank < 4 else "input"
        self.floats, self.codes, self.saturating = {0: input}, dict[int, str](), dict[str, None]()
        integers = {place: self._as_integers(place) for place in range(1, len(self.operations))}
        self.integers = {place: found for place, found in integers.items() if found is not None}
        inside = {0, *(place for found in self.integers.values() for place in found.chain)}.difference(self.integers)
        self.read_as_codes = {self.operations[found.chain[0]].inputs[0] for found in self.integers.values()}
        if 0 in self.rounded:
            self.codes[0] = self._linear("Quantize", self.floats.pop(0), *self.rounded[0])
        for place, operation in enumerate(self.operations):
            self.graph.origin = operation.origin
            if place not in inside:
                self._write(place)
        self.outputs = [self._seen(*each) for each in zip(program.outputs, program.ranks, strict=True)]

    def _seen(self, place: int, rank: int) -> str:
        """Return an output as the network gives it."""
        name, shape = self.read(place), self.shapes[place]
        if len(shape) != 4 or rank == 4:
            return name
        if rank == 2:
            return self.graph.node("Flatten", name, axis=1)
        return self.graph.node("Squeeze", name, self.graph.constant([2], "int64"))

    def _as_integers(self, place: int) -> Integers | None:
        found = None
        coder = self.operations[place]
        if isinstance(coder, ops.Quantize | ops.Sign):
            exact = not self.rounded and isinstance(coder, ops.Quantize) and len(coder.edges) <= _FEW_EDGES
            found = None if self._is_saturated(place, ops.Sign) else self.chains.coded(place, exact=exact)
        elif place in self.rounded:
            found = self.chains.rounded(place, self.rounded[place][0])
        is_split = found is not None and bool((found.weight.abs() > 127).any())
        return None if is_split and self.operations[found.chain[0]].groups > 1 else found  # pyright: ignore

    def _is_saturated(self, place: int, kind: type[ops.Operation]) -> bool:
        return self.form.clamp_by_saturation and isinstance(self.operations[place], kind)

    def _write(self, place: int) -> None:
        """Write one operation."""
        operation: Any = self.operations[place]
        if place in self.integers:
            self.codes[place] = self._convolved(place, self.integers[place])
        elif isinstance(operation, ops.Quantize):
            self.codes[place] = self._quantize(place, operation)
        elif isinstance(operation, ops.Sign):
            self._sign(place, operation)
        elif isinstance(operation, ops.Take) and self.rounded.get(place, 0) == self.rounded.get(operation.inputs[0]):
            given, zero = operation.inputs[0], self._code(self.rounded[place][1])
            self.codes[place] = write_take(self.graph, operation, self.codes[given], self.shapes[given][1], zero)
        else:
            name = self._float(place, operation, [self.read(given) for given in operation.inputs])
            if place in self.rounded:
                self.codes[place] = self._linear("Quantize", name, *self.rounded[place])
            else:
                self.floats[place] = name

    def read(self, place: int) -> str:
        """Return the name of a value as floats; of codes, these are the numbers that the program has."""
        if place not in self.floats:
            node, codes = self.graph.node, self.codes[place]
            if place in self.rounded:
                self.floats[place] = self._linear("Dequantize", codes, *self.rounded[place])
            else:
                floats, offset = node("Cast", codes, to=TensorProto.FLOAT), float(self.offset(place))
                self.floats[place] = node("Sub", floats, self.graph.constant(offset)) if offset else floats
        return self.floats[place]

    def offset(self, place: int) -> int:
        """Return what codes in the file have more than the program's codes or signs."""
        return self._shift(place) + isinstance(self.operations[place], ops.Sign)

    # Codes

    def _shift(self, place: int) -> int:
        """Return the difference between codes in the file and in the program."""
        coder: Any = self.operations[place]
        if self.form.signed:
            return -1 if isinstance(coder, ops.Sign) else -coder.zero
        return self.ends[1] - int(coder.codes[-1]) if self._is_saturated(place, ops.Quantize) else 0

    def _code(self, code: int) -> str:
        return self.graph.constant(torch.tensor(code, dtype=self.kind))

    def _linear(self, kind: str, name: str, step: float, zero: int) -> str:
        """Add a quantizer. Each has its own scale and zero point: in its precise mode, ONNX Runtime changes them."""
        return self.graph.node(f"{kind}Linear", name, self.graph.constant(step, "float32"), self._code(zero))

    def _levels(self, place: int) -> tuple[int, int]:
        """Return the lowest and the highest code in the file."""
        coder: Any = self.operations[place]
        ends = (0, 2) if isinstance(coder, ops.Sign) else (int(coder.codes[0]), int(coder.codes[-1]))
        if place in self.integers and (reached := self.integers[place].ends):
            ends = reached[0] + coder.zero, reached[1] + coder.zero  # pyright: ignore[reportAttributeAccessIssue]
        low, high = (end + self._shift(place) for end in ends)
        if low < self.ends[0] or high > self.ends[1]:
            raise ValueError(
                f"'{coder.origin}': signed=True takes codes from {self.ends[0]} to {self.ends[1]}, and its input has "
                f"{low} to {high}: leave signed out, or train with signed inputs or with 7 bits"
            )
        return low, high

    def _clipped(self, place: int, codes: str) -> str:
        """Clamp codes to their levels where saturation doesn't."""
        low, high = self._levels(place)
        if low > self.ends[0] and not self.form.clamp_by_saturation:
            codes = self.graph.node("Max", codes, self._code(low))
        return self.graph.node("Min", codes, self._code(high)) if high < self.ends[1] else codes

    def _from_low(self, place: int, name: str) -> str:
        """Clamp floats from below, where saturation clamps codes from above only."""
        coder: Any = self.operations[place]
        if not self._is_saturated(place, ops.Quantize):
            return name
        low, before = self._levels(place)[0] - coder.zero - self._shift(place), self.operations[coder.inputs[0]]
        is_clamped = place not in self.integers and isinstance(before, ops.Clamp) and before.low >= low == 0
        return name if is_clamped else self.graph.node("Clip", name, self.graph.constant(low * coder.step))

    def _quantize(self, place: int, coder: ops.Quantize) -> str:
        """Write codes by QuantizeLinear, or by comparisons with their edges where it does not give them."""
        graph, given, zero = self.graph, coder.inputs[0], coder.zero + self._shift(place)
        if is_even(coder) and self.rounded.get(given) == (coder.step, zero):
            return self._clipped(place, self.codes[given])
        name = self._guarded(given)  # of two quantizers that follow each other, ONNX Runtime drops one
        if (line := _line_of(coder)) is None:
            codes = self._code(self._levels(place)[0])
            for edge, code in zip(coder.edges.tolist(), coder.codes[1:].tolist(), strict=True):
                is_reached = graph.node("GreaterOrEqual", name, graph.constant(edge))
                codes = graph.node("Where", is_reached, self._code(code + self._shift(place)), codes)
            return codes
        name, (factor, step) = self._from_low(place, name), line
        name = name if factor is None else graph.node("Mul", name, graph.constant(factor))
        return self._clipped(place, self._linear("Quantize", name, step, zero))

    def _guarded(self, place: int) -> str:
        """Return floats that do not come from DequantizeLinear, so that nothing is fused with it."""
        return self.graph.node("LeakyRelu", self.read(place), alpha=1.0) if place in self.rounded else self.read(place)

    def _sign(self, place: int, coder: ops.Sign) -> None:
        node, constant = self.graph.node, self.graph.constant
        is_positive = node("GreaterOrEqual", self.read(coder.inputs[0]), self.graph.channels(coder.edge))
        if place in self.read_as_codes:
            low, high = map(self._code, self._levels(place))
            self.codes[place] = node("Where", is_positive, high, low)
        else:
            self.floats[place] = node("Where", is_positive, constant(1.0), constant(-1.0))

    def _convolved(self, place: int, found: Integers) -> str:
        """Write a convolution between codes."""
        graph, coder = self.graph, self.operations[place]
        conv: Any = self.operations[found.chain[0]]
        given, graph.origin = conv.inputs[0], conv.origin
        before: Any = self.operations[given]
        zero_in = self._shift(given) + (1 if isinstance(before, ops.Sign) else getattr(conv, "zero", 0))
        step_in = getattr(before, "step", 1.0)
        step, zero = self.rounded.get(place) or (
            getattr(coder, "step", 1.0),
            getattr(coder, "zero", 1) + self._shift(place),
        )
        pad_value = getattr(conv, "pad_value", 0)
        codes, window = padded(
            graph, self.codes[given], conv.window, self._code(zero_in + pad_value) if pad_value else ""
        )
        scale = (found.scale * step / step_in).float()
        none = torch.zeros(len(scale), dtype=torch.int8)
        whole, codes = self._in_eight_bits(found.weight, codes)
        weight, bias = graph.small(whole), graph.constant(found.bias.int())
        values = [self._linear("Dequantize", codes, step_in, zero_in)]
        for name, scales, zeros in ((weight, scale, none), (bias, scale * step_in, none.int())):
            values.append(graph.node("DequantizeLinear", name, *map(graph.constant, (scales, zeros)), axis=0))
        name = graph.node("Conv", *values, group=conv.groups, **attributes(window))
        highest = self._levels(given)[1] + 128 * self.form.signed  # ONNX Runtime makes them uint8
        if may_saturate(whole, highest):
            self.saturating[conv.origin] = None
        if place in self.rounded:
            return self._linear("Quantize", name, step, zero)
        return self._clipped(place, self._linear("Quantize", self._from_low(place, name), step, zero))

    def _in_eight_bits(self, weight: Tensor, codes: str) -> tuple[Tensor, str]:
        """Split weights beyond 8 bits; the channels of codes whose weights are split are taken several times."""
        parts, names, left = [weight.clamp(-127, 127)], [codes], weight
        while (left := left - parts[-1]).any():
            channels = left.transpose(0, 1).flatten(1).any(1).nonzero().flatten()
            left = left[:, channels]
            parts.append(left.clamp(-127, 127))
            names.append(self.graph.node("Gather", names[-1], self.graph.constant(channels, "int64"), axis=-3))
        return torch.cat(parts, 1), self.graph.node("Concat", *names, axis=1) if len(names) > 1 else codes

    # Floats

    def _float(self, place: int, operation: Any, given: list[str]) -> str:
        """Write an operation on floats."""
        graph, node = self.graph, self.graph.node
        match operation:
            case ops.ConvBits() | ops.ConvCodes() | ops.ConvFloats():
                return self._sums(operation)
            case ops.Affine():
                name = given[0]
                if bool((operation.scale != 1).any()):
                    scale = graph.channels(operation.scale)
                    # After a convolution, ONNX Runtime multiplies a second factor into the weights, but not a first
                    # one. Sums of whole numbers would then not be exact.
                    is_float = isinstance(self.operations[operation.inputs[0]], ops.ConvFloats)
                    name = node("Mul", *((name, scale) if is_float else (scale, name)))
                return node("Add", name, graph.channels(operation.bias)) if operation.bias.any() else name
            case ops.Clamp(low=0, high=torch.inf):  # codes without negative numbers have its zeros themselves
                is_done = place in self.rounded and self.rounded[place][1] == self.ends[0]
                return given[0] if is_done else node("Relu", *given)
            case ops.Average() | ops.Maximum():
                kind = "AveragePool" if isinstance(operation, ops.Average) else "MaxPool"
                return node(kind, *given, ceil_mode=int(operation.window.ceil), **attributes(operation.window))
            case _:
                shapes = [self.shapes[place] for place in operation.inputs]
                if (name := write_floats(graph, operation, given, shapes)) is not None:
                    return name
                return write_function(graph, operation, [self._guarded(place) for place in operation.inputs], shapes)

    def _sums(self, conv: Any) -> str:
        graph, given = self.graph, self._guarded(conv.inputs[0])
        if zero := getattr(conv, "zero", 0):
            given = graph.node("Sub", given, graph.constant(float(zero)))
        pad_value = float(getattr(conv, "pad_value", 0))
        given, window = padded(graph, given, conv.window, graph.constant(pad_value) if pad_value else "")
        return graph.node("Conv", given, graph.weight(conv.weight), group=conv.groups, **attributes(window))


def _line_of(coder: ops.Quantize) -> tuple[float | None, float] | None:
    """Return a factor, or None, and the scale of QuantizeLinear behind it; None if these do not give the codes.

    It divides by the scale, and rounds halves to even numbers. Both ways are tried at each edge.
    """
    low = coder.ends[0]
    if not is_even(coder):
        return None
    step = torch.tensor(coder.step, dtype=torch.float32)
    for is_factor, number in ((False, step), (True, (1 / step.double()).float())):
        for nudge in _NUDGES:
            exact = float_at(place_of(number) + nudge)

            def codes(x: Tensor) -> Tensor:
                return (x * exact if is_factor else x / exact).clamp(low, low + len(coder.edges)).round()  # noqa: B023

            if are_edges_of(codes, coder.edges, low):
                return (float(exact), 1.0) if is_factor else (None, float(exact))
    return None
