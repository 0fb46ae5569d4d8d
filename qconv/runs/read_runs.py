"""The runs below some folders, or in the rows of a table: their configs and figures, and why some have none."""

import csv
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ..ground.table import read_csv
from .run_files import CONFIG, METRICS, RESULT

FIGURES = ("test_accuracy", "val_accuracy_best", "epochs", "seconds", "packed_bytes", "scheme", "macs_by_bits")
NUMBERS, NEEDED = FIGURES[:5], ("scheme", "seed", "test_accuracy")  # the columns of a table that are no settings


@dataclass(frozen=True)
class Run:
    """A finished run: its folder, `config.yaml`, `result.json`, and when it ended.

    Of two rows of a table the later has the greater time.
    """

    folder: Path
    config: dict[str, Any]
    result: dict[str, Any]
    time: float

    @property
    def seed(self) -> Any:
        """The seed."""
        return self.config.get("seed", self.result.get("seed"))

    @property
    def bits(self) -> str:
        """Bits of weight and input in most of the multiply-accumulates, as 1/32."""
        macs = self.result["macs_by_bits"]
        return max(macs, key=macs.__getitem__).replace("x", "/") if macs else "–"


def find_runs(places: Iterable[Path]) -> tuple[list[Run], list[tuple[Path, str]]]:
    """Return the finished runs in and below some folders, and the other ones, each with what is the matter.

    A run that is found twice counts once. A CSV file has a run in each row: its ``scheme``, ``seed`` and
    ``test_accuracy`` (a share); other `NUMBERS` where they are known; any other column is a setting.
    """
    runs: list[Run] = []
    others: list[tuple[Path, str]] = []
    seen: set[Path] = set()
    for place in places:
        try:
            rows = read_csv(place)
        except (ValueError, csv.Error) as error:
            others.append((place, f"no CSV file: {error}"))
            continue
        for number, row in enumerate(rows, 2):
            name = Path(f"{place}, line {number}")
            try:
                runs.append(_of_row(name, row, number))
            except ValueError as error:
                others.append((name, str(error)))
        folders = list(_folders(place))
        if not folders and not rows:
            others.append((place, "no run in it" if place.exists() else "no such folder"))
        for folder in folders:
            if folder.resolve() in seen:
                continue
            seen.add(folder.resolve())
            try:
                runs.append(_read(folder))
            except (OSError, ValueError, yaml.YAMLError) as error:
                others.append((folder, str(error).splitlines()[0]))
    return runs, others


def _folders(place: Path) -> Iterator[Path]:
    """Yield the folders of runs, those of a sweep in the order of their numbers."""
    if (place / CONFIG).is_file():
        yield place
        return
    found = (path.parent for path in place.rglob(CONFIG) if path.parent.name != ".hydra")
    yield from sorted(found, key=natural)


def natural(path: Path) -> list[tuple[int, str]]:
    """The key of a path in an order in which 2 is before 10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", str(path))]


def _read(folder: Path) -> Run:
    config = yaml.safe_load((folder / CONFIG).read_text(encoding="utf-8"))
    if not isinstance(config, dict) or not {"data", "model", "scheme"} <= set(config):
        raise ValueError(f"{CONFIG} is not the configuration of a run")
    if config.get("evaluate") is not None and not (folder / RESULT).is_file():
        raise ValueError("an evaluation, not a run")
    if not (folder / RESULT).is_file():
        done, of = len(read_csv(folder / METRICS)), config.get("trainer", {}).get("max_epochs")
        raise ValueError(f"not finished: {done} of {of} epochs")
    return Run(folder, config, read_result(folder), (folder / RESULT).stat().st_mtime)


def read_result(folder: Path) -> dict[str, Any]:
    """Return the result of a run; a ValueError if the file is damaged."""
    try:
        result = json.loads((folder / RESULT).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{RESULT} is damaged ({error})") from error
    missing = [name for name in FIGURES if name not in (result if isinstance(result, dict) else ())]
    if missing:
        raise ValueError(f"{RESULT} has no {missing[0]}")
    return result


def _of_row(name: Path, row: dict[str, Any], number: int) -> Run:
    """The run of a line of a table; empty cells are as if they were not there."""
    cells = {key: value for key, value in row.items() if key and value}
    missing = [key for key in NEEDED if key not in cells]
    if missing:
        raise ValueError(f"no {missing[0]}: a row needs {', '.join(NEEDED)}")
    result: dict[str, Any] = {"scheme": cells.pop("scheme"), "macs_by_bits": {}}
    for figure in NUMBERS:
        if figure in cells:
            value = float(cells.pop(figure))
            if "accuracy" in figure and not 0 <= value <= 1:
                raise ValueError(f"{figure} (={value:g}) must be a share from 0 to 1")
            result[figure] = int(value) if value.is_integer() else value
    return Run(name, cells, result, number)
