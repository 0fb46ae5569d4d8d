"""A warning about evaluation before calibration, given once: the quantizer still has its initial range."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor

from .naming import name_of

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
