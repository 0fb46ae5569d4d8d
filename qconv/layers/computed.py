"""Weights that are not parameters but are computed before each forward: parametrized, normalized and pruned ones."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from ..quantizers import Quantizer
from .naming import name_of
from .subclass import subclass_of

PRUNING = "pruning"


class Maker(NamedTuple):
    """The mechanism that computes a weight, and how to turn the weight into a parameter again."""

    name: str
    remedy: str

    def __str__(self) -> str:
        return f"its weight is computed ({self.name}): {self.remedy}"


def computed_by(layer: nn.Module) -> Maker | None:
    """Return what computes the layer's weight; None if it is a parameter, or a wrapper holds it elsewhere."""
    if isinstance(layer._parameters.get("weight"), nn.Parameter):
        return None
    if parametrize.is_parametrized(layer, "weight"):
        parametrizations: Any = layer.parametrizations
        names = ", ".join(type(step).__name__.removeprefix("_") for step in parametrizations["weight"])
        return Maker(names, "call torch.nn.utils.parametrize.remove_parametrizations(layer, 'weight') first")
    for hook in layer._forward_pre_hooks.values():
        if getattr(hook, "_tensor_name", None) == "weight":  # of `torch.nn.utils.prune`, which imports slowly
            return Maker(PRUNING, "call torch.nn.utils.prune.remove(layer, 'weight') first")
        if isinstance(hook, WeightNorm | SpectralNorm) and hook.name == "weight":
            removes = "remove_weight_norm" if isinstance(hook, WeightNorm) else "remove_spectral_norm"
            return Maker(type(hook).__name__, f"call torch.nn.utils.{removes}(layer) first")
    return None


def stored_weight(layer: nn.Module) -> Tensor:
    """Return a tensor that has the dtype and device of the weight, without computing the weight.

    Computing it has effects: spectral norm makes another step of its iteration, others draw random numbers. A forward
    computes it once, as that of a float layer does.
    """
    weight = layer._parameters.get("weight")
    if weight is None and parametrize.is_parametrized(layer, "weight"):
        parametrizations: Any = layer.parametrizations
        weight = None if parametrizations["weight"].unsafe else next(parametrizations["weight"].parameters(), None)
    return cast(Tensor, layer.weight) if weight is None else weight


@contextmanager
def evaluated(model: nn.Module) -> Iterator[None]:
    """Make the computed weights in a layer or model as in evaluation, without side effects.

    Pruning and the older normalizations compute a weight when the layer is called, so it may be an earlier
    step's: it is computed again. Modes and weights are restored at the end.
    """
    modes, before = {}, {}
    for layer in model.modules():
        if parametrize.is_parametrized(layer, "weight"):
            parametrizations: Any = layer.parametrizations
            modes |= {module: module.training for module in parametrizations["weight"].modules()}
        elif computed_by(layer) is not None:
            before[layer] = layer.__dict__.get("weight")  # it may be needed with its graph
            _refresh(layer)
    try:
        for module in modes:
            module.training = False
        yield
    finally:
        for module, training in modes.items():
            module.training = training
        for layer, weight in before.items():
            layer.__dict__["weight"] = weight


def differentiable_weight(layer: nn.Module) -> Tensor:
    """Return the weight with its graph; a parametrization computes it as in evaluation, without effects.

    Pruning and the older normalizations have computed it when the layer was called.
    """
    if not parametrize.is_parametrized(layer, "weight"):
        return cast(Tensor, layer.weight)
    with evaluated(layer):
        return cast(Tensor, layer.weight)


@torch.no_grad()
def _refresh(layer: nn.Module) -> None:
    """Compute a weight again that a hook computes."""
    for hook in layer._forward_pre_hooks.values():
        if getattr(hook, "_tensor_name", None) == "weight":
            layer.weight = cast(Any, hook).apply_mask(layer)
        elif isinstance(hook, SpectralNorm) and hook.name == "weight":
            layer.weight = hook.compute_weight(layer, do_power_iteration=False)
        elif isinstance(hook, WeightNorm) and hook.name == "weight":
            layer.weight = hook.compute_weight(layer)


def trained_weights(layer: nn.Module) -> list[nn.Parameter]:
    """Return the layer's weight, or the parameters from which it is computed."""
    weight = layer._parameters.get("weight")
    if isinstance(weight, nn.Parameter):
        return [weight]
    parts = parts_of_weight(layer) or {"weight"}
    return [parameter for name, parameter in layer.named_parameters() if name in parts]


def parts_of_weight(layer: nn.Module) -> set[str]:
    """Return the names, below the layer, of the parameters and buffers from which its weight is computed."""
    if computed_by(layer) is None:
        return set()
    inside = "parametrizations.weight."
    own = [*layer._parameters, *layer._buffers]
    return {name for name in own if name.startswith("weight_")} | {
        name for name, _ in (*layer.named_parameters(), *layer.named_buffers()) if name.startswith(inside)
    }


def check_computed_once(layer: nn.Module, quantizer: Quantizer, filters: Callable[[], Tensor]) -> None:
    """Raise a ValueError, at the first call, if ``quantizer`` does not work with the layer's computed weight.

    That of a pruned layer is the first with zeros.
    """
    maker = computed_by(layer)
    if maker is None or layer.__dict__.get("_checked_maker") == maker:
        return
    with evaluated(layer):
        weight = filters().detach()
    if why := _obstacle(quantizer, weight, maker):
        raise ValueError(f"{name_of(layer)}: {why}")
    if maker.name != PRUNING or (weight == 0).any():  # else a later pruning may bring the first zeros
        layer.__dict__["_checked_maker"] = maker


def why_not_computed(layer: nn.Module, quantizer: Quantizer) -> str:
    """Return why a float layer with a computed weight can't get this weight quantizer; empty if it can."""
    if (maker := computed_by(layer)) is None:
        return ""
    with torch.no_grad(), evaluated(layer):
        weight = cast(Tensor, layer.weight).detach()
        quantizer.initialize(weight)
        return _obstacle(quantizer, weight, maker)


@torch.no_grad()
def _obstacle(quantizer: Quantizer, filters: Tensor, maker: Maker) -> str:
    """Return why ``quantizer`` does not work with ``filters`` computed by ``maker``; empty if it does.

    A clamp after every step, which has no effect on a computed weight, is left out: it keeps latent weights where they
    can still change, and no level depends on it.
    """
    if quantizer.replaces_weight:
        why = "learns other tensors in its place"
    elif maker.name == PRUNING and not _keeps_zeros(quantizer, filters):
        return f"its weight is computed ({PRUNING}), and {quantizer} keeps no zeros: pruned weights would come back"
    elif _moves(quantizer, filters):
        why = "shifts it after every step, which has no effect on a computed weight"
    else:
        return ""
    return f"{maker}; {quantizer} {why}"


def _final(quantizer: Quantizer, filters: Tensor) -> Quantizer:
    final = copy.deepcopy(quantizer).eval()
    final.set_progress_(1.0, filters.clone())
    return final


def writes(quantizer: Quantizer, filters: Tensor) -> bool:
    """Whether an optimizer step changes the weight; tested with a very large weight that is no power of two."""
    probe = torch.full_like(filters, 3000.0)
    _final(quantizer, probe).after_step_(changed := probe.clone())
    return not changed.equal(probe)


def _moves(quantizer: Quantizer, filters: Tensor) -> bool:
    """Whether an optimizer step changes weights that lie within any clamp."""
    probe = torch.linspace(0.2, 0.5, filters.numel()).to(filters).view(filters.shape)
    own = copy.deepcopy(quantizer)
    own.initialize(probe)
    own.after_step_(changed := probe.clone())
    return not changed.equal(probe)


def _keeps_zeros(quantizer: Quantizer, filters: Tensor) -> bool:
    """Whether zeros stay 0 to the end, even a single one among positive weights, which have another mean."""
    final, is_zero = _final(quantizer, filters), filters == 0
    if not is_zero.any():
        return True
    single = (filters.abs() + filters.abs().max()).flatten()
    single[is_zero.flatten().int().argmax()] = 0
    weights = filters, single.view(filters.shape)
    return not any(final.quantize(each, *final.tensors())[is_zero & (each == 0)].any() for each in weights)


def base_of(layer: nn.Module) -> type[nn.Module]:
    """Return the layer's class, or if `parametrize` changed it, the class before."""
    return type(layer).__bases__[0] if parametrize.is_parametrized(layer) else type(layer)


def with_base(layer: nn.Module, base: type[nn.Module]) -> type[nn.Module]:
    """Return ``base``, or if `parametrize` changed the layer's class, such a class over ``base``."""
    own = type(layer)
    if not parametrize.is_parametrized(layer):
        return base
    of_the_class = "__dict__", "__weakref__", "__deepcopy__"
    attributes = {name: value for name, value in vars(own).items() if name not in of_the_class}
    if not hasattr(base, "__deepcopy__"):
        attributes["__deepcopy__"] = _deepcopied
    return subclass_of(base, f"Parametrized{base.__name__}", attributes)


def _deepcopied(layer: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """The `__deepcopy__` that `parametrize` gives to a class without one, as its layers have no `__getstate__`."""
    memo[id(layer)] = copied = type(layer).__new__(type(layer))
    copied.__dict__ = copy.deepcopy(layer.__dict__, memo)
    return copied
