"""Recording: what a network does with a sample, as a graph of torch's operators in which chosen layers stay whole."""

import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from itertools import islice
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, dispatch_functionalize
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot, make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..kernels.library import LIBRARY
from ..layers import QConv2d
from ..layers.arguments import check_input
from ..layers.conv import check_shape
from ..layers.observed_run import trial
from ..packed.shapes import usual_shapes

LIBRARY.define("recorded_layer(Tensor input, int place) -> Tensor")
_WHOLE: list[Any] = []  # the forwards of layers that stay whole in what is being recorded
RECORDING = threading.RLock()  # hooks are on the network, and modes are torch's own


class NotRecorded(ValueError):  # noqa: N818  # not an error: the reason why a network stays Python
    """Raised with the reason why a recording can't stand for a network."""


def record(network: nn.Module, sample: Tensor, whole: Mapping[str, nn.Module]) -> fx.GraphModule:
    """Return the graph of what a network does with a sample.

    Views and changes in place become functions of new tensors. A node's ``meta["origin"]`` is the name of the module
    whose forward called it. Python runs once: what a forward decides by its input's shape holds for that shape.

    Args:
        network: in evaluation.
        sample: its input.
        whole: layers by name, each called as ``torch.ops.qconv.recorded_layer(input, place)`` with its place here.

    Raises:
        NotRecorded: the forward reads numbers of its input, draws random numbers, or leaves torch.
    """
    with RECORDING, trial(network, keep_state=True), ExitStack() as stack:
        for place, layer in enumerate(whole.values()):
            _WHOLE.append(layer.forward)
            layer.forward = _Whole(layer.forward, place)
            stack.callback(vars(layer).pop, "forward")
        stack.callback(_WHOLE.clear)
        for parameter in network.parameters():  # else torch copies a linear layer's weight for each of several images
            if parameter.is_floating_point() and not parameter.requires_grad:
                stack.callback(parameter.requires_grad_(True).requires_grad_, False)
        drawn, versions = torch.get_rng_state(), _versions(network)
        try:
            network(torch.cat([sample, sample[:1]]))  # a grid that it keeps for the last shape is made again behind it
            for name, module in network.named_modules():
                before, after = _named(name)
                stack.callback(module.register_forward_pre_hook(before).remove)
                stack.callback(module.register_forward_hook(after).remove)
            with tracing(TracingContext(FakeTensorMode(allow_fallback_kernels=True))):  # else one for each node
                graph = make_fx(dispatch_functionalize(_with_own_numbers(network)))(sample)
        except Exception as error:  # a foreign forward may raise anything
            if "aten._local_scalar_dense" in str(error):
                raise NotRecorded("its forward reads numbers of its input, as in an if or by item()") from error
            raise NotRecorded(f"its forward can't be recorded: {str(error).strip().partition(chr(10))[0]}") from error
        if not torch.equal(drawn, torch.get_rng_state()):
            raise NotRecorded("its forward draws random numbers")
        if changed := [name for name, version in _versions(network).items() if version != versions.get(name)]:
            raise NotRecorded(f"its forward changes '{changed[0]}'")
        return graph


def _with_own_numbers(network: nn.Module) -> Callable[[Tensor], Any]:
    """Return the network's call, in which Python may read numbers that depend on no input, such as strides."""

    def call(input: Tensor) -> Any:
        with _OwnNumbers():
            return network(input)

    return call


class _OwnNumbers(TorchDispatchMode):
    """Keeps the results of functions that get no input, for Python to read: torch keeps single numbers alone."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [_proxy(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        result = func(*args, **(kwargs or {}))
        if all(proxy is None or proxy.constant is not None for proxy in given):
            for leaf in tree_leaves(result):
                if isinstance(leaf, Tensor) and (proxy := _proxy(leaf)) is not None:
                    proxy.constant = _inner(leaf)
        return result


def _proxy(tensor: Tensor) -> Any:
    """Return what stands for a tensor in the recording; None of one that the network holds."""
    mode: Any = get_proxy_mode()
    return get_proxy_slot(_inner(tensor), mode.tracer, None)


def _inner(tensor: Tensor) -> Tensor:
    is_wrapped = isinstance(tensor, FunctionalTensor)
    return torch._from_functional_tensor(tensor.elem) if is_wrapped else tensor  # pyright: ignore


def _versions(network: nn.Module) -> dict[str, tuple[int, int]]:
    """Return which tensors a network holds, and how often each was changed in place."""
    held = (*network.named_parameters(), *network.named_buffers())
    return {name: (id(tensor), tensor._version) for name, tensor in held if not tensor.is_inference()}


class _Whole:
    """The forward of a layer that stays whole; other arguments than one tensor are recorded as what they do."""

    def __init__(self, forward: Any, place: int) -> None:
        self.forward, self.place = forward, place

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and isinstance(args[0], Tensor) and not kwargs:
            return torch.ops.qconv.recorded_layer(args[0], self.place)
        return self.forward(*args, **kwargs)


def _recorded_layer(input: Tensor, place: int) -> Tensor:
    """Return a tensor of the output's shape: no program depends on its numbers."""
    forward = _WHOLE[place]
    layer: Any = forward.__self__
    is_plain = isinstance(layer, QConv2d) and type(layer).forward is QConv2d.forward
    if is_plain and layer.padding_mode == "zeros" and input.ndim == 4:
        check_input(layer, input)
        check_shape(input, 4, layer.in_channels)
        output = layer.operation(input).forward(input.to("meta"), layer.filters().to("meta"), None)
        return input.new_zeros(output.shape)
    return forward(input)


LIBRARY.impl("recorded_layer", _recorded_layer, "CompositeExplicitAutograd")


def _named(name: str) -> tuple[Any, Any]:
    """Return hooks that give the nodes recorded in a module's forward its name, unless they have one."""
    counts: list[int] = []

    def before(*_: Any) -> None:
        counts.append(len(_nodes()))

    def after(*_: Any) -> None:
        count = len(_nodes()) - counts.pop()
        for node in islice(reversed(_nodes()), count):
            node.meta.setdefault("origin", name)

    return before, after


def _nodes() -> Any:
    mode: Any = get_proxy_mode()
    return [] if mode is None else mode.tracer.graph.nodes  # there is none where a layer that stays whole runs


def takes(network: nn.Module, sample: Tensor) -> None:
    """Raise the network's own error for these inputs, if there is one; leave the network unchanged."""
    with trial(network, keep_state=True):
        network(sample.clone())


def find_sample(network: nn.Module) -> Tensor | None:
    """Return random inputs that the network accepts, if a usual shape does."""
    generator = torch.Generator("cpu").manual_seed(0)
    for shape in usual_shapes(network):
        sample = torch.randn(2, *shape, generator=generator, dtype=torch.float32, device="cpu")
        try:
            takes(network, sample)
        except Exception:  # noqa: BLE001  # of a forward that is not ours: it takes inputs of another shape
            continue
        return sample
    return None
