"""The backward of batch normalization in training, as `torch.library` operators with a definition and a kernel in C.

With the sums over batch and places of each channel ``d = Σ grad`` and ``p = Σ grad · (input − mean)``, and their number
``n``: ``grad_bias = d``, ``grad_weight = p · invstd`` and ``grad_input = (grad − d / n − (input − mean) · p · invstd² /
n) · invstd · weight``. ``mean`` and ``invstd`` (C,) are those that the forward has saved.

`norm_backward_` writes ``grad_input`` over ``input``, for an input that was computed anew and has no other use: then no
third tensor of that size exists.

The kernel takes float32 on the CPU whose channels are adjacent in memory. It adds up in float32 within 64 rows and in
float64 over them, the same for any number of threads and any instruction set.
"""

import math

import torch
from torch import Tensor

from .library import LIBRARY
from .native import INSTRUCTION_SETS, kernels
from .native_bits import channels_last

_GRAIN = 1 << 15  # numbers below which a second thread costs more than it gains
_OPERANDS = "Tensor? weight, Tensor mean, Tensor invstd"
LIBRARY.define(f"norm_backward(Tensor grad, Tensor input, {_OPERANDS}) -> (Tensor, Tensor, Tensor)")
LIBRARY.define(f"norm_backward_(Tensor grad, Tensor(a!) input, {_OPERANDS}) -> (Tensor, Tensor)")


def norm_backward(
    grad: Tensor, input: Tensor, weight: Tensor | None, mean: Tensor, invstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``grad_input`` (N, C, *spatial), ``grad_weight`` (C,) and ``grad_bias`` (C,)."""
    saved = None, None, mean, invstd
    return torch.ops.aten.native_batch_norm_backward(grad, input, weight, *saved, True, 0.0, [True, True, True])


def norm_backward_(
    grad: Tensor, input: Tensor, weight: Tensor | None, mean: Tensor, invstd: Tensor
) -> tuple[Tensor, Tensor]:
    """Write ``grad_input`` over ``input``; return ``grad_weight`` (C,) and ``grad_bias`` (C,)."""
    grad_input, *others = norm_backward(grad, input, weight, mean, invstd)
    input.copy_(grad_input)
    return others[0], others[1]


def by_kernel(
    grad: Tensor,
    input: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    invstd: Tensor,
    output: Tensor,
    instruction_set: str | None = None,
) -> tuple[Tensor, Tensor] | None:
    """Write ``grad_input`` to ``output``, which may be ``input``; None if the kernel does not take the operands.

    ``instruction_set`` is one of `native.instruction_sets`, the best one when None.
    """
    module, channels = kernels(), input.shape[1]
    of_channels = [x for x in (weight, mean, invstd) if x is not None]
    if module is None or grad.shape != input.shape or not input.numel() or not channels_last(input):
        return None
    if not (channels_last(grad) and channels_last(output)) or any(x.shape != (channels,) for x in of_channels):
        return None
    everything = (grad, input, output, *of_channels)
    if any(x.dtype != torch.float32 or not x.is_cpu for x in everything):
        return None
    parameters = [None if x is None else x.contiguous() for x in (weight, mean, invstd)]
    grad_weight, grad_bias = torch.empty(channels), torch.empty(channels)
    best = module.instruction_sets.bit_length() - 1
    used = best if instruction_set is None else INSTRUCTION_SETS.index(instruction_set)
    tensors = grad, input, *parameters, output, grad_weight, grad_bias
    addresses = (0 if x is None else x.data_ptr() for x in tensors)
    module.norm_backward(*addresses, math.prod(input.shape) // channels, channels, used, _GRAIN)
    return grad_weight, grad_bias


def _norm_backward(
    grad: Tensor, input: Tensor, weight: Tensor | None, mean: Tensor, invstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    output = torch.empty_like(input)
    others = by_kernel(grad, input, weight, mean, invstd, output)
    return norm_backward(grad, input, weight, mean, invstd) if others is None else (output, *others)


def _norm_backward_(
    grad: Tensor, input: Tensor, weight: Tensor | None, mean: Tensor, invstd: Tensor
) -> tuple[Tensor, Tensor]:
    others = by_kernel(grad, input, weight, mean, invstd, input)
    return norm_backward_(grad, input, weight, mean, invstd) if others is None else others


for _definition, _kernel in ((norm_backward, _norm_backward), (norm_backward_, _norm_backward_)):
    LIBRARY.impl(_definition.__name__, _definition, "CompositeExplicitAutograd")
    LIBRARY.impl(_definition.__name__, _kernel, "CPU")
    torch.library.register_fake(f"qconv::{_definition.__name__}", _definition, lib=LIBRARY)
