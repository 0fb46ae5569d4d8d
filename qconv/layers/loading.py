"""Loading checkpoints into a quantized layer: the authors' names, refusals, and missing tensors."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from ..ground.processes import placed_as
from ..quantizers import Quantizer
from ..quantizers.part import Part
from .naming import QUANTIZERS, quantizers_of
from .sign_note import KEY, difference


def translate(layer: nn.Module, state_dict: dict[str, Any], prefix: str) -> list[str]:
    """Rename the tensors of the authors' layer to the names used here; return why they can't be loaded, if so.

    ``prefix`` is the name of the layer with a point after it, or nothing.
    """
    wrong = []
    for place, quantizer in quantizers_of(layer).items():
        names, why = quantizer.of_authors()
        found = {own: name for name, own in names.items() if prefix + name in state_dict}
        if found and why:
            own_name = _name(layer, prefix)
            wrong.append(f"layer {own_name}: {' and '.join(found.values())} come from the authors' code, which {why}")
        for own, name in found.items():
            tensor, here = state_dict.pop(prefix + name), getattr(quantizer, own)
            fits = tensor.numel() == here.numel()  # a number of theirs may have no dimension
            state_dict[f"{prefix}{place}.{own}"] = tensor.reshape(here.shape) if fits else tensor
    return wrong


def refusal(layer: nn.Module, state_dict: dict[str, Any], prefix: str) -> str:
    """Return why the layer can't load the checkpoint, or nothing; ask before the weight is loaded.

    `state_dict` has none of the layer's tensors then, so that weight, bias and quantizers stay as they are.

    Raises:
        ValueError, TypeError: a learned tensor that breaks its rule.
    """
    for name, part in layer.named_modules():
        if isinstance(part, Part):
            part.check_state(state_dict, f"{prefix}{name}.")
    own = layer.__dict__.get("before_sign")
    stored = state_dict.pop(f"{prefix}{KEY}", None)  # absent in float checkpoints
    wrong = "" if own is None or stored is None else difference(own, stored, _name(layer, prefix))
    if wrong:
        parts = tuple(f"{prefix}{name}." for name in quantizers_of(layer))
        for key in [key for key in state_dict if key.startswith(prefix)]:
            if key.startswith(parts) or "." not in key.removeprefix(prefix):
                del state_dict[key]
    return wrong


def emptied(layer: nn.Module, state_dict: dict[str, Any], prefix: str, device: torch.device) -> list[str]:
    """Give memory on ``device`` to the quantizers on the meta device that a checkpoint lacks; return their places."""
    stored = {place for place in QUANTIZERS if any(key.startswith(f"{prefix}{place}.") for key in state_dict)}
    without = [place for place in on_meta(layer) if place not in stored]
    for place in without:
        getattr(layer, place).to_empty(device=device)
    return without


def reset_quantizers(layer: nn.Module, fresh: Mapping[str, Quantizer | None], places: Iterable[str]) -> None:
    """Reset quantizers to fresh ones, except tensors that the weight's quantizer learns from the weight."""
    for place, new in fresh.items():
        own = getattr(layer, place)
        if place not in places or new is None or type(new) is not type(own):
            continue
        here = own.state_dict()
        shapes = {name: tensor.shape for name, tensor in here.items()}
        state = dict(new.state_dict())  # without what it says of its bits
        if place == "weight_quantizer":  # what it learns comes from the weight, perhaps in another shape
            learned = {name for name, tensor in new.named_parameters() if shapes.get(name) != tensor.shape}
            state = {name: tensor for name, tensor in state.items() if name not in learned}
        if all(shapes.get(name) == tensor.shape for name, tensor in state.items()):
            own.load_state_dict({name: placed_as(here[name], tensor) for name, tensor in state.items()}, strict=False)


def on_meta(layer: nn.Module) -> list[str]:
    """Return the places of the quantizers with tensors on the meta device."""
    every = quantizers_of(layer).items()
    return [place for place, own in every if any(each.is_meta for each in (*own.parameters(), *own.buffers()))]


def _name(layer: nn.Module, prefix: str) -> str:
    return prefix.removesuffix(".") or type(layer).__name__
