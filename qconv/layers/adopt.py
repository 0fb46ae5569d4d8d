"""Turning a float layer into a quantized one, and back, as the same object."""

from typing import cast

import torch
from torch import nn

from ..scheme import Scheme
from .arguments import checked
from .base import QuantizedLayer
from .computed import base_of, computed_by, with_base

OWN = ("scheme", "input_quantizer", "weight_quantizer", "grad_quantizer", "padding_value")
NOTES = ("_checked_maker", "name_in_model", "float_type", "lean", "before_sign")


def adopt(layer: nn.Module, kind: type[QuantizedLayer], scheme: Scheme | None) -> None:
    """Turn ``layer``, of type ``kind.float_type`` or an equivalent subclass, into a quantized one in place.

    The object stays the same: its parameters, hooks and the places that share it are kept. If the scheme is refused,
    the layer is what it was.
    """
    scheme = checked(scheme)
    kind.check_scheme(scheme)
    trained = {name: parameter.requires_grad for name, parameter in layer.named_parameters()}
    adopted, former = cast(QuantizedLayer, layer), None
    if base_of(layer) is kind:  # it quantizes nothing
        former = adopted.scheme
        without_quantizers(adopted, with_base(layer, adopted.float_type))
    twin = base_of(layer)
    layer.__class__ = with_base(layer, kind)
    if twin is not kind.float_type:
        adopted.__dict__["float_type"] = twin
    try:
        adopted.set_scheme(scheme)
    except BaseException:
        undo(adopted, former)
        for name, parameter in layer.named_parameters():
            parameter.requires_grad_(trained[name])
        raise


def release(layer: QuantizedLayer) -> None:
    """Undo `adopt`: turn the layer into its ``torch.nn`` twin again, with `float_weight` as weight."""
    if not computed_by(layer):  # a computed weight stays as it is
        trained = layer.is_trained
        with torch.no_grad():
            layer.weight.copy_(layer.float_weight())
        layer.weight.requires_grad_(trained)
    without_quantizers(layer, with_base(layer, layer.float_type))


def undo(layer: QuantizedLayer, former: Scheme | None) -> None:
    """Make a layer what it was before `adopt`: float, or of a scheme that quantizes nothing."""
    kind = base_of(layer)
    without_quantizers(layer, with_base(layer, layer.float_type))
    if former is not None:
        adopt(layer, cast(type[QuantizedLayer], kind), former)


def without_quantizers(layer: QuantizedLayer, kind: type[nn.Module]) -> None:
    """Remove everything that only a quantized layer has, and set the class to ``kind``."""
    for name in OWN:
        if hasattr(layer, name):
            delattr(layer, name)
    for name in NOTES:
        layer.__dict__.pop(name, None)
    cast(nn.Module, layer).__class__ = kind
