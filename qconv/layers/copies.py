"""Copies of models that compute with tensors of their own."""

import copy
from functools import partial
from types import FunctionType

from torch import nn


def copied(model: nn.Module) -> nn.Module:
    """Return a deep copy.

    Raises:
        TypeError: a forward that the copy would share, see `check_copies`.
    """
    check_copies(model)
    return copy.deepcopy(model)


def check_copies(model: nn.Module) -> None:
    """Raise a TypeError if a copy of the model would compute with the original's tensors.

    That is so for a function that stands on a module in place of its forward, such as a lambda that calls the former
    one: copying does not look into functions. A method that is bound to the module is copied with it.
    """
    for name, module in model.named_modules():
        if hasattr(module, "_orig_mod"):  # of torch.compile, which makes its forward anew in a copy
            continue
        forward, is_direct = vars(module).get("forward"), True
        while isinstance(forward, partial):  # whose arguments are copied
            forward, is_direct = forward.func, False
        if isinstance(forward, FunctionType) and (is_direct or forward.__closure__):
            where = f"'{name}'" if name else "model"
            raise TypeError(
                f"{where} ({type(module).__name__}): its forward is a function that was put on the module. A copy "
                "would share it, and so compute with the original's weights: define forward in a class"
            )
