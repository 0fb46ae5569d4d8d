"""Steps of the backward in Triton: the slope of a surrogate, and the gradients of batch norm.

`norm_backward_` writes over its input, so that no third tensor of that size exists. Its sums are made in float32 within
512 rows, then over these by torch, in the same order in every run.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..native_bits import without_gaps
from .places import FLOATS, LANES, ROWS, Places, jit, launch, offsets, sums_of_channels

_BLOCK = 1024


def approx_sign_backward_(grad: Tensor, input: Tensor) -> bool | None:
    """`slopes.approx_sign_backward_`; None where the definition has to run, which checks the operands."""
    of_grad, of_input = ((x.shape, x.stride(), x.dtype, x.device) for x in (grad, input))
    if of_grad != of_input or input.dtype not in FLOATS or not input.numel() or not without_gaps(input):
        return None
    launch(_slope, triton.cdiv(input.numel(), _BLOCK), grad, input, input.numel(), BLOCK=_BLOCK)
    return True


def norm_backward_(
    grad: Tensor, input: Tensor, weight: Tensor | None, mean: Tensor, invstd: Tensor
) -> tuple[Tensor, Tensor] | None:
    """`norm.norm_backward_`."""
    places, of_channels = Places.of(input), [x for x in (weight, mean, invstd) if x is not None]
    if places is None or grad.shape != input.shape or grad.dtype != input.dtype or input.dtype not in FLOATS:
        return None
    if any(x.dtype != torch.float32 or x.shape != input.shape[1:2] for x in of_channels):
        return None
    if any(x.device != input.device for x in (grad, *of_channels)):
        return None
    if Places.of(grad) != places:
        grad = torch.empty_like(input).copy_(grad)
    channels, mean = input.shape[1], mean.contiguous()
    of_bias, product = sums_of_channels(_norm_sums, 2, places, (grad, input, mean))
    columns = triton.cdiv(channels, LANES)
    factor = invstd if weight is None else invstd * weight
    terms = torch.stack([mean, of_bias / places.rows, product * invstd * invstd / places.rows, factor])
    launch(
        *(_norm_input, places.programs(columns)),
        *(grad, input, terms, *places, channels, columns),
        ROWS=ROWS,
        LANES=LANES,
    )
    return product * invstd, of_bias


@jit
def _slope(grad, input, count, BLOCK: tl.constexpr):  # noqa: N803
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    kind = input.dtype.element_ty
    x = tl.load(input + at, mask=mask, other=0).to(tl.float32)
    slope = (2 - 2 * tl.abs(x)).to(kind).to(tl.float32)  # rounded as torch's operators round
    slope = tl.where(slope < 0, 0.0, slope)
    product = tl.load(grad + at, mask=mask, other=0).to(tl.float32) * slope
    tl.store(grad + at, product.to(kind), mask=mask)


@jit
def _norm_sums(
    grad, input, mean, partial, rows, places, of_batch, of_channel, of_place, channels, columns,
    CHUNK: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,  # noqa: N803
):  # fmt: skip
    program = tl.program_id(0)
    chunk = program // columns
    channel = program % columns * LANES + tl.arange(0, LANES)
    middle = tl.load(mean + channel, mask=channel < channels, other=0)[None, :]
    sums = tl.zeros((ROWS, LANES), tl.float32)
    products = tl.zeros((ROWS, LANES), tl.float32)
    for block in range(CHUNK):
        row = (chunk * CHUNK + block) * ROWS + tl.arange(0, ROWS)
        at = offsets(row, channel, places, of_batch, of_channel, of_place)
        mask = (row < rows)[:, None] & (channel < channels)[None, :]
        g = tl.load(grad + at, mask=mask, other=0).to(tl.float32)
        x = tl.load(input + at, mask=mask, other=0).to(tl.float32)
        sums += g
        products += tl.where(mask, g * (x - middle), 0.0)
    to = partial + chunk.to(tl.int64) * channels + channel
    tl.store(to, tl.sum(sums, axis=0), mask=channel < channels)
    tl.store(to + tl.num_programs(0) // columns * channels, tl.sum(products, axis=0), mask=channel < channels)


@jit
def _norm_input(
    grad, input, terms, rows, places, of_batch, of_channel, of_place, channels, columns,
    ROWS: tl.constexpr, LANES: tl.constexpr,  # noqa: N803
):  # fmt: skip
    program = tl.program_id(0)
    row = program // columns * ROWS + tl.arange(0, ROWS)
    channel = program % columns * LANES + tl.arange(0, LANES)
    here = channel < channels
    mean = tl.load(terms + channel, mask=here, other=0)[None, :]
    of_bias = tl.load(terms + channels + channel, mask=here, other=0)[None, :]
    product = tl.load(terms + 2 * channels + channel, mask=here, other=0)[None, :]
    factor = tl.load(terms + 3 * channels + channel, mask=here, other=0)[None, :]
    at = offsets(row, channel, places, of_batch, of_channel, of_place)
    mask = (row < rows)[:, None] & here[None, :]
    g = tl.load(grad + at, mask=mask, other=0).to(tl.float32)
    x = tl.load(input + at, mask=mask, other=0).to(tl.float32)
    value = (g - of_bias - (x - mean) * product) * factor
    tl.store(input + at, value.to(input.dtype.element_ty), mask=mask)
