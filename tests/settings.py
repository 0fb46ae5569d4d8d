"""Settings of torch for the length of a block, and what tests of several files need to run."""

import shutil
import subprocess
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
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


def emulated(sources: Sequence[Path], folder: Path, *options: str) -> list[str]:
    """The command that runs a program of C for another processor; a test without compiler or emulator is skipped."""
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
