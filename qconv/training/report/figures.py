"""The curves of a run as SVG, in colours that the page sets, and the small trends of the diagnostics."""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...runs.curves import GREY, LINE, TEST, TRAIN, VAL, dress, mark_test, plot

SIZE = 4.6, 3.0  # inches; the page scales it
WIDE = 5  # a loss that falls by this factor is drawn on a logarithmic axis
THEME = {
    TRAIN: "var(--train)",
    VAL: "var(--val)",
    TEST: "var(--test)",
    GREY: "var(--muted)",
    LINE: "var(--line)",
}
"""The colours drawn, and the page's names for them, which differ in light and dark."""


@dataclass(frozen=True)
class Panel:
    """One set of axes: its title, what it shows in words, and the drawing."""

    title: str
    alt: str
    svg: str


def panels(rows: list[dict[str, float]], best_epoch: int | None, result: dict[str, Any] | None) -> list[Panel]:
    """Draw accuracy, loss and learning rate over the epochs, each if it was logged."""
    kinds = (
        ("accuracy", "Accuracy, %", ("train_accuracy", "val_accuracy"), "test_accuracy", 100.0),
        ("loss", "Loss", ("train_loss", "val_loss"), "test_loss", 1.0),
        ("learning rate", "Learning rate", ("lr",), "", 1.0),
    )
    return [
        _panel(rows, name, title, columns, test, scale, best_epoch, result)
        for name, title, columns, test, scale in kinds
        if any(column in row for row in rows for column in columns)
    ]


def _panel(
    rows: list[dict[str, float]],
    name: str,
    title: str,
    columns: Sequence[str],
    test: str,
    scale: float,
    best_epoch: int | None,
    result: dict[str, Any] | None,
) -> Panel:
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    text = io.StringIO()
    # Text stays text; the same run gives the same file.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure = Figure(figsize=SIZE)
        canvas = FigureCanvasSVG(figure)
        axes = figure.subplots()
        figure.subplots_adjust(left=0.16, right=0.96, bottom=0.16, top=0.94)
        for column in columns:
            plot(axes, rows, column, VAL if column.startswith("val") else TRAIN, scale)
        dress(axes)
        values = [row[column] for row in rows for column in columns if column in row]
        if test == "test_loss" and min(values) > 0 and max(values) > WIDE * min(values):
            axes.set_yscale("log")
        best = next((row for row in rows if row["epoch"] == best_epoch), None)
        if best is not None and columns[-1].startswith("val") and columns[-1] in best:
            axes.plot([best["epoch"]], [scale * best[columns[-1]]], "o", ms=9, mfc="none", mec=VAL, mew=1.8)
        if result is not None and test in result:
            mark_test(axes, scale * result[test])
        figure.patch.set_visible(False)
        axes.patch.set_visible(False)
        canvas.print_svg(text, metadata={"Creator": None, "Date": None, "Format": None, "Type": None})
    last = [f"{_word(column)} {scale * rows[-1][column]:.3g}" for column in columns if column in rows[-1]]
    alt = f"{title} over {len(rows)} epochs; after the last: {', '.join(last)}"
    return Panel(title, alt, _themed(text.getvalue()))


def _word(column: str) -> str:
    return {"train": "training", "val": "validation"}.get(column.partition("_")[0], "value")


def _themed(svg: str) -> str:
    """Return the drawing alone, in the colours of the page."""
    svg = svg[svg.index("<svg") :]
    for color, name in THEME.items():
        svg = svg.replace(color, name)
    # The names of the reader around it are those of the figure; it is of any size.
    head, _, rest = svg.partition(">")
    box = head[head.index("viewBox") :].split('"')[1]
    return f'<svg viewBox="{box}" aria-hidden="true" focusable="false">{rest}'


def trend(values: Sequence[float]) -> str:
    """Return the points of a line from 0 to the largest value, for an SVG polyline; at most as many as pixels."""
    if len(values) < 2:
        return ""
    width, height = 64, 18  # of the SVG
    kept = values[:: -(-len(values) // width)]
    top = max(*kept, 1e-9)
    steps = len(kept) - 1
    return " ".join(
        f"{1 + index * (width - 2) / steps:.1f},{height - 2 - value / top * (height - 4):.1f}"
        for index, value in enumerate(kept)
    )
