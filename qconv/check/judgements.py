"""What is known to go wrong in one quantized layer, as sentences."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..layers import QuantizedLayer
from ..layers.computed import computed_by, trained_weights, writes
from ..quantizers import Quantizer, Stream
from ..quantizers.part import Part

SHARE = 0.999
"""The share of a batch's elements in one level from which on hardly any information passes."""
SAMPLES = 16
"""The number of samples of a batch to examine."""


class Crowded(NamedTuple):
    """The share of the elements in the most frequent level of a batch, its value, and the ends of the batch."""

    share: float
    level: float
    low: float
    high: float

    def message(self, quantizer: Quantizer) -> str:
        """The share, why it is so high, and the remedy."""
        said = (
            f"{self.share:.1%} of the inputs, which lie from {self.low:.3g} to {self.high:.3g}, became "
            f"{self.level + 0.0:.3g} in {type(quantizer).__name__}: hardly any information passes. "
        )
        if quantizer.splits_at_zero and (self.low >= 0 or self.high < 0):
            return said + (
                "A sign needs inputs of both signs: leave out a ReLU before it, as qconv.convert does if it finds one "
                "(before_sign='identity'), put nn.Hardtanh or nn.PReLU in its place, or a batch norm before the sign"
            )
        if self.high <= 0:
            return said + "Its levels begin at 0: use a scheme with signed inputs, or put a ReLU before it"
        if self.level == 0:
            return said + "Its range is too wide for them: start it lower, or call qconv.calibrate(model, batches)"
        return said + "Its range does not fit them: call qconv.calibrate(model, batches), or put a batch norm before it"


@torch.no_grad()
def crowded(layer: QuantizedLayer, x: Tensor) -> Crowded | None:
    """Return the most frequent level of the first samples of an input; None for a constant, or without a quantizer.

    Values equal to their level, such as zeros of a sparse input, are passed on unchanged. So the share is limited to
    that of the other elements.
    """
    quantizer = layer.input_quantizer
    is_sample = x.ndim == len(getattr(layer, "kernel_size", ())) + 1
    x = x.unsqueeze(0) if is_sample else x[:SAMPLES]
    if quantizer.bits >= 32 or not x.numel():
        return None
    low, high = (end.item() for end in x.aminmax())
    if low == high:
        return None
    tensors = quantizer.tensors()
    x_q = quantizer.quantize(x, *tensors)
    try:
        levels = quantizer.codes(x, *tensors).values.flatten()
    except TypeError:  # it has none
        levels = x_q.flatten()
    some = levels[:: max(levels.numel() // 1000, 1)]
    middle = some.sort().values[some.numel() // 2]  # in the most frequent level, if nearly all values are in one
    at, moved = levels == middle, (x != x_q).flatten()
    share = min(at.float().mean().item(), (at & moved).sum().item() / max(moved.sum().item(), 1))
    return Crowded(share, x_q.flatten()[at.int().argmax()].item(), low, high)


def uncalibrated(layer: QuantizedLayer) -> str:
    """Say that the input's quantizer still has its initial range; empty if it has had data, or needs none."""
    if layer.input_quantizer.calibrated:
        return ""
    return (
        f"is evaluated before {type(layer.input_quantizer).__name__} has had data, so it still has its initial "
        "range. Call qconv.calibrate(model, batches), or run a training batch in training mode, which sets the "
        "range"
    )


@torch.no_grad()
def left_undone(layer: QuantizedLayer) -> str:
    """What `qconv.after_step` does for the layer; empty if nothing."""
    parts = [part for quantizer in layer.quantizers().values() for part in quantizer.modules()]
    is_latent = computed_by(layer) is None
    if layer.weight_quantizer.replaces_weight or (is_latent and writes(layer.weight_quantizer, layer.filters())):
        return "keeps latent weights in their range"
    trained = [
        (part, name) for part in parts for name, x in part._parameters.items() if x is not None and x.requires_grad
    ]
    if any(isinstance(part, Part) and name in part.rules() for part, name in trained):
        return "keeps learned steps and ranges positive"
    if any(isinstance(part, Stream) for part in parts):
        return "draws new random numbers"
    return ""


def versions(layer: QuantizedLayer) -> dict[int, int]:
    """How often each tensor that stands for the weight was written to; none while they follow the weight."""
    quantizer = layer.weight_quantizer
    if quantizer.replaces_weight and quantizer.is_fresh:
        return {}
    trained = quantizer.parameters() if quantizer.replaces_weight else trained_weights(layer)
    return {id(tensor): tensor._version for tensor in trained}
