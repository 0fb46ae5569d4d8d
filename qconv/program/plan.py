"""Plans: a program as bytes, and its kernels in C on the buffers for one size of images.

The bytes hold a `HEAD`, a `VALUE` for each buffer, an `OP` for each kernel, and a blob of weights in their natural
order (``csrc/plan.h``). Nothing in them depends on the size of images or on the processor.
"""

import struct
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .edges import are_edges_of
from .fuse import Kernel, NotFused, fuse
from .operations import (
    Average,
    ConvBits,
    ConvCodes,
    ConvFloats,
    Input,
    Maximum,
    Mean,
    Program,
    Quantize,
    Window,
)

MAGIC, VERSION = b"QCP1", 1
HEAD = struct.Struct("<4s7i2q")
VALUE = struct.Struct("<4i")
OP = np.dtype(
    [
        *((name, "<i4") for name in ("kind", "input", "channels")),
        *((name, "<i4", (2,)) for name in ("kernel", "stride", "dilation")),
        ("padding", "<i4", (4,)),  # top, left, bottom, right
        *((name, "<i4") for name in ("ceil", "groups", "pad_value", "zero", "weight_bits")),
        *((name, "<i4") for name in ("residual", "residual_stride", "residual_first", "floats", "bits", "codes")),
        *((name, "<i4", (2,)) for name in ("code", "form", "low", "high", "code_zero", "none")),
        *((name, "<f4", (2,)) for name in ("clamp", "number")),
        *((name, "<i8") for name in ("weight", "scale", "bias", "edges", "prelu")),
        ("table", "<i8", (2,)),
    ]
)
KINDS = {Input: 0, ConvBits: 1, ConvCodes: 2, ConvFloats: 3, Mean: 4, Average: 6, Maximum: 7}
_OUTPUT = 5
_FLOATS, _CODES, _BITS = range(3)  # types of buffers
_PRODUCT, _QUOTIENT, _EDGES = range(3)  # how numbers become codes
_ALIGNED = 64


def program_bytes(program: Program, guard: bool) -> bytes:
    """Return a program as bytes.

    Args:
        program: the program.
        guard: whether images with NaN or inf get outputs that are NaN.

    Raises:
        NotFused: the kernels can't run it.
    """
    return _Writer(program).written(guard)


class _Writer:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.blob = bytearray()
        self.values: list[tuple[int, int, int]] = []  # type, channels, what the padding around it holds
        self.stored: dict[tuple[int, int], int] = {}  # by the number of the operation and the type
        self.zeros: dict[int, int] = {}
        for operation in program.operations:
            if isinstance(operation, ConvCodes):
                (given,) = operation.inputs
                if self.zeros.setdefault(given, operation.zero) != operation.zero:
                    raise NotFused(f"'{operation.origin}': its codes have two zeros")

    def written(self, guard: bool) -> bytes:
        """Return the bytes."""
        fused = fuse(self.program)
        records = np.zeros(len(fused) + 1, OP)
        for record, kernel in zip(records, fused, strict=False):
            self._kernel(record, kernel)
        last = self.program.output
        for name in ("weight", "scale", "bias", "edges", "prelu", "table", "residual", "floats", "bits", "code"):
            records[-1][name] = -1
        for name in ("kernel", "stride", "dilation", "groups", "residual_stride"):
            records[-1][name] = 1
        records[-1]["kind"], records[-1]["input"] = _OUTPUT, self.stored[last, _FLOATS]
        records[-1]["channels"] = self.program.operations[last].channels
        self.blob.extend(b"\0" * (-len(self.blob) % _ALIGNED))
        counts = VERSION, len(self.values), len(records), self.program.operations[0].channels, 1, int(guard), 0
        head = HEAD.pack(MAGIC, *counts, len(self.blob), 0)
        values = b"".join(VALUE.pack(*value, 0) for value in self.values)
        return head + values + records.tobytes() + bytes(self.blob)

    def _put(self, numbers: Any, dtype: str = "<f4") -> int:
        """Append an array to the blob; return its place."""
        self.blob.extend(b"\0" * (-len(self.blob) % _ALIGNED))
        place = len(self.blob)
        array = numbers.detach().numpy() if isinstance(numbers, Tensor) else numbers
        self.blob.extend(np.ascontiguousarray(array).astype(dtype).tobytes())
        return place

    def _value(self, number: int, kind: int, fill: int = 0) -> int:
        """Add a buffer for the value of an operation."""
        self.values.append((kind, self.program.operations[number].channels, fill))
        self.stored[number, kind] = len(self.values) - 1
        return len(self.values) - 1

    def _kernel(self, record: Any, kernel: Kernel) -> None:
        source = kernel.source
        record["kind"], record["channels"] = KINDS[type(source)], source.channels
        record["input"] = -1
        if source.inputs:
            kind = {ConvBits: _BITS, ConvCodes: _CODES}.get(type(source), _FLOATS)
            record["input"] = self.stored[source.inputs[0], kind]
        window = getattr(source, "window", Window())
        left, right, top, bottom = window.padding
        record["kernel"], record["stride"], record["dilation"] = window.kernel, window.stride, window.dilation
        record["padding"], record["ceil"] = (top, left, bottom, right), window.ceil
        record["groups"] = getattr(source, "groups", 1)
        record["pad_value"], record["zero"] = getattr(source, "pad_value", 0), getattr(source, "zero", 0)
        for name in ("weight", "scale", "bias", "edges", "prelu", "table", "residual", "floats", "bits", "code"):
            record[name] = -1
        if isinstance(source, ConvBits | ConvCodes | ConvFloats):
            record["weight_bits"], record["weight"] = self._weight(source)
        self._stages(record, kernel)
        self._outputs(record, kernel)

    def _weight(self, conv: ConvBits | ConvCodes | ConvFloats) -> tuple[int, int]:
        """Put a weight as (C_out, kh, kw, C / groups); return its bits, and its place."""
        weight = conv.weight.detach().permute(0, 2, 3, 1).contiguous().numpy()
        if isinstance(conv, ConvFloats):
            return 32, self._put(weight)
        if isinstance(conv, ConvBits):
            channels = weight.shape[-1]
            width = 16 if channels <= 16 else -(-channels // 32) * 32
            bits = np.pad(weight < 0, [(0, 0)] * 3 + [(0, width - channels)])
            return 1, self._put(np.packbits(bits, axis=-1, bitorder="little"), "u1")
        codes = weight.reshape(len(weight), -1).astype(np.int8)
        if codes.min() < -8 or codes.max() > 7:
            return 8, self._put(codes, "i1")
        halves = np.pad(codes.view(np.uint8) & 15, ((0, 0), (0, codes.shape[1] % 2)))
        return 4, self._put(halves[:, ::2] | halves[:, 1::2] << 4, "u1")

    def _stages(self, record: Any, kernel: Kernel) -> None:
        """What is done to the numbers."""
        if kernel.affine is not None:
            record["scale"], record["bias"] = self._put(kernel.affine.scale), self._put(kernel.affine.bias)
        record["residual_stride"] = 1
        if kernel.residual is not None:
            value, record["residual_stride"], record["residual_first"] = kernel.residual
            record["residual"] = self.stored[value, _FLOATS]
        if kernel.prelu is not None:
            record["prelu"] = self._put(torch.cat(kernel.prelu[:3]))
        clamp = kernel.clamp
        record["clamp"] = (-np.inf, np.inf) if clamp is None else (clamp.low, clamp.high)

    def _outputs(self, record: Any, kernel: Kernel) -> None:
        """What is stored."""
        if kernel.floats:
            record["floats"] = self._value(kernel.value, _FLOATS)
        for number, sign in kernel.signs.items():
            record["bits"], record["edges"] = self._value(number, _BITS), self._put(sign.edge)
        record["codes"] = len(kernel.codes)
        for index, (number, quantize) in enumerate(kernel.codes.items()):
            record["code"][index] = self._value(number, _CODES, self.zeros.get(number, quantize.zero))
            low, high = (int(end) - quantize.zero for end in (quantize.codes[0], quantize.codes[-1]))
            record["low"][index], record["high"][index], record["code_zero"][index] = low, high, quantize.zero
            record["form"][index], record["number"][index] = form_of(quantize, low, high)
            if record["form"][index] == _EDGES:
                count = np.array([len(quantize.edges)], "<i4").tobytes()
                edges = quantize.edges.numpy().astype("<f4").tobytes()
                table = np.frombuffer(count + edges + quantize.codes.numpy().tobytes(), np.uint8)
                record["table"][index] = self._put(table, "u1")


def form_of(quantize: Quantize, low: int, high: int) -> tuple[int, float]:
    """Return how numbers become codes, and the factor or divisor: as ``clamp(round(x · number))`` if the edges allow.

    A product is a few times faster than a quotient; whether it changes at the same floats is tried at each edge.
    """
    if len(quantize.codes) != high - low + 1:
        return _EDGES, 0.0
    step = torch.tensor(quantize.step, dtype=torch.float32)
    inverse = (1 / step.double()).float()
    for nudge in (0, 1, -1, 2, -2):
        factor = (inverse.view(torch.int32) + nudge).view(torch.float32)
        if are_edges_of(lambda x: (x * factor).clamp(low, high).round(), quantize.edges, low):  # noqa: B023
            return _PRODUCT, float(factor)
    if are_edges_of(lambda x: (x / step).clamp(low, high).round(), quantize.edges, low):
        return _QUOTIENT, float(step)
    return _EDGES, 0.0
