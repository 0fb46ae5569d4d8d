"""Stochastic rounding of gradients to few bits (arXiv:1502.02551, arXiv:1805.11046)."""

import torch
from torch import Tensor

from ..ground.checks import check_bits, check_flags
from ..quantizers.base import Quantizer, Whole
from ..quantizers.numbers import wide
from ..quantizers.percentiles import extent
from ..quantizers.rounding import divisor
from ..quantizers.stochastic import Stream


class Int8Stochastic(Quantizer):
    r"""Gradients in whole steps, rounded up or down at random with the right mean; a `Scheme`'s gradient quantizer.

    ``g_q = s · floor(g / s + u)`` with ``s = max |g| / n``, ``n = 2^(b−1) − 1``, over each sample (dimension 0; a
    tensor of one dimension is one sample) or over the tensor, and u uniform in [0, 1). The mean of ``g_q`` is g, to
    within ``2^-24 · s``; zeros are always exact, and a sample of zeros stays zero. ``±max |g|`` are n steps, to within
    the rounding of s; where the division by s rounds below n, n − 1 steps with a probability of about 2^(b−25). A NaN
    or inf leaves no finite number in its sample, so that a gradient scaler sees it. ``dg = g``: in a layer only
    `quantize` is used.

    u comes from a `Stream`: each process has its own numbers, one per element, each optimizer step has new ones, and a
    recomputed call has the same ones. So micro-batches whose gradients are accumulated for one optimizer step share
    them, and their errors do not average out as they would with fresh numbers.

    Gupta et al. (arXiv:1502.02551) round stochastically; Banner et al. (arXiv:1805.11046) train with 8-bit gradients.

    Args:
        bits: 2 to 8.
        per_sample: whether each sample has its own scale; else the whole tensor has one, in each process for its part
            of the batch.

    Raises:
        ValueError: ``bits`` out of range.
    """

    roles = ("grad",)
    code_dtype = torch.int8

    def __init__(self, bits: int = 8, per_sample: bool = True) -> None:
        super().__init__()
        self.bits = self._bits = check_bits("bits", bits, 2, 8, type(self).__name__)
        check_flags(per_sample=per_sample)
        self.per_sample = per_sample
        self.stream = Stream(sharded=True)

    def tensors(self) -> tuple[Tensor, ...]:
        return self.stream.tensors()

    def backward(self, grad: Tensor, x: Tensor, *tensors: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None, None

    def whole(self, x: Tensor, *tensors: Tensor) -> Whole:
        count = 2 ** (self._bits - 1) - 1
        wide_x = wide(x)
        rows = wide_x.flatten(1) if self.per_sample and x.ndim > 1 else wide_x.reshape(1, -1)
        _, largest = extent(rows, 100, symmetric=True)
        step = largest.view(-1, *[1] * (x.ndim - 1)) / count
        ratio = wide_x / divisor(step)
        whole = ratio.floor()
        # floor(ratio + u), but the sum is never formed: its rounding would sometimes raise whole numbers.
        up = self.stream.uniform(x, *tensors).to(ratio.dtype) >= 1 - (ratio - whole)
        return Whole((whole + up).clamp_(-count, count), step)
