"""Shapes of inputs that are tried where nobody says what a network takes."""

from typing import Any

from torch import nn
from torch.nn.modules.conv import _ConvNd

from ..layers import QuantizedLayer

SIZES = {1: (64, 1024), 2: (32, 64, 224, 28, 16, 8), 3: (16, 32)}
"""By the number of dimensions, the commonest and cheap ones first."""


def usual_shapes(network: nn.Module) -> list[tuple[int, ...]]:
    """Of an input, without the batch, by what the first layer that is registered takes; empty without any layer."""
    kinds = QuantizedLayer, _ConvNd, nn.Linear
    first: Any = next((module for module in network.modules() if isinstance(module, kinds)), None)
    if first is None:
        return []
    if isinstance(first, nn.Linear):
        return [(first.in_features,), (16, first.in_features)]
    dimensions = len(first.kernel_size)
    return [(first.in_channels, *[size] * dimensions) for size in SIZES[dimensions]]
