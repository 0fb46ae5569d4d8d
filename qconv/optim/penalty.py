"""Terms of the loss: DeepShift-PS's weight decay, BiPer's penalty of its sine, and oscillation dampening."""

from weakref import WeakSet

import torch
from torch import Tensor, nn

from ..ground.checks import check_module
from ..layers import QuantizedLayer
from ..layers.computed import differentiable_weight, trained_weights
from ..layers.on_levels import way_out, why_off_levels
from ..quantizers import BiPerWeight, Quantizer, ShiftPS, SineWeight, Stages

WAVES = SineWeight, BiPerWeight
DAMPENING_START = 0.25
"""The share of the training before which the authors' program does not dampen."""


def shift_penalty(model: nn.Module) -> Tensor:
    r"""DeepShift-PS's weight decay, ``½ · Σ (2^shift)²`` over the shifts of all `ShiftPS` (arXiv:1905.13298).

    Add ``weight_decay * shift_penalty(model)`` to the loss, and give the optimizer no weight decay for shift and sign:
    ``parameter_groups(model, {"weight_quantizers": {"weight_decay": 0.0}})``. The shifts are not rounded, and the sign
    plays no part, so weights that are 0 count as well. ``dshift = ln 2 · (2^shift)²``.

    Returns:
        A scalar, float32 or wider; shared quantizers count once.

    Raises:
        ValueError: no `ShiftPS` in the model, or one whose shifts have not yet been created by a layer.
        TypeError: ``model`` is not a module.
    """
    check_module(model)
    quantizers = [(name, module) for name, module in model.named_modules() if isinstance(module, ShiftPS)]
    if not quantizers:
        raise ValueError(
            f"model ({type(model).__name__}) must have a ShiftPS quantizer, as schemes.shift_ps() gives it"
        )
    for name, quantizer in quantizers:
        if quantizer.shift is None:
            raise ValueError(f"quantizer {name!r} has no shift yet: initialize it from a weight")
    shifts = {quantizer.shift: None for _, quantizer in quantizers}  # each parameter once, in order
    wide = (shift.to(torch.promote_types(shift.dtype, torch.float32)) for shift in shifts)
    return 0.5 * torch.stack([shift.exp2().square().sum() for shift in wide]).sum()


def sine_penalty(model: nn.Module) -> Tensor:
    r"""BiPer's penalty of its sine, ``Σ mean sin²(ω w)`` over the layers, w the latent weights (arXiv:2404.01278).

    Add ``factor * sine_penalty(model)`` to the loss, as the authors' code does in both stages, with 0.037 and 0.0468
    for ResNet-18 on CIFAR-10. ``dw = ω sin(2 ω w) / n`` for the n weights of a layer. A layer whose stage is another
    scheme, as at the start of ``two_stage(biper())``, adds 0.

    Returns:
        A scalar, float32 or wider; shared weights count once.

    Raises:
        ValueError: no trainable weight with BiPer's quantizer.
        TypeError: ``model`` is not a module.
    """
    check_module(model)
    layers = [layer for layer in model.modules() if isinstance(layer, QuantizedLayer)]
    layers = [layer for layer in layers if any(isinstance(part, WAVES) for part in layer.weight_quantizer.modules())]
    trained = {tuple(trained_weights(layer)): layer for layer in layers if layer.is_trained}
    if not trained:
        raise ValueError(
            f"model ({type(model).__name__}) must have a trainable weight of BiPer, as schemes.biper() gives it"
        )
    terms: list[Tensor] = []
    for layer in trained.values():
        weight = differentiable_weight(layer)
        wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
        terms.append((wide * _frequency(layer.weight_quantizer)).sin().square().mean())
    return torch.stack(terms).sum()


def _frequency(quantizer: Quantizer) -> float:
    """Return ω of BiPer's quantizer; 0 in a stage with another scheme."""
    while isinstance(quantizer, Stages):
        quantizer = quantizer.current
    return next((part.frequency for part in quantizer.modules() if isinstance(part, WAVES)), 0.0)


def dampening_penalty(model: nn.Module, max_bits: int = 4) -> Tensor:
    r"""Oscillation dampening, the distance of latent weights to their levels (arXiv:2203.11086).

    .. math:: \sum_{layers} \frac{1}{n} \sum (w - w_q)^2

    over the weights within their range, with n the number of weights of a filter. Add ``factor *
    dampening_penalty(model)`` to the loss: it pulls weights to their levels, away from the thresholds between two of
    them. The authors' program (Qualcomm-AI-research/oscillations-qat) lets the factor rise from 0 to 0.1, as half a
    cosine from a quarter of the training on; the paper's formula has no n. Levels and scales get no gradient, and
    neither do weights that their quantizer clips, unless the gradient of its scale reaches them (XNOR).

    Args:
        model: any module.
        max_bits: weights of more bits are ignored.

    Returns:
        A scalar, float32 or wider; shared weights count once.

    Raises:
        ValueError: no trainable quantized weight of at most so many bits.
        TypeError: weights whose levels are quantized to others, such as normalized ones; ``model`` is not a module.
    """
    check_module(model)
    layers: dict[tuple[Tensor, ...], tuple[str, QuantizedLayer]] = {}
    for name, layer in model.named_modules():
        if not isinstance(layer, QuantizedLayer) or layer.weight_quantizer.replaces_weight:
            continue
        if layer.is_trained and layer.weight_quantizer.bits <= max_bits:
            layers.setdefault(tuple(trained_weights(layer)), (name, layer))
    if not layers:
        raise ValueError(f"model ({type(model).__name__}) must have a trainable weight of at most {max_bits} bits")
    return torch.stack([_distance(name, layer) for name, layer in layers.values()]).sum()


_checked: WeakSet[Quantizer] = WeakSet()


def _distance(name: str, layer: QuantizedLayer) -> Tensor:
    """``Σ (w − w_q)² / n`` over the weights of a layer that its quantizer does not clip."""
    if layer.weight_quantizer not in _checked and (why := why_off_levels(layer)):
        remedy = way_out(layer, name, "with a scheme such as qconv.schemes.lsq it can")
        raise TypeError(f"{name}.weight with {layer.scheme} can't be drawn to its levels: {why}; {remedy}")
    _checked.add(layer.weight_quantizer)
    with layer.as_evaluated() as (quantizer, filters):
        level = layer.from_filters(quantizer.quantize(filters, *quantizer.tensors()))
        grad = quantizer.backward(torch.ones_like(filters), filters, *quantizer.tensors())[0]
        inside = True if grad is None else layer.from_filters(grad) != 0
    distance = (differentiable_weight(layer) - level) * inside
    distance = distance.to(torch.promote_types(distance.dtype, torch.float32))
    return distance.square().sum() / max(filters.shape[1:].numel(), 1)
