"""Bi-Real Net: scaled signs, with a scale that is constant in the gradient (Liu et al., arXiv:1808.00278)."""

from collections.abc import Callable
from functools import partial
from typing import Literal

from torch import Tensor

from ..ground.checks import check_choice
from ..quantizers.base import Whole
from ..quantizers.filters import filter_scale
from ..quantizers.signs import Binary, sign
from ..quantizers.surrogates import ApproxSign, HardClip, Make, Surrogate, chosen
from ..scheme import Scheme, named
from .bnn import Sign


class BiRealWeight(Binary):
    r"""Binary weights of Bi-Real Net and of ReActNet.

    ``w_q = alpha_c · sign(w)`` with ``alpha_c = mean |w|`` over filter c, a constant in the gradient; ``sign(±0)
    = +1``.

    ``gradient="code"``, as in the authors' PyTorch code, which gave the published 56.4 % (ResNet-18 on ImageNet) and
    those of ReActNet: ``dw = g · d(w)``, without alpha. ``gradient="paper"``: ``dw = alpha_c · g · d(w)``, the paper's
    magnitude-aware gradient, also used by Larq. Adam barely notices the difference; under SGD the updates differ by the
    factor alpha. The surrogate's ``d(w) = 1[|w| ≤ 1]`` lets ties at ±1 pass. Latent weights are not clipped.

    A filter of zeros gives zeros; a constant filter or one of a single element gives itself. A NaN or an inf makes its
    filter NaN or inf.

    Args:
        gradient: ``"code"`` or ``"paper"``.
        surrogate: makes the surrogate derivative of the sign.

    Raises:
        ValueError: ``gradient`` is neither of the two.
    """

    def __init__(
        self, gradient: Literal["code", "paper"] = "code", surrogate: Callable[[], Surrogate] = HardClip
    ) -> None:
        super().__init__(surrogate)
        check_choice("gradient", gradient, "code", "paper")
        self.gradient = gradient

    def whole(self, x: Tensor, *tensors: Tensor) -> Whole:
        return Whole(sign(x), filter_scale(x))

    def backward(self, grad: Tensor, x: Tensor, *tensors: Tensor) -> tuple[Tensor | None, ...]:
        grad_sign = self.surrogate.backward(grad, x, *tensors)
        grad_x = grad_sign * filter_scale(x) if self.gradient == "paper" else grad_sign
        return grad_x, *(None for _ in tensors)


@named
def bireal(
    gradient: Literal["code", "paper"] = "code",
    padding_value: int = 0,
    *,
    surrogate: Make | None = None,
    weight_surrogate: Make | None = None,
) -> Scheme:
    """Bi-Real Net, W1A1: the derivative of a piecewise quadratic for the input's sign (arXiv:1808.00278).

    ``gradient`` is as in `qconv.methods.bireal.BiRealWeight`: the weight's gradient without or with the scale.

    Raises:
        ValueError: ``gradient`` is neither of the two.
        TypeError: ``surrogate`` or ``weight_surrogate`` makes no surrogate.
    """
    return Scheme(
        input=partial(Sign, chosen(surrogate, ApproxSign)),
        weight=partial(BiRealWeight, gradient, chosen(weight_surrogate, HardClip)),
        padding_value=padding_value,
    )
