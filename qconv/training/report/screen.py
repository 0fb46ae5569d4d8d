"""The output of a run on the screen."""

import inspect
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from hydra.utils import get_object
from pytorch_lightning.utilities import rank_zero_only
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...ground.progress import terminal
from ...ground.table import screen_width
from ...summary.costs_table import Summary, format_int
from ...summary.terminal import screen_text
from .result import Evaluation, Result


def console() -> Console:
    """The terminal, or a page wide enough for the tables."""
    return terminal(None if sys.stdout.isatty() else 140, stderr=False)


@rank_zero_only
def show_note(text: str) -> None:
    """Show one line about the actions of the run, in its first process."""
    console().print(text, soft_wrap=True)


def default_of(target: str, argument: str) -> Any:
    """Return the default of a function's argument, by the names in a config."""
    parameter = inspect.signature(get_object(target)).parameters.get(argument)
    return inspect.Parameter.empty if parameter is None else parameter.default


@rank_zero_only
def show_model(summary: Summary, title: str) -> None:
    """Show the layers that multiply, and the totals of all, in the first process."""
    print(screen_text(summary, screen_width(), title))  # noqa: T201


def show_outcome(outcome: Result | Evaluation) -> None:
    """Show accuracies, sizes and the places of the files."""
    about = outcome.about
    rows: list[tuple[str, str | Text]] = [
        ("test accuracy", Text(percent(outcome.test_accuracy), style="bold")),
        *_validation(outcome),
    ]
    if not outcome.quantized:
        rows.append(("not quantized yet", "stopped before a later stage: weights are float, or have more bits"))
    rows += [
        ("float size", f"{format_int(about['float_bytes'])} bytes"),
        ("packed size", f"{format_int(about['packed_bytes'])} bytes ({about['compression']:.1f} times smaller)"),
    ]
    show_rows(("result", ""), rows)
    if isinstance(outcome, Evaluation):
        show_note(f"checkpoint: {outcome.checkpoint}")
    show_note(f"run folder: {about['run_dir']}")  # a path is not to be broken, so that it can be copied


def show_rows(head: Sequence[str], rows: Iterable[Sequence[str | Text]], title: str | None = None) -> None:
    """Return a small table of text."""
    table = Table(*head, title=title, title_justify="left", show_header=any(head))
    for row in rows:
        table.add_row(*row)
    console().print(table)


def percent(share: float) -> str:
    """Format 0.975 as 97.50 %."""
    return f"{100 * share:.2f} %"


def _validation(outcome: Result | Evaluation) -> list[tuple[str, str]]:
    if isinstance(outcome, Evaluation):
        return [("validation accuracy", percent(outcome.val_accuracy))]
    best = f"{percent(outcome.val_accuracy_best)} (epoch {outcome.best_epoch}, the one tested)"
    return [
        ("validation accuracy, best", best),
        ("validation accuracy, final", percent(outcome.val_accuracy_final)),
        ("time", f"{outcome.seconds:.1f} s for {outcome.epochs} epoch{'s' if outcome.epochs != 1 else ''}"),
    ]
