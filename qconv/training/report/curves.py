"""The figure of a run: loss and accuracy over the epochs."""

from pathlib import Path
from typing import Any

from ...files import atomic_file

TRAIN, VAL, GREY = "#4c72b0", "#dd5f32", "#6b6b6b"


def draw_curves(rows: list[dict[str, float]], path: Path, title: str = "") -> None:
    """Draw train and validation loss and accuracy of `rows`, one per epoch, into the PNG file `path`.

    The best validation accuracy is marked. Rows without validation figures leave gaps; if all lack them, no curve.
    """
    # The figure has its own Agg canvas: pyplot would choose a backend for the whole process and keep the figure.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 3.8), dpi=150, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    loss, accuracy = figure.subplots(1, 2)
    for axes, name, scale in ((loss, "loss", 1.0), (accuracy, "accuracy", 100.0)):
        _plot(axes, rows, f"train_{name}", "train", TRAIN, scale)
        _plot(axes, rows, f"val_{name}", "validation", VAL, scale)
        _dress(axes)
    loss.set_title("Cross-entropy", loc="left", fontsize=11)
    accuracy.set_title("Accuracy, %", loc="left", fontsize=11)
    if all(row.get("train_loss", 1) > 0 for row in rows) and all(row.get("val_loss", 1) > 0 for row in rows):
        loss.set_yscale("log")
    _mark_best(accuracy, rows)
    if title:
        figure.suptitle(title, fontsize=11)
    with atomic_file(path) as file:
        canvas.print_png(file)


def _plot(axes: Any, rows: list[dict[str, float]], column: str, label: str, color: str, scale: float) -> None:
    points = [(row["epoch"], scale * row[column]) for row in rows if column in row]
    if points:
        marker = "o" if len(points) == 1 else None
        axes.plot(*zip(*points, strict=True), color=color, label=label, linewidth=1.8, marker=marker)


def _dress(axes: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel("epoch", color=GREY)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#b0b0b0")
    axes.tick_params(colors=GREY, labelsize=9)
    if axes.lines:
        axes.legend(frameon=False)


def _mark_best(axes: Any, rows: list[dict[str, float]]) -> None:
    validated = [row for row in rows if "val_accuracy" in row]
    if not validated:
        return
    best = max(validated, key=lambda row: row["val_accuracy"])  # max keeps the first of equals, as Checkpoints does
    x, y = best["epoch"], 100 * best["val_accuracy"]
    axes.plot([x], [y], "o", color=VAL, markersize=6, markeredgecolor="white", zorder=3)
    axes.annotate(
        f"best {y:.1f} %", (x, y), xytext=(0, -16), textcoords="offset points", ha="center", fontsize=9, color=VAL
    )
