"""Statistics of each filter for weight quantizers: mean magnitude, standardized weights."""

from typing import NamedTuple

import torch
from torch import Tensor

from .numbers import wide


def filter_scale(weight: Tensor) -> Tensor:
    """``alpha_c = mean |weight_c|`` over each filter, shape ``(C_out, 1, ...)``; 0 for filters without elements."""
    if weight[:1].numel() == 0:
        return weight.new_zeros(weight.shape[0], *[1] * (weight.ndim - 1))
    return weight.abs().mean(dim=tuple(range(1, weight.ndim)), keepdim=True)


def per_filter(scale: Tensor, weight: Tensor) -> Tensor:
    """``scale``, which has one element per filter, in a shape that broadcasts against ``weight``."""
    return scale.view(weight.shape[0], *[1] * (weight.ndim - 1))


class Standardized(NamedTuple):
    """Filters brought to mean 0 and deviation 1, in at least float32, and the statistics used.

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

    A filter counts as constant if it deviates from its mean by no more than rounding errors. Then, or with a single
    element, all its values are 0. A NaN or an inf makes its filter NaN.
    """
    x = wide(x)
    shape = (x.shape[0], *[1] * (x.ndim - 1))
    count = x[:1].numel()
    mean = x.sum_to_size(shape) / max(count, 1)
    centered = x - mean
    variance = centered.square().sum_to_size(shape) / max(count - correction, 1)
    constant = variance <= (16 * torch.finfo(x.dtype).eps * mean).square()  # also where squares underflow to 0
    centered = torch.where(constant, 0.0, centered)  # which keeps the memory format, as masked_fill does not
    std = (variance.masked_fill(constant, 0.0) + eps).sqrt()
    inverse = (1 / std).masked_fill(std == 0, 0.0)
    return Standardized(centered * inverse, mean, std, inverse)


def standardize_backward(grad: Tensor, standard: Standardized, correction: int = 1) -> Tensor:
    """Return the gradient of ``x``, through mean and std, from ``grad``, for ``standardize(x, correction).values``.

    ``dx = (grad − mean(grad) − values · Σ grad · values / (n − correction)) / std``; 0 for a constant filter if eps is
    0, since there is no derivative.
    """
    values, shape = standard.values, standard.mean.shape
    count = values[:1].numel()
    mean = grad.sum_to_size(shape) / max(count, 1)
    slope = (grad * values).sum_to_size(shape) / max(count - correction, 1)
    return (grad - mean - values * slope) * standard.inverse
