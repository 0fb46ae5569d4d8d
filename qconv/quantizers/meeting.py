"""Processes that must be at the same place before they exchange numbers: found out through the group's key-value store.

A collective pairs up whatever the processes are at, or waits for one that never comes.
"""

import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from .processes import is_distributed

WATCHED = 8
"""How many of the others a process that waits looks at one by one, so that many processes don't overwhelm the store."""
PAUSE = 0.2
"""Seconds between two looks."""


def meet(place: str, where: str) -> None:
    """Wait until all processes are at ``place``; nothing without `torch.distributed`.

    Each process counts its calls, and the same call of all must be at the same place. One that makes no call in a step
    leaves no trace in the store, and is waited for until the timeout: a shorter one of the meeting's own would refuse
    processes that are late for a good reason, as they compile or read their first batch.

    Args:
        place: what must be equal.
        where: what a message calls it: a layer, a function.

    Raises:
        RuntimeError: another process is at another place, has gone on to the backward, or has not come within the
            timeout of the process group.
    """
    store = _store()
    if store is None:
        return
    rank, size = dist.get_rank(), dist.get_world_size()
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
            raise _apart(where, f"process {missing[0]} has not come there within {store.timeout}")
    for other in range(size):
        if other != rank:
            _compare(store, other, turn, place, where)


def leaving() -> Callable[[object], None]:
    """What a hook of the gradient calls: tells those that wait in `meet` that this process has gone on."""

    def mark(grad: object) -> None:
        if (store := _store()) is not None:
            rank = dist.get_rank()
            store.set(f"qconv/{rank}/backward", str(store.add(f"qconv/{rank}/turns", 0)))

    return mark


def _store() -> Any:
    """The store of the processes; None where there are no others."""
    if not is_distributed() or dist.get_world_size() == 1 or dist.get_backend() == "fake":
        return None
    return distributed_c10d._get_default_store()  # there is no public way to it


def _backward_after(store: Any, rank: int) -> int:
    """The number of turns after which that process last was in the backward; -1 if it never was."""
    key = f"qconv/{rank}/backward"
    return int(store.get(key)) if store.check([key]) else -1


def _compare(store: Any, other: int, turn: int, place: str, where: str) -> None:
    there, found = store.get(f"qconv/{other}/{turn}").decode().split("\n", 1)
    if found != place:
        raise _apart(where, f"process {other} is at {there}")


def _apart(where: str, why: str) -> RuntimeError:
    return RuntimeError(
        f"{where}: its range is the mean over all processes, but {why}: where processes take different paths, call "
        "qconv.calibrate(model, batches) in all of them before training"
    )
