"""Batch norm whose running statistics are not yet meaningful."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.parameter import is_lazy

LEFT = 0.01
"""The largest share of initial values with which running statistics count as trained."""


@contextmanager
def batch_statistics(model: nn.Module) -> Iterator[None]:
    """Make batch norm in evaluation mode normalize with the batch, if training does or nothing else is known.

    That is the case if it is in training mode now, or in a model in evaluation mode if `is_trained` is False. One that
    alone is in evaluation mode is frozen and stays as it is. A batch with a single value per channel, which has no
    deviation, is normalized with the running statistics; otherwise these are neither used nor changed.
    """
    norms = [
        module
        for module in model.modules()
        if isinstance(module, _NormBase)
        and module.running_mean is not None
        and (module.training or not (model.training or is_trained(module)))
    ]
    kept = {norm: (norm.running_mean, norm.running_var, norm.track_running_stats) for norm in norms}
    handles = [norm.register_forward_pre_hook(_forget) for norm in norms]
    handles += [norm.register_forward_hook(_remember(*kept[norm]), always_call=True) for norm in norms]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def is_trained(norm: _NormBase) -> bool:
    """Whether the running statistics come from data, and are no longer the initial 0 and 1."""
    mean, var, batches = norm.running_mean, norm.running_var, norm.num_batches_tracked
    if mean is None or var is None or is_lazy(mean):
        return False
    if batches is None or not batches:  # or a checkpoint has statistics, but not the number of batches
        return bool(mean.any()) or not bool((var == 1).all())
    if norm.momentum is None:
        return True
    return norm.momentum >= 1 or float(batches) * math.log1p(-norm.momentum) <= math.log(LEFT)


def _forget(norm: nn.Module, args: tuple[Any, ...]) -> None:
    input = args[0] if args else None
    if isinstance(norm, _NormBase) and isinstance(input, Tensor) and _values(norm, input) > 1:
        norm.running_mean = norm.running_var = None
        norm.track_running_stats = False


def _remember(mean: Tensor | None, var: Tensor | None, tracks: bool) -> Any:
    def hook(norm: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if isinstance(norm, _NormBase):
            norm.running_mean, norm.running_var, norm.track_running_stats = mean, var, tracks

    return hook


def _values(norm: _NormBase, input: Tensor) -> int:
    """The number of values of a channel that are normalized together."""
    together = input.numel() // max(norm.num_features, 1)
    return together if isinstance(norm, _BatchNorm) else together // max(len(input), 1)
