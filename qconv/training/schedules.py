"""Learning-rate schedules: functions `(optimizer, total_steps) -> scheduler`, stepped after every optimizer step.

`torch.optim.lr_scheduler.OneCycleLR` has the same form; where the optimizer's rules give groups several learning rates,
its `max_lr` must be a list.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from ..ground.checks import check_not_negative


def cosine(optimizer: Optimizer, total_steps: int, *, warmup: float = 0.1, final: float = 0.0) -> LambdaLR:
    """Linear warm-up, then half a cosine.

    Step i of W = warmup · total_steps warm-up steps has (i + 1) / W of the learning rate; from there it falls to
    `final` times the learning rate at the last step.

    Raises:
        ValueError: if `warmup` is not in [0, 1), or `final` is negative.
    """
    _check(warmup, final=final)
    return _warmed(
        optimizer, total_steps, warmup, lambda done: final + (1 - final) * 0.5 * (1 + math.cos(math.pi * done))
    )


def linear(optimizer: Optimizer, total_steps: int, *, warmup: float = 0.0, final: float = 0.0) -> LambdaLR:
    """Linear warm-up as in `cosine`, then a straight line to `final` times the learning rate at the last step."""
    _check(warmup, final=final)
    return _warmed(optimizer, total_steps, warmup, lambda done: final + (1 - final) * (1 - done))


def steps(
    optimizer: Optimizer,
    total_steps: int,
    *,
    at: Sequence[float],
    factor: float = 0.1,
    warmup: float = 0.0,
    only: Mapping[str, Any] | None = None,
) -> LambdaLR:
    """Linear warm-up as in `cosine`; the learning rate is multiplied by `factor` at each share of the steps in `at`.

    The published "x0.1 at epochs 100 and 150 of 200" is ``at=[0.5, 0.75]``. With `only`, groups of parameters without
    these options keep their learning rate: ``only={"binary": True}`` is Bop's own.

    Raises:
        ValueError: shares that do not increase from above 0 to below 1, `warmup` is not in [0, 1), `factor` is
            negative, or no group has the options in `only`.
    """
    if list(at) != sorted(set(at)) or not all(0 < share < 1 for share in at):
        raise ValueError(f"at (={list(at)}) must be increasing shares of the steps, above 0 and below 1")
    marks = [round(share * total_steps) for share in at]
    _check(warmup, factor=factor)
    rising = round(warmup * total_steps)

    def factor_at(step: int) -> float:
        return (step + 1) / rising if step < rising else factor ** sum(step >= mark for mark in marks)

    wanted = dict(only or {}).items()
    follows = [all(group.get(name) == value for name, value in wanted) for group in optimizer.param_groups]
    if not any(follows):
        raise ValueError(f"only (={dict(wanted)}) must be options of a group of the optimizer's parameters")
    return LambdaLR(optimizer, [factor_at if each else lambda step: 1.0 for each in follows])


def constant(optimizer: Optimizer, total_steps: int) -> LambdaLR:
    """The optimizer's own learning rate throughout."""
    return LambdaLR(optimizer, lambda step: 1.0)


def _check(warmup: float, **multiples: float) -> None:
    if not 0 <= warmup < 1:
        raise ValueError(f"warmup (={warmup}) must be a share of the steps, 0 <= warmup < 1")
    check_not_negative(**multiples)  # with a negative learning rate the loss climbs


def _warmed(optimizer: Optimizer, total_steps: int, warmup: float, fall: Callable[[float], float]) -> LambdaLR:
    """The warm-up, then `fall` of the share of the falling steps that are done, from 0 to 1."""
    rising = round(warmup * total_steps)
    falling = max(1, total_steps - rising - 1)
    return LambdaLR(
        optimizer,
        lambda step: (step + 1) / rising if step < rising else fall(min(1.0, (step - rising) / falling)),
    )
