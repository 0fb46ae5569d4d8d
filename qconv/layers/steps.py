"""A warning for copied layers that are trained without the updates that followed the steps of the original."""

import warnings
from collections.abc import Callable
from typing import Any

from .naming import name_of

LIFE = ("_origin", "_trained_at", "is_stepped", "lacks_step")
"""Attributes in which a quantized layer records its history, beside its modules and tensors."""


def backward_of(layer: Any) -> Callable[[object], None]:
    """The gradient hook of the layer's output: from now on an optimizer may change the layer."""

    def note(grad: object) -> None:
        layer.__dict__["_trained_at"] = _versions(layer)

    return note


def check_step(layer: Any) -> None:
    """Warn once if the layer has changed since its last backward, as by an optimizer, without `after_step_`.

    `copy.deepcopy` and `pickle` leave out the hooks of an optimizer. A copy that changes without a backward, such as an
    average of weights run in training mode, has no optimizer.
    """
    before = layer.__dict__.pop("_trained_at", None)
    if before is None or before == _versions(layer):
        return
    layer.lacks_step = False  # warn only once
    warnings.warn(
        f"{name_of(layer)} is a copy, and its optimizer's steps do not end with qconv.after_step as those of the "
        "original do: copies of an optimizer lose that. Call qconv.after_every_step(optimizer, model) again for the "
        "copied optimizer and model",
        stacklevel=5,
    )


def _versions(layer: Any) -> tuple[int, ...]:
    """The number of times that the layer's trained tensors have been written to."""
    trained = layer.weight_quantizer.parameters() if layer.weight_quantizer.replaces_weight else [layer.weight]
    return tuple(tensor._version for tensor in trained)
