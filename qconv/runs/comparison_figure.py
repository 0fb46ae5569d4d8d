"""The comparison as a figure: the test accuracy of each group, with its deviation over the seeds."""

import textwrap
from collections.abc import Sequence
from pathlib import Path

from ..ground.files import atomic_file
from .run_groups import Group, telling

DOT, SEED, GREY = "#4c72b0", "#9db4d6", "#6b6b6b"
LABEL = 34  # characters in a line


def draw(groups: Sequence[Group], path: Path, title: str = "") -> None:
    """Draw a row for each group, the best on top, into the PNG file `path`: the seeds, their mean and deviation."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    ordered = sorted(groups, key=lambda group: group.mean("test_accuracy"))
    heads = telling(groups)
    labels = ["\n".join(textwrap.wrap(group.name(heads), LABEL)) for group in ordered]
    lines = sum(label.count("\n") + 1 for label in labels)
    figure = Figure(figsize=(8, 1.3 + 0.26 * max(lines, 1.6 * len(ordered))), dpi=150, layout="constrained")
    canvas, axes = FigureCanvasAgg(figure), figure.subplots()
    for place, group in enumerate(ordered):
        seeds = [100 * value for value in group.values("test_accuracy")]
        mean, deviation = 100 * group.mean("test_accuracy"), group.deviation("test_accuracy")
        if deviation is not None:
            axes.plot(seeds, [place] * len(seeds), "o", color=SEED, markersize=4, zorder=2)
        axes.errorbar(mean, place, xerr=100 * deviation if deviation else None, fmt="o", color=DOT, capsize=4, zorder=3)
        text = f"{mean:.1f}" if deviation is None else f"{mean:.1f} ± {100 * deviation:.1f}"
        axes.annotate(text, (mean, place), (0, 7), textcoords="offset points", ha="center", fontsize=8, color=DOT)
    axes.set_yticks(range(len(ordered)), labels, fontsize=9)
    axes.set_ylim(-0.6, len(ordered) - 0.3)
    axes.margins(x=0.12)
    counts = sorted({len(group.runs) for group in groups})
    number = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    several = f": mean ± standard deviation over {number} seeds"
    axes.set_xlabel("test accuracy, %" + (several if counts[-1] > 1 else ""), color=GREY)
    axes.grid(axis="x", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(colors=GREY, labelsize=9, left=False)
    if title:
        figure.suptitle("\n".join(textwrap.wrap(title, 90)), fontsize=10, x=0.01, ha="left")
    with atomic_file(path) as file:
        canvas.print_png(file)
