"""Running a frozen network on its own codes, and the trained one on the same codes in exact arithmetic."""

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from .float_error import Rounded, Rounding, laid_out
from .layer_check import Call, LayerCheck, LayerPair
from .layer_input import check_input

Calls = dict[str, list[Call]]


def calls_and_output(model: nn.Module, batch: Tensor, layers: Mapping[str, nn.Module]) -> tuple[Calls, Tensor]:
    """The calls of some layers, and the output."""
    seen: Calls = {name: [] for name in layers}

    def watch(calls: list[Call]) -> Any:
        return lambda layer, args, kwargs: calls.append(Call(args, kwargs).kept())

    with ExitStack() as hooks:
        for name, layer in layers.items():
            hooks.callback(layer.register_forward_pre_hook(watch(seen[name]), with_kwargs=True).remove)
        return seen, model(batch)


class Guided:
    """Runs the trained model in exact arithmetic, with the frozen layers' inputs in its layers.

    Attributes:
        found: for each layer, its inputs compared with those that the trained modules before it compute from the codes.
        last: the name of the last layer that was called.
    """

    def __init__(self, model: nn.Module, pairs: Mapping[str, LayerPair], own: Calls) -> None:
        self.model, self.pairs = model, pairs
        self.found = {name: pair.nothing for name, pair in pairs.items()}
        self.last = ""
        self._own = {name: [call.input for call in calls] for name, calls in own.items()}
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
            count = sum(values.numel() for values in left)  # of calls that the trained model does not make
            self._add(name, {"drift": count, "unexplained": count, "elements": count})
        return self._rounding.of(output)

    def _before(self, name: str, pair: LayerPair) -> Any:
        def hook(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            self._rounding.pause()
            self.last = name
            input = Call(args, kwargs).input
            wanted = self._rounding.of(input)
            own = self._own[name].pop(0) if self._own[name] else input.new_zeros(0)
            codes = pair.codes_of(own) if own.numel() else None
            self._add(name, check_input(pair.layer, wanted, own if codes is None else codes, codes is not None))
            if codes is not None and codes.shape != input.shape:
                codes = None
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
