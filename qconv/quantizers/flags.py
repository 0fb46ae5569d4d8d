"""Flags of quantizers as float tensors: 0 is unset, above 0 is set.

Anything that copies a model tensor by tensor would miss a Python bool: moving averages, broadcasts between processes, a
copied state dict. Averaging refuses a bool or an integer, or truncates it to 0; a float that was ever set stays above
0.
"""

from typing import Any

import torch
from torch import Tensor, nn

from .part import Rule

SHARE: Rule = (lambda flag: (flag >= 0) & (flag <= 1), "in the checkpoint must be from 0 to 1")
"""The rule for flags in a checkpoint: they may be averages."""


def flag_of(value: bool) -> Tensor:
    """Return a flag with this value."""
    return torch.tensor(float(value))


def is_set(flag: Tensor) -> bool:
    """Whether the flag is set; False on the meta device, where there is nothing to read."""
    if flag.is_meta:
        return False
    if flag > 0:  # noqa: SIM103  # torch.compile breaks its graph at a branch in silence, at `bool` with a warning
        return True
    return False


def is_flag(value: Any) -> bool:
    """Whether ``value`` may be a flag in a checkpoint: a number from 0 to 1, or a bool, as in earlier versions."""
    if isinstance(value, bool):
        return True
    if not isinstance(value, Tensor) or value.numel() != 1:
        return False
    if value.is_meta or value.dtype == torch.bool:
        return True
    return value.is_floating_point() and 0 <= value.item() <= 1


def flags_up_to(last: int, count: int) -> Tensor:
    """Return ``count`` flags, those up to number ``last`` set."""
    return (torch.arange(count) <= last).float()


def has_values(tensor: Tensor) -> bool:
    """Whether its values can be read: it is neither a fake tensor nor on the meta device."""
    return type(tensor) in (Tensor, nn.Buffer) and not tensor.is_meta and not tensor.is_inference()


def may_differ(flag: Tensor, seen: tuple[int, int] | None, training: bool) -> bool:
    """Whether a flag may have another value than when its `mark` was ``seen``, and is to be read again.

    Anything may write to it: an average of models, weights that are restored by ``copy_``. But
    `torch.nn.parallel.DistributedDataParallel` writes to each buffer before each forward, and to read one from an
    accelerator takes longer than a layer. So it is not read again there in training.
    """
    if not has_values(flag) or (seen is not None and training and flag.device.type != "cpu"):
        return False
    return mark(flag) != seen


def mark(flag: Tensor) -> tuple[int, int]:
    """What changes whenever somebody writes to the flag, or puts another in its place."""
    return id(flag), flag._version


def is_readable(tensor: Tensor) -> bool:
    """Whether its number can be read now: it has values, and nothing is being traced, vmapped or captured."""
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None or not has_values(tensor):
        return False
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):  # pyright: ignore[reportAttributeAccessIssue]
        return False
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())
