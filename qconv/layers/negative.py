"""Negative inputs of quantizers without negative levels: counted in the first training batch, told once for a model."""

import logging
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..processes import rank_and_count
from ..quantizers import Quantizer
from .naming import name_of

SHARE = 0.01
"""The share of negative inputs from which on a message names the layer."""
LISTED = 8
"""The number of layers that a message names."""
BATCHES = 3
"""The training batch in which a layer that no `qconv.convert` made speaks for itself."""
REMEDY = (
    "schemes whose inputs may be negative are lsq, lsq_plus, dsq, minmax, percentile and fp8: take one of them by "
    "overrides, or put a ReLU before these layers"
)


class Negative(NamedTuple):
    """The negative inputs of a layer.

    Attributes:
        share: of all its inputs.
        signed: what its quantizer has chosen by them; None if its levels begin at 0 in any case.
    """

    share: float
    signed: bool | None


def judged(quantizer: Quantizer, share: float) -> Negative | None:
    """Return what there may be to tell of a layer with this quantizer; None for one that takes any input."""
    if quantizer.chosen_sign is None and not quantizer.is_unsigned:
        return None
    return Negative(share, quantizer.chosen_sign)


def note(layer: Any, input: Tensor) -> None:
    """Count the negative inputs of the first training batch, once, for `tell_of`."""
    seen = layer.__dict__.get("negative_inputs")
    if seen == "told" or layer.input_quantizer.bits >= 32 or not input.numel():
        return
    if seen is None:
        found = judged(layer.input_quantizer, (input < 0).float().mean().item())
        layer.__dict__["negative_inputs"] = "told" if found is None else (found, 1)
        return
    found, batches = seen
    layer.__dict__["negative_inputs"] = found, batches + 1
    if batches + 1 == BATCHES:  # the forward of no converted model has taken it up
        mark_told(layer)
        tell({"": (layer, found)})


def tell_of(model: nn.Module) -> None:
    """Tell what `note` has counted in the layers of a model, in one message."""
    found = {}
    for name, layer in model.named_modules():
        seen = layer.__dict__.get("negative_inputs")
        if isinstance(seen, tuple):
            found[name] = layer, seen[0]
            mark_told(layer)
    tell(found)


def mark_told(layer: nn.Module) -> None:
    """Keep a layer from speaking of its negative inputs again."""
    layer.__dict__["negative_inputs"] = "told"


def tell(found: Mapping[str, tuple[nn.Module, Negative]]) -> None:
    """Log which layers have chosen signed inputs, and warn of those that cut negative ones off; the first process does.

    Args:
        found: layers by their names, and what there is to tell of them.
    """
    if rank_and_count()[0] != 0:
        return
    many = {name: negative for name, (_, negative) in found.items() if negative.share >= SHARE}
    signed = [name for name, (_, negative) in found.items() if negative.signed]
    small = {name: negative for name, negative in many.items() if negative.signed is False}
    cut = {name: negative for name, negative in many.items() if negative.signed is None}
    if signed:
        text = f"levels on both sides of 0, as inputs are negative, in {_layers(len(signed))}: {_listed(found, signed)}"
        if small:
            text += f"; levels from 0 on in {_listed(found, list(small))}, whose negative inputs are small"
        logging.getLogger("qconv").warning("%s", text)  # shown without a set-up of logging, and no fault
    elif small and "" not in small:
        text = f"levels from 0 on, as negative inputs are small: {_listed(found, list(small))}"
        logging.getLogger("qconv").warning("%s", text)
    if cut:
        lead = f"negative inputs are clipped to 0 in {_layers(len(cut))}, whose method has no levels below 0"
        warnings.warn(f"{lead}: {_listed(found, list(cut))}; {REMEDY}", stacklevel=3)


def _layers(count: int) -> str:
    return f"{count} layer{'s' if count != 1 else ''}"


def _listed(found: Mapping[str, tuple[nn.Module, Negative]], names: list[str]) -> str:
    shown = sorted(names, key=lambda name: -found[name][1].share)[:LISTED]
    parts = (f"{name or name_of(found[name][0])} ({100 * found[name][1].share:.0f} %)" for name in shown)
    return ", ".join(parts) + (f" and {len(names) - LISTED} more" if len(names) > LISTED else "")
