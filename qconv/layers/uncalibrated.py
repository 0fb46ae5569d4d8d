"""Evaluation before calibration: a quantizer that still has the range it was made with says so, once.

So does one whose range is little more than that: an average that was copied before training.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor

from .naming import name_of

ENOUGH = 0.99
"""The share of its data with which an average is as good as calibrated."""
_QUIET: ContextVar[bool] = ContextVar("quiet", default=False)


@contextmanager
def without_warnings() -> Iterator[None]:
    """Let models be run for what is not their output: for shapes, calls, bytes."""
    token = _QUIET.set(True)
    try:
        yield
    finally:
        _QUIET.reset(token)


def warn_uncalibrated(layer: Any, input: Tensor) -> None:
    """Warn that ``layer`` is evaluated before its input's quantizer has had data, the first time."""
    if _QUIET.get() or layer.__dict__.get("was_evaluated") or input.is_meta or not input.numel():
        return
    if layer.input_quantizer.had_data():
        return
    layer.was_evaluated = True
    warnings.warn(
        f"{name_of(layer)} is evaluated before {type(layer.input_quantizer).__name__} has had data: it quantizes "
        "inputs in the range that it was made with, not in theirs. Call qconv.calibrate(model, batches), or run a "
        "training batch in training mode, which sets the range",
        stacklevel=4,
    )


def warn_partly_calibrated(layer: Any, input: Tensor) -> None:
    """Warn that ``layer`` is evaluated, or shipped, in an average that has seen little data, the first time."""
    if _QUIET.get() or input.is_meta or not input.numel():
        return
    share = layer.input_quantizer.share_of_data()
    if share is None or not 0 < share < ENOUGH:
        return
    warnings.warn(
        f"{name_of(layer)} is used in an average that has seen {share:.1%} of its data: "
        f"{type(layer.input_quantizer).__name__}'s range is still near the one that it was made with. Update the "
        "average more, copy the model after its first batch, or call qconv.calibrate(average, batches)",
        stacklevel=4,
    )


# A graph that is compiled stays whole, and it is said when that happens. `torch.compiler.assume_constant_result` does
# this and no more, but loads the compiler.
warn_uncalibrated._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]
