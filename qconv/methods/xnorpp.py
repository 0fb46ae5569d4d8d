"""XNOR-Net++: binary weights with a learned scale (Bulat and Tzimiropoulos, arXiv:1909.13863)."""

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

from ..quantizers.base import Levels, Whole
from ..quantizers.filters import per_filter
from ..quantizers.numbers import set_parameter, wide
from ..quantizers.signs import Binary, sign
from ..quantizers.surrogates import HardClip, Make, Surrogate, chosen
from ..scheme import Scheme, named
from .bnn import Sign


class XNORppWeight(Binary):
    r"""Binary weights with a learned scale for each filter, the weight quantizer of XNOR-Net++.

    ``w_q = gamma_c · sign(w)``, ``sign(±0) = +1``, which equals an output multiplied by gamma_c: case 1 of the paper's
    four. Cases 2 to 4, of which the last gave the published 57.1 % (ResNet-18 on ImageNet), have one factor for each
    place of the output; they tie a layer to one input size and are not implemented.

    ``dgamma_c = Σ g · sign(w)`` over the filter and ``dw = gamma_c · g · d(w)`` with the surrogate's
    ``d(w) = 1[|w| ≤ 1]``, where ties at ±1 pass. gamma starts at 1; it is no step, so it may become negative, and
    nothing clamps it. Larq's reimplementation gives it weight decay. Latent weights are not clipped.

    Filters of zeros, constant filters and filters of one element are treated like all others: ±gamma_c. A NaN gives
    either value, ±inf its sign.

    Args:
        surrogate: makes the surrogate derivative of the sign.
    """

    roles = ("weight",)
    gamma: nn.Parameter

    def __init__(self, surrogate: Callable[[], Surrogate] = HardClip) -> None:
        super().__init__(surrogate)
        self.register_parameter("gamma", None)

    def initialize(self, x: Tensor) -> None:
        self.gamma = set_parameter(self.gamma, x.new_ones(x.shape[0]))

    def tensors(self) -> tuple[Tensor, ...]:
        return self.gamma, *super().tensors()

    def whole(self, x: Tensor, *tensors: Tensor) -> Whole:
        return Whole(sign(x), per_filter(tensors[0], x))

    def levels(self, *tensors: Tensor) -> Levels:
        return Levels(-1, 1, tensors[0], "sign")

    def backward(self, grad: Tensor, x: Tensor, *tensors: Tensor) -> tuple[Tensor | None, ...]:
        gamma, *schedule = tensors
        scale = per_filter(gamma, x)
        grad_gamma = (wide(grad) * sign(x)).sum_to_size(scale.shape).view_as(gamma).to(gamma.dtype)
        grad_x = (self.surrogate.backward(grad, x, *schedule) * scale).to(x.dtype)
        return grad_x, grad_gamma, *(None for _ in schedule)


@named
def xnorpp(padding_value: int = 0, *, surrogate: Make | None = None, weight_surrogate: Make | None = None) -> Scheme:
    """XNOR-Net++, W1A1: signs with a learned scale for each output channel, the paper's case 1 (arXiv:1909.13863).

    The gradients of input and weight pass where the magnitude is at most 1.

    Raises:
        TypeError: ``surrogate`` or ``weight_surrogate`` makes no surrogate.
    """
    return Scheme(
        input=partial(Sign, chosen(surrogate, HardClip)),
        weight=partial(XNORppWeight, chosen(weight_surrogate, HardClip)),
        padding_value=padding_value,
    )
