"""The ReLU functions that a module's own code may call, read from its code where `torch.fx` can't trace it."""

import dis
from collections.abc import Iterator
from itertools import pairwise
from types import FunctionType, ModuleType

from torch import nn

from .replacements import RELUS, codes_of, methods_of


def relus_in(module: nn.Module) -> set[str]:
    """Return the ReLU functions that the module's own code may call, by names; ``.relu()`` is a tensor's method."""
    return {name for method in methods_of(type(module)).values() for name in _reached(method)}


def _reached(function: FunctionType) -> Iterator[str]:
    """Yield the names of the ReLUs that a function reaches by global names or calls as methods."""
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
            elif is_attribute and is_called_alone and step.argval in methods:
                yield f".{step.argval}()"
