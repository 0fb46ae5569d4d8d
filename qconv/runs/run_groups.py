"""Runs that differ only by their seed, together; and what differs between such groups."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..ground.short_names import short_call, short_scheme
from .read_runs import Run
from .run_files import RESULT

# Parts of a config that are about where and how a run is carried out, not about what is trained.
APART = (
    *("seed", "run_dir", "evaluate", "resume", "objective", "logger", "report"),
    *("data.root", "data.cache", "data.workers", "data.decode", "trainer.timeout_s", "trainer.enable_progress_bar"),
    *(f"callbacks.{name}" for name in ("progress", "finite_guard", "random_state", "history", "diagnostics")),
    *(f"callbacks.checkpoints.{name}" for name in ("_target_", "folder", "every_steps")),
)
SEED = ".seed"
AS_A_WHOLE = ("scheme", "model")  # a column each, however many of their arguments differ
ABSENT = "–"


@dataclass(frozen=True)
class Group:
    """Runs of one configuration, one for each seed.

    Attributes:
        runs: the runs.
        differs: the values by which it differs from the other groups, by their keys.
    """

    runs: tuple[Run, ...]
    differs: dict[str, str]

    @property
    def name(self) -> str:
        """The values that differ."""
        parts = {**self.differs, "scheme": f"{self.differs['scheme']} {self.runs[0].bits}"}
        return ", ".join(value if key in AS_A_WHOLE else f"{key}={value}" for key, value in parts.items())

    def values(self, figure: str) -> list[float]:
        """A figure of each run."""
        return [run.result[figure] for run in self.runs]

    def mean(self, figure: str) -> float:
        """The mean of a figure over the seeds."""
        return statistics.mean(self.values(figure))

    def deviation(self, figure: str) -> float | None:
        """The sample standard deviation over the seeds; None of one seed."""
        return statistics.stdev(self.values(figure)) if len(self.runs) > 1 else None


def compare(runs: Sequence[Run]) -> tuple[list[Group], dict[str, str], list[Run]]:
    """Return the groups in the order of their first runs, what all have in common, and the runs that were left out.

    Of several runs of a group with the same seed the newest counts: they would make the deviation too small.
    """
    described = [(_description(run), run) for run in runs]
    if all(run.result.get("precision") for run in runs):  # that of the machine, where the config says "auto"
        for description, run in described:
            description["trainer.precision"] = str(run.result["precision"])
    own = _own_seeds(described)
    for description, _ in described:
        for key in [key for key in description if key.endswith(SEED) and key not in own]:
            del description[key]
    keys = dict.fromkeys(key for description, _ in described for key in description)
    rows = [tuple(description.get(key, ABSENT) for key in keys) for description, _ in described]
    differing = {key: len({row[place] for row in rows}) > 1 for place, key in enumerate(keys)}
    shown = [key for key in keys if key == "scheme" or (differing[key] and not _inside(key))]
    # A group by every value that differs; keys inside a whole, such as model.width, are seen in the whole's column.
    grouped: dict[tuple[str, ...], dict[Any, Run]] = {}
    left_out: list[Run] = []
    for row, (_, run) in zip(rows, described, strict=True):
        by_seed = grouped.setdefault(row, {})
        older, newer = sorted((by_seed.get(run.seed, run), run), key=_time)
        if older is not newer:
            left_out.append(older)
        by_seed[run.seed] = newer
    places = {key: place for place, key in enumerate(keys)}
    groups = [
        Group(tuple(by_seed.values()), {key: row[places[key]] for key in shown}) for row, by_seed in grouped.items()
    ]
    common = {key: rows[0][places[key]] for key in ("model", "data") if rows and key in keys and key not in shown}
    return groups, common, left_out


def _own_seeds(described: Iterable[tuple[dict[str, str], Run]]) -> set[str]:
    """The keys of seeds in parts of the configs, such as the data's, that do not follow the seed of each run."""
    return {
        key
        for description, run in described
        for key, value in description.items()
        if key.endswith(SEED) and value != str(run.seed)
    }


def _description(run: Run) -> dict[str, str]:
    """Return what a run trains, by dotted keys; the scheme and the model also as wholes."""
    values = {"scheme": short_scheme(run.result["scheme"]), "model": short_call(run.config["model"])}
    # A root may tell what the images are; who reads them does not.
    values["data"] = short_call({**run.config["data"], "cache": None, "workers": None, "decode": None})
    for key, value in _leaves(run.config, ""):
        if f"{value}/".startswith(f"{run.config.get('run_dir')}/"):  # a place in the run's own folder
            continue
        is_apart = any(key == name or key.startswith(f"{name}.") for name in APART)
        if value is not None and not is_apart:
            values[key] = str(value)
    return values


def _leaves(node: dict[str, Any], before: str) -> Iterable[tuple[str, Any]]:
    for key, value in node.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{before}{key}.")
        else:
            yield before + str(key), value


def _inside(key: str) -> bool:
    return key.startswith(tuple(f"{whole}." for whole in (*AS_A_WHOLE, "data")))


def _time(run: Run) -> float:
    return (run.folder / RESULT).stat().st_mtime
