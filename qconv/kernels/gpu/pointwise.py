"""`qconv.kernels.pointwise` in Triton: each operator in one pass over memory."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..native_bits import without_gaps
from .level_rounding import places_of
from .places import FLOATS, jit, launch

_BLOCK = 1024


def sign(input: Tensor) -> Tensor | None:
    """`pointwise.sign`."""
    if input.dtype not in FLOATS or not input.numel() or not without_gaps(input):
        return None
    output = torch.empty_like(input)
    launch(_sign, triton.cdiv(input.numel(), _BLOCK), input, output, input.numel(), BLOCK=_BLOCK)
    return output


def pass_between(grad: Tensor, input: Tensor, low: Tensor, high: Tensor) -> Tensor | None:
    """`pointwise.pass_between`."""
    places = places_of(input, low)
    if places is None or (high.shape, high.dtype, high.device) != (low.shape, low.dtype, low.device):
        return None
    if grad.shape != input.shape or grad.dtype not in FLOATS or grad.device != input.device:
        return None
    if grad.stride() != input.stride():
        grad = torch.empty_like(input, dtype=grad.dtype).copy_(grad)
    output = torch.empty_like(grad)
    launch(
        *(_between, triton.cdiv(input.numel(), _BLOCK)),
        *(grad, input, low.contiguous(), high.contiguous(), output, *places),
        BLOCK=_BLOCK,
    )
    return output


def round_power_of_two(input: Tensor, low: int, high: int) -> Tensor | None:
    """`pointwise.round_power_of_two`."""
    if not -127 <= low <= high <= 127 or input.dtype not in FLOATS or not input.numel() or not without_gaps(input):
        return None
    output = torch.empty_like(input)
    launch(_power, triton.cdiv(input.numel(), _BLOCK), input, output, input.numel(), low, high, BLOCK=_BLOCK)
    return output


@jit
def _sign(input, output, count, BLOCK: tl.constexpr):  # noqa: N803
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    x = tl.load(input + at, mask=mask, other=0).to(tl.float32)
    tl.store(output + at, tl.where(x < 0, -1.0, 1.0).to(output.dtype.element_ty), mask=mask)


@jit
def _between(grad, input, low, high, output, count, inner, ends, BLOCK: tl.constexpr):  # noqa: N803
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask, place = at < count, at // inner % ends
    x, g = tl.load(input + at, mask=mask, other=0).to(tl.float32), tl.load(grad + at, mask=mask, other=0)
    lowest, highest = tl.load(low + place, mask=mask, other=0), tl.load(high + place, mask=mask, other=0)
    passes = ((x >= lowest) & (x <= highest)).to(tl.float32)
    tl.store(output + at, (g.to(tl.float32) * passes).to(output.dtype.element_ty), mask=mask)


@jit
def _power(input, output, count, low, high, BLOCK: tl.constexpr):  # noqa: N803
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    x = tl.load(input + at, mask=mask, other=0).to(tl.float32)
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    # The exponent, one more above √2, whose fraction is 3474675.2 / 2^23; what is denormal lies about 2^-127.
    above = tl.where(bits < 0x800000, bits > 5931641, (bits & 0x7FFFFF) > 3474675)
    exponent = (bits >> 23) - 127 + above.to(tl.int32)
    exponent = tl.minimum(tl.maximum(exponent, low), high)
    power = tl.where(exponent < -126, 0x400000, (exponent + 127) << 23).to(tl.float32, bitcast=True)
    power = tl.where(x < 0, -power, power)
    power = tl.where(x == 0, 0.0, tl.where(x != x, x, power))
    tl.store(output + at, power.to(output.dtype.element_ty), mask=mask)
