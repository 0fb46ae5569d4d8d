"""The teacher of a distillation: is it the network that was trained?"""

import shlex

from omegaconf import DictConfig
from torch import nn

from ..packed.calls import build_network
from ..packed.fingerprint import fingerprint
from .initial_weights import config_of
from .resume import call, override

FLOAT, OWN = "qconv.schemes.identity", "qconv.models."


def check_teacher(loss: DictConfig, teacher: nn.Module, in_channels: int, num_classes: int) -> None:
    """Raise unless the teacher computes what the run of its weights has trained.

    Activations, shortcuts and quantizers of signs have no tensors, so weights fit networks that compute something else.
    Files that name no network of `qconv.models`, as state dicts from elsewhere, are taken as they are.

    Args:
        loss: the node of the config, with the call of the teacher and the file of its weights.
        teacher: the float network, with its weights.
        in_channels: of the pictures.
        num_classes: of the pictures.

    Raises:
        ValueError: it is another network, and the words to add follow; the run has trained quantized layers; or it is a
            network of `qconv.models` without weights, which is random.
    """
    weights, target = loss.get("weights"), str(loss.teacher.get("_target_"))
    if weights is None:
        if target.startswith(OWN):
            raise ValueError(f"loss.weights must name the teacher's file, {target} is random: add loss.weights=FILE")
        return
    config = config_of(weights)
    node, scheme = config.get("model"), config.get("scheme")
    if isinstance(scheme, dict) and scheme.get("_target_") != FLOAT:
        raise ValueError(
            f"loss.weights (={weights}) were trained with scheme {call(scheme)}: as a teacher, which is float, the "
            "network would be another one; give the weights of a float network"
        )
    if not isinstance(node, dict):
        return
    try:
        trained = build_network({**node, "in_channels": in_channels, "num_classes": num_classes})
    except ValueError:
        return
    if fingerprint(teacher) != fingerprint(trained):
        raise ValueError(
            f"loss.weights (={weights}) were trained in {call(node)}; loss.teacher is another network, which these "
            f"weights fit as well: add {shlex.join([f'loss.teacher={override(node)}'])}"
        )
