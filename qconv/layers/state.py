"""The attributes and buffers of a module, to detect whether a call changes it."""

from typing import Any

from torch import Tensor, nn

CONSTANT = "_tensor_constant"  # the prefix that `torch.fx` gives to the constants of a trace


class State:
    """A snapshot of the attributes and buffers of a module and of all modules inside it.

    Lists and dictionaries are compared by their elements, which are compared by identity.
    """

    def __init__(self, module: nn.Module) -> None:
        self.modules = dict(module.named_modules())
        self.attributes = {name: _copied(vars(module)) for name, module in self.modules.items()}
        self.values = {name: buffer.detach().clone() for name, buffer in module.named_buffers()}
        self.buffers = dict(module.named_buffers())

    def changed(self) -> str:
        """Return the name of something that has changed; empty if nothing has."""
        for name, module in self.modules.items():
            before, now = self.attributes[name], _copied(vars(module))
            for key in before.keys() | now.keys():
                if key.startswith(CONSTANT):
                    continue
                if key not in before or key not in now or not _same(before[key], now[key]):
                    return f"'{f'{name}.{key}'.removeprefix('.')}'"
        for name, value in self.values.items():
            here = self.buffers[name]
            if here.shape != value.shape or not _equal(here, value):
                return f"the buffer '{name}'"
        return ""

    def restore(self) -> None:
        """Restore the module."""
        for name, module in self.modules.items():
            now = vars(module)
            for key, value in self.attributes[name].items():
                here = now.get(key, value)
                if isinstance(value, _Contents):
                    value.put_back()
                    now[key] = value.container
                elif here is not value or key not in now:
                    now[key] = value
            for key in now.keys() - self.attributes[name].keys():
                del now[key]
        for name, value in self.values.items():
            if type(value) is Tensor and not value.is_meta and not self.buffers[name].equal(value):
                self.buffers[name].copy_(value)


class _Contents:
    """A list, dictionary or set, and its former contents."""

    def __init__(self, container: Any) -> None:
        self.container, self.held = container, type(container)(container)

    def put_back(self) -> None:
        if _identities(self.container) == _identities(self.held):
            return
        self.container.clear()
        (self.container.extend if isinstance(self.container, list) else self.container.update)(self.held)


def _copied(attributes: dict[str, Any]) -> dict[str, Any]:
    return {key: _Contents(value) if type(value) in (list, dict, set) else value for key, value in attributes.items()}


def _same(before: Any, now: Any) -> bool:
    if isinstance(before, _Contents) and isinstance(now, _Contents):
        return before.container is now.container and _identities(before.held) == _identities(now.held)
    return before is now or (type(before) in (int, float, str, bool) and type(before) is type(now) and before == now)


def _identities(container: Any) -> Any:
    if isinstance(container, dict):
        return [(id(key), id(value)) for key, value in container.items()]
    return [id(value) for value in container] if isinstance(container, list) else {id(value) for value in container}


def _equal(first: Tensor, second: Tensor) -> bool:
    """Whether the values are equal; NaN equals NaN."""
    return bool(((first == second) | ((first != first) & (second != second))).all())
