"""The ReLU functions that a module's own code may call, read from its code where `torch.fx` can't trace it."""

import dis
from collections.abc import Iterator
from itertools import pairwise
from types import FunctionType, ModuleType

from torch import nn

from .replacements import RELUS, codes_of, methods_of


def relus_in(module: nn.Module) -> set[str]:
    """Return the ReLU functions that the module's own code may call, by names; ``.relu()`` is a tensor's method.

    Functions in attributes of the module count, and so do those that helper functions of its methods call.
    """
    functions, known = list(methods_of(type(module)).values()), set[FunctionType]()
    used = {name for method in functions for code in codes_of(method.__code__) for name in code.co_names}
    kept = (getattr(value, "func", value) for name, value in vars(module).items() if name in used)  # perhaps a partial
    names = {relu.__name__ for value in kept for relu in RELUS if value is relu}
    while functions:
        function = functions.pop()
        if function in known:
            continue
        known.add(function)
        for called in _reached(function):
            if isinstance(called, str):
                names.add(called)
            elif not str(called.__module__).startswith(("torch.", "qconv.")):  # whose outputs have both signs
                functions.append(called)
    return names


def _reached(function: FunctionType) -> Iterator[str | FunctionType]:
    """Yield the names of the ReLUs that a function reaches by global names or calls as methods, and other functions."""
    methods = {relu.__name__ for relu in RELUS}
    for code in codes_of(function.__code__):
        steps = [step for step in dis.get_instructions(code) if step.opname not in ("CACHE", "PRECALL", "PUSH_NULL")]
        value: object = None
        for step, following in pairwise(steps):
            is_attribute = step.opname in ("LOAD_ATTR", "LOAD_METHOD")
            if step.opname == "LOAD_GLOBAL":
                value = function.__globals__.get(step.argval)
            elif is_attribute and isinstance(value, ModuleType):
                value = vars(value).get(step.argval)  # getattr might import something
            else:
                value = None
            is_called_alone = following.opname == "CALL" and following.arg == 0  # with an argument it is no tensor's
            if any(value is relu for relu in RELUS):
                yield next(relu.__name__ for relu in RELUS if value is relu)
            elif isinstance(value, FunctionType):
                yield value
            elif is_attribute and is_called_alone and step.argval in methods:
                yield f".{step.argval}()"
