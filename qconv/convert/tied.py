"""Whether layers can follow their schemes: not if several modules hold a weight that one of them would change."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..layers import QuantizedLayer
from ..layers.computed import writes
from ..layers.naming import name_of
from ..scheme import Scheme


def check_fits(
    layer: nn.Module, becomes: type[QuantizedLayer], scheme: Scheme, at: tuple[str, ...], tied: set[nn.Parameter]
) -> None:
    """Raise a ValueError that names the layer if it can't follow the scheme, before anything is changed."""
    try:
        becomes.check_scheme(scheme)
    except ValueError as error:
        raise ValueError(f"{name_of(layer, at[0])}: {error}") from error
    if scheme.weight().replaces_weight and layer.weight in tied:
        raise ValueError(
            f"{name_of(layer, at[0])}: its weight is tied to another module's, and {scheme.name} replaces it by "
            "its own tensors: leave one of the layers float by skip or overrides"
        )


@torch.no_grad()
def check_tied(model: nn.Module, planned: Iterable[tuple[str, nn.Module, Scheme]]) -> None:
    """Raise a ValueError if an optimizer step would change a weight that a module holds which does not follow it.

    ``planned`` are the layers that will be quantized, with their names and schemes.
    """
    planned = [*planned]
    follows = {layer: scheme for _, layer, scheme in planned}
    holders = _holders(model)
    for name_of_layer, layer, scheme in planned:
        weight: Any = layer._parameters.get("weight")
        others = holders.get(weight, {})
        if len(others) < 2:
            continue
        quantizer, own = scheme.weight(), repr(scheme.weight())
        probe = torch.linspace(-1, 1, weight.numel()).view(weight.shape)
        quantizer.initialize(probe)
        for other, name in others.items():
            same = other in follows and repr(follows[other].weight()) == own
            if not same and writes(quantizer, probe):
                raise ValueError(
                    f"{name_of(layer, name_of_layer)}: its weight is tied to that of {name_of(other, name)}, and "
                    f"{scheme.name} would clamp or freeze both after every step; leave it float by skip or "
                    "overrides, or untie them"
                )


def shared_tensor(model: nn.Module, tensors: Mapping[str, Tensor]) -> tuple[str, str] | None:
    """Return the names of two modules that hold one of some modules' ``tensors``, in their order; None if none do."""
    holders: dict[Any, dict[nn.Module, str]] = _holders(model)
    found = (list(holders.get(tensor, {}).values()) for tensor in tensors.values())
    return next(((names[0], names[1]) for names in found if len(names) > 1), None)


def tied_parameters(model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters that more than one module holds."""
    return {parameter for parameter, modules in _holders(model).items() if len(modules) > 1}


def _holders(model: nn.Module) -> dict[nn.Parameter, dict[nn.Module, str]]:
    """Return the modules that hold each parameter, with their names."""
    holders: dict[nn.Parameter, dict[nn.Module, str]] = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            holders.setdefault(parameter, {})[module] = name
    return holders
