"""BiPer: signs of a sine of the weights, with the sine's derivative (Vargas et al., arXiv:2404.01278)."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..ground.checks import check_choice, check_flags, check_positive
from ..quantizers.base import Levels, Quantizer, Whole
from ..quantizers.filters import per_filter
from ..quantizers.numbers import set_parameter, wide
from ..quantizers.signs import Binary, sign
from ..quantizers.surrogates import ApproxSign, Make, Straight, Surrogate, chosen
from ..scheme import Scheme, named
from .recu import ReCUInput, ScaleInit, first_scales


class _Periodic(Quantizer):
    """The shared part of both stages: the frequency, and a learned scale for each filter."""

    roles = ("weight",)
    kept = ("alpha",)
    scale_init: ScaleInit
    alpha: nn.Parameter

    def __init__(self, frequency: float, scale_init: ScaleInit, *others: Any) -> None:
        super().__init__(*others)
        check_positive(frequency=frequency)
        check_choice("scale_init", scale_init, "uniform", "mean")
        self.frequency, self.scale_init = frequency, scale_init
        self.register_parameter("alpha", None)

    def initialize(self, x: Tensor) -> None:
        self.alpha = set_parameter(self.alpha, first_scales(x, self.scale_init))

    def goes_on_from(self, other: Quantizer) -> bool:
        return isinstance(other, _Periodic)


class SineWeight(_Periodic):
    r"""Weights of BiPer's first stage: ``w_q = alpha_c · sin(ω w)``, float, alpha learned for each filter c.

    ``dalpha_c = Σ g · sin(ω w)`` over the filter, ``dw = alpha_c · g · ω cos(ω w)``: the exact gradients. Latent
    weights are not clipped.

    Args:
        frequency: ω.
        scale_init: the first alpha, as in `BiPerWeight`.

    Raises:
        ValueError: ``frequency`` is not positive and finite, or ``scale_init`` is neither of the two.
    """

    def __init__(self, frequency: float = 20.0, scale_init: ScaleInit = "uniform") -> None:
        super().__init__(frequency, scale_init)

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.alpha,)

    def quantize(self, x: Tensor, *tensors: Tensor) -> Tensor:
        wide_x = wide(x)
        return ((wide_x * self.frequency).sin() * per_filter(tensors[0], x).to(wide_x.dtype)).to(x.dtype)

    def backward(self, grad: Tensor, x: Tensor, *tensors: Tensor) -> tuple[Tensor | None, ...]:
        angle, scale = wide(x) * self.frequency, per_filter(tensors[0], x)
        grad_x = wide(grad) * scale * (angle.cos() * self.frequency)
        grad_alpha = (wide(grad) * angle.sin()).sum_to_size(scale.shape)
        return grad_x.to(x.dtype), grad_alpha.view_as(tensors[0]).to(tensors[0].dtype)


class BiPerWeight(_Periodic, Binary):
    r"""Binary weights of BiPer: a square wave, with the derivative of a sine of the same period.

    ``w_q = alpha_c · sign(sin(ω w))``, ``sign(±0) = +1``, alpha learned for each filter c. ``dalpha_c = Σ g ·
    sign(sin(ω w))`` over the filter; ``dw = alpha_c · g · d(sin(ω w)) · ω cos(ω w)`` with the surrogate's d, for BiPer
    1. Latent weights are not clipped. A weight changes its sign at every multiple of π/ω, not only at 0.

    The authors' code starts alpha at random numbers from [0, 1) (``scale_init="uniform"``; here keyed by the weight);
    ``"mean"`` starts at the filter's ``mean |w|``. It is no step, so it may become negative.

    ±inf gives ±alpha, NaN either of them; both have NaN as their gradient.

    Args:
        frequency: ω; 20 in the paper.
        scale_init: ``"uniform"`` or ``"mean"``.
        surrogate: makes the surrogate derivative of the sign.

    Raises:
        ValueError: ``frequency`` is not positive and finite, or ``scale_init`` is neither of the two.
    """

    def __init__(
        self,
        frequency: float = 20.0,
        scale_init: ScaleInit = "uniform",
        surrogate: Callable[[], Surrogate] = Straight,
    ) -> None:
        super().__init__(frequency, scale_init, surrogate)

    def tensors(self) -> tuple[Tensor, ...]:
        return self.alpha, *super().tensors()

    def whole(self, x: Tensor, *tensors: Tensor) -> Whole:
        angle = wide(x) * self.frequency
        wave = torch.where(angle.isinf(), angle, angle.sin())
        return Whole(sign(wave).to(x.dtype), per_filter(tensors[0], x))

    def levels(self, *tensors: Tensor) -> Levels:
        return Levels(-1, 1, tensors[0])

    def backward(self, grad: Tensor, x: Tensor, *tensors: Tensor) -> tuple[Tensor | None, ...]:
        alpha, *schedule = tensors
        angle, scale = wide(x) * self.frequency, per_filter(alpha, x)
        sine, grad_sign = angle.sin(), wide(grad)
        grad_alpha = (grad_sign * sign(sine)).sum_to_size(scale.shape).view_as(alpha).to(alpha.dtype)
        grad_sine = self.surrogate.backward(grad_sign * scale, sine, *schedule)
        return (grad_sine * (angle.cos() * self.frequency)).to(x.dtype), grad_alpha, *(None for _ in schedule)


@named
def biper(
    frequency: float = 20.0,
    scale_init: Literal["uniform", "mean"] = "uniform",
    padding_value: int = 0,
    *,
    sine: bool = False,
    surrogate: Make | None = None,
    weight_surrogate: Make | None = None,
) -> Scheme:
    """BiPer, W1A1: weights are the signs of a sine, inputs as in `recu`, as in the code (arXiv:2404.01278).

    ``frequency`` and ``scale_init`` are as in `qconv.methods.biper.BiPerWeight`. ``sine`` is the authors' first
    stage, W32A1, with the sine itself as weight. They make that two runs, the second from the first one's weights, each
    with its own learning rate schedule. In one run it is ``staged([(0, biper(sine=True)), (0.5, biper())])``: the
    learned scales carry over.

    Raises:
        ValueError: ``frequency`` is not positive and finite, ``scale_init`` is neither of the two, or ``sine`` together
            with a ``weight_surrogate``.
        TypeError: ``sine`` is not a bool, or ``surrogate`` or ``weight_surrogate`` makes no surrogate.
    """
    check_flags(sine=sine)
    if sine and weight_surrogate is not None:
        raise ValueError(f"weight_surrogate (={weight_surrogate}) must be None with sine=True, which has no sign")
    square = partial(BiPerWeight, frequency, scale_init, chosen(weight_surrogate, Straight))
    return Scheme(
        input=partial(ReCUInput, chosen(surrogate, ApproxSign)),
        weight=partial(SineWeight, frequency, scale_init) if sine else square,
        padding_value=padding_value,
    )
