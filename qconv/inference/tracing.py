"""The graph of a module by `torch.fx`, or the reason why it would compute something else."""

import inspect
import random
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch.fx.proxy import ParameterProxy, TraceError
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from ..layers import QuantizedLayer
from ..layers.state import State

_ANY = torch.zeros(0, device="cpu")
_NO_TENSOR = ("size", "shape", "dim", "ndim", "dtype", "device", "numel", "nelement", "item", "tolist", "getattr")
_SEVERAL = ("chunk", "unsafe_chunk", "split", "tensor_split", "unbind", "topk", "sort", "max", "min", "getitem")


class NotTraceable(Exception):  # noqa: N818  # no error: why a module stays Python
    """Why a module's forward can't be told by a graph."""


class Arguments(NamedTuple):
    """Of a forward: those that a graph takes, and the others, which have their defaults in it.

    Attributes:
        taken: names of those without a default; the first one, if all have a default.
        keyword: names of those among them that are given by name alone.
        defaults: of the others.
    """

    taken: tuple[str, ...]
    keyword: tuple[str, ...]
    defaults: dict[str, Any]


def arguments(forward: Callable[..., Any]) -> Arguments:
    """What a forward takes."""
    parameters = inspect.signature(forward).parameters.values()
    named = [each for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    taken = [each for each in named if each.default is each.empty]
    if not taken:
        taken = [each for each in parameters if each.kind is not each.VAR_KEYWORD][:1]
    keyword = tuple(each.name for each in taken if each.kind is each.KEYWORD_ONLY)
    defaults = {each.name: each.default for each in named if each not in taken}
    return Arguments(tuple(each.name for each in taken), keyword, defaults)


def trace(module: nn.Module) -> fx.GraphModule:
    """The module as a graph of operators and of calls of its layers, which it shares with the module.

    Arguments with a default have it. A `torch.fx` trace is silent where a forward looks at something else than its
    tensors: that it changes the module, draws random numbers, enters autocast or asks for the type of what is not
    certainly a tensor is noticed here.

    Raises:
        NotTraceable: the graph would compute something else; the module is as it was.
    """
    state, drawn = State(module), (torch.get_rng_state(), random.getstate())
    try:
        graph = fx.GraphModule(module, _Tracer().trace(module), type(module).__name__)
        changed = state.changed()
        draws = not torch.equal(drawn[0], torch.get_rng_state()) or drawn[1] != random.getstate()
    except Exception as error:  # of a forward that is given what is no tensor, all kinds
        lines = str(error).splitlines()
        raise NotTraceable(lines[0] if lines else type(error).__name__) from error
    finally:
        state.restore()
        torch.set_rng_state(drawn[0])
        random.setstate(drawn[1])
    if changed or draws:
        raise NotTraceable(f"its forward changes {changed}" if changed else "its forward draws random numbers")
    return graph


class _Tracer(fx.Tracer):
    """Looks into what holds layers that can be frozen; calls all else."""

    def trace(self, root: Any, concrete_args: dict[str, Any] | None = None) -> fx.Graph:
        self.autocast = _autocast()
        self.names = {id(parameter): name for name, parameter in root.named_parameters()}
        with ExitStack() as stack:
            for namespace in _namespaces(root):
                stack.callback(_put_back, namespace, namespace.get("isinstance"))
                namespace["isinstance"] = _isinstance
            return super().trace(root, concrete_args)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if type(m) is nn.Sequential:  # which may hold activations that can be folded
            return False
        inner = (each for each in m.modules() if each is not m)
        kinds = QuantizedLayer, _ConvNd, _BatchNorm
        is_torch = m.__module__.startswith("torch.nn") and not isinstance(m, nn.Sequential)
        return is_torch or isinstance(m, QuantizedLayer) or not any(isinstance(each, kinds) for each in inner)

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> tuple[Any, list[Any]]:
        forward: Any = self.root.forward  # which may stand on the instance
        taken = arguments(forward)
        made = {name: self.create_proxy("placeholder", name, (), {}) for name in taken.taken}
        named = {name: made.pop(name) for name in taken.keyword}

        def call(*given: Any) -> Any:
            return forward(*given, **named)

        return call, list(made.values())

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        if _autocast() != self.autocast:
            raise TraceError("its forward enters torch.autocast")
        return super().create_node(*args, **kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, fx.Proxy]) -> Any:
        name = self.names.get(id(attr_val)) if isinstance(attr_val, nn.Parameter) else None
        if name is None:
            return attr_val
        if name not in parameter_proxy_cache:
            parameter_proxy_cache[name] = self.create_proxy(
                *("get_attr", name, (), {}),
                proxy_factory_fn=lambda node: _Parameter(self, node, name, attr_val),
            )
        return parameter_proxy_cache[name]


class _Parameter(ParameterProxy):
    """What stands for a parameter, of which dtype and device are known as well as the shape."""

    @property
    def dtype(self) -> torch.dtype:
        return self.param.dtype

    @property
    def device(self) -> torch.device:
        return self.param.device


def _namespaces(root: nn.Module) -> list[dict[str, Any]]:
    """The global names of the Python files of the forwards inside of `root` that are not torch's own."""
    forwards = (getattr(type(each).forward, "__globals__", {}) for each in root.modules())
    named = {id(each): each for each in forwards if not str(each.get("__name__", "torch")).startswith("torch.")}
    return list(named.values())


def _put_back(namespace: dict[str, Any], before: Any) -> None:
    if before is None:
        namespace.pop("isinstance", None)
    else:
        namespace["isinstance"] = before


def _isinstance(value: Any, kinds: Any) -> bool:
    """Python's own, to which what stands for a tensor is one; a false ``__class__`` would lead C code to crash."""
    if not isinstance(value, fx.Proxy):
        return isinstance(value, kinds)
    if not _is_tensor(value.node):
        raise TraceError(f"its forward asks for the type of '{value.node.name}'")
    return isinstance(_ANY, kinds)


def _is_tensor(node: fx.Node) -> bool:
    if node.op in ("placeholder", "call_module", "get_attr"):
        return True
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return name not in (*_NO_TENSOR, *_SEVERAL) and any(_is_tensor(each) for each in node.all_input_nodes[:1])


def _autocast() -> tuple[Any, ...]:
    return tuple((torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in ("cpu", "cuda"))
