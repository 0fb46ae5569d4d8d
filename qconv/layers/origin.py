"""The weight's learned quantizer tensors before training: they follow the weight."""

from typing import TYPE_CHECKING

import torch
from torch import nn

from ..quantizers import Quantizer
from .calibration import lost
from .computed import evaluated, trained_weights

if TYPE_CHECKING:
    from .base import QuantizedLayer


@torch.no_grad()
def start_from_weight(layer: "QuantizedLayer") -> None:
    """Set the learned tensors of the weight's quantizer from the weight; the quantizer is fresh (`NeedsData`)."""
    with evaluated(layer):
        layer.weight_quantizer.initialize(layer.filters().detach())
    refresh(layer)


def refresh(layer: "QuantizedLayer") -> None:
    """Let the weight's quantizer follow the weight until the first backward."""
    for part in layer.weight_quantizer.modules():
        if isinstance(part, Quantizer) and part._parameters:
            part.start_()


def follow_weight(layer: "QuantizedLayer") -> None:
    """Set the learned tensors of a fresh weight quantizer from the weight again, as each training forward does.

    Not from tensors that only stand in for parameters, as in `torch.func.functional_call`.
    """
    if not layer.weight_quantizer.is_fresh:
        return
    own = *trained_weights(layer), *layer.weight_quantizer.parameters()
    if all(type(tensor) is nn.Parameter and not tensor.is_meta for tensor in own) and not lost(layer, own):
        start_from_weight(layer)
