"""How often a class calls one of its modules, read from its source where `torch.fx` can't trace it."""

import ast
import inspect
import textwrap
from collections.abc import Sequence

from torch import nn

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
