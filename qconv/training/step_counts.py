"""What counts optimizer steps in a checkpoint, for a run that goes on to another end."""

import inspect
import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from pytorch_lightning import Trainer
from torch import Tensor, nn
from torch.optim import lr_scheduler

STEPS = "steps_per_epoch"
"""The checkpoint's key for the number of optimizer steps in an epoch."""
TOTAL = "total_steps"
"""The checkpoint's key for the number of optimizer steps in the whole run."""
LENGTHS = ("total_steps", "_schedule_phases", "T_max", "total_iters", "milestones", "step_size")
"""The attributes in which torch's schedules store their length."""
BEFORE = "lengths_before"
"""The key for the lengths of its schedules, in a checkpoint that has been read."""
FOLLOW = (
    *(lr_scheduler.LambdaLR, lr_scheduler.OneCycleLR, lr_scheduler.MultiStepLR, lr_scheduler.StepLR),
    *(lr_scheduler.CosineAnnealingLR, lr_scheduler.LinearLR, lr_scheduler.PolynomialLR, lr_scheduler.ConstantLR),
)
"""Schedules that store their position as a number of steps, and all their lengths in `LENGTHS`."""


def steps_per_epoch(trainer: Trainer) -> int | None:
    """Return the number of optimizer steps in an epoch of `trainer.fit`; None if epochs don't decide its end."""
    epochs = trainer.max_epochs
    if trainer.max_steps != -1 or epochs is None or epochs < 1 or trainer.estimated_stepping_batches == math.inf:
        return None
    if trainer.num_training_batches == math.inf:
        raise ValueError(
            "the training loader has no length, so the steps of an epoch are not known: set "
            "+trainer.limit_train_batches"
        )
    return math.ceil(trainer.num_training_batches / trainer.accumulate_grad_batches)


def forget_lengths_(checkpoint: dict[str, Any]) -> None:
    """Remove the lengths of schedules from a checkpoint: the resumed run has its own, and perhaps more epochs."""
    checkpoint[BEFORE] = [
        {length: schedule.pop(length) for length in LENGTHS if length in schedule}
        for schedule in checkpoint.get("lr_schedulers", ())
    ]


def check_length(checkpoint: dict[str, Any], total: int | None, scheduler: Any, make: Callable[..., Any]) -> None:
    """Raise a ValueError for a schedule that keeps its length though the number of optimizer steps has changed."""
    before = checkpoint.get(TOTAL)
    if before is None or total is None or before == total or type(scheduler) in FOLLOW:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some take a first step before the optimizer does
        one, other = (make(_like(scheduler.optimizer), total_steps=steps) for steps in (before, total))
    if not _same(one.state_dict(), other.state_dict()):
        raise ValueError(
            f"the training has {total} optimizer steps now, and {before} so far, which scheduler "
            f"({type(scheduler).__name__}) can't follow: resume with the same end, or use a schedule of "
            "qconv.training.schedules"
        )


def _like(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return an optimizer with the same options in its groups, to examine a schedule with."""
    own = ("params", "lr", "initial_lr", "max_lr", "min_lr")
    groups = [
        {"params": [nn.Parameter(torch.zeros(1))], **{name: group[name] for name in group if name not in own}}
        for group in optimizer.param_groups
    ]
    return torch.optim.SGD(groups, lr=1.0, momentum=0.9)


def _same(one: Any, other: Any) -> bool:
    """Whether two states of a schedule are equal; functions count as equal."""
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    return callable(one) or bool(one == other)


def check_takes_steps(make_scheduler: Callable[..., Any]) -> None:
    """Raise a ValueError unless a schedule takes ``total_steps``; torch's schedules over epochs do not."""
    try:
        parameters = inspect.signature(make_scheduler).parameters.values()
    except (TypeError, ValueError):  # it can't be asked
        return
    if not any(each.name == "total_steps" or each.kind is each.VAR_KEYWORD for each in parameters):
        made = getattr(make_scheduler, "func", make_scheduler)
        raise ValueError(
            f"scheduler ({getattr(made, '__name__', made)}) must take total_steps: schedules change after each step, "
            "not after each epoch. Use scheduler=steps, cosine, linear or constant, or your own function "
            "(optimizer, total_steps) that returns one"
        )


def follow_length_(scheduler: Any, before: Mapping[str, Any]) -> None:
    """Set the learning rates as the schedule has them now, if it had another length ``before``.

    Most schedules of torch compute a rate from the last one, so a cosine that has ended would stay at 0. The rates of
    `LambdaLR` and `OneCycleLR` depend on the step alone.
    """
    now = {length: getattr(scheduler, length) for length in before}
    if isinstance(scheduler, lr_scheduler.LambdaLR | lr_scheduler.OneCycleLR):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # get_lr is meant for step
            rates: Any = scheduler.get_lr()
    elif now == before or type(scheduler) not in FOLLOW:
        return
    else:
        rates = scheduler._get_closed_form_lr()
    for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    scheduler._last_lr = [*rates]


def check_steps(checkpoint: dict[str, Any], trainer: Trainer) -> None:
    """Raise a ValueError if an epoch has another number of optimizer steps than so far: schedules count steps."""
    before, now = checkpoint.get(STEPS), steps_per_epoch(trainer)
    if before is not None and now is not None and before != now:
        raise ValueError(
            f"an epoch has {now} optimizer steps now, and {before} so far: resume with as many, by data.batch_size, "
            "trainer.devices and +trainer.accumulate_grad_batches, or start a run from these weights by init_from="
        )
