"""Running a frozen network on its own codes, and the trained one on the same codes in exact arithmetic."""

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..program.operations import ConvBits, ConvCodes, ConvFloats
from .build import FrozenModel
from .float_error import Rounded, Rounding, laid_out
from .layer_check import Call, LayerCheck, LayerPair
from .layer_input import check_input

Calls = dict[str, list[Call]]


class Own(NamedTuple):
    """The input of a layer in a frozen network's own run: codes, or floats."""

    values: Tensor
    is_codes: bool


def calls_and_output(model: nn.Module, batch: Tensor, layers: Mapping[str, nn.Module]) -> tuple[Calls, Tensor]:
    """The calls of some layers, and the output."""
    seen: Calls = {name: [] for name in layers}

    def watch(calls: list[Call]) -> Any:
        return lambda layer, args, kwargs: calls.append(Call(args, kwargs).kept())

    with ExitStack() as hooks:
        for name, layer in layers.items():
            hooks.callback(layer.register_forward_pre_hook(watch(seen[name]), with_kwargs=True).remove)
        return seen, model(batch)


def own_run(frozen: FrozenModel, batch: Tensor, pairs: Mapping[str, LayerPair]) -> tuple[dict[str, list[Own]], Tensor]:
    """The inputs of all layers when the frozen network runs as a whole, and its output.

    Where it runs as a plan, the inputs are those of its program, which is equal to it, bit for bit.
    """
    program = frozen.program(batch)
    if program is None:
        calls, output = calls_and_output(frozen, batch, {name: pair.whole for name, pair in pairs.items()})
        inputs = {name: [_received(pairs[name], call) for call in of_layer] for name, of_layer in calls.items()}
        return inputs, output
    inputs = {name: [] for name in pairs}
    values = program.values(batch)
    for operation in program.operations:
        name = "" if "" in inputs else operation.origin  # a model that is a layer
        if isinstance(operation, ConvBits | ConvCodes | ConvFloats) and name in inputs:
            given = values[operation.inputs[0]]
            if isinstance(operation, ConvCodes):
                given = given.long() - operation.zero
            inputs[name].append(Own(given, not isinstance(operation, ConvFloats)))
    return inputs, frozen(batch)


def _received(pair: LayerPair, call: Call) -> Own:
    codes = pair.codes_of(call.input) if call.input.numel() else None
    return Own(call.input, False) if codes is None else Own(codes, True)


class Guided:
    """Runs the trained model in exact arithmetic, with the frozen layers' inputs in its layers.

    Attributes:
        found: for each layer, its inputs compared with those that the trained modules before it compute from the codes.
        last: the name of the last layer that was called.
    """

    def __init__(self, model: nn.Module, pairs: Mapping[str, LayerPair], own: dict[str, list[Own]]) -> None:
        self.model, self.pairs = model, pairs
        self.found = {name: pair.nothing for name, pair in pairs.items()}
        self.last = ""
        self._own = {name: list(inputs) for name, inputs in own.items()}
        self._rounding = Rounding()
        self._running: list[tuple[LayerPair, Tensor, Tensor | None]] = []

    def run(self, batch: Tensor) -> Rounded:
        """The output."""
        with ExitStack() as hooks:
            for name, pair in self.pairs.items():
                before = pair.layer.register_forward_pre_hook(self._before(name, pair), with_kwargs=True)
                hooks.callback(before.remove)
                hooks.callback(pair.layer.register_forward_hook(self._after).remove)
            with self._rounding:
                output = self.model(batch)
        for name, left in self._own.items():
            count = sum(own.values.numel() for own in left)  # of calls that the trained model does not make
            self._add(name, {"drift": count, "unexplained": count, "elements": count})
        return self._rounding.of(output)

    def _before(self, name: str, pair: LayerPair) -> Any:
        def hook(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            self._rounding.pause()
            self.last = name
            input = Call(args, kwargs).input
            wanted = self._rounding.of(input)
            own, is_codes = self._own[name].pop(0) if self._own[name] else Own(input.new_zeros(0), False)
            if own.numel() == input.numel():  # a linear layer's rows are images of one pixel
                own = own.reshape(input.shape)
            self._add(name, check_input(pair.layer, wanted, own, is_codes))
            codes = own if is_codes and own.shape == input.shape else None
            if own.is_floating_point() and own.shape == input.shape and codes is None:
                input = laid_out(own, input)  # the trained modules may read its strides
            self._running.append((pair, input, codes))
            return ((input, *args[1:]), kwargs) if args else (args, {**kwargs, "input": input})

        return hook

    def _after(self, layer: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        pair, input, codes = self._running.pop()
        rounded = pair.result(input, codes, output)
        output = output if codes is None else torch.empty_like(output).copy_(rounded.exact)
        self._rounding.set(output, rounded, pair.terms)
        self._rounding.resume()
        return output

    def _add(self, name: str, counts: dict[str, Any]) -> None:
        told = self.pairs[name].nothing
        self.found[name] = self.found[name].merged(LayerCheck(told.name, told.arithmetic, told.gives, **counts))
