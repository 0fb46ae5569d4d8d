"""What counts optimizer steps in a checkpoint, for a run that goes on to another end."""

import copy
import math
import warnings
from collections.abc import Callable
from typing import Any

from pytorch_lightning import Trainer
from torch.optim import Optimizer

STEPS = "steps_per_epoch"
"""The checkpoint's key for the number of optimizer steps in an epoch."""
TOTAL = "total_steps"
"""The checkpoint's key for the number of optimizer steps in the whole run."""


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


def schedule_of(make: Callable[..., Any], optimizer: Optimizer, total: int) -> Any:
    """Return the schedule; raise a ValueError if it takes no ``total_steps``, as torch's schedules over epochs."""
    try:
        return make(optimizer, total_steps=total)
    except TypeError as error:
        if "unexpected keyword argument 'total_steps'" not in str(error):
            raise
        made = getattr(make, "func", make)
        raise ValueError(
            f"scheduler ({getattr(made, '__name__', made)}) must take total_steps: schedules change after each step, "
            "not after each epoch. Use scheduler=steps, cosine, linear or constant, or your own function "
            "(optimizer, total_steps) that returns one"
        ) from error


def follow_length(optimizer: Optimizer, make: Callable[..., Any], total: int, done: int) -> Any:
    """Return the schedule of ``total`` steps behind those that a checkpoint has ``done``.

    It is made anew and stepped: most schedules of torch compute a rate from the last one, so that a cosine that has
    ended would stay at 0.
    """
    for group in optimizer.param_groups:
        group["lr"] = copy.deepcopy(group.get("initial_lr", group["lr"]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the optimizer has made its steps before
        longer = make(optimizer, total_steps=total)
        for _ in range(done):
            longer.step()
    return longer


def check_steps(checkpoint: dict[str, Any], trainer: Trainer) -> None:
    """Raise a ValueError if an epoch has another number of optimizer steps than so far: schedules count steps."""
    before, now = checkpoint.get(STEPS), steps_per_epoch(trainer)
    if before is not None and now is not None and before != now:
        raise ValueError(
            f"an epoch has {now} optimizer steps now, and {before} so far: resume with as many, by data.batch_size, "
            "trainer.devices and +trainer.accumulate_grad_batches, or start a run from these weights by init_from="
        )
