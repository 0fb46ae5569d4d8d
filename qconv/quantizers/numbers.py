"""Helpers of several methods: argument checks, learned numbers, wider dtypes, a search among sorted levels."""

import torch
from torch import Tensor, nn

SMALLEST = 2.0**-20
"""The lower bound of learned steps, ranges and scales; every floating dtype can represent it, even float16."""

BELOW_ZERO, ABOVE_ONE = -(2.0**-149), 1 + 2.0**-23
"""The neighbours of 0 and 1 in float32."""


def flushes_denormals() -> bool:
    """Whether this thread flushes denormals to 0 (`torch.set_flush_denormal`), such as `BELOW_ZERO`."""
    return not torch.tensor(BELOW_ZERO, dtype=torch.float32, device="cpu")


def within(x: Tensor, low: float, high: float) -> Tensor:
    """The factor that lets a gradient pass where ``low <= x <= high``: True or 1 there, else False or 0.

    Compiled for a CPU it is a float, and NaN at NaN. Inductor would keep a bool for the backward, and storing it took
    longer than the rest of a training step of ResNet-20.
    """
    nearest = x.clamp(low, high)
    if torch.compiler.is_compiling() and x.device.type == "cpu":
        return 1 - (x - nearest).abs().sign()
    return nearest == x


def learned(value: float | Tensor) -> nn.Parameter:
    """Return a learned number as a one-dimensional tensor: FSDP shards parameters along their first dimension."""
    return nn.Parameter(torch.as_tensor(value).detach().reshape(1).clone())


def scalars(*numbers: Tensor) -> tuple[Tensor, ...]:
    """Return `learned` numbers as views without a dimension, for formulas."""
    return tuple(number.reshape(()) for number in numbers)


def set_parameter(parameter: nn.Parameter | None, values: Tensor) -> nn.Parameter:
    """Return ``parameter`` filled with ``values``; a new one if it is None or differs in device, shape or dtype.

    The device differs when a checkpoint was assigned to a layer on the meta device.
    """
    if parameter is None:
        return nn.Parameter(values)
    if (parameter.device, parameter.shape, parameter.dtype) != (values.device, values.shape, values.dtype):
        return nn.Parameter(values, requires_grad=parameter.requires_grad)
    with torch.no_grad():
        parameter.copy_(values)
    return parameter


def positive(x: Tensor) -> Tensor:
    """Return a learned scale, at least `SMALLEST` even if nobody calls `after_step_`."""
    return x.clamp(min=SMALLEST)


def wide(x: Tensor) -> Tensor:
    """Return ``x`` in at least float32, for levels and learned tensors of half precision."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def count_below(x: Tensor, boundaries: Tensor) -> Tensor:
    """Count the sorted boundaries below each element, in the dtype of ``x``; at NaN any number."""
    if boundaries.numel() > 16:
        if x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last):
            return torch.bucketize(x.movedim(1, -1), boundaries).movedim(-1, 1).to(x.dtype)
        return torch.bucketize(x.contiguous(), boundaries).to(x.dtype)
    # Comparing with each boundary takes a third of a search's time: it is vectorized if its result is not a bool.
    count, above = torch.zeros_like(x), torch.empty_like(x)
    for boundary in boundaries:
        count.add_(torch.gt(x, boundary, out=above))
    return count
