"""Plans: a program as bytes, and its kernels in C on the buffers for one size of images.

The bytes hold a `HEAD`, a `VALUE` for each buffer, an `OP` for each kernel, and a blob of weights in their natural
order (``csrc/plan.h``). Nothing in them depends on the size of images or on the processor.
"""

import struct
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.native import kernels, number_of
from . import operations as ops
from .edges import are_edges_of
from .fuse import Kernel, NotFused, fuse
from .operations import Program, Size, Window

MAGIC, VERSION = b"QCP1", 1
HEAD = struct.Struct("<4s9iq")
VALUE = struct.Struct("<4i")
OP = struct.Struct("<36i4f7q")
FIELDS = {  # of an `OP`, in order, with their defaults
    "kind": (0,),
    "input": (-1,),
    "channels": (0,),
    "kernel": (1, 1),
    "stride": (1, 1),
    "dilation": (1, 1),
    "top, left, bottom, right": (0, 0, 0, 0),
    "ceil": (0,),
    "groups": (1,),
    "pad_value": (0,),
    "zero": (0,),
    "weight_bits": (0,),
    "residual": (-1,),
    "residual_stride": (1,),
    "residual_first": (0,),
    "floats": (-1,),
    "bits": (-1,),
    "codes": (0,),
    "code": (-1, -1),
    "form": (0, 0),
    "low": (0, 0),
    "high": (0, 0),
    "code_zero": (0, 0),
    "is_factor": (0,),
    "curve": (0,),
    "clamp": (-torch.inf, torch.inf),
    "number": (0.0, 0.0),
    "weight": (-1,),
    "scale": (-1,),
    "bias": (-1,),
    "edges": (-1,),
    "prelu": (-1,),
    "table": (-1, -1),
}
KINDS = {
    0: ops.Input,
    1: ops.ConvBits,
    2: ops.ConvCodes,
    3: ops.ConvFloats,
    4: ops.Mean,
    6: ops.Average,
    7: ops.Maximum,
    8: ops.Select,
    9: ops.Repeat,
    10: ops.Shuffle,
    11: ops.Bilinear,
    12: ops.LayerNorm,
    13: ops.Pad,
}
MODES = "constant", "reflect", "replicate", "circular"  # of padding
CURVES = None, "sigmoid", "SiLU", "hard swish", "GELU"
_MEAN, OUTPUT = 4, 5
_FLOATS, _CODES, _BITS = range(3)  # types of buffers
PRODUCT, QUOTIENT, EDGES = range(3)  # how numbers become codes
_ALIGNED = 64


def program_bytes(program: Program, guard: bool) -> Tensor:
    """Return a program as bytes, uint8.

    Args:
        program: the program.
        guard: whether images with NaN or inf get outputs that are NaN.

    Raises:
        NotFused: the kernels can't run it.
    """
    return _Writer(program).written(guard)


class _Writer:
    def __init__(self, program: Program) -> None:
        self.program = program = program.pruned()  # a copy, to which fusing may add
        self.blob: list[Tensor] = []
        self.length = 0
        self.values: list[tuple[int, int, int]] = []  # type, channels, what the padding around it holds
        self.stored: dict[tuple[int, int], int] = {}  # by the number of the operation and the type
        self.zeros: dict[int, int] = {}
        for operation in program.operations:
            if isinstance(operation, ops.ConvCodes):
                (given,) = operation.inputs
                if self.zeros.setdefault(given, operation.zero) != operation.zero:
                    raise NotFused(f"'{operation.origin}': its codes have two zeros")

    def written(self, guard: bool) -> Tensor:
        """Return the bytes."""
        records = [self._kernel(kernel) for kernel in fuse(self.program)]
        outputs, operations = self.program.outputs, self.program.operations
        for place in outputs:
            value, channels = self.stored[place, _FLOATS], operations[place].channels
            records.append({"kind": (OUTPUT,), "input": (value,), "channels": (channels,)})
        counts = VERSION, len(self.values), len(records), operations[0].channels, len(outputs), int(guard)
        more_inputs = sum(isinstance(operation, ops.Input) for operation in operations) - 1
        parts = [
            HEAD.pack(MAGIC, *counts, *(self.program.size or (0, 0)), more_inputs, self.length),
            *(VALUE.pack(*value, 0) for value in self.values),
        ]
        parts += [OP.pack(*chain.from_iterable((FIELDS | record).values())) for record in records]
        return torch.cat([torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8), *self.blob])

    def _put(self, *parts: Tensor) -> int:
        """Append tensors to the blob; return the place of the first."""
        place = self.length
        tensors = [part.detach().contiguous().flatten().view(torch.uint8) for part in parts]
        length = sum(map(len, tensors))
        tensors.append(torch.zeros(-length % _ALIGNED, dtype=torch.uint8))
        self.blob += tensors
        self.length += length + -length % _ALIGNED
        return place

    def _value(self, number: int, kind: int, fill: int = 0) -> int:
        """Add a buffer for the value of an operation."""
        self.values.append((kind, self.program.operations[number].channels, fill))
        self.stored[number, kind] = len(self.values) - 1
        return len(self.values) - 1

    def _kernel(self, kernel: Kernel) -> dict[str, Any]:
        """Return the fields of a kernel's record that differ from the defaults."""
        source: Any = kernel.source
        kinds = {operation: number for number, operation in KINDS.items()} | {ops.Largest: _MEAN}
        record: dict[str, Any] = {"kind": (kinds[type(source)],), "channels": (source.channels,)}
        if source.inputs:
            kind = {ops.ConvBits: _BITS, ops.ConvCodes: _CODES}.get(type(source), _FLOATS)
            record["input"] = (self.stored[source.inputs[0], kind],)
            window = getattr(source, "window", Window())
            left, right, top, bottom = window.padding
            record |= {"kernel": window.kernel, "stride": window.stride, "dilation": window.dilation}
            record |= {"top, left, bottom, right": (top, left, bottom, right), "ceil": (int(window.ceil),)}
        if isinstance(source, ops.ConvBits | ops.ConvCodes | ops.ConvFloats):
            bits, place = self._weight(source)
            record |= {"groups": (source.groups,), "weight_bits": (bits,), "weight": (place,)}
            record |= {name: (getattr(source, name),) for name in ("pad_value", "zero") if hasattr(source, name)}
        if isinstance(source, ops.Select):
            record["weight"] = (self._put(source.index.int()),)
        if isinstance(source, ops.LayerNorm):
            record["weight"] = (self._put(torch.tensor([source.eps])),)
        if isinstance(source, ops.Repeat):
            record["stride"] = source.times
        if isinstance(source, ops.Bilinear):
            record["ceil"] = (int(source.align_corners),)
        if isinstance(source, ops.Largest):
            record["ceil"] = (1,)
        if isinstance(source, ops.Shuffle):
            record["stride"] = source.times, source.times
        if isinstance(source, ops.Pad):
            left, right, top, bottom = source.arguments[1]
            record |= {"top, left, bottom, right": (top, left, bottom, right)}
            record["ceil"] = (MODES.index(source.named.get("mode", "constant")),)
            record["weight"] = (self._put(torch.tensor([float(source.named.get("value") or 0)])),)
        return record | self._stages(kernel) | self._outputs(kernel)

    def _weight(self, conv: ops.ConvBits | ops.ConvCodes | ops.ConvFloats) -> tuple[int, int]:
        """Put a weight as (C_out, kh, kw, C / groups); return its bits, and its place."""
        weight = conv.weight.permute(0, 2, 3, 1).contiguous()
        if isinstance(conv, ops.ConvFloats):
            few = _few_levels(weight.flatten(1))
            return (32, self._put(weight)) if few is None else (few[0], self._put(*few[1:]))
        if isinstance(conv, ops.ConvBits):
            channels = weight.shape[-1]
            width = 16 if channels <= 16 else -(-channels // 32) * 32
            return 1, self._put(_packed(F.pad(weight < 0, (0, width - channels)), 1))
        if weight.min() < -128 or weight.max() > 127:
            raise NotFused(f"'{conv.origin}': its weights have more than 8 bits")
        bits = 1 + max(int(weight.max()), -1 - int(weight.min()), 0).bit_length()
        numbers = weight.to(torch.int8).flatten(1).view(torch.uint8) & ((1 << bits) - 1)
        return bits, self._put(_packed_rows(numbers, bits))

    def _stages(self, kernel: Kernel) -> dict[str, Any]:
        """Return what is done to the numbers."""
        record: dict[str, Any] = {}
        if kernel.affine is not None:
            record |= {"scale": (self._put(kernel.affine.scale),), "bias": (self._put(kernel.affine.bias),)}
        if kernel.residual is not None:
            value, stride, first, is_factor = kernel.residual
            record |= {"residual": (self.stored[value, _FLOATS],), "is_factor": (int(is_factor),)}
            record |= {"residual_stride": (stride,), "residual_first": (first,)}
        if kernel.prelu is not None:
            record["prelu"] = (self._put(*kernel.prelu[:3]),)
        record["curve"] = (CURVES.index(kernel.curve),)
        if kernel.clamp is not None:
            record["clamp"] = kernel.clamp.low, kernel.clamp.high
        return record

    def _outputs(self, kernel: Kernel) -> dict[str, Any]:
        """Return what is stored."""
        record: dict[str, Any] = {}
        if kernel.floats:
            record["floats"] = (self._value(kernel.value, _FLOATS),)
        for number, sign in kernel.signs.items():
            record |= {"bits": (self._value(number, _BITS),), "edges": (self._put(sign.edge),)}
        coded = [self._codes(number, quantize) for number, quantize in kernel.codes.items()]
        for name in coded[0] if coded else ():
            record[name] = tuple(each[name] for each in (coded * 2)[:2])
        return record | {"codes": (len(coded),)}

    def _codes(self, number: int, quantize: ops.Quantize) -> dict[str, Any]:
        low, high = quantize.ends
        form, factor = form_of(quantize)
        table = -1
        if form == EDGES:
            count = torch.tensor([len(quantize.edges)], dtype=torch.int32)
            table = self._put(count, quantize.edges, quantize.codes)
        value = self._value(number, _CODES, self.zeros.get(number, quantize.zero))
        record = {"code": value, "form": form, "low": low, "high": high, "code_zero": quantize.zero}
        return record | {"number": factor, "table": table}


def _few_levels(filters: Tensor) -> tuple[int, Tensor, Tensor] | None:
    """Return the bits of a weight, all weights as packed numbers of levels, and each filter's levels.

    None where floats are smaller, as in most layers whose weights are not quantized.
    """
    bits_of_floats = filters.detach().view(torch.int32)  # 0 and -0 are two levels
    if len(bits_of_floats[0].unique()) > 256:
        return None
    ordered, order = bits_of_floats.sort(1)
    rank = F.pad(ordered[:, 1:] != ordered[:, :-1], (1, 0)).cumsum(1)
    bits = max(int(rank.max()).bit_length(), 1)
    if bits > 8 or filters.shape[1] * (32 - bits) <= 32 << bits:
        return None
    number = torch.empty_like(rank, dtype=torch.uint8).scatter_(1, order, rank.byte())
    levels = ordered.new_zeros(len(filters), 1 << bits).scatter_(1, rank, ordered)
    return bits, _packed_rows(number, bits), levels


def _packed_rows(numbers: Tensor, bits: int) -> Tensor:
    """Pack rows of numbers of 1 to 8 bits, uint8; each row begins with a byte of its own."""
    if 8 % bits:
        numbers, bits = (numbers[..., None] >> torch.arange(bits, dtype=torch.uint8) & 1).flatten(1), 1
    return _packed(F.pad(numbers, (0, -numbers.shape[1] % (8 // bits))), bits)


def _packed(parts: Tensor, bits: int) -> Tensor:
    """Pack numbers of a few bits into bytes along the last dimension, the first one into the lowest bits."""
    places = torch.arange(0, 8, bits, dtype=torch.uint8)
    return (parts.to(torch.uint8).unflatten(-1, (-1, len(places))) << places).sum(-1, dtype=torch.uint8)


def form_of(quantize: ops.Quantize) -> tuple[int, float]:
    """Return how numbers become codes, and the factor or divisor: as ``clamp(round(x · number))`` if the edges allow.

    A product is a few times faster than a quotient; whether it changes at the same floats is tried at each edge.
    """
    if quantize.has_gaps:
        return EDGES, 0.0
    low, high = quantize.ends
    step = torch.tensor(quantize.step, dtype=torch.float32)
    inverse = (1 / step.double()).float()
    for nudge in (0, 1, -1, 2, -2):
        factor = (inverse.view(torch.int32) + nudge).view(torch.float32)
        if are_edges_of(lambda x: (x * factor).clamp(low, high).round(), quantize.edges, low):  # noqa: B023
            return PRODUCT, float(factor)
    if are_edges_of(lambda x: (x / step).clamp(low, high).round(), quantize.edges, low):
        return QUOTIENT, float(step)
    return EDGES, 0.0


class Plan:
    """The kernels of a program on buffers for inputs of one size each.

    Args:
        content: a program's bytes.
        sizes: height and width of each input; a network's program has one, its images.
        instruction_set: as in `qconv.kernels.native`; None is the best one.

    Attributes:
        channels: of the first input.

    Raises:
        ValueError: damaged bytes; images that are too small for a window.
        NotFused: qconv was installed without its C kernels.
    """

    def __init__(self, content: Tensor, *sizes: Size, instruction_set: str | None = None) -> None:
        if kernels() is None:
            raise NotFused("qconv was installed without its C kernels")
        self._module: Any = kernels()
        given = number_of(instruction_set), *chain.from_iterable(sizes)
        self._handle = self._module.plan_open(content.data_ptr(), len(content), *given)
        self.channels, _, _, _, _, *numbers = self._module.plan_sizes(self._handle)
        self._shapes = [numbers[first : first + 3] for first in range(0, len(numbers), 3)]

    def __call__(
        self, *inputs: Tensor, threads: int, memory_format: torch.memory_format = torch.contiguous_format
    ) -> list[Tensor]:
        """Return the outputs, (N, C, H, W), for inputs of the plan's sizes, float32 on the CPU in any memory format."""
        count, places = inputs[0].shape[0], list[int]()
        outputs = [
            torch.empty(count, *shape, dtype=torch.float32, device="cpu", memory_format=memory_format)
            for shape in self._shapes
        ]
        for value in (*inputs, *outputs):
            places += value.data_ptr(), *value.stride()
        self._module.plan_run(self._handle, count, threads, len(inputs), *places)
        return outputs

    def __del__(self) -> None:
        if hasattr(self, "_handle"):
            self._module.plan_close(self._handle)
