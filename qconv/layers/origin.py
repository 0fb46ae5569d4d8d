"""Learned tensors that start from the weight follow its changes until training starts.

After a conversion, weights may be reset by ``nn.init``, ``model.apply(init)``, ``weight.data.normal_()``, ``copy_`` or
a float checkpoint. Writing through ``.data`` does not change a tensor's version, so some of the values are compared,
too.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

SAMPLES = 64
"""The number of a weight's values that are compared, spread over it."""


class Origin(NamedTuple):
    """A weight and the tensors learned from it: their identities and versions, and values of the weight."""

    weight: tuple[int, int]
    learned: tuple[tuple[int, int], ...]
    values: Tensor


def mark(layer: Any) -> None:
    """Record that the learned tensors belong to the weight in its present state."""
    layer.__dict__["_origin"] = _origin(layer)


def follow(layer: Any) -> None:
    """Set the learned tensors anew if the weight has been written to since `mark`, and they have not."""
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
    """Stop following: training has started, so the learned tensors become independent."""
    layer.__dict__["_origin"] = None


def _origin(layer: Any) -> Origin | None:
    """Return None if nothing follows, or the tensors are replaced temporarily, as in `torch.func.functional_call`."""
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
