"""DSQ: rounding with the slope of a tanh in each interval as gradient (Gong et al., arXiv:1908.05033)."""

from functools import partial

import torch
from torch import Tensor, nn

from ..ground.checks import check_bits, check_numbers
from ..quantizers.base import Bounds, Codes, Levels
from ..quantizers.from_data import FromData
from ..quantizers.kept_codes import Coding
from ..quantizers.learned_range import LearnedRange
from ..quantizers.numbers import learned, scalars, set_parameter, wide
from ..quantizers.observers import Extremes
from ..quantizers.part import Rule
from ..scheme import Scheme, named, of_input

ALPHA_RANGE = 1e-3, 0.5
"""The range to which `after_step_` clamps alpha."""


class _DSQ(LearnedRange):
    """The shared part of weights and inputs: the learned range and alpha."""

    alpha: nn.Parameter

    def __init__(self, bits: int = 4, alpha: float = 0.2) -> None:
        super().__init__()
        self.bits = self._bits = check_bits("bits", bits)
        check_numbers(alpha=alpha)
        if not ALPHA_RANGE[0] <= alpha <= ALPHA_RANGE[1]:
            raise ValueError(f"alpha (={alpha}) must be from {ALPHA_RANGE[0]} to {ALPHA_RANGE[1]}")
        self.first_alpha = alpha
        self.alpha = learned(float(alpha))

    def tensors(self) -> tuple[Tensor, ...]:
        return scalars(self.lower, self.upper, self.alpha)

    def quantize(self, x: Tensor, *tensors: Tensor) -> Tensor:
        wide_x = wide(x)
        lower, upper, _ = (tensor.to(wide_x.dtype) for tensor in tensors)
        _, _, values, step = self._position(wide_x, lower, upper)
        return (values * step + lower).to(x.dtype)

    def codes(self, x: Tensor, *tensors: Tensor) -> Codes:
        wide_x = wide(x)
        lower, upper, _ = (tensor.to(wide_x.dtype) for tensor in tensors)
        _, _, values, step = self._position(wide_x, lower, upper)
        return Codes(values.to(torch.int16), step, offset=lower)

    @property
    def coding(self) -> Coding:
        return Coding(2**self._bits)

    def levels(self, *tensors: Tensor) -> Levels:
        lower, upper, _ = (wide(tensor) for tensor in tensors)
        count = 2**self._bits - 1
        return Levels(0, count, (upper - lower) / count, offset=lower)

    def backward(self, grad: Tensor, x: Tensor, *tensors: Tensor) -> tuple[Tensor | None, ...]:
        wide_x = wide(x)
        lower, upper, alpha = (tensor.to(wide_x.dtype) for tensor in tensors)
        position, offset, values, step = self._position(wide_x, lower, upper)
        inside = (wide_x >= lower) & (wide_x <= upper)
        steepness, height = (2 / alpha - 1).log(), 1 / (1 - alpha)
        tanh = (offset * steepness).tanh_()
        square = 1 - tanh.square()
        slope = square * (height * steepness / 2) * inside
        grad_upper = (grad * (values - position * slope)).sum() / (2**self._bits - 1)
        grad_lower = (grad * (1 - slope)).sum() - grad_upper
        phi_of_alpha = tanh * height.square() - square * offset * (2 * height / (alpha * (2 - alpha)))
        grad_alpha = (grad * phi_of_alpha * inside).sum() * step / 2
        grads = grad_lower, grad_upper, grad_alpha
        return (grad * slope).to(x.dtype), *(g.to(tensor.dtype) for g, tensor in zip(grads, tensors, strict=True))

    @property
    def bounds(self) -> Bounds:
        return {"alpha": ALPHA_RANGE}

    def _position(self, x: Tensor, lower: Tensor, upper: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The position of x in steps of the range; its distance from its interval's middle; its level; the step."""
        count = 2**self._bits - 1
        step = (upper - lower) / count
        position = ((x - lower) / torch.where(step > 0, step, 1.0)).clamp_(0, count)
        interval = position.floor().clamp_(max=count - 1)
        offset = position - interval - 0.5
        return position, offset, interval + (offset >= 0), step

    def rules(self) -> dict[str, Rule]:
        return {"alpha": (lambda alpha: (alpha > 0) & (alpha < 1), "must be above 0 and below 1")}


class DSQWeight(_DSQ):
    r"""Weights of DSQ: hard levels forward, the slope of a tanh in each interval backward, all of it learned.

    With the learned range [l, u] of the layer, ``n = 2^b − 1`` and ``step = (u − l) / n``: ``x_q = l + step · (i +
    (sign(φ) + 1) / 2)``, i the interval of ``clamp(x, l, u)``, ``φ = s · tanh(k · (x − m_i))``, m_i its middle,
    ``s = 1 / (1 − alpha)``, ``k = ln(2 / alpha − 1) / step``; with ``sign(0) = +1`` it is rounding to the nearest
    level, half up. A small alpha makes φ nearly the sign.

    In the backward the sign is straight through, i a constant, and all else is differentiated. With ``z = (x − l) /
    step``, the level ``q = (x_q − l) / step`` and ``slope = s · k · step / 2 · (1 − tanh²)`` for ``l ≤ x ≤ u``, both
    ends included, and 0 outside: ``dx = g · slope``; ``du = Σ g · (q − z · slope) / n``, z clamped to 0 … n; ``dl = Σ g
    · (1 − slope) − du``; ``dalpha = step / 2 · Σ g · dφ/dalpha`` inside, with ``dφ/dalpha = s² · tanh − s · (1 − tanh²)
    · (z − i − ½) · 2 / (alpha · (2 − alpha))``.

    The paper learns range and alpha with the network, and asks for alpha below ½. Here l and u start at the smallest
    and the largest weight and alpha at 0.2, one number each per layer. After each optimizer step alpha is in [0.001,
    0.5] and u at least ``l + 2^-20`` (as far as its dtype can represent it). Re-implementations evaluate with running
    averages of l and u; here l and u themselves are used. Latent weights are not clipped. 0 need not be a level.

    A constant or single weight, even 0, is left as it is: at first l = u = w, and a range of 0 gives l. ±inf gives the
    end levels if the range was set before. NaN gives NaN, and makes the gradients of l, u and alpha NaN.

    Args:
        bits: 1 to 8.
        alpha: the first alpha, 0.001 to 0.5.

    Raises:
        ValueError: ``bits`` or ``alpha`` out of range; a checkpoint with ``l > u`` or an alpha outside (0, 1).
    """

    roles = ("weight",)

    def initialize(self, x: Tensor) -> None:
        low, high = x.detach().aminmax() if x.numel() else (x.new_zeros(()), x.new_zeros(()))
        self.lower = set_parameter(self.lower, low.view(1))
        self.upper = set_parameter(self.upper, high.view(1))
        self.alpha = set_parameter(self.alpha, x.new_tensor([self.first_alpha]))


class DSQInput(FromData[Extremes], _DSQ):
    r"""Inputs of DSQ: as `DSQWeight`, with the range from the first inputs.

    l and u start at the smallest and the largest input of the first training batch or of `qconv.calibrate` (until then
    −1 and 1) and are then learned, as is alpha. Inputs that are all equal set no range; it waits for the next batch.

    Arguments and errors are those of `DSQWeight`.
    """

    roles = ("input",)

    def __init__(self, bits: int = 4, alpha: float = 0.2) -> None:
        super().__init__(bits, alpha)
        self.calibrated = False

    def new_observer(self) -> Extremes:
        return Extremes()

    def start(self, observer: Extremes) -> bool:
        self.lower.copy_(observer.lows[0])
        self.upper.copy_(observer.highs[0])
        return True


@named
def dsq(weight_bits: int = 4, input_bits: int | None = 4, alpha: float = 0.2) -> Scheme:
    """DSQ: rounding with the slope of a tanh, its steepness and both ranges learned (arXiv:1908.05033).

    ``input_bits=None`` leaves the input float. The input's range comes from the first training batch or `calibrate`.
    """
    check_bits("weight_bits", weight_bits, method="dsq")
    input = of_input(DSQInput, input_bits, alpha, method="dsq")
    return Scheme(input=input, weight=partial(DSQWeight, weight_bits, alpha))
