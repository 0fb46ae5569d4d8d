"""Loading checkpoints into a quantized layer: the authors' names, refusals, and missing tensors."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ..quantizers.part import Part
from .naming import QUANTIZERS
from .sign_note import KEY, difference

if TYPE_CHECKING:
    from .base import QuantizedLayer


def translate(layer: "QuantizedLayer", state_dict: dict[str, Any], prefix: str) -> list[str]:
    """Rename the tensors of the authors' layer to the names used here; return why they can't be loaded, if so.

    Args:
        layer: the layer that loads them.
        state_dict: the tensors by name, which is changed.
        prefix: the name of the layer with a point after it, or nothing.
    """
    wrong = []
    for place, quantizer in layer.quantizers().items():
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


def refusal(layer: "QuantizedLayer", state_dict: dict[str, Any], prefix: str) -> str:
    """Return why the layer can't load the checkpoint, or nothing; ask before the weight is loaded.

    `state_dict` has none of the layer's tensors then, so that weight, bias and quantizers stay as they are.

    Raises:
        ValueError, TypeError: a learned tensor that breaks its rule.
    """
    for name, part in layer.named_modules():
        if isinstance(part, Part):
            part.check_state(state_dict, f"{prefix}{name}.")
    own, stored = layer.before_sign, state_dict.pop(f"{prefix}{KEY}", None)  # absent in float checkpoints
    wrong = "" if own is None or stored is None else difference(own, stored, _name(layer, prefix))
    if wrong:
        parts = tuple(f"{prefix}{name}." for name in layer.quantizers())
        for key in [key for key in state_dict if key.startswith(prefix)]:
            if key.startswith(parts) or "." not in key.removeprefix(prefix):
                del state_dict[key]
    return wrong


def start_what_is_missing(layer: "QuantizedLayer", state_dict: dict[str, Any], prefix: str) -> None:
    """Reset quantizers without values that a checkpoint lacks."""
    stored = {place for place in QUANTIZERS if any(key.startswith(f"{prefix}{place}.") for key in state_dict)}
    if not layer.weight.is_meta:  # assigned
        without = [place for place in on_meta(layer) if place not in stored]
        for place in without:
            getattr(layer, place).to_empty(device=layer.weight.device)
        reset_quantizers(layer, without)


def reset_quantizers(layer: "QuantizedLayer", places: Iterable[str] = QUANTIZERS) -> None:
    """Reset quantizers, except tensors that the weight's quantizer learns from the weight."""
    scheme = layer.scheme
    fresh = scheme.input(), scheme.weight(), None if scheme.grad is None else scheme.grad()
    fresh[0].build(*layer.input_channels())
    for place, new in zip(QUANTIZERS, fresh, strict=True):
        own = getattr(layer, place)
        if place not in places or new is None or type(new) is not type(own):
            continue
        shapes = {name: tensor.shape for name, tensor in own.state_dict().items()}
        state = dict(new.state_dict())  # without what it says of its bits
        if place == "weight_quantizer":  # what it learns comes from the weight, perhaps in another shape
            learned = {name for name, tensor in new.named_parameters() if shapes.get(name) != tensor.shape}
            state = {name: tensor for name, tensor in state.items() if name not in learned}
        if all(shapes.get(name) == tensor.shape for name, tensor in state.items()):
            own.load_state_dict(state, strict=False)


def on_meta(layer: "QuantizedLayer") -> list[str]:
    """Return the places of the quantizers with tensors on the meta device."""
    return [
        place
        for place in QUANTIZERS
        if (own := getattr(layer, place, None)) is not None  # the twin's constructor may cast before there are any
        and any(tensor.is_meta for tensor in (*own.parameters(), *own.buffers()))
    ]


def _name(layer: "QuantizedLayer", prefix: str) -> str:
    return prefix.removesuffix(".") or type(layer).__name__
