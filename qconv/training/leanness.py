"""The option `lean` of a run: whether its network keeps bits for the backward."""

from typing import Literal

from torch import nn

from ..layers import QuantizedLayer
from ..lean import choose_format, is_lean, lean
from ..quantizers import Identity

_WIDE = 64  # channels
VIEWED = "the forward does not accept channels_last images: call x.reshape instead of x.view"
Asked = bool | Literal["exact", "auto"]


def check_lean(asked: object) -> None:
    """Raise a ValueError unless it is true, false, "exact" or "auto"."""
    if not isinstance(asked, bool) and (not isinstance(asked, str) or asked not in ("exact", "auto")):
        raise ValueError(f"lean (={asked}) must be true, false, exact or auto")


def make_lean(model: nn.Module, asked: Asked, *, on_cpu: bool, compiled: bool, takes_channels_last: bool) -> str:
    """Make the model lean (`qconv.lean`) as asked, and return what was asked and done, as "auto, on".

    A model that quantizes neither inputs nor weights stays as it is. "auto" leaves a model as it is in these cases:

    - It does not train on the CPU: on a GPU steps took 2.6 times as long.
    - It is compiled: torch then no longer fuses a layer with the operations around it (steps of ResNet-20 took 1.1 to
      2.0 times as long).
    - Fewer than half of its quantized layers gain, see `_gains`.
    - It does not accept channels_last images, with which lean steps are fastest.

    State dicts are the same either way, so a run may be resumed with another value.
    """
    check_lean(asked)
    layers = [module for module in model.modules() if isinstance(module, QuantizedLayer)]
    quantizers = [quantizer for layer in layers for quantizer in (layer.input_quantizer, layer.weight_quantizer)]
    on = asked is not False and not all(isinstance(quantizer, Identity) for quantizer in quantizers)
    if asked == "auto":
        on = on and on_cpu and not compiled and 2 * sum(map(_gains, layers)) >= len(layers)
    is_viewed = on and asked != "exact" and not takes_channels_last
    on = on and not (is_viewed and asked == "auto")
    if on:
        lean(model, exact=asked == "exact")
    if on and asked != "exact":
        choose_format(model, takes_channels_last)
    word = f"{str(asked).lower()}, {'on' if on else 'off'}"
    return f"{word}: {'slower, because ' if on else ''}{VIEWED}" if is_viewed else word


def mode_of(model: nn.Module) -> Literal["off", "fast", "exact"]:
    """Return how the gradients of a lean model are computed, or that it is not lean."""
    return next((module.__dict__["lean"] for module in model.modules() if is_lean(module)), "off")


def _gains(layer: QuantizedLayer) -> bool:
    """Whether a lean layer keeps less for the backward in about the same time, or less.

    Signs times signs or floats are looked up: steps of small_cnn and ResNet-20 take 0.56 to 0.88 of the time. For
    inputs of a few bits more is computed again than is saved: with at least 64 channels on both sides, as in a
    ResNet-18, steps take 0.79 (dorefa), 0.89 (pact) and 1.05 (lsq) of the time and keep a twelfth; with fewer, 1.0 to
    1.4. Other weights on float inputs need these floats.
    """
    of_input, signs = layer.input_quantizer, layer.weight_quantizer.is_binary
    if isinstance(of_input, Identity) or of_input.signs:
        return signs
    if of_input.whole_ends is None or layer.weight_quantizer.whole_ends is None:  # sums are not those of integers
        return False
    channels_per_group = layer.weight.shape[1], len(layer.weight) // getattr(layer, "groups", 1)
    return min(channels_per_group) >= _WIDE
