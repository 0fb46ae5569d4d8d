"""Charts with one line per layer of a model."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..ground.extras import needed
from ..ground.files import atomic_file

BLUE = "#4c72b0"


@contextmanager
def layer_chart(path: str | os.PathLike[str], layers: int, panels: int, what: str) -> Iterator[list[Any]]:
    """Yield axes next to each other, with the layers as a shared y axis; write them to a PNG file at the end."""
    with needed(what):
        # The figure has its own canvas: pyplot would choose a backend for the whole process and keep the figure.
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    figure = Figure(figsize=(7 + panels, 1.2 + 0.22 * layers), dpi=120, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    every = list(figure.subplots(1, panels, sharey=True, squeeze=False)[0])
    yield every
    for axes in every:
        axes.tick_params(labelsize=8)
        axes.margins(y=0.01)
        axes.grid(axis="x", color="#e6e6e6", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    with atomic_file(Path(path)) as file:
        canvas.print_png(file)
