"""Sums of layers' outputs, rounded so that a runtime adds integers."""

import math
import operator
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from ..inference.adapters import Padded
from ..inference.rewrite import UNCHANGED
from ..inference.tracing import writes_in_place
from .eight_bit_codes import LEAST, Clip, Dequantize, LinearEncode, Quantize, even_steps, zero_point
from .layer_nodes import QuantizedConv2d
from .ranges import Ends

_ADDS = (operator.add, operator.iadd, torch.add, "add", "add_")
_RELUS = (F.relu, torch.relu, torch.relu_, "relu", "relu_")


def round_sums(network: fx.GraphModule, ends: dict[fx.Node, Ends]) -> None:
    """Round the sums of a network, and their terms that are not rounded yet, to 256 numbers over their range.

    If a quantized layer of step ``s`` reads a sum (the first one, if several do), the numbers of the sum are ``s / k``
    apart with an odd ``k``. An edge between two codes of the layer is then an edge between two codes of the sum, so
    rounding twice gives the right code. Sums stay as they are if the network changes a value in place and reads it
    again.

    Args:
        network: a network whose integer layers are `QuantizedConv2d` already; it is changed.
        ends: the ranges of its values.
    """
    rounder = _Rounder(network, ends)
    rounder.drop_unchanged()
    if any(rounder.changes_what_is_read(node) for node in network.graph.nodes):
        return
    sums = [node for node in network.graph.nodes if rounder.is_sum(node)]
    for node in sums:
        if any(rounder.is_rounded(term) for term in node.all_input_nodes):
            for term in node.all_input_nodes:
                if not rounder.is_rounded(term):
                    rounder.round(term, term, [user for user in term.users if user in sums or rounder.encoder(user)])
            relu = next(iter(node.users)) if len(node.users) == 1 else None
            # Codes without negative numbers produce the ReLU's zeros themselves.
            value = relu if relu is not None and rounder.is_relu(relu) else node
            rounder.round(node, value, list(value.users))
    for node in network.graph.nodes:
        encoder = rounder.encoder(node)
        if encoder is not None and rounder.is_rounded(node.args[0]):
            encoder.of_codes = True
    network.delete_all_unused_submodules()
    network.graph.lint()
    network.recompile()


def steps_of_a_sum(low: float, high: float, reader: float | None) -> tuple[float, int]:
    """``step, zero point`` of 256 codes from `low` to `high` on the edges of a reader's step, if it is not too fine."""
    step, zero = even_steps(low, high)
    ratio = 0 if reader is None else math.floor(reader / step)
    if reader is None or ratio < 1 or step <= LEAST:
        return step, zero
    step = reader / (ratio - 1 + ratio % 2)
    return step, round(-min(low, 0.0) / step)


class _Rounder:
    """Inspects the nodes of a network and inserts roundings after them."""

    def __init__(self, network: fx.GraphModule, ends: dict[fx.Node, Ends]) -> None:
        self.network, self.ends = network, ends
        self.calls = Counter(node.target for node in network.graph.nodes if node.op == "call_module")
        self.order = {node: place for place, node in enumerate(network.graph.nodes)}

    def of(self, node: Any) -> nn.Module | None:
        """Return the module that a node calls."""
        return self.network.get_submodule(str(node.target)) if node.op == "call_module" else None

    def drop_unchanged(self) -> None:
        """Remove modules that return their input unchanged."""
        for node in list(self.network.graph.nodes):
            if type(self.of(node)) in UNCHANGED:
                node.replace_all_uses_with(node.all_input_nodes[0])
                self.network.graph.erase_node(node)

    def changes_what_is_read(self, node: fx.Node) -> bool:
        """Whether a node changes its input in place and another node reads that afterwards."""
        if not writes_in_place(self.network, node) or not node.all_input_nodes:
            return False
        return any(self.order[user] > self.order[node] for user in node.all_input_nodes[0].users)

    def is_sum(self, node: fx.Node) -> bool:
        """Whether it adds two float tensors of the network."""
        return (
            node.op in ("call_function", "call_method")
            and node.target in _ADDS
            and len(node.args) == 2
            and not node.kwargs
            and all(isinstance(term, fx.Node) and term in self.ends for term in (node, *node.args))
        )

    def is_rounded(self, node: Any) -> bool:
        """Whether its output comes from codes."""
        module = self.of(node)
        module = module.layer if isinstance(module, Padded) else module
        return isinstance(module.after if isinstance(module, QuantizedConv2d) else module, Dequantize)

    def is_relu(self, node: fx.Node) -> bool:
        return type(self.of(node)) is nn.ReLU or (node.op != "call_module" and node.target in _RELUS)

    def encoder(self, node: fx.Node) -> LinearEncode | None:
        """The quantizing module of a layer that is called once and has even steps; else None."""
        layer = self.of(node)
        if not isinstance(layer, QuantizedConv2d) or self.calls[node.target] != 1:
            return None
        return layer.encoder if isinstance(layer.encoder, LinearEncode) else None

    def round(self, source: fx.Node, value: fx.Node, users: Iterable[fx.Node]) -> None:
        """Represent `value`, which is `source` or its ReLU, by codes of `source` where `users` read it."""
        readers = {node: encoder for node in users if (encoder := self.encoder(node)) is not None}
        first = next(iter(readers.values()), None)
        step, zero = steps_of_a_sum(*self.ends[value], None if first is None else first.step)
        name, graph = f"{value.name}_codes", self.network.graph
        self.network.add_submodule(name, Quantize(step, zero))
        self.network.add_submodule(f"{name}_floats", Dequantize(step, zero))
        with graph.inserting_after(value):
            codes = graph.call_module(name, (source,))
        with graph.inserting_after(codes):
            floats = graph.call_module(f"{name}_floats", (codes,))
        for user in users:
            encoder = readers.get(user)
            if encoder is not None and (encoder.step, zero_point(encoder.low)) == (step, zero):
                layer: Any = self.of(user)
                layer.encoder = Clip(encoder.low, encoder.high)
                user.replace_input_with(value, codes)
            else:
                user.replace_input_with(value, floats)
        if value is not source:
            graph.erase_node(value)
