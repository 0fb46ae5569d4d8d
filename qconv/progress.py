"""A progress bar on a terminal, for what takes long."""

import sys
from collections.abc import Callable, Iterable, Iterator
from importlib.util import find_spec
from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")


def shown(items: Iterable[T], text: str, total: int, size: Callable[[T], int] = lambda item: 1) -> Iterator[T]:
    """Yield the items, with a bar on stderr if that is a terminal; of several processes the first one shows it.

    Args:
        items: what to yield.
        text: what is being done.
        total: the sum of their sizes.
        size: that of one item.
    """
    first = not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0
    if not (first and sys.stderr.isatty() and find_spec("rich")):
        yield from items
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(text, total=total)
        for item in items:
            yield item
            bar.advance(task, size(item))
