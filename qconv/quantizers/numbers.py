"""What several methods need of numbers: arguments in their range, wider dtypes, a search among sorted levels."""

import torch
from torch import Tensor, nn

SMALLEST = 2.0**-20
"""What learned steps, ranges and scales are clamped to from below; every floating dtype has it, float16 too."""


def within(x: Tensor, low: float, high: float) -> Tensor:
    """What a gradient is multiplied by to pass where ``low <= x <= high``: True or 1 there, else False or 0.

    Compiled for a CPU it is a float, and NaN at NaN: Inductor would keep a bool for the backward, and its way of
    storing one took longer than the rest of a ResNet-20's step.
    """
    nearest = x.clamp(low, high)
    if torch.compiler.is_compiling() and x.device.type == "cpu":
        return 1 - (x - nearest).abs().sign()
    return nearest == x


def learned(value: float | Tensor) -> nn.Parameter:
    """One learned number, as a tensor of one dimension: FSDP shards parameters along their first."""
    return nn.Parameter(torch.as_tensor(value).detach().reshape(1).clone())


def scalars(*numbers: Tensor) -> tuple[Tensor, ...]:
    """What formulas take of `learned` numbers: views without a dimension."""
    return tuple(number.reshape(()) for number in numbers)


def set_parameter(parameter: nn.Parameter | None, values: Tensor) -> nn.Parameter:
    """``parameter`` with ``values`` written into it, or a new one where it is None or differs in device, shape, dtype.

    The device differs when a checkpoint was assigned to a layer on the meta device.
    """
    if parameter is None:
        return nn.Parameter(values)
    if (parameter.device, parameter.shape, parameter.dtype) != (values.device, values.shape, values.dtype):
        return nn.Parameter(values, requires_grad=parameter.requires_grad)
    with torch.no_grad():
        parameter.copy_(values)
    return parameter


def clamp_trained_(parameter: nn.Parameter, low: float, high: float | None = None) -> None:
    """Bring a learned tensor back between ``low`` and ``high``, in place; one that is frozen stays as it is."""
    if parameter.requires_grad:
        parameter.clamp_(low, high)


def wide(x: Tensor) -> Tensor:
    """``x`` in at least float32: levels and learned tensors of half precision are computed there."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def count_below(x: Tensor, boundaries: Tensor) -> Tensor:
    """How many of the sorted boundaries are below each element, in the dtype of ``x``; at NaN any number."""
    if boundaries.numel() > 16:
        if x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last):
            return torch.bucketize(x.movedim(1, -1), boundaries).movedim(-1, 1).to(x.dtype)
        return torch.bucketize(x.contiguous(), boundaries).to(x.dtype)
    # A comparison for each is a third of the search's time: it is vectorized, if its result is no bool.
    count, above = torch.zeros_like(x), torch.empty_like(x)
    for boundary in boundaries:
        count.add_(torch.gt(x, boundary, out=above))
    return count
