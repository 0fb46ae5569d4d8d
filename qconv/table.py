"""Rows and columns: as lines of text, and as CSV files."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .files import atomic_file


class Column(NamedTuple):
    """A column of text.

    Attributes:
        head: its title.
        is_right: whether its cells are aligned at the right, as numbers are.
        width: its least number of characters.
    """

    head: str
    is_right: bool = False
    width: int = 0


def line(cells: Iterable[str], columns: Sequence[Column], gap: str = "  ") -> str:
    """One row of a table that is printed row by row; cells wider than their column push the others aside."""
    places = zip(cells, columns, strict=True)
    text = gap.join(cell.rjust(c.width) if c.is_right else cell.ljust(c.width) for cell, c in places)
    return text if columns[-1].is_right else text.rstrip()


def lines(rows: Iterable[Sequence[str] | None], columns: Sequence[Column]) -> list[str]:
    """The heads, unless all are empty, and the rows, in columns as wide as their widest cell; None is a rule."""
    heads = tuple(column.head for column in columns)
    cells = [*([heads] if any(heads) else ()), *rows]
    widths = [max(map(len, column)) for column in zip(*filter(None, cells), strict=True)]
    wide = [column._replace(width=max(column.width, width)) for column, width in zip(columns, widths, strict=False)]
    rule = ["-" * column.width for column in wide]
    return [line(rule if row is None else row, wide) for row in cells]


def cost_text(cost: float | None) -> str:
    """The cost of a layer in a table; empty where none is known."""
    return "" if cost is None else f"{cost:.4g}"


def most_costly(costs: Mapping[str, float], shown: int = 3) -> str:
    """The line below a table that names the layers of the highest cost."""
    worst = sorted(costs, key=lambda name: -costs[name])[:shown]
    return f"costs most: {', '.join(f'{name} ({cost_text(costs[name])})' for name in worst)}"


def read_csv(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file; none if the file is missing."""
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def write_csv(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Replace the file by these rows, which may differ in their columns; missing cells stay empty."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as file:
        file.write(csv_text(rows).encode())


def append_csv(row: Mapping[str, Any], path: Path) -> None:
    """Add a row to a file, with a header line if the file is new."""
    is_new = not path.exists() or not path.stat().st_size
    with path.open("a", newline="") as file:
        file.write(csv_text([row], with_head=is_new))


def csv_text(rows: Sequence[Mapping[str, Any]], *, with_head: bool = True) -> str:
    """Return the text that `write_csv` writes."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, dict.fromkeys(column for row in rows for column in row), lineterminator="\n")
    if with_head:
        writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
