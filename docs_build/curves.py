"""What a method does, by its own code: the forward of its quantizers over a range of values, and their gradient.

The weight is one filter of `POINTS` normally distributed values (their quantiles, so that nothing is random), the input
as many values of the same distribution; learned tensors start from them, as in training. A gradient is the derivative
that each value gets for itself, at an incoming gradient of 1.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

import qconv
from qconv.quantizers import Identity, Quantizer

POINTS = 301
Role = Literal["weight", "input"]


class Curve(NamedTuple):
    """The quantized values and the gradients at ``x``, at one moment of the training."""

    x: Tensor
    forward: Tensor
    gradient: Tensor


def values(points: int = POINTS, deviation: float = 1.0) -> Tensor:
    """Return the quantiles of a normal distribution, from the smallest up."""
    return torch.special.ndtri((torch.arange(points) + 0.5) / points) * deviation


def curve(scheme: qconv.Scheme, role: Role, progress: float = 0.0) -> Curve:
    """Return what the scheme's quantizer does in ``role``, at ``progress`` of a schedule."""
    quantizer = scheme.weight() if role == "weight" else scheme.input()
    quantizer.train()
    return of_weight(quantizer, progress) if role == "weight" else of_input(quantizer, progress)


def of_input(quantizer: Quantizer, progress: float) -> Curve:
    """Return the curve of an input: each value has its own gradient, so one backward is enough."""
    x = values(deviation=0.8).view(1, 1, -1)
    quantizer.build(1, 1)
    quantizer.initialize(x)
    quantizer.set_progress_(progress, None)
    x.requires_grad_()
    out = quantizer(x)
    out.sum().backward()
    assert x.grad is not None
    return Curve(x.detach().flatten(), out.detach().flatten(), x.grad.flatten())


def of_weight(quantizer: Quantizer, progress: float) -> Curve:
    """Return the curve of a weight, from as many copies of the filter as it has values.

    The gradients of weights meet in the statistics of their filter. In copy i only weight i has an incoming gradient,
    and the derivative shown is the one that comes back to it.
    """
    x = values(deviation=0.5).repeat(POINTS, 1)
    quantizer.initialize(x)
    quantizer.set_progress_(progress, x)
    learned = [tensor for tensor in quantizer.tensors() if tensor.shape == x.shape] if quantizer.replaces_weight else []
    at = learned[0] if learned else x.requires_grad_()  # DeepShift-PS learns the shift in place of the weight
    out = quantizer(x)
    (gradient,) = torch.autograd.grad(out, at, torch.eye(POINTS))
    return Curve(x.detach()[0], out.detach()[0], gradient.diagonal())


def roles(scheme: qconv.Scheme) -> list[Role]:
    """Return what the scheme quantizes."""
    made: dict[Role, Quantizer] = {"weight": scheme.weight(), "input": scheme.input()}
    return [role for role, quantizer in made.items() if not isinstance(quantizer, Identity)]
