"""Learned tensors that start from the weight follow it, whoever writes to it, until training starts.

Weights are set anew after a conversion by ``nn.init``, ``model.apply(init)``, ``weight.data.normal_()``, ``copy_`` or a
float checkpoint. Writing by ``.data`` leaves a tensor's version alone, so that some of the values are compared, too.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

SAMPLES = 64
"""How many of a weight's values are compared, spread over it."""


class Origin(NamedTuple):
    """A weight and what was learned from it: which tensors, how often they were written to, values of the weight."""

    weight: tuple[int, int]
    learned: tuple[tuple[int, int], ...]
    values: Tensor


def mark(layer: Any) -> None:
    """Note that the learned tensors are those of the weight as it is now."""
    layer.__dict__["_origin"] = _origin(layer)


def follow(layer: Any) -> None:
    """Set the learned tensors anew if the weight was written to since `mark`, and they were not."""
    known: Origin | None = layer.__dict__.get("_origin")
    now = None if known is None else _origin(layer)
    if known is None or now is None or _are_equal(known, now):
        return
    if now.learned == known.learned:
        layer.weight_quantizer.initialize(layer.filters().detach())
        mark(layer)
    else:  # a checkpoint, an average of models or the user has set them
        leave(layer)


def leave(layer: Any) -> None:
    """Training has started: from now on the learned tensors go their own way."""
    layer.__dict__["_origin"] = None


def _origin(layer: Any) -> Origin | None:
    """None where nothing follows, or the tensors are others for the moment, as in `torch.func.functional_call`."""
    weight, *learned = tensors = [layer._parameters.get("weight"), *layer.weight_quantizer.parameters()]
    plain = all(type(tensor) is nn.Parameter and not tensor.is_inference() for tensor in tensors)
    if not learned or not plain or weight.is_meta or torch.jit.is_tracing():  # pyright: ignore[reportPrivateImportUsage]
        return None
    every = max(weight.numel() // SAMPLES, 1)
    values = weight.detach().flatten()[::every].clone()
    return Origin((id(weight), weight._version), tuple((id(tensor), tensor._version) for tensor in learned), values)


def _are_equal(known: Origin, now: Origin) -> bool:
    same = known.weight == now.weight and known.learned == now.learned
    return same and torch.equal(known.values.to(now.values), now.values)  # as they are after a cast
