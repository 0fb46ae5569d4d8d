"""Convolutions between codes that 8-bit kernels compute as the program does, for every sum.

A kernel gives ``round(scale_c · (weight_c · codes + bias_c))`` of whole weights and a whole bias. XNNPACK, which runs
LiteRT and ExecuTorch files, rounds a product of float32; LiteRT's own kernels, those of microcontrollers as well, round
a product of 32-bit integers, then once more when its lowest bits go (`twice_rounded`). A scale, a bias and a factor of
the weights are searched for each channel, with which both find each edge between two codes. A layer that has a channel
without them stays float.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..onnx.integers import AROUND, MOST, Chains, Integers, Levels, slopes
from ..program import operations as ops
from ..program.operations import Program
from ..program.plan import EDGES, form_of

_PARTS = 0.5, 0.3, 0.7, 0.15, 0.85, 0.05, 0.95, 0.01, 0.99  # between the smallest and the largest slope
_SMALLEST, _LARGEST = 2.0**-31, 2.0**7  # scales that XNNPACK takes
_MOST_FINER = 32
_MOST_EDGES = 31  # more are hardly ever met by one line with a whole bias


def requantized(program: Program, rounded: Mapping[int, tuple[float, int]] | None = None) -> dict[int, Integers]:
    """Return the convolutions that 8-bit kernels compute exactly, by the place of what makes codes or signs of them.

    With ``rounded``, the `roundings` of a program, others too: those whose sums become 256 numbers, and those whose
    codes may be off by one.
    """
    chains, found = Chains(program), dict[int, Integers]()

    def add(place: int, integers: Integers | None) -> None:
        if integers is None or not _pads_by_zero(program, integers.chain[0]):
            return
        if integers.weight.abs().max() <= 127 and integers.scale.max() < _LARGEST:
            found[place] = integers

    for place, coder in enumerate(program.operations):
        if not isinstance(coder, ops.Quantize | ops.Sign):
            continue
        levels = chains.levels(place, pooled=True, most=_MOST_EDGES)
        if levels is not None and _pads_by_zero(program, levels.chain[0]):
            add(place, levels.as_signs() if isinstance(coder, ops.Sign) else _searched(levels))
        low, high = coder.ends
        is_cut = low >= 0 or high - low == 255  # below, by a ReLU or by the smallest byte
        if rounded is not None and is_cut and place not in found:
            add(place, chains.coded(place))
    inside = {place for integers in found.values() for place in integers.chain}
    for place, (step, _) in (rounded or {}).items():
        if place not in inside:
            add(place, chains.rounded(place, step))
    return found


def left_as_floats(program: Program, in_bytes: Mapping[int, Integers]) -> list[str]:
    """Return the layers of codes or signs that multiply floats."""
    convs = {found.chain[0] for found in in_bytes.values()}
    places = enumerate(program.operations)
    return [
        each.origin for place, each in places if isinstance(each, ops.ConvCodes | ops.ConvBits) and place not in convs
    ]


def at_once(program: Program, in_bytes: Mapping[int, Integers]) -> dict[int, tuple[float, int]]:
    """Return step and zero point, from -128 to 127, of quantizers whose even codes only convolutions in bytes read."""
    convs, readers = {found.chain[0] for found in in_bytes.values()}, Chains(program).readers
    coders = ((place, each) for place, each in enumerate(program.operations) if isinstance(each, ops.Quantize))
    return {
        place: (coder.step, 127 - coder.ends[1])
        for place, coder in coders
        if {*readers[place]} <= convs and form_of(coder)[0] != EDGES and place not in in_bytes
    }


def _pads_by_zero(program: Program, place: int) -> bool:
    """Whether a convolution pads by the zero of its input, as kernels do."""
    conv: Any = program.operations[place]
    given: Any = program.operations[conv.inputs[0]]
    pads_codes = any(conv.window.padding) and getattr(conv, "pad_value", 0)
    return not pads_codes and (isinstance(given, ops.Sign) or conv.zero == given.zero)


def _searched(levels: Levels) -> Integers | None:
    """Search near the given line, from the finest weights to coarser ones."""
    weight = levels.weight.long()
    finest = (127 // weight.flatten(1).abs().amax(1).clamp(min=1)).clamp(max=_MOST_FINER)
    if not bool(finest.all()):
        return None
    scale, bias, factor = torch.ones_like(levels.slope), torch.zeros_like(finest), torch.zeros_like(finest)
    # A channel that is nearly constant lies far from 0: any small slope does.
    farthest = 4 * (max(map(abs, levels.ends)) + 1) * levels.bound
    for coarser in range(int(finest.max())):
        left = (factor == 0).nonzero().flatten()
        most = AROUND * int(finest[left].max())
        offsets = torch.tensor(sorted(range(-most, most + 1), key=abs))
        at, offset = left.repeat(len(offsets)), offsets.repeat_interleave(len(left))
        finer = (finest[at] - coarser).clamp(min=1)
        k = (levels.shift[at].clamp(-farthest, farthest) * finer).round().long() + offset
        first, last = slopes(_channels(levels, at), k / finer)
        last = torch.where(last.isfinite(), last, 2 * torch.maximum(first, levels.slope[at]))  # sums reach no end
        at, finer, k, first, last = (values[first < last] for values in (at, finer, k, first, last))
        part, places = _channels(levels, at), torch.arange(len(at))
        for between in _PARTS:
            tried = ((first + (last - first) * between) / finer).float().double()
            is_met = (factor[at] == 0) & _has_edges(part, tried, k, finer)
            found = torch.full_like(factor, len(at)).scatter_reduce(0, at[is_met], places[is_met], "amin")
            met = found < len(at)
            scale[met], bias[met], factor[met] = (values[found[met]] for values in (tried, k, finer))
        if bool(factor.all()):
            return Integers(levels.chain, weight * factor.view(-1, 1, 1, 1), scale, bias, levels.ends)
        if int((factor == 0).sum()) == len(left) > len(factor) // 16:
            break  # coarser weights hardly ever find so many
    return None


def _channels(levels: Levels, at: Tensor) -> Levels:
    return replace(levels, edges=levels.edges[:, at], slope=levels.slope[at], shift=levels.shift[at])


def _has_edges(levels: Levels, scale: Tensor, bias: Tensor, finer: Tensor) -> Tensor:
    """Whether both kernels find all edges between two codes, for each channel; they grow with the sum."""
    codes = torch.arange(levels.ends[0] + 1, levels.ends[1] + 1).unsqueeze(1)
    is_met = (scale > _SMALLEST) & (scale < _LARGEST) & (bias.abs() + levels.bound * finer < MOST)
    for kernel in (once_rounded, twice_rounded):
        from_edge, before = (kernel(sums * finer + bias, scale) for sums in (levels.edges, levels.edges - 1))
        is_reached = (from_edge >= codes) | (levels.edges > levels.bound)
        is_met &= (is_reached & ((before < codes) | (levels.edges <= -levels.bound))).all(0)
        # Below the lowest code both a ReLU and the smallest byte cut; the largest one cuts above the highest.
        if levels.ends[0] and levels.ends[1] - levels.ends[0] < 255:
            is_met &= kernel(-levels.bound * finer + bias, scale) >= levels.ends[0]
    return is_met


def once_rounded(sums: Tensor, scale: Tensor) -> Tensor:
    """XNNPACK's: a product of float32, rounded to even."""
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
