"""The binary convolution in C, called on the memory of tensors.

`_binary` is an extension module of Python's stable ABI: it takes addresses and integers, and one build serves every
version of Python and torch. It shares rows out by torch's own threads, through `torch_parallel_for` of torch's C ABI.
An operator in C++ over torch's stable ABI takes half the time of a call (13 µs, not 29, in issue 17), but would have
every build fetch torch for its headers: 3 minutes and 5 GB more for `pip install`.

For one image of 16@32 on one thread with AVX-512, `binary_conv2d` takes 27 µs, of which its C function takes 12;
`pack_signs` 10 and 1, `where_passes` 11 and 1, `clamp_and_pack` 16 and 2, `sign_grad_input` 67 and 41. Torch's way to
an operator in Python takes 3 to 6 µs of the rest, an output 1 to 2; what is left is spread over many lines. Of a lean
ResNet-20's step (`bnn`), all that these calls take beside C is 8 % of 24 ms for one image, and 2 % of 263 ms for 128:
C++ would save less than that.
"""

import logging
import os
from functools import cache, lru_cache
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from .library import Scaled
from .window import Window

try:
    from . import _binary  # pyright: ignore[reportAttributeAccessIssue]
except ImportError:
    _binary = None

BLOCK = 8
GRAIN = 1 << 15  # numbers below which a second thread costs more than it gains
INSTRUCTION_SETS = ("portable", "avx2", "avx512", "neon")
_DTYPES = torch.int64, torch.int32, torch.float32, torch.float32  # weight, sums, scale, bias
_SERIAL = 1 << 20  # multiplications below which a second thread costs more than it gains


@cache
def kernels() -> ModuleType | None:
    """Return the compiled module, or None, with one warning, if qconv was installed without a C compiler."""
    if _binary is None:
        logging.getLogger("qconv").warning(
            "qconv was installed without its C kernels, so binary convolutions run on torch's operators: exact, "
            "but slow. Install a C compiler and Python's headers, then reinstall qconv."
        )
    return _binary


def instruction_sets() -> tuple[str, ...]:
    """The instruction sets that the kernels can use here, the best one last."""
    module = kernels()
    return tuple(name for bit, name in enumerate(INSTRUCTION_SETS) if module and module.instruction_sets >> bit & 1)


def number_of(instruction_set: str | None) -> int:
    """Return the kernels' number for an instruction set; for None, of the best one that torch uses here."""
    return best() if instruction_set is None else INSTRUCTION_SETS.index(instruction_set)


@cache
def best() -> int:
    """Return the number of the best instruction set, which the kernels use.

    ATEN_CPU_CAPABILITY (default, avx2, avx512) limits torch and qconv.
    """
    asked = os.environ.get("ATEN_CPU_CAPABILITY", "")
    allowed = instruction_sets()
    if asked in ("default", "avx2"):
        allowed = [name for name in allowed if name in ("portable", asked)]
    return INSTRUCTION_SETS.index(allowed[-1])


class _Plan(NamedTuple):
    """The arguments of a call other than addresses: the kernel's numbers, and the sizes of output and operands."""

    numbers: tuple[int, ...]
    shape: tuple[int, ...]
    sizes: tuple[int, ...]


@lru_cache(maxsize=4096)
def _plan(
    input: tuple[int, ...],
    kernel: tuple[int, ...],
    window: Window,
    channels: tuple[int, int],
    is_scaled: bool,
    is_float: bool,
    channels_last: bool,
    instruction_set: int,
) -> _Plan:
    """Plan a call from the shapes of input and weight; cached, because it takes as long as a small kernel."""
    groups, blocks, kernel_h, kernel_w, words, _ = kernel
    if len(input) != 4:
        raise ValueError(f"input (of shape {input}) must be {'(N, C, H, W)' if is_float else '(N, H, W, words)'}")
    given, wanted = (input[1], channels[0]) if is_float else (input[3], groups * words)
    needed = -(-channels[0] // groups // 64), -(-channels[1] // groups // BLOCK)
    if given != wanted or needed != (words, blocks) or channels[0] % groups or channels[1] % groups:
        raise ValueError(
            f"input (of shape {input}) and weight (of shape {kernel}) must be those of {channels[0]} channels in and "
            f"{channels[1]} out"
        )
    batch, height, width = (input[0], *input[2:]) if is_float else input[:3]
    out_h, out_w = window.output_size((height, width), (kernel_h, kernel_w))
    in_channels, out_channels = channels
    left, right, top, bottom = window.padding
    shape = batch, out_channels, out_h, out_w
    work = batch * out_h * out_w * out_channels * (in_channels // groups) * kernel_h * kernel_w
    lanes = groups * blocks * BLOCK
    sizes = lanes * kernel_h * kernel_w * words, lanes * kernel_h * kernel_w, out_channels, out_channels
    numbers = (
        *(batch, height, width, groups, words, in_channels // groups, blocks, out_channels // groups),
        *(kernel_h, kernel_w, *window.stride, *window.dilation),
        *(top, left, height + top + bottom, width + left + right, out_h, out_w),
        *(window.padding_value, int(is_scaled), int(is_float), int(channels_last), instruction_set),
        batch * out_h if work <= _SERIAL else 1,  # rows that a thread takes at least
    )
    return _Plan(numbers, shape, sizes)


def binary_conv2d(
    input: Tensor,
    weight: Tensor,
    tap_sums: Tensor,
    channels: tuple[int, int],
    window: Window,
    scaled: Scaled = None,
) -> Tensor | None:
    """`operators.binary_conv2d` by the kernel; None if there is none, or it does not support the shape."""
    module = kernels()
    # A mask of 64 bits holds the taps of a line.
    if module is None or max(weight.shape[2:4]) > 64 or input.dtype not in (torch.float32, torch.int64):
        return None
    is_float = input.is_floating_point()
    is_plain = input.is_contiguous()
    last = is_float and not is_plain and input.is_contiguous(memory_format=torch.channels_last)
    if not is_plain and not last:
        input = input.contiguous()
    plan = _plan(input.shape, weight.shape, window, channels, scaled is not None, is_float, last, best())
    dtype = torch.int32 if scaled is None else torch.float32
    output = torch.empty(plan.shape, dtype=dtype, device="cpu", memory_format=torch.channels_last)
    if not output.numel():
        return output
    operands = [
        None if operand is None else operand.contiguous() for operand in (weight, tap_sums, *(scaled or (None, None)))
    ]
    for operand, dtype, size in zip(operands, _DTYPES, plan.sizes, strict=True):
        if operand is not None and (operand.dtype != dtype or operand.numel() != size or not operand.is_cpu):
            raise ValueError(
                f"an operand ({operand.dtype}, {operand.numel()} on {operand.device}) must be {dtype}, {size} "
                "on the CPU"
            )
    addresses = [0 if operand is None else operand.data_ptr() for operand in operands]
    module.convolve(input.data_ptr(), *addresses, output.data_ptr(), *plan.numbers)
    return output
