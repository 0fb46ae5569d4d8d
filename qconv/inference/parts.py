"""Replacement modules in a frozen network, for parents with a Python forward."""

from typing import Any

from torch import Tensor, fx, nn
from torch.utils._pytree import tree_map

from .tracing import arguments

_OF_MODULES = frozenset((*dir(nn.Module()), "_graph"))
"""What every module has, such as ``training``, and what holds its graph."""


class ReadBeside(Exception):  # noqa: N818  # raised in a forward of the user's, and named for what it tells
    """Raised if a frozen part is used otherwise than by a call with the arguments of its trace."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.name = name

    def __reduce__(self) -> Any:
        return ReadBeside, (self.name, str(self))


class FrozenPart(nn.Module):
    """A module as a graph, called by a parent with a Python forward.

    Attributes have names that a module of the user's is not likely to have: its own are looked up in `original`.

    The module's contents are no longer those that were trained: batch norm is folded, weights are integers. So the
    parent may call it, and read numbers and names stored in it; a `ReadBeside` is raised if it accesses a layer or a
    weight inside, or sets an attribute, whose value the graph would not follow. Outputs have torch's default memory
    format, like those of the trained module.

    Args:
        graph: the graph of the module.
        original: the module.
        name: the name of the module in the model.
        is_single: whether the module is a layer, which the graph calls.
    """

    def __init__(self, graph: fx.GraphModule, original: nn.Module, name: str, is_single: bool) -> None:
        super().__init__()
        taken = arguments(original.forward)
        self._path, self._is_single, self._taken, self._defaults = name, is_single, taken.taken, taken.defaults
        plain = bool, int, float, str, tuple, type(None)
        self._plain = {key: value for key, value in vars(original).items() if isinstance(value, plain)}
        self._graph = graph
        self._known = frozenset(dir(original))  # the last: what is set from now on is refused

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the module."""
        if kwargs or len(args) != len(self._taken):
            args = self._bound(args, kwargs)
        return tree_map(_contiguous, self._graph(*args))

    def _bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        names = (*self._taken, *self._defaults)
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        for name, value in given.items():
            default = self._defaults.get(name)
            if (
                name in self._taken
                or value is default
                or (type(value) is type(default) and not _differ(value, default))
            ):
                continue
            raise self._refusal(f"is called with {name}={value!r:.60}; it was traced with {name}={default!r:.60}")
        if len(args) > len(names) or not all(name in given for name in self._taken):
            raise self._refusal(f"is called with other arguments than {', '.join(self._taken)}")
        return tuple(given[name] for name in self._taken)

    def _refusal(self, what: str) -> ReadBeside:
        return ReadBeside(
            self._path, f"'{self._path}' of the frozen model {what}: freeze(model, example=inputs) leaves it as it is"
        )

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            held = self.__dict__
            if name in held.get("_plain", ()):
                return held["_plain"][name]
            if name.startswith("__") or name not in held.get("_known", ()):
                raise
        raise self._refusal(f"is frozen as a whole, but its {name} is read separately")

    def __setattr__(self, name: str, value: Any) -> None:
        if "_known" in self.__dict__ and name not in _OF_MODULES:
            raise self._refusal(f"is frozen as a whole, but its {name} is set separately")
        super().__setattr__(name, value)

    def __len__(self) -> int:
        raise self._refusal("is frozen as a whole, but its length is read separately")

    def __iter__(self) -> Any:
        raise self._refusal("is frozen as a whole, but its modules are read separately")

    def __getitem__(self, index: Any) -> Any:
        raise self._refusal(f"is frozen as a whole, but its [{index}] is read separately")

    def __bool__(self) -> bool:
        return True  # whatever its length

    def extra_repr(self) -> str:
        return f"'{self._path}'"


def find(network: nn.Module, name: str) -> nn.Module:
    """Return the frozen network's module for this name in the original model; of a part, its graph.

    Raises:
        AttributeError: there is none: another module does its work.
    """
    module = network
    for key in name.split(".") if name else ():
        module = getattr(_opened(module), key)
    return _opened(module)


def name_in_model(place: str) -> str:
    """Return the name, in the original model, of the module at a place in the frozen network."""
    return ".".join(key for key in place.split(".") if key != "_graph")


def _opened(module: nn.Module) -> nn.Module:
    return module._graph if isinstance(module, FrozenPart) else module


def _differ(value: Any, default: Any) -> bool:
    return isinstance(value, Tensor) or value != default


def _contiguous(output: Any) -> Any:
    return output.contiguous() if isinstance(output, Tensor) else output
