"""What a quantized layer makes of a checkpoint before it loads it: other names, and what it refuses."""

from typing import TYPE_CHECKING, Any

from ..quantizers.behind import KEY, difference
from ..quantizers.part import Part

if TYPE_CHECKING:
    from .base import QuantizedLayer


def translate(layer: "QuantizedLayer", state_dict: dict[str, Any], prefix: str) -> list[str]:
    """Give the tensors of a layer of a method's authors the names that they have here; return what forbids it.

    Args:
        layer: the layer that loads them.
        state_dict: the tensors by name, which is changed.
        prefix: the name of the layer with a point after it, or nothing.
    """
    wrong = []
    for place, quantizer in layer.quantizers().items():
        found = {own: name for name, own in quantizer.authors_names.items() if prefix + name in state_dict}
        if found and (why := quantizer.differs_from_authors()):
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
    own, stored = layer.input_quantizer.before_sign, state_dict.get(f"{prefix}input_quantizer.{KEY}")
    wrong = "" if own is None or stored is None else difference(own, stored, _name(layer, prefix))
    if wrong:
        parts = tuple(f"{prefix}{name}." for name in layer.quantizers())
        for key in [key for key in state_dict if key.startswith(prefix)]:
            if key.startswith(parts) or "." not in key.removeprefix(prefix):
                del state_dict[key]
    return wrong


def _name(layer: "QuantizedLayer", prefix: str) -> str:
    return prefix.removesuffix(".") or type(layer).__name__
