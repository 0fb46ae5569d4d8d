"""SAWB: uniform weights with a range computed from two of their statistics (Choi et al., arXiv:1807.06964)."""

from functools import partial

import torch
from torch import Tensor

from ..ground.checks import check_bits, check_flags
from ..quantizers.base import Whole
from ..quantizers.kept_codes import Coding, Passing
from ..quantizers.numbers import wide
from ..quantizers.rounding import divisor
from ..scheme import Scheme, named, of_input
from .pact import PACT

COEFFICIENTS = {
    # (bits, zero): c0 of the root mean square, c1 of the mean magnitude
    (2, False): (3.12, -2.064),
    (3, False): (7.509, -6.892),
    (4, False): (12.68, -12.80),
    (2, True): (2.6, -1.71),
    (4, True): (12.035, -12.03),
}


class SAWB(Passing):
    r"""Weights of SAWB, statistics-aware weight binning.

    ``clip = c0 · √(mean w²) + c1 · mean |w|`` over the layer, a constant in the gradient. The coefficients were fitted
    to the clip of the least squared error for six distributions: (3.12, −2.064), (7.509, −6.892) and (12.68, −12.80)
    with 2, 3 and 4 bits; with ``zero`` (2.6, −1.71) and (12.035, −12.03) with 2 and 4.

    ``n = 2^b − 1``; ``w_q = clip/n · (2 · round(n · (w' / clip + 1) / 2) − n)`` with ``w' = clamp(w, −clip, clip)``,
    half to even: 2^b levels from −clip to clip, and 0 is not one of them. ``zero=True``: ``n = 2^(b−1) − 1``, ``w_q =
    clip/n · round(n · w' / clip)``: one level less, and 0 is a level. ``dw = g · 1[|w| ≤ clip]``, where ties at ±clip
    pass; with ``plus``, SAWB+ of the authors' later code, ``dw = g`` everywhere. Latent weights are not clipped.

    If clip is at most a tenth of the mean magnitude, as with 4 bits and weights of one magnitude, the largest magnitude
    replaces it; the authors' code keeps it, which changes signs or leaves weights no gradient. A layer of zeros gives
    zeros. A NaN or an inf makes the whole layer NaN (``per_channel``: its filter).
    The paper quantizes inputs by `PACT` and has 2 bits for both; its coefficients for 3 and 4 bits and those with
    ``zero`` are from the authors' later code.

    Args:
        bits: 2 to 4.
        zero: levels on both sides of 0 and 0 itself; for 2 and 4 bits.
        per_channel: a clip for each filter instead of one for the layer.
        plus: the gradient passes outside the clip, too.

    Raises:
        ValueError: ``bits`` out of range, or ``zero`` with 3 bits.
    """

    def __init__(self, bits: int = 4, zero: bool = False, per_channel: bool = False, plus: bool = False) -> None:
        super().__init__()
        self.bits = check_bits("bits", bits, 2, 4, "SAWB")
        check_flags(zero=zero, per_channel=per_channel, plus=plus)
        if (bits, zero) not in COEFFICIENTS:
            raise ValueError(
                f"zero (=True) must be False with 3 bits: no coefficients are published for bits (={bits})"
            )
        self.zero = zero
        self.plus = plus
        self.per_channel = per_channel
        self.count = 2 ** (bits - 1) - 1 if zero else 2**bits - 1

    def clip(self, x: Tensor) -> Tensor:
        """The clip of the layer, or of each filter in a shape that broadcasts."""
        c0, c1 = COEFFICIENTS[int(self.bits), self.zero]
        filters = x.flatten(1) if x.ndim > 1 else x[:, None]
        rows = filters if self.per_channel else x.reshape(1, x.numel())
        if not rows.shape[1]:
            return x.new_zeros([1] * x.ndim)
        largest = rows.abs().amax(1, keepdim=True)
        shares = rows.abs() / divisor(largest)  # squares of the weights could overflow or underflow
        mean = shares.mean(1)
        share = c0 * shares.square().mean(1).sqrt() + c1 * mean
        clip = largest.squeeze(1) * torch.where(share <= mean / 10, 1.0, share)
        return clip.view(-1, *[1] * (x.ndim - 1))

    def whole(self, x: Tensor, *tensors: Tensor) -> Whole:
        """Return odd whole numbers from −n to n (all of them with ``zero``), and the step clip / n."""
        wide_x = wide(x)
        clip = self.clip(wide_x)
        ratio = (wide_x / divisor(clip)).clamp(-1, 1)
        if self.zero:
            values = (ratio * self.count).round_()
        else:
            values = ((ratio + 1) * (self.count / 2)).round_().mul_(2).sub_(self.count)
        return Whole(values, clip / self.count)

    @property
    def coding(self) -> Coding:
        return Coding(2 * self.count + 1, -self.count) if self.zero else Coding(self.count + 1, -self.count, 2)

    def passes(self, x: Tensor, *tensors: Tensor) -> Tensor | None:
        if self.plus:
            return None
        wide_x = wide(x)
        return wide_x.abs() <= self.clip(wide_x)


@named
def sawb(
    weight_bits: int = 4,
    input_bits: int | None = 4,
    zero: bool = False,
    per_channel: bool = False,
    alpha: float | None = None,
    plus: bool = False,
) -> Scheme:
    """PACT-SAWB: weights clipped by two of their statistics, the inputs of `pact` (arXiv:1807.06964).

    ``zero``, ``per_channel`` and ``plus`` (SAWB+) are as in `qconv.quantizers.SAWB`, ``alpha`` is as in `pact`.
    ``input_bits=None`` leaves the input float. The paper leaves the first and the last layer float.

    Raises:
        ValueError: ``weight_bits`` is not from 2 to 4, ``input_bits`` not from 1 to 16, or ``zero`` with 3 bits.
        TypeError: ``zero``, ``per_channel`` or ``plus`` is not a bool.
    """
    check_bits("weight_bits", weight_bits, 2, 4, "sawb")
    return Scheme(
        input=of_input(PACT, input_bits, alpha, high=16),
        weight=partial(SAWB, weight_bits, zero, per_channel, plus),
    )
