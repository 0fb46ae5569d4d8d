"""RPReLU and its backward, as `torch.library` operators with a definition and kernels.

``y = PReLU_c(x + before_c) + after_c`` with ``PReLU_c(v) = v if v > 0 else slope_c · v``. A kernel reads memory once,
where torch's operators do it three times forward and six backward. That in C takes float32 on the CPU whose channels
are adjacent in memory. Its elements are those of torch's operators bit for bit, but for the bits of a NaN; its sums
over batch and places are made in float32 within 64 rows and in float64 over them, the same for any number of threads
and any instruction set. That in Triton is in `gpu.rprelu`.
"""

import math

import torch
from torch import Tensor

from .gpu import has_kernels
from .library import LIBRARY, register
from .native import GRAIN, best, kernels
from .native_bits import channels_last

LIBRARY.define("rprelu(Tensor input, Tensor before, Tensor slope, Tensor after) -> Tensor")
LIBRARY.define(
    "rprelu_backward(Tensor grad, Tensor input, Tensor before, Tensor slope) -> (Tensor, Tensor, Tensor, Tensor)"
)


def rprelu(input: Tensor, before: Tensor, slope: Tensor, after: Tensor) -> Tensor:
    """Return ``y``, ``(N, C, *spatial)`` in the dtype of ``input``; the others are ``(C,)``."""
    shifted = torch.prelu(input + _per_channel(before, input), slope.to(input.dtype))
    return shifted + _per_channel(after, input)


def rprelu_backward(
    grad: Tensor, input: Tensor, before: Tensor, slope: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of ``input``, ``before``, ``slope`` and ``after``, the last three ``(C,)``."""
    shifted, places = input + _per_channel(before, input), [0, *range(2, input.ndim)]
    passed = torch.where(shifted > 0, grad, grad * _per_channel(slope, input))
    of_slope = torch.where(shifted > 0, 0.0, shifted * grad)
    return passed, passed.sum(places), of_slope.sum(places), grad.sum(places)


def _per_channel(values: Tensor, input: Tensor) -> Tensor:
    return values.to(input.dtype).view(-1, *[1] * (input.ndim - 2))


def has_kernel(input: Tensor) -> bool:
    """Whether there is a kernel for tensors of this dtype on this device."""
    if input.is_cuda:
        return input.dtype in (torch.float32, torch.bfloat16, torch.float16) and has_kernels(input.device.index or 0)
    return input.is_cpu and input.dtype == torch.float32


def forward_by_kernel(input: Tensor, before: Tensor, slope: Tensor, after: Tensor) -> Tensor | None:
    """`rprelu`; None if the kernel does not take the operands."""
    if not _takes((input,), (before, slope, after)):
        return None
    output = torch.empty_like(input)
    _call((None, input, before, slope, after, output, None, None, None), input.shape)
    return output


def backward_by_kernel(grad: Tensor, input: Tensor, before: Tensor, slope: Tensor) -> tuple[Tensor, ...] | None:
    """`rprelu_backward`; None if the kernel does not take the operands."""
    if grad.shape != input.shape or not _takes((input, grad), (before, slope)):
        return None
    outputs = torch.empty_like(input), *(torch.empty_like(before) for _ in range(3))
    _call((grad, input, before, slope, None, *outputs), input.shape)
    return outputs


def _takes(values: tuple[Tensor, ...], of_channels: tuple[Tensor, ...]) -> bool:
    if kernels() is None or any(x.ndim < 2 or not x.numel() or not channels_last(x) for x in values):
        return False
    if any(x.dtype != torch.float32 or not x.is_cpu for x in (*values, *of_channels)):
        return False
    return all(x.shape == values[0].shape[1:2] and x.is_contiguous() for x in of_channels)


def _call(tensors: tuple[Tensor | None, ...], shape: torch.Size) -> None:
    module = kernels()
    if module is None:
        raise ValueError("RPReLU in C needs the compiled module")
    addresses = (0 if x is None else x.data_ptr() for x in tensors)
    module.rprelu(*addresses, math.prod(shape) // shape[1], shape[1], best(), GRAIN)


register(rprelu, forward_by_kernel, "rprelu")
register(rprelu_backward, backward_by_kernel, "rprelu")
