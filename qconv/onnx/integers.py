"""Convolutions that runtimes compute in integers: between codes, with a whole bias."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..program import operations as ops
from ..program.operations import Operation, Program

_MOST = 2**30  # of a bias, and of sums: their total must be a 32-bit integer
_MOST_OF_TWO = 2**15 - 1  # of two products: x86 processors without VNNI add them in 16 bits, with saturation
_AROUND = 2  # sums on both sides of the bias that are searched
_LEAST = 1e-30  # the smallest step
_MOST_OF_STEPS = 128.0
_FINEST = 32  # the largest factor of weights
_FACTORS = 16  # that are tried for a filter
_MOST_EDGES = 31  # more are hardly ever met by one line with a whole bias
_SMALLEST = 2.0**-31  # scale that XNNPACK takes

Conv = ops.ConvBits | ops.ConvCodes
Coder = ops.Quantize | ops.Sign
_Level = Callable[[Tensor], Tensor]


@dataclass(eq=False)
class Integers:
    """``round(scale_c · (weight · codes + bias_c))``: what a convolution between codes computes, less the zero point.

    Attributes:
        chain: the places of the convolution and of what follows it.
        weight: whole numbers of 8 bits.
        scale: float64, positive.
        bias: whole numbers.
        ends: the lowest and the highest code of a quantizer that sums reach.
    """

    chain: list[int]
    weight: Tensor
    scale: Tensor
    bias: Tensor
    ends: tuple[int, int] | None = None


@dataclass(eq=False)
class Levels:
    """Codes or signs as levels of the sums of a convolution.

    Attributes:
        chain: the places of the convolution and of what follows it, up to a maximum.
        weight: its weight, with a sign by which each channel's level grows with the sum.
        edges: the smallest sum of each level above the first, (levels − 1, channels); ``bound + 1`` if there is none.
        ends: the lowest and the highest level, as a code less its zero; 0 and 1 for signs.
        bound: the sums' largest magnitude.
        slope, shift: ``slope · (sum + shift)`` is about the level.
    """

    chain: list[int]
    weight: Tensor
    edges: Tensor
    ends: tuple[int, int]
    bound: int
    slope: Tensor
    shift: Tensor

    def as_signs(self) -> Integers:
        """Twice the sums, less an odd number, are never 0."""
        return Integers(self.chain, 2 * self.weight, torch.ones(len(self.weight)).double(), 1 - 2 * self.edges[0])


class Chains:
    """The operations on channels that follow the convolutions of a program, while nothing else reads their values."""

    def __init__(self, program: Program) -> None:
        self.operations, self.readers = program.operations, program.readers()
        for output in program.outputs:
            self.readers[output].append(0)

    def next(self, place: int, kinds: Any) -> int:
        """Return the place of a value's only reader, if it is of these kinds; 0 if not."""
        reader = self.readers[place][0] if len(self.readers[place]) == 1 else 0
        return reader if isinstance(self.operations[reader], kinds) else 0

    def before(self, place: int) -> list[int]:
        """Return a convolution of codes or signs, and what follows it up to this place; empty if there is none."""
        chain = [place]
        while isinstance(self.operations[chain[0]], ops.Affine | ops.Clamp):
            chain.insert(0, self.operations[chain[0]].inputs[0])
            if len(self.readers[chain[0]]) > 1:
                return []
        conv = self.operations[chain[0]]
        return chain if isinstance(conv, Conv) and isinstance(self.operations[conv.inputs[0]], Coder) else []

    def levels(self, place: int, *, pooled: bool) -> Levels | None:
        """Return the codes or signs of this place by the sums of the convolution that alone becomes them.

        With ``pooled``, also if there is a maximum between the two, which gives the same behind the codes. None, also
        if sums reach more than 256 codes.
        """
        coder: Any = self.operations[place]
        last = coder.inputs[0]
        is_alone, pool = self.next(last, Coder) == place, list[int]()
        if pooled and isinstance(self.operations[last], ops.Maximum):
            last, pool = self.operations[last].inputs[0], [last]
            is_alone = is_alone and self.next(last, ops.Maximum) == pool[0]
        chain = self.before(last)
        if not chain or not is_alone or (isinstance(coder, ops.Quantize) and coder.has_gaps):
            return None
        conv, bound, _ = self._bounded(chain[0])
        scale, bias = self._composed(chain)
        direction = torch.where(scale < 0, -1, 1)

        def level(sums: Tensor) -> Tensor:
            value = (sums * direction).float()[..., None, None]
            for operation in chain[1:]:
                value = self.operations[operation].run(value)
            if isinstance(coder, ops.Sign):
                return (coder.run(value) > 0).long()[..., 0, 0]
            return torch.searchsorted(coder.edges, value[..., 0, 0].contiguous(), right=True)

        weight = conv.weight * direction.view(-1, 1, 1, 1)
        if isinstance(coder, ops.Sign):
            edges = _edges(level, 1, len(weight), bound)
            return Levels(chain + pool, weight, edges, (0, 1), bound, torch.ones_like(scale), 0.5 - edges[0])
        low, extremes = coder.ends[0], torch.tensor([[-bound], [bound]]).expand(2, conv.channels)
        middle = len(coder.edges) // 2
        start = 0.0 if is_even(coder) else float(coder.edges[middle]) - (low + middle + 0.5) * coder.step
        # A slope of 0 or nearly 0 is raised to one that makes no difference, so that its whole bias can be expressed.
        slope, shift = scale.abs() / coder.step, (bias - start) / coder.step
        slope = torch.maximum(slope, (shift.abs() * 1e-12).clamp(min=1e-30))
        reached = level(extremes) + low
        ends = int(reached[0].min()), int(reached[1].max())
        if ends[1] - ends[0] > 255:
            return None
        edges = _edges(level, len(coder.edges), len(weight), bound)[ends[0] - low : ends[1] - low]
        return Levels(chain + pool, weight, edges, ends, bound, slope, shift / slope)

    def coded(self, place: int, *, exact: bool = False, twice: bool = False) -> Integers | None:
        """Return the integers of a convolution whose sums become codes or signs at this place, and only these.

        A line ``slope · (sum + k / finer)`` has the edges of the codes if the slope lies between the largest and the
        smallest ratio that they allow; the k with the widest interval is taken. If there is none, the bias is rounded,
        and a code may be off by one. None for uneven codes, or codes with an offset; with ``exact``, also if a code is
        off. With ``twice``, the integers serve kernels that round twice, too, and cut nothing below but zero and the
        smallest byte; a maximum may lie between the two.
        """
        coder: Any = self.operations[place]
        if (levels := self.levels(place, pooled=twice)) is None:
            return None
        if isinstance(coder, ops.Sign):
            return levels.as_signs()
        if exact and len(levels.edges) > _MOST_EDGES:
            return None
        slope, k, finer = _line(levels, self._bounded(levels.chain[0])[2], twice)
        found = _whole(levels.chain, levels.weight, slope, k * slope / finer, finer, levels.ends)
        kernels = (once_rounded, twice_rounded) if twice else (once_rounded,)
        can_be_off = is_even(coder) and not exact
        return found if max(_off(levels, found, finer, each) for each in kernels) <= can_be_off else None

    def rounded(self, place: int, step: float) -> Integers | None:
        """Return the integers of a convolution whose sums are rounded to multiples of `step` at this place."""
        if not (chain := self.before(place)):
            return None
        conv, _, finer = self._bounded(chain[0])
        scale, bias = (factor / step for factor in self._composed(chain))
        weight = conv.weight * torch.where(scale < 0, -1, 1).view(-1, 1, 1, 1)
        return _whole(chain, weight, scale.abs(), bias, finer)

    def _bounded(self, place: int) -> tuple[Any, int, Tensor]:
        """Return a convolution, the bound of its sums' magnitude, and a factor of each filter's weights.

        The bias is a whole number in units of the sums, which is coarse for few bits.
        """
        conv: Any = self.operations[place]
        coder: Any = self.operations[conv.inputs[0]]
        highest = 2 if isinstance(coder, ops.Sign) else int(coder.codes[-1])
        most = 1 if isinstance(coder, ops.Sign) else max(highest - conv.zero, conv.zero)
        filters = conv.weight.long().abs().flatten(1)
        bound = int(filters.sum(1).max()) * most if filters.numel() else 0
        largest = filters.amax(1) if bound else torch.ones(len(filters)).long()
        finer = min(127, _MOST_OF_TWO // max(2 * highest, 1)) // largest.clamp(min=1)
        return conv, bound, finer.clamp(1, min(_FINEST, max(_MOST // max(bound, 1), 1)))

    def _composed(self, chain: list[int]) -> tuple[Tensor, Tensor]:
        """Return scale and bias of all that are affine, in float64."""
        channels = self.operations[chain[0]].channels
        scale, bias = torch.ones(channels).double(), torch.zeros(channels).double()
        for operation in (self.operations[place] for place in chain):
            if isinstance(operation, ops.Affine):
                scale, bias = scale * operation.scale, bias * operation.scale + operation.bias
        return scale, bias


def may_saturate(weight: Tensor, highest: int) -> bool:
    """Whether codes up to `highest`, times two weights of one filter, can exceed 16 bits in either direction.

    Which two ONNX Runtime adds on x86 processors without VNNI depends on it, so that any two may be.
    """
    filters = weight.flatten(1)
    if not filters.numel():
        return False
    parts = (
        part.clamp(min=0).topk(min(2, part.shape[1])).values.sum(1).max() for part in (filters.int(), -filters.int())
    )
    return highest * int(max(parts)) > _MOST_OF_TWO


def _edges(level: _Level, count: int, channels: int, bound: int) -> Tensor:
    """Return the smallest sum of each level from 1 on, (count, channels); ``bound + 1`` if there is none."""
    wanted = torch.arange(1, count + 1).unsqueeze(1)
    below, reached = torch.full((count, channels), -bound - 1), torch.full((count, channels), bound + 1)
    while bool((is_open := reached - below > 1).any()):
        middle = torch.div(below + reached, 2, rounding_mode="floor")
        found = level(middle) >= wanted
        reached, below = torch.where(is_open & found, middle, reached), torch.where(is_open & ~found, middle, below)
    return reached


def _whole(
    chain: list[int], weight: Tensor, scale: Tensor, bias: Tensor, finer: Tensor, ends: tuple[int, int] | None = None
) -> Integers:
    """Round a bias in units of the output's codes to units of the sums, of weights times a factor."""
    weight, scale = weight.long() * finer.view(-1, 1, 1, 1), scale / finer
    # If a scale of 0 or nearly 0 makes the sums vanish beside the bias, the scale grows and the weight becomes 0.
    least = (bias.abs() / _MOST).clamp(min=_SMALLEST)
    weight[scale < least] = 0
    scale = torch.maximum(scale, least)
    return Integers(chain, weight, scale, (bias / scale).round().long(), ends)


def _line(levels: Levels, finest: Tensor, twice: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return slope, k and factor of each channel, near the given ones; see `Chains.coded`."""
    widest, slope, k, factor = torch.zeros_like(levels.slope), levels.slope, (levels.shift * finest).round(), finest
    for coarser in range(min(_FACTORS, int(finest.max()))):
        finer = (finest - coarser).clamp(min=1)
        # The second rounding sees parts of 2 ** exponent of a code; the first one gives the last half of such a part.
        margin = twice * torch.ldexp(0.5 / levels.slope, torch.frexp(levels.slope / finer).exponent)
        most = _AROUND * int(finer.max())
        for offset in range(-most, most + 1):
            near = (levels.shift * finer).round() + offset
            first, last = _slopes(levels, near / finer, margin)
            last = torch.where(last < torch.inf, last, 2 * torch.maximum(first, levels.slope))  # sums reach no end
            is_better = last - first > widest
            widest, k = torch.where(is_better, last - first, widest), torch.where(is_better, near, k)
            slope, factor = torch.where(is_better, (first + last) / 2, slope), torch.where(is_better, finer, factor)
        if bool((widest > 0).all()):
            break
    return slope, k, factor


def _slopes(levels: Levels, shift: Tensor, margin: Tensor) -> tuple[Tensor, Tensor]:
    """The slopes between which the rounding of ``slope · (sum + shift)`` has the edges, for each channel.

    They serve kernels, too, whose edges lie nearer to 0 by a part of the sums' unit, up to the margin.
    """
    edges, bound, low = levels.edges, levels.bound, levels.ends[0]
    halves = torch.arange(low + 1, low + 1 + len(edges)).unsqueeze(1) - 0.5
    first, last = torch.zeros_like(shift), torch.full_like(shift, torch.inf)
    if not len(edges):
        return first, last
    reached, before = edges + shift - margin * (halves < 0), edges - 1 + shift + margin * (halves > 0)
    for at, is_met, sign in ((reached, edges <= bound, 1), (before, edges > -bound, -1)):
        # sign · slope · at ≥ sign · level: a lower bound if sign · at is positive, else an upper one.
        ratio, is_never = halves / at, is_met & (at == 0) & (sign * halves > 0)
        first = torch.maximum(first, torch.where(is_met & (sign * at > 0), ratio, 0).amax(0))
        last = torch.minimum(last, torch.where(is_met & (sign * at < 0), ratio, torch.inf).amin(0))
        last = torch.where(is_never.any(0), -torch.inf, last)
    return first, last


def _off(levels: Levels, found: Integers, finer: Tensor, kernel: Callable[[Tensor, Tensor], Tensor]) -> int:
    """Return by how many codes a kernel is off at most: at the edges, before them, and at the ends of the sums."""
    (low, high), edges = levels.ends, levels.edges
    extremes = torch.tensor([[-levels.bound], [levels.bound]]).expand(2, edges.shape[1])
    # Of a filter of zeros, sums are 0.
    sums = torch.cat([extremes, edges, edges - 1]).clamp(-levels.bound, levels.bound) * levels.weight.flatten(1).any(1)
    is_cut = low == 0 or high - low == 255 or kernel is once_rounded
    sums_in_file = sums * finer * found.weight.flatten(1).any(1) + found.bias
    codes = kernel(sums_in_file, found.scale).clamp(low if is_cut else None, high)
    reached = torch.searchsorted(edges.mT.contiguous(), sums.mT.contiguous(), right=True).mT + low
    return int((codes - reached).abs().max())


def once_rounded(sums: Tensor, scale: Tensor) -> Tensor:
    """XNNPACK's and ONNX Runtime's kernels: a product of float32, rounded to even."""
    return (sums.float() * scale.float()).round().long()


def twice_rounded(sums: Tensor, scale: Tensor) -> Tensor:
    """LiteRT's own: ``sums · m / 2³¹``, rounded, over a power of two, with halves away from 0; ``2³⁰ ≤ m < 2³¹``."""
    fraction, exponent = torch.frexp(scale)
    factor = (fraction * 2**31).round().long()
    is_one = factor == 2**31
    factor, exponent = torch.where(is_one, factor // 2, factor), torch.where(is_one, exponent + 1, exponent)
    product = (sums << exponent.clamp(min=0)) * factor
    high = torch.where(product >= 0, (product + 2**30) >> 31, -((2**30 - 1 - product) >> 31))
    right = (-exponent).clamp(min=0)
    mask = (1 << right) - 1
    return (high >> right) + ((high & mask) > (mask >> 1) + (high < 0).long()).long()


def fast(operation: Operation, *values: Tensor) -> Tensor:
    """Return what `Operation.run` does, with sums of floats in torch's order."""
    if not isinstance(operation, ops.ConvFloats):
        return operation.run(*values)
    window, x = operation.window, F.pad(values[0], operation.window.padding)
    return F.conv2d(x, operation.weight, None, window.stride, 0, window.dilation, operation.groups)


def roundings(program: Program, example: Tensor, chains: Chains, signed: bool) -> dict[int, tuple[float, int]]:
    """Return step and zero point of the floats that become 256 numbers over their range, by place.

    These are the outputs of convolutions of codes, and sums of which a term is one, with their other terms.
    Steps of a sum and its terms differ by a factor of 128 at most: XNNPACK adds no others.
    If a quantizer of step ``s`` reads a value (the first one, if several do), its numbers are ``s / k`` apart with an
    odd k. An edge between two codes is then one between two numbers, so rounding twice gives the right code.
    """
    operations, found = program.operations, dict[int, tuple[float, int]]()
    lows, highs = [0.0] * len(operations), [0.0] * len(operations)
    for batch in example.split(16):  # all values of a batch are held
        values = program.values(batch, fast)
        lows = [min(low, float(value.min())) for low, value in zip(lows, values, strict=True)]
        highs = [max(high, float(value.max())) for high, value in zip(highs, values, strict=True)]

    def add(place: int) -> None:
        operation: Any = operations[place]
        if isinstance(operation, ops.Take) and operation.inputs[0] in found:
            found[place] = found[operation.inputs[0]]
        elif place not in found and not isinstance(operation, Coder):
            readers = (operations[reader] for reader in chains.readers[place])
            steps = (reader.step for reader in readers if isinstance(reader, ops.Quantize) and is_even(reader))
            found[place] = steps_of(lows[place], highs[place], next(steps, None), signed)

    def widen(place: int, least: float) -> None:
        if place in found and found[place][0] < least:
            found[place] = least, 0 if signed else round(-lows[place] / least)

    def relu(place: int) -> int:
        following = chains.next(place, ops.Clamp)
        clamp: Any = operations[following]
        return following if following and (clamp.low, clamp.high) == (0, math.inf) else place

    for place, operation in enumerate(operations):
        if isinstance(operation, ops.ConvCodes):
            last = place
            while following := chains.next(last, ops.Affine):
                last = following
            last = last if signed else relu(last)  # codes from 0 on have its zeros themselves
            clamp = chains.next(last, ops.Clamp)
            is_coded = chains.next(last, Coder) or (clamp and chains.next(clamp, Coder))
            if chains.before(last) and not is_coded:
                add(last)
        elif isinstance(operation, ops.Add) and any(_base(operations, term) in found for term in operation.inputs):
            total = relu(place)
            for each in (*operation.inputs, total):
                add(each)
            widen(total, max(found[term][0] for term in operation.inputs if term in found) / _MOST_OF_STEPS)
            for term in operation.inputs:
                widen(term, found[total][0] / _MOST_OF_STEPS)
    return found


def is_even(coder: ops.Quantize) -> bool:
    """Whether its codes follow each other, with edges halfway between two multiples of its step."""
    if coder.has_gaps or not coder.step > 0:
        return False
    halves = torch.arange(coder.ends[0], coder.ends[1]) + 0.5
    return bool(((coder.edges.double() / coder.step - halves).abs() < 1e-3).all())


def steps_of(low: float, high: float, reader: float | None, signed: bool) -> tuple[float, int]:
    """``step, zero point`` of 256 numbers from `low` to `high`, on the edges of a reader's step, unless too fine."""
    step = max(max(high, -low) / 127 if signed else (high - low) / 255, _LEAST) if high > low else 1.0
    if reader is not None and reader >= step > _LEAST:
        ratio = math.floor(reader / step)
        step = reader / (ratio - 1 + ratio % 2)
    return step, 0 if signed else round(-low / step)


def _base(operations: list[Operation], place: int) -> int:
    while isinstance(operations[place], ops.Take):
        place = operations[place].inputs[0]
    return place
