"""Rows and columns: as lines of text, and as CSV files."""

import csv
import io
import os
import re
import shutil
import sys
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from .files import one_at_a_time, write_file

LONGEST_PERIOD = 8
NO_BREAK = "\N{NO-BREAK SPACE}"
WORD = re.compile(r"[^ ]+ *| +")
PART = re.compile(r"[^ .,=(/]+[.,=(/]* *|[.,=(/]+ *| +")
"""A part of a name, a call or a path, with the mark after it."""


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


def lines(
    rows: Iterable[Sequence[str] | None], columns: Sequence[Column], width: int | None = None, gap: str = "  "
) -> list[str]:
    """The heads, unless all are empty, and the rows, in columns as wide as their widest cell; None is a rule.

    If they are wider than `width`, text is wrapped: between words, and where that is not enough within names and paths.
    Numbers stay whole.
    """
    heads = tuple(column.head for column in columns)
    cells = [*([heads] if any(heads) else ()), *rows]
    widths = [max(map(len, column)) for column in zip(*filter(None, cells), strict=True)]
    if width is not None:
        room = width - len(gap) * (len(widths) - 1)
        for piece in (WORD, PART):
            widths = _narrowed(widths, _least(cells, columns, piece), room)
    wide = [column._replace(width=max(column.width, width)) for column, width in zip(columns, widths, strict=False)]
    rule = ["-" * column.width for column in wide]
    text: list[str] = []
    for row in cells:
        wrapped = [
            [cell] if c.is_right and row is not heads else wrap(cell, c.width)
            for cell, c in zip(rule if row is None else row, wide, strict=False)
        ]
        first, *others = (line(parts, wide, gap) for parts in zip_longest(*wrapped, fillvalue=""))
        text += [first, *(other.rstrip() for other in others)]
    return text


def repeats(kinds: Sequence[Hashable]) -> Iterator[range]:
    """Yield the places of rows to be shown as one: equal ones in a row, or each kind of those that alternate.

    Example:
        >>> [list(places) for places in repeats("abbcdcd")]
        [[0], [1, 2], [3, 5], [4, 6]]
    """
    start = 0
    while start < len(kinds):
        found = [(period, _times(kinds[start:], period)) for period in range(1, LONGEST_PERIOD + 1)]
        period, times = max(found, key=lambda each: (each[0] * each[1] if each[1] > 1 else each[0] == 1, -each[0]))
        end = start + period * times
        yield from (range(place, end, period) for place in range(start, start + period))
        start = end


def name_of_repeats(first: str, last: str, times: int) -> str:
    """Name rows that are shown as one; the end stays together in a line."""
    return first if times == 1 else f"{first} …{NO_BREAK}{last}{NO_BREAK}×{times}"


def _times(kinds: Sequence[Hashable], period: int) -> int:
    """How often the first `period` kinds come one after the other."""
    times = 1
    while kinds[:period] == kinds[times * period : (times + 1) * period]:
        times += 1
    return times


def least_width(rows: Iterable[Sequence[str] | None], columns: Sequence[Column], gap: str = "  ") -> int:
    """The width down to which `lines` breaks no word."""
    cells = [tuple(column.head for column in columns), *rows]
    return sum(_least(cells, columns, WORD)) + len(gap) * (len(columns) - 1)


def wrap(text: str, width: int) -> list[str]:
    """Break a text between words, and a longer word after the marks of names, calls and paths, or not at all."""
    rows = [""]
    for word in WORD.findall(text):
        fits = len(word.rstrip()) <= width
        for piece in (word,) if fits else PART.findall(word):
            if rows[-1] and len(rows[-1]) + len(piece.rstrip()) > width:
                rows.append("")
            rows[-1] += piece
    return [row.rstrip() for row in rows]


def screen_width() -> int | None:
    """The columns of the terminal, or those that COLUMNS says; None if the output goes elsewhere."""
    if sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit():
        return shutil.get_terminal_size().columns
    return None


def _least(cells: Sequence[Sequence[str] | None], columns: Sequence[Column], piece: "re.Pattern[str]") -> list[int]:
    """The widths of the longest pieces of the columns; a number is one."""
    widths = []
    for place, column in enumerate(columns):
        texts = [row[place] for row in cells if row is not None]
        pieces = [part.rstrip() for text in texts[:1] for part in piece.findall(text)]
        for text in texts[1:]:
            pieces += [text] if column.is_right else [part.rstrip() for part in piece.findall(text)]
        widths.append(max(map(len, pieces), default=0))
    return widths


def _narrowed(widths: list[int], least: list[int], room: int) -> list[int]:
    """Take from the widest columns until they have room, or none can be narrower."""
    widths = [*widths]
    while sum(widths) > room:
        place = max(range(len(widths)), key=lambda i: (widths[i] > least[i], widths[i]))
        if widths[place] <= least[place]:
            break
        widths[place] -= 1
    return widths


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
    with path.open(newline="", encoding="utf-8-sig") as file:  # spreadsheets may begin a file with a mark
        return list(csv.DictReader(file))


def write_csv(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Replace the file by these rows, which may differ in their columns; missing cells stay empty."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, csv_text(rows))


def append_csv(row: Mapping[str, Any], path: Path) -> None:
    """Add a row to a file, with a header line if it is new; if its columns are others, it is written anew with all.

    Several processes of one machine may add rows to a file.

    Raises:
        ValueError: the columns differ, and the file is no table with one header line.
    """
    with one_at_a_time(path.resolve().parent):
        _append(row, path)


def _append(row: Mapping[str, Any], path: Path) -> None:
    if not path.is_file() or not path.stat().st_size:  # or a device
        text = csv_text([row])
    else:
        with path.open(newline="", encoding="utf-8-sig", errors="replace") as file:
            columns = next(csv.reader(file), [])
        if set(columns) != row.keys():
            rows = [*read_csv(path), row]
            if any(None in each for each in rows):
                raise ValueError(f"{path} has other columns, and rows that they don't fit: name another file")
            write_csv(rows, path.resolve())
            return
        text = csv_text([{column: row[column] for column in columns}], with_head=False)
        with path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":  # an editor has left it out
                text = f"\n{text}"
    with path.open("a", newline="", encoding="utf-8", errors="backslashreplace") as file:
        file.write(text)


def csv_text(rows: Sequence[Mapping[str, Any]], *, with_head: bool = True) -> str:
    """Return the text that `write_csv` writes."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, dict.fromkeys(column for row in rows for column in row), lineterminator="\n")
    if with_head:
        writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
