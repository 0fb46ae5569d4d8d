"""Comparison of a frozen layer with the trained one."""

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ..kernels.bits import unpack_signs
from ..layers import QConv1d, QConv2d, QConv3d, QLinear
from ..quantizers.base import Codes, Quantizer
from .adapters import Distance
from .build import FrozenModel
from .float_error import SURE, TINY, Rounded, difference
from .frozen_layers import BinaryConv2d, IntegerConv2d, IntegerLayer
from .rewrite import Frozen, distance_name
from .rounding_rules import COARSE, UNIT, product_error


@dataclass(frozen=True)
class LayerCheck:
    """The result of checking one layer, given the inputs of the trained layer.

    Attributes:
        name: the name of the layer.
        arithmetic: "binary", "offset", "integer", "shift" or "float".
        gives: the kind of its output.
        codes: number of input codes that differ from the trained quantizer's.
        sums: number of integer sums that differ from the exact sums of the trained codes.
        handed: number of output codes that differ from those of the exact sums by more than rounding explains.
        error: the largest difference between a float output and its exact value.
        of_bound: the largest used share of the allowed difference; 1 at the limit.
        drift: number of input codes, if the frozen network computes them itself, that differ from those of the trained
            modules in exact arithmetic after layers with the frozen network's codes.
        unexplained: number of inputs (codes, if there are any) that differ by more than rounding explains: codes that
            no number within the error of the exact one has.
        of_drift: in one channel, the codes that differ although the expected error does not reach an edge, as a share
            of those that may; 1 at the limit.
        elements: number of inputs.
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
    unexplained: int = 0
    of_drift: float = 0.0
    elements: int = 0

    @property
    def equal(self) -> bool:
        """Whether integers are equal, and floats and codes agree within rounding."""
        return not self.reason

    @property
    def reason(self) -> str:
        """Return the differences in words; empty if there are none."""
        if self.codes or self.sums or self.handed:
            counts = {"codes": self.codes, "sums": self.sums, "output codes": self.handed}
            return " and ".join(f"{count:,} {what}" for what, count in counts.items() if count) + " differ"
        if not self.of_bound <= 1:
            return f"its output is off by up to {self.error:.1e}, {self.of_bound:.3g} times what rounding explains"
        if self.unexplained:
            return f"{self.unexplained:,} of its {self.elements:,} inputs differ by more than rounding explains"
        if not self.of_drift <= 1:
            return f"codes of one channel differ {self.of_drift:.3g} times as often as rounding explains"
        return ""

    def merged(self, other: "LayerCheck") -> "LayerCheck":
        """Combine the results of two batches."""
        merged: dict[str, Any] = {}
        for name in (field.name for field in fields(self) if field.type is not str):
            own, its = getattr(self, name), getattr(other, name)
            merged[name] = own + its if isinstance(own, int) else _larger(own, its)
        return replace(self, **merged)


class Call(NamedTuple):
    """The arguments of one call of a layer: its input, and more for some layers."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @property
    def input(self) -> Tensor:
        """The first argument."""
        return self.args[0] if self.args else self.kwargs["input"]

    def kept(self) -> "Call":
        """A copy with its own tensors, since others may write to them."""
        copied = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, (self.args, self.kwargs))
        return Call(*copied)


class LayerPair:
    """A trained layer, its frozen form, and the modules after it that are folded into the frozen form, in float64."""

    def __init__(self, model: nn.Module, frozen: FrozenModel, told: Frozen, is_fed: bool) -> None:
        self.told, self.is_fed = told, is_fed
        self.nothing = LayerCheck(told.name, told.arithmetic, told.gives)
        self.layer = cast(Any, model.get_submodule(told.name))
        self.whole = frozen.find(told.name)
        self.folded = [copy.deepcopy(frozen.folded(name, model)).double() for name in told.folded]
        self.next = cast(Any, model.get_submodule(told.reader)).input_quantizer if told.reader else None
        self.handed_zero = _zero(frozen.find(told.reader)) if told.reader else 0
        self.integer: Any = None
        if told.arithmetic != "float":
            self.integer = next((module for module in self.whole.modules() if isinstance(module, IntegerLayer)), None)
        if told.gives == "distances":
            name = distance_name(told.name)
            while not isinstance(found := frozen.find(name), Distance):
                name += "_"
            self.distance = found

    def given(self, input: Tensor) -> Tensor:
        """Return the frozen layer's input for the trained layer's `input`: floats, or the previous layer's codes."""
        padded = self._padded(input)
        if self.is_fed:
            values = self._codes(padded).values
            return values.float() if isinstance(self.integer, BinaryConv2d) else self.integer.handed(values)
        return padded if isinstance(self.layer, QConv2d) else padded.reshape(-1, padded.shape[-1], 1, 1)

    def check(self, call: Call) -> LayerCheck:
        """Check one call of the trained layer."""
        if self.integer is None:
            return self._check_float(call)
        padded = self._padded(call.input)
        return self._check_integer(self.given(call.input), padded, self._codes(padded))

    def codes_of(self, given: Tensor) -> Tensor | None:
        """Return the codes that the frozen layer received; None if it received floats."""
        if self.integer is None or (given.is_floating_point() and not self.is_fed):
            return None
        return self.integer.codes(given)

    def result(self, input: Tensor, codes: Tensor | None, output: Tensor) -> Rounded:
        """The trained layer's output in exact arithmetic, and the error of the frozen layer.

        Args:
            input: the input of the trained layer.
            codes: codes to use instead of the input's.
            output: its output, for layers whose operation is unknown here.
        """
        if not self._is_known or input.ndim == self.layer.weight.ndim - 1 != 1:
            exact = output.double()
            return Rounded(exact, (COARSE * _largest(exact)).expand_as(exact))
        if self.integer is None:
            return self._floats(self._padded(input))
        codes_q = self._codes(self._padded(input))
        return self._terms(codes_q if codes is None else codes_q._replace(values=codes))[1]

    def _check_integer(self, given: Tensor, padded: Tensor, codes: Codes) -> LayerCheck:
        """Apply the layer to the codes of an input."""
        exact, (value, error) = self._terms(codes)
        check = replace(
            self.nothing,
            codes=_count(self._like(padded, self.integer.codes(given)), codes.values),
            sums=_count(self._like(exact, self.integer.accumulate(given)), exact),
        )
        if self.layer.has_scale_map and self.layer.bias is not None:
            value = value - self._per_channel(self.layer.bias.double(), value)  # it is added after the map
        got = self.integer(given)
        if self.next is not None:
            value, error = self._folded(value, error)
            if self.told.gives == "bits":
                got = unpack_signs(got, value.shape[1])
            elif self.told.gives == "distances":
                got = torch.where(self.distance(got) < 0, -1, 1)
            elif self.handed_zero:
                got = got.to(torch.int16) - self.handed_zero
            return replace(check, handed=self._count_handed(got, value, error))
        return _with_error(check, self._like(exact, got), *self._folded(value, error))

    def _count_handed(self, got: Tensor, value: Tensor, error: Tensor) -> int:
        """Count the output codes that no number within the error explains; all if the shape differs."""
        if got.shape != value.shape:
            return max(value.numel(), 1)
        reader = cast(Quantizer, self.next)
        ends = [reader.codes(value + side * error, *reader.tensors()).values for side in (-SURE, SURE)]
        return int(((got < torch.minimum(*ends)) | (got > torch.maximum(*ends))).sum())

    def _check_float(self, call: Call) -> LayerCheck:
        """Check a float layer against float64."""
        if self._is_known:
            wanted = self._floats(self._padded(call.input))
        else:  # it is the trained layer itself
            wanted = self.result(call.input, None, self.layer(*call.args, **call.kwargs))
        return _with_error(self.nothing, self.whole(*call.args, **call.kwargs), *self._folded(*wanted))

    def _terms(self, codes: Codes) -> tuple[Tensor, Rounded]:
        """The sums of products of codes, and the output from them: products, rounded, and their sum.

        An offset adds products, as of codes that are all 1. Those of the input's codes are added first, and then the
        sum of the others and the bias.
        """
        weight = self.layer.weight_codes()
        values, weights = codes.values.double(), weight.values.double()
        sums = self._apply(values, weights)

        def products(values: Tensor, scale: Tensor) -> list[Tensor]:
            parts = [(weights, weight.scale)]
            parts += [] if weight.offset is None else [(torch.ones_like(weights), weight.offset)]
            return [
                self._apply(values, part) * self._per_channel((scale.double() * factor.double()).flatten(), sums)
                for part, factor in parts
            ]

        of_codes = products(values, codes.scale)
        of_offset = [] if codes.offset is None else products(torch.ones_like(values), codes.offset)
        first: Any = sum(of_codes)
        bias = sums.new_zeros(()) if self.layer.bias is None else self._per_channel(self.layer.bias.double(), sums)
        rest: Any = sum(of_offset, bias)
        magnitudes: Any = sum(term.abs() for term in of_codes + of_offset)
        error = 2 * magnitudes + rest.abs() + (first + rest).abs() + (first.abs() if len(of_codes) > 1 else 0)
        return sums, Rounded(first + rest, UNIT * error)

    def _floats(self, padded: Tensor) -> Rounded:
        """Return the output from quantized operands, summed in float32."""
        layer = self.layer
        input_q = layer.input_quantizer.quantize(padded, *layer.input_quantizer.tensors()).double()
        operands = input_q, layer.quantized_weight().double(), None if layer.bias is None else layer.bias.double()
        exact = self._apply(*operands)
        squares = self._apply(*(None if operand is None else operand.square() for operand in operands))  # pyright: ignore
        return Rounded(exact, product_error(exact, squares, self.terms))

    @property
    def terms(self) -> int:
        """Return the number of products in each sum of floats; 0 for sums of integers."""
        return self.layer.filters()[:1].numel() if self.integer is None else 0

    @property
    def _is_known(self) -> bool:
        is_plain = isinstance(self.layer, QConv1d | QConv2d | QConv3d | QLinear)
        return is_plain and not self.layer.has_scale_map

    def _folded(self, value: Tensor, error: Tensor) -> Rounded:
        """The value after the folded modules, and its error if they have become a scale and a bias.

        Where the sum is one of floats, it may begin with the bias, and each of its terms is then rounded at that size.
        """
        for module in self.folded:
            before, value, zero = value, module(value), module(torch.zeros_like(value))
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None:
                slope = (module(torch.ones_like(value)) - zero).abs()
                mean = self._per_channel(module.running_mean, value)
                error = error * slope + UNIT * (slope * (2 * before.abs() + mean.abs()) + zero.abs() + value.abs())
                error = (error.square() + self.terms * (UNIT * zero).square()).sqrt()
        return Rounded(value, error)

    def _codes(self, padded: Tensor) -> Codes:
        """The trained codes of an input."""
        return self.layer.input_quantizer.codes(padded, *self.layer.input_quantizer.tensors())

    def _padded(self, input: Tensor) -> Tensor:
        if isinstance(self.layer, QConv1d | QConv2d | QConv3d) and self.layer.padding_mode != "zeros":
            return F.pad(input, self.layer.padding_sides, mode=self.layer.padding_mode)
        return input

    def _apply(self, values: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Apply the layer's operation to numbers, by the layer's own code."""
        if isinstance(self.layer, QLinear):
            return F.linear(values, weight, bias)
        return self.layer.operation(values).forward(values, weight, bias)

    def _per_channel(self, values: Tensor, output: Tensor) -> Tensor:
        """One number, or one for each channel, broadcast against an output."""
        return values if isinstance(self.layer, QLinear) else values.view(-1, *[1] * (output.ndim - 2))

    def _like(self, reference: Tensor, integers: Tensor) -> Tensor:
        """A linear layer's integers, (rows, features, 1, 1), in the shape of its input or output."""
        is_linear = isinstance(self.layer, QLinear) and integers.numel() == reference.numel()
        return integers.reshape(reference.shape) if is_linear else integers


def _zero(reader: nn.Module) -> int:
    """The code of 0 in the input of a frozen layer."""
    return next((module.zero for module in reader.modules() if isinstance(module, IntegerConv2d)), 0)


def _count(got: Tensor, wanted: Tensor) -> int:
    """Count the differences; all elements if the shape differs."""
    return int((got != wanted).sum()) if got.shape == wanted.shape else max(wanted.numel(), 1)


def _with_error(check: LayerCheck, got: Tensor, wanted: Tensor, error: Tensor) -> LayerCheck:
    if not wanted.numel():
        return check
    off = difference(got, wanted)
    return replace(check, error=float(off.max()), of_bound=float((off / (SURE * error + TINY)).max()))


def _largest(value: Tensor) -> Tensor:
    return value.abs().max() if value.numel() else value.new_zeros(())


def _larger(first: float, second: float) -> float:
    """The larger number; NaN if one is NaN."""
    return first if first >= second or math.isnan(first) else second
