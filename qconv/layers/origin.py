"""Learned tensors that start from the weight follow its changes until training starts.

After a conversion, weights may be reset by ``nn.init``, ``model.apply(init)``, ``weight.data.normal_()``, ``copy_`` or
a float checkpoint; or computed by a parametrization, a normalization or pruning from then on. Writing through ``.data``
does not change a tensor's version, so some of the values are compared, too: those of the weight, or of what it is
computed from, and those of the learned tensors, which an average of models may write in the same way.
"""

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .computed import Maker, computed_by, evaluated, trained_weights

SAMPLES = 64
"""The number of a tensor's values that are compared, spread over it."""


class Seen(NamedTuple):
    """The state of a tensor: its identity, its version, and some of its values."""

    identity: int
    version: int
    values: Tensor

    def is_as(self, other: "Seen") -> bool:
        """Whether nothing has been written to the tensor since ``other``."""
        same = (self.identity, self.version) == (other.identity, other.version)
        before = other.values.to(self.values)
        return same and torch.allclose(self.values, before, rtol=0, atol=0, equal_nan=True)


class Origin(NamedTuple):
    """A weight, or what it is computed from and by, and the tensors learned from it."""

    weights: tuple[Seen, ...]
    maker: Maker | None
    learned: tuple[Seen, ...]


def _are_as(now: tuple[Seen, ...], before: tuple[Seen, ...]) -> bool:
    return len(now) == len(before) and all(map(Seen.is_as, now, before))


def mark(layer: Any) -> None:
    """Record that the learned tensors belong to the weight in its present state, until the weight gets a gradient."""
    layer.__dict__["_origin"] = origin = _origin(layer)
    if origin is not None:
        _watch_gradient(layer)


def _watch_gradient(layer: Any) -> None:
    """Let the first gradient of the weight, or of what it is computed from, end the following."""
    for weight in trained_weights(layer):
        hooks = (getattr(weight, "_post_accumulate_grad_hooks", None) or {}).values()
        if weight.requires_grad and not any(isinstance(hook, _Leaves) and hook.layer() is layer for hook in hooks):
            weight.register_post_accumulate_grad_hook(_Leaves(layer))


class _Leaves:
    """The hook of a weight's gradient: it is trained, perhaps in evaluation mode, or under `torch.compile`."""

    def __init__(self, layer: Any) -> None:
        self.layer = weakref.ref(layer)

    def __call__(self, weight: Tensor) -> None:
        layer: Any = self.layer()
        if layer is None or layer.__dict__.get("_origin") is None:  # it may be a float layer again
            return
        if any(weight is own for own in trained_weights(layer)):
            leave(layer)


def follow(layer: Any) -> None:
    """Set the learned tensors anew if the weight has been written to since `mark`, and they have not."""
    known: Origin | None = layer.__dict__.get("_origin")
    now = None if known is None else _origin(layer)
    if known is None or now is None:
        return
    _watch_gradient(layer)  # the weight may have been frozen before
    as_learned = _are_as(now.learned, known.learned)
    if as_learned and now.maker == known.maker and _are_as(now.weights, known.weights):
        return
    if as_learned:
        with torch.no_grad(), evaluated(layer):
            layer.weight_quantizer.initialize(layer.filters().detach())
        mark(layer)
    else:  # a checkpoint, an average of models or the user has set them
        leave(layer)


def follow_cast(layer: Any) -> None:
    """Record the tensors in their present state, after a cast or a move that `follow` came before."""
    if layer.__dict__.get("_origin") is not None and (now := _origin(layer)) is not None:
        layer.__dict__["_origin"] = now


def leave(layer: Any) -> None:
    """Stop following: training has started, so the learned tensors become independent."""
    layer.__dict__["_origin"] = None


def _origin(layer: Any) -> Origin | None:
    """Return None if nothing follows, or the tensors are replaced temporarily, as in `torch.func.functional_call`."""
    weights, learned = trained_weights(layer), [*layer.weight_quantizer.parameters()]
    plain = all(type(tensor) is nn.Parameter and not tensor.is_inference() for tensor in (*weights, *learned))
    if not weights or not learned or not plain or torch.jit.is_tracing():  # pyright: ignore[reportPrivateImportUsage]
        return None
    if any(weight.is_meta for weight in weights):
        return None
    mask = layer._buffers.get("weight_mask")  # of pruning
    of_weight = weights if mask is None else [*weights, mask]
    return Origin(tuple(map(_seen, of_weight)), computed_by(layer), tuple(map(_seen, learned)))


def _seen(tensor: Any) -> Seen:
    every = max(tensor.numel() // SAMPLES, 1)
    return Seen(id(tensor), tensor._version, tensor.detach().flatten()[::every].clone())
