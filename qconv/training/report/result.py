"""The results of a run in numbers: `result.json`, or `evaluation.json`."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from ...ground.environment import commit, machine, versions
from ...ground.files import write_file
from ...summary.costs_table import Summary
from ..resume import call


@dataclass(frozen=True)
class Evaluation:
    """The figures of a checkpoint.

    Attributes:
        checkpoint: the file.
        epoch: the epoch after which it was written, from 0.
        val_accuracy: share of the validation images classified correctly.
        val_loss: their cross-entropy.
        test_accuracy: share of the test images classified correctly.
        test_loss: their cross-entropy.
        quantized: whether all stages and portions had ended; otherwise the bits are not reached.
        about: description of the run: see `about_run`.
    """

    checkpoint: str
    epoch: int
    val_accuracy: float
    val_loss: float
    test_accuracy: float
    test_loss: float
    quantized: bool
    about: dict[str, Any]


@dataclass(frozen=True)
class Result:
    """The figures of a run.

    Attributes:
        test_accuracy: share of the test images that the checkpoint `tested` classifies correctly; read once, at the
            end.
        test_loss: their cross-entropy.
        tested: "best", the checkpoint with the best validation accuracy; the earliest of equal ones.
        val_accuracy_best: validation accuracy of that checkpoint; with ``reestimate_bn``, of the tested network.
        val_accuracy_final: validation accuracy after the last epoch, with the batch norms of the training.
        best_epoch: the epoch of `val_accuracy_best`, from 0.
        epochs: number of epochs of the whole run.
        seconds: wall time of training and test; for a resumed run with the earlier parts recorded in checkpoints.
        quantized: as in `Evaluation`, for the checkpoint `tested`.
        about: description of the run: see `about_run`.
    """

    test_accuracy: float
    test_loss: float
    tested: str
    val_accuracy_best: float
    val_accuracy_final: float
    best_epoch: int
    epochs: int
    seconds: float
    quantized: bool
    about: dict[str, Any]


def check_objective(names: str | Sequence[str], about: Mapping[str, Any]) -> None:
    """Raise a ValueError unless these are figures that a run will have."""
    known = [field.name for field in fields(Result) if field.type in (float, int)]
    known += [name for name, value in about.items() if type(value) in (float, int)]
    asked = [names] if isinstance(names, str) else names
    if not isinstance(asked, Sequence) or not asked or not set(asked) <= set(known):
        raise ValueError(f"objective (={names}) must be one or several of these figures: {', '.join(known)}")


def objective(result: Result, names: str | Sequence[str]) -> float | tuple[float, ...]:
    """Return the figures of the run with these names, one or several, for a sweeper to optimize."""
    figures = {**vars(result), **result.about}
    return figures[names] if isinstance(names, str) else tuple(figures[name] for name in names)


def write_json(outcome: Result | Evaluation, path: Path) -> None:
    """Write one flat object: the fields, then the entries of `about`."""
    values = asdict(outcome)
    about = values.pop("about")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, json.dumps({**values, **about}, indent=2) + "\n")


def about_run(config: dict[str, Any], scheme: str, table: Summary) -> dict[str, Any]:
    """Describe the run: network, data and source, the part of the figures that does not depend on the outcome.

    `Summary.totals` gives the totals of the model.
    """
    return {
        "data": call(config["data"]),
        "model": call(config["model"]),
        "scheme": scheme,
        "seed": config["seed"],
        **table.totals(),
        "run_dir": config["run_dir"],
        "resumed_from": config["resume"],
        "commit": commit(),
        "versions": versions(),
        "machine": machine(),
    }
