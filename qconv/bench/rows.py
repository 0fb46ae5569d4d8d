"""A benchmark's results as rows of the printed table and of the CSV file."""

import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from ..ground.environment import commit, machine, versions
from ..ground.table import Column, append_csv, line


@dataclass(frozen=True)
class Row(ABC):
    """A result of a benchmark."""

    columns: ClassVar[tuple[Column, ...]]

    @abstractmethod
    def cells(self) -> tuple[str, ...]:
        """The row as text, in the order of `columns`."""

    @classmethod
    def header(cls) -> str:
        """The heads of the columns."""
        return line((column.head for column in cls.columns), cls.columns, " ")

    def line(self) -> str:
        """The row of the table."""
        return line(self.cells(), self.columns, " ")

    def recorded(self) -> dict[str, Any]:
        """The row of the CSV file: with the machine and versions of the measurement."""
        return {**asdict(self), **machine(), **versions(), "commit": commit()}

    def append_to(self, path: str) -> None:
        """Add the row to a CSV file."""
        append_csv(self.recorded(), Path(path))


def seconds_per_call(run: Callable[[], object], count: int) -> float:
    """Return the seconds per call, after a warm-up call."""
    run()
    start = time.perf_counter()
    for _ in range(count):
        run()
    return (time.perf_counter() - start) / count


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Return lower quartile, median and upper quartile; a single value three times."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else list(values) * 3
    return low, middle, high
