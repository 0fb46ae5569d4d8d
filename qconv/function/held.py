"""Tensors that a backward has computed again, held for the next Functions that need them.

A Function needs its input; the recipe of the next layer's input begins at the same tensor. Without memory a chain of
layers would be computed once for each of its members.
"""

import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

T = TypeVar("T")
_MOST = 6
"""The tensors that are held at a time: the oldest one goes first, which lies furthest down in the network."""


_BYTES_OF_FORMS = 4 << 20
"""The size of all forms of weights that are remembered, if there are several: the oldest ones go first."""


class Held:
    """A pure function of the same tensors; a backward holds its value until the last Function that saved it is done."""

    def __init__(self, compute: Callable[..., Tensor]) -> None:
        self.compute = compute
        self.users = 0
        self._value: Tensor | None = None

    @property
    def is_held(self) -> bool:
        """Whether the value is held now."""
        return self._value is not None

    def __call__(self, *tensors: Tensor) -> Tensor:
        """Return the value for a function that computes from it without writing to it."""
        if self._value is None:
            value = self.compute(*tensors)
            self._hold(value)
            return value
        return self._value

    def taken(self, is_own: bool, *tensors: Tensor) -> Tensor:
        """Return the value to one of the Functions that saved it; it may write to the value if ``is_own``."""
        value = self.compute(*tensors) if self._value is None else self._value
        self.users -= 1
        if is_own or self.users < 1:
            self.drop()
        elif self._value is None:
            self._hold(value)
        return value

    def _hold(self, value: Tensor) -> None:
        task = _task()
        if task is None:
            return
        held: list[Held] = _of_task(task).setdefault("held", [])
        self._value = value
        held.append(self)
        if len(held) > _MOST:
            held[0].drop()

    def drop(self) -> None:
        """Drop the value."""
        self._value = None
        held = _memory.__dict__.get("held", [])
        if self in held:
            held.remove(self)


def form_of_weight(make: Callable[[], T], weight: Tensor, quantizer: object, *others: Any) -> T:
    """Return ``make()``, a form of the quantized weight that depends only on the other arguments; cached in a backward.

    Within a backward those of the last weights are remembered: batch norm, the layer itself, and the recipes of layers
    after it ask for one in turn.
    """
    task = _task()
    if task is None:
        return make()
    forms: dict[Any, tuple[T, tuple[Any, ...], int]] = _of_task(task).setdefault("forms", {})
    key = weight.data_ptr(), weight._version, weight.shape, id(quantizer), *others
    if key not in forms:
        form = make()
        count = 0 if form is None else sum(x.nbytes for x in cast(Iterable[Any], form) if isinstance(x, Tensor))
        while forms and count + sum(bytes for *_, bytes in forms.values()) > _BYTES_OF_FORMS:
            del forms[next(iter(forms))]
        forms[key] = form, (weight, quantizer), count  # these live on, or others might get their addresses
    return forms[key][0]


_memory = threading.local()


def _task() -> int | None:
    """Return the number of the running backward; None if there is none."""
    if torch.compiler.is_compiling() or (task := torch._C._current_graph_task_id()) == -1:  # pyright: ignore
        return None
    return task


def _of_task(task: int) -> dict[str, Any]:
    """Return this thread's cache for the running backward; an earlier backward's, which may have failed, is dropped."""
    memory = _memory.__dict__
    if memory.get("task") != task:
        _forget(memory)
        memory["task"] = task
        torch.autograd.Variable._execution_engine.queue_callback(partial(_forget, memory))  # pyright: ignore
    return memory


def _forget(memory: dict[str, Any]) -> None:
    for held in memory.get("held", ()):
        held._value = None
    memory.clear()
