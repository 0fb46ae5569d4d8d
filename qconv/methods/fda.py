"""FDA: signs with the derivative of a sine series as surrogate (Xu et al., arXiv:2103.00841)."""

from functools import partial

from ..quantizers.surrogates import Fourier, Make, chosen
from ..scheme import Scheme, named
from .bnn import Sign
from .xnor import ScaledSign


@named
def fda(
    omega: float = 0.1,
    n_min: int = 9,
    n_max: int = 18,
    padding_value: int = 0,
    *,
    surrogate: Make | None = None,
    weight_surrogate: Make | None = None,
) -> Scheme:
    """FDA, W1A1: the derivative of the sign in the frequency domain, as a sum of cosines (arXiv:2103.00841).

    ``omega``, ``n_min`` and ``n_max`` are as in `qconv.quantizers.Fourier`, for input and weight. The weight is
    quantized as in `bwn`, with a scale that is constant in the gradient, as in the code of BiBench, and is not clipped.

    The paper adds what it calls noise adaptation: a small network that is learned with each layer, computes a
    correction of the weight and of the input, and fades out during training. It is left out; the derivative alone is
    what BiBench compares as an operator.

    Raises:
        ValueError: ``omega``, ``n_min`` or ``n_max`` is out of range.
        TypeError: ``surrogate`` or ``weight_surrogate`` makes no surrogate.
    """
    Fourier(omega, n_min, n_max)
    published = partial(Fourier, omega, n_min, n_max)
    weight = partial(ScaledSign, detach_scale=True, weight_clip=None, surrogate=chosen(weight_surrogate, published))
    return Scheme(input=partial(Sign, chosen(surrogate, published)), weight=weight, padding_value=padding_value)
