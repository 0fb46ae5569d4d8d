"""Comparison of a frozen layer's input with the exact result of the trained modules before it."""

from typing import Any

import torch
from torch import Tensor

from ..layers import QuantizedLayer
from ..quantizers import Identity
from ..quantizers.base import has_codes
from .float_error import SURE, Rounded, difference

FEW = 3  # values of a channel that may be unlucky


def check_input(layer: QuantizedLayer, wanted: Rounded, own: Tensor, is_codes: bool) -> dict[str, Any]:
    """Return the counts that a layer's input adds to its `LayerCheck`.

    A code may be that of any number within `SURE` errors of the exact one. A float must itself lie there, if the layer
    computes with floats or takes its scale from them. Errors are rarely that large: so of the values of a channel that
    are this close to an edge, where one error does not reach it, less than a quarter may have the code of the other
    side.

    Args:
        layer: the trained layer.
        wanted: its input in exact arithmetic.
        own: the input of the frozen layer, floats or codes.
        is_codes: whether they are codes.
    """
    counts = {"elements": wanted.exact.numel()}
    if own.shape != wanted.exact.shape:
        return {**counts, "drift": counts["elements"], "unexplained": counts["elements"]}
    if not own.numel():
        return counts
    quantizer = layer.input_quantizer
    far = (
        torch.ones_like(own, dtype=torch.bool) if is_codes else ~(difference(own, wanted.exact) <= SURE * wanted.error)
    )
    if isinstance(quantizer, Identity) or layer.has_scale_map or not has_codes(quantizer):
        return {**counts, "unexplained": int(far.sum())}

    def codes(x: Tensor) -> Tensor:
        return quantizer.codes(x.float(), *quantizer.tensors()).values

    def between(width: float) -> tuple[Tensor, Tensor]:
        ends = codes(wanted.exact - width * wanted.error), codes(wanted.exact + width * wanted.error)
        return torch.minimum(*ends), torch.maximum(*ends)

    exact_codes = quantizer.codes(wanted.exact.float(), *quantizer.tensors())
    own_codes = quantizer.codes(own, *quantizer.tensors()) if not is_codes else None
    values = own if own_codes is None else own_codes.values
    if own_codes is not None and not torch.equal(own_codes.scale, exact_codes.scale):  # it depends on the floats
        return {**counts, "drift": int((values != exact_codes.values).sum()), "unexplained": int(far.sum())}
    differs = values != exact_codes.values
    if not differs.any():
        return counts
    low, high = between(SURE)
    unexplained = differs & far & ((values < low) | (values > high))
    near_low, near_high = between(1)
    unlucky = differs & ~unexplained & (near_low == near_high)
    share = _share(unlucky, low != high, wanted.exact, layer.input_channels()[1])
    return {**counts, "drift": int(differs.sum()), "unexplained": int(unexplained.sum()), "of_drift": share}


def _share(unlucky: Tensor, may: Tensor, exact: Tensor, dim: int) -> float:
    """Return the largest share of unlucky values in a channel; equal values count once."""
    if not unlucky.any():
        return 0.0
    channels = exact.shape[dim]
    shape = [1] * exact.ndim
    shape[dim] = channels
    channel = torch.arange(channels, dtype=exact.dtype).view(shape).expand_as(exact)

    def values(which: Tensor) -> Tensor:
        pairs = torch.stack([channel[which], exact[which]]).unique(dim=1)
        return pairs[0].long().bincount(minlength=channels).double()

    return float((values(unlucky) / (FEW + values(may) / 4)).max())
