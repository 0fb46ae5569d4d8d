"""The graph of a module by `torch.fx`, or the reason why it would compute something different."""

import inspect
import random
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple, cast

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

_SHAPES = ("view", "reshape", "flatten", "contiguous", "unflatten", "ravel", "view_as", "reshape_as")
"""What returns its own memory or a copy, as the memory format has it."""
_VIEWS = (
    *("getitem", "chunk", "split", "unbind", "narrow", "select", "transpose", "permute", "movedim", "swapaxes", "t"),
    *("squeeze", "unsqueeze", "expand", "expand_as", "detach", "to", "float", "type", "dropout", "dropout2d"),
)
_IN_PLACE = ("setitem", "iadd", "isub", "imul", "itruediv", "ipow", "iand", "ior", "ixor", "ifloordiv", "imod")
_PASSING = (nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


class NotTraceable(Exception):  # noqa: N818  # not an error: the reason why a module stays Python
    """Raised with the reason why a graph can't express a module's forward."""


class Arguments(NamedTuple):
    """The arguments of a forward: those of its graph, and the others, which keep their defaults.

    Attributes:
        taken: names of the arguments without a default; the first one, if all have a default.
        keyword: names of those that must be passed by name.
        defaults: the defaults of the others.
    """

    taken: tuple[str, ...]
    keyword: tuple[str, ...]
    defaults: dict[str, Any]


def arguments(forward: Callable[..., Any]) -> Arguments:
    """Return the arguments of a forward."""
    parameters = inspect.signature(forward).parameters.values()
    named = [
        parameter for parameter in parameters if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    taken = [parameter for parameter in named if parameter.default is parameter.empty]
    if not taken:
        taken = [parameter for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD][:1]
    keyword = tuple(parameter.name for parameter in taken if parameter.kind is parameter.KEYWORD_ONLY)
    defaults = {parameter.name: parameter.default for parameter in named if parameter not in taken}
    return Arguments(tuple(parameter.name for parameter in taken), keyword, defaults)


def trace(module: nn.Module) -> fx.GraphModule:
    """Return the module as a graph of operators and of calls of its layers, which it shares with the module.

    Arguments with a default keep it. `torch.fx` does not report a forward that depends on more than its tensors. Here
    it is noticed if the forward changes the module, draws random numbers, enters autocast or asks for the type of
    something that may not be a tensor.

    Raises:
        NotTraceable: the graph would compute something else; the module is unchanged.
    """
    state, drawn = State(module), (torch.get_rng_state(), random.getstate())
    try:
        graph = fx.GraphModule(module, _Tracer().trace(module), type(module).__name__)
        changed = state.changed()
        draws = not torch.equal(drawn[0], torch.get_rng_state()) or drawn[1] != random.getstate()
    except Exception as error:  # a forward that gets something other than a tensor may raise anything
        raise NotTraceable(_first_sentence(str(error)) or type(error).__name__) from error
    finally:
        state.restore()
        torch.set_rng_state(drawn[0])
        random.setstate(drawn[1])
    if changed or draws:
        raise NotTraceable(f"its forward changes {changed}" if changed else "its forward draws random numbers")
    if constant := write_to_a_constant(graph):
        raise NotTraceable(
            f"its forward writes in place ({constant}) to a tensor that a graph would keep between calls"
        )
    if shared := write_in_two_shapes(graph):
        raise NotTraceable(f"its forward writes in place ({shared}) to values that it reads in another shape")
    return graph


def _first_sentence(text: str) -> str:
    """Return the first sentence of the first line; errors of `torch.fx` go on with advice for tracer authors."""
    return text.partition("\n")[0].partition(". ")[0]


def write_to_a_constant(graph: fx.GraphModule) -> str:
    """Return the name of an in-place operation that changes a tensor of the graph's module; "" for none.

    A forward that makes a tensor and then adds to it, such as ``total = torch.zeros(8); total += x.sum(1)``, makes a
    new one in each call; a graph has it as a constant.
    """
    first: dict[fx.Node, fx.Node] = {}  # of the values that share memory
    for node in graph.graph.nodes:
        kind = _sharing(graph, node)
        first[node] = first[node.all_input_nodes[0]] if kind and node.all_input_nodes else node
        out = node.kwargs.get("out")
        written = first[node] if kind == "in place" else first.get(out) if isinstance(out, fx.Node) else None
        if written is not None and written.op == "get_attr":
            return node.name
    return ""


def write_in_two_shapes(graph: fx.GraphModule) -> str:
    """Return the name of an in-place operation on values that others may read in another shape; "" for none.

    Whether ``x.flatten(1)`` shares the memory of ``x`` depends on the memory format, which frozen models choose.
    """
    kinds = {node: _sharing(graph, node) for node in graph.graph.nodes}
    first: dict[fx.Node, fx.Node] = {}  # of the values that may share memory
    together: dict[fx.Node, list[fx.Node]] = {}
    for node, kind in kinds.items():
        first[node] = first[node.all_input_nodes[0]] if kind and node.all_input_nodes else node
        together.setdefault(first[node], []).append(node)
    for nodes in together.values():
        reshaped = next((place for place, node in enumerate(nodes) if kinds[node] == "shape"), len(nodes))
        written = [node for node in nodes[reshaped:] if kinds[node] == "in place"]
        if written and any(len(node.users) > 1 for node in nodes):
            return written[0].name
    return ""


def _sharing(network: fx.GraphModule, node: fx.Node) -> str:
    """Return how a node's value shares its first input's memory: "in place", perhaps another "shape", "view"."""
    if writes_in_place(network, node):
        return "in place"
    if node.op == "call_module":
        module = network.get_submodule(str(node.target))
        if type(module) in _PASSING:  # in evaluation
            return "view"
        return "shape" if isinstance(module, nn.Flatten | nn.Unflatten) else ""
    name = _name(node)
    return "shape" if name in _SHAPES else "view" if name in _VIEWS else ""


def writes_in_place(network: fx.GraphModule, node: fx.Node) -> bool:
    """Whether a node writes to its first input: ``x += 1``, ``x.relu_()``, ``F.relu(x, True)``, ``nn.ReLU(True)``."""
    if node.op == "call_module":
        return getattr(network.get_submodule(str(node.target)), "inplace", False) is True
    name = _name(node)
    return name in _IN_PLACE or (name.endswith("_") and not name.endswith("__")) or _has_inplace_argument(node)


def _has_inplace_argument(node: fx.Node) -> bool:
    """Whether the argument ``inplace`` of a function is set, by the call or as its default."""
    if "inplace" in node.kwargs:
        return bool(node.kwargs["inplace"])
    try:
        called = inspect.signature(cast(Any, node.target)).bind(*node.args, **node.kwargs)
    except (TypeError, ValueError):  # a method's name, or a function that can't be asked
        return False
    called.apply_defaults()
    return bool(called.arguments.get("inplace"))


def _name(node: fx.Node) -> str:
    """Return the name of the function or method that a node calls; "" for other nodes."""
    if node.op not in ("call_method", "call_function"):
        return ""
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


class _Tracer(fx.Tracer):
    """Traces into modules that hold layers to be frozen; treats all others as single calls."""

    def trace(self, root: Any, concrete_args: dict[str, Any] | None = None) -> fx.Graph:
        self.autocast, self.thread = _autocast(), threading.get_ident()
        self.names = {id(parameter): name for name, parameter in root.named_parameters()}
        with ExitStack() as stack:
            for namespace in _namespaces(root):
                stack.callback(_put_back, namespace, namespace.get("isinstance"))
                namespace["isinstance"] = _isinstance
            return super().trace(root, concrete_args)

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if threading.get_ident() != self.thread:  # torch.fx replaces the calls of modules in all threads
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if type(m) is nn.Sequential:  # it may hold activations that can be folded
            return False
        inner = (module for module in m.modules() if module is not m)
        kinds = QuantizedLayer, _ConvNd, _BatchNorm
        is_torch = m.__module__.startswith("torch.nn") and not isinstance(m, nn.Sequential)
        return is_torch or isinstance(m, QuantizedLayer) or not any(isinstance(module, kinds) for module in inner)

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> tuple[Any, list[Any]]:
        forward: Any = self.root.forward  # the instance may have its own
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
        if name is None or threading.get_ident() != self.thread:
            return attr_val
        if name not in parameter_proxy_cache:
            parameter_proxy_cache[name] = self.create_proxy(
                *("get_attr", name, (), {}),
                proxy_factory_fn=lambda node: _Parameter(self, node, name, attr_val),
            )
        return parameter_proxy_cache[name]


class _Parameter(ParameterProxy):
    """A proxy for a parameter with its dtype, device and shape."""

    @property
    def dtype(self) -> torch.dtype:
        return self.param.dtype

    @property
    def device(self) -> torch.device:
        return self.param.device


def _namespaces(root: nn.Module) -> list[dict[str, Any]]:
    """The global names of the Python files of all forwards inside `root` other than torch's."""
    forwards = (getattr(type(module).forward, "__globals__", {}) for module in root.modules())
    named = {id(names): names for names in forwards if not str(names.get("__name__", "torch")).startswith("torch.")}
    return list(named.values())


def _put_back(namespace: dict[str, Any], before: Any) -> None:
    if before is None:
        namespace.pop("isinstance", None)
    else:
        namespace["isinstance"] = before


def _isinstance(value: Any, kinds: Any) -> bool:
    """Python's `isinstance`, with a proxy as a tensor; a false ``__class__`` could crash C code."""
    if not isinstance(value, fx.Proxy):
        return isinstance(value, kinds)
    if not _is_tensor(value.node):
        raise TraceError(f"its forward asks for the type of '{value.node.name}'")
    return isinstance(_ANY, kinds)


def _is_tensor(node: fx.Node) -> bool:
    if node.op in ("placeholder", "call_module", "get_attr"):
        return True
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return name not in (*_NO_TENSOR, *_SEVERAL) and any(_is_tensor(operand) for operand in node.all_input_nodes[:1])


def _autocast() -> tuple[Any, ...]:
    return tuple((torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in ("cpu", "cuda"))
