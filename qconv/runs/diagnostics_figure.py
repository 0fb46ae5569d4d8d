"""The figure of the layers of a run: each measured figure as a map of layers by epochs."""

from pathlib import Path
from typing import Any

import torch

from ..ground.files import atomic_file

FIGURES = {
    "flip_rate": ("changed", "weights that changed their level in the epoch"),
    "weights_never_flipped": ("never changed", "weights that never changed their level"),
    "weights_oscillating": ("oscillating", "weights that have oscillated in more than 1 of 200 steps"),
    "weights_frozen": ("frozen", "weights frozen because they oscillated"),
    "weights_saturated": ("weights stuck", "weights without gradient"),
    "inputs_saturated": ("inputs cut off", "inputs without gradient"),
    "inputs_dead": ("dead channels", "input channels of one value"),
    "weight_error": ("weight error", "quantization error of the weight at the best scale, of its energy"),
    "input_error": ("input error", "quantization error of the input at the best scale, of its energy"),
}
"""The measured figures, a word and a sentence each: shares from 0 to 1. `step`, the mean scale of the weight's codes,
has no common axis."""


def draw_diagnostics(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw each figure that is not 0 throughout as a map of layers by epochs into the PNG file `path`."""
    # The figure has its own Agg canvas: pyplot would choose a backend for the whole process and keep the figure.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    layers = list(dict.fromkeys(row["layer"] for row in rows))
    epochs = sorted({row["epoch"] for row in rows})
    shown = [key for key in FIGURES if any(row.get(key, 0) > 0 for row in rows)]
    lines = max(1, -(-len(shown) // 2))
    size = min(7.0, 160 / len(layers))
    # Margins by hand, in inches: a layout that measures every label takes a third of the time or more.
    width, panel, gap, foot = 12.0, 0.35 + 0.14 * len(layers), 0.33, 0.5
    left = min(0.15 + 0.56 * size / 72 * max(map(len, layers)), width / 2)
    height = lines * (gap + panel) + foot
    figure = Figure(figsize=(width, height), dpi=120)
    canvas = FigureCanvasAgg(figure)
    places = figure.subplots(lines, 2, squeeze=False, sharex=True, sharey=True).flatten()
    figure.subplots_adjust(
        left=left / width, right=0.975, bottom=foot / height, top=1 - gap / height, wspace=0.1, hspace=gap / panel
    )
    for axes, key in zip(places, shown, strict=False):
        grid = torch.full((len(layers), len(epochs)), float("nan"))
        for row in rows:
            if key in row:
                grid[layers.index(row["layer"]), epochs.index(row["epoch"])] = 100 * row[key]
        extent = (epochs[0] - 0.5, epochs[-1] + 0.5, len(layers) - 0.5, -0.5)
        image = axes.imshow(grid.numpy(), aspect="auto", interpolation="nearest", cmap="viridis", vmin=0, extent=extent)
        axes.set_title(f"{FIGURES[key][1]}, %", loc="left", fontsize=9)
        axes.set_yticks(range(len(layers)), layers, fontsize=size)
        axes.tick_params(axis="x", labelsize=7)
        axes.xaxis.get_major_locator().set_params(integer=True)
        figure.colorbar(image, ax=axes, fraction=0.03, pad=0.01).ax.tick_params(labelsize=7)
    for axes in places[len(shown) :]:
        axes.set_visible(False)
    for axes in places[max(0, len(shown) - 2) : len(shown)]:
        axes.tick_params(labelbottom=True)
    figure.supxlabel("epoch", fontsize=8)
    with atomic_file(path) as file:
        canvas.print_png(file)
