"""What calibration and a first batch tell of negative inputs, and what `qconv.check` need not tell again."""

import logging
import warnings
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from torch import nn

from ..ground.checks import some
from ..ground.processes import rank_and_count
from ..quantizers import Quantizer
from ..quantizers.chosen_sign import ChosenSign

SHARE = 0.01
"""The share of negative inputs from which on a message names the layer."""
LISTED = 8
"""The number of layers that a message names."""
REMEDY = (
    "schemes for negative inputs are lsq, lsq_plus, dsq, minmax, percentile and fp8: use one of them in overrides, "
    "or put a ReLU before these layers"
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
    signed = next((part.chosen_sign for part in _parts(quantizer) if isinstance(part, ChosenSign)), None)
    if quantizer.bits >= 32 or (signed is None and not is_unsigned(quantizer)):
        return None
    return Negative(share, signed)


def is_unsigned(quantizer: Quantizer) -> bool:
    """Whether the method at work clips negative inputs to 0, and was not told to by an argument."""
    return any(part.is_unsigned for part in _parts(quantizer))


def tell(found: Mapping[str, Negative]) -> None:
    """Log which layers have chosen signed inputs, and warn of those that cut negative ones off; the first process does.

    Args:
        found: what there is to tell, by the names of layers.
    """
    if rank_and_count()[0] != 0:
        return
    many = {name: negative for name, negative in found.items() if negative.share >= SHARE}
    signed = [name for name, negative in found.items() if negative.signed]
    small = [name for name, negative in many.items() if negative.signed is False]
    cut = [name for name, negative in many.items() if negative.signed is None]
    if signed:
        text = f"using signed levels in {_layers(len(signed))}, because inputs are negative: {_listed(found, signed)}"
        if small:
            text += f"; using unsigned levels in {_listed(found, small)}, because negative inputs are small"
        logging.getLogger("qconv").warning("%s", text)  # shown without a set-up of logging, and no fault
    elif small:
        text = f"using unsigned input levels, because negative inputs are small: {_listed(found, small)}"
        logging.getLogger("qconv").warning("%s", text)
    if cut:
        lead = f"negative inputs are clipped to 0 in {_layers(len(cut))}, because the method has no levels below 0"
        warnings.warn(f"{lead}: {_listed(found, cut)}; {REMEDY}", stacklevel=3)


def note(layers: Iterable[nn.Module], what: str) -> None:
    """Set a flag of the hooks that watch these layers' first batches, such as ``is_stepped``."""
    for layer in layers:
        for hook in layer._forward_hooks.values():
            if hasattr(hook, what):
                setattr(hook, what, True)


def _parts(quantizer: Quantizer) -> list[Quantizer]:
    """The quantizer at work and those inside it, such as that of a random share."""
    return [part for part in quantizer.at_work.modules() if isinstance(part, Quantizer)]


def _layers(count: int) -> str:
    return f"{count} layer{'s' if count != 1 else ''}"


def _listed(found: Mapping[str, Negative], names: list[str]) -> str:
    shown = sorted(names, key=lambda name: -found[name].share)
    return some([f"{name} ({100 * found[name].share:.0f} %)" for name in shown], LISTED)
