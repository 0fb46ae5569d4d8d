"""Residual streams in the backward: it has the sum ``x + z`` first, and ``x`` is a difference.

Computing a sum again from the start of its stage costs a convolution for each term. But the backward walks down the
stream, and needs ``x`` soon after ``x + z``: one convolution gives ``z``, and ``x = (x + z) − z`` up to rounding.
"""

import weakref
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor


class Place:
    """The place of a tensor in a stream; in the backward it holds the tensor until the one before is computed."""

    def __init__(self) -> None:
        self._after: Callable[[], Place | None] = _nowhere
        self._value: Tensor | None = None
        self._term: Callable[[], Tensor] | None = None
        self._versions: list[tuple[Tensor, int]] = []

    def follow(self, before: "Place") -> None:
        """Make this the place of the sum of the tensor at ``before`` and a term."""
        before._after = weakref.ref(self)

    def value(self) -> Tensor | None:
        """Return the tensor, if it or the next one is known."""
        if self._value is not None:
            return self._value
        after = self._after()
        if after is None or after._value is None or after._term is None:
            return None
        if any(tensor._version != version for tensor, version in after._versions):
            after.clear()  # an optimizer that steps within the backward has changed a layer that is done
            return None
        value = after._value.sub_(after._term())  # all that needed it have had it: they are further down the stream
        after.clear()
        return value

    def skipped(self) -> None:
        """Drop the next tensor, which is not needed for this one."""
        after = self._after()
        if after is not None:
            after.clear()

    def hold(self, value: Tensor, term: Callable[..., Tensor], tensors: tuple[Tensor, ...]) -> None:
        """Hold the tensor, with the last term ``term(*tensors)``, until the backward ends at the latest."""
        self._value, self._term = value, partial(term, *tensors)
        self._versions = [(tensor, tensor._version) for tensor in tensors]
        torch.autograd.Variable._execution_engine.queue_callback(self.clear)  # pyright: ignore

    def clear(self) -> None:
        """Forget the tensor."""
        self._value = self._term = None
        self._versions = []


def _nowhere() -> None:
    return None
