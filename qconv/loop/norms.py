"""Batch norm whose running statistics are not yet meaningful."""

import math
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.parameter import is_lazy

from ..ground.checks import some

LEFT = 0.01
"""The largest share of initial values with which running statistics count as trained."""


@contextmanager
def batch_statistics(model: nn.Module) -> Iterator[None]:
    """Make batch norm in evaluation mode normalize with the batch, if training does or nothing else is known.

    That is the case if it is in training mode now, or in a model in evaluation mode if `is_trained` is False; a warning
    names those of which that is no more than likely. One that alone is in evaluation mode is frozen and stays as it is.
    A batch with a single value per channel, which has no
    deviation, is normalized with the running statistics; otherwise these are neither used nor changed.
    """
    named = {
        module: name
        for name, module in model.named_modules()
        if isinstance(module, _NormBase)
        and module.running_mean is not None
        and (module.training or not (model.training or is_trained(module)))
    }
    norms = [*named]
    if doubtful := [norm for norm in norms if not norm.training and not is_initial(norm)]:
        told = [f"'{named[n]}' ({int(n.num_batches_tracked or 0)} with momentum {n.momentum})" for n in doubtful]
        warnings.warn(
            f"batch norm has seen only few batches: {some(told, 3)}. So each batch is normalized with its own "
            "statistics, as in training. If the running statistics are valid, as after "
            "update_bn, call norm.num_batches_tracked.fill_(10**9) first",
            stacklevel=3,
        )
    kept = {norm: (norm.running_mean, norm.running_var, norm.track_running_stats) for norm in norms}
    with ExitStack() as hooks:
        for norm in norms:
            hooks.enter_context(norm.register_forward_pre_hook(_forget, with_kwargs=True))
            hooks.enter_context(norm.register_forward_hook(_remember(*kept[norm]), always_call=True))
        yield


def is_trained(norm: _NormBase) -> bool:
    """Whether the running statistics come from data, and are no longer the initial 0 and 1."""
    mean, var, batches = norm.running_mean, norm.running_var, norm.num_batches_tracked
    if mean is None or var is None or is_lazy(mean):
        return False
    # A checkpoint may have statistics without the number of batches; a momentum of 0 keeps what comes from elsewhere.
    if batches is None or not batches or norm.momentum == 0:
        return not is_initial(norm)
    if norm.momentum is None or norm.momentum >= 1:
        return True
    left = float(batches) * math.log1p(-norm.momentum)  # the logarithm of the initial values' share
    return left <= math.log(LEFT) or bool((var < 0.95 * math.exp(left)).any())  # a variance of 1 leaves at least that


def is_initial(norm: _NormBase) -> bool:
    """Whether the running statistics are 0 and 1, as they are made."""
    mean, var = norm.running_mean, norm.running_var
    return mean is None or var is None or is_lazy(mean) or not (bool(mean.any()) or bool((var != 1).any()))


def _forget(norm: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    input = args[0] if args else kwargs.get("input")
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
