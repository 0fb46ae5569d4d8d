"""What a module's class calls, read from its source or its code where `torch.fx` can't trace it."""

import ast
import dis
import inspect
import textwrap
from collections.abc import Iterator, Sequence
from itertools import pairwise
from types import FunctionType, ModuleType

from torch import nn

from .replacements import RELUS, codes_of, methods_of

_LOOPS = ast.For, ast.While, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp


def calls_of(kind: type[nn.Module], name: str) -> int:
    """Return how often the methods of a class call ``self.<name>``, on the way through them with the most calls.

    A call in a loop counts twice, and so does another name that it gets. A class without source has none.
    """
    count, replaced = 0, set[str]()
    for each in kind.__mro__[: kind.__mro__.index(nn.Module)]:
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(each)))
        except (OSError, TypeError, SyntaxError):  # made by exec, or in C
            continue
        methods = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name not in replaced]
        count += sum(_most(method.body, name) for method in methods)
        written = {method.name: ast.unparse(method) for method in methods}
        parents = [parent.__name__ for parent in kind.__mro__]
        replaced |= {
            own
            for own, text in written.items()
            if "super()" not in text and not any(f"{parent}.{own}(" in text for parent in parents)
        }
    return count


def _most(statements: Sequence[ast.stmt], name: str) -> int:
    """The calls in the statements, where of two branches only one is taken."""
    count = 0
    for place, statement in enumerate(statements):
        if isinstance(statement, ast.If):
            after = _most(statements[place + 1 :], name)
            branches = statement.body, statement.orelse
            ways = [_most(branch, name) + (0 if _ends(branch) else after) for branch in branches]
            return count + _calls(statement.test, name) + max(ways)
        if isinstance(statement, ast.With):
            count += sum(_calls(item, name) for item in statement.items) + _most(statement.body, name)
        elif not isinstance(statement, ast.FunctionDef):  # which is counted by itself
            count += _calls(statement, name)
        if _ends([statement]):
            return count
    return count


def _ends(statements: Sequence[ast.stmt]) -> bool:
    return bool(statements) and isinstance(statements[-1], ast.Return | ast.Raise)


def _calls(node: ast.AST, name: str) -> int:
    inside = [*ast.walk(node)]
    for loop in [each for each in inside if isinstance(each, _LOOPS)]:
        inside += ast.walk(loop)
    calls = sum(_is_own(each.func, name) for each in inside if isinstance(each, ast.Call))
    renamed = sum(_is_own(each.value, name) for each in inside if isinstance(each, ast.Assign | ast.NamedExpr))
    return calls + 2 * renamed


def _is_own(node: ast.expr, name: str) -> bool:
    """Whether it is ``self.<name>``."""
    return (
        isinstance(node, ast.Attribute)
        and node.attr == name
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    )


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
