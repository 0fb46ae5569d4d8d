"""Settings of torch for the length of a block, and of pytest for what takes seconds."""

from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def mostly_nightly(names: Iterable[Any], fast: Container[Any]) -> list[Any]:
    """Parameters of a test of which all but ``fast`` are marked nightly."""
    rows = ((name, name if isinstance(name, tuple) else (name,)) for name in names)
    return [pytest.param(*row, marks=() if name in fast else pytest.mark.nightly) for name, row in rows]
