"""Finds the activations that make the input of a layer one-signed, in the graph of `torch.fx`.

A value in the graph either may be negative, or can't be because of certain activations. Pooling, dropout, sums of two
such values and concatenation carry these activations on to the layers that read the result.
"""

import inspect
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch.fx.proxy import TraceError

from ..layers.state import State
from .called_relus import relus_in
from .replacements import RELUS, is_one_signed


class Site(NamedTuple):
    """A place where values lose their sign: an activation, or a module whose forward calls a function."""

    name: str
    module: nn.Module
    function: str = ""


Sites = frozenset[Site]
Calls = frozenset[tuple[Site, fx.Node]]
"""Calls of the sites: one module may be called in many places."""


@dataclass
class Found:
    """The one-signed inputs of a model.

    Attributes:
        inputs: for each layer whose input is never negative, the activations that make it so.
        elsewhere: activations with a call that none of these layers reads: its values count, not its signs.
        untraced: activations whose calls no graph shows: they may precede the layers.
        outputs: for each part that was examined by itself, the activations that make its output one-signed.
    """

    inputs: dict[nn.Module, Sites] = field(default_factory=dict)
    elsewhere: set[Site] = field(default_factory=set)
    untraced: set[Site] = field(default_factory=set)
    outputs: dict[nn.Module, Sites] = field(default_factory=dict)

    def add(self, layer: nn.Module, sites: Sites) -> None:
        """Add activations before a layer."""
        if sites:
            self.inputs[layer] = self.inputs.get(layer, frozenset()) | sites


RELU_FUNCTIONS = frozenset(function.__name__ for function in RELUS)
_PASSING_MODULES = (
    *(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, nn.LPPool1d, nn.LPPool2d),
    *(nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d),
    *(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d, nn.MaxUnpool2d),
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.Flatten, nn.Unflatten, nn.Identity),
    *(nn.PixelShuffle, nn.PixelUnshuffle, nn.ChannelShuffle, nn.UpsamplingNearest2d, nn.UpsamplingBilinear2d),
    *(nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d, nn.ReflectionPad1d, nn.ReflectionPad2d, nn.ReflectionPad3d),
    *(nn.ReplicationPad1d, nn.ReplicationPad2d, nn.ReplicationPad3d, nn.CircularPad1d, nn.CircularPad2d),
)
# Names of functions and of methods.
_PASSING = {
    *("max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d", "mean", "sum", "amax", "max"),
    *("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d", "adaptive_max_pool2d", "interpolate", "pad"),
    *("dropout", "dropout1d", "dropout2d", "dropout3d", "stochastic_depth", "sqrt", "pixel_shuffle", "channel_shuffle"),
    *("flatten", "unflatten", "reshape", "view", "squeeze", "unsqueeze", "permute", "transpose", "movedim"),
    *("getitem", "chunk", "split", "unbind", "narrow", "select", "expand", "repeat", "repeat_interleave"),
    *("contiguous", "clone", "float", "half", "to", "roll", "flip"),
}
_ALL = {"add", "iadd", "mul", "imul", "truediv", "itruediv", "div"}
_IN_PLACE = {"iadd", "isub", "imul", "itruediv"}
_SELECTING = {"getitem", "chunk", "split", "unbind", "narrow", "select"}
_ANY = {"cat", "concat", "concatenate", "stack", "maximum"}  # some of the channels would be one-signed


def find(model: nn.Module, layers: Collection[nn.Module]) -> Found:
    """Find the activations because of which the input of each of ``layers`` is never negative.

    A model that `torch.fx` can't trace is examined in parts, and by the order of its modules: an activation counts as
    preceding the next registered layer if there is nothing but pooling or the like between them. A function that a
    forward without a graph calls counts as preceding every layer in its module, too. Both count as called elsewhere
    unless a part's graph shows that they are not. The output of a part that is examined by itself counts as elsewhere.
    """
    look = _Look(model, set(layers))
    with _traceable(model):
        look.at(model)
    return look.found


class _Look:
    """Examines a model and, where `torch.fx` can't trace it, its parts."""

    def __init__(self, model: nn.Module, layers: set[nn.Module]) -> None:
        self.layers, self.found = layers, Found()
        self.names = {module: name for name, module in reversed(list(model.named_modules()))}

    def at(self, module: nn.Module) -> set[Site]:
        """Add what is found in a module; return the activations of which a graph tells where they are called."""
        if isinstance(module, torch.jit.ScriptModule) or _Tracer(self.layers).is_leaf_module(module, ""):
            return set()
        if (graph := _graph_of(module, self.layers)) is not None:
            return self._at_graph(module, graph)
        known = set[Site]().union(*(self.at(child) for child in module.children()))
        if own := self._functions_of(module):
            for layer in self.layers.intersection(module.modules()):
                self._add_untraced(layer, own)
        self._in_order(module, frozenset(), known)
        return known

    def _at_graph(self, module: nn.Module, graph: fx.Graph) -> set[Site]:
        walk = _Walk(module, self.names)
        seen: set[tuple[Site, fx.Node]] = set()
        inner = set[Site]()
        for node in graph.nodes:
            walk.visit(node)
            called = module.get_submodule(str(node.target)) if node.op == "call_module" else None
            if called in self.layers:
                input = node.args[0] if node.args else next(iter(node.kwargs.values()), None)
                if calls := walk.calls_of(input):
                    seen |= calls
                    self.found.add(called, frozenset(site for site, _ in calls))
            elif called is not None:
                inner |= self.at(called)  # of torch.nn; one with layers inside could not be traced
            elif node.op == "output":
                self.found.outputs[module] = frozenset(site for site, _ in walk.calls_of(node.args[0]) or ())
                self.found.elsewhere |= self.found.outputs[module]
        self.found.elsewhere.update(site for site, _ in walk.every - seen)
        return inner | {site for site, _ in walk.every}

    def _in_order(self, part: nn.Module, before: Sites, known: set[Site]) -> Sites:
        """Go through a part in the order of registration, which need not be that of the calls.

        Add the activations before a layer with only modules that preserve signs between them; return those after it.
        """
        if part in self.layers:
            self.found.add(part, before & known)
            self._add_untraced(part, before - known)
            return frozenset()
        inner = list(part.children())
        for child in inner:
            before = self._in_order(child, before, known)
        if part in self.found.outputs:
            return self.found.outputs[part]
        if is_one_signed(part):
            return frozenset((Site(self.names[part], part),))
        own = self._functions_of(part)
        return own | before if inner else own or (before if passes(part) else frozenset())

    def _functions_of(self, module: nn.Module) -> Sites:
        return frozenset(Site(self.names[module], module, function) for function in relus_in(module))

    def _add_untraced(self, layer: nn.Module, sites: Sites) -> None:
        self.found.add(layer, sites)
        self.found.elsewhere |= sites
        self.found.untraced |= sites


def _graph_of(module: nn.Module, layers: set[nn.Module]) -> fx.Graph | None:
    """Return the graph of a module, or that of its call without optional arguments; None if it has neither.

    If a module of `torch.nn` with layers inside can't be traced, as its encoders can't, it is a single call there.
    """
    parameters = inspect.signature(type(module).forward).parameters.values()
    defaults = {each.name: each.default for each in parameters if each.default is not each.empty}
    for given, enters in product((None, defaults) if defaults else (None,), (True, False)):
        try:
            return _Tracer(layers, enters).trace(module, given)
        except (
            *(TraceError, TypeError, ValueError, RuntimeError, AttributeError, NotImplementedError),
            *(KeyError, IndexError, AssertionError, NameError),  # a NameError: of a module that is no submodule
        ):
            continue
    return None


@contextmanager
def _traceable(model: nn.Module) -> Iterator[None]:
    """Context manager: torch's attention chooses no fast path, for which it would ask a trace for numbers.

    Restores the model: a forward may leave in it what it was traced with, as that of torchvision's RoI pooling does.
    """
    enabled, state = torch.backends.mha.get_fastpath_enabled(), State(model)
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)
        state.restore()


class _Tracer(fx.Tracer):
    """Treats modules of `torch.nn` and the layers in question as single calls; traces into all others.

    With ``enters``, modules of `torch.nn` with such layers inside are traced, too.
    """

    def __init__(self, layers: set[nn.Module], enters: bool = True) -> None:
        super().__init__()
        self._layers, self._enters = layers, enters

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        is_leaf = super().is_leaf_module(m, module_qualified_name)
        return m in self._layers or (is_leaf and not (self._enters and self._layers.intersection(m.modules())))


class _Walk:
    """Finds for each node of a graph the calls of activations that removed its sign; None if it may be negative."""

    def __init__(self, root: nn.Module, names: dict[nn.Module, str]) -> None:
        self.root, self.names = root, names
        self.known: dict[fx.Node, Calls | None] = {}
        self.every: set[tuple[Site, fx.Node]] = set()
        self.partly: set[fx.Node] = set()  # of which some channels may be negative

    def calls_of(self, value: Any) -> Calls | None:
        if isinstance(value, fx.Node):
            return self.known.get(value)
        if isinstance(value, int | float):
            return frozenset() if value >= 0 else None
        return None

    def visit(self, node: fx.Node) -> None:
        self.known[node] = found = self._calls(node)
        if node.args and isinstance(node.args[0], fx.Node) and self._is_in_place(node):
            self.known[node.args[0]] = found  # which may be read after a call whose result is not
        is_call = any(call is node for _, call in found or ())
        if not is_call and not self.partly.isdisjoint(node.all_input_nodes):
            self.partly.add(node)

    def _calls(self, node: fx.Node) -> Calls | None:
        first = node.args[0] if node.args else node.kwargs.get("input")
        if node.op == "call_module":
            module = self.root.get_submodule(str(node.target))
            if is_one_signed(module):
                return self._call(Site(self.names[module], module), node)
            return self.calls_of(first) if passes(module) else None
        if node.op not in ("call_function", "call_method"):
            return None
        name = _name(node)
        if name in RELU_FUNCTIONS:
            owner = self._owner(node)
            function = f".{name}()" if node.op == "call_method" else name
            return self._call(Site(self.names[owner], owner, function), node)
        if name.removesuffix("_") in _ALL:
            operands = (
                *node.args[:2],
                *(value for key, value in node.kwargs.items() if key in ("input", "other", "alpha")),
            )
            return _joined([self.calls_of(value) for value in operands])
        if name in _SELECTING and first in self.partly:
            return None
        if name in _ANY:
            values = first if isinstance(first, list | tuple) else node.args[:2]
            parts = [self.calls_of(value) for value in values]
            if name != "maximum" and None in parts:
                self.partly.add(node)
            return frozenset().union(*(part for part in parts if part is not None)) or None
        if name == "interpolate" and node.kwargs.get("mode") == "bicubic":  # it may overshoot
            return None
        return self.calls_of(first) if name in _PASSING else None

    def _is_in_place(self, node: fx.Node) -> bool:
        """Whether the call changes its first argument."""
        if node.op == "call_module":
            return bool(getattr(self.root.get_submodule(str(node.target)), "inplace", False))
        name = _name(node)
        return name in _IN_PLACE or name.endswith("_") or bool(node.kwargs.get("inplace"))

    def _call(self, site: Site, node: fx.Node) -> Calls:
        self.every.add((site, node))
        return frozenset(((site, node),))

    def _owner(self, node: fx.Node) -> nn.Module:
        """Return the module whose forward makes the call."""
        stack = node.meta.get("nn_module_stack") or {}
        path = next(reversed(stack.values()))[0] if stack else ""
        return self.root.get_submodule(path)


def _name(node: fx.Node) -> str:
    """Return the name of the function or method that a node calls."""
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def passes(module: nn.Module) -> bool:
    """Whether the output is never negative if the input is not."""
    if type(module) is nn.Upsample:
        return module.mode != "bicubic"
    return type(module) in _PASSING_MODULES


def _joined(parts: list[Calls | None]) -> Calls | None:
    """As for a sum or a product: None unless no operand may be negative."""
    if any(part is None for part in parts):
        return None
    return frozenset().union(*(part for part in parts if part is not None))
