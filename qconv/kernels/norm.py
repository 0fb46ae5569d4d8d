"""The backward of batch normalization in training, as a `torch.library` operator with a definition and kernels.

With the sums over batch and places of each channel ``d = Σ grad`` and ``p = Σ grad · (input − mean)``, and their number
``n``: ``grad_bias = d``, ``grad_weight = p · invstd`` and ``grad_input = (grad − d / n − (input − mean) · p · invstd² /
n) · invstd · weight``. ``mean`` and ``invstd`` (C,) are those that the forward has saved.

`norm_backward_` writes ``grad_input`` over ``input``, for an input that was computed anew and has no other use: then no
third tensor of that size exists.

The kernel in C takes float32 on the CPU whose channels are adjacent in memory. It adds up in float32 within 64 rows and
in float64 over them, the same for any number of threads and any instruction set. That in Triton is in `gpu.passes`.
"""

import math

import torch
from torch import Tensor

from .library import LIBRARY, register
from .native import GRAIN, best, kernels
from .native_bits import channels_last

LIBRARY.define(
    "norm_backward_(Tensor grad, Tensor(a!) input, Tensor? weight, Tensor mean, Tensor invstd) -> (Tensor, Tensor)"
)


def norm_backward_(
    grad: Tensor, input: Tensor, weight: Tensor | None, mean: Tensor, invstd: Tensor
) -> tuple[Tensor, Tensor]:
    """Write ``grad_input`` (N, C, *spatial) over ``input``; return ``grad_weight`` (C,) and ``grad_bias`` (C,)."""
    if weight is None:  # CUDA's operator needs one
        weight = torch.ones_like(mean)
    saved, mask = (None, None, mean, invstd), [True, True, True]
    grads = torch.ops.aten.native_batch_norm_backward(grad, input, weight, *saved, True, 0.0, mask)
    input.copy_(grads[0])
    return grads[1], grads[2]


def by_kernel(
    grad: Tensor,
    input: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    invstd: Tensor,
) -> tuple[Tensor, Tensor] | None:
    """As `norm_backward_`; None if the kernel does not take the operands."""
    module, channels = kernels(), input.shape[1]
    of_channels = [x for x in (weight, mean, invstd) if x is not None]
    if module is None or grad.shape != input.shape or not input.numel() or not channels_last(input):
        return None
    if not channels_last(grad) or any(x.shape != (channels,) for x in of_channels):
        return None
    if any(x.dtype != torch.float32 or not x.is_cpu for x in (grad, input, *of_channels)):
        return None
    parameters = [None if x is None else x.contiguous() for x in (weight, mean, invstd)]
    grad_weight, grad_bias = input.new_empty(channels), input.new_empty(channels)
    tensors = grad, input, *parameters, input, grad_weight, grad_bias
    addresses = (0 if x is None else x.data_ptr() for x in tensors)
    module.norm_backward(*addresses, math.prod(input.shape) // channels, channels, best(), GRAIN)
    return grad_weight, grad_bias


register(norm_backward_, by_kernel, "passes")
