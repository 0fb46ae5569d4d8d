"""``python -m docs_build.figures [NAME …]``: draw the figures of the documentation into ``docs/figures``.

They are committed, so that the pages can be read in the repository, too; a test draws them again and compares.
"""

import io
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

import qconv
from qconv import schemes

from .curves import Curve, Role, curve, roles
from .house import draw_house, draw_layer
from .oscillations import draw_oscillations

FOLDER = Path(__file__).parent.parent / "docs" / "figures"
INK = "#8a8a8a"
"""A grey that can be read on white and on black: figures have no background of their own."""
COLOURS = ("#4c86e0", "#38a169", "#e0762f")
PROGRESS = (0.0, 0.5, 1.0)
LABELS = {"weight": "weight $w$", "input": "input $x$"}
STYLE: Any = {
    "font.size": 9,
    "font.sans-serif": ["DejaVu Sans"],
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "path.simplify": True,
    "path.simplify_threshold": 0.1,
    "svg.fonttype": "none",
    "svg.hashsalt": "qconv",
    "legend.frameon": False,
}

METHODS: dict[str, qconv.Scheme] = {
    name: getattr(schemes, name)()
    for name in schemes.__all__
    if name
    not in ("Scheme", "identity", "staged", "two_stage", "layerwise", "ewgs", "biper", "minmax", "percentile", "recu")
} | {
    # 8 bits can't be told from a straight line
    "minmax": schemes.minmax(weight_bits=4, input_bits=4),
    "percentile": schemes.percentile(weight_bits=4, input_bits=4, percentile=95.0),
    "recu": schemes.recu(scale_init="mean"),  # the published start is random
    "biper": schemes.biper(scale_init="mean"),
    "ewgs": schemes.ewgs(2, 2, delta=0.5),  # the published delta, 0.001, would not be seen
    "staged": schemes.staged([(0, schemes.lsq(4, 4)), (0.5, schemes.lsq(2, 2))]),
    "two_stage": schemes.two_stage(schemes.bireal()),
    "layerwise": schemes.layerwise(schemes.bireal()).at_depth(0.5),
}
"""The schemes of the figures, under their names."""


def moments(scheme: qconv.Scheme, role: Role) -> dict[float, Curve]:
    """Return the curves that differ, by progress: those of a method without a schedule are one."""
    found: dict[float, Curve] = {}
    for progress in PROGRESS:
        new = curve(scheme, role, progress)
        if not any(new.forward.equal(old.forward) and new.gradient.equal(old.gradient) for old in found.values()):
            found[progress] = new
    return found


def steps(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return the corners of a stair: ``y`` changes half way between two values of ``x``."""
    changes = (y[1:] != y[:-1]).nonzero().flatten()
    edges = (x[changes] + x[changes + 1]) / 2
    corners_x = torch.cat([x[:1], edges.repeat_interleave(2), x[-1:]])
    return corners_x, torch.cat([y[changes], y[-1:]]).repeat_interleave(2)


def draw(scheme: qconv.Scheme) -> Figure:
    """Draw forward and gradient side by side, a row for the weight and one for the input."""
    rows = roles(scheme)
    height = 2.0 * len(rows)
    figure = Figure(figsize=(5.8, height))
    grid = figure.subplots(len(rows), 2, squeeze=False)
    figure.subplots_adjust(0.07, 0.45 / height, 0.99, 1 - 0.25 / height, wspace=0.17, hspace=0.55)
    for (left, right), role in zip(grid, rows, strict=True):
        draw_role(left, right, role, moments(scheme, role))
    return figure


def draw_role(left: Axes, right: Axes, role: Role, curves: dict[float, Curve]) -> None:
    """Draw one row."""
    for (progress, each), colour in zip(curves.items(), COLOURS, strict=False):
        label = f"progress {progress:g}" if len(curves) > 1 else None
        look = {"color": colour, "linewidth": 1.4, "label": label, "solid_joinstyle": "round"}
        left.plot(*steps(each.x, each.forward), gid=f"{role}-forward-{progress:g}", **look)
        falls = steps if each.gradient.unique().numel() < 4 else lambda x, y: (x, y)
        right.plot(*falls(each.x, each.gradient), gid=f"{role}-gradient-{progress:g}", **look)
    left.set(xlabel=LABELS[role], title="forward")
    right.set(xlabel=LABELS[role], title="gradient")
    for axes in (left, right):
        axes.axhline(0, color=INK, linewidth=0.5)
        axes.axvline(0, color=INK, linewidth=0.5)
        axes.title.set_fontsize(9)
    low, high = right.get_ylim()
    right.set_ylim(min(low, -0.05 * high), max(high, 1.1))
    if len(curves) > 1:
        right.legend(fontsize=7)


def as_svg(figure: Figure) -> str:
    """Return the figure as SVG, with coordinates of two decimals and no date."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return re.sub(r"\d+\.\d{3,}", rounded, buffer.getvalue())


def rounded(match: re.Match[str]) -> str:
    """Return a number with two decimals at most."""
    return f"{float(match.group()):.2f}".rstrip("0").rstrip(".")


DRAWN: dict[str, Callable[[], Figure]] = {
    **{name: partial(draw, scheme) for name, scheme in METHODS.items()},
    "house": draw_house,
    "layer": draw_layer,
    "oscillations": draw_oscillations,
}
"""What draws each figure."""


def figures(names: Iterable[str] = DRAWN) -> Iterator[tuple[str, str]]:
    """Every figure, or those of ``names``: its name and its SVG."""
    with mpl.rc_context(STYLE):
        for name in names:
            yield name, as_svg(DRAWN[name]())


def main(names: Sequence[str]) -> None:
    """Draw the figures of these names, or all of them."""
    FOLDER.mkdir(exist_ok=True)
    for name, svg in figures(names or DRAWN):
        (FOLDER / f"{name}.svg").write_text(svg)


if __name__ == "__main__":
    main(sys.argv[1:])
