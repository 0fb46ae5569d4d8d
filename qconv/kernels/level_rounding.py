"""Rounding to levels and the gradients through it, as `torch.library` operators with definitions and kernels.

Torch's operators read and write memory four times to round, and ten times for the gradients of numbers and of a learned
step; a kernel does it once. That in C takes float32 on the CPU without gaps. Its results are the definitions' bit for
bit, but for the bits of a NaN, for any number of threads and any instruction set. That in Triton (`gpu.levels`) takes
bfloat16 and float16, too.
"""

from typing import Any

import torch
from torch import Tensor

from .library import LIBRARY, register
from .native import GRAIN, best, kernels
from .native_bits import without_gaps

_ROUND_CODES, _STEP_BACKWARD = range(2)
LIBRARY.define(
    "round_codes(Tensor input, Tensor divisor, float low, float high, float factor, int offset) -> (Tensor, Tensor)"
)
LIBRARY.define("round_values(Tensor input, Tensor? unit, float low, float high, float factor, float least) -> Tensor")
LIBRARY.define("round_range(Tensor input, Tensor low, Tensor high, int bits) -> Tensor")
LIBRARY.define(
    "step_backward(Tensor grad, Tensor input, Tensor step, int low, int high, bool strict, float factor, float least) "
    "-> (Tensor, Tensor)"
)


def round_codes(
    input: Tensor, divisor: Tensor, low: float, high: float, factor: float, offset: int
) -> tuple[Tensor, Tensor]:
    """Return codes, and whether one comes from NaN: a bool tensor without dimensions.

    ``code = round(clamp(input / divisor, low, high) · factor) + offset``, half to even, in at least float32. What the
    code of a NaN is, is left open.

    ``divisor`` broadcasts against ``input``. The kernels take one number, and one for each ``input[i]``.

    Returns:
        uint8, in the memory format of ``input``. A negative code −k is 256 − k: ``codes.view(torch.int8)`` are signed.

    Raises:
        ValueError: codes beyond the 256 of a byte.

    Example:
        >>> codes, is_nan = round_codes(torch.tensor([-3.0, 0.5, 1.5, 99.0]), torch.tensor(0.5), -2.0, 5.0, 1.0, 2)
        >>> codes.tolist(), is_nan.item()
        ([0, 3, 5, 7], False)
    """
    check_fit(low, high, factor, offset)
    dtype = torch.promote_types(input.dtype, torch.float32)
    values = (input.to(dtype) / divisor).clamp_(low, high).mul_(factor).round_().add_(offset)
    is_nan = values.isnan()
    codes = values.masked_fill_(is_nan, 0).to(torch.int16).to(torch.uint8)
    return codes, is_nan.any()


def round_values(input: Tensor, unit: Tensor | None, low: float, high: float, factor: float, least: float) -> Tensor:
    """Return ``round(clamp(input / unit, low, high) · factor) · (unit / factor)``, half to even, as ``input``'s dtype.

    It is computed in at least float32. ``unit`` is as ``divisor`` of `round_codes`; None is 1, what is smaller than
    ``least`` counts as that, and by 0 nothing is divided.

    Example:
        >>> round_values(torch.tensor([-3.0, 0.6, 1.2, 99.0]), torch.tensor(0.5), -2.0, 5.0, 1.0, 0.0)
        tensor([-1.0000,  0.5000,  1.0000,  2.5000])
    """
    wide = input.to(torch.promote_types(input.dtype, torch.float32))
    unit, by = unit_and_divisor(wide.new_ones(()) if unit is None else unit, least)
    return ((wide / by).clamp(low, high).mul_(factor).round_() * part(unit, factor)).to(input.dtype)


def unit_and_divisor(unit: Tensor, least: float) -> tuple[Tensor, Tensor]:
    """Return the units, at least ``least``, and what numbers are divided by: their `divisor`."""
    if least > 0:
        unit = unit.clamp(min=least)
        return unit, unit
    return unit, divisor(unit)


def divisor(step: Tensor) -> Tensor:
    """The step, or 1 if it is 0, as for a row of zeros."""
    return step + (step == 0)  # a NaN stays


def part(unit: Tensor, factor: float) -> Tensor:
    """Return ``unit / factor``, rounded once: by a Python number a GPU divides as by its rounded reciprocal."""
    return unit if factor == 1 else unit / unit.new_full((), factor)


def range_levels(low: Tensor, high: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the first and the last of the whole numbers on ``2^bits`` levels from ``low`` to ``high``, and the step.

    ``step = (high − low) / n``, ``n = 2^bits − 1``, from ``−zero`` to ``n − zero`` with ``zero = round(−low / step)``:
    0 is a level, and both ends move by at most half a step. A range of 0 has step 0.
    """
    count = 2**bits - 1
    span = high - low
    # The step is rounded: divided by it, the half of a range that is even around 0 would fall on either side.
    first = (low / divisor(span)).mul_(count).round_()
    return first, first + count, span / count


def round_range(input: Tensor, low: Tensor, high: Tensor, bits: int) -> Tensor:
    """Return ``clamp(round(input / step), first, last) · step`` of `range_levels`, half to even, as `round_values`.

    ``low`` is at most 0 and ``high`` at least 0, both as ``divisor`` of `round_codes`; ``bits`` is at most 16.

    Example:
        >>> round_range(torch.tensor([-9.0, 0.6, 1.2, 99.0]), torch.tensor(-0.9), torch.tensor(2.1), 2)
        tensor([-1.,  1.,  1.,  2.])
    """
    wide = input.to(torch.promote_types(input.dtype, torch.float32))
    first, last, step = range_levels(low.to(wide.dtype), high.to(wide.dtype), bits)
    return ((wide / divisor(step)).round_().clamp_(first, last) * step).to(input.dtype)


def check_fit(low: float, high: float, factor: float, offset: int) -> None:
    """Raise a ValueError unless the codes of `round_codes` fit a byte."""
    ends = low * factor + offset, high * factor + offset
    if not -128 <= ends[0] <= ends[1] <= 255 or ends[1] - ends[0] > 255:
        raise ValueError(f"codes (from {ends[0]} to {ends[1]}) must fit a byte")


def step_backward(
    grad: Tensor, input: Tensor, step: Tensor, low: int, high: int, strict: bool, factor: float, least: float
) -> tuple[Tensor, Tensor]:
    """Return the gradient of ``input`` through LSQ's levels, and ``factor`` times the gradient of ``step``.

    With ``z = input / step``, ``c = clamp(z, low, high)`` and ``between = 1[low < z < high]``: ``grad · 1[c = z]``, or
    if ``strict`` ``grad · between``; and ``factor · Σ grad · (round(c) − c · between)``, in at least float32, over the
    elements that share a step.

    ``step`` is as ``divisor`` of `round_codes`; smaller ones count as ``least``, which is above 0.

    Raises:
        ValueError: a gradient of another shape.

    Example:
        >>> step_backward(torch.ones(3), torch.tensor([-1.0, 0.75, 9.0]), torch.tensor(0.5), 0, 3, False, 2.0, 1e-6)
        (tensor([0., 1., 0.]), tensor(7.))
    """
    if grad.shape != input.shape:
        raise ValueError(f"grad (of shape {tuple(grad.shape)}) must have the shape of input, {tuple(input.shape)}")
    z = input.to(torch.promote_types(input.dtype, torch.float32)) / step.clamp(min=least)
    clamped = z.clamp(low, high)
    between = (z > low) & (z < high)
    passes = between if strict else clamped == z
    terms = grad.to(z.dtype) * (clamped.round() - clamped * between)
    return grad * passes, terms.sum_to_size(step.shape) * factor


def rounded(
    input: Tensor,
    divisor: Tensor,
    low: float,
    high: float,
    factor: float,
    offset: int,
) -> tuple[Tensor, Tensor] | None:
    """`round_codes` by the kernel; None if it does not take the operands."""
    check_fit(low, high, factor, offset)
    codes, is_nan = torch.empty_like(input, dtype=torch.uint8), torch.zeros((), dtype=torch.bool, device="cpu")
    numbers = _ROUND_CODES, offset, 0
    done = _call((input, divisor, None, codes, None, is_nan), numbers, (low, high, factor))
    return (codes, is_nan) if done else None


def stepped_back(
    grad: Tensor,
    input: Tensor,
    step: Tensor,
    low: int,
    high: int,
    strict: bool,
    factor: float,
    least: float,
) -> tuple[Tensor, Tensor] | None:
    """`step_backward` by the kernel; None if it does not take the operands."""
    if (grad.shape, grad.dtype, grad.device) != (input.shape, input.dtype, input.device) or not _is_plain(input):
        return None
    if grad.stride() != input.stride():  # as a weight that is contiguous, and its gradient that is channels_last
        grad = torch.empty_like(input).copy_(grad)
    grad_input, terms = torch.empty_like(input), torch.empty_like(input)
    numbers, divisor = (_STEP_BACKWARD, 0, int(strict)), step.clamp(min=least)
    done = _call((input, divisor, grad, grad_input, terms, None), numbers, (low, high, 1.0))
    return (grad_input, terms.sum_to_size(step.shape) * factor) if done else None


def _call(
    operands: tuple[Tensor | None, ...],
    numbers: tuple[int, int, int],
    ends: tuple[float, float, float],
) -> bool:
    module, (input, divisor, *_) = kernels(), operands
    if module is None or input is None or divisor is None or not input.numel() or not _is_plain(input):
        return False
    rows, by_row = divisor.numel(), (len(input) if input.ndim else 1, *[1] * (input.ndim - 1))
    if divisor.dtype != torch.float32 or not divisor.is_cpu or max(map(abs, ends)) > 2**20:
        return False
    if rows != 1 and divisor.shape != by_row:
        return False
    given = input, divisor.contiguous(), *operands[2:]
    addresses = (0 if operand is None else operand.data_ptr() for operand in given)
    module.levels(*addresses, rows, input.numel() // rows, *numbers, best(), GRAIN, *ends)
    return True


def _is_plain(x: Tensor) -> bool:
    return x.dtype == torch.float32 and x.is_cpu and without_gaps(x)


def _wide_rounded(input: Tensor, *others: Any) -> tuple[Tensor, Tensor] | None:
    return rounded(input.to(torch.promote_types(input.dtype, torch.float32)), *others)


for _definition, _kernel in (
    *((round_codes, _wide_rounded), (step_backward, stepped_back)),
    *((round_values, None), (round_range, None)),
):
    register(_definition, _kernel, "level_rounding")
