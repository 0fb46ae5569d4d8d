"""Whether latent weights can be set to the levels to which they are quantized, and stay there."""

import copy
from typing import Any

import torch
from torch import Tensor

from ..quantizers import Quantizer, Stages
from .base import QuantizedLayer


def why_off_levels(layer: QuantizedLayer) -> str:
    """Return why a weight that lies on a level is not quantized to that level; empty if it is."""
    quantizer = layer.weight_quantizer
    if isinstance(quantizer, Stages):
        return "its quantizer changes in the course of the training"
    if quantizer.replaces_weight:
        return "learned tensors stand for the weight"
    if layer.filters_are_computed:
        return "the layer quantizes what it computes from the weight"
    try:
        with layer.as_evaluated() as (quantizer, filters):
            if not _stays(quantizer, filters):
                return "its levels follow the weight, which it normalizes or whose statistics it takes"
            moved = copy.deepcopy(quantizer)
            for parameter in moved.parameters():  # learned tensors may move apart
                before = parameter.clone()
                for factor in (0.4, 2.5):
                    parameter.copy_(factor * before)
                    if not _stays(moved, filters):
                        return "its levels move apart from the weight with what it learns"
                parameter.copy_(before)
    except TypeError as error:  # it has no codes
        return str(error)
    return ""


def _stays(quantizer: Quantizer, filters: Tensor) -> bool:
    """Whether weights that are set to their levels are quantized to these levels, except for rounding."""
    tensors = quantizer.tensors()
    codes = quantizer.codes(filters, *tensors)
    levels = codes.dequantize().to(filters.dtype)
    again = quantizer.codes(levels, *tensors)
    rtol = 1e-5 if torch.finfo(levels.dtype).bits > 16 else 1e-2
    return torch.allclose(again.dequantize().to(levels.dtype), levels, rtol=rtol) and torch.equal(
        again.values, codes.values
    )


def way_out(layer: QuantizedLayer, name: str, otherwise: str) -> str:
    """Return the remedy at the end of a message about a weight that does not stay on its levels."""
    return f"leave it float, with {name!r} in the skip of qconv.convert" if layer.filters_are_computed else otherwise


def has_unit_steps(layer: QuantizedLayer) -> bool:
    """Whether the codes of neighbouring levels are one apart, from the first of `whole_ends` to the last."""
    quantizer: Any = layer.weight_quantizer
    coding = getattr(quantizer, "coding", None)
    spaced = coding is None or (coding.unit == 1 and coding.table is None)
    return quantizer.whole_ends is not None and quantizer.bits != 1 and spaced
