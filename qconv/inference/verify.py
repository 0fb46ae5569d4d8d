"""The proof that a frozen model is the one that was trained."""

import copy
import math
import os
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..convert import to_float
from ..layers import QuantizedLayer
from ..packed import load_packed
from .freeze import FrozenModel, freeze
from .layer_check import LayerCheck, LayerPair

CLOSE = 1e-5  # of the largest output: what float layers may differ by


@dataclass(frozen=True)
class Verification:
    """The result of `verify`; ``print`` shows it as a table.

    Attributes:
        layers: one for each quantized layer, in the order of the model.
        guided: the largest difference of an output where the frozen layers have the trained codes.
        difference: the same where they have their own.
        largest: the largest output.
        decisions: how many inputs get another class (with one output: another sign).
        samples: how many inputs there were.
    """

    layers: tuple[LayerCheck, ...]
    guided: float
    difference: float
    largest: float
    decisions: int
    samples: int

    @property
    def first_difference(self) -> LayerCheck | None:
        """The first layer that is not equal."""
        return next((layer for layer in self.layers if not layer.equal), None)

    @property
    def equal(self) -> bool:
        """Whether all integers are equal, and all floats, the outputs too, within what rounding explains."""
        is_close = self.guided <= tolerance(self.largest) and self.difference < math.inf
        return self.first_difference is None and is_close

    def __str__(self) -> str:
        header = ("layer", "arithmetic", "gives", "codes ≠", "sums ≠", "handed ≠", "error", "of bound", "drift")
        rows: list[tuple[str, ...]] = [header]
        for each in self.layers:
            integer = each.arithmetic != "float"
            counts = [str(number) if integer else "" for number in (each.codes, each.sums)]
            is_floats = each.gives == "floats"
            error = (f"{each.error:.1e}", f"{each.of_bound:.2f}") if is_floats else ("", "")
            drift = f"{each.drift} of {each.elements:,}" if integer else ""
            handed = "" if is_floats else str(each.handed)
            rows.append((each.name, each.arithmetic, each.gives, *counts, handed, *error, drift))
        widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        first = self.first_difference
        verdict = "equal" if self.equal else f"not equal: behind equal layers outputs differ by {self.guided:.1e}"
        if first is not None:
            verdict = f"not equal: '{first.name}' is the first layer that differs"
        lines.append(
            f"{verdict}; on its own codes, outputs differ by up to {self.difference:.1e} of {self.largest:.3g}, "
            f"and {self.decisions} of {self.samples} decisions"
        )
        return "\n".join(lines)


@torch.no_grad()
def verify(
    model: nn.Module, frozen: FrozenModel | str | os.PathLike[str], inputs: Tensor | Iterable[Tensor]
) -> Verification:
    """Compare a trained model with its frozen form, or with a packed file, on real inputs, layer by layer.

    Each frozen layer gets what the trained one sees. Its codes must equal those of the trained quantizer, its sums the
    exact sums of these codes, and the codes that it hands on those that the trained modules behind it give for the
    exact sums in float64. A float may differ from the exact value by 4 units of rounding of the terms that it is made
    of. The frozen network runs as a whole, too, where each layer makes its codes itself and computes with the trained
    ones: a float that lies at the edge between two codes can fall to either side, since float sums depend on their
    order, which may happen to a few codes in a hundred thousand (`LayerCheck.drift`), and the outputs must agree with
    the trained ones. Where it runs on its own codes alone, outputs and decisions are compared, not judged.

    Args:
        model: the trained one.
        frozen: its frozen form; or a packed file, which is loaded and frozen.
        inputs: a batch, or batches.

    Raises:
        ValueError: a frozen model of other layers; no input.
        TypeError: a model whose output is no tensor.
        PackedFileError: a file that is damaged, or of another model.
    """
    if not isinstance(frozen, FrozenModel):
        network = to_float(copy.deepcopy(model))
        frozen = freeze(load_packed(frozen, network))
    modules = dict(model.named_modules(remove_duplicate=False))
    for told in frozen.layers:
        if not isinstance(modules.get(told.name), QuantizedLayer):
            raise ValueError(
                f"the frozen model has a layer '{told.name}', the trained one has no quantized layer there"
            )
    model = copy.deepcopy(model).eval()
    fed = {told.reader for told in frozen.layers if told.reader}
    pairs = {told.name: LayerPair(model, frozen, told, told.name in fed) for told in frozen.layers}
    found = {told.name: LayerCheck(told.name, told.arithmetic, told.gives) for told in frozen.layers}
    guided = difference = largest = 0.0
    decisions = samples = 0
    for batch in (inputs,) if isinstance(inputs, Tensor) else inputs:
        seen, output = _trained(model, batch, pairs)
        if not isinstance(output, Tensor):
            raise TypeError(f"model gives {type(output).__name__}; it must give a tensor")
        own, output_guided = _guided(frozen, batch, pairs, seen)
        output_frozen = frozen(batch)
        for name, pair in pairs.items():
            found[name] = found[name].merged(pair.check(seen[name], own[name]))
        samples += len(batch)
        if output.numel():
            guided = max(guided, _largest_difference(output, output_guided))
            difference = max(difference, _largest_difference(output, output_frozen))
            largest = max(largest, float(output.abs().max()))
            decisions += int((classes(output) != classes(output_frozen)).sum())
    if not samples:
        raise ValueError("inputs must hold at least one sample")
    return Verification(tuple(found.values()), guided, difference, largest, decisions, samples)


def classes(output: Tensor) -> Tensor:
    """The class of each sample; with one output its sign."""
    output = output.flatten(1)
    return output.argmax(1) if output.shape[1] > 1 else (output[:, 0] > 0).long()


def tolerance(largest: float) -> float:
    """What the order of float sums explains of a difference of outputs, of which this is the largest."""
    return CLOSE * (largest + 0.1)


def _largest_difference(output: Tensor, other: Tensor) -> float:
    """Inf where one is NaN."""
    return float((output - other).abs().nan_to_num(torch.inf, torch.inf).max())


def _trained(model: nn.Module, batch: Tensor, pairs: Mapping[str, LayerPair]) -> tuple[dict[str, list[Tensor]], Tensor]:
    """The inputs of the trained layers at each call, and the output."""
    seen: dict[str, list[Tensor]] = {name: [] for name in pairs}

    def watch(inputs: list[Tensor]) -> Any:
        return lambda layer, args: inputs.append(args[0])

    with ExitStack() as hooks:
        for name, pair in pairs.items():
            hooks.callback(pair.layer.register_forward_pre_hook(watch(seen[name])).remove)
        return seen, model(batch)


def _guided(
    frozen: FrozenModel, batch: Tensor, pairs: Mapping[str, LayerPair], seen: Mapping[str, list[Tensor]]
) -> tuple[dict[str, list[Tensor]], Tensor]:
    """The codes that the frozen network makes for its layers, and its output where they get the trained ones."""
    own: dict[str, list[Tensor]] = {name: [] for name in pairs}

    def guide(pair: LayerPair, codes: list[Tensor], inputs: list[Tensor]) -> Any:
        def hook(layer: Any, args: tuple[Tensor, ...]) -> Tensor:
            codes.append(layer.encode(args[0]))
            return pair.given(inputs[len(codes) - 1]) if len(codes) <= len(inputs) else args[0]

        return hook

    with ExitStack() as hooks:
        for name, pair in pairs.items():
            if pair.integer is not None:
                hook = guide(pair, own[name], seen[name])
                hooks.callback(pair.integer.register_forward_pre_hook(hook).remove)
        return own, frozen(batch)
