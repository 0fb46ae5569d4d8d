"""The option `lean` of a run: whether its network keeps bits for the backward."""

from typing import Literal

from torch import nn

from ..layers import QuantizedLayer
from ..lean import is_lean, lean
from ..quantizers import Identity

Asked = bool | Literal["exact", "auto"]


def check_lean(asked: object) -> None:
    """Raise a ValueError unless it is true, false, "exact" or "auto"."""
    if not isinstance(asked, bool) and (not isinstance(asked, str) or asked not in ("exact", "auto")):
        raise ValueError(f"lean (={asked}) must be true, false, exact or auto")


def make_lean(model: nn.Module, asked: Asked, *, on_cpu: bool) -> str:
    """Make the model lean (`qconv.lean`) as asked, and return what was asked and done, as "auto, on".

    A float model, whose layers quantize neither inputs nor weights, stays as it is. With "auto", so does one that
    trains elsewhere than on the CPU, since no step was measured there, and one of whose quantized layers fewer than
    half multiply signs with signs or floats. State dicts are the same either way, so a run may be resumed with another
    value.

    Args:
        model: the network before its first step, with the stages of its quantizers as they begin.
        asked: true, false, "exact" or "auto".
        on_cpu: whether it will be trained on the CPU.

    Raises:
        ValueError: ``asked`` is not one of these values.
    """
    check_lean(asked)
    layers = [module for module in model.modules() if isinstance(module, QuantizedLayer)]
    on = asked is not False and any(_is_quantized(layer) for layer in layers)
    if asked == "auto":
        # Steps of small_cnn and resnet20 take 0.56 to 0.88 of the time where convolutions multiply signs with signs or
        # with floats, for sums are looked up by bits. With inputs of a few bits they take 1.0 to 1.4 times as long:
        # more is computed again than is saved. No GPU was measured.
        on = on and on_cpu and 2 * sum(map(_gains, layers)) >= len(layers)
    if on:
        lean(model, exact=asked == "exact")
    return f"{str(asked).lower()}, {'on' if on else 'off'}"


def mode_of(model: nn.Module) -> Literal["off", "fast", "exact"]:
    """Return how the gradients of a lean model are computed, or that it is not lean."""
    return next((module.__dict__["lean"] for module in model.modules() if is_lean(module)), "off")


def _gains(layer: QuantizedLayer) -> bool:
    of_input = layer.input_quantizer
    return layer.weight_quantizer.is_binary and (of_input.signs or isinstance(of_input, Identity))


def _is_quantized(layer: QuantizedLayer) -> bool:
    return not all(isinstance(quantizer, Identity) for quantizer in (layer.input_quantizer, layer.weight_quantizer))
