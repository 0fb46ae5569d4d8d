"""Checks of a layer's arguments: the scheme of its constructor, and the input of its forward."""

from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.proxy import TraceError

from .. import schemes
from ..scheme import Factory, Scheme
from .computed import stored_weight


def chosen(scheme: Scheme | None, grad_quantizer: Factory | None) -> Scheme:
    """Return the scheme that the arguments of a layer's constructor ask for."""
    scheme = checked(scheme)
    return scheme if grad_quantizer is None else scheme.with_grad(grad_quantizer)


def checked(scheme: Scheme | None) -> Scheme:
    """Return a scheme for one layer: BWN for None.

    Raises:
        TypeError: no scheme.
        ValueError: a scheme that begins at a different time in each layer.
    """
    if scheme is None:
        return schemes.bwn()
    if not isinstance(scheme, Scheme):
        known = ", ".join(f"{name}()" for name in schemes.__all__ if name != "Scheme")
        raise TypeError(f"scheme (={scheme!r}) must be a qconv.Scheme; qconv.schemes has {known}")
    if scheme.starts is not None:
        raise ValueError(
            f"scheme (={scheme}) begins at a different time in each layer: use qconv.convert for a model; for one "
            "layer, use scheme.at_depth(depth)"
        )
    return scheme


def check_input(layer: nn.Module, input: Tensor, name: str = "input") -> None:
    """Raise unless an input of the layer has a floating dtype, and the dtype and device of the weight.

    Raises:
        TypeError: no tensor; an integer, boolean or complex input, or without autocast a dtype other than the weight's.
        ValueError: a device other than the weight's.
    """
    if not isinstance(input, Tensor):
        raise TypeError(f"{name} ({type(input).__name__}) must be a tensor, such as torch.as_tensor({name})")
    weight = stored_weight(layer)
    if not input.is_floating_point():
        raise TypeError(f"{name} has dtype {input.dtype}; it must be a floating dtype: call {name}.to({weight.dtype})")
    if input.device != weight.device:
        raise ValueError(f"{name} is on {input.device} and weight on {weight.device}; they must be on one device")
    cast = autocast_dtype(input.device.type) is not None and torch.float64 not in (input.dtype, weight.dtype)
    if input.dtype != weight.dtype and not cast:
        raise TypeError(
            f"{name} has dtype {input.dtype} and weight {weight.dtype}; "
            "they must be equal, unless torch.autocast casts them (not float64)"
        )


def as_node(layer: nn.Module, *arguments: Any) -> Any:
    """Record a call of the layer as one node of a graph of `torch.fx`, as for torch's own layers.

    A tracer treats only the modules of ``torch.nn`` as units, and would trace into this one.
    """
    tracer: Any = next(argument.tracer for argument in arguments if isinstance(argument, fx.Proxy))
    if tracer.root is layer:
        raise TraceError(f"{type(layer).__name__} can't be the root that is traced: trace nn.Sequential(layer)")
    return tracer.create_proxy("call_module", tracer.path_of_module(layer), arguments, {})


def autocast_dtype(device: str) -> torch.dtype | None:
    """The dtype of an active autocast; None without one, and always on the meta device."""
    enabled = device != "meta" and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if enabled else None
