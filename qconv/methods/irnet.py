"""IR-Net: signs of standardized weights with a power-of-two scale (Qin et al., arXiv:1909.10788)."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ..quantizers.base import Whole
from ..quantizers.filters import filter_scale, standardize, standardize_backward
from ..quantizers.numbers import wide
from ..quantizers.signs import Binary, sign
from ..quantizers.surrogates import EDE, Make, Surrogate, chosen
from ..scheme import Scheme, named
from .bnn import signs_or_float


class IRNetWeight(Binary):
    r"""Binary weights of IR-Net: Libra parameter binarization.

    ``w_q = s_c · sign(w_hat)`` with ``w_hat = (w − mean_c) / std_c`` over filter c (std with n − 1) and ``s_c =
    2^round(log2 mean |w_hat|)``, a constant in the gradient; ``sign(±0) = +1``. For weights near a normal distribution
    s is 1.

    ``dw_hat = s_c · g · d(w_hat)`` with the surrogate's d, for IR-Net `EDE`; dw follows through mean and std
    (`standardize_backward`). Nothing is masked, and latent weights are not clipped.

    A constant filter (even of zeros) and a filter of one element have no deviation: they give zeros, and gradient 0. A
    NaN or an inf makes its filter NaN.

    The paper's EDE starts at t = 0.1, as does its code for VGG-small and W1A32; the code for ResNet-20 W1A1 (the
    published 86.5 %) starts at 0.001: ``surrogate=partial(EDE, 0.001)``.

    Args:
        surrogate: makes the surrogate derivative of the sign of w_hat.
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


@named
def irnet(
    t_min: float = 0.1,
    padding_value: int = 0,
    *,
    binary_input: bool = True,
    surrogate: Make | None = None,
    weight_surrogate: Make | None = None,
) -> Scheme:
    """IR-Net, W1A1 or W1A32: signs of standardized weights with a power of two as scale (arXiv:1909.10788).

    ``t_min`` is the start of the `qconv.quantizers.EDE` of input and weight: 0.1 in the paper and in the code for
    VGG-small and for W1A32; 0.001 in the code for ResNet-20 W1A1. ``binary_input=False`` leaves the input float.

    Raises:
        ValueError: ``t_min`` out of range, or a padding value or a surrogate for an input that is float.
        TypeError: ``surrogate`` or ``weight_surrogate`` makes no surrogate.
    """
    EDE(t_min)  # raise on a wrong value here, not when the first layer is built
    ede = partial(EDE, t_min)
    weight = partial(IRNetWeight, chosen(weight_surrogate, ede))
    return signs_or_float(weight, surrogate, ede, padding_value, binary_input)
