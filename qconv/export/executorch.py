"""ExecuTorch: a program as a .pte file for XNNPACK.

A convolution between codes runs in bytes where XNNPACK gives the program's codes (`requantization`). Else codes are
whole floats, convolved with whole weights: sums are exact, and kernels that round or clamp otherwise than the program
have no part in them. Rounding and signs are additions and clamps, which XNNPACK has: it runs all but strides of
shortcuts, uneven pooling and some functions.
"""

import warnings
from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..ground.checks import check_flags
from ..ground.extras import needed
from ..ground.files import write_file
from ..onnx.integers import Chains, Integers, roundings
from ..program import operations as ops
from ..program.library import Called
from ..program.operations import Operation, Program, Quantize
from ..program.plan import EDGES, PRODUCT, form_of
from .requantization import at_once, left_as_floats, requantized

SETTINGS: dict[str, str] = {}
"""What a user must set: nothing."""
_CODES = "codes"  # the method of a file that returns what is inside of it, too
_NUMBERS = "numbers"  # the method of a file that returns, for each, its operation's number, and 1 if it shows floats
_LARGEST, _SMALLEST = torch.finfo(torch.float32).max, torch.finfo(torch.float32).tiny
_ROUNDS = 1.5 * 2.0**23
"""Added and taken away again, it rounds half to even what is below 2^22."""


def write(program: Program, path: Path, images: Tensor, *, round_outputs: bool = False) -> list[str]:
    """Write a program as a .pte file, whose method ``forward`` takes one image (1, C, H, W), of these images' size.

    With ``round_outputs`` it computes on bytes throughout, as a LiteRT file does (`litert.write`). Returns layers of
    codes or signs that multiply floats.

    Raises:
        ImportError: ExecuTorch is missing: ``pip install "qconv[executorch]"``.
        ValueError: an operation that can't be written; a function that ExecuTorch's runtime does not have.
    """
    check_flags(round_outputs=round_outputs)
    image = torch.zeros_like(images[:1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what ExecuTorch imports and calls
        with needed("export to ExecuTorch"):
            from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
            from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower
            from executorch.runtime import Runtime
        rounded = roundings(program, images, Chains(program), signed=False) if round_outputs else None
        in_bytes = requantized(program, rounded)
        given = program, in_bytes, rounded
        shown = _Network(*given, is_open=True)
        methods = {"forward": _Network(*given), _CODES: shown}
        lowered = to_edge_transform_and_lower(
            {name: torch.export.export(network, (image,)) for name, network in methods.items()},
            partitioner=[XnnpackPartitioner()],
            compile_config=EdgeCompileConfig(_check_ir_validity=False),
            constant_methods={_NUMBERS: torch.tensor(shown.inner)},
        )
        made: Any = lowered.to_executorch()
        known = Runtime.get().operator_registry.operator_names
        for each in chain.from_iterable(plan.operators for plan in made.executorch_program.execution_plan):
            if f"{each.name}.{each.overload}" not in known:
                functions = (operation for operation in program.operations if isinstance(operation, ops.Function))
                wanted = each.name.replace("::", ".")
                origin = next((one.origin for one in functions if str(one.function).startswith(wanted)), "")
                raise ValueError(
                    f"'{origin}': {wanted} can't be written for ExecuTorch: its runtime (1.5.1) does not have it"
                )
    write_file(path, made.buffer)
    return left_as_floats(program, in_bytes)


def run(path: Path, images: Any) -> tuple[list[Any], dict[str, Any]]:
    """Run a file as it ships, image by image; then once more for the codes inside of it.

    `images` is a numpy array; its codes are as `targets.run` returns them.
    """
    content, names = path.read_bytes(), list[str]()  # ExecuTorch (1.5.1) reads from the bytes until the last run
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its Python runtime, which it calls experimental
        with needed("running an ExecuTorch file"):
            from executorch.runtime import Runtime
        program: Any = Runtime.get().load_program(content)
        numbers, forward, codes = map(program.load_method, (_NUMBERS, "forward", _CODES))
        for number, has_floats in numbers.execute([])[0].tolist():
            names += [f"{number}.input"] * has_floats + [f"{number}.codes"]
        wanted = tuple(forward.metadata.input_tensor_meta(0).sizes()[1:])
        if wanted != images.shape[1:]:
            raise ValueError(f"it takes images of {wanted}, not {images.shape[1:]}")
        outputs, shown = _outputs(forward, images), _outputs(codes, images)
    return outputs, dict(zip(names, shown[len(outputs) :], strict=True))


def _outputs(method: Any, images: Any) -> list[Any]:
    import numpy as np

    runs = [[value.numpy().copy() for value in method.execute([torch.from_numpy(image[None])])] for image in images]
    return [np.concatenate(values) for values in zip(*runs, strict=True)]


class _Network(nn.Module):
    """A program in torch's operators on floats; codes are less their zero, as bytes around convolutions in bytes.

    Args:
        program: the program.
        in_bytes: its convolutions in bytes, by the place of what makes codes or numbers of them.
        rounded: step and zero point, from 0 to 255, of floats that become numbers; None if none are to.
        is_open: whether the floats before each quantizer, and its codes, are returned, too.
    """

    def __init__(
        self,
        program: Program,
        in_bytes: Mapping[int, Integers],
        rounded: Mapping[int, tuple[float, int]] | None,
        is_open: bool = False,
    ) -> None:
        super().__init__()
        operations, quantized = program.operations, {} if rounded is None else at_once(program, in_bytes)
        rounded = rounded or {}
        self.put_together, self.outputs = program.put_together, program.outputs
        self.inputs = [operation.inputs for operation in operations]
        inside = {place for found in in_bytes.values() for place in found.chain}.difference(in_bytes)
        self.rounded = [place for place in rounded if place not in in_bytes and place not in inside]
        self.bytes = {place: _Bytes(127 - (found.ends or ops.Sign.ends)[1]) for place, found in in_bytes.items()}
        self.bytes |= {place: _Bytes(rounded[place][1] - 128, rounded[place][0]) for place in rounded.keys() - inside}
        self.steps = nn.ModuleList(_step(operation, operations) for operation in operations)
        for place in inside:
            self.steps[place], self.inputs[place] = nn.Identity(), ()
        for place, (step, zero) in quantized.items():
            low, high = cast(Quantize, operations[place]).ends
            self.bytes[place] = _Bytes(zero, step)
            self.steps[place] = _clamp(low * step, torch.inf) if high - low < 255 else nn.Identity()
            self.rounded.append(place)
        for place, found in in_bytes.items():
            self.steps[place] = _ConvInBytes(found, operations, self.bytes, self.bytes[place], place in rounded)
            self.inputs[place] = operations[found.chain[0]].inputs
        coders = (place for place, each in enumerate(operations) if isinstance(each, Quantize | ops.Sign))
        self.inner = [(place, place not in in_bytes) for place in coders] if is_open else []

    def forward(self, images: Tensor) -> Any:
        """Return the outputs; in an open network then for each quantizer its floats, if any, and codes."""
        values: list[Tensor] = []

        def read(place: int) -> Tensor:  # XNNPACK takes one operator that makes floats of bytes for each reader
            return self.bytes[place].read(values[place]) if place in self.bytes else values[place]

        for place, (step, inputs) in enumerate(zip(self.steps, self.inputs, strict=True)):
            values.append(step(*map(read, inputs)) if inputs else images)
            if place in self.rounded:
                values[-1] = self.bytes[place].write(values[-1])
        shown = tree_leaves(self.put_together([*map(read, self.outputs)]))
        for place, has_floats in self.inner:
            codes = read(place)
            if place in self.rounded:
                codes = (codes / self.bytes[place].step).round()
            shown += [read(self.inputs[place][0])] * has_floats + [codes]
        return tuple(shown)


_RESIZES = torch.ops.aten.upsample_nearest2d.default, torch.ops.aten.upsample_bilinear2d.default


def _resized(function: Any) -> ops.Function:
    """Resizing by the overload that ExecuTorch's runtime has."""
    x, size, *rest = function.arguments
    corners, scales = rest[: function.function is _RESIZES[1]], rest[-2:]
    how = (size, *corners, None) if len(scales) < 2 or None in scales else (None, *corners, scales)
    return replace(function, function=function.function.overloadpacket.vec, arguments=(x, *how))


def _step(operation: Operation, operations: list[Operation]) -> nn.Module:
    match operation:
        case ops.Input():
            return nn.Identity()
        case ops.ConvBits() | ops.ConvCodes() | ops.ConvFloats():
            coder, weight = operations[operation.inputs[0]], operation.weight.float()
            return _Conv(operation, coder, weight, torch.zeros(operation.channels))
        case ops.PReLU():
            step = nn.PReLU(operation.channels)
            step.weight.data = operation.slope
            return step
        case ops.Clamp():
            return _clamp(operation.low, operation.high)
        case Quantize():
            return _quantize(operation)
        case ops.Sign():
            return _Sign(operation.edge)
        case ops.Maximum() | ops.Average():
            return _Pool(operation)
        case ops.LayerNorm():
            sizes, eps = (operation.channels,), operation.eps
            return Called(lambda x: F.layer_norm(x.movedim(1, -1), sizes, eps=eps).movedim(-1, 1))
        case ops.Mean():
            return Called(lambda x: x.mean((2, 3), keepdim=True))
        case ops.Function():
            on_floats: Any = getattr(operation.function, "on_floats", operation.function)
            own = replace(operation, function=on_floats)
            return Called((_resized(own) if on_floats in _RESIZES else own).run)
        case ops.Bilinear():
            return nn.Upsample(None, operation.times, "bilinear", operation.align_corners)
        case ops.GELU():
            return nn.GELU()
        case ops.Sigmoid():
            return nn.SiLU() if isinstance(operation, ops.SiLU) else nn.Sigmoid()
        case ops.Affine() | ops.Add() | ops.Multiply() | ops.Repeat() | ops.Select() | ops.Shuffle() | ops.Take():
            return Called(operation.run)
    raise ValueError(f"'{operation.origin}': {type(operation).__name__} can't be written for ExecuTorch")


class _Conv(nn.Module):
    def __init__(self, conv: Any, coder: Any, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.shift = float(coder.zero - conv.zero) if isinstance(conv, ops.ConvCodes) else 0.0
        left, right, top, bottom = conv.window.padding
        self.value = float(getattr(conv, "pad_value", 0))
        self.sides = conv.window.padding if self.value or (left, top) != (right, bottom) else (0, 0, 0, 0)
        padding = (0, 0) if any(self.sides) else (top, left)
        self.geometry = conv.window.stride, padding, conv.window.dilation, conv.groups
        self.weight, self.bias = nn.Parameter(weight, requires_grad=False), nn.Parameter(bias.float())

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.shift if self.shift else x
        if any(self.sides):  # XNNPACK's partitioner fails with bytes just before a padding of floats
            x = F.pad(x + 0.0, self.sides, value=self.value)
        return F.conv2d(x, self.weight, self.bias, *self.geometry)


class _Bytes:
    """Codes, or numbers of a step, as bytes with a zero point."""

    def __init__(self, zero: int, step: float = 1.0) -> None:
        self.step = step
        self.how = step, zero, -128, 127, torch.int8

    def write(self, codes: Tensor) -> Tensor:
        return torch.ops.quantized_decomposed.quantize_per_tensor(codes, *self.how)

    def read(self, stored: Tensor) -> Tensor:
        return torch.ops.quantized_decomposed.dequantize_per_tensor(stored, *self.how)


class _ConvInBytes(_Conv):
    """A convolution of bytes with what follows it, up to codes or signs and a maximum of these, or to numbers."""

    scale: Tensor
    zeros: Tensor

    def __init__(
        self,
        found: Integers,
        operations: list[Operation],
        of_places: Mapping[int, _Bytes],
        own: _Bytes,
        is_rounded: bool,
    ) -> None:
        conv: Any = operations[found.chain[0]]
        (given,), pool = conv.inputs, operations[found.chain[-1]]
        coder: Any = operations[given]
        super().__init__(conv, coder, found.weight.to(torch.int8), found.bias * found.scale * own.step)
        self.register_buffer("zeros", torch.zeros(conv.channels, dtype=torch.int64))
        low, _ = found.ends or ops.Sign.ends
        self.given, self.bytes = of_places.get(given, _Bytes(127 - coder.ends[1])), own
        self.register_buffer("scale", (found.scale * own.step / self.given.step).float())
        self.is_given = given in of_places and not any(self.sides)
        is_free = is_rounded or (found.ends is not None and low)
        self.activation = nn.Identity() if is_free else nn.Hardtanh() if found.ends is None else nn.ReLU()
        self.low, self.pool = float(low), pool.window if isinstance(pool, ops.Maximum) else None

    def forward(self, x: Tensor) -> Tensor:
        how = self.scale, self.zeros, 0, -128, 127, torch.int8
        weight = torch.ops.quantized_decomposed.dequantize_per_channel(self.weight, *how)
        if not self.is_given:
            x = F.pad(x, self.sides) if any(self.sides) else x
            x = self.given.read(self.given.write(x))
        codes = self.bytes.write(self.activation(F.conv2d(x, weight, self.bias, *self.geometry)))
        if self.pool is None:
            return codes
        if any(sides := self.pool.reached((codes.shape[2], codes.shape[3]))):
            codes = self.bytes.write(F.pad(self.bytes.read(codes), sides, value=self.low))
        return self.bytes.write(F.max_pool2d(self.bytes.read(codes), self.pool.kernel, self.pool.stride))


def _clamp(low: float, high: float) -> nn.Module:
    if (low, high) == (0.0, torch.inf):
        return nn.ReLU()
    # XNNPACK's partitioner lets the last of two Hardtanh count, and fails with 1 as the higher end alone.
    low, high = max(low, -_LARGEST), min(high, _LARGEST)
    if low == high:  # one number, which XNNPACK's clamp refuses
        return Called(lambda x: x.clamp(low, _LARGEST).clamp(-_LARGEST, high))
    return Called(lambda x: x.clamp(low, high))


def _quantize(quantize: Quantize) -> nn.Module:
    low, high = quantize.ends
    form, factor = form_of(quantize)
    if form == EDGES:
        return _Levels(quantize.edges, quantize.codes.float() - quantize.zero)
    scaled = Called(lambda x: x * factor if form == PRODUCT else x / factor)
    return nn.Sequential(scaled, _clamp(low, high), Called(lambda x: (x + _ROUNDS) - _ROUNDS))


class _Levels(nn.Module):
    """Codes that are not even: the middle of both ends, and half a step up or down for each edge."""

    def __init__(self, edges: Tensor, codes: Tensor) -> None:
        super().__init__()
        self.signs = nn.ModuleList(_Sign(edge) for edge in edges.view(-1, 1))
        self.middle, self.halves = float(codes[0] + codes[-1]) / 2, (codes.diff() / 2).tolist()

    def forward(self, x: Tensor) -> Tensor:
        total = self.signs[0](x) * self.halves[0] + self.middle
        for sign, half in zip(self.signs[1:], self.halves[1:], strict=True):
            total = total + sign(x) * half
        return total


class _Sign(nn.Module):
    """The sign of a difference of finite numbers: huge or 0 by a product, between -1 and 1, and half a step on."""

    edge: Tensor

    def __init__(self, edge: Tensor) -> None:
        super().__init__()
        edge = torch.where(edge.abs() < _SMALLEST, (edge > 0) * _SMALLEST, edge)  # XNNPACK takes denormals as 0
        self.register_buffer("edge", edge.view(-1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return F.hardtanh((F.hardtanh((x - self.edge) * _LARGEST) + 0.5) * 4.0)


class _Pool(nn.Module):
    def __init__(self, pool: Any) -> None:
        super().__init__()
        self.window, self.is_maximum = pool.window, isinstance(pool, ops.Maximum)

    def forward(self, x: Tensor) -> Tensor:
        sides = self.window.reached((x.shape[2], x.shape[3]))
        shape = self.window.kernel, self.window.stride
        if self.is_maximum:
            return F.max_pool2d(F.pad(x, sides, value=-_LARGEST) if any(sides) else x, *shape)
        pooled = F.avg_pool2d(F.pad(x, sides), *shape)
        return pooled / F.avg_pool2d(F.pad(torch.ones(1, 1, *x.shape[2:]), sides), *shape) if any(sides) else pooled
