"""TTQ: trained ternary quantization (arXiv:1612.01064)."""

import math
from functools import partial

import torch
from torch import Tensor, nn

from ..ground.checks import check_numbers
from ..quantizers.base import Codes, Quantizer
from ..quantizers.levels import ternary
from ..quantizers.numbers import learned, scalars, set_parameter, wide
from ..scheme import Scheme, named


class TTQ(Quantizer):
    r"""Ternary weights ``{−W_n, 0, +W_p}`` with two learned values for each layer, the quantizer of TTQ.

    ``w_q = W_p`` where ``w > D``, ``−W_n`` where ``w < −D``, 0 else, with ``D = threshold · max |w|`` over the layer, a
    constant in the gradient; a weight at ±D or ±0 gives 0.

    ``dw = g · {W_p, 1, W_n}`` for weights above, between and below, with no mask; latent weights are not clipped.
    ``dW_p = Σ g`` over ``w > D``, ``dW_n = −Σ g`` over ``w < −D`` (the paper's equation omits the minus). A widely used
    reimplementation takes the mean instead of the sum, and random initial values: a learning rate for one is far off
    for the other. W_p and W_n start at 1, as in the authors' code, and are clamped to 2^-20 or more after each
    optimizer step. The authors' weight decay reaches them too, because of a loose pattern of names. They start from a
    trained float network, and leave the first and last layer float (91.13 % of ResNet-20 on CIFAR-10).

    A layer of zeros gives zeros; in a layer of one constant every weight gives W_p (or −W_n). A NaN or an inf makes the
    whole layer NaN.

    Args:
        threshold: D over the largest magnitude, from 0 to below 1.

    Raises:
        ValueError: ``threshold`` is out of range, or W_p or W_n in a checkpoint is not positive.
    """

    bits = math.log2(3)
    kept = learned_scales = ("positive", "negative")
    roles = ("weight",)
    positive: nn.Parameter
    negative: nn.Parameter

    def __init__(self, threshold: float = 0.05) -> None:
        super().__init__()
        check_numbers(threshold=threshold)
        if not 0 <= threshold < 1:
            raise ValueError(f"threshold (={threshold}) must be from 0 to below 1")
        self.threshold = threshold
        self.positive = learned(1.0)
        self.negative = learned(1.0)

    def initialize(self, x: Tensor) -> None:
        self.positive = set_parameter(self.positive, x.new_ones(1))
        self.negative = set_parameter(self.negative, x.new_ones(1))

    def tensors(self) -> tuple[Tensor, ...]:
        return scalars(self.positive, self.negative)

    def quantize(self, x: Tensor, *tensors: Tensor) -> Tensor:
        return self.codes(x, *tensors).dequantize().to(x.dtype)

    def codes(self, x: Tensor, *tensors: Tensor) -> Codes:
        positive, negative = tensors
        wide_x, bound = self._bound(x)
        # 0 · D is NaN for a NaN or an inf, which would otherwise pass as zeros.
        return Codes(ternary(wide_x, bound), positive + 0 * bound, negative_scale=negative)

    def backward(self, grad: Tensor, x: Tensor, *tensors: Tensor) -> tuple[Tensor | None, ...]:
        positive, negative = tensors
        wide_x, bound = self._bound(x)
        above, below = wide_x > bound, wide_x < -bound
        factor = torch.where(above, positive, torch.where(below, negative, 1.0))
        # In half precision the sums are taken in float32.
        grad_positive = (grad * above).sum(dtype=wide_x.dtype).to(positive.dtype)
        grad_negative = (grad * below).sum(dtype=wide_x.dtype).neg().to(negative.dtype)
        return (grad * factor).to(grad.dtype), grad_positive, grad_negative

    def _bound(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """``x``, in float32 if it has half precision, and D."""
        wide_x = wide(x)
        return wide_x, wide_x.abs().max() * self.threshold if x.numel() > 0 else wide_x.new_zeros(())


@named
def ttq(threshold: float = 0.05) -> Scheme:
    """TTQ: weights ``{−W_n, 0, W_p}`` with two learned values for each layer (arXiv:1612.01064).

    The authors start from a trained float network and leave the first and last layer float.
    """
    return Scheme(weight=partial(TTQ, threshold))
