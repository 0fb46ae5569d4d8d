"""Runs that differ only by their seed, together; and what differs between such groups."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..ground.short_names import short_call, short_scheme
from .read_runs import Run

# Parts of a config that are about where and how a run is carried out, not about what is trained.
APART = (
    *("seed", "run_dir", "evaluate", "resume", "objective", "logger", "report"),
    *("data.root", "data.cache", "data.workers", "data.decode", "trainer.timeout_s", "trainer.enable_progress_bar"),
    *(f"callbacks.{name}" for name in ("progress", "finite_guard", "random_state", "history", "diagnostics")),
    *(f"callbacks.checkpoints.{name}" for name in ("_target_", "folder", "every_steps")),
)
SEED = ".seed"
WHOLES = ("scheme", "model", "data")  # a column each, however many of their arguments differ
OF_CLASSES = (".optimizer.path", "._target_")
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

    def name(self, heads: Mapping[str, str]) -> str:
        """The values of some keys, of which `heads` has short names."""
        bits = f" {self.runs[0].bits}".removesuffix(f" {ABSENT}")
        parts = {**self.differs, "scheme": self.differs["scheme"] + bits}
        shown = ((key, head, short_value(key, parts[key])) for key, head in heads.items())
        return ", ".join(value if key in WHOLES else f"{head}={value}" for key, head, value in shown)

    def values(self, figure: str) -> list[float]:
        """A figure of each run that has it."""
        return [run.result[figure] for run in self.runs if figure in run.result]

    def mean(self, figure: str) -> float:
        """The mean of a figure over the seeds; NaN without any."""
        return statistics.mean(self.values(figure) or [math.nan])

    def deviation(self, figure: str) -> float | None:
        """The sample standard deviation over the seeds; None of one seed."""
        values = self.values(figure)
        return statistics.stdev(values) if len(values) > 1 else None


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
    inside = tuple(f"{whole}." for whole in WHOLES)
    shown = [key for key in keys if key == "scheme" or (differing[key] and not key.startswith(inside))]
    # A group by every value that differs; keys inside a whole, such as model.width, are seen in the whole's column.
    grouped: dict[tuple[str, ...], dict[Any, Run]] = {}
    left_out: list[Run] = []
    for row, (_, run) in zip(rows, described, strict=True):
        by_seed = grouped.setdefault(row, {})
        older, newer = sorted((by_seed.get(run.seed, run), run), key=lambda each: each.time)
        if older is not newer:
            left_out.append(older)
        by_seed[run.seed] = newer
    places = {key: place for place, key in enumerate(keys)}
    groups = [
        Group(tuple(by_seed.values()), {key: row[places[key]] for key in shown}) for row, by_seed in grouped.items()
    ]
    for whole in WHOLES[1:]:
        for group, label in zip(groups, _labels([_node(group.runs[0], whole) for group in groups]), strict=True):
            if whole in group.differs:
                group.differs[whole] = label
    common = {key: rows[0][places[key]] for key in ("model", "data") if rows and key in keys and key not in shown}
    return groups, common, left_out


def telling(groups: Sequence[Group]) -> dict[str, str]:
    """Return the fewest keys whose values tell the groups apart, the scheme first, with short names for columns.

    Others that differ, too, follow from them.
    """
    keys, chosen = [*groups[0].differs], ["scheme"]
    kinds = lambda names: len({tuple(group.differs[name] for name in names) for group in groups})  # noqa: E731
    while kinds(chosen) < kinds(keys):
        chosen.append(max(keys, key=lambda key: kinds([*chosen, key])))  # of equal ones the first
    short = {key: _without_class(key).rpartition(".")[2] for key in chosen}
    return {key: name if [*short.values()].count(name) == 1 else key for key, name in short.items()}


def short_value(key: str, value: str) -> str:
    """Return a value for a column: of a class its name alone."""
    return value if _without_class(key) == key else value.rpartition(".")[2]


def _without_class(key: str) -> str:
    return next((key.removesuffix(end) for end in OF_CLASSES if key.endswith(end)), key)


def _labels(nodes: Sequence[Any]) -> list[str]:
    """Write nodes as calls with those arguments alone that differ between the nodes of one function."""
    labels = []
    for node in nodes:
        if not isinstance(node, dict):
            labels.append(str(node))
            continue
        others = [other for other in nodes if isinstance(other, dict) and other.get("_target_") == node.get("_target_")]
        same = [key for key in node if key != "_target_" and all(other.get(key) == node[key] for other in others)]
        labels.append(short_call({key: value for key, value in node.items() if key not in same}))
    return labels


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
    scheme = run.result["scheme"]
    values = {"scheme": short_scheme(scheme) if run.bits != ABSENT else scheme}
    values |= {whole: short_call(_node(run, whole)) for whole in WHOLES[1:] if whole in run.config}
    for key, value in _leaves(run.config, ""):
        if f"{value}/".startswith(f"{run.config.get('run_dir')}/"):  # a place in the run's own folder
            continue
        is_apart = any(key == name or key.startswith(f"{name}.") for name in APART)
        if value is not None and not is_apart:
            values[key] = str(value)
    return values


def _node(run: Run, whole: str) -> Any:
    """Return a part of a config. A root may tell what the images are; who reads them does not."""
    part = run.config.get(whole)
    if not isinstance(part, dict):
        return part
    return {key: value for key, value in part.items() if f"{whole}.{key}" not in APART or key == "root"}


def _leaves(node: dict[str, Any], before: str) -> Iterable[tuple[str, Any]]:
    for key, value in node.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{before}{key}.")
        else:
            yield before + str(key), value
