"""EWGS: rounding with a gradient scaled by the distance from the level (Lee et al., arXiv:2104.00903)."""

import math
from functools import partial

import torch
from torch import Tensor, nn

from ..ground.checks import check_bits, check_numbers
from ..quantizers.base import Levels, Whole
from ..quantizers.from_data import FromData
from ..quantizers.kept_codes import Coding
from ..quantizers.learned_range import LearnedRange
from ..quantizers.numbers import SMALLEST, learned, scalars, set_parameter, wide
from ..quantizers.observers import Values
from ..quantizers.part import Rule
from ..scheme import Scheme, named, of_input

DEVIATIONS = 3
"""The first ranges end so many standard deviations from 0."""
MOST_VALUES = 2**20
"""The number of inputs from which the first range is taken."""


NOT_NEGATIVE: Rule = (
    lambda value: (value >= 0) & value.isfinite(),
    "must be at least 0 and finite",
)


class EWGS(LearnedRange):
    """The shared part of weights and inputs: the gradient of the rounding in the range.

    Attributes:
        first_delta: the δ of the constructor.
        delta: the present one, which `qconv.set_ewgs_deltas` takes from the Hessian.
    """

    training_only = ("delta",)
    delta: Tensor

    def __init__(self, bits: int, delta: float) -> None:
        super().__init__()
        self.bits = check_bits("bits", bits)
        self.count = 2**bits - 1
        check_numbers(delta=delta)
        if not 0 <= delta < 1:
            raise ValueError(
                f"delta (={delta}) must be at least 0 and below 1: beyond, gradients could change their sign"
            )
        self.first_delta = delta
        self.register_buffer("delta", torch.tensor(float(delta)))

    def position_of(self, x: Tensor, lower: Tensor, upper: Tensor, *others: Tensor) -> Tensor:
        """Return the place of ``x`` in the range, from 0 at its lower end to 1 at the upper one; beyond too."""
        del others
        return (x - lower) / (upper - lower).clamp(min=SMALLEST)  # NaN stays

    def codes_of(self, x: Tensor, lower: Tensor, upper: Tensor) -> Tensor:
        """Return whole numbers from 0 to n."""
        return (self.position_of(x, lower, upper).clamp_(0, 1) * self.count).round_()

    def rounded(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rounded position q in [0, 1], and the distance p − q from it."""
        inside = position.clamp(0, 1)
        q = (inside * self.count).round_() / self.count
        return q, inside - q

    def values_of(self, q: Tensor, *tensors: Tensor) -> Tensor:
        """Return the quantized values at the rounded positions ``q``; ``tensors`` is the result of `tensors`."""
        raise NotImplementedError

    def grad_of_rounding(
        self, grad: Tensor, x: Tensor, lower: Tensor, upper: Tensor, delta: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of ``x``, ``lower`` and ``upper`` from the rounded position's in [0, 1]."""
        position = self.position_of(x, lower, upper)
        _, distance = self.rounded(position)
        inside = (position >= 0) & (position <= 1)
        grad = (grad + grad.abs() * distance * delta) * inside / (upper - lower).clamp(min=SMALLEST)
        return grad, (grad * (position - 1)).sum(), -(grad * position).sum()

    def rules(self) -> dict[str, Rule]:
        return {**super().rules(), "delta": NOT_NEGATIVE}


class EWGSWeight(EWGS):
    r"""Weights of EWGS: evenly spaced levels in a learned range, times a learned scale.

    ``n = 2^b − 1``, ``z = (w − l) / (u − l)``, ``p = clamp(z, 0, 1)``, ``q = round(n p) / n``, half to even; ``w_q =
    s · (2q − 1)``. The learned l, u and s are one number each for the layer.

    With ``h = 2 s g``, the gradient of q, element-wise gradient scaling is ``h' = h + δ |h| (p − q)`` where ``0 ≤ z ≤
    1``, and 0 elsewhere: a gradient whose step takes a value towards its level grows, and one that takes it away
    shrinks, as the gradient at p instead of q does on a slope that bends upwards. ``dw = h' / (u − l)``, ``du = −Σ h' z
    / (u − l)``, ``dl = Σ h' (z − 1) / (u − l)``, ``ds = Σ g (2q − 1)``. δ = 0 is straight through. Latent weights are
    not clipped.

    l and u start at ∓3 standard deviations of the weights, at ∓max |w| if these are all equal. s takes the place of the
    factor of a layer's output in the authors' code, and starts where ``mean |w_q| = mean |w|``. The paper sets δ anew
    every 10 epochs from the trace of the Hessian (`qconv.set_ewgs_deltas`); a fixed one of 1e-3 is its simpler form.

    After each optimizer step u is at least ``l + 2^-20``, or the number above l in its dtype, and s at least 2^-20.
    Weights that are all equal give themselves at first, but for zeros, which give ``2^-20 / n``. A NaN gives NaN; ±inf
    gives the end levels. Both make the gradients of l and u NaN, and NaN also the gradient of s.

    Args:
        bits: 1 to 8.
        delta: the first δ.

    Raises:
        ValueError: ``bits`` out of range, or not ``0 <= delta < 1``; a checkpoint with ``l > u``, ``s <= 0`` or δ < 0.
    """

    roles = ("weight",)
    kept = ("lower", "upper", "scale")
    learned_scales = ("scale",)
    scale: nn.Parameter

    def __init__(self, bits: int = 4, delta: float = 1e-3) -> None:
        super().__init__(bits, delta)
        self.scale = learned(1.0)

    def tensors(self) -> tuple[Tensor, ...]:
        return *scalars(self.lower, self.upper, self.scale), self.delta

    def values_of(self, q: Tensor, *tensors: Tensor) -> Tensor:
        return (2 * q - 1) * tensors[2]

    def initialize(self, x: Tensor) -> None:
        wide_x = wide(x.detach())
        end = wide_x.std() * DEVIATIONS if x.numel() > 1 else wide_x.new_zeros(())
        if x.numel():  # where they are equal, their magnitude
            end = torch.where(end > 0, end, wide_x.abs().max())
        upper = torch.where(end > 0, end, 1.0).to(x.dtype).view(1)
        self.lower, self.upper = set_parameter(self.lower, -upper), set_parameter(self.upper, upper)
        if not x.numel():
            self.scale = set_parameter(self.scale, x.new_ones(1))
            return
        values = self.whole(x, self.lower.detach(), self.upper.detach(), x.new_ones(1), self.delta).values
        scale = wide_x.abs().mean() * self.count / values.abs().mean()
        self.scale = set_parameter(self.scale, scale.clamp(min=SMALLEST).to(x.dtype).view(1))

    def whole(self, x: Tensor, *tensors: Tensor) -> Whole:
        wide_x = wide(x)
        lower, upper, scale, _ = (tensor.to(wide_x.dtype) for tensor in tensors)
        values = self.codes_of(wide_x, lower, upper).mul_(2).sub_(self.count)
        return Whole(values.to(x.dtype), scale / self.count)

    @property
    def coding(self) -> Coding:
        return Coding(self.count + 1, -self.count, 2)

    def levels(self, *tensors: Tensor) -> Levels:
        return Levels(-self.count, self.count, wide(tensors[2]) / self.count)

    def backward(self, grad: Tensor, x: Tensor, *tensors: Tensor) -> tuple[Tensor | None, ...]:
        wide_x = wide(x)
        lower, upper, scale, delta = (tensor.to(wide_x.dtype) for tensor in tensors)
        values, wide_grad = self.whole(wide_x, *tensors).values / self.count, wide(grad)
        grad_x, *of_ends = self.grad_of_rounding(wide_grad * (2 * scale), wide_x, lower, upper, delta)
        grads = *of_ends, (wide_grad * values).sum()
        of_learned = (g.view_as(t).to(t.dtype) for g, t in zip(grads, tensors[:3], strict=True))
        return grad_x.to(x.dtype), *of_learned, None


class EWGSInput(FromData[Values], EWGS):
    r"""Inputs of EWGS: as `EWGSWeight`, with levels from 0 on.

    ``x_q = k · q`` with q as there, and k a constant. ``h = k g`` is the gradient of q; dx, dl and du follow from it as
    there. In the authors' code k is 1, and a learned factor of the layer's output makes up for it; here that is the
    scale of the weight, and k, the width of the first range, keeps the magnitude of the inputs.

    l starts at the smallest input of the first training batch or of `qconv.calibrate`, u at ``3 σ / sqrt(1 − 2/π)``:
    three deviations of the normal distribution whose positive half the inputs would be. Where that is no more than l,
    as with inputs far above 0, u starts at the largest input. Until then they are −1 and 1. l need not be 0, but the
    lowest level always is: what lies below l counts as 0. Inputs that are all equal set no range; it waits for the next
    batch. NaN and ±inf are as for `EWGSWeight`.

    Arguments and errors are those of `EWGSWeight`; k takes the place of s.
    """

    roles = ("input",)
    kept = ("lower", "upper", "width")
    learned_scales = ("width",)
    width: Tensor

    def __init__(self, bits: int = 4, delta: float = 1e-3) -> None:
        super().__init__(bits, delta)
        self.calibrated = False
        self.register_buffer("width", torch.tensor(2.0))

    def tensors(self) -> tuple[Tensor, ...]:
        return *scalars(self.lower, self.upper), self.width, self.delta

    def values_of(self, q: Tensor, *tensors: Tensor) -> Tensor:
        return q * tensors[2]

    def new_observer(self) -> Values:
        return Values(MOST_VALUES)

    def start(self, observer: Values) -> bool:
        values = wide(observer.kept)
        (lower, highest), upper = values.aminmax(), values.std() * (DEVIATIONS / math.sqrt(1 - 2 / math.pi))
        if not upper > lower:
            upper = highest
        self.lower.copy_(lower)
        self.upper.copy_(upper)
        self.width.copy_(upper - lower)
        return True

    def whole(self, x: Tensor, *tensors: Tensor) -> Whole:
        wide_x = wide(x)
        lower, upper, width, _ = (tensor.to(wide_x.dtype) for tensor in tensors)
        return Whole(self.codes_of(wide_x, lower, upper).to(x.dtype), width / self.count)

    @property
    def coding(self) -> Coding:
        return Coding(self.count + 1)

    def levels(self, *tensors: Tensor) -> Levels:
        return Levels(0, self.count, wide(tensors[2]) / self.count)

    def backward(self, grad: Tensor, x: Tensor, *tensors: Tensor) -> tuple[Tensor | None, ...]:
        wide_x = wide(x)
        lower, upper, width, delta = (tensor.to(wide_x.dtype) for tensor in tensors)
        grads = self.grad_of_rounding(wide(grad) * width, wide_x, lower, upper, delta)
        of_ends = (g.view_as(t).to(t.dtype) for g, t in zip(grads[1:], tensors[:2], strict=True))
        return grads[0].to(x.dtype), *of_ends, None, None


@named
def ewgs(weight_bits: int = 4, input_bits: int | None = 4, delta: float = 1e-3) -> Scheme:
    """EWGS: learned ranges, and gradients that depend on the distance from the level (arXiv:2104.00903).

    ``delta`` is as in `qconv.methods.ewgs.EWGSWeight`. ``input_bits=None`` leaves the input float. The input's range
    comes from the first training batch or `calibrate`.

    Raises:
        ValueError: ``weight_bits`` or ``input_bits`` is not from 1 to 8, or not ``0 <= delta < 1``.
    """
    check_bits("weight_bits", weight_bits, method="ewgs")
    input = of_input(EWGSInput, input_bits, delta, method="ewgs")
    return Scheme(input=input, weight=partial(EWGSWeight, weight_bits, delta))
