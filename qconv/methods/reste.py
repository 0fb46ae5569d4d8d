"""ReSTE: signs with the layer's mean magnitude as scale, and a rectified power as surrogate (arXiv:2308.06689)."""

from collections.abc import Callable
from functools import partial
from typing import Literal

from torch import Tensor

from ..quantizers.base import Whole
from ..quantizers.numbers import wide
from ..quantizers.signs import Binary, sign
from ..quantizers.surrogates import Make, ReSTE, Surrogate, chosen
from ..scheme import Scheme, named
from .bnn import signs_or_float


class ReSTEWeight(Binary):
    r"""Binary weights with one scale for the layer, the weight quantizer of the ReSTE paper.

    ``w_q = E · sign(w)`` with ``E = mean |w|`` over the N weights of the layer, ``sign(±0) = +1``. A layer of zeros
    gives zeros; a layer of one magnitude gives itself. A NaN or an inf makes the whole layer NaN or inf.

    ``dw = E · g · d(w) + sign(w)/N · Σ_j g_j sign(w_j)``: E is not a constant in the gradient. d is the surrogate's;
    for `ReSTE` it is 0 where ``|w| > 1.5`` and finite at 0. Latent weights are not clipped.

    Args:
        surrogate: makes the surrogate derivative of the sign.
    """

    def __init__(self, surrogate: Callable[[], Surrogate] = ReSTE) -> None:
        super().__init__(surrogate)

    def whole(self, x: Tensor, *tensors: Tensor) -> Whole:
        return Whole(sign(x), _layer_scale(x))

    def backward(self, grad: Tensor, x: Tensor, *tensors: Tensor) -> tuple[Tensor | None, ...]:
        wide_x, grad_sign, signs = wide(x), wide(grad), sign(x)
        of_scale = signs * ((grad_sign * signs).sum() / max(x.numel(), 1))
        grad_x = self.surrogate.backward(grad_sign * _layer_scale(x), wide_x, *tensors) + of_scale
        return grad_x.to(x.dtype), *(None for _ in tensors)


def _layer_scale(weight: Tensor) -> Tensor:
    return wide(weight).abs().sum() / max(weight.numel(), 1)


@named
def reste(
    o_max: float = 3.0,
    padding_value: int = 0,
    *,
    schedule: Literal["cosine", "linear"] = "cosine",
    binary_input: bool = True,
    surrogate: Make | None = None,
    weight_surrogate: Make | None = None,
) -> Scheme:
    """ReSTE, W1A1 or W1A32: signs with a rectified power as surrogate, one scale for a layer (arXiv:2308.06689).

    ``o_max`` is the final o of the `qconv.quantizers.ReSTE` of input and weight, which starts at 1 and follows
    ``schedule``: "cosine", as in the authors' code, or "linear".
    ``binary_input=False`` leaves the input float.

    Raises:
        ValueError: ``o_max`` is less than 1, there is no such schedule, or the input is float and a padding value or a
            surrogate is given for it.
        TypeError: ``surrogate`` or ``weight_surrogate`` makes no surrogate.
    """
    ReSTE(o_max, schedule=schedule)
    published = partial(ReSTE, o_max, schedule=schedule)
    weight = partial(ReSTEWeight, chosen(weight_surrogate, published))
    return signs_or_float(weight, surrogate, published, padding_value, binary_input)
