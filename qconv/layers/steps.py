"""A copied layer that is trained without what followed the steps of the original says so."""

import warnings
from collections.abc import Callable
from typing import Any

from .naming import name_of

LIFE = ("_origin", "_trained_at", "is_stepped", "lacks_step")
"""What a quantized layer keeps beside its modules and tensors, of its life so far."""


def backward_of(layer: Any) -> Callable[[object], None]:
    """What a hook of the gradient of the layer's output calls: from now on an optimizer may move the layer."""

    def note(grad: object) -> None:
        layer.__dict__["_trained_at"] = _versions(layer)

    return note


def check_step(layer: Any) -> None:
    """Warn once if the layer was moved since its last backward, as by an optimizer, and `after_step_` did not follow.

    `copy.deepcopy` and `pickle` leave out the hooks of an optimizer. A copy that moves without a backward, such as an
    average of weights that is run in training mode, has no optimizer.
    """
    before = layer.__dict__.pop("_trained_at", None)
    if before is None or before == _versions(layer):
        return
    layer.lacks_step = False  # it is said once
    warnings.warn(
        f"{name_of(layer)} is a copy, and its optimizer's steps do not end with qconv.after_step as those of the "
        "original do: copies of an optimizer lose that. Call qconv.after_every_step(optimizer, model) again for the "
        "copied optimizer and model",
        stacklevel=5,
    )


def _versions(layer: Any) -> tuple[int, ...]:
    """How often what is trained in the layer was written to."""
    trained = layer.weight_quantizer.parameters() if layer.weight_quantizer.replaces_weight else [layer.weight]
    return tuple(tensor._version for tensor in trained)
