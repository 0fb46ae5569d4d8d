"""Names of a layer's quantizers, and of layers in messages."""

from torch import nn

from ..quantizers import Quantizer
from ..scheme import Scheme

QUANTIZERS = ("input_quantizer", "weight_quantizer", "grad_quantizer")
"""The attributes of a quantized layer that hold its quantizers."""


def quantizers_of(layer: nn.Module) -> dict[str, Quantizer]:
    """Return the quantizers that a layer has by now, by the names of their attributes."""
    return {name: own for name in QUANTIZERS if (own := getattr(layer, name, None)) is not None}


def name_of(layer: nn.Module, name: str = "") -> str:
    """The layer for a message: ``layer 'conv1' (QConv2d, bnn())``; its ``repr`` where it has no name.

    ``name`` is where it stands in the model at hand; by default where `qconv.convert` found it.
    """
    name = name or layer.__dict__.get("name_in_model", "")
    if not name:
        return repr(layer)
    scheme = layer.__dict__.get("scheme")
    return f"layer '{name}' ({type(layer).__name__}{f', {scheme.name}' if isinstance(scheme, Scheme) else ''})"


def frozen_part(model: nn.Module) -> str | None:
    """Return the first frozen part of `model`, for a message; None if it has none."""
    inference = f"{__name__.removesuffix('layers.naming')}inference."
    for name, module in model.named_modules():
        if type(module).__module__.startswith(inference):
            return f"'{name}' ({type(module).__name__})" if name else f"it ({type(module).__name__})"
    return None
