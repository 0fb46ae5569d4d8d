"""The processes of a distributed run: sums over them, and meeting points before they exchange numbers.

A collective pairs up different calls of the processes, or waits for one that never comes. `meet` detects this in
advance, through the group's key-value store: it checks that all are at the same place.
"""

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d

WATCHED = 8
"""The number of other processes that a waiting process checks one by one, so as not to overwhelm the store."""
PAUSE = 0.2
"""Seconds between two checks."""


def is_distributed() -> bool:
    """Whether this process is part of a run of `torch.distributed`."""
    return dist.is_available() and dist.is_initialized()


def rank_and_count() -> tuple[int, int]:
    """The rank of this process and the number of processes; 0 and 1 without `torch.distributed`."""
    return (dist.get_rank(), dist.get_world_size()) if is_distributed() else (0, 1)


def process_count() -> int:
    """The number of processes of the run; 1 without `torch.distributed`."""
    return rank_and_count()[1]


def check_alone(what: str) -> None:
    """Raise a RuntimeError if there are several processes, which would each come to another result."""
    if (count := process_count()) > 1:
        raise RuntimeError(
            f"{what} works in one process, but there are {count} (torch.distributed): run it in a separate "
            "program, save the result, and load it in all processes"
        )


def sum_over_processes(numbers: list[int], device: torch.device) -> list[int]:
    """Return the sums over all processes, which must all call it; without `torch.distributed` the numbers themselves.

    ``device`` is one whose tensors the processes can exchange: for NCCL, a GPU.
    """
    if not is_distributed():
        return numbers
    sums = torch.tensor(numbers, dtype=torch.long, device=device)
    dist.all_reduce(sums)
    return sums.tolist()


def mean_over_processes(tensors: Iterable[Tensor], mine: bool, count: int) -> None:
    """Set floating-point tensors, in place, to their mean over the ``count`` processes for which ``mine`` is True.

    All processes must call it; without `torch.distributed` the tensors stay unchanged.
    """
    if is_distributed():
        for tensor in tensors:
            if tensor.is_floating_point():
                dist.all_reduce(tensor if mine else tensor.zero_())
                tensor.div_(count)


def is_sharded(module: nn.Module) -> bool:
    """Whether ``fully_shard`` holds the parameters of ``module``: what a forward writes to them is lost afterwards."""
    if "torch.distributed.fsdp" not in sys.modules:
        return False
    from torch.distributed._composable_state import _module_state_mapping  # a module doesn't know what it is part of
    from torch.distributed.fsdp import FSDPModule

    return any(
        isinstance(wrapped, FSDPModule) and module in set(wrapped.modules()) for wrapped in list(_module_state_mapping)
    )


def whole(x: Tensor) -> Tensor:
    """Return ``x``, or the whole of a shard by ``fully_shard``, for which all processes must call it."""
    full: Any = getattr(x, "full_tensor", None)
    return x if full is None else full()


def placed_as(x: Tensor, values: Tensor) -> Tensor:
    """Return ``values``, or a shard of them if ``x`` is one: what can be written into ``x`` in place."""
    if not hasattr(x, "full_tensor"):
        return values
    from torch.distributed.tensor import distribute_tensor

    shard: Any = x
    return distribute_tensor(values, shard.device_mesh, shard.placements, src_data_rank=None)


@contextmanager
def gathered(module: nn.Module) -> Iterator[None]:
    """Context manager: whole parameters in place of shards by ``fully_shard``; all processes must use it.

    What is written to the whole ones is in the shards afterwards.
    """
    own = [(part, name, x) for part in module.modules() for name, x in part._parameters.items()]
    shards = [(part, name, x) for part, name, x in own if x is not None and hasattr(x, "full_tensor")]
    for part, name, shard in shards:
        part._parameters[name] = nn.Parameter(whole(shard.detach()), shard.requires_grad)
    try:
        yield
    finally:
        for part, name, shard in shards:
            values, part._parameters[name] = getattr(part, name), shard
            with torch.no_grad():
                shard.copy_(placed_as(shard, values))


def meet(place: str, where: str) -> None:
    """Wait until all processes are at ``place``; return at once without `torch.distributed`.

    Each process counts its calls, and calls with the same number must be at the same place. A process without a call in
    a step leaves no trace in the store, and is waited for until the timeout of the group: a shorter timeout here would
    refuse processes that are late for a good reason, such as compiling or reading their first batch.

    ``where`` names the place in messages: a layer, a function.

    Raises:
        RuntimeError: another process is at another place, has gone on to the backward, or has not come within the
            timeout of the process group.
    """
    store = _store()
    if store is None:
        return
    rank, size = rank_and_count()
    turn = store.add(f"qconv/{rank}/turns", 1)
    store.set(f"qconv/{rank}/{turn}", f"{where}\n{place}")
    keys = [f"qconv/{other}/{turn}" for other in range(size)]
    watched = [(rank + ahead) % size for ahead in range(1, min(size, WATCHED + 1))]
    until = time.monotonic() + store.timeout.total_seconds()
    pause = 1e-3
    while not store.check(keys):
        time.sleep(pause)
        pause = min(2 * pause, PAUSE)
        if pause < PAUSE:
            continue
        for other in watched:
            if store.check([f"qconv/{other}/{turn}"]):
                _compare(store, other, turn, place, where)
            elif _backward_after(store, other) == turn - 1 > _backward_after(store, rank):
                raise _apart(where, f"process {other} has gone on to the backward without it")
        if time.monotonic() > until:
            missing = [other for other in range(size) if not store.check([f"qconv/{other}/{turn}"])]
            raise _apart(where, f"process {missing[0]} did not arrive within {store.timeout}")
    for other in range(size):
        if other != rank:
            _compare(store, other, turn, place, where)


def leaving() -> Callable[[object], None]:
    """The gradient hook that tells the processes waiting in `meet` that this one has gone on."""

    def mark(grad: object) -> None:
        if (store := _store()) is not None:
            rank = dist.get_rank()
            store.set(f"qconv/{rank}/backward", str(store.add(f"qconv/{rank}/turns", 0)))

    return mark


def _store() -> Any:
    """Return the store of the processes; None if there are no others."""
    if not is_distributed() or dist.get_world_size() == 1 or dist.get_backend() == "fake":
        return None
    return distributed_c10d._get_default_store()  # there is no public access to it


def _backward_after(store: Any, rank: int) -> int:
    """The number of turns after which that process last was in the backward; -1 if it never was."""
    key = f"qconv/{rank}/backward"
    return int(store.get(key)) if store.check([key]) else -1


def _compare(store: Any, other: int, turn: int, place: str, where: str) -> None:
    there, other_place = store.get(f"qconv/{other}/{turn}").decode().split("\n", 1)
    if other_place != place:
        raise _apart(where, f"process {other} is at {there}")


def _apart(where: str, why: str) -> RuntimeError:
    return RuntimeError(
        f"{where}: its range is the mean over all processes, but {why}: where processes take different paths, call "
        "qconv.calibrate(model, batches) in all of them before training"
    )
