"""The ranges of the values in a network."""

import math
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from ..inference.frozen_layers import IntegerConv2d
from ..inference.parts import name_in_model

Ends = tuple[float, float]  # the smallest and the largest number


class Ranges(NamedTuple):
    """The smallest and largest outputs.

    Attributes:
        layers: by the names of integer layers; layers that were never called are missing.
        nodes: by the nodes of a traced network.
    """

    layers: dict[str, Ends]
    nodes: dict[fx.Node, Ends]


def ranges(network: nn.Module, example: Tensor) -> Ranges:
    """Return the ends of all values that a frozen network computes for `example`."""
    ends = Ranges({}, {})

    def see(name: str) -> Any:
        return lambda module, args, output: _widen(ends.layers, name, output)

    run: Any = _Interpreter(network, ends.nodes).run if isinstance(network, fx.GraphModule) else network
    with ExitStack() as stack:
        for name, module in network.named_modules():
            if isinstance(module, IntegerConv2d):
                stack.callback(module.register_forward_hook(see(name_in_model(name))).remove)
        for batch in example.split(64):
            run(batch.contiguous(memory_format=torch.channels_last) if batch.ndim == 4 else batch)
    return ends


class _Interpreter(fx.Interpreter):
    """Records every value of a traced network."""

    def __init__(self, network: fx.GraphModule, ends: dict[fx.Node, Ends]) -> None:
        super().__init__(network)
        self.ends = ends

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if isinstance(value, Tensor) and value.is_floating_point():
            _widen(self.ends, n, value)
        return value


def _widen(ends: dict[Any, Ends], key: Any, value: Tensor) -> None:
    if value.numel():
        low, high = ends.get(key, (math.inf, -math.inf))
        ends[key] = min(low, float(value.min())), max(high, float(value.max()))
