"""The cost of rounding to second order: traces of the loss's Hessian, and the predicted increase of the loss."""

import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from ..ground.progress import shown
from ..layers import QuantizedLayer
from ..layers.observed_run import trial
from ..layers.twins import quantized_layers
from .blocks import frozen_parameters
from .samples import Batches, Loss, Output, chosen_output, loss_of
from .sensitivity import float_but

_ONCE = (
    r"derivative for (\S+?)(?:_backward)? is not implemented",  # of torch
    r"double backwards on (\S+) not supported",  # of torchvision
    "marked with @once_differentiable",
)
"""What is said of operators that have no second derivative."""


class _WithSecondDerivatives(TorchFunctionMode):
    """Computes Hardsigmoid by functions that torch can differentiate twice."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        del types
        if func in (F.hardsigmoid, torch._C._nn.hardsigmoid):  # pyright: ignore
            return F.relu6(args[0] + 3) / 6
        return func(*args, **(kwargs or {}))


@contextmanager
def differentiated_twice(remedy: str) -> Iterator[None]:
    """Context manager: make gradients differentiable, for example attention without its fused kernels.

    Raises:
        ValueError: an operator has no second derivative; the message names it, and ends in ``remedy``.
    """
    try:
        with sdpa_kernel(SDPBackend.MATH), _WithSecondDerivatives():
            yield
    except RuntimeError as error:
        found = next(filter(None, (re.search(text, str(error)) for text in _ONCE)), None)
        if found is None:
            raise
        what = found[1] if found.groups() else "a function of its own"
        raise ValueError(f"model computes {what}, which can't be differentiated twice: {remedy}") from error


@differentiated_twice("use measure='measured', which needs no second derivative")
def traces(
    model: nn.Module,
    batches: Batches,
    probes: int,
    seed: int,
    *,
    of_inputs: bool = True,
    output: Output | None = None,
    loss: Loss | None = None,
) -> dict[str, tuple[float, list[float]]]:
    """Return the mean diagonals of the Hessians by each layer's weight, and by the input of each of its calls.

    The first is that of the mean loss, the second that of a sample's loss, and 0 without ``of_inputs``. The expectation
    of ``v · (H v)`` over vectors v of random signs is the trace of H. Each tensor has its own vectors: one vector for
    all of them would have the same expectation, but the coupling of layers as noise.
    """
    layers = quantized_layers(model)
    generator = torch.Generator().manual_seed(seed)
    of_weights = dict.fromkeys(layers, 0.0)
    by_inputs: dict[str, list[float]] = {name: [] for name in layers}
    samples = sum(len(images) for images, _ in batches)
    with frozen_parameters(model):
        for layer in layers.values():
            layer.weight.requires_grad_()
        for images, labels in batches:
            with float_but(layers.values()), _inputs(layers, grad=True) as inputs, torch.enable_grad():
                given = model(images)
                if loss is None:
                    value = _loss(chosen_output(model, given, output), labels)
                else:
                    value = loss_of(model, given, labels, loss)
            tensors = [(name, -1, layer.weight) for name, layer in layers.items()]
            for name, each in inputs.items():
                tensors += [(name, call, input) for call, input in enumerate(each) if of_inputs]
                by_inputs[name] += [0.0] * (len(each) - len(by_inputs[name]))
            wanted = [tensor for _, _, tensor in tensors]
            gradients = torch.autograd.grad(value, wanted, create_graph=True, allow_unused=True)
            pairs = list(zip(tensors, gradients, strict=True))
            for (name, call, tensor), gradient in shown(pairs, "Hessian", len(pairs)):
                if gradient is None or not gradient.requires_grad or tensor.numel() == 0:  # the loss is linear in it
                    continue
                trace = sum(probe(gradient, tensor, generator) for _ in range(probes)) / probes
                mean, share = trace / tensor.numel(), len(images) / samples
                if call < 0:
                    of_weights[name] += mean * share
                else:  # the loss of a batch is a mean: each sample has a share of one over its size
                    by_inputs[name][call] += mean * len(images) * share
    return {name: (max(of_weights[name], 0.0), [max(each, 0.0) for each in by_inputs[name]]) for name in layers}


def probe(gradient: Tensor, value: Tensor, generator: torch.Generator) -> float:
    """One sample of Hutchinson's estimator."""
    signs = (torch.randint(0, 2, value.shape, generator=generator, device="cpu") * 2 - 1).to(value.device, value.dtype)
    (product,) = torch.autograd.grad(gradient, value, signs, retain_graph=True, allow_unused=True)
    return 0.0 if product is None else float((signs * product).double().sum())


def _loss(logits: Tensor, labels: Tensor | None) -> Tensor:
    if logits.ndim < 2 or logits.shape[1] < 2:
        raise ValueError(
            f"the model's outputs (of shape {tuple(logits.shape)}) have no classes to compare, so the Hessian of "
            "the loss is 0: use assign_bits(..., measure='measured')"
        )
    target = logits.detach().softmax(1) if labels is None or labels.is_floating_point() else labels
    return F.cross_entropy(logits, target)


def expected_losses(
    model: nn.Module, batches: Batches, found: Mapping[str, tuple[float, list[float]]]
) -> dict[str, float]:
    """Return the expected rise of the mean loss by each layer's quantization, from the result of `traces`."""
    layers = quantized_layers(model)
    samples = sum(len(images) for images, _ in batches)
    costs = {
        name: 0.5 * found[name][0] * float((layer.quantized_weight() - layer.weight.detach()).double().square().sum())
        for name, layer in layers.items()
    }
    for images, _ in batches:
        with trial(model), float_but(layers.values()), _inputs(layers, grad=False) as inputs:
            model(images)
        for name, layer in layers.items():
            quantizer = layer.input_quantizer
            with torch.no_grad():
                noise = [quantizer.quantize(input, *quantizer.tensors()) - input for input in inputs[name]]
            errors = [float(each.double().square().sum()) for each in noise]
            costs[name] += sum(0.5 * h * error / samples for h, error in zip(found[name][1], errors, strict=True))
    return costs


@contextmanager
def _inputs(layers: Mapping[str, QuantizedLayer], *, grad: bool) -> Iterator[dict[str, list[Tensor]]]:
    """Collect the layers' inputs, as tensors of the graph if they need gradients."""
    found: dict[str, list[Tensor]] = {name: [] for name in layers}

    def collect(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        del module
        input = args[0] if args else kwargs["input"]
        if grad:  # a node of its own: others, such as a shortcut, may take the same tensor, or write to it
            input = input.clone() if input.requires_grad else input.detach().clone().requires_grad_()
        found[name].append(input)
        return ((input, *args[1:]), kwargs) if args else (args, {**kwargs, "input": input})

    with ExitStack() as stack:
        for name, layer in layers.items():
            stack.enter_context(layer.register_forward_pre_hook(partial(collect, name), with_kwargs=True))
        yield found
