"""What all benchmarks do with their figures."""

import csv
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """The lower quartile, the median and the upper quartile; the value itself where there is one."""
    low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else list(values) * 3
    return low, middle, high


def append_row(path: str, row: Mapping[str, Any]) -> None:
    """Add a row to a CSV file, with a header line if the file is new."""
    file = Path(path)
    new = not file.exists() or not file.stat().st_size
    with file.open("a", newline="") as stream:
        writer = csv.DictWriter(stream, list(row), lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerow(row)
