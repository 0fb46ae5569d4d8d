"""Refuses to resume a run with other callbacks than the checkpoint's, if results depend on them."""

import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pytorch_lightning.callbacks import StochasticWeightAveraging, WeightAveraging

from .callbacks.checkpoints import Checkpoints
from .callbacks.ewgs_delta import EWGSDelta
from .checkpoint_io import CheckpointError
from .resume import as_it_was, call
from .trained_on import class_of


def check_callbacks(path: Path, checkpoint: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Raise a CheckpointError unless both runs average weights, measure EWGS's delta and choose the best alike.

    With averaging, the file's state dict holds the averages instead of the trained weights. A best score is useless for
    another figure.
    """
    stored, asked = deciding(checkpoint["config"]), deciding(config)
    for kind in dict.fromkeys([*stored, *asked]):
        before, now = stored.get(kind), asked.get(kind)
        if before != now:
            (before_key, before_node), (key, node) = (
                next(((key, node) for key, each, node in _callbacks(of) if each is kind), ("", None))
                for of in (checkpoint["config"], config)
            )
            group = f"callbacks.{before_key if now is None else key}"
            words = f"was trained with {group} {call(before_node)}, but this run has {call(node)}"
            raise CheckpointError(f"checkpoint {path} {words}: {as_it_was(path)}")


def deciding(config: Mapping[str, Any]) -> dict[type, dict[str, Any]]:
    """Return the callbacks that affect results, each with the arguments that do; defaults fill in missing ones."""
    return {kind: _arguments(kind, node) for _, kind, node in _callbacks(config)}


def _callbacks(config: Mapping[str, Any]) -> Iterator[tuple[str, type, dict[str, Any]]]:
    for key, node in (config.get("callbacks") or {}).items():
        kind = class_of(node) if isinstance(node, dict) else None
        if kind is not None and issubclass(kind, WeightAveraging | StochasticWeightAveraging | EWGSDelta | Checkpoints):
            yield key, kind, node


def _arguments(kind: type, node: Mapping[str, Any]) -> dict[str, Any]:
    defaults = {name: each.default for name, each in inspect.signature(kind).parameters.items()}
    given = {name: value for name, value in {**defaults, **node}.items() if not name.startswith("_")}
    return {"monitor": given["monitor"]} if issubclass(kind, Checkpoints) else given
