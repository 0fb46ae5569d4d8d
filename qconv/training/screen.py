"""What a run shows on the screen."""

import sys
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table

from ..summary import HEAD, TEXT_COLUMNS, Summary, cells, format_int
from .result import Evaluation, Result


def console() -> Console:
    """The terminal, or a page wide enough for the tables."""
    return Console(width=None if sys.stdout.isatty() else 140, highlight=False)


def show_model(summary: Summary, title: str) -> None:
    """The layers that multiply, and the totals of all."""
    table = Table(title=title, title_justify="left", show_footer=True)
    footer = ("all", "", "", "", "", *_numbers(summary))
    for index, (head, foot) in enumerate(zip(HEAD, footer, strict=True)):
        table.add_column(head, foot, justify="left" if index < TEXT_COLUMNS else "right", overflow="fold")
    for row in summary.rows:
        if row.macs:
            table.add_row(*cells(row))
    console().print(table)


def show_outcome(outcome: Result | Evaluation) -> None:
    """Accuracies, sizes and where the files lie."""
    about = outcome.about
    rows = [("test accuracy", f"[bold]{percent(outcome.test_accuracy)}[/bold]"), *_validation(outcome)]
    smaller = about["float_bytes"] / about["packed_bytes"]
    rows += [
        ("float size", f"{format_int(about['float_bytes'])} bytes"),
        ("packed size", f"{format_int(about['packed_bytes'])} bytes ({smaller:.1f} times smaller)"),
        ("run folder", about["run_dir"]),
    ]
    show_rows(("result", ""), rows)


def show_rows(head: Sequence[str], rows: Iterable[Sequence[str]], title: str | None = None) -> None:
    """Any small table of text."""
    table = Table(*head, title=title, title_justify="left", show_header=any(head))
    for row in rows:
        table.add_row(*row)
    console().print(table)


def percent(share: float) -> str:
    """0.975 as 97.50 %."""
    return f"{100 * share:.2f} %"


def _numbers(summary: Summary) -> tuple[str, ...]:
    totals = summary.parameters, summary.macs, summary.float_bytes, summary.packed_bytes
    return tuple(map(format_int, totals))


def _validation(outcome: Result | Evaluation) -> list[tuple[str, str]]:
    if isinstance(outcome, Evaluation):
        return [("validation accuracy", percent(outcome.val_accuracy)), ("checkpoint", outcome.checkpoint)]
    best = f"{percent(outcome.val_accuracy_best)} (epoch {outcome.best_epoch}, the one tested)"
    return [
        ("validation accuracy, best", best),
        ("validation accuracy, final", percent(outcome.val_accuracy_final)),
        ("time", f"{outcome.seconds:.1f} s for {outcome.epochs} epochs"),
    ]
