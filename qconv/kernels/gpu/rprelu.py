"""`qconv.kernels.rprelu` in Triton: each operator in one pass over memory.

Sums are made in float32 within 512 rows, then over these by torch, in the same order in every run.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .places import FLOATS, LANES, ROWS, Places, jit, launch, offsets, sums_of_channels


def rprelu(input: Tensor, before: Tensor, slope: Tensor, after: Tensor) -> Tensor | None:
    """`rprelu.rprelu`."""
    places = _places(input, before, slope, after)
    if places is None:
        return None
    output, channels = torch.empty_like(input), input.shape[1]
    columns = triton.cdiv(channels, LANES)
    launch(
        *(_forward, places.programs(columns)),
        *(input, _rounded(input, before, slope, after), output, *places, channels, columns),
        ROWS=ROWS,
        LANES=LANES,
    )
    return output


def rprelu_backward(
    grad: Tensor, input: Tensor, before: Tensor, slope: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """`rprelu.rprelu_backward`."""
    places = _places(input, before, slope)
    if places is None or (grad.shape, grad.dtype, grad.device) != (input.shape, input.dtype, input.device):
        return None
    if Places.of(grad) != places:
        grad = torch.empty_like(input).copy_(grad)
    grad_input = torch.empty_like(input)
    operands = grad, input, _rounded(input, before, slope), grad_input
    of_before, of_slope, of_after = sums_of_channels(_backward, 3, places, operands).to(input.dtype)
    return grad_input, of_before, of_slope, of_after


def _places(input: Tensor, *of_channels: Tensor) -> Places | None:
    places = Places.of(input)
    if places is None or input.dtype not in FLOATS or any(x.dtype not in FLOATS for x in of_channels):
        return None
    if any(x.shape != input.shape[1:2] or x.device != input.device for x in of_channels):
        return None
    return places


def _rounded(input: Tensor, *of_channels: Tensor) -> Tensor:
    """Return numbers of channels, rounded to the dtype of the input, in float32."""
    return torch.stack([x.to(input.dtype) for x in of_channels]).float()


@jit
def _at(row, channel, rows, places, of_batch, of_channel, of_place, channels):
    """Return the offsets of a block, and which of its elements exist."""
    mask = (row < rows)[:, None] & (channel < channels)[None, :]
    return offsets(row, channel, places, of_batch, of_channel, of_place), mask


@jit
def _forward(
    input, numbers, output, rows, places, of_batch, of_channel, of_place, channels, columns,
    ROWS: tl.constexpr, LANES: tl.constexpr,  # noqa: N803
):  # fmt: skip
    program = tl.program_id(0)
    row = program // columns * ROWS + tl.arange(0, ROWS)
    channel = program % columns * LANES + tl.arange(0, LANES)
    before = tl.load(numbers + channel, mask=channel < channels, other=0)[None, :]
    slope = tl.load(numbers + channels + channel, mask=channel < channels, other=0)[None, :]
    after = tl.load(numbers + 2 * channels + channel, mask=channel < channels, other=0)[None, :]
    at, mask = _at(row, channel, rows, places, of_batch, of_channel, of_place, channels)
    kind = input.dtype.element_ty
    x = tl.load(input + at, mask=mask, other=0).to(tl.float32)
    shifted = (x + before).to(kind).to(tl.float32)  # rounded as torch's operators round
    sloped = tl.where(shifted > 0, shifted, (slope * shifted).to(kind).to(tl.float32))
    tl.store(output + at, (sloped + after).to(kind), mask=mask)


@jit
def _backward(
    grad, input, numbers, grad_input, partial,
    rows, places, of_batch, of_channel, of_place, channels, columns,
    CHUNK: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,  # noqa: N803
):  # fmt: skip
    program = tl.program_id(0)
    chunk = program // columns
    channel = program % columns * LANES + tl.arange(0, LANES)
    here = channel < channels
    before = tl.load(numbers + channel, mask=here, other=0)[None, :]
    slope = tl.load(numbers + channels + channel, mask=here, other=0)[None, :]
    kind = input.dtype.element_ty
    of_before = tl.zeros((ROWS, LANES), tl.float32)
    of_slope = tl.zeros((ROWS, LANES), tl.float32)
    of_after = tl.zeros((ROWS, LANES), tl.float32)
    for block in range(CHUNK):
        row = (chunk * CHUNK + block) * ROWS + tl.arange(0, ROWS)
        at, mask = _at(row, channel, rows, places, of_batch, of_channel, of_place, channels)
        g = tl.load(grad + at, mask=mask, other=0).to(tl.float32)
        x = tl.load(input + at, mask=mask, other=0).to(tl.float32)
        shifted = (x + before).to(kind).to(tl.float32)
        passed = tl.where(shifted > 0, g, g * slope)
        tl.store(grad_input + at, passed.to(kind), mask=mask)
        of_before += tl.where(mask, passed, 0.0)
        of_slope += tl.where(mask, tl.where(shifted > 0, 0.0, shifted * g), 0.0)
        of_after += g
    to = partial + chunk.to(tl.int64) * channels + channel
    size = tl.num_programs(0) // columns * channels
    tl.store(to, tl.sum(of_before, axis=0), mask=here)
    tl.store(to + size, tl.sum(of_slope, axis=0), mask=here)
    tl.store(to + 2 * size, tl.sum(of_after, axis=0), mask=here)
