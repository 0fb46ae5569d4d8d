"""Watching the first batches: a quantizer that maps all inputs to one value blocks them, so a warning says so."""

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from ..quantizers import Quantizer
from .naming import name_of
from .negative import note

BATCHES = 3
"""The number of training batches to examine; all of them must be affected before the warning."""
SHARE = 0.999
"""The share of a batch's elements in one level from which on it counts as affected."""
SAMPLES = 16
"""The number of samples of a batch to examine."""


@torch.no_grad()
def watch(layer: Any, input: Tensor) -> None:
    """Warn if nearly all values in the layer's first training batches lie in one level of its quantizer.

    Their negative inputs are counted, too (`negative.note`).

    Later batches cost nothing. A batch with a single value, such as zeros, does not count.
    """
    noted = layer.__dict__.get("negative_inputs") == "told"
    if (noted and layer.batches_watched >= BATCHES) or not _can_be_read(input):
        return
    if not noted and "_former_parameters" not in layer.__dict__:
        note(layer, input)
    if layer.batches_watched >= BATCHES:
        return
    quantizer = layer.input_quantizer
    if quantizer.bits >= 32 or "_former_parameters" in layer.__dict__:  # a replica of DataParallel is temporary
        layer.batches_watched = BATCHES
        return
    crowded = crowded_level(quantizer, input[:SAMPLES] if input.ndim > 1 else input)
    if crowded is None:
        return
    share, level = crowded
    layer.batches_watched += 1
    if share < SHARE:
        layer.batches_watched = BATCHES
    elif layer.batches_watched == BATCHES:
        low, high = (end.item() for end in input.aminmax())
        warnings.warn(_message(layer, quantizer, share, level, low, high), stacklevel=4)


def crowded_level(quantizer: Quantizer, x: Tensor) -> tuple[float, float] | None:
    """Return the share of ``x`` in its most frequent level, and the value of that level; None for a constant.

    Values equal to their level, such as zeros of a sparse input, are passed on unchanged. So the share is limited to
    that of the other elements.
    """
    if not x.numel():
        return None
    low, high = x.aminmax()
    if low == high:
        return None
    tensors = quantizer.tensors()
    x_q = quantizer.quantize(x, *tensors)
    try:
        levels = quantizer.codes(x, *tensors).values
    except TypeError:  # it has none
        levels = x_q
    levels = levels.flatten()
    some = levels[:: max(levels.numel() // 1000, 1)]
    middle = some.sort().values[some.numel() // 2]  # in the most frequent level, if nearly all values are in one
    at = levels == middle
    moved = (x != x_q).flatten()
    share = min(at.float().mean().item(), (at & moved).sum().item() / max(moved.sum().item(), 1))
    return share, x_q.flatten()[at.int().argmax()].item()


def _can_be_read(input: Tensor) -> bool:
    """Whether it is a plain tensor with values: no trace, capture or transformation by `torch.func`."""
    if torch.compiler.is_compiling():  # of this function alone: where the graph of its caller is broken
        return False
    if type(input) not in (Tensor, nn.Parameter) or input.is_meta or torch.jit.is_tracing():  # pyright: ignore[reportPrivateImportUsage]
        return False
    if input.is_cuda and torch.cuda.is_current_stream_capturing():
        return False
    return not torch._C._functorch.is_functorch_wrapped_tensor(input)  # pyright: ignore[reportAttributeAccessIssue]


def _message(layer: Any, quantizer: Quantizer, share: float, level: float, low: float, high: float) -> str:
    said = (
        f"{name_of(layer)}: in each of its first {BATCHES} training batches {share:.1%} of the inputs, which lie "
        f"from {low:.3g} to {high:.3g}, became {level:.3g} in {type(quantizer).__name__}: hardly any "
        "information passes. "
    )
    if quantizer.splits_at_zero and (low >= 0 or high < 0):
        return said + (
            "A sign needs inputs of both signs: leave out a ReLU before it, as qconv.convert does if it finds one "
            "(before_sign='identity'), put nn.Hardtanh or nn.PReLU in its place, or a batch norm before the sign"
        )
    if high <= 0:
        return said + "Its levels begin at 0: take a scheme with signed inputs, or put a ReLU before it"
    if level == 0:
        return said + "Its range is too wide for them: start it lower, or call qconv.calibrate(model, batches)"
    return said + "Its range does not fit them: call qconv.calibrate(model, batches), or put a batch norm before it"
