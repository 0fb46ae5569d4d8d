"""Checks that the teacher of a distillation is the network that was trained."""

import shlex
from typing import Any

from omegaconf import DictConfig
from torch import nn

from ..packed.calls import build_network
from .checkpoint_io import CheckpointError
from .initial_weights import checkpoint_of_run
from .resume import call, override
from .trained_on import other_classes

FLOAT, OWN = "qconv.schemes.identity", "qconv.models."


def check_teacher(loss: DictConfig, teacher: nn.Module, data: Any) -> None:
    """Raise unless the teacher computes the same as in the run that trained its weights.

    Activations, shortcuts and quantizers of signs have no tensors, so weights fit networks that compute something else.
    Files that name no network of `qconv.models`, such as state dicts from elsewhere, are accepted unchecked.
    """
    weights, target = loss.get("weights"), str(loss.teacher.get("_target_"))
    if weights is None:
        if target.startswith(OWN):
            raise ValueError(
                f"loss.weights must name the teacher's file, because {target} has random weights: add loss.weights=FILE"
            )
        return
    checkpoint = checkpoint_of_run(weights)
    if difference := other_classes(data, checkpoint):
        raise CheckpointError(f"loss.weights (={weights}) {difference}: a teacher must know the same classes")
    config = checkpoint.get("config", {})
    node, scheme = config.get("model"), config.get("scheme")
    if isinstance(scheme, dict) and scheme.get("_target_") != FLOAT:
        raise ValueError(
            f"loss.weights (={weights}) were trained with scheme {call(scheme)}, but a teacher is float: use the "
            "weights of a float network"
        )
    if not isinstance(node, dict):
        return
    try:
        trained = build_network({**node, "in_channels": data.in_channels, "num_classes": data.num_classes})
    except ValueError:
        return
    if _settings(teacher) != _settings(trained):
        raise ValueError(
            f"loss.weights (={weights}) were trained in {call(node)}; loss.teacher is another network, which these "
            f"weights fit as well: add {shlex.join([f'loss.teacher={override(node)}'])}"
        )


def _settings(network: nn.Module) -> list[Any]:
    """Return the classes of all modules, with what is plain in them, such as a stride."""
    plain = bool | int | float | str | tuple
    return [
        (name, type(module), {key: x for key, x in vars(module).items() if isinstance(x, plain) and key != "training"})
        for name, module in network.named_modules()
    ]
