"""Functions of each element by itself, as `torch.library` operators with definitions and, on a GPU, one kernel each.

Torch's operators start up to fifteen kernels for them. The Triton kernels (`gpu.pointwise`) give the definitions' bits,
but for those of a NaN. On the CPU the definitions run.
"""

import math

import torch
from torch import Tensor

from .library import LIBRARY, register

BELOW_ROOT_HALF = {
    torch.float32: math.floor(math.sqrt(0.5) * 2**24) / 2**24,
    torch.float64: math.nextafter(math.sqrt(0.5), 0),  # math.sqrt(0.5) is above 1/√2
}
"""The largest number of a dtype below 1/√2."""
LIBRARY.define("sign(Tensor input) -> Tensor")
LIBRARY.define("pass_between(Tensor grad, Tensor input, Tensor low, Tensor high) -> Tensor")
LIBRARY.define("round_power_of_two(Tensor x, int low, int high) -> Tensor")


def sign(input: Tensor) -> Tensor:
    """Return +1 where ``input >= 0``, also at -0.0, else -1; NaN gives either.

    Example:
        >>> sign(torch.tensor([-2.0, -0.0, 0.0, 0.5]))
        tensor([-1.,  1.,  1.,  1.])
    """
    positive_zero = input + 0.0
    one = torch.ones((), dtype=input.dtype, device="cpu" if input.is_cuda else input.device)  # sent with the call
    return torch.copysign(one, positive_zero)


def pass_between(grad: Tensor, input: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Return ``grad · 1[low <= input <= high]``, compared in at least float32.

    ``low`` and ``high`` are one number, or one for each channel or filter; they broadcast against ``input``.

    Example:
        >>> pass_between(torch.ones(3), torch.tensor([-1.0, 0.5, 2.0]), torch.tensor(0.0), torch.tensor(2.0))
        tensor([0., 1., 1.])
    """
    wide = input.to(torch.promote_types(input.dtype, torch.float32))
    return grad * (wide.clamp(low, high) == wide)


def round_power_of_two(x: Tensor, low: int, high: int) -> Tensor:
    """Return ``sign(x) · 2^round(log2 |x|)`` with the exponent in ``[low, high]``; ±0 gives 0, NaN gives NaN.

    The rounding is in the log domain: from 2^e to 2^(e+1) the threshold is 2^(e+½), not the midpoint 1.5 · 2^e.

    Example:
        >>> round_power_of_two(torch.tensor([0.7, -0.8, 0.0, 3.0, 0.1]), -15, 0)
        tensor([ 0.5000, -1.0000,  0.0000,  1.0000,  0.1250])
    """
    return torch.exp2(round_log2(x, low, high)) * x.sign()


def round_log2(x: Tensor, low: int, high: int) -> Tensor:
    """Return ``round(log2 |x|)``, at least ``low`` and at most ``high``, exactly; NaN for NaN.

    The logarithm itself is rounded, beside a threshold to the other side. So its result is compared: e is right if
    ``1/√2 < |x| / 2^e < √2``, where the division is exact. There is no tie, since √2 is irrational.
    """
    magnitude = x.to(torch.promote_types(x.dtype, torch.float32)).abs()
    exponent = magnitude.log2().round().clamp(low, high)
    ratio, below = magnitude / torch.exp2(exponent), BELOW_ROOT_HALF[magnitude.dtype]
    exponent.add_(ratio <= below, alpha=-1).add_(ratio > 2 * below)
    return exponent.clamp(low, high).to(x.dtype)


for _definition in (sign, pass_between, round_power_of_two):
    register(_definition, triton="pointwise")
