"""AdaBin: adaptive binary sets, with a centre and a distance (Tu et al., arXiv:2208.08084)."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal

from torch import Tensor

from ..ground.checks import check_choice
from ..quantizers.base import Codes, Levels
from ..quantizers.filters import standardize, standardize_backward
from ..quantizers.numbers import learned, scalars, wide
from ..quantizers.signs import Binary, sign
from ..quantizers.surrogates import EDE, ApproxSign, Make, Surrogate, chosen
from ..scheme import Scheme, named

PUBLISHED = partial(EDE, 0.001)
"""The surrogate of the weights, with the start value of the authors' code."""


class AdaBinWeight(Binary):
    r"""Binary weights of AdaBin, around the mean of each filter.

    ``w_q = alpha_c · sign(w_hat) + beta_c`` with ``w_hat = (w − beta_c) / alpha_c``, ``beta_c = mean w`` and
    ``alpha_c = sqrt(mean (w − beta_c)²)`` over the n weights of filter c; ``sign(±0) = +1``.

    alpha and beta are not constants in the gradient. With b = sign(w_hat), ``dw_hat = alpha_c · g · d(w_hat)``,
    ``dalpha_c = Σ g b`` and ``dbeta_c = Σ g``; dw is the gradient through w_hat (`standardize_backward`) plus ``w_hat/n
    · dalpha_c + dbeta_c/n``. d is the surrogate's, for AdaBin `EDE`, which in the authors' code starts at t = 0.001.
    Nothing is masked, and latent weights are not clipped.

    A constant filter (even of zeros) and a filter of one element give ``beta_c``, and ``dw = dbeta_c / n``. A NaN or an
    inf makes its filter NaN. The codes are signs, with alpha_c as scale and beta_c as offset.

    Args:
        surrogate: makes the surrogate derivative of the sign of w_hat.
    """

    def __init__(self, surrogate: Callable[[], Surrogate] = PUBLISHED) -> None:
        super().__init__(surrogate)

    def quantize(self, x: Tensor, *tensors: Tensor) -> Tensor:
        return self.codes(x, *tensors).dequantize().to(x.dtype)

    def codes(self, x: Tensor, *tensors: Tensor) -> Codes:
        values, mean, std, _ = standardize(x, correction=0)
        return Codes(sign(values), std, offset=mean)

    def backward(self, grad: Tensor, x: Tensor, *tensors: Tensor) -> tuple[Tensor | None, ...]:
        standard = standardize(x, correction=0)
        values, mean, std, _ = standard
        grad = wide(grad)
        count = max(x[:1].numel(), 1)
        grad_std = (grad * sign(values)).sum_to_size(mean.shape)
        grad_mean = grad.sum_to_size(mean.shape)
        grad_values = self.surrogate.backward(grad * std, values, *tensors)
        through_values = standardize_backward(grad_values, standard, correction=0)
        return (through_values + (values * grad_std + grad_mean) / count).to(x.dtype), *(None for _ in tensors)


class AdaBinInput(Binary):
    r"""Binary activations of AdaBin: a learned distance alpha and a learned centre beta for each layer.

    ``offset="paper"``: ``x_q = alpha · sign(z) + beta`` with ``z = (x − beta) / alpha`` and ``sign(±0) = +1``.
    ``offset="code"``: ``x_q = alpha · (sign(z) + beta)``, as the authors' code computes it, so the published 88.1 %
    (ResNet-20, W1A1) are its result. Both agree while alpha is 1. The default is the paper's: the threshold beta then
    is in the middle of the two values, whatever alpha is. The authors' weights need "code": under their names,
    ``binary_a.alpha_a`` and ``binary_a.beta_a``, `load_state_dict` takes them, and refuses them with "paper".

    With ``h = alpha · g · d(z)``, d the surrogate's ``max(2 − 2|z|, 0)``: ``dx = h / alpha``; ``dalpha =
    Σ g · sign(z) − Σ h z / alpha`` and ``dbeta = Σ g − Σ h / alpha``; for ``"code"`` the first terms are
    ``Σ g · (sign(z) + beta)`` and ``alpha · Σ g``. alpha starts at 1 and beta at 0. After each optimizer step alpha is
    clamped to 2^-20 or more.

    ±inf gives one of the two values by its sign, NaN either of them; both make dalpha NaN. The codes are signs. Zero
    padding adds 0 as a third value.

    Args:
        offset: ``"paper"`` or ``"code"``.
        surrogate: makes the surrogate derivative of the sign of z.

    Raises:
        ValueError: ``offset`` is neither of the two, or alpha in a checkpoint is not positive.
    """

    roles = ("input",)
    learned_scales = ("alpha",)

    def __init__(
        self, offset: Literal["paper", "code"] = "paper", surrogate: Callable[[], Surrogate] = ApproxSign
    ) -> None:
        super().__init__(surrogate)
        check_choice("offset", offset, "paper", "code")
        self.offset = offset
        self.alpha = learned(1.0)
        self.beta = learned(0.0)

    @property
    def splits_at_zero(self) -> bool:
        return True

    def tensors(self) -> tuple[Tensor, ...]:
        return *scalars(self.alpha, self.beta), *super().tensors()

    def quantize(self, x: Tensor, *tensors: Tensor) -> Tensor:
        return self.codes(x, *tensors).dequantize().to(x.dtype)

    def codes(self, x: Tensor, *tensors: Tensor) -> Codes:
        alpha, beta, *_ = tensors
        return Codes(sign((wide(x) - beta) / alpha), alpha, offset=self.levels(*tensors).offset)

    def levels(self, *tensors: Tensor) -> Levels:
        alpha, beta, *_ = tensors
        return Levels(-1, 1, alpha, offset=beta if self.offset == "paper" else beta * alpha)

    def backward(self, grad: Tensor, x: Tensor, *tensors: Tensor) -> tuple[Tensor | None, ...]:
        alpha, beta, *schedule = tensors
        z = (wide(x) - beta) / alpha
        grad_sign = wide(grad)
        grad_alpha, grad_beta = (grad_sign * sign(z)).sum(), grad_sign.sum()
        if self.offset == "code":
            grad_alpha, grad_beta = grad_alpha + grad_beta * beta, grad_beta * alpha
        grad_x = self.surrogate.backward(grad_sign * alpha, z, *schedule) / alpha
        grad_alpha = grad_alpha - (grad_x * z).sum()
        grad_beta = grad_beta - grad_x.sum()
        grads = grad_x.to(x.dtype), grad_alpha.to(alpha.dtype), grad_beta.to(beta.dtype)
        return *grads, *(None for _ in schedule)

    def of_authors(self) -> tuple[Mapping[str, str], str]:
        names = {"binary_a.alpha_a": "alpha", "binary_a.beta_a": "beta"}
        differs = "computes alpha · (sign(z) + beta): load them with adabin(offset='code')"
        return names, "" if self.offset == "code" else differs


@named
def adabin(
    t_min: float = 0.001,
    offset: Literal["paper", "code"] = "paper",
    *,
    surrogate: Make | None = None,
    weight_surrogate: Make | None = None,
) -> Scheme:
    """AdaBin, W1A1: two values with a centre and a distance, for weight and input (arXiv:2208.08084).

    ``t_min`` is the start of the weight's `qconv.quantizers.EDE`; 0.001 is from the authors' code. ``offset`` is
    as in `qconv.methods.adabin.AdaBinInput`. The input isn't ±1, so padding is 0.

    Raises:
        ValueError: ``t_min`` out of range, or ``offset`` is neither of the two.
        TypeError: ``surrogate`` or ``weight_surrogate`` makes no surrogate.
    """
    EDE(t_min)
    return Scheme(
        input=partial(AdaBinInput, offset, chosen(surrogate, ApproxSign)),
        weight=partial(AdaBinWeight, chosen(weight_surrogate, partial(EDE, t_min))),
    )
