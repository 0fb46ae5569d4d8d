"""One frozen layer beside the trained one."""

import copy
import math
from dataclasses import dataclass, fields, replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..layers import QConv1d, QConv2d, QConv3d, QLinear
from ..quantizers.base import Codes
from .freeze import FrozenModel
from .layers import BinaryConv2d, IntegerLayer
from .operators import code_dtype, unpack_signs
from .rewrite import Frozen, distance_name

EPS = 2.0**-24
# For each code there is: how many of a layer's codes may lie at an edge between two. For each unit of a code that is as
# fine as floats are rounded: what it may be off by.
STRAYED = 1e-5
FEW = 3


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
        of_bound: the largest part of the allowed difference that was used, 1 at the limit.
        drift: how many of its input's codes differ where the frozen network makes them itself, behind layers that have
            the trained codes; of a shift layer, by more than the rounding of floats.
        of_drift: the part of the allowed drift that was used.
        elements: how many codes there are.
    """

    name: str
    arithmetic: str
    gives: str
    codes: int = 0
    sums: int = 0
    handed: int = 0
    error: float = 0.0
    of_bound: float = 0.0
    drift: int = 0
    of_drift: float = 0.0
    elements: int = 0

    @property
    def equal(self) -> bool:
        """Integers equal, floats within what rounding explains."""
        return self.codes == self.sums == self.handed == 0 and self.of_bound <= 1 and self.of_drift <= 1

    def merged(self, other: "LayerCheck") -> "LayerCheck":
        """Of two batches."""
        merged: dict[str, Any] = {}
        for name in (each.name for each in fields(self) if each.type is not str):
            own, its = getattr(self, name), getattr(other, name)
            merged[name] = own + its if isinstance(own, int) else _larger(own, its)
        return replace(self, **merged)


class LayerPair:
    """A trained layer, its frozen form, and the modules behind it that the frozen form does the work of, in float64."""

    def __init__(self, model: nn.Module, frozen: FrozenModel, told: Frozen, is_fed: bool) -> None:
        self.told, self.is_fed = told, is_fed
        self.layer = cast(Any, model.get_submodule(told.name))
        self.whole = frozen.find(told.name)
        self.folded = [copy.deepcopy(model.get_submodule(name)).double() for name in told.folded]
        self.next = cast(Any, model.get_submodule(told.reader)).input_quantizer if told.reader else None
        self.integer: Any = None
        if told.arithmetic != "float":
            self.integer = next(module for module in self.whole.modules() if isinstance(module, IntegerLayer))
        if told.gives == "distances":
            self.distance = frozen.find(distance_name(told.name))

    def given(self, input: Tensor) -> Tensor:
        """What the frozen layer gets where the trained one gets `input`: floats, or codes of the layer before it."""
        padded = self._padded(input)
        if self.is_fed:
            values = self._codes(padded).values
            if isinstance(self.integer, BinaryConv2d):
                return values.float()
            return values.to(code_dtype(int(values.min()) if values.numel() else 0))
        return padded if isinstance(self.layer, QConv2d) else padded.reshape(-1, padded.shape[-1], 1, 1)

    def check(self, inputs: list[Tensor], own: list[Tensor]) -> LayerCheck:
        """What is found.

        Args:
            inputs: of the trained layer at each call.
            own: the codes that the frozen network makes for the layer at each call; none for a float layer.
        """
        found = LayerCheck(self.told.name, self.told.arithmetic, self.told.gives)
        is_fine = self.told.arithmetic == "shift"  # its codes are as fine as floats are rounded
        largest = 0.0
        for call, input in enumerate(inputs):
            if self.told.arithmetic == "float":
                found = found.merged(self._check_float(input))
                continue
            padded = self._padded(input)
            codes = self._codes(padded)
            values = codes.values.double()
            found = found.merged(self._check_integer(self.given(input), padded, values, codes.scale.double()))
            largest = max(largest, float(values.abs().max()) if values.numel() else 0.0)
            finest = 1 + STRAYED * largest if is_fine else 0.0
            near = (self._like(padded, own[call]) - values).abs() <= finest if call < len(own) else values.new_zeros(1)
            found = replace(found, drift=found.drift + values.numel() - int(near.sum()))  # NaN is near nothing
        allowed = FEW if is_fine else FEW + STRAYED * (1 + largest) * found.elements
        return replace(found, of_drift=found.drift / allowed)

    def _check_integer(self, given: Tensor, padded: Tensor, values: Tensor, scale: Tensor) -> LayerCheck:
        """The layer on the codes `values` of an input."""
        weight = self.layer.weight_codes()
        exact = self._apply(values, weight.values.double())
        found = LayerCheck(
            *(self.told.name, self.told.arithmetic, self.told.gives),
            codes=int((self._like(padded, self.integer.encode(given)) != values).sum()),
            sums=int((self._like(exact, self.integer.accumulate(given)) != exact).sum()),
            elements=values.numel(),
        )
        scale = (scale * weight.scale.double()).flatten()
        terms = exact * self._per_channel(scale, exact)
        bias = None if self.layer.bias is None or self.layer.scheme.scale_map else self.layer.bias.double()
        value = terms if bias is None else terms + self._per_channel(bias, exact)
        got = self.integer(given)
        if self.next is not None:
            for module in self.folded:
                value = module(value)
            wanted = self.next.codes(value, *self.next.tensors()).values
            if self.told.gives == "bits":
                got = unpack_signs(got, wanted.shape[1])
            elif self.told.gives == "distances":
                got = torch.where(self.distance(got) < 0, -1, 1)
            return replace(found, handed=int((got != wanted).sum()))
        magnitude = terms.abs() if bias is None else terms.abs() + self._per_channel(bias, exact).abs()
        value, magnitude = self._folded(value, magnitude)
        return _with_error(found, self._like(exact, got), value, 4 * EPS * magnitude)

    def _check_float(self, input: Tensor) -> LayerCheck:
        """A float layer against float64; sums of K products may be rounded K times, in any order."""
        layer = self.layer
        if isinstance(layer, QConv1d | QConv2d | QConv3d | QLinear) and not layer.scheme.scale_map:
            padded = self._padded(input)
            input_q = layer.input_quantizer.quantize(padded, *layer.input_quantizer.tensors()).double()
            weight, bias = layer.quantized_weight().double(), None if layer.bias is None else layer.bias.double()
            wanted = self._apply(input_q, weight, bias)
            magnitude = self._apply(input_q.abs(), weight.abs(), None if bias is None else bias.abs())
            terms = weight[:1].numel() + 8
        else:  # it is the trained layer itself
            wanted = layer(input).double()
            magnitude, terms = wanted.abs().max().expand_as(wanted) if wanted.numel() else wanted, 64
        wanted, magnitude = self._folded(wanted, magnitude)
        found = LayerCheck(self.told.name, "float", self.told.gives)
        return _with_error(found, self.whole(input), wanted, terms * EPS * magnitude)

    def _folded(self, value: Tensor, magnitude: Tensor) -> tuple[Tensor, Tensor]:
        """The value behind the folded modules, and the magnitude of the terms that it is made of."""
        for module in self.folded:
            value, zero = module(value), module(torch.zeros_like(value))
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None:
                slope = (module(torch.ones_like(value)) - zero).abs()
                mean = self._per_channel(module.running_mean, value)
                magnitude = magnitude * slope + zero.abs() + (slope * mean).abs()
        return value, magnitude

    def _codes(self, padded: Tensor) -> Codes:
        """The trained codes of an input."""
        return self.layer.input_quantizer.codes(padded, *self.layer.input_quantizer.tensors())

    def _padded(self, input: Tensor) -> Tensor:
        if isinstance(self.layer, QConv2d) and self.layer.padding_mode != "zeros":
            return F.pad(input, self.layer.padding_sides, mode=self.layer.padding_mode)
        return input

    def _apply(self, values: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """The layer's operation on numbers, by the layer's own code."""
        if isinstance(self.layer, QLinear):
            return F.linear(values, weight, bias)
        return self.layer.op.forward(values, weight, bias)

    def _per_channel(self, values: Tensor, output: Tensor) -> Tensor:
        """One number, or one for each channel, against an output."""
        return values.view(-1, *[1] * (output.ndim - 2)) if isinstance(self.layer, QConv2d) else values

    def _like(self, reference: Tensor, integers: Tensor) -> Tensor:
        """A linear layer's integers, which are (rows, features, 1, 1), in the shape of its input or output."""
        return integers.reshape(reference.shape) if isinstance(self.layer, QLinear) else integers


def _with_error(found: LayerCheck, got: Tensor, wanted: Tensor, allowed: Tensor) -> LayerCheck:
    if not got.numel():
        return found
    error = (got.double() - wanted).abs()
    return replace(found, error=float(error.max()), of_bound=float((error / (allowed + 1e-37)).max()))


def _larger(first: float, second: float) -> float:
    """The larger one; NaN if one is."""
    return first if first >= second or math.isnan(first) else second
