"""PACT: activations clipped at a learned bound (Choi et al., arXiv:1805.06085)."""

from collections.abc import Sequence
from functools import partial
from typing import cast

import torch
from torch import Tensor

from ..ground.checks import check_bits, check_numbers
from ..quantizers.base import Levels, Whole
from ..quantizers.form import Form
from ..quantizers.kept_codes import Coding, Passing
from ..quantizers.numbers import BELOW_ZERO, SMALLEST, learned, positive, scalars, wide
from ..quantizers.rounding import Rounding
from ..scheme import Scheme, named, of_input
from .dorefa import DoReFaWeight


class PACT(Passing):
    r"""Activations in [0, alpha], with one learned alpha per layer.

    ``x_q = round(n · clamp(x, 0, alpha) / alpha) · alpha / n`` with ``n = 2^b − 1``, half to even; one bit gives {0,
    alpha}. ``dx = g · 1[0 ≤ x < alpha]`` and ``dalpha = Σ g · 1[x ≥ alpha]``: at x = 0 the gradient goes to x, at x =
    alpha only to alpha. (Bitorch gives it to both there.) ±inf gives alpha or 0. NaN gives NaN, and 0 in both
    gradients.

    With 4 bits and more alpha starts at 8, as in the paper (re-implementations start at 10). With fewer it starts at
    ``8 · n / 15``, which gives the step of 4 bits: 8 would make a step of 8/3 with 2 bits and of 8 with one, and
    everything below half of it becomes 0, including all values after a Hardtanh; alpha then gets no gradient. A given
    number is used with any bits. The paper needs weight decay on alpha, with the coefficient of the weights, to pull
    alpha down: the gradient through the clipped values hardly does. So leave alpha in the weights' group of the
    optimizer. After each optimizer step alpha is at least 2^-20.

    The paper's weights are DoReFa's, and its first and last layer stay float. SAWB is the authors' later weight
    quantizer.

    Args:
        bits: 1 to 16.
        alpha: the initial bound; None means ``min(8, 8 · n / 15)``.

    Raises:
        ValueError: ``bits`` out of range, or ``alpha`` not positive, here or in a checkpoint.
    """

    kept = learned_scales = ("alpha",)
    roles = ("input",)
    is_unsigned = True

    def __init__(self, bits: int = 4, alpha: float | None = None) -> None:
        super().__init__()
        self.bits = check_bits("bits", bits, 1, 16)
        check_numbers(alpha=alpha)
        if alpha is None:
            alpha = min(8.0, 8.0 * (2**self.bits - 1) / 15)
        if not SMALLEST <= alpha < float("inf"):
            raise ValueError(f"alpha (={alpha}) must be positive: at least {SMALLEST} and finite")
        self.alpha = learned(float(alpha))

    def tensors(self) -> tuple[Tensor, ...]:
        return scalars(self.alpha)

    def whole(self, x: Tensor, *tensors: Tensor) -> Whole:
        """Whole numbers from 0 to n, and the step alpha / n."""
        return self.rounding_of(x, *tensors).whole(x)

    def rounding_of(self, x: Tensor, *tensors: Tensor) -> Rounding:
        # Division comes before multiplication, so that alpha itself is exactly n steps.
        bound = tensors[0].to(torch.promote_types(x.dtype, torch.float32))
        return Rounding(bound, 0, 1, 2**self.bits - 1, SMALLEST)

    def levels(self, *tensors: Tensor) -> Levels:
        count = 2**self.bits - 1
        return Levels(0, int(count), wide(positive(tensors[0])) / count, "nearest")

    def backward(self, grad: Tensor, x: Tensor, *tensors: Tensor) -> tuple[Tensor | None, ...]:
        (alpha,) = tensors
        wide_x = wide(x)
        bound = positive(alpha).to(wide_x.dtype)
        above = wide_x >= bound
        grad_alpha = (grad.to(wide_x.dtype) * above).sum().to(alpha.dtype)
        return grad * self.passes(x, alpha), grad_alpha

    @property
    def coding(self) -> Coding:
        return Coding(2 ** int(self.bits))

    def passes(self, x: Tensor, *tensors: Tensor) -> Tensor:
        wide_x = wide(x)
        return (x >= 0) & (wide_x < positive(tensors[0]).to(wide_x.dtype))

    def stops_at(self, *tensors: Tensor) -> tuple[float, float]:
        return BELOW_ZERO, positive(tensors[0]).item()

    def backward_kept(
        self, grad: Tensor, kept: Sequence[Tensor], form: Form, *tensors: Tensor
    ) -> tuple[Tensor | None, ...]:
        (alpha,) = tensors
        if not kept[-1].numel():  # nothing is stopped
            return grad, torch.zeros_like(alpha)
        grad_x, _ = super().backward_kept(grad, kept, form, *tensors)
        stopped = wide(grad) - cast(Tensor, grad_x)  # below 0 the code is 0, from alpha on it is not
        above = form.codes(kept[0], self.coding.bits or 8, torch.uint8) > 0
        return grad_x, (stopped * above).sum().to(alpha.dtype)


@named
def pact(weight_bits: int = 4, input_bits: int | None = 4, alpha: float | None = None) -> Scheme:
    """PACT: inputs clipped at a learned bound that starts at ``alpha``, the weights of `dorefa` (arXiv:1805.06085).

    ``input_bits=None`` leaves the input float. Without ``alpha`` the bound starts at 8 as in the paper, and lower with
    fewer than 4 bits (`qconv.quantizers.PACT`). It needs weight decay; the paper leaves the first and the last layer
    float.
    """
    check_bits("weight_bits", weight_bits)
    return Scheme(input=of_input(PACT, input_bits, alpha, high=16), weight=partial(DoReFaWeight, weight_bits))
