"""The binary convolution in C: found, and called on the memory of tensors."""

import ctypes
import logging
import struct
from collections.abc import Sequence
from functools import cache, lru_cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 8
INSTRUCTION_SETS = ("portable", "avx2", "avx512", "neon")
_POINTERS, _TAIL = struct.Struct("7P"), struct.Struct("21q5i")
_DTYPES = torch.int64, torch.int32, torch.float32, torch.float32, torch.int32  # weight, sums, scale, bias, threshold
_TO_INT32, _TO_FLOAT, _TO_BITS = range(3)
_SERIAL = 1 << 20  # multiplications below which a second thread costs more than it brings


class Library(NamedTuple):
    """The loaded kernels: which instruction set they use, and what torch shares work out with."""

    convolve: "ctypes._NamedFuncPointer"
    best: int
    available: tuple[str, ...]
    parallel: tuple[int | None, int | None, int | None]


@cache
def library() -> Library | None:
    """The kernels; None, which is said once, where qconv was installed without a C compiler."""
    path = library_path()
    if path is None:
        logging.getLogger("qconv").warning(
            "qconv was installed without its C kernels: binary convolutions are exact, but slow, by torch's operators. "
            "Install a C compiler, then qconv again."
        )
        return None
    loaded = ctypes.CDLL(str(path))
    loaded.qconv_size_of_call.restype = ctypes.c_int64
    if loaded.qconv_size_of_call() != _POINTERS.size + _TAIL.size:
        raise ImportError(f"{path} was built from other sources than this qconv: install qconv again")
    convolve = loaded.qconv_binary_conv2d
    convolve.argtypes = (ctypes.c_char_p, ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    found = loaded.qconv_instruction_sets()
    available = tuple(name for bit, name in enumerate(INSTRUCTION_SETS) if found >> bit & 1)
    return Library(convolve, found.bit_length() - 1, available, _torch_threads())


def library_path() -> Path | None:
    """Where the build has put the kernels: beside this file, or where an editable install has its built files."""
    try:
        path = Path(str(distribution("qconv").locate_file("qconv/kernels/libbinary.so.1")))
    except PackageNotFoundError:
        return None
    return path if path.is_file() else None


def _torch_threads() -> tuple[int | None, int | None, int | None]:
    """Entry points of the OpenMP runtime that torch has loaded; one of our own would fight it for the cores."""
    process = ctypes.CDLL(None)
    try:
        names = "GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads"
        first, second, third = (ctypes.cast(getattr(process, name), ctypes.c_void_p).value for name in names)
    except AttributeError:
        return None, None, None
    return first, second, third


class Window(NamedTuple):
    """Where a kernel stands: padding in the order of `torch.nn.functional.pad`."""

    stride: tuple[int, int]
    padding: tuple[int, int, int, int]
    dilation: tuple[int, int]
    padding_value: int

    def output_size(self, size: tuple[int, int], kernel_size: tuple[int, int]) -> tuple[int, int]:
        """Height and width of the output.

        Raises:
            ValueError: the kernel is larger than the padded input.
        """
        left, right, top, bottom = self.padding
        padded = size[0] + top + bottom, size[1] + left + right
        spans = tuple(d * (k - 1) + 1 for d, k in zip(self.dilation, kernel_size, strict=True))
        if spans[0] > padded[0] or spans[1] > padded[1]:
            raise ValueError(f"kernel_size (={kernel_size}, {spans} dilated) must not exceed the padded input {padded}")
        return (padded[0] - spans[0]) // self.stride[0] + 1, (padded[1] - spans[1]) // self.stride[1] + 1


class _Plan(NamedTuple):
    """What a call needs beside addresses."""

    tail: bytes
    shape: tuple[int, ...]
    is_serial: bool
    sizes: tuple[int, ...]


@lru_cache(maxsize=4096)
def _plan(
    input: tuple[int, ...],
    kernel: tuple[int, ...],
    window: Window,
    channels: tuple[int, int],
    mode: int,
    is_float: bool,
    channels_last: bool,
    instruction_set: int,
) -> _Plan:
    """The plan of a call, from the shapes of input and weight; made once, for it takes as long as a small kernel."""
    groups, blocks, kernel_h, kernel_w, words, _ = kernel
    if len(input) != 4:
        raise ValueError(f"input (of shape {input}) must be {'(N, C, H, W)' if is_float else '(N, H, W, words)'}")
    found, wanted = (input[1], channels[0]) if is_float else (input[3], groups * words)
    needed = -(-channels[0] // groups // 64), -(-channels[1] // groups // BLOCK)
    if found != wanted or needed != (words, blocks) or channels[0] % groups or channels[1] % groups:
        raise ValueError(
            f"input (of shape {input}) and weight (of shape {kernel}) must be those of {channels[0]} channels in and "
            f"{channels[1]} out"
        )
    if min(window.padding) < 0 or min(window.stride) < 1 or min(window.dilation) < 1:
        raise ValueError(f"{window} must have a padding of at least 0, stride and dilation of at least 1")
    batch, height, width = (input[0], *input[2:]) if is_float else input[:3]
    out_h, out_w = window.output_size((height, width), (kernel_h, kernel_w))
    in_channels, out_channels = channels
    out_words = -(-out_channels // 64)
    left, right, top, bottom = window.padding
    tail = _TAIL.pack(
        *(batch, height, width, groups, words, in_channels // groups, blocks, out_channels // groups),
        *(kernel_h, kernel_w, *window.stride, *window.dilation),
        *(top, left, height + top + bottom, width + left + right, out_h, out_w, out_words),
        *(window.padding_value, mode, is_float, channels_last, instruction_set),
    )
    shape = (batch, out_h, out_w, out_words) if mode == _TO_BITS else (batch, out_channels, out_h, out_w)
    work = batch * out_h * out_w * out_channels * (in_channels // groups) * kernel_h * kernel_w
    lanes = groups * blocks * BLOCK
    sizes = lanes * kernel_h * kernel_w * words, lanes * kernel_h * kernel_w, out_channels, out_channels, lanes
    return _Plan(tail, shape, work <= _SERIAL, sizes)


def binary_conv2d(
    input: Tensor,
    weight: Tensor,
    tap_sums: Tensor,
    in_channels: int,
    out_channels: int,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    padding_value: int,
    scale: Tensor | None = None,
    bias: Tensor | None = None,
    threshold: Tensor | None = None,
    instruction_set: str | None = None,
) -> Tensor | None:
    """`qconv.kernels.operators.binary_conv2d` by the kernel; None where there is none, or it does not take the shape.

    Args:
        input: bits, or float32 ``(N, C, H, W)`` in either memory format.
        weight: bits.
        tap_sums: of the weight.
        in_channels: of all groups.
        out_channels: of all groups.
        stride: of the convolution.
        padding: in the order of `torch.nn.functional.pad`.
        dilation: of the kernel.
        padding_value: -1, 0 or +1.
        scale: of the output channels.
        bias: of the output channels.
        threshold: of the output channels.
        instruction_set: one of `Library.available`; the best one when None.
    """
    found = library()
    groups, _, height, width, _, _ = weight.shape
    # The bits of a group must end at a word, and a mask of 64 bits holds the taps of a line.
    split = threshold is not None and groups > 1 and out_channels // groups % 64
    if found is None or split or max(height, width) > 64 or input.dtype not in (torch.float32, torch.int64):
        return None
    is_float = input.is_floating_point()
    is_plain = input.is_contiguous()
    last = is_float and not is_plain and input.is_contiguous(memory_format=torch.channels_last)
    if not is_plain and not last:
        input = input.contiguous()
    mode = _TO_BITS if threshold is not None else _TO_INT32 if scale is None else _TO_FLOAT
    best = found.best if instruction_set is None else INSTRUCTION_SETS.index(instruction_set)
    window = Window(tuple(stride), tuple(padding), tuple(dilation), padding_value)  # pyright: ignore
    plan = _plan(input.shape, weight.shape, window, (in_channels, out_channels), mode, is_float, last, best)
    if mode == _TO_BITS:
        output = torch.zeros(plan.shape, dtype=torch.int64)
    else:
        dtype = torch.float32 if mode == _TO_FLOAT else torch.int32
        output = torch.empty(plan.shape, dtype=dtype, memory_format=torch.channels_last)
    if not output.numel():
        return output
    operands = [None if each is None else each.contiguous() for each in (weight, tap_sums, scale, bias, threshold)]
    for each, dtype, size in zip(operands, _DTYPES, plan.sizes, strict=True):
        if each is not None and (each.dtype != dtype or each.numel() != size or not each.is_cpu):
            raise ValueError(
                f"an operand ({each.dtype}, {each.numel()} on {each.device}) must be {dtype}, {size} on the CPU"
            )
    pointers = [0 if each is None else each.data_ptr() for each in operands]
    call = _POINTERS.pack(input.data_ptr(), *pointers, output.data_ptr()) + plan.tail
    if found.convolve(call, 1 if plan.is_serial else torch.get_num_threads(), *found.parallel):
        raise MemoryError("no memory for the bits of a picture")
    return output
