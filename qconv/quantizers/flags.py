"""Flags of quantizers as float tensors: 0 is unset, above 0 set.

A Python bool would be left behind by whatever copies a model tensor by tensor: moving averages, broadcasts between
processes, a copy of the state dict. Averaged, a bool or an integer is cut off to 0 or refused; of a float that was set
at some time something above 0 is left.
"""

from typing import Any

import torch
from torch import Tensor, nn

from .part import Rule

SHARE: Rule = (lambda flag: (flag >= 0) & (flag <= 1), "in the checkpoint must be from 0 to 1")
"""What flags in a checkpoint must fulfil: they may be averages."""


def flag_of(value: bool) -> Tensor:
    """A flag that is set or not."""
    return torch.tensor(float(value))


def is_set(flag: Tensor) -> bool:
    """Whether the flag is set; on the meta device, where there is nothing to read, it is not."""
    if flag.is_meta:
        return False
    if flag > 0:  # noqa: SIM103  # torch.compile breaks its graph at a branch in silence, at `bool` with a warning
        return True
    return False


def is_flag(value: Any) -> bool:
    """Whether a checkpoint may hold ``value`` for a flag: a number from 0 to 1, or a bool, as earlier ones do."""
    if isinstance(value, bool):
        return True
    if not isinstance(value, Tensor) or value.numel() != 1:
        return False
    if value.is_meta or value.dtype == torch.bool:
        return True
    return value.is_floating_point() and 0 <= value.item() <= 1


def flags_up_to(last: int, count: int) -> Tensor:
    """``count`` flags of which those up to number ``last`` are set."""
    return (torch.arange(count) <= last).float()


def is_plain(tensor: Tensor) -> bool:
    """Whether it holds values that can be looked at: no fake tensor, none on the meta device."""
    return type(tensor) in (Tensor, nn.Buffer) and not tensor.is_meta and not tensor.is_inference()


def is_readable(tensor: Tensor) -> bool:
    """Whether a number can be read now: of a plain tensor, while nothing is traced, vmapped or captured."""
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None or not is_plain(tensor):
        return False
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):  # pyright: ignore[reportAttributeAccessIssue]
        return False
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())
