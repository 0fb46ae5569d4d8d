"""LSQ+: a learned step and a learned offset, for inputs with negative values (arXiv:2004.09576)."""

from functools import partial

import torch
from torch import Tensor

from ..ground.checks import check_bits, check_choice
from ..quantizers.base import Codes, Levels
from ..quantizers.codes import integer_dtype
from ..quantizers.from_data import FromData
from ..quantizers.kept_codes import Coded, Coding
from ..quantizers.numbers import SMALLEST, learned, positive, scalars, wide
from ..quantizers.observers import Values
from ..scheme import Scheme, named, of_input
from .lsq import LSQ, GradScale, clamp_step, features, round_levels

MOST_VALUES = 2**14
"""The number of data values that `LSQPlusInput` looks at."""


class LSQPlus(LSQ):
    r"""Weights of LSQ+: `LSQ` with another initial step, without an offset.

    s starts at ``max(|mu − 3 sigma|, |mu + 3 sigma|) / 2^(b−1)``, with the mean mu and the standard deviation sigma
    (divided by n) of the layer or of each filter; with one bit at ``mean |w|``. All else is as in `LSQ`. The levels of
    a constant or single weight end at w if it is negative, and at ``w · (1 − 2^(1−b))`` if it is positive.
    """

    def first_step(self, x: Tensor) -> Tensor:
        if self.bits == 1 or not x.numel():
            return super().first_step(x)
        sigma, mu = torch.std_mean(self.sharing(x), dim=1, correction=0)
        return (mu.abs() + 3 * sigma) / 2 ** (self.bits - 1)


class LSQPlusInput(FromData[Values], Coded):
    r"""Activations of LSQ+: a learned step s and a learned offset beta, for inputs that may be negative.

    ``x_q = s · round(clamp(z, 0, Q_p)) + beta`` with ``z = (x − beta) / s`` and ``Q_p = 2^b − 1``, half to even. With
    ``c = 1 / √(N · Q_p)``, N as in `LSQInput`:

    - ``dx = g · 1[0 ≤ z ≤ Q_p]``, the limits included;
    - ``ds = c · Σ g · (0 where z < 0; Q_p where z > Q_p; round(z) − z between)``, so 0 at both limits;
    - ``dbeta = c · Σ g · 1[z < 0 or z > Q_p]``.

    s and beta start where the squared error of the first training batch (or of `qconv.calibrate`) is least among ranges
    ``[mu − a · (mu − min x), mu + b · (max x − mu)]``, which beta and the top level span; a and b take the values 1/16,
    2/16, … 1, and mu is the mean. Of more than 2^14 values, 2^14 evenly spaced ones are used, without random numbers.
    It waits through a batch of equal values. Before that, s = 1 and beta = 0. After each optimizer step s is at least
    2^-20.

    0 is not a level unless beta is a multiple of s: zero padding then adds another value. ±inf gives the end levels;
    NaN gives NaN, no gradient to x, and a NaN in ds.

    Args:
        bits: 1 to 16.
        grad_scale: ``"paper"`` or ``"numel"``.

    Raises:
        ValueError: ``bits`` or ``grad_scale`` out of range, or a step that is not positive in a checkpoint.
    """

    roles = ("input",)
    learned_scales = ("step",)

    def __init__(self, bits: int = 4, grad_scale: GradScale = "paper") -> None:
        super().__init__()
        self.bits = check_bits("bits", bits, 1, 16)
        check_choice("grad_scale", grad_scale, "paper", "numel")
        self.grad_scale: GradScale = grad_scale
        self.high = 2**self.bits - 1
        self.calibrated = False
        self.step = learned(1.0)
        self.beta = learned(0.0)

    def tensors(self) -> tuple[Tensor, ...]:
        return scalars(self.step, self.beta)

    def new_observer(self) -> Values:
        return Values(MOST_VALUES)

    def start(self, observer: Values) -> bool:
        step, beta = least_squares_range(observer.kept, self.high)
        if not step > 0:
            return False
        self.beta.copy_(beta)
        self.step.copy_(clamp_step(step, self.step.dtype))
        return True

    def quantize(self, x: Tensor, *tensors: Tensor) -> Tensor:
        values, step, beta = self._levels(x, *tensors)
        return (values * step + beta).to(x.dtype)

    def backward(self, grad: Tensor, x: Tensor, *tensors: Tensor) -> tuple[Tensor | None, ...]:
        wide_x = wide(x)
        step, beta = positive(tensors[0]).to(wide_x.dtype), tensors[1].to(wide_x.dtype)
        z = (wide_x - beta) / step
        clamped = z.clamp(0, self.high)
        passes = clamped == z
        wide_grad = grad.to(wide_x.dtype)
        scale = (max(features(x) if self.grad_scale == "paper" else x.numel(), 1) * self.high) ** -0.5
        grad_step = (wide_grad * (clamped.round() - clamped * passes)).sum() * scale
        grad_beta = (wide_grad * ~passes).sum() * scale
        return grad * passes, grad_step.to(tensors[0].dtype), grad_beta.to(tensors[1].dtype)

    def codes(self, x: Tensor, *tensors: Tensor) -> Codes:
        values, step, beta = self._levels(x, *tensors)
        return Codes(values.to(integer_dtype(self.bits)), step, offset=beta)

    def _levels(self, x: Tensor, step: Tensor, beta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Whole numbers from 0 to Q_p, the step and the offset."""
        wide_x = wide(x)
        step, beta = positive(step).to(wide_x.dtype), beta.to(wide_x.dtype)
        return round_levels((wide_x - beta) / step, 0, self.high), step, beta

    @property
    def coding(self) -> Coding:
        return Coding(self.high + 1)

    def levels(self, *tensors: Tensor) -> Levels:
        step, beta = tensors
        return Levels(0, self.high, wide(positive(step)), offset=wide(beta))


def least_squares_range(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return step and lowest level of the ``count + 1`` levels nearest to ``x``, searched on `LSQPlusInput`'s grid."""
    values = wide(x)
    mean, low, high = values.mean(), values.amin(), values.amax()
    parts = torch.arange(16, 0, -1, dtype=values.dtype, device=values.device) / 16
    lowest, highest = torch.meshgrid(
        low + (mean - low) * (1 - parts), high - (high - mean) * (1 - parts), indexing="ij"
    )
    lowest = lowest.reshape(-1, 1)
    steps = (highest.reshape(-1, 1) - lowest) / count
    z = (values - lowest) / steps.clamp(min=SMALLEST)
    errors = (round_levels(z, 0, count) * steps + lowest - values).square_().mean(1)
    best = errors.argmin()
    return steps[best, 0], lowest[best, 0]


@named
def lsq_plus(
    weight_bits: int = 4,
    input_bits: int | None = 4,
    per_channel: bool = False,
    grad_scale: GradScale = "paper",
) -> Scheme:
    """LSQ+: learned step and offset for inputs with negative values, learned steps for weights (arXiv:2004.09576).

    ``input_bits=None`` leaves the input float; ``per_channel`` gives each filter a step. Step and offset of the input
    start from the first training batch.
    """
    check_bits("weight_bits", weight_bits)
    return Scheme(
        input=of_input(LSQPlusInput, input_bits, grad_scale, high=16),
        weight=partial(LSQPlus, weight_bits, per_channel, grad_scale),
    )
