"""Reading a program's bytes: its operations, as torch defines them."""

from itertools import islice
from typing import Any

import torch
from torch import Tensor

from . import operations as ops
from .edges import edges_of
from .fuse import CURVE_OF
from .operations import Program, Window
from .plan import CURVES, EDGES, FIELDS, HEAD, KINDS, MAGIC, MODES, OP, OUTPUT, PRODUCT, VALUE, VERSION


def read_program(content: Tensor) -> tuple[Program, bool]:
    """Return the program of its bytes, and whether images with NaN or inf get outputs that are NaN.

    The inverse of `program_bytes`: the operations compute the same, but may be others, and have no names. Whether the
    output loses its last dimensions is not in the bytes.

    Raises:
        ValueError: not the bytes of a program, or other than they say in number.
    """
    data = bytes(content.numpy())
    if len(data) < HEAD.size or data[:4] != MAGIC:
        raise ValueError("not the file of a program")
    _, version, values, count, channels, _, guard, height, width, _, length = HEAD.unpack_from(data)
    first = HEAD.size + values * VALUE.size
    blob = first + count * OP.size
    if version != VERSION or len(data) != blob + length:
        raise ValueError(f"the file has version {version} and {len(data)} bytes; {VERSION} and {blob + length} are due")
    reader = _Reader(Program(channels), content[blob:])
    reader.widths = [VALUE.unpack_from(data, HEAD.size + number * VALUE.size)[1] for number in range(values)]
    for number in range(count):
        numbers = iter(OP.unpack_from(data, first + number * OP.size))
        reader.take({name: tuple(islice(numbers, len(default))) for name, default in FIELDS.items()})
    reader.program.outputs, reader.program.ranks = tuple(reader.outputs), (4,) * len(reader.outputs)
    reader.program.size = (height, width) if height else None
    return reader.program, bool(guard)


class _Reader:
    def __init__(self, program: Program, blob: Tensor) -> None:
        self.program, self.blob = program, blob
        self.widths: list[int] = []  # channels of each buffer
        self.outputs: list[int] = []
        self.places: dict[int, int] = {}  # the operation whose value each buffer holds

    def take(self, record: dict[str, Any]) -> None:
        """Add the operations of a kernel's record."""
        (kind,), (channels,), (given,) = record["kind"], record["channels"], record["input"]
        if kind == OUTPUT:
            self.outputs.append(self.places[given])
            return
        at = 0 if given < 0 else self._source(kind, channels, given, record)
        if record["scale"] != (-1,):
            scale, bias = (self._floats(record[name][0], channels) for name in ("scale", "bias"))
            at = self._add(ops.Affine, channels, at, scale=scale, bias=bias)
        if record["residual"] != (-1,):
            at = self._with_residual(channels, at, record)
        if record["prelu"] != (-1,):
            before, slope, after = self._floats(record["prelu"][0], 3 * channels).view(3, channels)
            at = self._add(ops.Affine, channels, at, scale=torch.ones(channels), bias=before)
            at = self._add(ops.PReLU, channels, at, slope=slope)
            at = self._add(ops.Affine, channels, at, scale=torch.ones(channels), bias=after)
        if curve := CURVES[record["curve"][0]]:
            at = self._curve(curve, channels, at)
        low, high = record["clamp"]
        if (low, high) != (-torch.inf, torch.inf):
            at = self._add(ops.Clamp, channels, at, low=low, high=high)
        self.places[record["floats"][0]] = at
        if record["bits"] != (-1,):
            edge = self._floats(record["edges"][0], channels)
            self.places[record["bits"][0]] = self._add(ops.Sign, channels, at, edge=edge)
        for k in range(record["codes"][0]):
            self.places[record["code"][k]] = self._coded(channels, at, k, record)

    def _add(self, kind: Any, channels: int, *inputs: int, **fields: Any) -> int:
        return self.program.add(kind(inputs=inputs, channels=channels, **fields))

    def _curve(self, curve: str, channels: int, at: int) -> int:
        if kind := {name: kind for kind, name in CURVE_OF.items()}.get(curve):
            return self._add(kind, channels, at)
        one, nothing = torch.ones(channels), torch.zeros(channels)
        gate = self._add(ops.Affine, channels, at, scale=one, bias=nothing + 3)
        gate = self._add(ops.Clamp, channels, gate, low=0.0, high=6.0)
        gate = self._add(ops.Affine, channels, gate, scale=one / 6, bias=nothing)
        return self._add(ops.Multiply, channels, at, gate)

    def _tensor(self, place: int, dtype: torch.dtype, count: int) -> Tensor:
        return self.blob[place : place + count * dtype.itemsize].clone().view(dtype)

    def _floats(self, place: int, count: int) -> Tensor:
        return self._tensor(place, torch.float32, count)

    def _source(self, kind: int, channels: int, given: int, record: dict[str, Any]) -> int:
        source, at = KINDS[kind], self.places[given]
        top, left, bottom, right = record["top, left, bottom, right"]
        geometry = record["kernel"], record["stride"], (left, right, top, bottom), record["dilation"]
        window: dict[str, Any] = {"window": Window(*geometry, bool(record["ceil"][0]))}
        if source in (ops.Average, ops.Maximum):
            at = self._add(source, self.widths[given], at, **window)
            return at if channels == self.widths[given] else self._add(ops.Take, channels, at)
        if source is ops.Mean:
            return self._add(ops.Largest if record["ceil"][0] else ops.Mean, channels, at)
        if source is ops.LayerNorm:
            return self._add(ops.LayerNorm, channels, at, eps=float(self._floats(record["weight"][0], 1)))
        if source is ops.Repeat:
            return self._add(ops.Repeat, channels, at, times=record["stride"])
        if source is ops.Bilinear:
            is_aligned = bool(record["ceil"][0])
            return self._add(ops.Bilinear, channels, at, times=record["stride"], align_corners=is_aligned)
        if source is ops.Shuffle:
            return self._add(ops.Shuffle, channels, at, times=record["stride"][0])
        if source is ops.Pad:
            mode, value = MODES[record["ceil"][0]], float(self._floats(record["weight"][0], 1))
            arguments = ops.Given(0), [left, right, top, bottom]
            named: dict[str, Any] = {"mode": mode} if mode != "constant" else {"value": value}
            return self._add(ops.Pad, channels, at, arguments=arguments, named=named)
        if source is ops.Select:
            index = self._tensor(record["weight"][0], torch.int32, channels)
            return self._add(ops.Select, channels, at, index=index.long())
        (groups,) = record["groups"]
        of_source = {ops.ConvBits: ("pad_value",), ops.ConvCodes: ("zero",)}.get(source, ())
        fields = {name: record[name][0] for name in of_source}
        weight = self._weight(source, (channels, *record["kernel"], self.widths[given] // groups), record)
        return self._add(source, channels, at, weight=weight, groups=groups, **window, **fields)

    def _weight(self, source: Any, shape: tuple[int, ...], record: dict[str, Any]) -> Tensor:
        """Return a weight (C_out, C / groups, kh, kw)."""
        (place,), (bits,), (filters, *kernel, inputs) = record["weight"], record["weight_bits"], shape
        count = torch.Size(shape).numel()
        if bits == 32:
            weight = self._floats(place, count)
        elif source is ops.ConvBits:
            width = 16 if inputs <= 16 else -(-inputs // 32) * 32
            packed = self._tensor(place, torch.uint8, count // inputs * width // 8)
            weight = 1 - 2 * _unpacked(packed, 1).view(-1, width)[:, :inputs]
        else:
            numbers = self._numbers(place, filters, count // filters, bits)
            if source is ops.ConvFloats:
                levels = self._floats(place + filters * -(-numbers.shape[1] * bits // 8), filters << bits)
                weight = levels.view(filters, -1).gather(1, numbers)
            else:
                half = 1 << bits - 1
                weight = ((numbers ^ half) - half).to(torch.int8)
        return weight.reshape(filters, *kernel, inputs).permute(0, 3, 1, 2).contiguous()

    def _numbers(self, place: int, filters: int, count: int, bits: int) -> Tensor:
        """Return the numbers of filters, (C_out, count)."""
        packed = self._tensor(place, torch.uint8, filters * -(-count * bits // 8))
        if bits == 8:
            return packed.long().view(filters, count)
        digits = _unpacked(packed, 1).view(filters, -1)[:, : count * bits].unflatten(1, (count, bits))
        return (digits.short() << torch.arange(bits).short()).sum(-1)

    def _with_residual(self, channels: int, at: int, record: dict[str, Any]) -> int:
        (value,), (stride,), (first,) = (record[name] for name in ("residual", "residual_stride", "residual_first"))
        other = self.places[value]
        if record["is_factor"][0]:
            return self._add(ops.Multiply, channels, at, other, is_gate=stride == 0)
        if (stride, first, self.widths[value]) != (1, 0, channels):
            other = self._add(ops.Take, channels, other, stride=(stride, stride), first=first)
        return self._add(ops.Add, channels, at, other)

    def _coded(self, channels: int, at: int, k: int, record: dict[str, Any]) -> int:
        form, low, high, zero, number, table = (
            record[name][k] for name in ("form", "low", "high", "code_zero", "number", "table")
        )
        if form == EDGES:
            count = int(self._tensor(table, torch.int32, 1))
            edges = self._floats(table + 4, count)
            codes, step = self._tensor(table + 4 + 4 * count, torch.uint8, count + 1), 0.0
        else:
            factor = torch.tensor(number)
            step = 1 / number if form == PRODUCT else number
            edges = edges_of(
                lambda x: (x * factor if form == PRODUCT else x / factor).clamp(low, high).round(), low, high, step
            )
            codes = torch.arange(low + zero, high + zero + 1).to(torch.uint8)
        return self._add(ops.Quantize, channels, at, edges=edges, codes=codes, zero=zero, step=step)


def _unpacked(packed: Tensor, bits: int) -> Tensor:
    """Return numbers of a few bits, the first ones from the lowest bits of each byte."""
    return (packed.to(torch.int64).unsqueeze(-1) >> torch.arange(0, 8, bits) & (1 << bits) - 1).flatten()
