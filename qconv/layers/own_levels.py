"""Whether latent weights can be put on the levels to which they are quantized, and stay there."""

from typing import Any

import torch

from ..quantizers import Stages
from .base import QuantizedLayer


def why_off_levels(layer: QuantizedLayer) -> str:
    """Return why a weight that lies on one of its levels is not quantized to it; empty if it is."""
    quantizer = layer.weight_quantizer
    if isinstance(quantizer, Stages):
        return "its quantizer changes in the course of the training"
    if quantizer.replaces_weight:
        return "learned tensors stand for the weight"
    if layer.filters_are_computed:
        return "the layer quantizes what it computes from the weight"
    try:
        codes = layer.weight_codes()
    except TypeError as error:
        return str(error)
    with torch.no_grad():
        levels = codes.dequantize().to(layer.weight.dtype)
        again = quantizer.codes(levels, *quantizer.tensors())
        near = torch.allclose(again.dequantize().to(levels.dtype), levels, rtol=1e-2)  # but for rounding, in any dtype
    if not near or not torch.equal(again.values, codes.values):
        return "it normalizes the weight before it quantizes it"
    return ""


def way_out(layer: QuantizedLayer, name: str, otherwise: str) -> str:
    """Return the end of the message about a weight that does not stay on its levels: what to do."""
    return f"leave it float, with {name!r} in the skip of qconv.convert" if layer.filters_are_computed else otherwise


def has_unit_steps(layer: QuantizedLayer) -> bool:
    """Whether the codes of neighbouring levels are one apart, from the first of `whole_ends` to the last."""
    quantizer: Any = layer.weight_quantizer
    coding = getattr(quantizer, "coding", None)
    spaced = coding is None or (coding.unit == 1 and coding.table is None)
    return quantizer.whole_ends is not None and not quantizer.is_binary and quantizer.bits != 1 and spaced
