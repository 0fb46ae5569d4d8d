"""Convolutions between codes that 8-bit kernels compute as the program does, for every sum.

A kernel gives ``round(scale_c · (weight_c · codes + bias_c))`` of whole weights and a whole bias. XNNPACK, which runs
LiteRT and ExecuTorch files, rounds a product of float32; LiteRT's own kernels, those of microcontrollers as well, round
a product of 32-bit integers, then once more when its lowest bits go. `Chains.coded` searches a scale, a bias and a
factor of the weights for each channel, with which both find each edge between two codes. A layer that has a channel
without them stays float.
"""

from collections.abc import Mapping
from typing import Any

from ..onnx.integers import Chains, Integers
from ..program import operations as ops
from ..program.operations import Program
from ..program.plan import EDGES, form_of

_LARGEST = 2.0**7  # of scales that XNNPACK takes


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
        add(place, chains.coded(place, exact=True, twice=True))
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
