"""Copies of models that compute with tensors of their own."""

import copy
import dis
from collections.abc import Iterator
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any

from torch import Tensor, nn


def copied(model: nn.Module) -> nn.Module:
    """Return a deep copy; what pruned and normalized layers have computed last, which can't be copied, is data in it.

    Raises:
        TypeError: a forward that the copy would share, see `check_copies`.
    """
    check_copies(model)
    kept = [value for module in model.modules() for value in vars(module).values() if isinstance(value, Tensor)]
    return copy.deepcopy(model, {id(value): value.detach().clone() for value in kept if not value.is_leaf})


def check_copies(model: nn.Module) -> None:
    """Raise a TypeError if a copy of the model would compute with the original's tensors.

    That is so for a forward that was put on a module, and is or calls a function that has a module or a tensor in its
    closure or under a global name, such as a lambda that calls the former forward: copying does not look into
    functions. What a method is bound to is copied, and so are the arguments of a `functools.partial`.
    """
    for name, module in model.named_modules():
        if hasattr(module, "_orig_mod"):  # of torch.compile, which makes its forward anew in a copy
            continue
        if _reaches_tensors(_function_of(vars(module).get("forward")), set()):
            where = f"'{name}'" if name else "model"
            raise TypeError(
                f"{where} ({type(module).__name__}): its forward is a function that was put on the module. A copy "
                "would share it, and so compute with the original's weights: define forward in a class"
            )


def _function_of(forward: Any) -> Any:
    """The function in a method, or in a partial of one."""
    while isinstance(forward, partial | MethodType):
        forward = forward.func if isinstance(forward, partial) else forward.__func__
    return forward


def _reaches_tensors(function: Any, seen: set[FunctionType]) -> bool:
    """Whether a function has a module, its method or a tensor, itself or by the functions that it has."""
    if not isinstance(function, FunctionType) or function in seen:
        return False
    seen.add(function)
    return any(
        isinstance(value, nn.Module | Tensor)
        or (isinstance(value, MethodType) and isinstance(value.__self__, nn.Module))
        or _reaches_tensors(value, seen)
        for value in _values_of(function)
    )


def _values_of(function: FunctionType) -> Iterator[Any]:
    """What stands in the closure of a function, in its defaults, and under the global names that it uses."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # it is empty
            continue
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    yield from (function.__globals__[name] for name in _globals_of(function.__code__) if name in function.__globals__)


def _globals_of(code: CodeType) -> Iterator[str]:
    """The global names that the code and the functions in it use; attributes have names of the same list."""
    yield from (each.argval for each in dis.get_instructions(code) if each.opname == "LOAD_GLOBAL")
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _globals_of(constant)
