"""Flags of quantizers as float tensors: 0 is unset, above 0 is set.

Anything that copies a model tensor by tensor would miss a Python bool: moving averages, broadcasts between processes, a
copied state dict. Averaging refuses a bool or an integer, or truncates it to 0; a float that was ever set stays above
0.
"""

from typing import Any

import torch
from torch import Tensor, nn

from .part import Rule

SHARE: Rule = (lambda flag: (flag >= 0) & (flag <= 1), "must be from 0 to 1")
"""The rule for flags in a checkpoint: they may be averages."""


def flag_of(value: bool) -> Tensor:
    """Return a flag with this value."""
    return torch.tensor(float(value))


def is_set(flag: Tensor, above: float = 0.0) -> bool:
    """Whether the flag is ``above`` a value; False on the meta device, where there is nothing to read."""
    if flag.is_meta:
        return False
    if not torch.compiler.is_compiling():
        return flag.item() > above
    if flag > above:  # noqa: SIM103  # torch.compile breaks its graph at a branch in silence, at `bool` with a warning
        return True
    return False


def is_flag(value: Any) -> bool:
    """Whether ``value`` may be a flag in a checkpoint: a number from 0 to 1, or a bool."""
    if isinstance(value, bool):
        return True
    if not isinstance(value, Tensor) or value.numel() != 1:
        return False
    if value.is_meta or value.dtype == torch.bool:
        return True
    return value.is_floating_point() and 0 <= value.item() <= 1


class Mark:
    """A mark of a flag's present value, to detect later writes or a replaced tensor. A copy of it is None.

    Writes through ``.data`` leave no trace, nor do those to a tensor of `torch.inference_mode`.
    """

    @classmethod
    def on(cls, flag: Tensor) -> "Mark | None":
        """Return the mark of a flag, or None if it can't be read now."""
        return cls(flag) if is_readable(flag) else None

    def __init__(self, flag: Tensor) -> None:
        self.flag = flag  # not its id, which the next tensor may have
        self.version = None if flag.is_inference() else flag._version

    def is_of(self, flag: Tensor) -> bool:
        """Whether the mark belongs to this flag, unchanged."""
        return self.flag is flag and (self.version is None or self.version == flag._version)

    def __reduce__(self) -> Any:
        return type(None), ()


def may_differ(flag: Tensor, seen: Mark | None, training: bool) -> bool:
    """Whether a flag that `is_readable` may have changed since it was ``seen``, and must be read again.

    Anything may write to it: an average of models, weights that are restored by ``copy_`` or through ``.data``. So on
    the CPU it is always read. To read one from an accelerator takes longer than a layer, and
    `torch.nn.parallel.DistributedDataParallel` writes to each buffer before each forward: there it is read again if it
    is another tensor, and outside of training if it was written to, but for ``.data``.
    """
    if flag.is_cpu or seen is None or seen.flag is not flag:
        return True
    return not (training or seen.is_of(flag))


def is_readable(tensor: Tensor) -> bool:
    """Whether the flag's number can be read now: it has a value, and nothing is being traced, vmapped or captured."""
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        return False
    if type(tensor) not in (Tensor, nn.Buffer) or tensor.is_meta or _are_fake():
        return False
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):  # pyright: ignore[reportAttributeAccessIssue]
        return False
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def _are_fake() -> bool:
    """Whether values are being faked, so that not even a real tensor's number can be read."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
