"""The proof that a frozen model is the one that was trained."""

import copy
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..convert import to_float
from ..layers import QConv1d, QConv2d, QConv3d, QLinear, QuantizedLayer
from ..packed import load_packed
from .freeze import Frozen, FrozenModel, freeze
from .layers import IntegerConv2d, IntegerLayer
from .operators import code_dtype, unpack_signs

EPS = 2.0**-24
CLOSE = 1e-4  # of the largest output: what float layers may differ by
MOST_STRAYED = 1e-3  # of the codes of a layer: those that lie at the edge between two, where nothing drifted before


@dataclass(frozen=True)
class LayerCheck:
    """What was found at one layer, given the inputs that the trained layer sees.

    Attributes:
        name: of the layer.
        arithmetic: "binary", "integer", "shift" or "float".
        gives: what it hands on.
        codes: how many codes of the input differ from the trained quantizer's.
        sums: how many integer sums differ from the exact ones of the trained codes.
        handed: how many codes that it hands on differ from those of the exact sums.
        error: the largest difference of a float that it hands on from the exact value.
        bound: the largest part of the allowed difference that was used, 1 at the limit.
        drift: how many of its input's codes differ where both networks run as a whole, and so each on its own floats.
        strayed: the largest share of them among the inputs of a batch in which no layer before it drifts.
        elements: how many codes there are.
    """

    name: str
    arithmetic: str
    gives: str
    codes: int = 0
    sums: int = 0
    handed: int = 0
    error: float = 0.0
    bound: float = 0.0
    drift: int = 0
    strayed: float = 0.0
    elements: int = 0

    @property
    def equal(self) -> bool:
        """Integers equal, floats within what rounding explains."""
        return self.codes == self.sums == self.handed == 0 and self.bound <= 1 and self.strayed <= MOST_STRAYED

    def merged(self, other: "LayerCheck") -> "LayerCheck":
        """Of two batches."""
        added = {
            name: getattr(self, name) + getattr(other, name)
            for name in ("codes", "sums", "handed", "drift", "elements")
        }
        return replace(
            self,
            **added,
            error=_larger(self.error, other.error),
            bound=_larger(self.bound, other.bound),
            strayed=max(self.strayed, other.strayed),
        )


@dataclass(frozen=True)
class Verification:
    """The result of `verify`; ``print`` shows it as a table.

    Attributes:
        layers: one for each quantized layer, in the order of the model.
        difference: the largest difference of an output.
        undrifted: the same among the samples in which no code drifts.
        largest: the largest output.
        decisions: how many inputs get another class.
        samples: how many inputs there were.
    """

    layers: tuple[LayerCheck, ...]
    difference: float
    undrifted: float
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
        return self.first_difference is None and self.undrifted <= CLOSE * (self.largest + 1)

    def __str__(self) -> str:
        header = ("layer", "arithmetic", "gives", "codes ≠", "sums ≠", "handed ≠", "error", "of bound", "drift")
        rows: list[tuple[str, ...]] = [header]
        for each in self.layers:
            integer = each.arithmetic != "float"
            counts = [str(number) if integer else "" for number in (each.codes, each.sums)]
            is_codes = each.gives in ("codes", "bits")
            error = ("", "") if is_codes else (f"{each.error:.1e}", f"{each.bound:.2f}")
            drift = f"{each.drift} of {each.elements:,}" if integer else ""
            rows.append(
                (each.name, each.arithmetic, each.gives, *counts, str(each.handed) if is_codes else "", *error, drift)
            )
        widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        first = self.first_difference
        verdict = "equal" if self.equal else "not equal: outputs differ behind equal layers"
        if first is not None:
            verdict = f"not equal: '{first.name}' is the first layer that differs"
        lines.append(
            f"{verdict}; outputs differ by up to {self.difference:.1e} of {self.largest:.3g}, "
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
    of. Both networks run as a whole, too: there a float that lies at the edge between two codes can fall to either side
    (`LayerCheck.drift`), since float sums depend on their order. The first layer where that happens may do so for one
    code in a thousand, and outputs of samples without drift must agree.

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
    found = {told.name: LayerCheck(told.name, told.arithmetic, told.gives) for told in frozen.layers}
    difference = undrifted = largest = 0.0
    decisions = samples = 0
    for batch in (inputs,) if isinstance(inputs, Tensor) else inputs:
        seen, output = _watch(model, frozen, batch)
        seen_frozen, output_frozen = _watch_frozen(frozen, batch)
        if not isinstance(output, Tensor):
            raise TypeError(f"model gives {type(output).__name__}; it must give a tensor")
        drifted = torch.zeros(len(batch), dtype=torch.bool)
        for told in frozen.layers:
            check, strays = _check(model, frozen, told, seen[told.name], seen_frozen.get(told.name))
            if strays is not None and len(strays) == len(batch):
                if not drifted.any() and told.arithmetic != "shift":  # whose codes are as fine as floats are rounded
                    check = replace(check, strayed=check.drift / max(check.elements, 1))
                drifted |= strays
            found[told.name] = found[told.name].merged(check)
        samples += len(batch)
        if output.numel():
            error = (output - output_frozen).abs().flatten(1).nan_to_num(torch.inf, torch.inf).amax(1)
            difference = max(difference, float(error.max()))
            undrifted = max(undrifted, 0.0 if bool(drifted.all()) else float(error[~drifted].max()))
            largest = max(largest, float(output.abs().max()))
            decisions += int((output.flatten(1).argmax(1) != output_frozen.flatten(1).argmax(1)).sum())
    if not samples:
        raise ValueError("inputs must hold at least one sample")
    return Verification(tuple(found.values()), difference, undrifted, largest, decisions, samples)


def _larger(first: float, second: float) -> float:
    """The larger one; NaN if one is."""
    return first if first >= second or math.isnan(first) else second


def _watch(model: nn.Module, frozen: FrozenModel, batch: Tensor) -> tuple[dict[str, list[Tensor]], Tensor]:
    """The inputs of the quantized layers at each call, and the output."""
    layers = {told.name: model.get_submodule(told.name) for told in frozen.layers}
    return _run(model, batch, layers, lambda _, given: given)


def _watch_frozen(frozen: FrozenModel, batch: Tensor) -> tuple[dict[str, list[Tensor]], Tensor]:
    """The codes that integer layers work on at each call, and the output."""
    layers = {told.name: _integer_layer(frozen, told) for told in frozen.layers if told.arithmetic != "float"}
    return _run(frozen, batch, layers, lambda layer, given: layer.encode(given))


def _run(
    model: nn.Module, batch: Tensor, layers: Mapping[str, nn.Module], look: Callable[[Any, Tensor], Tensor]
) -> tuple[dict[str, list[Tensor]], Tensor]:
    seen: dict[str, list[Tensor]] = {name: [] for name in layers}

    def watch(layer: nn.Module, inputs: list[Tensor]) -> RemovableHandle:
        return layer.register_forward_pre_hook(lambda layer, args: inputs.append(look(layer, args[0])))

    handles = [watch(layer, seen[name]) for name, layer in layers.items()]
    try:
        return seen, model(batch)
    finally:
        for handle in handles:
            handle.remove()


def _integer_layer(frozen: FrozenModel, told: Frozen) -> IntegerLayer:
    modules = frozen.network.get_submodule(told.name).modules()
    return next(module for module in modules if isinstance(module, IntegerLayer))


def _check(
    model: nn.Module, frozen: FrozenModel, told: Frozen, inputs: list[Tensor], own: list[Tensor] | None
) -> tuple[LayerCheck, Tensor | None]:
    """What is found, and which samples have a code that drifts; None for a float layer."""
    layer = cast(Any, model.get_submodule(told.name))
    check = LayerCheck(told.name, told.arithmetic, told.gives)
    strays: Tensor | None = None
    for call, input in enumerate(inputs):
        if told.arithmetic == "float":
            check = check.merged(_check_float(model, frozen, told, layer, input))
            continue
        new = _integer_layer(frozen, told)
        padded = _padded(layer, input)
        codes = layer.input_quantizer.codes(padded, *layer.input_quantizer.tensors())
        values = codes.values.double()
        weight = layer.weight_codes()
        exact = _apply(layer, values, weight.values.double())
        given = padded if isinstance(layer, QConv2d) else padded.reshape(-1, padded.shape[-1], 1, 1)
        if isinstance(new, IntegerConv2d) and new.encoder is None:  # the layer before it makes its codes
            given = values.to(code_dtype(int(values.min()) if values.numel() else 0))
        encoded = _like_input(layer, new.encode(given), padded)
        sums = _like_output(layer, new.accumulate(given), padded)
        own_codes = values if own is None else _like_input(layer, own[call], padded)
        differs = (own_codes != values).flatten(1)
        strays = differs.any(1) if strays is None or len(strays) != len(differs) else strays | differs.any(1)
        scale = (codes.scale.double() * weight.scale.double()).flatten()
        handed, error, used = _check_output(model, told, layer, new, given, exact, scale, padded)
        check = check.merged(
            LayerCheck(
                *(told.name, told.arithmetic, told.gives),
                codes=int((encoded != values).sum()),
                sums=int((sums != exact).sum()),
                handed=handed,
                error=error,
                bound=used,
                drift=int(differs.sum()),
                elements=values.numel(),
            )
        )
    return check, strays


def _check_output(
    model: nn.Module,
    told: Frozen,
    layer: Any,
    new: IntegerLayer,
    given: Tensor,
    exact: Tensor,
    scale: Tensor,
    padded: Tensor,
) -> tuple[int, float, float]:
    """Codes that differ; the largest error, and the part of what is allowed."""
    dim = 1 if isinstance(layer, QConv2d) else -1
    shape = [1] * exact.ndim
    shape[dim] = -1
    terms = exact * scale.view(shape) if scale.numel() > 1 else exact * scale
    value = terms if layer.bias is None or layer.scheme.scale_map else terms + layer.bias.double().view(shape)
    magnitude = terms.abs() + (0 if layer.bias is None else layer.bias.double().view(shape).abs())
    for name in told.folded:
        module = copy.deepcopy(model.get_submodule(name)).double()
        before, value = value, module(value)
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            zero = module(torch.zeros_like(before))
            slope = (module(torch.ones_like(before)) - zero).abs()
            magnitude = magnitude * slope + zero.abs() + (slope * module.running_mean.view(shape)).abs()  # pyright: ignore
    if told.gives == "distances":
        return 0, 0.0, 0.0  # the layer behind sees what they are good for
    if told.gives in ("bits", "codes"):
        quantizer = cast(Any, model.get_submodule(told.reader)).input_quantizer
        wanted = quantizer.codes(value, *quantizer.tensors()).values
        got = new(given)
        if told.gives == "bits":
            got = unpack_signs(got, wanted.shape[1])
        return int((got != wanted).sum()), 0.0, 0.0
    error = (_like_output(layer, new(given), padded).double() - value).abs()
    allowed = 4 * EPS * magnitude + 1e-37
    return (0, float(error.max()), float((error / allowed).max())) if error.numel() else (0, 0.0, 0.0)


def _check_float(model: nn.Module, frozen: FrozenModel, told: Frozen, layer: Any, input: Tensor) -> LayerCheck:
    """A float layer against float64; sums of K products may be rounded K times, in any order."""
    got = frozen.network.get_submodule(told.name)(input).double()
    if not got.numel():
        return LayerCheck(told.name, "float", told.gives)
    if isinstance(layer, QConv1d | QConv2d | QConv3d | QLinear) and not layer.scheme.scale_map:
        padded = _padded(layer, input)
        input_q = layer.input_quantizer.quantize(padded, *layer.input_quantizer.tensors()).double()
        weight, bias = layer.quantized_weight().double(), None if layer.bias is None else layer.bias.double()
        wanted = _apply(layer, input_q, weight, bias)
        magnitude = _apply(layer, input_q.abs(), weight.abs(), None if bias is None else bias.abs())
        terms = weight[:1].numel() + 8
    else:  # it is the trained layer itself
        wanted = layer(input).double()
        magnitude, terms = wanted.abs().max(), 64
    for name in told.folded:
        norm = copy.deepcopy(model.get_submodule(name)).double()
        shift = norm(torch.zeros_like(wanted))
        slope = (norm(torch.ones_like(wanted)) - shift).abs()
        wanted, magnitude = norm(wanted), magnitude * slope + shift.abs() + slope
    error = (got - wanted).abs()
    used = error / (terms * EPS * magnitude + 1e-37)
    return LayerCheck(told.name, "float", told.gives, error=float(error.max()), bound=float(used.max()))


def _padded(layer: QuantizedLayer, input: Tensor) -> Tensor:
    if isinstance(layer, QConv2d) and layer.padding_mode != "zeros":
        return F.pad(input, layer.padding_sides, mode=layer.padding_mode)
    return input


def _apply(layer: QuantizedLayer, values: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The layer's operation on numbers, by the layer's own code."""
    if isinstance(layer, QLinear):
        return F.linear(values, weight, bias)
    return cast(Any, layer).op.forward(values, weight, bias)


def _like_input(layer: QuantizedLayer, codes: Tensor, input: Tensor) -> Tensor:
    return codes.reshape(input.shape) if isinstance(layer, QLinear) else codes


def _like_output(layer: QuantizedLayer, sums: Tensor, input: Tensor) -> Tensor:
    return sums.reshape(*input.shape[:-1], -1) if isinstance(layer, QLinear) else sums
