"""What the processes of a distributed run tell each other beside gradients."""

import sys
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


def is_distributed() -> bool:
    """Whether this is one of the processes of a run of `torch.distributed`."""
    return dist.is_available() and dist.is_initialized()


def sum_over_processes(numbers: list[int], device: torch.device) -> list[int]:
    """The sums over all processes, which must all call it; without `torch.distributed` the numbers themselves.

    ``device`` is one whose tensors the processes can exchange: NCCL's are on the GPU.
    """
    if not is_distributed():
        return numbers
    sums = torch.tensor(numbers, dtype=torch.long, device=device)
    dist.all_reduce(sums)
    return sums.tolist()


def mean_over_processes(tensors: Iterable[Tensor], mine: bool, count: int) -> None:
    """Set floating-point tensors, in place, to their mean over the ``count`` processes for which ``mine`` is True.

    All processes must call it; without `torch.distributed` the tensors stay.
    """
    if is_distributed():
        for tensor in tensors:
            if tensor.is_floating_point():
                dist.all_reduce(tensor if mine else tensor.zero_())
                tensor.div_(count)


def is_sharded(module: nn.Module) -> bool:
    """Whether ``fully_shard`` holds the parameters of ``module``: what a forward writes to them is lost behind it."""
    if "torch.distributed.fsdp" not in sys.modules:
        return False
    from torch.distributed._composable_state import _module_state_mapping  # a module doesn't know what it is part of
    from torch.distributed.fsdp import FSDPModule

    return any(isinstance(each, FSDPModule) and module in set(each.modules()) for each in list(_module_state_mapping))


def whole(x: Tensor) -> Tensor:
    """``x``; of a shard that ``fully_shard`` left to this process the whole, for which all of them must call it."""
    full: Any = getattr(x, "full_tensor", None)
    return x if full is None else full()


def write_whole_(x: Tensor, values: Tensor) -> None:
    """Write ``values`` into ``x``, in place, or this process's part of them into its shard."""
    if hasattr(x, "full_tensor"):
        from torch.distributed.tensor import distribute_tensor

        shard: Any = x
        values = distribute_tensor(values, shard.device_mesh, shard.placements, src_data_rank=None)
    x.copy_(values)
