"""SiMaN: the larger half of each filter's magnitudes is +1, the other −1 (Lin et al., arXiv:2102.07981)."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from ..ground.checks import check_numbers
from ..ground.processes import placed_as, whole
from ..quantizers.base import Levels, Whole
from ..quantizers.filters import filter_scale, per_filter, standardize, standardize_backward
from ..quantizers.form import with_fresh_strides
from ..quantizers.numbers import set_parameter, wide
from ..quantizers.part import Rule
from ..quantizers.percentiles import quantile
from ..quantizers.signs import Binary, sign
from ..quantizers.surrogates import ApproxSign, Make, Straight, Surrogate, chosen
from ..scheme import Scheme, named

EPS = 1e-5
"""The constant added to variances."""


class SiManWeight(Binary):
    r"""Binary weights of SiMaN, which follow the magnitudes of the weights, not their signs.

    ``w_q = alpha_c · b`` with ``b = +1`` for the ``floor(n / 2)`` largest of the n magnitudes ``|w_hat|`` of filter c,
    else −1, where ``w_hat = (w − mean_c) / sqrt(var_c + 1e-5)`` (var with n − 1). Of equal magnitudes the first ones in
    the filter count as larger. alpha is learned, from the filter's ``mean |w|``, and amounts to a factor of the output.

    These b minimize the angle between ``|w_hat|`` and b if half of them are to be +1, which carries the most
    information. ``dalpha_c = Σ g · b``; ``d|w_hat| = alpha_c · g · d(|w_hat| − m_c)`` with m_c, a constant, the
    smallest magnitude that is +1, and the surrogate's d, for SiMaN 1; so ``dw_hat = d|w_hat| · sign(w_hat)`` with
    ``sign(0) = 0``; dw follows through mean and variance.

    After each optimizer step the latent weights lose the mean of their filter, and their magnitudes are clamped to the
    percentiles p and 100 − p of the layer, by linear interpolation; p falls linearly from ``percent`` at the start of
    the training to 0 at its end. The authors' code does both before each forward, so before the first step, too; and
    evaluates with the b of the last training step, while here b follows the last optimizer step. It needs no weight
    decay: the recipe has 0 for these weights.

    A filter of one element gives −alpha_c and gradient 0. A NaN or an inf gives its filter arbitrary signs and NaN as
    gradient; after a step it makes NaN of its filter, and of all weights while p is not 0.

    Args:
        percent: p at the start of the training.
        surrogate: makes the surrogate derivative.

    Raises:
        ValueError: ``percent`` is not at least 0 and below 50.
    """

    roles = ("weight",)
    alpha: nn.Parameter
    percent: Tensor

    def __init__(self, percent: float = 15.0, surrogate: Callable[[], Surrogate] = Straight) -> None:
        super().__init__(surrogate)
        check_numbers(percent=percent)
        if not 0 <= percent < 50:
            raise ValueError(f"percent (={percent}) must be at least 0 and below 50")
        self.first_percent = percent
        self.register_parameter("alpha", None)
        self.register_buffer("percent", torch.tensor(float(percent)))

    def initialize(self, x: Tensor) -> None:
        self.alpha = set_parameter(self.alpha, filter_scale(x).flatten())

    def tensors(self) -> tuple[Tensor, ...]:
        return self.alpha, *super().tensors()

    def whole(self, x: Tensor, *tensors: Tensor) -> Whole:
        b, _ = _halves(standardize(x, eps=EPS).values.abs())
        return Whole(b.to(x.dtype), per_filter(tensors[0], x))

    def levels(self, *tensors: Tensor) -> Levels:
        return Levels(-1, 1, tensors[0])

    def backward(self, grad: Tensor, x: Tensor, *tensors: Tensor) -> tuple[Tensor | None, ...]:
        alpha, *schedule = tensors
        standard = standardize(x, eps=EPS)
        magnitudes = standard.values.abs()
        b, smallest = _halves(magnitudes)
        scale, grad = per_filter(alpha, x), wide(grad)
        grad_alpha = (grad * b).sum_to_size(scale.shape).view_as(alpha).to(alpha.dtype)
        grad_magnitudes = self.surrogate.backward(grad * scale, magnitudes - smallest, *schedule)
        grad_x = standardize_backward(grad_magnitudes * standard.values.sgn(), standard).to(x.dtype)
        return grad_x, grad_alpha, *(None for _ in schedule)

    def set_progress_(self, progress: float, x: Tensor | None) -> None:
        super().set_progress_(progress, x)
        self.percent.fill_(self.first_percent * (1 - progress))

    def after_step_(self, x: Tensor | None) -> None:
        if x is None or x.numel() == 0:
            return
        shard, x = x, whole(x)
        shifted = wide(x) - per_filter(wide(x).flatten(1).mean(1), x)
        if (share := float(self.percent) / 100) > 0:
            magnitudes = shifted.abs().flatten()
            low, high = quantile(magnitudes, share), quantile(magnitudes, 1 - share)
            shifted = shifted.sgn() * shifted.abs().clamp(low, high)
        shard.copy_(placed_as(shard, shifted.to(x.dtype)))

    def rules(self) -> dict[str, Rule]:
        return {"percent": (lambda percent: (percent >= 0) & (percent <= 50), "must be from 0 to 50")}


def _halves(magnitudes: Tensor) -> tuple[Tensor, Tensor]:
    """+1 for the larger half of each filter, −1 for the others, and the smallest of the larger half."""
    shape = (magnitudes.shape[0], *[1] * (magnitudes.ndim - 1))
    rows = magnitudes.reshape(shape[0], -1) if magnitudes.numel() else magnitudes.new_empty(shape[0], 0)
    larger = rows.shape[1] // 2
    b = torch.full_like(magnitudes, -1.0)
    if not larger or not len(rows):
        return b, magnitudes.new_zeros(shape)
    smallest = rows.topk(larger, dim=1, sorted=False).values.amin(1, keepdim=True)
    above, equal = rows > smallest, rows == smallest
    missing = larger - above.sum(1, keepdim=True)
    chosen = above | (equal & (equal.cumsum(1) <= missing))
    return b.masked_fill_(chosen.view_as(magnitudes), 1.0), smallest.view(shape)


class SiManInput(Binary):
    r"""Signs of SiMaN's input, around the mean of each sample.

    ``x_q = sign(x_hat)``, ``sign(±0) = +1``, with ``x_hat = (x − mean_i) / sqrt(var_i + 1e-5)`` over each sample i,
    dimension 0 of the input (var with n − 1), in training and in evaluation. ``dx_hat = g · d(x_hat)`` with the
    surrogate's ``d = max(2 − 2|x_hat|, 0)``; dx follows through mean and variance.

    A sample that is constant or has one element gives +1. With one element the gradient is 0; that of a constant sample
    is large, 2 / sqrt(1e-5) times the deviations of g from its mean. A NaN or an inf gives its sample arbitrary signs,
    and NaN as gradient. A frozen layer before it hands on floats, not bits: the mean is known when it is done.

    Args:
        surrogate: makes the surrogate derivative of the sign.
    """

    signs = True
    is_elementwise = False
    roles = ("input",)

    def __init__(self, surrogate: Callable[[], Surrogate] = ApproxSign) -> None:
        super().__init__(surrogate)

    def whole(self, x: Tensor, *tensors: Tensor) -> Whole:
        return Whole(with_fresh_strides(sign(_centred(_samples(x))).view_as(x).to(x.dtype)))

    def backward(self, grad: Tensor, x: Tensor, *tensors: Tensor) -> tuple[Tensor | None, ...]:
        standard = standardize(_samples(x), eps=EPS)
        grad_values = self.surrogate.backward(wide(grad).view_as(standard.values), standard.values, *tensors)
        return standardize_backward(grad_values, standard).view_as(x).to(x.dtype), *(None for _ in tensors)


def _samples(x: Tensor) -> Tensor:
    """Return the tensor with samples in dimension 0; a one-dimensional tensor is one sample."""
    return x if x.ndim > 1 else x.unsqueeze(0)


def _centred(x: Tensor) -> Tensor:
    """Return the values minus their sample's mean; 0 if the difference is only a rounding error.

    Only their signs are asked for, and large squares would overflow in the deviation.
    """
    x = wide(x)
    shape = (x.shape[0], *[1] * (x.ndim - 1))
    mean = x.sum_to_size(shape) / max(x[:1].numel(), 1)
    centred = x - mean
    largest = centred.abs().flatten(1).amax(1) if centred.numel() else centred.new_zeros(len(x))
    is_constant = largest <= 16 * torch.finfo(x.dtype).eps * mean.flatten().abs()
    return centred.masked_fill_(is_constant.view(shape), 0.0)


@named
def siman(
    percent: float = 15.0,
    padding_value: int = 0,
    *,
    surrogate: Make | None = None,
    weight_surrogate: Make | None = None,
) -> Scheme:
    """SiMaN, W1A1: weights follow the order of magnitudes, inputs the mean of each sample (arXiv:2102.07981).

    ``percent`` is as in `qconv.methods.siman.SiManWeight`.

    Raises:
        ValueError: ``percent`` is not at least 0 and below 50.
        TypeError: ``surrogate`` or ``weight_surrogate`` makes no surrogate.
    """
    return Scheme(
        input=partial(SiManInput, chosen(surrogate, ApproxSign)),
        weight=partial(SiManWeight, percent, chosen(weight_surrogate, Straight)),
        padding_value=padding_value,
    )
