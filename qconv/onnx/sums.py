"""Sums of layers' outputs, rounded so that a runtime adds integers."""

import math
import operator
from collections import Counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from .layers import LEAST, Clip, Dequantize, LinearEncode, Quantize, QuantizedConv2d, even_steps, zero_point
from .ranges import Ends

_ADDS = (operator.add, operator.iadd, torch.add, "add", "add_")
_RELUS = (F.relu, torch.relu, torch.relu_, "relu", "relu_")
_UNCHANGED = (nn.Identity, nn.Dropout, nn.Dropout2d)


def round_sums(network: fx.GraphModule, ends: dict[fx.Node, Ends]) -> None:
    """Round the sums of a network to 256 numbers over their range, and what is added where it is not rounded yet.

    Where a quantized layer of step ``s`` reads a sum, its numbers are ``s / k`` apart with an odd ``k``: an edge
    between two of the layer's codes is then an edge between two of the sum's, so that rounding twice gives the trained
    code.

    Args:
        network: its integer layers are `QuantizedConv2d` already; it is changed.
        ends: what its values reached.
    """
    rounder = _Rounder(network, ends)
    for node in list(network.graph.nodes):
        if type(rounder.of(node)) in _UNCHANGED:
            node.replace_all_uses_with(node.args[0])
            network.graph.erase_node(node)
    for node in [each for each in network.graph.nodes if _is_add(each)]:
        if any(rounder.is_rounded(each) for each in node.args):
            for each in dict.fromkeys(node.args):
                if not rounder.is_rounded(each):
                    rounder.round(each, each)
            relu = next(iter(node.users)) if len(node.users) == 1 else None
            # Codes without negative numbers make the ReLU's zeros themselves.
            rounder.round(node, relu if relu is not None and rounder.is_relu(relu) else node)
    network.delete_all_unused_submodules()
    network.graph.lint()
    network.recompile()


def steps_of_a_sum(low: float, high: float, reader: float | None) -> tuple[float, int]:
    """``step, zero point`` of 256 codes from `low` to `high` on the edges of a reader's step, which may be too fine."""
    step, zero = even_steps(low, high)
    ratio = 0 if reader is None else math.floor(reader / step)
    if reader is None or ratio < 1 or step <= LEAST:
        return step, zero
    step = reader / (ratio - 1 + ratio % 2)
    return step, round(-min(low, 0.0) / step)


class _Rounder:
    """Puts a rounding behind a value."""

    def __init__(self, network: fx.GraphModule, ends: dict[fx.Node, Ends]) -> None:
        self.network, self.ends = network, ends
        self.calls = Counter(node.target for node in network.graph.nodes if node.op == "call_module")

    def of(self, node: Any) -> nn.Module | None:
        return self.network.get_submodule(str(node.target)) if node.op == "call_module" else None

    def is_rounded(self, node: fx.Node) -> bool:
        module = self.of(node)
        return isinstance(module.after if isinstance(module, QuantizedConv2d) else module, Dequantize)

    def is_relu(self, node: fx.Node) -> bool:
        return type(self.of(node)) is nn.ReLU or (node.op != "call_module" and node.target in _RELUS)

    def round(self, source: fx.Node, value: fx.Node) -> None:
        """Have codes of `source` stand for `value`, which is `source` or its ReLU."""
        readers = [node for node in value.users if self._encoder(node) is not None]
        encoders: list[Any] = [self._encoder(node) for node in readers]
        step, zero = steps_of_a_sum(*self.ends[value], encoders[0].step if encoders else None)
        name = f"{value.name}_codes"
        self.network.add_submodule(name, Quantize(step, zero))
        self.network.add_submodule(f"{name}_floats", Dequantize(step, zero))
        with self.network.graph.inserting_after(value):
            codes = self.network.graph.call_module(name, (source,))
        with self.network.graph.inserting_after(codes):
            floats = self.network.graph.call_module(f"{name}_floats", (codes,))
        value.replace_all_uses_with(floats, delete_user_cb=lambda user: user is not codes)
        if value is not source:
            self.network.graph.erase_node(value)
        for reader, encode in zip(readers, encoders, strict=True):
            layer: Any = self.of(reader)
            if encode.step == step and zero_point(encode.low) == zero:
                layer.encoder = Clip(encode.low, encode.high)
                reader.replace_input_with(floats, codes)
            else:
                encode.of_codes = True

    def _encoder(self, node: fx.Node) -> LinearEncode | None:
        """What makes the codes of a layer, if all that it reads is this one value."""
        layer = self.of(node)
        if not isinstance(layer, QuantizedConv2d) or self.calls[node.target] != 1:
            return None
        return layer.encoder if isinstance(layer.encoder, LinearEncode) else None


def _is_add(node: fx.Node) -> bool:
    """Whether it adds two values of the network."""
    return (
        node.op in ("call_function", "call_method")
        and node.target in _ADDS
        and len(node.args) == 2
        and all(isinstance(each, fx.Node) for each in node.args)
        and not node.kwargs
    )
