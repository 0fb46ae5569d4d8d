"""A copied layer that is trained without what followed the steps of the original says so."""

import warnings
from typing import Any

LIFE = ("_origin", "_trained_at", "is_stepped", "lacks_step")
"""What a quantized layer keeps beside its modules and tensors, of its life so far."""


def check_step(layer: Any) -> None:
    """Warn once if an optimizer has moved the layer since its last training forward and `after_step_` did not follow.

    `copy.deepcopy` and `pickle` leave out the hooks of an optimizer.
    """
    trained = layer.weight_quantizer.parameters() if layer.weight_quantizer.replaces_weight else [layer.weight]
    now = tuple(tensor._version for tensor in trained)
    before = layer.__dict__.get("_trained_at", now)
    layer.__dict__["_trained_at"] = now
    if now == before:
        return
    layer.lacks_step = False  # it is said once
    place = layer.__dict__.get("name_in_model")
    where = type(layer).__name__ if place is None else f"layer '{place}' ({type(layer).__name__})"
    warnings.warn(
        f"{where} ({layer.scheme.name}) is a copy, and its optimizer's steps do not end with qconv.after_step as those "
        "of the original do: copies of an optimizer lose that. Call qconv.after_every_step(optimizer, model) again for "
        "the copied optimizer and model",
        stacklevel=5,
    )
