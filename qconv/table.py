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
        head: what stands above it.
        is_right: whether its cells end at one place, as numbers do, instead of beginning there.
        width: how many characters it has at least.
    """

    head: str
    is_right: bool = False
    width: int = 0


def line(cells: Iterable[str], columns: Sequence[Column], gap: str = "  ") -> str:
    """One row, for tables that are printed row by row; cells that are wider than their column push the others aside."""
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


def read_csv(path: Path) -> list[dict[str, Any]]:
    """The rows of a file; none where there is no file."""
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def write_csv(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write rows of equal or different columns, in place of the file's; what a row lacks stays empty."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as file:
        file.write(csv_text(rows).encode())


def append_csv(row: Mapping[str, Any], path: Path) -> None:
    """Add a row to a file, with the names of the columns before the first one."""
    is_new = not path.exists() or not path.stat().st_size
    with path.open("a", newline="") as file:
        file.write(csv_text([row], with_head=is_new))


def csv_text(rows: Sequence[Mapping[str, Any]], *, with_head: bool = True) -> str:
    """What `write_csv` writes."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, dict.fromkeys(column for row in rows for column in row), lineterminator="\n")
    if with_head:
        writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
