"""ReSTE: signs with the layer's mean magnitude as scale, and a rectified power as surrogate (arXiv:2303.17153)."""

from collections.abc import Callable

from torch import Tensor

from .base import Whole
from .bnn import sign
from .numbers import wide
from .surrogates import ReSTE, Surrogate
from .xnor import Binary


class ReSTEWeight(Binary):
    r"""Binary weights with one scale for the layer, the weight quantizer of the ReSTE paper.

    ``w_q = E · sign(w)`` with ``E = mean |w|`` over the N weights of the layer, ``sign(±0) = +1``; a layer of zeros
    gives zeros, one of one magnitude itself. A NaN or an inf makes the whole layer NaN or inf.

    ``dw = E · g · d(w) + sign(w)/N · Σ_j g_j sign(w_j)``: E is not a constant in the gradient. d is the surrogate's;
    for `ReSTE` it is 0 where ``|w| > 1.5`` and finite at 0. Latent weights are not clipped.

    Args:
        surrogate: makes what stands for the derivative of the sign.
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
