"""The terminal: lines of text as they are, and a progress bar for what takes long."""

import sys
from collections.abc import Callable, Generator, Iterable
from importlib.util import find_spec
from typing import TYPE_CHECKING, TypeVar

from .processes import rank_and_count

if TYPE_CHECKING:
    from rich.console import Console

T = TypeVar("T")


def terminal(width: int | None = None, *, stderr: bool = True) -> "Console":
    """Rich's console for text as it is: of ``qconv[heic]`` or ``skip=[first]`` it would take the brackets for a style.

    Args:
        width: columns; those of the terminal by default.
        stderr: whether it is the standard error.
    """
    from rich.console import Console

    return Console(width=width, stderr=stderr, highlight=False, markup=False, emoji=False)


def shown(items: Iterable[T], text: str, total: int, size: Callable[[T], int] = lambda item: 1) -> Generator[T]:
    """Yield the items, with a bar and the time left on stderr if that is a terminal; of several processes on the first.

    Args:
        items: what to yield.
        text: what is being done.
        total: the sum of their sizes.
        size: that of one item.
    """
    if not (rank_and_count()[0] == 0 and sys.stderr.isatty() and find_spec("rich")):
        yield from items
        return
    from rich.progress import Progress

    with Progress(console=terminal(), transient=True) as bar:
        task = bar.add_task(text, total=total)
        for item in items:
            yield item
            bar.advance(task, size(item))
