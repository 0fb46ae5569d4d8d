"""Functions of a graph as equivalent modules, so that they can be folded as modules are."""

import math
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from ..convert.replacements import RELUS
from ..layers import QuantizedLayer
from ..layers.bypassed import has_own_forward

Maker = Callable[..., nn.Module | None]
"""The module equivalent to a function with these arguments after its input; None if there is none."""


class Clamp(nn.Module):
    """`torch.clamp` between two numbers; one may be None."""

    def __init__(self, min: float | None = None, max: float | None = None, inplace: bool = False) -> None:
        super().__init__()
        self.min, self.max, self.inplace = min, max, inplace

    def forward(self, input: Tensor) -> Tensor:
        """The shape of `input`, or `input` itself in place."""
        clamp = torch.clamp_ if self.inplace else torch.clamp
        return clamp(input, self.min, self.max)

    def extra_repr(self) -> str:
        return f"min={self.min}, max={self.max}" + (", inplace=True" if self.inplace else "")


def _clamp(min: Any = None, max: Any = None, inplace: bool = False) -> nn.Module | None:
    bounds = [bound for bound in (min, max) if bound is not None]
    is_known = all(isinstance(bound, int | float) and not math.isnan(bound) for bound in bounds)
    return Clamp(min, max, inplace) if bounds and is_known else None


def _clamp_min(min: Any, inplace: bool = False) -> nn.Module | None:
    return _clamp(min, None, inplace)


def _clamp_max(max: Any, inplace: bool = False) -> nn.Module | None:
    return _clamp(None, max, inplace)


def _hardtanh(min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False) -> nn.Module | None:
    return nn.Hardtanh(min_val, max_val, inplace) if min_val < max_val else None


def _pool(
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> nn.Module | None:
    return None if return_indices else nn.MaxPool2d(kernel_size, stride, padding, dilation, False, ceil_mode)


def _dropout(p: float = 0.5, training: bool = True, inplace: bool = False) -> nn.Module | None:
    return None if training else nn.Identity()


def _torch_dropout(p: float, train: bool) -> nn.Module | None:
    return _dropout(p, train)


def _in_place(make: Maker) -> Maker:
    return partial(make, inplace=True)


_FUNCTIONS: dict[Any, Maker] = {
    **{function: _in_place(kind) if function.__name__.endswith("_") else kind for function, kind in RELUS.items()},
    F.hardtanh: _hardtanh,
    F.hardtanh_: _in_place(_hardtanh),
    F.leaky_relu: nn.LeakyReLU,
    F.leaky_relu_: _in_place(nn.LeakyReLU),
    F.hardsigmoid: nn.Hardsigmoid,
    F.softplus: nn.Softplus,
    torch.sigmoid: nn.Sigmoid,
    torch.tanh: nn.Tanh,
    torch.clamp: _clamp,
    torch.clamp_: _in_place(_clamp),
    torch.clip: _clamp,
    torch.clip_: _in_place(_clamp),
    torch.clamp_min: _clamp_min,
    torch.clamp_min_: _in_place(_clamp_min),
    torch.clamp_max: _clamp_max,
    torch.clamp_max_: _in_place(_clamp_max),
    F.max_pool2d: _pool,
    torch.max_pool2d: _pool,
    F.dropout: _dropout,
    F.dropout2d: _dropout,
    torch.dropout: _torch_dropout,
}
_CLAMPS = tuple(f"{name}{end}" for name in ("clamp", "clip", "clamp_min", "clamp_max") for end in ("", "_"))
_METHODS: dict[Any, Maker] = {
    name: _FUNCTIONS[getattr(torch, name)] for name in ("relu", "relu_", "sigmoid", "tanh", *_CLAMPS)
}


def as_modules(graph: fx.GraphModule, shared: Collection[nn.Module]) -> dict[str, nn.Module]:
    """Turn functions and methods after modules into calls of modules, and split timm's norms into parts.

    The arithmetic is the same, also of those that change their input. What has no such module stays a function: one
    with other arguments than numbers, one that draws random numbers. What follows no module of torch or qconv stays,
    too: its input may be no tensor.

    Args:
        graph: it is changed.
        shared: modules that other graphs call, too: they stay whole.

    Returns:
        The modules that were functions, by the names that they have in the graph.
    """
    made: dict[str, nn.Module] = {}
    calls = Counter(node.target for node in graph.graph.nodes if node.op == "call_module")
    for node in list(graph.graph.nodes):
        if node.op == "call_module":
            module = graph.get_submodule(node.target)
            if is_norm_and_activation(module) and calls[node.target] == 1 and module not in shared:
                _take_apart(graph, node, module)
        elif (module := _module_of(graph, node)) is not None:
            name = _free_name(graph, node.name)
            graph.add_submodule(name, module)
            _replace(graph, node, [name])
            made[name] = module
    return made


def is_norm_and_activation(module: nn.Module) -> bool:
    """Whether this is timm's batch norm with an activation; does not import timm."""
    known = getattr(sys.modules.get("timm.layers.norm_act"), "BatchNormAct2d", None)
    return type(module) is known and not has_own_forward(module)


def norm_alone(module: Any) -> nn.BatchNorm2d:
    """Return the batch norm of a module that `is_norm_and_activation`, with the same tensors."""
    norm = nn.BatchNorm2d(module.num_features, module.eps, module.momentum, module.affine, module.track_running_stats)
    norm._parameters.update(module._parameters)
    norm._buffers.update(module._buffers)
    return norm.train(module.training)


def trained_module(model: nn.Module, name: str) -> nn.Module:
    """Return a module named in `Frozen.folded` of a trained model, or the batch norm in one that holds its activation.

    Raises:
        AttributeError: there is none.
    """
    path, _, key = name.rpartition(".")
    if key == "norm" and is_norm_and_activation(whole := model.get_submodule(path)):
        return norm_alone(whole)
    return model.get_submodule(name)


def _take_apart(graph: fx.GraphModule, node: fx.Node, module: Any) -> None:
    """Replace timm's batch norm by calls of its parts, under their names there; the norm's is "norm"."""
    parts = {"norm": norm_alone(module), "drop": module.drop, "act": module.act}
    parts = {name: part for name, part in parts.items() if type(part) is not nn.Identity}
    graph.set_submodule(str(node.target), nn.Sequential(OrderedDict(parts)))
    _replace(graph, node, [f"{node.target}.{name}" for name in parts])


def _module_of(graph: fx.GraphModule, node: fx.Node) -> nn.Module | None:
    """Return the module equivalent to a function or method."""
    makers = {"call_function": _FUNCTIONS, "call_method": _METHODS}.get(node.op, {})
    make, kwargs = makers.get(node.target), dict(node.kwargs)
    first, *rest = node.args if node.args else (kwargs.pop("input", None),)
    if make is None or not _gives_a_tensor(graph, first):
        return None
    if any(isinstance(leaf, fx.Node | Tensor) for leaf in tree_leaves((rest, kwargs))):
        return None
    try:
        module = make(*rest, **kwargs)
    except TypeError:  # arguments that a module does not take, such as `out`
        return None
    return None if module is None else module.eval()


def _gives_a_tensor(graph: fx.GraphModule, node: Any) -> bool:
    if not isinstance(node, fx.Node) or node.op != "call_module":
        return False
    module = graph.get_submodule(str(node.target))
    return isinstance(module, QuantizedLayer | Clamp) or type(module).__module__.startswith("torch.nn.")


def _replace(graph: fx.GraphModule, node: fx.Node, targets: list[str]) -> None:
    """Replace a node by calls of modules, one after the other."""
    value: Any = node.all_input_nodes[0]
    with graph.graph.inserting_before(node):
        for target in targets:
            value = graph.graph.call_module(target, (value,))
    node.replace_all_uses_with(value)
    graph.graph.erase_node(node)


def _free_name(graph: fx.GraphModule, name: str) -> str:
    while hasattr(graph, name):
        name += "_"
    return name
