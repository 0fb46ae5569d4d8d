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
    """Rich's console for text as it is: it would take the brackets of ``skip=[first]`` for a style."""
    from rich.console import Console

    return Console(width=width, stderr=stderr, highlight=False, markup=False, emoji=False)


def shown(items: Iterable[T], text: str, total: int, size: Callable[[T], int] = lambda item: 1) -> Generator[T]:
    """Yield the items, with a bar and the time left on stderr if that is a terminal; of several processes on the first.

    ``total`` is the sum of the items' sizes.
    """
    if not (rank_and_count()[0] == 0 and sys.stderr.isatty() and find_spec("rich")):
        yield from items
        return
    from rich.progress import Progress

    # Else what is printed to a file or a pipe would go to the terminal.
    with Progress(console=terminal(), transient=True, redirect_stdout=sys.stdout.isatty()) as bar:
        task = bar.add_task(text, total=total)
        for item in items:
            yield item
            bar.advance(task, size(item))
