"""One frozen layer beside the trained one."""

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ..kernels.operators import unpack_signs
from ..layers import QConv1d, QConv2d, QConv3d, QLinear
from ..quantizers.base import Codes, Quantizer
from .freeze import FrozenModel
from .layers import BinaryConv2d, IntegerConv2d, IntegerLayer
from .rewrite import Frozen, distance_name
from .rounding import SURE, TINY, Rounded, difference
from .rounding_rules import COARSE, UNIT, product_error


@dataclass(frozen=True)
class LayerCheck:
    """What was found at one layer, given the inputs that the trained layer sees.

    Attributes:
        name: of the layer.
        arithmetic: "binary", "integer", "shift" or "float".
        gives: what it hands on.
        codes: how many codes of the input differ from the trained quantizer's.
        sums: how many integer sums differ from the exact ones of the trained codes.
        handed: how many codes that it hands on differ from those of the exact sums, by more than rounding explains.
        error: the largest difference of a float that it hands on from the exact value.
        of_bound: the largest part of the allowed difference that was used, 1 at the limit.
        drift: how many of its input's codes differ, where the frozen network makes them itself, from those of the
            trained modules in exact arithmetic behind layers that have the frozen network's codes.
        unexplained: how many of its inputs, codes if there are some, differ by more than rounding explains: a code
            where no number within the error of the exact one has it.
        of_drift: of the codes in one channel that differ though the error that is to be expected does not reach an
            edge, the part of those that may; 1 at the limit.
        elements: how many inputs there are.
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
        """Integers equal, floats and codes within what rounding explains."""
        return not self.reason

    @property
    def reason(self) -> str:
        """What differs; empty if nothing does."""
        if self.codes or self.sums or self.handed:
            counts = {"codes": self.codes, "sums": self.sums, "codes that it hands on": self.handed}
            return " and ".join(f"{count:,} {what}" for what, count in counts.items() if count) + " differ"
        if not self.of_bound <= 1:
            return f"its output is off by up to {self.error:.1e}, {self.of_bound:.3g} times what rounding explains"
        if self.unexplained:
            return f"{self.unexplained:,} of its {self.elements:,} inputs differ by more than rounding explains"
        if not self.of_drift <= 1:
            return f"codes of one channel differ {self.of_drift:.3g} times as often as rounding explains"
        return ""

    def merged(self, other: "LayerCheck") -> "LayerCheck":
        """Of two batches."""
        merged: dict[str, Any] = {}
        for name in (each.name for each in fields(self) if each.type is not str):
            own, its = getattr(self, name), getattr(other, name)
            merged[name] = own + its if isinstance(own, int) else _larger(own, its)
        return replace(self, **merged)


class Call(NamedTuple):
    """The arguments of one call of a layer: the input, and those of some layers beside it."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @property
    def input(self) -> Tensor:
        """The first one."""
        return self.args[0] if self.args else self.kwargs["input"]

    def kept(self) -> "Call":
        """With tensors of its own, as others may be written to."""
        copied = tree_map(lambda each: each.clone() if isinstance(each, Tensor) else each, (self.args, self.kwargs))
        return Call(*copied)


class LayerPair:
    """A trained layer, its frozen form, and the modules behind it that the frozen form does the work of, in float64."""

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
            self.distance = frozen.find(distance_name(told.name))

    def given(self, input: Tensor) -> Tensor:
        """What the frozen layer gets where the trained one gets `input`: floats, or codes of the layer before it."""
        padded = self._padded(input)
        if self.is_fed:
            values = self._codes(padded).values
            return values.float() if isinstance(self.integer, BinaryConv2d) else self.integer.handed(values)
        return padded if isinstance(self.layer, QConv2d) else padded.reshape(-1, padded.shape[-1], 1, 1)

    def check(self, call: Call) -> LayerCheck:
        """What is found at a call of the trained layer."""
        if self.integer is None:
            return self._check_float(call)
        padded = self._padded(call.input)
        codes = self._codes(padded)
        return self._check_integer(self.given(call.input), padded, codes.values.double(), codes.scale.double())

    def codes_of(self, given: Tensor) -> Tensor | None:
        """The codes that the frozen layer was given; None where it was given floats."""
        if self.integer is None or (given.is_floating_point() and not self.is_fed):
            return None
        return self.integer.codes(given)

    def result(self, input: Tensor, codes: Tensor | None, output: Tensor) -> Rounded:
        """The trained layer's output in exact arithmetic, and the error with which the frozen layer gives it.

        Args:
            input: what the trained layer was given.
            codes: those that it takes in place of the input's.
            output: what it gave, for layers whose operation is not known here.
        """
        if not self._is_known or input.ndim == self.layer.weight.ndim - 1 != 1:
            exact = output.double()
            return Rounded(exact, (COARSE * _largest(exact)).expand_as(exact))
        if self.integer is None:
            return self._floats(self._padded(input))
        found = self._codes(self._padded(input))
        return self._terms(found.values.double() if codes is None else codes.double(), found.scale.double())[1]

    def _check_integer(self, given: Tensor, padded: Tensor, values: Tensor, scale: Tensor) -> LayerCheck:
        """The layer on the codes `values` of an input."""
        exact, (value, error) = self._terms(values, scale)
        found = replace(
            self.nothing,
            codes=_count(self._like(padded, self.integer.codes(given)), values),
            sums=_count(self._like(exact, self.integer.accumulate(given)), exact),
        )
        if self.layer.scheme.scale_map and self.layer.bias is not None:
            value = value - self._per_channel(self.layer.bias.double(), value)  # it is added behind the map
        got = self.integer(given)
        if self.next is not None:
            value, error = self._folded(value, error)
            if self.told.gives == "bits":
                got = unpack_signs(got, value.shape[1])
            elif self.told.gives == "distances":
                got = torch.where(self.distance(got) < 0, -1, 1)
            elif self.handed_zero:
                got = got.to(torch.int16) - self.handed_zero
            return replace(found, handed=self._count_handed(got, value, error))
        return _with_error(found, self._like(exact, got), *self._folded(value, error))

    def _count_handed(self, got: Tensor, value: Tensor, error: Tensor) -> int:
        """How many codes are those of no number within the error of the exact ones; all where the shape differs."""
        if got.shape != value.shape:
            return max(value.numel(), 1)
        reader = cast(Quantizer, self.next)
        ends = [reader.codes(value + side * error, *reader.tensors()).values for side in (-SURE, SURE)]
        return int(((got < torch.minimum(*ends)) | (got > torch.maximum(*ends))).sum())

    def _check_float(self, call: Call) -> LayerCheck:
        """A float layer against float64."""
        if self._is_known:
            wanted = self._floats(self._padded(call.input))
        else:  # it is the trained layer itself
            wanted = self.result(call.input, None, self.layer(*call.args, **call.kwargs))
        return _with_error(self.nothing, self.whole(*call.args, **call.kwargs), *self._folded(*wanted))

    def _terms(self, values: Tensor, scale: Tensor) -> tuple[Tensor, Rounded]:
        """The sums of products of codes, and the output that they make: one product, rounded, and one sum."""
        weight = self.layer.weight_codes()
        sums = self._apply(values, weight.values.double())
        terms = sums * self._per_channel((scale * weight.scale.double()).flatten(), sums)
        bias = sums.new_zeros(()) if self.layer.bias is None else self._per_channel(self.layer.bias.double(), sums)
        output = terms + bias
        return sums, Rounded(output, UNIT * (2 * terms.abs() + bias.abs() + output.abs()))

    def _floats(self, padded: Tensor) -> Rounded:
        """The output from quantized operands, summed up in float32."""
        layer = self.layer
        input_q = layer.input_quantizer.quantize(padded, *layer.input_quantizer.tensors()).double()
        operands = input_q, layer.quantized_weight().double(), None if layer.bias is None else layer.bias.double()
        exact = self._apply(*operands)
        squares = self._apply(*(None if each is None else each.square() for each in operands))  # pyright: ignore
        return Rounded(exact, product_error(exact, squares, layer.weight[:1].numel()))

    @property
    def _is_known(self) -> bool:
        is_plain = isinstance(self.layer, QConv1d | QConv2d | QConv3d | QLinear)
        return is_plain and not self.layer.scheme.scale_map

    def _folded(self, value: Tensor, error: Tensor) -> Rounded:
        """The value behind the folded modules, and its error where they have become a scale and a bias."""
        for module in self.folded:
            before, value, zero = value, module(value), module(torch.zeros_like(value))
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None:
                slope = (module(torch.ones_like(value)) - zero).abs()
                mean = self._per_channel(module.running_mean, value)
                error = error * slope + UNIT * (slope * (2 * before.abs() + mean.abs()) + zero.abs() + value.abs())
        return Rounded(value, error)

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
        return values if isinstance(self.layer, QLinear) else values.view(-1, *[1] * (output.ndim - 2))

    def _like(self, reference: Tensor, integers: Tensor) -> Tensor:
        """A linear layer's integers, which are (rows, features, 1, 1), in the shape of its input or output."""
        is_linear = isinstance(self.layer, QLinear) and integers.numel() == reference.numel()
        return integers.reshape(reference.shape) if is_linear else integers


def _zero(reader: nn.Module) -> int:
    """What stands for 0 in the codes that a frozen layer reads."""
    return next((module.zero for module in reader.modules() if isinstance(module, IntegerConv2d)), 0)


def _count(got: Tensor, wanted: Tensor) -> int:
    """How many differ; all where the shape does."""
    return int((got != wanted).sum()) if got.shape == wanted.shape else max(wanted.numel(), 1)


def _with_error(found: LayerCheck, got: Tensor, wanted: Tensor, error: Tensor) -> LayerCheck:
    if not wanted.numel():
        return found
    off = difference(got, wanted)
    return replace(found, error=float(off.max()), of_bound=float((off / (SURE * error + TINY)).max()))


def _largest(value: Tensor) -> Tensor:
    return value.abs().max() if value.numel() else value.new_zeros(())


def _larger(first: float, second: float) -> float:
    """The larger one; NaN if one is."""
    return first if first >= second or math.isnan(first) else second
