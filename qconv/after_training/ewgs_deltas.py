"""EWGS's δ, the factor of its gradients, from the Hessian of the loss (Lee et al., arXiv:2104.00903)."""

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from .. import layers
from ..ground.checks import check_at_least_one, check_whole
from ..ground.processes import mean_over_processes, process_count
from ..ground.progress import shown
from ..layers import QuantizedLayer
from ..layers.arguments import check_input
from ..layers.computed import computed_by
from ..layers.naming import name_of
from ..layers.observed_run import check_not_inference, trial
from ..layers.placement import on_device_of
from ..lean import while_not_lean
from ..loop.norms import batch_statistics
from ..methods.ewgs import EWGS
from ..quantizers import Identity, Quantizer, Stages
from ..quantizers.numbers import wide
from .blocks import frozen_parameters
from .hessian import differentiated_twice, probe, quantized_layers
from .sensitivity import float_but

Loss = Callable[[Tensor, Tensor], Tensor]
Positions = dict[str, list[Tensor]]
"""The rounded positions by the name of the quantizer, one tensor for each call."""

TOLERANCE = 1e-3
"""Stop when one more probe changes the trace by less than this share."""
DEVIATIONS = 3
"""The gradient that a trace is compared with, in standard deviations."""


def set_ewgs_deltas(
    model: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    *,
    probes: int = 50,
    seed: int = 0,
    loss: Loss = F.cross_entropy,
) -> dict[str, float]:
    r"""Set δ of every EWGS quantizer from the trace of the loss's Hessian, as the paper does every 10 epochs.

    .. math::

        \delta = \frac{1}{B} \sum_b \frac{\mathrm{tr}(H_b) / N}{3 \, \sigma(g_b)},
        \quad \text{clipped to } [0, 2n]

    for the N rounded positions q of a weight, or of an input in batch b: H is the loss's Hessian with respect to q, g
    its gradient, and σ the standard deviation over the N elements. At δ = 2n, with n steps in the range, gradients
    begin to change their sign; the authors' code has no such bound.

    The derivative of other roundings is 1 in their range (straight through, δ = 0); the authors' code scales it by the
    present δ in the gradient, and again where it differentiates that. Hutchinson's estimator takes the trace from
    ``v · (H v)`` for vectors v of random signs, and stops when one more of them changes their mean by less than a
    thousandth.

    Batch norm normalizes as in training, and its running statistics stay; there is no dropout. Gradients are not
    quantized. If g is 0 everywhere, or has a single element, δ is 0. A quantizer that evaluation does not call keeps
    its δ. Under `torch.distributed` every process calls it with the same number of batches, and all get the mean.

    It takes up to ``probes`` products with the Hessian for each tensor and batch, each about a third as long as a step:
    for ResNet-20 and three batches as long as 2,000 steps at most. The graph of all gradients is in memory meanwhile,
    also if the model is lean. Smaller batches need less, but then the gradient of a weight varies more, by the noise of
    each sample, and its δ is smaller: on the digits, of a quarter of the samples, 0.6 of what it was.

    `qconv.training.EWGSDelta` calls it in the course of a training.

    Args:
        model: a converted network that takes one tensor; its other layers may have float inputs.
        batches: pairs of inputs and labels; those on the CPU are moved to the model's device.
        probes: at most this many vectors v for each tensor and batch.
        seed: of the vectors.
        loss: of outputs and labels.

    Returns:
        δ by the name of the quantizer.

    Raises:
        TypeError: something else than pairs of inputs and labels.
        ValueError: no batch; no EWGS quantizer; a layer that is not calibrated, that quantizes its input in another
            way, that computes its weight, or is deformable: there is no second derivative; ``probes`` below 1.
        RuntimeError: `torch.inference_mode`.
        FloatingPointError: a trace is NaN or inf, for example because the network has diverged.
    """
    check_whole("seed", seed)
    check_at_least_one(probes=probes)
    check_not_inference("set_ewgs_deltas needs gradients")
    generator = torch.Generator().manual_seed(seed)
    found = [deltas_of(model, on_device_of(model, _pair(batch)), probes, generator, loss) for batch in batches]
    if not found:
        raise ValueError("batches must hold at least one batch")
    return write_deltas(model, found)


def ewgs_quantizers(model: nn.Module) -> dict[str, EWGS]:
    """Return the EWGS quantizers by their names; with stages, the present one."""
    found = {}
    for name, layer in quantized_layers(model).items():
        for place, quantizer in zip(("input_quantizer", "weight_quantizer"), _both(layer), strict=True):
            present = _present(quantizer)
            if isinstance(present, EWGS):
                found[f"{name}.{place}" if name else place] = present
    return found


def obstacle(model: nn.Module, *, at_last: bool = False) -> str:
    """Return why δ can't be measured now, or in the last stage of all quantizers; empty if it can."""
    stages = [_present(each, at_last) for layer in quantized_layers(model).values() for each in _both(layer)]
    if not any(isinstance(each, EWGS) for each in stages):
        return "model has no EWGS quantizer: convert it with qconv.schemes.ewgs()"
    deformable = layers.QDeformConv2d if "torchvision.ops" in sys.modules else ()  # without it no model has one
    for name, layer in quantized_layers(model).items():
        input, where = _present(layer.input_quantizer, at_last), name_of(layer, name)
        if not isinstance(input, EWGS | Identity):
            return (
                f"{where} quantizes its input by {type(input).__name__}, which has no second derivative: the Hessian "
                "needs inputs of EWGS, or float ones (input_bits=None)"
            )
        if maker := computed_by(layer):
            return f"{where}: {maker}, because the Hessian needs the weight as a parameter"
        if layer.filters_are_computed or isinstance(layer, deformable):
            return f"{where} has no second derivative, which the Hessian needs: leave it float (skip=)"
    return ""


def waits_for_data(model: nn.Module) -> str:
    """Return the name of a layer that is not calibrated yet; empty if all are."""
    quantized = quantized_layers(model).items()
    return next((name_of(layer, name) for name, layer in quantized if not layer.input_quantizer.calibrated), "")


def write_deltas(model: nn.Module, found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Set each δ to its mean over batches, clamped to 0 to 2n."""
    quantizers, deltas = ewgs_quantizers(model), {}
    for name in dict.fromkeys(name for each in found for name in each):
        values = [each[name] for each in found if name in each]
        mean = sum(values) / len(values)
        if not math.isfinite(mean):
            raise FloatingPointError(
                f"{name}: the trace of the Hessian over the gradient is {mean}: the network has diverged, or its "
                "gradients overflow; a lower learning rate may help"
            )
        deltas[name] = min(max(mean, 0.0), 2.0 * quantizers[name].count)
    for name, delta in deltas.items():
        quantizers[name].delta.fill_(delta)
    return {name: quantizers[name].delta.item() for name in deltas}


def deltas_of(
    model: nn.Module, batch: tuple[Tensor, Tensor], probes: int, generator: torch.Generator, loss: Loss
) -> dict[str, float]:
    """Return one batch's value for each δ, perhaps negative: the mean over all processes, which must all call this."""
    if why := obstacle(model):
        raise ValueError(why)
    if name := waits_for_data(model):
        raise ValueError(f"{name} is not calibrated: call qconv.calibrate, or train a step")
    images, labels = batch
    positions: Positions = {name: [] for name in ewgs_quantizers(model)}
    sums, calls = dict.fromkeys(positions, 0.0), dict.fromkeys(positions, 0)
    with frozen_parameters(model), differentiated_twice("pass delta to EWGS as an argument"):
        with _measured(model, positions) as weights:
            value = loss(functional_call(model, weights, (images,), tie_weights=False), labels)
        tensors = [(name, q) for name, found in positions.items() for q in found]
        gradients = torch.autograd.grad(value, [q for _, q in tensors], create_graph=True, allow_unused=True)
        pairs = [(*tensor, g) for tensor, g in zip(tensors, gradients, strict=True) if g is not None]
        for name, q, g in shown(pairs, "Hessian", len(pairs)):  # without the weights of layers that are not called
            sums[name] += _delta(q, g, probes, generator)
            calls[name] += 1
    totals = torch.tensor([[sums[name], calls[name]] for name in positions], device=images.device)
    mean_over_processes([totals], True, process_count())
    return {name: total / count for name, (total, count) in zip(positions, totals.tolist(), strict=True) if count}


def _pair(batch: Any) -> tuple[Tensor, Tensor]:
    is_pair = isinstance(batch, tuple | list) and len(batch) == 2 and all(isinstance(each, Tensor) for each in batch)
    if not is_pair:
        raise TypeError(
            f"batches ({type(batch).__name__} in it) must be pairs of inputs and labels, such as [(images, labels)] "
            "or a DataLoader"
        )
    return batch[0], batch[1]


def _both(layer: QuantizedLayer) -> tuple[Quantizer, Quantizer]:
    return layer.input_quantizer, layer.weight_quantizer


def _present(quantizer: Quantizer, at_last: bool = False) -> Quantizer:
    """Return the quantizer itself, or the one of its stage: the present stage, or the last that begins."""
    while isinstance(quantizer, Stages):
        last: Any = quantizer.quantizers[quantizer.last]
        quantizer = last if at_last else quantizer.current
    return quantizer


@contextmanager
def _measured(model: nn.Module, positions: Positions) -> Iterator[dict[str, Tensor]]:
    """Let layers compute as their float twins do, on quantized weights, which are returned, and quantized inputs.

    Both depend on their positions, which are collected.
    """

    def quantize(quantizer: EWGS, found: list[Tensor], layer: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        check_input(layer, args[0])
        tensors = _constants(quantizer)
        # Rounded positions whose gradient passes in the range, and can be differentiated again.
        inside = quantizer.position_of(wide(args[0]), *tensors).clamp(0, 1)
        q = inside - quantizer.rounded(inside.detach())[1]
        if not q.requires_grad:  # of images
            q.requires_grad_()
        found.append(q)
        return (quantizer.values_of(q, *tensors).to(args[0].dtype), *args[1:])

    weights = {}
    with ExitStack() as stack:
        stack.enter_context(while_not_lean(model, swaps=False))
        stack.enter_context(batch_statistics(model))
        stack.enter_context(trial(model))
        stack.enter_context(torch.enable_grad())
        quantized = quantized_layers(model)
        stack.enter_context(float_but(quantized.values()))
        for name, layer in quantized.items():
            prefix = f"{name}." if name else ""
            weight, input = _present(layer.weight_quantizer), _present(layer.input_quantizer)
            if isinstance(weight, EWGS):
                q, weights[f"{prefix}weight"] = _weight(layer, weight)
                positions[f"{prefix}weight_quantizer"].append(q)
            else:
                weights[f"{prefix}weight"] = layer.quantized_weight()
            if isinstance(input, EWGS):
                found = positions[f"{prefix}input_quantizer"]
                stack.enter_context(layer.register_forward_pre_hook(partial(quantize, input, found)))
        yield weights


def _constants(quantizer: EWGS) -> list[Tensor]:
    return [wide(tensor.detach()) for tensor in quantizer.tensors()]


def _weight(layer: QuantizedLayer, quantizer: EWGS) -> tuple[Tensor, Tensor]:
    """Return the positions of a weight, and the quantized weight that depends on them."""
    tensors = _constants(quantizer)
    q, _ = quantizer.rounded(quantizer.position_of(wide(layer.filters().detach()), *tensors))
    values = quantizer.values_of(q.requires_grad_(), *tensors)
    return q, layer.from_filters(values.to(layer.weight.dtype))


def _delta(q: Tensor, gradient: Tensor, probes: int, generator: torch.Generator) -> float:
    """The mean of the Hessian's diagonal with respect to ``q`` over 3 standard deviations of the gradient."""
    if q.numel() < 2:
        return 0.0
    deviation = gradient.detach().double().std().item()
    if deviation == 0 or not gradient.requires_grad:  # no effect, or a linear one
        return 0.0
    total = trace = 0.0
    for count in range(1, probes + 1):
        before = trace
        total += probe(gradient, q, generator)
        trace = total / count
        if abs(trace - before) <= TOLERANCE * abs(before):
            break
    return trace / q.numel() / (DEVIATIONS * deviation)
