"""Shapes of inputs to try for a network with an unknown input shape."""

from typing import Any

from torch import nn
from torch.nn.modules.conv import _ConvNd

from ..layers import QuantizedLayer

SIZES = {1: (64, 1024), 2: (32, 64, 224, 28, 16, 8), 3: (16, 32)}
"""Shapes by the number of dimensions, the most common and cheapest first."""


def usual_shapes(network: nn.Module) -> list[tuple[int, ...]]:
    """Return shapes to try, without the batch, for the first registered layer; empty without a layer."""
    kinds = QuantizedLayer, _ConvNd, nn.Linear
    first: Any = next((module for module in network.modules() if isinstance(module, kinds)), None)
    if first is None:
        return []
    if isinstance(first, nn.Linear):
        return [(first.in_features,), (16, first.in_features)]
    dimensions = len(first.kernel_size)
    return [(first.in_channels, *[size] * dimensions) for size in SIZES[dimensions]]
