"""EWGS's δ, by which gradients grow or shrink, from the Hessian of the loss (Lee et al., arXiv:2104.00903)."""

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

from .checks import check_at_least_one, check_whole
from .hessian import probe, quantized_layers
from .layers import QuantizedLayer
from .layers.naming import name_of
from .layers.trial import trial
from .lean import while_not_lean
from .lifecycle.norms import batch_statistics
from .methods.ewgs import EWGS
from .processes import mean_over_processes, process_count
from .progress import shown
from .quantizers import Identity, Quantizer, Stages

Loss = Callable[[Tensor, Tensor], Tensor]

TOLERANCE = 1e-3
"""The relative change of a trace by one more probe that is small enough to stop."""
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

        \delta = \max\left(0, \; \frac{1}{B} \sum_b \frac{\mathrm{tr}(H_b) / N}{3 \, \sigma(g_b)}\right)

    for the N rounded positions q of a weight, or of an input in batch b: H is the loss's Hessian by q, g its gradient,
    and σ the standard deviation over the N elements. The derivative of other roundings is 1 in their range (straight
    through, δ = 0); the authors' code scales it by the present δ in the gradient, and again where it differentiates
    that. Hutchinson's estimator takes the trace from ``v · (H v)`` for vectors v of random signs, and stops when one
    more of them changes their mean by less than a thousandth, as theirs does.

    Batch norm normalizes as in training, and its running statistics stay; there is no dropout. Gradients are not
    quantized. Where g is 0 everywhere, or of a single element, δ is 0. Under `torch.distributed` every process calls it
    with as many batches, and all get the mean.

    `qconv.training.EWGSDelta` calls it in the course of a training.

    Args:
        model: a converted network that takes one tensor; others of its layers may have float inputs.
        batches: pairs of inputs and labels.
        probes: the most vectors v for each tensor and batch; each takes about as long as two steps.
        seed: of the vectors.
        loss: of outputs and labels.

    Returns:
        δ by the name of the quantizer.

    Raises:
        ValueError: no batch; no EWGS quantizer; a layer that quantizes its input in another way, whose rounding has no
            second derivative; ``probes`` below 1.
        FloatingPointError: a trace is NaN or inf, such as that of a network that has diverged.
    """
    check_whole("probes", probes)
    check_whole("seed", seed)
    check_at_least_one(probes=probes)
    generator = torch.Generator().manual_seed(seed)
    check(model)
    found = [deltas_of(model, batch, probes, generator, loss) for batch in batches]
    if not found:
        raise ValueError("batches must hold at least one batch")
    return write_deltas(model, found)


def ewgs_quantizers(model: nn.Module) -> dict[str, EWGS]:
    """The EWGS quantizers by their names; of stages, that of the present one."""
    found = {}
    for name, layer in quantized_layers(model).items():
        for place, quantizer in layer.quantizers().items():
            present = _present(quantizer)
            if isinstance(present, EWGS):
                found[f"{name}.{place}" if name else place] = present
    return found


def check(model: nn.Module) -> None:
    """Raise a ValueError unless δ can be measured: what stops it is named."""
    if not ewgs_quantizers(model):
        raise ValueError("model has no EWGS quantizer: convert it with qconv.schemes.ewgs()")
    for name, layer in quantized_layers(model).items():
        where, input = name_of(layer, name), _present(layer.input_quantizer)
        if not isinstance(input, EWGS | Identity):
            raise ValueError(
                f"{where} quantizes its input by {type(input).__name__}, which has no second derivative: the Hessian "
                "needs inputs of EWGS, or float ones (input_bits=None)"
            )
        if layer.filters_are_computed or "weight" not in layer._parameters:
            raise ValueError(f"{where} computes the weight that it quantizes: the Hessian needs it as a parameter")


def write_deltas(model: nn.Module, found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Set each δ to the mean of those that batches have given, but at least 0."""
    means = {name: sum(each[name] for each in found) / len(found) for name in found[0]}
    for name, mean in means.items():
        if not math.isfinite(mean):
            raise FloatingPointError(f"{name}: the trace of the Hessian over the gradient is {mean}")
    quantizers = ewgs_quantizers(model)
    for name, mean in means.items():
        quantizers[name].delta.fill_(max(mean, 0.0))
    return {name: quantizers[name].delta.item() for name in means}


def deltas_of(
    model: nn.Module, batch: tuple[Tensor, Tensor], probes: int, generator: torch.Generator, loss: Loss
) -> dict[str, float]:
    """Return what one batch gives for each δ, which may be negative; the mean over all processes, which all call it."""
    layers, quantizers, (images, labels) = quantized_layers(model), ewgs_quantizers(model), batch
    for name, layer in layers.items():
        if not layer.input_quantizer.calibrated:
            raise ValueError(f"{name_of(layer, name)} is not calibrated: call qconv.calibrate, or train a step")
    was = {parameter: parameter.requires_grad for parameter in model.parameters()}
    weights, positions = {}, {}
    try:
        for parameter in was:
            parameter.requires_grad_(False)
        for name, layer in layers.items():
            weights[f"{name}.weight" if name else "weight"] = _weight(name, layer, positions)
        with _measured(model, layers, positions):
            value = loss(functional_call(model, weights, (images,), tie_weights=False), labels)
        tensors = [(name, q) for name, calls in positions.items() for q in calls]
        gradients = torch.autograd.grad(value, [q for _, q in tensors], create_graph=True, allow_unused=True)
        sums = dict.fromkeys(quantizers, 0.0)
        pairs = [(name, q, g) for (name, q), g in zip(tensors, gradients, strict=True)]
        for name, q, g in shown(pairs, "Hessian", len(pairs)):
            sums[name] += _delta(q, g, probes, generator) / len(positions[name])
    finally:
        for parameter, required in was.items():
            parameter.requires_grad_(required)
    means = torch.tensor(list(sums.values()), device=images.device)
    mean_over_processes([means], True, process_count())
    return dict(zip(sums, means.tolist(), strict=True))


def _present(quantizer: Quantizer) -> Quantizer:
    return quantizer.current if isinstance(quantizer, Stages) else quantizer


def _weight(name: str, layer: QuantizedLayer, positions: dict[str, list[Tensor]]) -> Tensor:
    """Return the quantized weight, which depends on its positions if they are those of EWGS."""
    quantizer = _present(layer.weight_quantizer)
    if not isinstance(quantizer, EWGS):
        return layer.quantized_weight()
    tensors = _constants(quantizer)
    q, _ = quantizer.rounded(quantizer.position_of(layer.filters().detach(), *tensors))
    positions[f"{name}.weight_quantizer" if name else "weight_quantizer"] = [q.requires_grad_()]
    return layer.from_filters(quantizer.values_of(q, *tensors))


@contextmanager
def _measured(
    model: nn.Module, layers: Mapping[str, QuantizedLayer], positions: dict[str, list[Tensor]]
) -> Iterator[None]:
    """Let layers compute as their float twins do, on inputs that depend on their positions, which are collected."""

    def hook(name: str, quantizer: EWGS) -> Any:
        place = f"{name}.input_quantizer" if name else "input_quantizer"
        positions[place] = []

        def quantize(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            del module
            tensors = _constants(quantizer)
            q = _straight_through(quantizer, args[0], *tensors)
            if not q.requires_grad:  # of pictures
                q.requires_grad_()
            positions[place].append(q)
            return (quantizer.values_of(q, *tensors), *args[1:])

        return quantize

    with ExitStack() as stack:
        if "torch._dynamo" in sys.modules:  # compiled code would ignore the hooks
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(while_not_lean(model))
        stack.enter_context(batch_statistics(model))
        stack.enter_context(trial(model))
        for name, layer in layers.items():
            quantizer = _present(layer.input_quantizer)
            if isinstance(quantizer, EWGS):
                stack.callback(layer.register_forward_pre_hook(hook(name, quantizer)).remove)
            layer.__dict__["forward"] = partial(layer.float_type.forward, layer)
            stack.callback(layer.__dict__.pop, "forward", None)
        stack.enter_context(torch.enable_grad())
        yield


def _constants(quantizer: EWGS) -> list[Tensor]:
    return [tensor.detach() for tensor in quantizer.tensors()]


def _straight_through(quantizer: EWGS, x: Tensor, *tensors: Tensor) -> Tensor:
    """Return rounded positions whose gradient passes in the range, and can be differentiated again."""
    inside = quantizer.position_of(x, *tensors).clamp(0, 1)
    return inside - quantizer.rounded(inside.detach())[1]


def _delta(q: Tensor, gradient: Tensor | None, probes: int, generator: torch.Generator) -> float:
    """The mean of the Hessian's diagonal by ``q`` over 3 standard deviations of the gradient."""
    if gradient is None or q.numel() < 2:
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
