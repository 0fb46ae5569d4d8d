"""IR-Net: signs of standardized weights with a power-of-two scale (Qin et al., arXiv:1909.10788)."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .base import Whole
from .bnn import sign
from .numbers import wide
from .surrogates import EDE, Surrogate
from .xnor import Binary, filter_scale


class Standardized(NamedTuple):
    """Filters brought to mean 0 and deviation 1, in at least float32, and with what.

    Attributes:
        values: ``(x − mean) / std``.
        mean: of each filter.
        std: of each filter.
        inverse: ``1 / std``; 0 where std is 0.
    """

    values: Tensor
    mean: Tensor
    std: Tensor
    inverse: Tensor


def standardize(x: Tensor, correction: int = 1, eps: float = 0.0) -> Standardized:
    """``(x − mean) / std`` over each filter of n elements, ``std = sqrt(Σ (x − mean)² / (n − correction) + eps)``.

    A filter is a constant if it deviates from its mean by no more than rounding does; then, and if it has one element,
    all its values are 0. A NaN or an inf makes its filter NaN.
    """
    x = wide(x)
    shape = (x.shape[0], *[1] * (x.ndim - 1))
    count = x[:1].numel()
    mean = x.sum_to_size(shape) / max(count, 1)
    centered = x - mean
    variance = centered.square().sum_to_size(shape) / max(count - correction, 1)
    constant = variance <= (16 * torch.finfo(x.dtype).eps * mean).square()  # also where squares underflow to 0
    centered = centered.masked_fill(constant, 0.0)
    std = (variance.masked_fill(constant, 0.0) + eps).sqrt()
    inverse = (1 / std).masked_fill(std == 0, 0.0)
    return Standardized(centered * inverse, mean, std, inverse)


def standardize_backward(grad: Tensor, standard: Standardized, correction: int = 1) -> Tensor:
    """The gradient of ``x`` from ``grad``, that of ``standardize(x, correction).values``, through mean and std.

    ``dx = (grad − mean(grad) − values · Σ grad · values / (n − correction)) / std``; 0 for a constant filter if eps is
    0, where there is no derivative.
    """
    values, shape = standard.values, standard.mean.shape
    count = values[:1].numel()
    mean = grad.sum_to_size(shape) / max(count, 1)
    slope = (grad * values).sum_to_size(shape) / max(count - correction, 1)
    return (grad - mean - values * slope) * standard.inverse


class IRNetWeight(Binary):
    r"""Binary weights of IR-Net: Libra parameter binarization.

    ``w_q = s_c · sign(w_hat)`` with ``w_hat = (w − mean_c) / std_c`` over filter c (std with n − 1) and ``s_c =
    2^round(log2 mean |w_hat|)``, a constant in the gradient; ``sign(±0) = +1``. For weights near a normal distribution
    s is 1.

    ``dw_hat = s_c · g · d(w_hat)`` with the surrogate's d, for IR-Net `EDE`; dw follows through mean and std
    (`standardize_backward`). Nothing is masked, and latent weights are not clipped.

    A constant filter, one of zeros among them, and one of one element have no deviation: they give zeros, and gradient
    0. A NaN or an inf makes its filter NaN.

    The paper's EDE starts at t = 0.1, as its code for VGG-small and W1A32; the code for ResNet-20 W1A1 (the published
    86.5 %) starts at 0.001: ``surrogate=partial(EDE, 0.001)``.

    Args:
        surrogate: makes what stands for the derivative of the sign of w_hat.
    """

    def __init__(self, surrogate: Callable[[], Surrogate] = EDE) -> None:
        super().__init__(surrogate)

    def whole(self, x: Tensor, *tensors: Tensor) -> Whole:
        values = standardize(x).values
        return Whole(sign(values), _power_of_two(values))

    def backward(self, grad: Tensor, x: Tensor, *tensors: Tensor) -> tuple[Tensor | None, ...]:
        standard = standardize(x)
        grad_sign = wide(grad) * _power_of_two(standard.values)
        grad_values = self.surrogate.backward(grad_sign, standard.values, *tensors)
        return standardize_backward(grad_values, standard).to(x.dtype), *(None for _ in tensors)


def _power_of_two(values: Tensor) -> Tensor:
    return torch.exp2(filter_scale(values).log2().round())  # 2^-inf = 0 for a filter of zeros
