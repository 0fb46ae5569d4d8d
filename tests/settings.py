"""Settings of torch for the length of a block, and what tests of several files need to run."""

import ctypes
import shutil
import struct
import subprocess
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from qconv.kernels import native


@contextmanager
def changed(get: Callable[[], Any], set: Callable[[Any], None], value: Any) -> Iterator[None]:
    before = get()
    set(value)
    try:
        yield
    finally:
        set(before)


threads = partial(changed, torch.get_num_threads, torch.set_num_threads)
default_dtype = partial(changed, torch.get_default_dtype, torch.set_default_dtype)


@contextmanager
def instruction_set(name: str) -> Iterator[None]:
    """The kernels in C use this one."""
    native.best.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "instruction_sets", lambda: (name,))
        native.best()
    try:
        yield
    finally:
        native.best.cache_clear()


def each_instruction_set() -> Iterator[str]:
    """Those of this machine, each in use while it is the last one given."""
    for name in native.instruction_sets():
        with instruction_set(name):
            yield name


class Recomputed(nn.Module):
    """A model whose activations are computed again in the backward."""

    def __init__(self, model: nn.Module, use_reentrant: bool = False) -> None:
        super().__init__()
        self.model, self.use_reentrant = model, use_reentrant

    def forward(self, input: Tensor) -> Any:
        return checkpoint(self.model, input, use_reentrant=self.use_reentrant)


def mostly_nightly(names: Iterable[Any], fast: Container[Any]) -> list[Any]:
    """Parameters of a test of which all but ``fast`` are marked nightly."""
    rows = ((name, name if isinstance(name, tuple) else (name,)) for name in names)
    return [pytest.param(*row, marks=() if name in fast else pytest.mark.nightly) for name, row in rows]


def emulated(program: str, kernels: Sequence[str], folder: Path, *options: str) -> list[str]:
    """The command that runs a program with some of qconv's files of C for another processor.

    A test without compiler or emulator is skipped.
    """
    sources = Path(__file__).with_name(program), *(Path(native.__file__).parent / "csrc" / each for each in kernels)
    compiler, emulator = shutil.which("aarch64-linux-gnu-gcc"), shutil.which("qemu-aarch64")
    if compiler is None or emulator is None:
        pytest.skip("needs aarch64-linux-gnu-gcc and qemu-aarch64")
    built = (
        *options,
        "-ffp-contract=off",
        "-Wall",
        "-Werror",
        "-static",
        *map(str, sources),
        "-o",
        str(folder / "program"),
    )
    subprocess.run([compiler, *built], check=True)
    return [emulator, str(folder / "program")]


def emulated_module(command: list[str], sizes: list[int]) -> SimpleNamespace:
    """A module of kernels for NEON by ``emulated.c``; ``sizes`` are the bytes of the operands of the next call."""

    def run(which: int, *call: int) -> None:
        stream = struct.pack(f"{1 + len(call)}q", which, *sizes, *call[6:])
        stream += b"".join(ctypes.string_at(*each) for each in zip(call[:5], sizes, strict=False) if each[0])
        done = subprocess.run(command, input=stream, stdout=subprocess.PIPE, check=True)
        assert len(done.stdout) == sizes[5]
        ctypes.memmove(call[5], done.stdout, sizes[5])

    names = ("convolve", "sign_conv2d", "sign_grad_input", "sign_grad_weight")
    functions = {name: partial(run, which) for which, name in enumerate(names)}
    return SimpleNamespace(instruction_sets=1 << native.INSTRUCTION_SETS.index("neon"), **functions)


def nbytes(*operands: Tensor | None) -> list[int]:
    return [0 if each is None else each.nbytes for each in operands]
