"""The image of the package: its modules and packages, and which of them imports which, read from the code."""

import ast
import math
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

INK = "#8a8a8a"
FILL = "#4c86e022"
PACKAGE = Path(__file__).parent.parent / "qconv"
LATE = {"quantizers": {"methods", "schemes"}}
"""Imported when a name is asked for."""
Rooms = dict[str, set[str]]


def rooms(package: Path = PACKAGE) -> Rooms:
    """Return what each module or package at the top of ``package`` imports of the others."""
    found: Rooms = {}
    for file in package.rglob("*.py"):
        room = file.relative_to(package).parts[0].removesuffix(".py")
        if room not in ("__init__", "__main__"):
            found.setdefault(room, set()).update(imported(file, package) - {room, "__version__"})
    return {room: (others & found.keys()) - LATE.get(room, set()) for room, others in found.items()}


def imported(file: Path, package: Path) -> set[str]:
    """Return the rooms that relative imports in ``file`` name."""
    here = file.relative_to(package).parts[:-1]
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = [*here[: len(here) + 1 - node.level], *(node.module or "").split(".")]
            path = [part for part in base if part]
            names |= {path[0]} if path else {alias.name for alias in node.names}
    return names


def without_what_follows(house: Rooms) -> Rooms:
    """Leave out an import of a room that another imported room imports, at once or by way of others."""
    reached: Rooms = {}
    for room in TopologicalSorter(house).static_order():
        reached[room] = house[room].union(*(reached[other] for other in house[room]))
    return {room: {o for o in others if not any(o in reached[p] for p in others)} for room, others in house.items()}


def floors(house: Rooms) -> list[list[str]]:
    """Return the rooms from the bottom floor up; each stands on the floor above the highest that it imports."""
    height: dict[str, int] = {}
    for room in TopologicalSorter(house).static_order():
        height[room] = 1 + max((height[other] for other in house[room]), default=-1)
    result: list[list[str]] = [[] for _ in range(max(height.values()) + 1)]
    for room in sorted(height):
        result[height[room]].append(room)
    return result


def places(house: Rooms) -> dict[str, tuple[float, float]]:
    """Return a place for each room: near the rooms it is tied to, so that few lines cross."""
    stories = floors(house)
    at = {room: (place + 1) / (len(story) + 1) for story in stories for place, room in enumerate(story)}
    tied = {room: house[room] | {other for other in house if room in house[other]} for room in house}
    for _ in range(30):
        for story in stories:
            wanted = {room: math.fsum(at[o] for o in tied[room]) / max(len(tied[room]), 1) for room in story}
            for place, room in enumerate(sorted(story, key=lambda room: (wanted[room], room))):
                at[room] = (place + 0.5) / len(story)
    return {room: (at[room], floor) for floor, story in enumerate(stories) for room in story}


def draw_house() -> Figure:
    """Draw all rooms and the imports between them."""
    house = without_what_follows(rooms())
    at = places(house)
    figure = Figure(figsize=(7.4, 9.5))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, 1), ylim=(-0.5, max(y for _, y in at.values()) + 0.5))
    axes.axis("off")
    for room, others in sorted(house.items()):
        for other in sorted(others):
            join(axes, at[room], at[other], gid=f"import-{room}-{other}")
    for room, (x, y) in sorted(at.items()):
        box = {"boxstyle": "round,pad=0.35", "facecolor": "#f4f6fb", "edgecolor": INK, "linewidth": 0.7}
        axes.text(x, y, room, ha="center", va="center", fontsize=7.5, color="#333333", bbox=box)
    return figure


def join(axes: Axes, above: tuple[float, float], below: tuple[float, float], gid: str) -> None:
    """Draw a line from a room down to one that it imports."""
    axes.plot([above[0], below[0]], [above[1] - 0.17, below[1] + 0.17], color=INK, linewidth=0.6, alpha=0.7, gid=gid)


def draw_layer() -> Figure:
    """Draw what a layer computes, forward and backward."""
    figure = Figure(figsize=(6.6, 3.5))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, 10), ylim=(0, 7))
    axes.axis("off")
    for text, x, y in (("forward", 0.1, 6.7), ("backward", 0.1, 3.4)):
        axes.text(x, y, text, fontsize=9, fontweight="bold", va="center")
    forward = {"input": (1, 5.9), "weight": (1, 4.5), "quantize": (3.2, 5.9), "quantize ": (3.2, 4.5)}
    forward |= {"convolve": (6, 5.2), "output": (8.6, 5.2)}
    backward = {"grad_output": (8.8, 1.6), "convolve with weight_q": (6, 2.5), "convolve with input_q": (6, 0.7)}
    backward |= {"pseudo-gradient": (3.1, 2.5), "pseudo-gradient ": (3.1, 0.7), "grad_input": (0.9, 2.5)}
    backward |= {"grad_weight": (0.9, 0.7)}
    for name, place in (forward | backward).items():
        is_step = name.strip() in ("quantize", "convolve", "pseudo-gradient") or "with" in name
        box = {"boxstyle": "round,pad=0.35", "facecolor": "#f4f6fb" if is_step else "none", "edgecolor": INK}
        colour = "#333333" if is_step else INK
        look: Any = {"color": colour, "bbox": box} if is_step else {"color": colour}
        axes.text(place[0], place[1], name.strip(), ha="center", va="center", fontsize=8.5, **look)
    arrows = [((1.5, 5.9), (2.4, 5.9)), ((1.6, 4.5), (2.4, 4.5)), ((4, 5.9), (5.2, 5.4)), ((4, 4.5), (5.2, 5))]
    arrows += [((6.8, 5.2), (8, 5.2)), ((8, 1.8), (7.5, 2.3)), ((8, 1.4), (7.5, 0.9)), ((4.5, 2.5), (4.1, 2.5))]
    arrows += [((4.5, 0.7), (4.1, 0.7)), ((2.1, 2.5), (1.6, 2.5)), ((2.1, 0.7), (1.7, 0.7))]
    for start, end in arrows:
        axes.annotate("", end, start, arrowprops={"arrowstyle": "->", "color": INK, "linewidth": 0.9})
    for text, x, y in (("input_q", 4.75, 5.95), ("weight_q", 4.75, 4.45)):
        axes.text(x, y, text, fontsize=7.5, ha="center")
    return figure
