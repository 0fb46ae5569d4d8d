"""Learning-rate schedules: functions `(optimizer, total_steps) -> scheduler`, stepped after every optimizer step.

`torch.optim.lr_scheduler.OneCycleLR` has the same form.
"""

import math

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


def cosine(optimizer: Optimizer, total_steps: int, *, warmup: float = 0.1, final: float = 0.0) -> LambdaLR:
    """Linear warm-up, then half a cosine.

    Step i of W = warmup · total_steps warm-up steps has (i + 1) / W of the learning rate; from there it falls to
    `final` times the learning rate at the last step.

    Raises:
        ValueError: if `warmup` is not in [0, 1).
    """
    if not 0 <= warmup < 1:
        raise ValueError(f"warmup (={warmup}) must be a share of the steps, 0 <= warmup < 1")
    rising = round(warmup * total_steps)
    falling = max(1, total_steps - rising - 1)

    def factor(step: int) -> float:
        if step < rising:
            return (step + 1) / rising
        done = min(1.0, (step - rising) / falling)
        return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * done))

    return LambdaLR(optimizer, factor)


def constant(optimizer: Optimizer, total_steps: int) -> LambdaLR:
    """The optimizer's own learning rate throughout."""
    del total_steps
    return LambdaLR(optimizer, lambda step: 1.0)
