"""Base of quantizers and their parts: modules that a float checkpoint does not contain."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn

M = TypeVar("M", bound=nn.Module)
Rule = tuple[Callable[[Tensor], Tensor], str]
"""Which elements of a loaded tensor are valid, and the end of the message about an invalid one."""

FINITE: Rule = (torch.isfinite, "must be finite")
POSITIVE: Rule = (
    lambda value: (value > 0) & value.isfinite(),
    "must be positive and finite; qconv.after_every_step keeps learned ones so",
)

PLAIN = bool | int | float | str | tuple | None
"""The types of arguments that a part's `repr` shows."""
NEAR = 1e-9
"""Two values of progress that lie as near to each other are the same: sums such as 0.4 + 0.5 are not quite 0.9."""


_signature = functools.cache(inspect.signature)


def has_begun(start: float, progress: float) -> bool:
    """Whether a stage with this ``start`` has begun at ``progress``, see `NEAR`."""
    return progress >= start - NEAR


class Part(nn.Module):
    """A module that keeps its state if a loaded state dict contains nothing of it.

    Attributes:
        arguments: the arguments it was constructed with, by name; defaults are not included.
        casts: the buffers that load whole numbers for floats and the reverse, as torch's own do. A mean of two
            checkpoints has floats only.
    """

    arguments: dict[str, Any]
    casts: tuple[str, ...] = ()
    _is_snapshot: bool = False  # made by `as_it_is_now`: what it has read of its tensors stays, whoever writes to them

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        part = super().__new__(cls)
        # Copies are made without arguments and get this with their other attributes; `__init__` reports wrong
        # arguments.
        with contextlib.suppress(TypeError):
            bound = _signature(cls.__init__).bind(part, *args, **kwargs).arguments
            part.__dict__["arguments"] = dict(list(bound.items())[1:])
        return part

    def rules(self) -> Mapping[str, Rule]:
        """Return the rules for tensors in a checkpoint, by their names here; other parameters must be finite."""
        return {}

    def check_state(self, state_dict: Mapping[str, Any], prefix: str = "") -> None:
        """Raise unless this module's tensors in ``state_dict``, without its children's, may be loaded.

        It is called before any of them is loaded. Shapes and missing names are left to `torch.nn.Module`, which
        collects them from the whole model. Tensors on the meta device have no values to check.

        Raises:
            TypeError: an integer tensor for a floating one, or the reverse.
            ValueError: a value that breaks its rule: NaN, a step that is not positive.
        """
        rules = dict.fromkeys(self._parameters, FINITE) | dict(self.rules())
        for name, own in (*self._parameters.items(), *self._buffers.items()):
            value = state_dict.get(f"{prefix}{name}")
            if own is None or not isinstance(value, Tensor) or type(value) not in (Tensor, nn.Parameter):
                continue
            is_cast = name in self.casts and not value.is_complex()
            if value.is_floating_point() != own.is_floating_point() and not is_cast:
                raise TypeError(
                    f"{prefix}{name} has dtype {value.dtype} in the checkpoint; the module has {own.dtype} there"
                )
            if name in rules and not value.is_meta:
                right, ending = rules[name]
                wrong = value[~right(value.detach().to(own.dtype))]  # in the dtype here: 1e-9 is 0 in float16
                if wrong.numel():
                    raise ValueError(f"{prefix}{name} (={wrong[0].item()}) {ending}")

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        if any(key.startswith(prefix) for key in state_dict):
            self.check_state(state_dict, prefix)
            super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def extra_repr(self) -> str:
        """The plain arguments of the constructor; if there is an attribute of that name, its value now."""
        shown = []
        for name, parameter in inspect.signature(type(self)).parameters.items():
            given = self.arguments.get(name, parameter.default)
            now = getattr(self, name, given)
            value = now if isinstance(now, PLAIN) else given
            if isinstance(value, PLAIN):
                shown.append(f"{name}={value!r}")
        return ", ".join(shown)

    def __repr__(self) -> str:
        parts = (repr(child) for child in self.children() if child.extra_repr())
        return f"{type(self).__name__}({', '.join(filter(None, (self.extra_repr(), *parts)))})"


def as_it_is_now(module: M) -> M:
    """Return a light copy that keeps mode and Python attributes, also of children, and shares the tensors.

    Unlike `copy.copy` it calls no hook of the class and copies the children as well. It takes a few microseconds.
    Objects that attributes refer to, such as lists, are shared.
    """
    now = object.__new__(type(module))
    state = now.__dict__
    state.update(module.__dict__)
    state["_is_snapshot"] = True
    state["_parameters"], state["_buffers"] = module._parameters.copy(), module._buffers.copy()
    if module._modules:
        state["_modules"] = {name: child and as_it_is_now(child) for name, child in module._modules.items()}
    return now
