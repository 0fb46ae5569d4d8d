"""ReCU: weights clamped at a quantile, which revives those that never change sign (Xu et al., arXiv:2103.12369)."""

import math
from collections.abc import Callable
from functools import partial
from typing import Literal, Self

import torch
from torch import Tensor, nn

from ..ground.checks import check_choice, check_numbers
from ..quantizers.base import Levels, Whole
from ..quantizers.filters import filter_scale, per_filter, standardize, standardize_backward
from ..quantizers.numbers import set_parameter, wide
from ..quantizers.part import Rule
from ..quantizers.signs import Binary, sign
from ..quantizers.stochastic import uniform
from ..quantizers.surrogates import ApproxSign, Make, Straight, Surrogate, chosen
from ..scheme import Scheme, named

EPS = 1e-5
"""The constant added to variances."""
FACTOR = 2 * math.sqrt(2)
"""The constant of the authors' code in the standardized weights."""

ScaleInit = Literal["uniform", "mean"]


class ReCUWeight(Binary):
    r"""Binary weights of ReCU, the rectified clamp unit.

    ``w1 = 2√2 · (w − mean_c) / sqrt(var_c + 1e-5)`` over filter c (var with n − 1); ``Q = −mean |w1| · ln(2 − 2 tau)``,
    with the mean over the whole layer, a constant in the gradient; ``w2 = clamp(w1, −Q, Q)``; ``w_q = alpha_c ·
    sign(w2)``, ``sign(±0) = +1``. alpha is learned, and amounts to a factor of the output.

    ``dalpha_c = Σ g · sign(w2)`` over the filter; ``dw1 = alpha_c · g · d(w1) · 1[|w1| ≤ Q]``, where ties at ±Q pass
    and the surrogate is that of the sign, for ReCU ``d = 1``; dw follows through mean and variance. Latent weights are
    not clipped.

    tau is a schedule: ``tau = A · e^progress + B``, ``A = (tau_max − tau_min) / (e − 1)``, ``B = tau_min − A``, from
    tau_min = 0.85 at the start to tau_max = 0.99 at the end. The paper divides by the scale of a Laplace distribution
    instead of the constant 2√2 of the code, from which the published 87.5 % (ResNet-20, W1A1) come. There alpha starts
    at random numbers from [0, 1) (``scale_init="uniform"``; here keyed by the weight), and has weight decay;
    ``"mean"`` starts at the filter's ``mean |w|``.

    A constant filter (even of zeros) and a filter of one element have ``w1 = 0`` and so give +alpha_c; dw is finite,
    and 0 with one element. A NaN or an inf gives its filter arbitrary signs and NaN as gradient, and makes Q NaN, so
    that all other filters get 0.

    Args:
        tau_min: tau at the start of training.
        tau_max: tau at its end.
        scale_init: ``"uniform"`` or ``"mean"``.
        surrogate: makes the surrogate derivative of the sign.

    Raises:
        ValueError: not ``0.5 < tau_min <= tau_max < 1`` (Q would be negative or infinite), or ``scale_init`` is none
            of the two.
    """

    roles = ("weight",)
    scale_init: ScaleInit
    alpha: nn.Parameter
    tau: Tensor

    def __init__(
        self,
        tau_min: float = 0.85,
        tau_max: float = 0.99,
        scale_init: ScaleInit = "uniform",
        surrogate: Callable[[], Surrogate] = Straight,
    ) -> None:
        super().__init__(surrogate)
        check_numbers(tau_min=tau_min, tau_max=tau_max)
        if not 0.5 < tau_min <= tau_max < 1:
            raise ValueError(
                f"tau_min (={tau_min}) must be above 0.5 and at most tau_max (={tau_max}), and that below 1"
            )
        check_choice("scale_init", scale_init, "uniform", "mean")
        self.tau_min, self.tau_max = tau_min, tau_max
        self.scale_init = scale_init
        self.register_parameter("alpha", None)
        self.register_buffer("tau", torch.tensor(tau_min))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Keep tau in float32 also in a 16-bit model, which would round it to 1, where Q is infinite."""
        tau = self.tau
        super()._apply(fn, recurse)
        if self.tau.is_floating_point():
            source = self.tau if tau.is_meta or self.tau.is_meta else tau.to(self.tau.device)
            self.tau = source.to(torch.promote_types(self.tau.dtype, torch.float32))
        return self

    def initialize(self, x: Tensor) -> None:
        self.alpha = set_parameter(self.alpha, first_scales(x, self.scale_init))

    def tensors(self) -> tuple[Tensor, ...]:
        return self.alpha, self.tau, *super().tensors()

    def whole(self, x: Tensor, *tensors: Tensor) -> Whole:
        return Whole(sign(standardize(x, eps=EPS).values), per_filter(tensors[0], x))  # no clamp changes a sign

    def levels(self, *tensors: Tensor) -> Levels:
        return Levels(-1, 1, tensors[0])

    def backward(self, grad: Tensor, x: Tensor, *tensors: Tensor) -> tuple[Tensor | None, ...]:
        alpha, tau, *schedule = tensors
        standard = standardize(x, eps=EPS)
        w1 = standard.values * FACTOR
        bound = w1.abs().sum() / max(w1.numel(), 1) * -torch.log(2 - 2 * wide(tau))
        scale = per_filter(alpha, x)
        grad_sign = wide(grad)
        grad_alpha = (grad_sign * sign(w1)).sum_to_size(scale.shape).view_as(alpha).to(alpha.dtype)
        grad_w1 = self.surrogate.backward(grad_sign * scale, w1, *schedule) * (w1.abs() <= bound)
        grad_x = standardize_backward(grad_w1 * FACTOR, standard).to(x.dtype)
        return grad_x, grad_alpha, None, *(None for _ in schedule)

    def set_progress_(self, progress: float, x: Tensor | None) -> None:
        super().set_progress_(progress, x)
        factor = (self.tau_max - self.tau_min) / (math.e - 1)
        self.tau.fill_(factor * math.exp(progress) + self.tau_min - factor)

    def rules(self) -> dict[str, Rule]:
        return {"tau": (lambda tau: (tau >= 0.5) & (tau < 1), "must be from 0.5 to below 1")}


class ReCUInput(Binary):
    r"""Signs of the input, as `Sign`, with the gradient in training taken at the normalized input.

    ``x_q = sign(x)``, ``sign(±0) = +1``. In training ``x̃ = x / sqrt(var + 1e-5)`` with the variance (n − 1) of each
    sample, dimension 0 of the input; it isn't centred, so its sign is that of x. ``dx̃ = g · d(x̃)`` with the surrogate's
    ``d = max(2 − 2|x̃|, 0)``, and ``dx = r · (dx̃ − r² · (x − mean)/(n − 1) · Σ_j dx̃_j x_j)`` with
    ``r = 1 / sqrt(var + 1e-5)``, through the variance. In evaluation ``dx = g · d(x)``.

    ±inf gives ±1, NaN either of them; both make the gradient of their sample NaN. In a sample that is constant or has
    one element the variance is 0.

    Args:
        surrogate: makes the surrogate derivative of the sign.
    """

    signs = True
    mark: Tensor

    def __init__(self, surrogate: Callable[[], Surrogate] = ApproxSign) -> None:
        super().__init__(surrogate)
        self.register_buffer("mark", torch.ones(()), persistent=False)

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the surrogate's tensors, and in training a mark; without it, the gradient is as in evaluation."""
        return *super().tensors(), *([self.mark] if self.training else [])

    def whole(self, x: Tensor, *tensors: Tensor) -> Whole:
        return Whole(sign(x))

    def levels(self, *tensors: Tensor) -> Levels:
        return Levels(-1, 1, torch.ones(()), "sign")

    def backward(self, grad: Tensor, x: Tensor, *tensors: Tensor) -> tuple[Tensor | None, ...]:
        none = (None,) * len(tensors)
        count = len(self.surrogate.tensors())
        schedule = tensors[:count]
        if len(tensors) == count:  # no mark
            return self.surrogate.backward(grad, x, *schedule), *none
        wide_x = wide(x)
        shape = (x.shape[0] if x.ndim > 1 else 1, *[1] * (x.ndim - 1))
        count = x.numel() // max(shape[0], 1)
        centered = wide_x - wide_x.sum_to_size(shape) / max(count, 1)
        variance = centered.square().sum_to_size(shape) / max(count - 1, 1)
        inverse = 1 / (variance + EPS).sqrt()
        grad_normal = self.surrogate.backward(wide(grad), wide_x * inverse, *schedule)
        slope = (grad_normal * wide_x).sum_to_size(shape) * inverse.square() / max(count - 1, 1)
        return ((grad_normal - centered * slope) * inverse).to(x.dtype), *none


def first_scales(x: Tensor, scale_init: ScaleInit) -> Tensor:
    """Return a scale for each filter of the weight: its mean magnitude, or a random number from [0, 1).

    It is keyed by the weight, which all processes share, not by torch's generator, which they do not: a stage that
    begins in the middle of a distributed run must begin the same everywhere.
    """
    if scale_init == "mean":
        return filter_scale(x).flatten()
    key = x.detach().double().nan_to_num(0, 0, 0).clamp(-1e6, 1e6).abs().sum().mul(2**20).long()
    drawn = uniform(torch.Size((x.shape[0],)), key, torch.zeros_like(key), x.device)
    return drawn.to(x.dtype)


@named
def recu(
    tau_min: float = 0.85,
    tau_max: float = 0.99,
    scale_init: Literal["uniform", "mean"] = "uniform",
    padding_value: int = 0,
    *,
    surrogate: Make | None = None,
    weight_surrogate: Make | None = None,
) -> Scheme:
    """ReCU, W1A1: standardized weights clamped at a quantile, a learned scale (arXiv:2103.12369).

    ``tau_min``, ``tau_max`` and ``scale_init`` are as in `qconv.methods.recu.ReCUWeight`.

    Raises:
        ValueError: not ``0.5 < tau_min <= tau_max < 1``, or ``scale_init`` is neither of the two.
        TypeError: ``surrogate`` or ``weight_surrogate`` makes no surrogate.
    """
    return Scheme(
        input=partial(ReCUInput, chosen(surrogate, ApproxSign)),
        weight=partial(ReCUWeight, tau_min, tau_max, scale_init, chosen(weight_surrogate, Straight)),
        padding_value=padding_value,
    )
