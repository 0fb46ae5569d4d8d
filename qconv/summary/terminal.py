"""A model's table for the terminal: layers that multiply, with repeated ones in one line."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ..ground.short_names import short_scheme
from ..ground.table import Column, least_width, lines, name_of_repeats, repeats, wrap
from .costs_table import Row, Summary, format_bits, format_int, notes

PREFIXES = ("", "k", "M", "G", "T", "P", "E")
NUMBERS = ("parameters", "MACs", "BOPs", "packed bytes", "saved bytes")
# What is shown, from wide to narrow: whether numbers are written in full, and which are left out.
VARIANTS: tuple[tuple[bool, tuple[str, ...]], ...] = (
    (True, ()),
    (False, ()),
    (False, ("BOPs",)),
    (False, ("BOPs", "saved bytes")),
)
Repeated = tuple[Row, str, int]
"""The sum of equal layers, the name of the last one, and their number."""


def screen_text(summary: Summary, width: int | None = None, title: str = "") -> str:
    """Return the table in at most `width` columns, if possible; None sets no limit.

    Repeated layers share one line with their sum. One line sums the modules that do not multiply, so that columns add
    up to the last line.
    """
    groups = list(repeated([row for row in summary.rows if row.macs]))
    tables = [_table(summary, groups, in_full, without) for in_full, without in VARIANTS]
    fitting = (table for table in tables if width is None or least_width(*table) <= width)
    text = lines(*next(fitting, tables[-1]), width)
    head = [*wrap(title, width or len(title)), ""] if title else []
    return "\n".join([*head, *text, "", *(part for note in notes(summary) for part in _wrapped(note, width))])


def repeated(rows: Sequence[Row]) -> Iterator[Repeated]:
    """Yield equal layers as one, also if several kinds alternate: then one per kind."""
    for places in repeats([_kind(row) for row in rows]):
        yield _sum([rows[place] for place in places])


def _kind(row: Row) -> tuple[object, ...]:
    return row.type, row.scheme, row.output_shape, row.weight_bits, row.input_bits, row.parameters, row.macs


def _sum(rows: Sequence[Row]) -> Repeated:
    counts = ("parameters", "weights", "macs", "float_bytes", "packed_bytes", "saved_bytes", "lean_bytes")
    sums = {name: sum(getattr(row, name) for row in rows) for name in counts}
    return replace(rows[0], **sums), rows[-1].name, len(rows)


def _table(
    summary: Summary, groups: Sequence[Repeated], in_full: bool, without: Sequence[str]
) -> tuple[list[Sequence[str] | None], list[Column]]:
    shown = [head for head in NUMBERS if head not in without]

    def numbers(counts: Row | Summary) -> list[str]:
        values = counts.parameters, counts.macs, counts.bops, counts.packed_bytes, counts.saved_bytes
        by_head: dict[str, int] = dict(zip(NUMBERS, values, strict=True))
        return [format_int(by_head[head]) if in_full and head != "BOPs" else short(by_head[head]) for head in shown]

    rows: list[Sequence[str] | None] = [None]
    for row, last, times in groups:
        name = name_of_repeats(row.name, last, times)
        shape = "×".join(map(str, row.output_shape))
        rows.append((name, short_scheme(row.scheme), shape, format_bits(row), *numbers(row)))
    rows += [None, ("all", "", "", "", *numbers(summary))]
    text = map(Column, ("layer", "scheme", "output", "bits w/in"))
    return rows, [*text, *(Column(head, is_right=True) for head in shown)]


def _wrapped(note: str, width: int | None) -> list[str]:
    """Break a note under its text, which begins after two spaces."""
    if width is None or len(note) <= width:
        return [note]
    place = len(note) - len(note.partition("  ")[2].lstrip())
    first, *others = wrap(note[place:], width - place)
    return [note[:place] + first, *(" " * place + other for other in others)]


def short(value: float) -> str:
    """Format 1234567 as 1.23 M: three digits and an SI prefix."""
    power = 0
    while value >= 999.5 and power < len(PREFIXES) - 1:
        value, power = value / 1000, power + 1
    return f"{value:.3g} {PREFIXES[power]}".rstrip()
