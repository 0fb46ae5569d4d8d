"""`qconv.kernels.level_rounding` in Triton: each operator in one pass over memory.

Adding 1.5 · 2^23 leaves no bits for a fraction: it rounds to the nearest whole number, half to even.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..level_rounding import check_fit
from ..native_bits import without_gaps
from .places import FLOATS, jit, launch

_BLOCK = 1024
_ROUNDS = tl.constexpr(12582912.0)


def round_codes(
    input: Tensor, divisor: Tensor, low: float, high: float, factor: float, offset: int
) -> tuple[Tensor, Tensor] | None:
    """`levels.round_codes`."""
    check_fit(low, high, factor, offset)
    places = places_of(input, divisor, low, high)
    if places is None:
        return None
    codes = torch.empty_like(input, dtype=torch.uint8)
    is_nan = torch.zeros((), dtype=torch.uint8, device=input.device)
    launch(
        *(_round, triton.cdiv(input.numel(), _BLOCK)),
        *(input, divisor.contiguous(), codes, is_nan, *places, float(low), float(high), float(factor), offset),
        BLOCK=_BLOCK,
    )
    return codes, is_nan.view(torch.bool)


def round_values(
    input: Tensor, unit: Tensor | None, low: float, high: float, factor: float, least: float
) -> Tensor | None:
    """`levels.round_values`."""
    places = places_of(input, unit, low * factor, high * factor)
    if places is None:
        return None
    output = torch.empty_like(input)
    launch(
        *(_values, triton.cdiv(input.numel(), _BLOCK)),
        *(input, input if unit is None else unit.contiguous(), output, *places),
        *(float(low), float(high), float(factor), float(least) if least > 0 else -math.inf),
        DIVIDES=unit is not None,
        BLOCK=_BLOCK,
    )
    return output


def round_range(input: Tensor, low: Tensor, high: Tensor, bits: int) -> Tensor | None:
    """`levels.round_range`."""
    places = places_of(input, low, 2**bits)
    if places is None or (high.shape, high.dtype, high.device) != (low.shape, low.dtype, low.device):
        return None
    output = torch.empty_like(input)
    launch(
        *(_ranged, triton.cdiv(input.numel(), _BLOCK)),
        *(input, low.contiguous(), high.contiguous(), output, *places, float(2**bits - 1)),
        BLOCK=_BLOCK,
    )
    return output


def step_backward(
    grad: Tensor, input: Tensor, step: Tensor, low: int, high: int, strict: bool, factor: float, least: float
) -> tuple[Tensor, Tensor] | None:
    """`levels.step_backward`."""
    places = places_of(input, step, low, high)
    if places is None or grad.shape != input.shape or grad.dtype not in FLOATS or grad.device != input.device:
        return None
    if grad.stride() != input.stride():
        grad = torch.empty_like(input, dtype=grad.dtype).copy_(grad)
    programs, adds = triton.cdiv(input.numel(), _BLOCK), step.numel() == 1
    grad_input = torch.empty_like(grad)
    of_programs = torch.empty(programs, device=input.device) if adds else None
    terms = torch.empty_like(input, dtype=torch.float32) if of_programs is None else of_programs
    launch(
        *(_step, programs),
        *(grad, input, step.contiguous(), grad_input, terms, *places),
        *(float(low), float(high), float(factor), float(least)),
        STRICT=strict,
        ADDS=adds,
        BLOCK=_BLOCK,
    )
    return grad_input, terms.sum().view(step.shape) if adds else terms.sum_to_size(step.shape)


def places_of(input: Tensor, divisor: Tensor | None, *ends: float) -> tuple[int, int, int] | None:
    """The elements, and ``inner`` and ``divisors``: that at ``i`` in memory is divided by ``i // inner % divisors``.

    None for other divisors than a number, one for each ``input[i]``, and one for each channel.
    """
    if (
        input.dtype not in FLOATS
        or not input.numel()
        or not without_gaps(input)
        or any(abs(end) > 2**20 for end in ends)
    ):
        return None
    if divisor is None:
        return input.numel(), 1, 1
    if divisor.dtype != torch.float32 or divisor.device != input.device or divisor.ndim > input.ndim:
        return None
    count, divisors, ones = input.numel(), divisor.numel(), (1,) * (input.ndim - 2)
    if divisors == 1:
        return count, 1, 1
    if divisor.shape == (len(input), *(1,) * (input.ndim - 1)):
        return count, count // divisors, divisors
    if input.ndim < 2 or divisor.shape != (1, input.shape[1], *ones):
        return None
    return count, math.prod(input.shape[2:]) if input.is_contiguous() else 1, divisors


@jit
def _divided(input, divisor, at, mask, inner, divisors):
    x = tl.load(input + at, mask=mask, other=0).to(tl.float32)
    return tl.div_rn(x, tl.load(divisor + at // inner % divisors, mask=mask, other=1))


@jit
def _clamped(z, low, high):
    z = tl.where(z < low, low, z)
    return tl.where(z > high, high, z)


@jit
def _round(
    input, divisor, codes, is_nan, count, inner, divisors, low, high, factor, offset,
    BLOCK: tl.constexpr,  # noqa: N803
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    level = _clamped(_divided(input, divisor, at, mask, inner, divisors), low, high) * factor
    unordered = (level != level) & mask
    whole = tl.where(level != level, 0.0, (level + _ROUNDS) - _ROUNDS).to(tl.int32)
    code = tl.where(level != level, 0, whole + offset)
    tl.store(codes + at, code.to(tl.uint8), mask=mask)
    tl.store(is_nan, 1, mask=tl.max(unordered.to(tl.int32), axis=0) != 0)


@jit
def _values(
    input, unit, output, count, inner, units, low, high, factor, least,
    DIVIDES: tl.constexpr, BLOCK: tl.constexpr,  # noqa: N803
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    z, one = tl.load(input + at, mask=mask, other=0).to(tl.float32), tl.full((BLOCK,), 1.0, tl.float32)
    step = one
    if DIVIDES:
        step = tl.load(unit + at // inner % units, mask=mask, other=1)
        step = tl.where(step < least, least, step)
        z = tl.div_rn(z, tl.where(step == 0, one, step))
    level, step = _clamped(z, low, high) * factor, tl.div_rn(step, one * factor)
    tl.store(output + at, (((level + _ROUNDS) - _ROUNDS) * step).to(output.dtype.element_ty), mask=mask)


@jit
def _ranged(
    input, low, high, output, count, inner, divisors, levels, BLOCK: tl.constexpr,  # noqa: N803
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask, place = at < count, at // inner % divisors
    lowest, highest = tl.load(low + place, mask=mask, other=0), tl.load(high + place, mask=mask, other=1)
    span, number = highest - lowest, tl.zeros((BLOCK,), tl.float32) + levels
    step = tl.div_rn(span, number)
    first = tl.div_rn(lowest, tl.where(span == 0, 1.0, span)) * number
    first = (first + _ROUNDS) - _ROUNDS
    z = tl.div_rn(tl.load(input + at, mask=mask, other=0).to(tl.float32), tl.where(step == 0, 1.0, step))
    level = _clamped(z, first, first + number)
    tl.store(output + at, (((level + _ROUNDS) - _ROUNDS) * step).to(output.dtype.element_ty), mask=mask)


@jit
def _step(
    grad, input, step, grad_input, terms, count, inner, divisors, low, high, factor, least,
    STRICT: tl.constexpr, ADDS: tl.constexpr, BLOCK: tl.constexpr,  # noqa: N803
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    divisor = tl.load(step + at // inner % divisors, mask=mask, other=1)
    divisor = tl.where(divisor < least, least, divisor)
    z = tl.div_rn(tl.load(input + at, mask=mask, other=0).to(tl.float32), divisor)
    level = _clamped(z, low, high)
    between = (z > low) & (z < high)
    passes = between if STRICT else level == z
    g = tl.load(grad + at, mask=mask, other=0).to(tl.float32)
    product = g * passes.to(tl.float32)
    term = g * ((level + _ROUNDS) - _ROUNDS - level * between.to(tl.float32)) * factor
    tl.store(grad_input + at, product.to(grad_input.dtype.element_ty), mask=mask)
    if ADDS:
        tl.store(terms + tl.program_id(0), tl.sum(tl.where(mask, term, 0.0), axis=0))
    else:
        tl.store(terms + at, term, mask=mask)
