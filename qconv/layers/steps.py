"""Warnings for layers that are trained without the updates that follow an optimizer's steps."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..quantizers import Stream
from ..quantizers.part import Part
from .computed import computed_by, trained_weights, writes

LIFE = ("_trained_at", "is_stepped", "steps_missed")
"""Attributes in which a quantized layer records its history, beside its modules and tensors."""
PATIENCE = 20
"""The number of optimizer steps after which a warning tells what is missing."""


def is_watched(layer: Any) -> bool:
    """Whether it isn't known yet that optimizer steps end with `after_step_`, nor told that they don't."""
    return not (layer.is_stepped or layer.steps_missed >= PATIENCE)


def backward_of(layer: Any) -> Callable[[object], None]:
    """The gradient hook of the layer's output: from now on an optimizer may change the layer."""

    def note(grad: object) -> None:
        layer.__dict__["_trained_at"] = _versions(layer)

    return note


def check_step(layer: Any) -> None:
    """Warn once if the layer has changed `PATIENCE` times after a backward, as by an optimizer, without `after_step_`.

    A layer that changes without a backward, such as an average of weights run in training mode, has no optimizer.
    """
    before, now = layer.__dict__.pop("_trained_at", None), _versions(layer)
    if before is None or before == now or before.keys() != now.keys():  # others for a moment, as in functional_call
        return
    layer.steps_missed += 1
    if layer.steps_missed == PATIENCE and (what := _left_undone(layer)):
        warnings.warn(  # without its name, so that Python shows it once for all layers
            f"{PATIENCE} optimizer steps did not end with qconv.after_step, which {what} with {layer.scheme}: call "
            "qconv.after_every_step(optimizer, model) before the training loop",
            stacklevel=5,
        )


@torch.no_grad()
def _left_undone(layer: Any) -> str:
    """What `after_step_` would do for the layer; empty if nothing."""
    parts = [part for quantizer in layer.quantizers().values() for part in quantizer.modules()]
    is_latent = computed_by(layer) is None
    if layer.weight_quantizer.replaces_weight or (is_latent and writes(layer.weight_quantizer, layer.filters())):
        return "keeps latent weights in their range"
    trained = [(part, name) for part in parts for name, tensor in part._parameters.items() if _is_trained(tensor)]
    if any(isinstance(part, Part) and name in part.rules() for part, name in trained):
        return "keeps learned steps and ranges positive"
    if any(isinstance(part, Stream) for part in parts):
        return "draws new random numbers"
    return ""


def _is_trained(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.requires_grad


def _versions(layer: Any) -> dict[int, int]:
    """The number of times that each of the layer's trained tensors has been written to."""
    replaces = layer.weight_quantizer.replaces_weight
    trained = layer.weight_quantizer.parameters() if replaces else trained_weights(layer)
    return {id(tensor): tensor._version for tensor in trained}
