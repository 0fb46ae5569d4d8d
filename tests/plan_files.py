"""Files of programs, written by hand, for tests of the C code that reads them (``csrc/plan_file.h``)."""

import itertools
import random
import struct
from dataclasses import dataclass, field
from typing import Any

import torch

from qconv.kernels.native import kernels

HEAD, VALUE, OP = struct.Struct("<10iq"), struct.Struct("<4i"), struct.Struct("<36i4f7q")
INPUT, CONV_BITS, CONV_CODES, CONV_FLOATS, MEAN, OUTPUT, AVERAGE, MAXIMUM = range(8)
F32, U8, BITS = range(3)
INTEGERS = (
    *("kind", "input", "cout", "kh", "kw", "sh", "sw", "dh", "dw", "top", "left", "bottom", "right", "ceil", "groups"),
    *("pad_value", "zero", "weight_bits", "residual", "res_stride", "res_first", "out_f32", "out_bits", "codes"),
    *("code0", "code1", "form0", "form1", "low0", "low1", "high0", "high1", "zero0", "zero1", "is_factor", "curve"),
)
FLOATS = "clamp_low", "clamp_high", "number0", "number1"
PLACES = "weight", "scale", "bias", "edges", "rprelu", "table0", "table1"
DEFAULTS: dict[str, float] = {
    **dict.fromkeys(INTEGERS, 0),
    **dict.fromkeys(("kh", "kw", "sh", "sw", "dh", "dw", "groups", "res_stride"), 1),
    **dict.fromkeys(("input", "residual", "out_f32", "out_bits", "code0", "code1", *PLACES), -1),
    "clamp_low": -torch.inf,
    "clamp_high": torch.inf,
    "number0": 4.0,
    "number1": 0.3,
}
THREE: dict[str, Any] = {"kh": 3, "kw": 3, "top": 1, "left": 1, "bottom": 1, "right": 1}


@dataclass
class File:
    """The records of a file, which a test may damage before they become bytes."""

    head: dict[str, int] = field(default_factory=dict)
    values: list[list[int]] = field(default_factory=list)
    ops: list[dict[str, float]] = field(default_factory=list)
    blob: bytearray = field(default_factory=bytearray)

    def put(self, content: bytes) -> int:
        """Append to the blob; return the place."""
        self.blob += bytes(-len(self.blob) % 64)
        self.blob += content
        return len(self.blob) - len(content)

    def floats(self, *numbers: float) -> int:
        return self.put(struct.pack(f"<{len(numbers)}f", *numbers))

    def value(self, kind: int, channels: int, fill: int = 0) -> int:
        self.values.append([kind, channels, fill, 0])
        return len(self.values) - 1

    def op(self, kind: int, **fields: float) -> dict[str, float]:
        self.ops.append({**DEFAULTS, "kind": kind, **fields})
        return self.ops[-1]

    def content(self) -> bytes:
        outputs = sum(op["kind"] == OUTPUT for op in self.ops)
        head = {
            "magic": 0x31504351,
            "version": 1,
            "values": len(self.values),
            "ops": len(self.ops),
            "in_channels": 3,
            "outputs": outputs,
            "guard": 1,
            "height": 0,
            "width": 0,
            "more_inputs": 0,
            "blob_bytes": len(self.blob),
            **self.head,
        }
        values = b"".join(VALUE.pack(*value) for value in self.values)
        ops = b"".join(OP.pack(*(op[name] for name in (*INTEGERS, *FLOATS, *PLACES))) for op in self.ops)
        return HEAD.pack(*head.values()) + values + ops + bytes(self.blob)


def sound(seed: int = 0) -> File:
    """A file with each kind of op, and images of 3 channels."""
    draw, file = random.Random(seed), File()
    image = file.value(F32, 3)
    file.op(INPUT, cout=3, out_f32=image)
    floats, signs, codes = file.value(F32, 20), file.value(BITS, 20), file.value(U8, 20, 8)
    levels = struct.pack("<160f", *(draw.gauss(0, 1) for _ in range(160)))  # 8 for each filter
    stem = {"cout": 20, **THREE, "weight_bits": 3, "weight": file.put(draw.randbytes(20 * 11) + levels)}
    stem |= {"scale": file.floats(*[0.5] * 20), "bias": file.floats(*[0.1] * 20), "rprelu": file.floats(*[0.2] * 60)}
    coded = {"codes": 1, "code0": codes, "low0": -8, "high0": 7, "zero0": 8}
    file.op(CONV_FLOATS, input=image, out_f32=floats, out_bits=signs, edges=file.floats(*[0.0] * 20), **stem, **coded)
    summed = file.value(F32, 20)
    weight = file.put(draw.randbytes(20 * 9 * 2))
    binary = {**THREE, "groups": 2, "pad_value": -1, "weight_bits": 1, "weight": weight}
    file.op(CONV_BITS, input=signs, cout=20, residual=floats, out_f32=summed, clamp_low=-1, clamp_high=1, **binary)
    table = file.put(struct.pack("<i3f4B", 3, -0.5, 0.0, 0.5, 7, 9, 200, 0))
    looked_up, next_to = file.value(U8, 33), file.value(U8, 33)
    few_bits = {**THREE, "zero": 8, "weight_bits": 5, "weight": file.put(draw.randbytes(33 * 113))}
    two = {"codes": 2, "code0": looked_up, "form0": 2, "table0": table, "code1": next_to, "form1": 1}
    two |= {"high0": 200, "high1": 255}
    file.op(CONV_CODES, input=codes, cout=33, **few_bits, **two)
    wide = file.value(F32, 33)
    depthwise = {**THREE, "bottom": 0, "groups": 33, "weight_bits": 8, "weight": file.put(draw.randbytes(33 * 9))}
    file.op(CONV_CODES, input=next_to, cout=33, out_f32=wide, **depthwise)
    small, mean = file.value(F32, 20), file.value(F32, 33)
    file.op(MAXIMUM, input=summed, cout=20, kh=3, kw=3, sh=2, sw=2, top=1, left=1, ceil=1, out_f32=small)
    file.op(MEAN, input=wide, cout=33, out_f32=mean)
    last = file.value(F32, 20)
    file.op(AVERAGE, input=small, cout=20, kh=2, kw=2, out_f32=last, residual=summed, res_stride=2, res_first=4)
    file.op(OUTPUT, input=last, cout=20)
    file.op(OUTPUT, input=mean, cout=33)
    return file


def opened(content: bytes, size: tuple[int, int], instruction_set: int) -> int:
    """The handle of a plan."""
    module: Any = kernels()
    address = torch.frombuffer(bytearray(content or b"\0"), dtype=torch.uint8)
    return module.plan_open(address.data_ptr(), len(content), instruction_set, *size)


def outputs_of(handle: int, input: torch.Tensor, threads: int) -> list[torch.Tensor]:
    """What a plan computes."""
    module: Any = kernels()
    sizes = module.plan_sizes(handle)[5:]
    outputs = [torch.empty(len(input), *sizes[at : at + 3]) for at in range(0, len(sizes), 3)]
    places = [(value.data_ptr(), *value.stride()) for value in (input, *outputs)]
    module.plan_run(handle, len(input), threads, 1, *itertools.chain.from_iterable(places))
    return outputs


def try_damaged(seed: int, instruction_set: int) -> bool:
    """Open a file with a few wrong bits, and run it if nothing is found to be wrong; return whether it ran."""
    module: Any = kernels()
    draw, content = random.Random(seed), bytearray(sound().content())
    records = len(content) - len(sound().blob)
    for _ in range(draw.randint(1, 3)):
        content[draw.randrange(records if draw.random() < 0.8 else len(content))] ^= 1 << draw.randrange(8)
    size, length = (draw.randint(1, 12), draw.randint(1, 12)), draw.choice([len(content)] * 9 + [draw.randrange(99)])
    try:
        handle = opened(bytes(content[:length]), size, instruction_set)
    except ValueError:
        return False
    channels, _, _, buffers, *_ = module.plan_sizes(handle)
    if buffers < 1 << 26:
        outputs_of(handle, torch.randn(draw.randint(1, 5), channels, *size), 1)
    module.plan_close(handle)
    return True
