"""The figure of a run: loss and accuracy over the epochs."""

from pathlib import Path
from typing import Any

from ..ground.files import atomic_file

TRAIN, VAL, TEST, GREY, LINE = "#4c72b0", "#dd5f32", "#1b7f5c", "#6b6b6b", "#e6e6e6"


def draw_curves(
    rows: list[dict[str, float]],
    path: Path,
    title: str = "",
    *,
    best_epoch: int | None = None,
    test: dict[str, float] | None = None,
) -> None:
    """Draw train and validation loss and accuracy of `rows`, one per epoch, into the PNG file `path`.

    A ring marks the best epoch, and a diamond at the right edge the test of its checkpoint; their numbers stand below.
    So nothing covers a line. Rows without validation figures leave gaps; if all lack them, no curve.

    Args:
        rows: epoch, train_loss, train_accuracy, val_loss, val_accuracy.
        path: the file, which is replaced.
        title: above the figure.
        best_epoch: the epoch whose checkpoint counts; None means the first of the best validation accuracy.
        test: test_loss and test_accuracy of that checkpoint.
    """
    # The figure has its own Agg canvas: pyplot would choose a backend for the whole process and keep the figure.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 4.1), dpi=150)
    canvas = FigureCanvasAgg(figure)
    # Margins by hand: a layout would measure every label, twice.
    panels = figure.subplots(1, 2)
    figure.subplots_adjust(left=0.07, right=0.975, bottom=0.23, top=0.88, wspace=0.17)
    best = best_row(rows, best_epoch)
    for axes, name, scale, unit in ((panels[0], "loss", 1.0, ""), (panels[1], "accuracy", 100.0, " %")):
        plot(axes, rows, f"train_{name}", TRAIN, scale, "train")
        plot(axes, rows, f"val_{name}", VAL, scale, "validation")
        dress(axes)
        digits = ".1f" if unit else ".3f"
        if best is not None and f"val_{name}" in best:
            value = scale * best[f"val_{name}"]
            label = f"best epoch ({best['epoch']:.0f}): {value:{digits}}{unit}"
            axes.plot([best["epoch"]], [value], "o", ms=9, mfc="none", mec=VAL, mew=1.6, label=label, zorder=3)
        if best is not None and test is not None and f"test_{name}" in test:
            value = scale * test[f"test_{name}"]
            label = f"its test: {value:{digits}}{unit}"
            mark_test(axes, value, label)
        if axes.lines:
            axes.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2, fontsize=9)
    panels[0].set_title("Loss", loc="left", fontsize=11)
    panels[1].set_title("Accuracy, %", loc="left", fontsize=11)
    if all(row.get("train_loss", 1) > 0 for row in rows) and all(row.get("val_loss", 1) > 0 for row in rows):
        panels[0].set_yscale("log")
    if title:
        figure.suptitle(title, fontsize=11)
    with atomic_file(path) as file:
        canvas.print_png(file)


def best_row(rows: list[dict[str, float]], epoch: int | None = None) -> dict[str, float] | None:
    """Return the row of that epoch; without one, of the best validation accuracy, if there is one."""
    if epoch is not None:
        return next((row for row in rows if row["epoch"] == epoch), None)
    validated = [row for row in rows if "val_accuracy" in row]
    # max keeps the first of equals, as Checkpoints does
    return max(validated, key=lambda row: row["val_accuracy"], default=None)


def plot(axes: Any, rows: list[dict[str, float]], column: str, color: str, scale: float, label: str = "") -> None:
    """Draw a column over the epochs, if there is one."""
    points = [(row["epoch"], scale * row[column]) for row in rows if column in row]
    if points:
        marker = "o" if len(points) == 1 else None
        axes.plot(*zip(*points, strict=True), color=color, label=label, linewidth=1.8, marker=marker)


def mark_test(axes: Any, value: float, label: str = "") -> None:
    """Draw a diamond at the right edge, where there is no line."""
    axes.plot(
        [1.025], [value], "D", ms=6.5, color=TEST, label=label, transform=axes.get_yaxis_transform(), clip_on=False
    )


def dress(axes: Any) -> None:
    """Give the axes whole epochs, a light grid, and no frame."""
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel("epoch", color=GREY)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.grid(color=LINE, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GREY)
    axes.tick_params(colors=GREY, labelsize=9, which="both")
