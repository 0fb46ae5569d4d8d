"""Copies of models, and checks that they share no tensors with the original."""

import copy
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


def copied(model: nn.Module) -> nn.Module:
    """Return a deep copy; results that modules hold, such as weights that are computed, are copied as plain data.

    Raises:
        TypeError: a forward that the copy would share, see `check_copies`.
    """
    check_copies(model)
    kept = [value for module in model.modules() for value in tree_leaves(vars(module)) if isinstance(value, Tensor)]
    return copy.deepcopy(model, {id(value): value.detach().clone() for value in kept if not value.is_leaf})


def check_copies(model: nn.Module) -> None:
    """Raise a TypeError if a copy of the model would compute with the original's tensors.

    That is so for a forward that was put on a module, and is a function with a module, its method or a tensor in its
    closure or its defaults, such as a lambda that calls the former forward: copying does not look into functions.
    What it reaches by other functions or by global names is not looked for.
    """
    for name, module in model.named_modules():
        if hasattr(module, "_orig_mod"):  # of torch.compile, which makes its forward anew in a copy
            continue
        if any(isinstance(getattr(held, "__self__", held), nn.Module | Tensor) for held in _held(module)):
            where = f"'{name}'" if name else "model"
            raise TypeError(
                f"{where} ({type(module).__name__}): its forward is a function that was put on the module. A copy "
                "would share it, and so compute with the original's weights: define forward in a class"
            )


def _held(module: nn.Module) -> list[Any]:
    """Return the objects in the closure and the defaults of a function that was set as a module's forward."""
    forward = vars(module).get("forward")
    while isinstance(forward, partial | MethodType):  # what these are bound to is copied
        forward = forward.func if isinstance(forward, partial) else forward.__func__
    if not isinstance(forward, FunctionType):
        return []
    held = (cell.cell_contents for cell in forward.__closure__ or () if cell != CellType())  # that is an empty one
    return [*held, *(forward.__defaults__ or ()), *(forward.__kwdefaults__ or {}).values()]
