"""APoT: levels that are sums of powers of two, on a learned range (Li, Dong and Wang, arXiv:1909.13144)."""

from functools import partial
from itertools import pairwise, product
from typing import Literal

import torch
from torch import Tensor, nn

from ..ground.checks import check_bits, check_choice
from ..quantizers.base import Levels, Quantizer, Whole
from ..quantizers.identity import Identity
from ..quantizers.kept_codes import Coded, Coding
from ..quantizers.numbers import learned, positive, scalars, set_parameter, wide
from ..scheme import Scheme, named

Variant = Literal["cifar", "imagenet"]


def levels(bits: int) -> tuple[int, ...]:
    """Return the ``2^bits`` levels of the paper's unsigned grid, from 0 up, as multiples of its smallest power.

    The paper's construction with k = 2: a level is the sum of ``n = bits // 2`` terms, and term i is one of ``0, 2^-i,
    2^-(i+n), 2^-(i+2n)``. Odd bits have one more term, which is 0 or ``2^-2n``; to make room for it, the last power of
    the other terms is ``2^-(i+2n+1)``. One bit gives 0 and 1. Divided by the largest, they are the levels on [0, 1].

    Example:
        >>> levels(2), levels(3)
        ((0, 1, 2, 4), (0, 1, 2, 3, 4, 6, 8, 10))
    """
    n, odd = divmod(bits, 2)
    last = 2 * n + odd
    terms = [(0, *(2.0**-exponent for exponent in (i, i + n, i + last))) for i in range(n)]
    if odd:
        terms.append((0, 2.0 ** (-2 * n)))
    sums = sorted(sum(term) for term in product(*terms))
    unit = 2.0 ** (1 - n - last) if n else 1.0
    return tuple(int(level / unit) for level in sums)


def project(x: Tensor, grid: tuple[int, ...]) -> Tensor:
    """The nearest of ``±grid``; half way between two, the smaller one. NaN gives NaN.

    Multiples of ½ lie half way, so ``ceil(2 |x|)`` determines the level: a table look-up takes a sixth of a search's
    time. Compiled code makes one pass of comparisons, which can be vectorized, unlike a look-up. In exported code each
    comparison would be a separate pass.
    """
    doubled = x.abs() * 2
    if torch.compiler.is_compiling() and not torch.compiler.is_exporting() and len(grid) <= 16:
        nearest = torch.zeros_like(x)
        for below, level in pairwise(grid):
            nearest = torch.where(doubled > below + level, float(level), nearest)
    else:
        levels = torch.tensor(grid, dtype=x.dtype, device=x.device)
        bounds = levels[1:] + levels[:-1]  # twice the bounds
        table = levels[torch.bucketize(torch.arange(2 * grid[-1] + 1, dtype=x.dtype, device=x.device), bounds)]
        nearest = table.take(doubled.ceil_().nan_to_num_(0.0).clamp_(max=2 * grid[-1]).long())
    return torch.where(x.isnan(), x, nearest * x.sign())


class _APoT(Quantizer):
    """The shared part of weights and inputs: a learned ``alpha``, to which the largest level of ``grid`` is scaled."""

    grid: tuple[int, ...]
    kept = learned_scales = ("alpha",)
    code_dtype = torch.int8
    alpha: nn.Parameter

    def tensors(self) -> tuple[Tensor, ...]:
        return scalars(self.alpha)

    def levels(self, *tensors: Tensor) -> Levels:
        low = 0 if self.roles == ("input",) else -self.grid[-1]
        return Levels(low, self.grid[-1], positive(wide(tensors[0])) / self.grid[-1])

    def _multiples(self, x: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor]:
        """``x / alpha`` in units of the grid, exact at 1; and alpha in units, the size of a unit."""
        alpha = positive(alpha).to(x.dtype)
        return x / alpha * self.grid[-1], alpha / self.grid[-1]

    def _grad_alpha(self, grad: Tensor, multiples: Tensor, values: Tensor, inside: Tensor, alpha: Tensor) -> Tensor:
        """``Σ g · (q − z inside, else q)``, where q is ±1 outside."""
        error = torch.where(inside, values - multiples, values)
        return ((grad * error).sum() / self.grid[-1]).to(alpha.dtype)


class APoTWeight(_APoT):
    r"""Weights on sums of powers of two, normalized over the layer, the weight quantizer of APoT.

    ``w_q = alpha · q``: ``q`` is the level nearest to ``z = ŵ / alpha``, clipped to [−1, 1], with
    ``ŵ = (w − mean) / std`` over the layer (std with n − 1) and the learned ``alpha``. Half way between two levels the
    smaller magnitude is taken; the authors' code takes whichever comes first in an unsorted set.

    b bits have the signed ``b − 1`` bit grid of `levels`, divided by its largest: 2 bits are ternary, ``{0, 1}``; 3:
    ``{0, 1/4, 1/2, 1}``; 4: ``{0, .1, .2, .3, .4, .6, .8, 1}``; 5: the sums of one of ``{0, 1/2, 1/8, 1/32}`` and one
    of ``{0, 1/4, 1/16, 1/64}`` over 3/4, which is the paper's construction with k = 2 and n = 2.

    ``dalpha = Σ g · (sign(z) where |z| > 1, else q − z)``, ties at 1 in the second. ``variant="cifar"``, the default:
    ``dŵ = g``, not masked, mean and std constant, ``dw = dŵ / std``, as in the authors' code for CIFAR-10 (90.96, 92.49
    and 92.45 % of ResNet-20 with 2, 3 and 4 bits). ``"imagenet"``: ``dŵ = g · 1[|z| <= 1]`` (with 2 bits g, too), and
    mean and std are differentiated, as in that for ImageNet (66.46 to 70.75 % of ResNet-18 with 2 to 5 bits).

    ŵ has a deviation of 1, whatever the weight's is, so outputs are larger than the float layer's, about by the
    root of the number of its inputs: a normalization has to follow. Without one, as in timm's NF-RegNet, they grow from
    layer to layer, and the training diverges.

    ``alpha`` starts at 3 and is clamped to 2^-20 or more after each optimizer step. The authors train it with a
    learning rate of 0.02 (CIFAR-10) and a weight decay of 1e-4, in its own group. Latent weights are not clipped. Their
    first and last layer have 8-bit weights, rounded to multiples of ``max w / 127``, which is not the largest
    magnitude.

    A constant layer (also one of zeros or a single weight), whose std is 0 up to rounding, is divided by 1 and gives
    zeros. A NaN or an inf makes the whole layer NaN.

    Args:
        weight_bits: 2 to 5, the sign included.
        variant: ``"cifar"`` or ``"imagenet"``.

    Raises:
        ValueError: ``weight_bits`` out of range, ``variant`` neither of the two, or alpha in a checkpoint not positive.
    """

    roles = ("weight",)

    def __init__(self, weight_bits: int = 4, variant: Variant = "cifar") -> None:
        super().__init__()
        self.bits = check_bits("weight_bits", weight_bits, 2, 5, "APoT")
        check_choice("variant", variant, "cifar", "imagenet")
        self.grid = levels(weight_bits - 1)
        self.variant = variant
        self.alpha = learned(3.0)

    def initialize(self, x: Tensor) -> None:
        self.alpha = set_parameter(self.alpha, x.new_tensor([3.0]))

    def whole(self, x: Tensor, *tensors: Tensor) -> Whole:
        multiples, step = self._multiples(_normalized(x)[0], *tensors)
        return Whole(project(multiples, self.grid), step)

    def backward(self, grad: Tensor, x: Tensor, *tensors: Tensor) -> tuple[Tensor | None, ...]:
        normalized, std = _normalized(x)
        multiples, _ = self._multiples(normalized, *tensors)
        inside = multiples.abs() <= self.grid[-1]
        wider = grad.to(normalized.dtype)
        grad_alpha = self._grad_alpha(wider, multiples, project(multiples, self.grid), inside, *tensors)
        if self.variant == "imagenet":
            if self.bits > 2:
                wider = wider * inside
            slope = (wider * normalized).sum() / max(x.numel() - 1, 1)
            wider = wider - wider.sum() / max(x.numel(), 1) - normalized * slope
        return (wider / std).to(grad.dtype), grad_alpha


def _normalized(x: Tensor) -> tuple[Tensor, Tensor]:
    """``(x − mean) / std`` over all of ``x``, and std, which is 1 for a constant."""
    wider = wide(x)
    mean = wider.sum() / max(x.numel(), 1)
    centered = wider - mean
    std = (centered.square().sum() / max(x.numel() - 1, 1)).sqrt()
    # A constant's mean may be off by some rounding errors, and dividing by their std would blow them up.
    rounding = 16 * torch.finfo(wider.dtype).eps * mean.abs()
    std = torch.where(std <= rounding, 1.0, std)
    return centered / std, std


class APoTInput(_APoT, Coded):
    r"""Inputs on sums of powers of two from 0 to a learned end, the input quantizer of APoT.

    ``x_q = alpha · q``: ``q`` is the level nearest to ``z = clamp(x / alpha, 0, 1)`` in the unsigned b-bit grid of
    `levels`, divided by its largest; half way between two it is the smaller one. NaN gives NaN, inf alpha, -inf
    0.

    2 bits: ``{0, 1/4, 1/2, 1}``; 3: ``{0, .1, .2, .3, .4, .6, .8, 1}``; 4: the sums of one of ``{0, 1/2, 1/8, 1/32}``
    and one of ``{0, 1/4, 1/16, 1/64}`` over 3/4; 5: of ``{0, 1/2, 1/8, 1/64}``, ``{0, 1/4, 1/16, 1/128}`` and ``{0,
    1/32}`` over 25/32.

    ``dx = g · 1[0 <= x <= alpha]``, ``dalpha = Σ g · (1 where x > alpha, else q − x / alpha)``, and negative x gives 0
    to both, as in the authors' code for ImageNet. That for CIFAR-10 has no mask below 0 and relies on a ReLU before.

    ``alpha`` starts at 8 (6 with ``"imagenet"``) for 4 bits and more, and at ``(2^b − 1) / 15`` times that for 2 and 3
    bits; the authors start these from the network with one bit more. From 8, 2 bits would turn everything up to 1 into
    0, which is everything after a Hardtanh. It is clamped to 2^-20 or more after each optimizer step. The authors
    train it with a learning rate of 0.1 (CIFAR-10) and a weight decay of 1e-4, in its own group.

    Args:
        input_bits: 2 to 5.
        variant: ``"cifar"`` or ``"imagenet"``, which differ in where ``alpha`` starts.

    Raises:
        ValueError: ``input_bits`` out of range, ``variant`` neither of the two, or alpha in a checkpoint not positive.
    """

    roles = ("input",)
    is_unsigned = True

    def __init__(self, input_bits: int = 4, variant: Variant = "cifar") -> None:
        super().__init__()
        self.bits = check_bits("input_bits", input_bits, 2, 5, "APoT")
        check_choice("variant", variant, "cifar", "imagenet")
        self.grid = levels(input_bits)
        self.variant = variant
        start = 8.0 if variant == "cifar" else 6.0
        self.alpha = learned(min(start, start * (2**self.bits - 1) / 15))

    def whole(self, x: Tensor, *tensors: Tensor) -> Whole:
        multiples, step = self._multiples(wide(x), *tensors)
        return Whole(project(multiples.clamp(min=0), self.grid), step)

    @property
    def coding(self) -> Coding:
        return Coding(len(self.grid), table=self.grid)

    def backward(self, grad: Tensor, x: Tensor, *tensors: Tensor) -> tuple[Tensor | None, ...]:
        multiples, _ = self._multiples(wide(x), *tensors)
        wider = grad.to(multiples.dtype) * (multiples >= 0)
        multiples = multiples.clamp(min=0)
        values = project(multiples, self.grid)
        inside = multiples <= self.grid[-1]
        return (wider * inside).to(grad.dtype), self._grad_alpha(wider, multiples, values, inside, *tensors)


@named
def apot(weight_bits: int = 4, input_bits: int | None = 4, variant: Variant = "cifar") -> Scheme:
    """APoT: weights and inputs on sums of powers of two, each on a learned range (arXiv:1909.13144).

    ``input_bits=None`` leaves the input float; otherwise a ReLU should precede the layer, since no level is negative.
    ``variant`` follows the authors' code for CIFAR-10 or for ImageNet.
    """
    input = Identity if input_bits is None else partial(APoTInput, input_bits, variant)
    return Scheme(input=input, weight=partial(APoTWeight, weight_bits, variant))
