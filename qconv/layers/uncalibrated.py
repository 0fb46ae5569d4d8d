"""Warnings about evaluation before calibration, given once: the quantizer still has its initial range.

They also concern a range that is close to the initial one, in an average that was copied before training.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor

from .naming import name_of

ENOUGH = 0.99
"""The share of its data at which an average counts as calibrated."""
_QUIET: ContextVar[bool] = ContextVar("quiet", default=False)


@contextmanager
def without_warnings() -> Iterator[None]:
    """Allow models to be run without warnings, when not their output but shapes, calls or bytes are wanted."""
    token = _QUIET.set(True)
    try:
        yield
    finally:
        _QUIET.reset(token)


def warn_uncalibrated(layer: Any, input: Tensor | None = None) -> None:
    """Warn, the first time, that ``layer`` is evaluated before its input's quantizer has had data.

    ``input`` is None if it is not known yet; one without values needs no warning.
    """
    if _QUIET.get() or layer.__dict__.get("was_evaluated"):
        return
    if input is not None and (input.is_meta or not input.numel()):
        return
    if layer.input_quantizer.had_data():
        return
    layer.was_evaluated = True
    warnings.warn(
        f"{name_of(layer)} is evaluated before {type(layer.input_quantizer).__name__} has had data: it quantizes "
        "inputs in its initial range, not in theirs. Call qconv.calibrate(model, batches), or run a "
        "training batch in training mode, which sets the range",
        stacklevel=4,
    )


def warn_partly_calibrated(layer: Any, input: Tensor) -> None:
    """Warn, the first time, that ``layer`` is evaluated or shipped in an average that has seen little data."""
    if _QUIET.get() or input.is_meta or not input.numel():
        return
    share = layer.input_quantizer.share_of_data()
    if share is None or not 0 < share < ENOUGH:
        return
    warnings.warn(
        f"{name_of(layer)} is used in an average that has seen {share:.1%} of its data: "
        f"{type(layer.input_quantizer).__name__}'s range is still near its initial one. Update the average more "
        "often, copy the model after its first batch, or call qconv.calibrate(average, batches)",
        stacklevel=4,
    )
