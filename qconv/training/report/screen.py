"""The output of a run on the screen."""

import sys
from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...summary.table import Row, Summary, format_bits, format_int, notes
from .result import Evaluation, Result

NUMBER_HEAD = ("parameters", "MACs", "BOPs", "packed\nbytes", "saved\nbytes")
PREFIXES = ("", "k", "M", "G", "T", "P", "E")


def console() -> Console:
    """The terminal, or a page wide enough for the tables."""
    return Console(width=None if sys.stdout.isatty() else 140, highlight=False)


def show_note(text: str) -> None:
    """Show one line about the actions of the run."""
    console().print(text, soft_wrap=True)


def show_model(summary: Summary, title: str) -> None:
    """Show the layers that multiply, and the totals of all."""
    console().print(model_table(summary, title))


def model_table(summary: Summary, title: str) -> Table:
    """Return the table of `show_model`, without vertical lines, so that 120 columns suffice. Names fold first."""
    table = Table(
        title=title,
        title_justify="left",
        caption=Text("\n".join(notes(summary)), style="default not italic"),
        caption_justify="left",
        show_footer=True,
        box=box.SIMPLE,
        show_edge=False,
        padding=(0, 1, 0, 0),
    )
    table.add_column("layer", "all", overflow="fold")
    table.add_column("scheme", overflow="fold")
    for head in ("output", "bits\nw/in"):
        table.add_column(head, no_wrap=True)
    for head, foot in zip(NUMBER_HEAD, _numbers(summary), strict=True):
        table.add_column(head, foot, justify="right", no_wrap=True)
    for row in summary.rows:
        if row.macs:
            shape = "×".join(map(str, row.output_shape))
            table.add_row(row.name, row.scheme, shape, format_bits(row), *_numbers(row))
    return table


def show_outcome(outcome: Result | Evaluation) -> None:
    """Show accuracies, sizes and the places of the files."""
    about = outcome.about
    rows = [("test accuracy", f"[bold]{percent(outcome.test_accuracy)}[/bold]"), *_validation(outcome)]
    if not outcome.quantized:
        rows.append(("not quantized yet", "a later stage was to come: weights are float, or of more bits"))
    rows += [
        ("float size", f"{format_int(about['float_bytes'])} bytes"),
        ("packed size", f"{format_int(about['packed_bytes'])} bytes ({about['compression']:.1f} times smaller)"),
        ("run folder", about["run_dir"]),
    ]
    show_rows(("result", ""), rows)


def show_rows(head: Sequence[str], rows: Iterable[Sequence[str]], title: str | None = None) -> None:
    """Return a small table of text."""
    table = Table(*head, title=title, title_justify="left", show_header=any(head))
    for row in rows:
        table.add_row(*row)
    console().print(table)


def percent(share: float) -> str:
    """Format 0.975 as 97.50 %."""
    return f"{100 * share:.2f} %"


def short(value: float) -> str:
    """Format 1234567 as 1.23 M: three digits and an SI prefix."""
    power = 0
    while value >= 999.5 and power < len(PREFIXES) - 1:
        value, power = value / 1000, power + 1
    return f"{value:.3g} {PREFIXES[power]}".rstrip()


def _numbers(counts: Summary | Row) -> tuple[str, ...]:
    parameters, macs = format_int(counts.parameters), format_int(counts.macs)
    return parameters, macs, short(counts.bops), format_int(counts.packed_bytes), format_int(counts.saved_bytes)


def _validation(outcome: Result | Evaluation) -> list[tuple[str, str]]:
    if isinstance(outcome, Evaluation):
        return [("validation accuracy", percent(outcome.val_accuracy)), ("checkpoint", outcome.checkpoint)]
    best = f"{percent(outcome.val_accuracy_best)} (epoch {outcome.best_epoch}, the one tested)"
    return [
        ("validation accuracy, best", best),
        ("validation accuracy, final", percent(outcome.val_accuracy_final)),
        ("time", f"{outcome.seconds:.1f} s for {outcome.epochs} epochs"),
    ]
