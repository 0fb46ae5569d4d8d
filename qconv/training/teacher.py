"""The teacher of a distillation: is it the network that was trained?"""

import shlex

from torch import nn

from ..packed.calls import build_network
from ..packed.fingerprint import fingerprint
from .initial_weights import config_of
from .resume import call, override

FLOAT = "qconv.schemes.identity"


def check_teacher(teacher: nn.Module, weights: str, in_channels: int, num_classes: int) -> None:
    """Raise unless the teacher computes what the run of its weights has trained.

    Activations, shortcuts and quantizers of signs have no tensors, so weights fit networks that compute something else.
    Files that name no network of `qconv.models`, as state dicts from elsewhere, are taken as they are.

    Args:
        teacher: the float network, with its weights.
        weights: the file that they are from.
        in_channels: of the pictures.
        num_classes: of the pictures.

    Raises:
        ValueError: it is another network; the words to add follow. Or the run has trained quantized layers.
    """
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
