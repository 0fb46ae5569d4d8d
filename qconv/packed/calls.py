"""Constructor calls as plain data, in Hydra's notation, and back through a list of allowed calls.

``DoReFaInput(4)`` is ``{"_target_": "qconv.quantizers.DoReFaInput", "bits": 4}``; a class as an argument, or a
`functools.partial` of one, has ``"_partial_": true``. Only calls in the list are imported or executed.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

from torch import nn

from .. import models, quantizers
from ..quantizers.chosen_sign import ChosenSign
from ..quantizers.part import Part

Node = dict[str, Any]
TORCH = ("torch.nn", "torch.nn.modules.activation")
ELEMENTWISE = (
    *("Identity", "ReLU", "ReLU6", "LeakyReLU", "PReLU", "RReLU", "ELU", "CELU", "SELU", "GELU", "SiLU", "Mish"),
    *("Hardtanh", "Hardsigmoid", "Hardswish", "Sigmoid", "Tanh", "Softplus", "Softsign"),
)
"""The torch activations that a network may be built with."""
DEPTH = 8
"""The deepest nesting of calls."""


def quantizer_call(part: Part) -> Node:
    """Return the call that makes a quantizer equivalent to `part`, with all arguments except surrogates."""
    names = {kind: name for name, kind in _quantizer_classes().items()}
    if type(part) not in names:
        raise ValueError(f"{type(part).__name__} is not one of qconv's quantizers: it can't be packed")
    arguments = {name: parameter.default for name, parameter in inspect.signature(type(part)).parameters.items()}
    arguments.update(part.arguments)
    if isinstance(part, ChosenSign):
        arguments["signed"] = part.signed  # with it, nothing is left to choose
    plain = {name: value for name, value in arguments.items() if not callable(value)}
    return {"_target_": names[type(part)], **plain}


def build_quantizer(node: Mapping[str, Any]) -> Any:
    """Make the quantizer of a call."""
    return _build(node, _quantizer_classes())


def build_network(node: Mapping[str, Any]) -> nn.Module:
    """Build the float network of a call to a function of `qconv.models`, with activations of torch or qconv."""
    networks = {f"qconv.models.{name}": made for name, made in vars(models).items() if inspect.isfunction(made)}
    own = {f"qconv.models.{kind.__name__}": kind for kind in (models.LearnedBias, models.Maxout, models.RPReLU)}
    torchs = {f"{module}.{name}": getattr(nn, name) for name in ELEMENTWISE for module in TORCH}
    return _build(node, networks, {**torchs, **own})


@cache
def _quantizer_classes() -> dict[str, Callable[..., Any]]:
    named = {f"qconv.quantizers.{name}": getattr(quantizers, name) for name in dir(quantizers)}
    abstract = (quantizers.Quantizer, quantizers.Stages, quantizers.Mixed)
    return {
        name: value
        for name, value in named.items()
        if isinstance(value, type) and issubclass(value, quantizers.Quantizer) and value not in abstract
    }


def _build(
    node: Mapping[str, Any],
    allowed: Mapping[str, Callable[..., Any]],
    inner: Mapping[str, Callable[..., Any]] | None = None,
    depth: int = 0,
) -> Any:
    inner = allowed if inner is None else inner
    rest = dict(node)
    target, is_partial = rest.pop("_target_", None), rest.pop("_partial_", False)
    if not isinstance(target, str) or target not in allowed:
        raise ValueError(f"_target_ (={target!r}) must be one of {', '.join(sorted(allowed))}")
    if depth > DEPTH or not isinstance(is_partial, bool) or (is_partial and not depth):
        raise ValueError(f"_partial_ (={is_partial!r}) of {target} must be true or false, and calls not so deep")
    arguments = {
        name: _build(value, inner, inner, depth + 1) if isinstance(value, Mapping) else value
        for name, value in rest.items()
    }
    function = allowed[target]
    for name, value in rest.items():
        if not isinstance(value, Mapping | list | str | bool | int | float | None):
            raise ValueError(f"{name} (={value!r}) of {target} must be a plain value, or a call as a mapping")
    signature = inspect.signature(function)
    try:
        (signature.bind_partial if is_partial else signature.bind)(**arguments)
        return partial(function, **arguments) if is_partial else function(**arguments)
    except (TypeError, ValueError, RuntimeError, OverflowError, MemoryError, AttributeError, LookupError) as error:
        raise ValueError(f"{target} can't be made of {arguments}: {error}") from error
