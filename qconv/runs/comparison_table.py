"""The comparison as a table: on the screen, as Markdown, and as CSV."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from .run_groups import ABSENT, Group, short_value, telling

HEADS = ("test %", "val. %", "seeds", "bits w/in", "bytes", "time", "epochs")


def cells(group: Group) -> tuple[str, ...]:
    """The figures of a group, in the order of `HEADS`."""
    return (
        spread(group, "test_accuracy"),
        spread(group, "val_accuracy_best"),
        str(len(group.runs)),
        group.runs[0].bits,
        f"{group.mean('packed_bytes'):,.0f}".replace("nan", ABSENT),
        duration(group.mean("seconds")),
        between(group.values("epochs")),
    )


def settings(group: Group, columns: Iterable[str]) -> list[str]:
    """The settings of a group by which it differs from others."""
    return [short_value(key, group.differs[key]) for key in columns]


def spread(group: Group, figure: str) -> str:
    """Mean and deviation over the seeds, of shares in percent."""
    deviation = group.deviation(figure)
    mean = f"{100 * group.mean(figure):.2f}".replace("nan", ABSENT)
    return mean + ("" if deviation is None else f" ± {100 * deviation:.2f}")


def duration(seconds: float) -> str:
    """Format 75 s as 1:15 min, 3700 s as 1:01 h."""
    if math.isnan(seconds):
        return ABSENT
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d} min" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02d} h"


def between(values: Sequence[float]) -> str:
    """The least and the greatest, or the only one."""
    low, high = min(values, default=ABSENT), max(values, default=ABSENT)
    return str(low) if low == high else f"{low}–{high}"


def markdown(groups: Sequence[Group]) -> str:
    """Return the table as Markdown."""
    columns = telling(groups)
    heads = (*columns.values(), *HEADS)
    rule = ["---"] * len(columns) + ["---:"] * len(HEADS)
    rows = [heads, rule, *((*settings(group, columns), *cells(group)) for group in groups)]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |\n" for row in rows)


def csv_rows(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Return a row of plain numbers for each group: means over the seeds, and deviations where there are several."""
    return [
        {
            **group.differs,
            "seeds": " ".join(str(run.seed) for run in group.runs),
            "test_accuracy": group.mean("test_accuracy"),
            "test_accuracy_deviation": group.deviation("test_accuracy"),
            "val_accuracy_best": group.mean("val_accuracy_best"),
            "val_accuracy_best_deviation": group.deviation("val_accuracy_best"),
            "bits": group.runs[0].bits,
            "packed_bytes": group.runs[0].result.get("packed_bytes"),
            "seconds": group.mean("seconds"),
            "epochs": group.mean("epochs"),
            "runs": " ".join(str(run.folder) for run in group.runs),
        }
        for group in groups
    ]
