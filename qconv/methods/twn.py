"""TWN: ternary weights with a threshold and a scale from the weights themselves (arXiv:1605.04711)."""

import math
from functools import partial

import torch
from torch import Tensor

from ..ground.checks import check_flags, check_positive
from ..quantizers.base import Whole
from ..quantizers.kept_codes import Coding, Passing
from ..quantizers.levels import ternary
from ..quantizers.numbers import wide
from ..scheme import Scheme, named


class TWN(Passing):
    r"""Ternary weights ``{−alpha, 0, +alpha}``, the quantizer of TWN.

    ``w_q = alpha · T`` with ``T = +1`` where ``w > D``, ``−1`` where ``w < −D``, 0 else, ``D = threshold · mean |w|``
    and ``alpha`` the mean of |w| over ``|w| > D``; a weight at ±D or ±0 gives 0. ``dw = g``, with no mask, D
    and alpha constant; latent weights are not clipped.

    If no weight is above the threshold, as in a filter of zeros, alpha is 0 and w_q is 0; with ``threshold > 1`` that
    is also the case for a constant filter or one of a single weight (at 1, rounding decides). A NaN or an inf makes its
    filter NaN (its layer, with ``per_channel=False``). Half precision takes the means in float32.

    The paper derives 0.7 (0.75 for Gaussian weights, rounded down). The authors' Caffe code takes D and alpha over the
    layer with 0.7 (their 92.56 % of VGG-7 on CIFAR-10), their PyTorch code over each filter with 0.75 for
    classification and 0.7 for detection.

    Args:
        threshold: D over the mean magnitude, positive.
        per_channel: whether each filter, or the whole layer, has its own D and alpha.

    Raises:
        ValueError: ``threshold`` is not positive and finite.
    """

    bits = math.log2(3)
    code_dtype = torch.int8

    def __init__(self, threshold: float = 0.7, per_channel: bool = True) -> None:
        super().__init__()
        check_positive(threshold=threshold)
        check_flags(per_channel=per_channel)
        self.threshold = threshold
        self.per_channel = per_channel

    @property
    def coding(self) -> Coding:
        return Coding(3, low=-1)

    def whole(self, x: Tensor, *tensors: Tensor) -> Whole:
        wide_x = wide(x)
        magnitude = wide_x.abs()
        count = x[:1].numel() if self.per_channel else x.numel()
        values = ternary(wide_x, self._sum(magnitude) * (self.threshold / max(count, 1)))
        above = values.abs()
        # A product, unlike a selection, lets a NaN and an inf reach the scale.
        scale = self._sum(magnitude * above) / self._sum(above).clamp(min=1)
        return Whole(values.to(wide_x.dtype), scale)

    def _sum(self, x: Tensor) -> Tensor:
        if not self.per_channel:
            return x.sum()
        return x.sum(dim=tuple(range(1, x.ndim)), keepdim=True) if x.ndim > 1 else x


@named
def twn(threshold: float = 0.7, per_channel: bool = True) -> Scheme:
    """TWN: weights ``{−alpha, 0, alpha}``, threshold and alpha from the mean magnitude (arXiv:1605.04711).

    ``per_channel=False`` takes both over the layer, as the authors' Caffe code does.
    """
    return Scheme(weight=partial(TWN, threshold, per_channel))
