"""N2UQ: learned thresholds, uniform levels (Liu et al., arXiv:2111.14826)."""

import math
from functools import partial

import torch
from torch import Tensor, nn

from ..ground.checks import check_bits, check_flags
from ..quantizers.base import Bounds, Levels, Whole
from ..quantizers.filters import filter_scale
from ..quantizers.kept_codes import Coded, Coding
from ..quantizers.numbers import count_below, learned, scalars, wide
from ..scheme import Scheme, named, of_input

SMALLEST_WIDTH = 1e-3
"""The least width to which `after_step_` clamps the learned intervals of inputs."""


class N2UQWeight(Coded):
    r"""Weights of N2UQ: uniform levels on a range of each filter's mean magnitude.

    ``w_q = s_c · (round((clamp(w / s_c, −1, 1) + 1) · n/2) · 2/n − 1)``, half to even, with ``n = 2^b − 1`` and ``s_c =
    n / 2^(b−1) · mean |w|`` over the filter. There are 2^b levels from ``−s_c`` to ``s_c``, in steps of ``2 s_c / n``;
    0 is none of them: ±0 gives ``s_c / n``.

    ``dw = g / s_c``, s_c a constant, without a mask, as in the authors' code and so in the published numbers (69.4,
    71.9 and 72.9 % of ResNet-18 with 2, 3 and 4 bits): there the straight-through difference is taken of ``w / s_c``,
    not of w. ``rescale_grad=False`` gives ``dw = g``. The authors' bound of the clamp is a parameter that never gets a
    gradient; here it is 1. Latent weights are not clipped.

    A filter of zeros gives zeros, and ``dw = g``; where s_c is too small to have a finite inverse it is g as well. A
    constant or single weight w lies half way between two levels, ``w · (1 ± 2^(1−b))``, and takes one of them. A NaN or
    inf makes its filter NaN.

    Args:
        bits: 2 to 8.
        rescale_grad: whether the gradient is divided by s_c.

    Raises:
        ValueError: ``bits`` out of range.
    """

    def __init__(self, bits: int = 2, rescale_grad: bool = True) -> None:
        super().__init__()
        self.bits = self._bits = check_bits("bits", bits, 2, 8, "N2UQ")
        check_flags(rescale_grad=rescale_grad)
        self.rescale_grad = rescale_grad

    def backward(self, grad: Tensor, x: Tensor, *tensors: Tensor) -> tuple[Tensor | None, ...]:
        if not self.rescale_grad:
            return (grad,)
        _, divisor = self._scale(wide(x))
        return ((grad / divisor).to(x.dtype),)

    def whole(self, x: Tensor, *tensors: Tensor) -> Whole:
        """Odd whole numbers from −n to n, and the step s_c / n."""
        count = 2**self._bits - 1
        wide_x = wide(x)
        scale, divisor = self._scale(wide_x)
        values = (wide_x / divisor).clamp_(-1, 1).add_(1).mul_(count / 2).round_().mul_(2).sub_(count)
        return Whole(values, scale / count)

    @property
    def coding(self) -> Coding:
        return Coding(2**self._bits, low=1 - 2**self._bits, unit=2)

    def _scale(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """s_c, and the divisor: 1 in place of an s_c that is too small."""
        scale = filter_scale(x) * ((2**self._bits - 1) / 2 ** (self._bits - 1))
        return scale, torch.where(scale < torch.finfo(x.dtype).tiny, 1.0, scale)


class N2UQInput(Coded):
    r"""Inputs of N2UQ: learned intervals; their midpoints are the thresholds of uniform levels.

    With ``n = 2^b − 1``, learned interval widths ``a_1 … a_n``, a learned start and two learned scales: ``z = s1 · x``;
    the interval i lies between ``B_(i−1)`` and ``B_i = start + a_1 + … + a_i``; ``x_q = s2 · 2/n · #{i : z > B_(i−1) +
    a_i / 2}``, where a threshold itself belongs to the level below it. Levels are ``0, 2/n, …, 2`` times s2.

    The gradient (generalized straight-through) is that of the piecewise linear function with the same corners: for
    ``B_(i−1) < z ≤ B_i`` it has the slope ``2 / (n a_i)``, elsewhere 0. With ``h = g · s2 · slope``: ``dx = h · s1``,
    ``ds1 = Σ h x``, ``dstart = −Σ h``, ``da_i = −Σ h`` over all z above ``B_i`` (in the range) and ``−Σ h · (z −
    B_(i−1)) / a_i`` over those in interval i. ``ds2 = Σ g · x_q / s2``: of the levels, not of the piecewise linear
    function.

    All a start at 2/n, start at 0, both scales at 1, so the input should lie in [0, 2]; before it the authors put a
    learned shift, a PReLU and another shift. They train these tensors with a tenth of the learning rate. After each
    optimizer step a is at least 1e-3 and the scales at least 2^-20. (The authors clamp a in the forward, so an a below
    the bound has gradient 0 and stays there; they leave the scales free.)

    ±inf gives the end levels. NaN gives NaN, 0 as gradient, and adds nothing to the other gradients except that of s2,
    which is NaN.

    Args:
        bits: 2 to 8.

    Raises:
        ValueError: ``bits`` out of range; a width or scale that is not positive in a checkpoint.
    """

    roles = ("input",)
    learned_scales = ("widths", "input_scale", "output_scale")
    is_unsigned = True

    def __init__(self, bits: int = 2) -> None:
        super().__init__()
        self.bits = self._bits = check_bits("bits", bits, 2, 8, "N2UQ")
        count = 2**bits - 1
        self.widths = nn.Parameter(torch.full((count,), 2 / count))
        self.start = learned(0.0)
        self.input_scale = learned(1.0)
        self.output_scale = learned(1.0)

    def tensors(self) -> tuple[Tensor, ...]:
        return self.widths, *scalars(self.start, self.input_scale, self.output_scale)

    def backward(self, grad: Tensor, x: Tensor, *tensors: Tensor) -> tuple[Tensor | None, ...]:
        wide_x = wide(x)
        widths, start, input_scale, output_scale = (tensor.to(wide_x.dtype) for tensor in tensors)
        interval = 2 / widths.numel()
        values, _ = self.whole(x, *tensors)
        grad_output_scale = (grad * values).sum() * interval

        z = wide_x * input_scale
        corners = _corners(widths, start)
        index = count_below(z, corners).long()  # 0: not above start; i: in interval i; n + 1: above the last
        outside = widths.new_zeros(1)
        slopes = torch.cat([outside, interval / widths, outside]) * output_scale
        lefts = torch.cat([corners[:1], corners])
        grad_z = grad * slopes[index]
        # Values outside have slope 0, and z = inf must not turn that into NaN: only the n intervals are summed up.
        sums = _sum_by(index, grad_z, len(slopes))[1:-1]
        moments = _sum_by(index, grad_z * (z - lefts[index]), len(slopes))[1:-1]
        grad_start = -sums.sum()
        from_here = sums.flip(0).cumsum(0).flip(0)
        grad_widths = sums - from_here - moments / widths
        grad_input_scale = (moments + sums * corners[:-1]).sum() / input_scale
        grads = grad_widths, grad_start, grad_input_scale, grad_output_scale
        grad_x = (grad_z * input_scale).to(x.dtype)
        return grad_x, *(grad.to(tensor.dtype) for grad, tensor in zip(grads, tensors, strict=True))

    @property
    def bounds(self) -> Bounds:
        return {**super().bounds, "widths": (SMALLEST_WIDTH, math.inf)}

    def whole(self, x: Tensor, *tensors: Tensor) -> Whole:
        """Whole numbers from 0 to n, and the step 2/n · s2."""
        wide_x = wide(x)
        widths, start, input_scale, output_scale = (tensor.to(wide_x.dtype) for tensor in tensors)
        thresholds = _corners(widths, start)[:-1] + widths / 2
        values = count_below(wide_x * input_scale, thresholds)
        return Whole(torch.where(wide_x.isnan(), wide_x, values), output_scale * (2 / widths.numel()))

    @property
    def coding(self) -> Coding:
        return Coding(2**self._bits)

    def levels(self, *tensors: Tensor) -> Levels:
        widths, _, _, output_scale = tensors
        return Levels(0, widths.numel(), wide(output_scale) * (2 / widths.numel()))


def _corners(widths: Tensor, start: Tensor) -> Tensor:
    """``B_0 … B_n``."""
    return torch.cat([start.view(1), start + widths.cumsum(0)])


def _sum_by(index: Tensor, x: Tensor, count: int) -> Tensor:
    """Sum the elements of ``x`` for each value of ``index``, ``(count,)``."""
    rows, indices = (t.flatten(1) if t.ndim > 1 else t.view(1, -1) for t in (x, index))
    # Elements are summed one after another; summing by sample first rounds less.
    return rows.new_zeros(rows.shape[0], count).scatter_add(1, indices, rows).sum(0)


@named
def n2uq(weight_bits: int = 2, input_bits: int | None = 2, rescale_grad: bool = True) -> Scheme:
    """N2UQ: learned thresholds of the input, uniform levels (arXiv:2111.14826).

    The input should lie in [0, 2] at first. The authors train the thresholds and scales with a tenth of the learning
    rate, leave first and last layer float, and put a learned shift, PReLU and shift before each convolution.
    ``input_bits=None`` leaves the input float. ``rescale_grad=False`` keeps the weight's gradient as it is, where the
    authors' code divides it by the filter's scale.
    """
    check_bits("weight_bits", weight_bits, 2, method="n2uq")
    input = of_input(N2UQInput, input_bits, low=2, method="n2uq")
    return Scheme(input=input, weight=partial(N2UQWeight, weight_bits, rescale_grad))
