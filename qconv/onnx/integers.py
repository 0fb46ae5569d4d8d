"""Convolutions that runtimes compute in integers: between codes, with a whole bias."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..program.operations import (
    Add,
    Affine,
    Clamp,
    ConvBits,
    ConvCodes,
    ConvFloats,
    Operation,
    Program,
    Quantize,
    Sign,
    Take,
)

_MOST = 2**30  # of a bias, and of sums: their total must be a 32-bit integer
_MOST_OF_TWO = 2**15 - 1  # of two products: x86 processors without VNNI add them in 16 bits, with saturation
_AROUND = 2  # sums on both sides of the bias that are searched
_LEAST = 1e-30  # the smallest step

Conv = ConvBits | ConvCodes


@dataclass(eq=False)
class Integers:
    """What a `Conv` between codes takes and gives: ``round(scale_c · (weight · codes + bias_c)) + zero``.

    Attributes:
        chain: the places of the convolution and of what follows it.
        weight: whole numbers of 8 bits.
        scale: float64, positive: that of the output's codes for one of the sums.
        bias: whole numbers.
        ends: the lowest and the highest code that sums reach, less the zero point; None for signs.
    """

    chain: list[int]
    weight: Tensor
    scale: Tensor
    bias: Tensor
    ends: tuple[int, int] | None = None


class Chains:
    """The operations on channels that follow the convolutions of a program, while nothing else reads their values."""

    def __init__(self, program: Program) -> None:
        self.operations = program.operations
        self.readers: list[list[int]] = [[] for _ in self.operations]
        for place, operation in enumerate(self.operations):
            for given in operation.inputs:
                self.readers[given].append(place)
        self.readers[program.output].append(-1)

    def before(self, place: int) -> list[int]:
        """Return a convolution of codes or signs, and what follows it up to this place; empty if there is none."""
        chain = [place]
        while isinstance(self.operations[chain[0]], Affine | Clamp):
            chain.insert(0, self.operations[chain[0]].inputs[0])
            if len(self.readers[chain[0]]) > 1:
                return []
        conv = self.operations[chain[0]]
        is_coded = isinstance(conv, Conv) and isinstance(self.operations[conv.inputs[0]], Quantize | Sign)
        return chain if is_coded else []

    def next(self, place: int, *kinds: type[Operation]) -> int:
        """Return the place of a value's only reader, if it is of these kinds; 0 if not."""
        reader = self.readers[place][0] if len(self.readers[place]) == 1 else 0
        return reader if reader > 0 and isinstance(self.operations[reader], kinds) else 0

    def behind(self, place: int) -> int:
        """Return the last of the operations on channels that follow a convolution."""
        while following := self.next(place, Affine, Clamp):
            place = following
        return place

    def coded(self, place: int) -> Integers | None:
        """Return the integers of a convolution whose sums become codes or signs at this place, and only these.

        A line ``slope · (sum + k / finer)`` has the edges of the codes if the slope lies between the largest and the
        smallest ratio that they allow; the k with the widest interval is taken. If there is none, as for many levels
        on few sums, the bias is rounded, and a code may be off by one.
        """
        coder = self.operations[place]
        chain = self.before(coder.inputs[0])
        if not chain or self.next(coder.inputs[0], type(coder)) != place:
            return None
        conv, bound, highest = self._bounded(chain[0])
        scale, bias = _composed(self._of(chain), conv.channels)
        direction = torch.where(scale < 0, -1, 1)

        def level(sums: Tensor) -> Tensor:
            value = (sums * direction).float()[..., None, None]
            for operation in self._of(chain):
                value = operation.run(value)
            if isinstance(coder, Sign):
                return (coder.run(value) > 0).long()[..., 0, 0]
            return torch.searchsorted(coder.edges, value[..., 0, 0].contiguous(), right=True)  # pyright: ignore

        weight = conv.weight * direction.view(-1, 1, 1, 1)
        if isinstance(coder, Sign):  # the codes are 0 and 2: twice the sums, less an odd number, are never 0
            edge = _edges(level, 1, len(weight), bound)[0]
            return Integers(chain, 2 * weight, torch.ones(len(weight)).double(), 1 - 2 * edge)
        assert isinstance(coder, Quantize)
        low, count = int(coder.codes[0]) - coder.zero, len(coder.edges)
        # A slope of 0 or nearly 0 is raised to one that makes no difference, so that its whole bias can be expressed.
        slope, shift = scale.abs() / coder.step, bias / coder.step
        slope = torch.maximum(slope, (shift.abs() * 1e-12).clamp(min=1e-30))
        extremes = torch.tensor([[-bound], [bound]]).expand(2, conv.channels)
        reached, finer = level(extremes) + low, _finer(weight, bound, highest)
        ends = int(reached[0].min()), int(reached[1].max())
        edges = _edges(level, count, len(weight), bound)[ends[0] - low : ends[1] - low]
        slope, shift = _line(edges, ends[0], bound, slope, (shift / slope * finer).round(), finer)
        on_line = (extremes * slope + shift * slope / finer).clamp(*ends).round()
        if bool(((on_line - reached).abs() > 1).any()):  # a clamp between affine operations ends some channels earlier
            return None
        return replace(_whole(chain, weight, slope, shift * slope / finer, finer), ends=ends)

    def rounded(self, place: int, step: float) -> Integers | None:
        """Return the integers of a convolution whose sums are rounded to multiples of `step` at this place."""
        chain = self.before(place)
        if not chain:
            return None
        conv, bound, highest = self._bounded(chain[0])
        scale, bias = (factor / step for factor in _composed(self._of(chain), conv.channels))
        weight = conv.weight * torch.where(scale < 0, -1, 1).view(-1, 1, 1, 1)
        return _whole(chain, weight, scale.abs(), bias, _finer(weight, bound, highest))

    def saturates(self, integers: Integers, shift: int) -> bool:
        """Whether ONNX Runtime, left to itself, can get wrong sums on x86 processors without VNNI.

        Which two products it adds depends on the runtime, so that any two may be.
        """
        highest = self._bounded(integers.chain[0])[2] + shift
        filters = integers.weight.flatten(1)
        if not filters.numel():
            return False
        parts = (part.clamp(min=0).topk(min(2, part.shape[1])).values.sum(1).max() for part in (filters, -filters))
        return highest * int(max(parts)) > _MOST_OF_TWO

    def _of(self, chain: list[int]) -> list[Operation]:
        return [self.operations[place] for place in chain[1:]]

    def _bounded(self, place: int) -> tuple[Conv, int, int]:
        """Return a convolution, the bound of its sums' magnitude, and its highest code."""
        conv = self.operations[place]
        assert isinstance(conv, Conv)
        coder, most, highest = self.operations[conv.inputs[0]], 1, 2
        if isinstance(coder, Quantize) and isinstance(conv, ConvCodes):
            highest = int(coder.codes[-1])
            most = max(highest - conv.zero, conv.zero)
        sums = conv.weight.long().abs().flatten(1).sum(1)
        return conv, int(sums.max()) * most if sums.numel() else 0, highest


def _composed(chain: list[Operation], channels: int) -> tuple[Tensor, Tensor]:
    """Return scale and bias of all that are affine, in float64."""
    scale, bias = torch.ones(channels).double(), torch.zeros(channels).double()
    for operation in chain:
        if isinstance(operation, Affine):
            scale, bias = scale * operation.scale, bias * operation.scale + operation.bias
    return scale, bias


def _edges(level: Callable[[Tensor], Tensor], count: int, channels: int, bound: int) -> Tensor:
    """Return the smallest sum of each level from 1 on, (count, channels); ``bound + 1`` if there is none."""
    wanted = torch.arange(1, count + 1).unsqueeze(1)
    below, reached = torch.full((count, channels), -bound - 1), torch.full((count, channels), bound + 1)
    while bool((reached - below > 1).any()):
        middle = torch.div(below + reached, 2, rounding_mode="floor")
        found = level(middle) >= wanted
        is_open = reached - below > 1
        reached, below = torch.where(is_open & found, middle, reached), torch.where(is_open & ~found, middle, below)
    return reached


def _finer(weight: Tensor, bound: int, highest: int) -> int:
    """Return a factor of the weights. The bias is a whole number in units of the sums, which is coarse for few bits."""
    largest = min(127, _MOST_OF_TWO // max(2 * highest, 1))
    finer = largest // max(int(weight.abs().max()), 1) if weight.numel() else 1
    return max(min(finer, _MOST // max(bound, 1)), 1)


def _whole(chain: list[int], weight: Tensor, scale: Tensor, bias: Tensor, finer: int) -> Integers:
    """Round a bias in units of the output's codes to units of the sums."""
    weight, scale = (weight * finer).long(), scale / finer
    # If a scale of 0 or nearly 0 makes the sums vanish beside the bias, the scale grows and the weight becomes 0.
    least = (bias.abs() / _MOST).clamp(min=2.0**-100)
    vanishes = scale < least
    weight[vanishes] = 0
    scale = torch.where(vanishes, least, scale)
    return Integers(chain, weight, scale, (bias / scale).round().long())


def _line(edges: Tensor, low: int, bound: int, slope: Tensor, middle: Tensor, finer: int) -> tuple[Tensor, Tensor]:
    """Return slope and k of each channel, near the given ones; see `Chains.coded`."""
    best_width, best_slope, best = torch.zeros_like(slope), slope.clone(), middle.clone()
    for offset in range(-_AROUND * finer, _AROUND * finer + 1):
        first, last = _slopes(edges, low, bound, (middle + offset) / finer)
        width = (last - first) / slope
        is_better = (width > best_width) & last.isfinite()
        best_width = torch.where(is_better, width, best_width)
        best_slope = torch.where(is_better, (first + last) / 2, best_slope)
        best = torch.where(is_better, middle + offset, best)
    return best_slope, best


def _slopes(edges: Tensor, low: int, bound: int, shift: Tensor) -> tuple[Tensor, Tensor]:
    """The slopes between which the rounding of ``slope · (sum + shift)`` has the edges, for each channel."""
    levels = torch.arange(low + 1, low + 1 + len(edges)).unsqueeze(1) - 0.5
    first, last = torch.zeros_like(shift), torch.full_like(shift, torch.inf)
    for at, is_met, sign in ((edges + shift, edges <= bound, 1), (edges - 1 + shift, edges > -bound, -1)):
        # sign · slope · at ≥ sign · level: a lower bound if sign · at is positive, else an upper one.
        ratio = levels / at
        is_lower, is_upper = is_met & (sign * at > 0), is_met & (sign * at < 0)
        is_never = is_met & (at == 0) & (sign * levels > 0)
        first = torch.maximum(first, torch.where(is_lower, ratio, 0).amax(0))
        last = torch.minimum(last, torch.where(is_upper, ratio, torch.inf).amin(0))
        last = torch.where(is_never.any(0), -torch.inf, last)
    return first, last


def computed(program: Program, images: Tensor) -> list[Tensor]:
    """Return the values of all operations, with sums of floats in torch's order, which is fast."""
    values = [images]
    for operation in program.operations[1:]:
        values.append(run(operation, [values[given] for given in operation.inputs]))
    return values


def run(operation: Operation, given: list[Tensor]) -> Tensor:
    """Return the value of one operation, as `computed`."""
    if not isinstance(operation, ConvFloats):
        return operation.run(*given)
    window = operation.window
    padded = F.pad(given[0], window.padding)
    return F.conv2d(padded, operation.weight, None, window.stride, 0, window.dilation, operation.groups)


def roundings(program: Program, example: Tensor, chains: Chains, signed: bool) -> dict[int, tuple[float, int]]:
    """Return step and zero point of the floats that become 256 numbers over their range, by place.

    These are the outputs of convolutions of codes, and sums of which a term is one, with their other terms.
    If a quantizer of step ``s`` reads a value (the first one, if several do), its numbers are ``s / k`` apart with an
    odd k. An edge between two codes is then one between two numbers, so rounding twice gives the right code.
    """
    operations, readers, ends = program.operations, chains.readers, dict[int, tuple[float, float]]()
    for batch in example.split(64):
        for place, value in enumerate(computed(program, batch)):
            low, high = ends.get(place, (0.0, 0.0))
            ends[place] = min(low, float(value.min())), max(high, float(value.max()))
    found: dict[int, tuple[float, int]] = {}

    def add(place: int) -> None:
        operation = operations[place]
        if isinstance(operation, Take) and operation.inputs[0] in found:
            found[place] = found[operation.inputs[0]]
        elif place not in found:
            coders = (operations[reader] for reader in readers[place] if reader > 0)
            steps = (coder.step for coder in coders if isinstance(coder, Quantize) and is_even(coder))
            found[place] = steps_of(*ends[place], next(steps, None), signed)

    for place, operation in enumerate(operations):
        if isinstance(operation, ConvCodes):
            last = chains.behind(place)
            if chains.before(last) and not chains.next(last, Quantize, Sign):
                add(last)
        elif isinstance(operation, Add) and any(_base(operations, term) in found for term in operation.inputs):
            for term in operation.inputs:
                if not isinstance(operations[term], Quantize | Sign):
                    add(term)
            following: Any = operations[relu := chains.next(place, Clamp)]
            add(relu if relu and following.low == 0 else place)
    return found


def is_even(coder: Quantize) -> bool:
    """Whether its codes follow each other."""
    return len(coder.codes) == int(coder.codes[-1]) - int(coder.codes[0]) + 1


def steps_of(low: float, high: float, reader: float | None, signed: bool) -> tuple[float, int]:
    """``step, zero point`` of 256 numbers from `low` to `high`, on the edges of a reader's step, unless too fine."""
    step = max(max(high, -low) / 127 if signed else (high - low) / 255, _LEAST)
    if reader is not None and reader >= step > _LEAST:
        ratio = math.floor(reader / step)
        step = reader / (ratio - 1 + ratio % 2)
    return step, 0 if signed else round(-low / step)


def _base(operations: list[Operation], place: int) -> int:
    while isinstance(operations[place], Take):
        place = operations[place].inputs[0]
    return place
