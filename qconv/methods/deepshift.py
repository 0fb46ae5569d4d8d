"""DeepShift: power-of-two weights, as rounded weights (Q) or as learned shift and sign (PS) (arXiv:1905.13298)."""

import math
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from ..ground.checks import check_bits, check_choice, check_numbers, check_whole
from ..quantizers.base import MAGNITUDE, Bounds, Codes, Levels, Quantizer, Whole, is_eager_cuda
from ..quantizers.flags import SHARE, flag_of
from ..quantizers.kept_codes import Coding, Passing
from ..quantizers.numbers import set_parameter, wide
from ..quantizers.part import Rule, has_begun
from ..quantizers.rounding import round_log2, round_power_of_two as round_power_of_two
from ..quantizers.stochastic import Stream, uniform
from ..scheme import Factory, Scheme, named

Rounding = Literal["deterministic", "stochastic"]
DIGITS = {torch.float16: 11, torch.bfloat16: 8, torch.float32: 24, torch.float64: 53}
"""The binary digits of a dtype's numbers."""


def _stream(rounding: str) -> Stream | None:
    check_choice("rounding", rounding, "deterministic", "stochastic")
    return Stream(sharded=False) if rounding == "stochastic" else None


class _Powers(Quantizer):
    """The shared part of both forms: signed powers of two, from 2^low to 1, and 0."""

    low: int

    def codes(self, x: Tensor, *tensors: Tensor) -> Codes:
        # Whole multiples of the smallest power, up to 2^-low. With 7 and 8 bits they exceed int64, so they are float64.
        x_q = self.quantize(x, *tensors).double()
        values = torch.ldexp(x_q, torch.tensor(-self.low, device=x.device))
        scale = torch.tensor(2.0**self.low, dtype=torch.float64, device=x.device)
        return Codes(values if self.low < -62 else values.long(), scale)

    def levels(self, *tensors: Tensor) -> Levels:
        return Levels(-(2**-self.low), 2**-self.low, torch.tensor(2.0**self.low, dtype=torch.float64))


class ShiftQ(_Powers, Passing):
    r"""Weights rounded to signed powers of two, DeepShift-Q.

    ``w_q = sign(w) · 2^round(log2 |w|)`` with the exponent in ``[−(2^(b−1) − 1), 0]``: 5 bits allow −15 … 0. A weight
    of exactly ±0 stays 0, ±inf gives ±1, NaN gives NaN. ``dw = g``, straight through rounding, logarithm and sign
    together, with no mask. After each optimizer step |w| is clamped to the range of the powers (the authors do it
    before the forward, with the same result).

    Stochastic rounding takes ``floor(log2 |w| + u)`` with u uniform in [0, 1): inside the range the exponent, not the
    weight, is right on average. It acts only in training; in evaluation the rounding is deterministic. The numbers are
    those of a `Stream`: the same in every process and in a recomputed forward, new ones after each optimizer step.

    Args:
        weight_bits: 2 to 8, the sign included.
        rounding: ``"deterministic"`` or ``"stochastic"``.

    Raises:
        ValueError: ``weight_bits`` out of range, or ``rounding`` is neither of the two.
    """

    def __init__(
        self, weight_bits: int = 5, rounding: Literal["deterministic", "stochastic"] = "deterministic"
    ) -> None:
        super().__init__()
        self.bits = check_bits("weight_bits", weight_bits, 2, 8, "DeepShift-Q")
        self.low = -(2 ** (weight_bits - 1) - 1)
        self.rounding = rounding
        self.stream = _stream(rounding)

    def tensors(self) -> tuple[Tensor, ...]:
        return self.stream.tensors() if self.stream is not None and self.training else ()

    def whole(self, x: Tensor, *tensors: Tensor) -> Whole:
        if self.stream is None or not tensors:
            function = torch.ops.qconv.round_power_of_two if is_eager_cuda(x) else round_power_of_two
            return Whole(function(x, self.low, 0))
        exponent = wide(x).abs().log2() + self.stream.uniform(x, *tensors)
        return Whole(torch.exp2(exponent.floor().clamp(self.low, 0)).to(x.dtype) * x.sign())

    @property
    def coding(self) -> Coding:
        powers = [2.0**exponent for exponent in range(self.low, 1)]
        return Coding(2 * len(powers) + 1, table=(*(-power for power in powers[::-1]), 0.0, *powers))

    @property
    def bounds(self) -> Bounds:
        return {MAGNITUDE: (2.0**self.low, 1.0)}


class ShiftPS(_Powers):
    r"""Weights as a learned shift and a learned sign, DeepShift-PS.

    ``w_q = 2^round(shift) · sign(round(s))``, with the shift in ``[−(2^(b−1) − 2), 0]`` (5 bits: −14 … 0; 2 bits:
    ternary); the sign is ternary because ``round(s) = 0`` for ``|s| ≤ ½``. ``dshift = g · w_q · ln 2``; ``ds = g``, not
    multiplied by ``2^shift`` (as in the authors' code). The weight itself is only the start: it receives no gradient,
    and it sets ``shift = round(log2 |w|)`` and ``s = sign(w)``, from which the authors train (their
    ``reset_parameters`` is never used). After each optimizer step the shift is clamped to its range.

    Stochastic rounding, as in the authors' code, applies to both shift and s: ``floor(shift + u)`` and ``floor(s +
    v)``, u and v uniform in [0, 1) and independent. It acts only in training; in evaluation the rounding is
    deterministic. The numbers are those of a `Stream`: the same in every process and in a recomputed forward, new ones
    after each optimizer step.

    The mean of a random sign is s itself, so a network learns values that its rounded weights do not have, and its
    batch norms learn their statistics: evaluated with rounded weights it may be much worse than in training. So
    `set_progress_` makes the rounding deterministic from `random_until` on (the authors round at random to the end, and
    in evaluation too). Without a call of `qconv.set_progress` it stays random, and batch norms should be estimated
    anew.

    Args:
        weight_bits: 2 to 8, the sign included.
        rounding: ``"deterministic"`` or ``"stochastic"``.
        random_until: the progress at which stochastic rounding ends; 1 for never.

    Raises:
        ValueError: ``weight_bits`` or ``random_until`` out of range, or ``rounding`` is neither of the two.
    """

    replaces_weight = True
    roles = ("weight",)
    shift: nn.Parameter
    sign: nn.Parameter
    is_random: Tensor | None

    def __init__(
        self,
        weight_bits: int = 5,
        rounding: Literal["deterministic", "stochastic"] = "deterministic",
        random_until: float = 0.8,
    ) -> None:
        super().__init__()
        self.bits = check_bits("weight_bits", weight_bits, 2, 8, "DeepShift-PS")
        check_numbers(random_until=random_until)
        if not 0 <= random_until <= 1:
            raise ValueError(f"random_until (={random_until}) must be from 0 to 1")
        self.low = -(2 ** (weight_bits - 1) - 2)
        self.rounding = rounding
        self.random_until = random_until
        self.stream = _stream(rounding)
        self.register_buffer("is_random", None if self.stream is None else flag_of(True))
        self.register_parameter("shift", None)
        self.register_parameter("sign", None)

    def initialize(self, x: Tensor) -> None:
        with torch.no_grad():
            shift = round_log2(x, self.low, 0)
            sign = x.sign()
        self.shift, self.sign = set_parameter(self.shift, shift), set_parameter(self.sign, sign)

    def tensors(self) -> tuple[Tensor, ...]:
        if self.stream is None or self.is_random is None or not self.training:
            return self.shift, self.sign
        return self.shift, self.sign, *self.stream.tensors(), self.is_random

    def whole(self, x: Tensor, *tensors: Tensor) -> Whole:
        shift, sign, *random = tensors
        rounded = torch.exp2(shift.round().clamp(self.low, 0)) * sign.round().sign()
        if self.stream is None or not random:
            return Whole(rounded)
        key, step, is_random = random
        exponent = (wide(shift) + self.stream.uniform(shift, key, step)).floor().clamp(self.low, 0)
        noise = uniform(sign.shape, key, step, sign.device, len(sign))  # the numbers that follow those of the shift
        drawn = torch.exp2(exponent).to(shift.dtype) * (wide(sign) + noise).floor().sign().to(sign.dtype)
        return Whole(torch.where(is_random > 0, drawn, rounded))

    def backward(self, grad: Tensor, x: Tensor, *tensors: Tensor) -> tuple[Tensor | None, ...]:
        return None, grad * self.quantize(x, *tensors) * math.log(2), grad, *(None,) * (len(tensors) - 2)

    @property
    def bounds(self) -> Bounds:
        return {"shift": (self.low, 0)}

    def rules(self) -> dict[str, Rule]:
        return {"is_random": SHARE}

    def set_progress_(self, progress: float, x: Tensor | None) -> None:
        if self.is_random is not None:
            self.is_random.fill_(float(self.random_until == 1 or not has_begun(self.random_until, progress)))


class FixedPoint(Passing):
    r"""Fixed-point activations of DeepShift: ``integer_bits`` before and ``fraction_bits`` after the point.

    ``x_q = clamp(floor(x · 2^f) / 2^f, −2^(i−1), 2^(i−1) − 2^−f)``, the numbers of i + f bits in two's complement; NaN
    gives NaN; ``dx = g``, with no mask. A dtype without the largest of them ends at its own largest below it. The
    authors use 16.16, which float32 barely notices, and round the biases in the same way; here the bias stays float.

    Args:
        integer_bits: 1 or more, the sign included.
        fraction_bits: 0 or more.
        bound: ``"exact"``, or ``"code"``: the largest is 2^(i−1) − 1, as in the authors' code.

    Raises:
        ValueError: a count that is not a whole number or out of range, or more than 32 bits in total; ``bound`` is
            neither of the two.
    """

    def __init__(
        self, integer_bits: int = 16, fraction_bits: int = 16, bound: Literal["exact", "code"] = "exact"
    ) -> None:
        super().__init__()
        check_choice("bound", bound, "exact", "code")
        integer_bits = check_whole("integer_bits", integer_bits)
        fraction_bits = check_whole("fraction_bits", fraction_bits)
        if integer_bits < 1:
            raise ValueError(f"integer_bits (={integer_bits}) must be at least 1: one bit is the sign")
        if fraction_bits < 0:
            raise ValueError(f"fraction_bits (={fraction_bits}) must not be negative")
        if integer_bits + fraction_bits > 32:
            raise ValueError(f"integer_bits + fraction_bits (={integer_bits + fraction_bits}) must be at most 32")
        self.integer_bits = integer_bits
        self.fraction_bits = fraction_bits
        self.bits = integer_bits + fraction_bits
        self.bound = bound

    @property
    def _ends(self) -> tuple[int, int]:
        """The first and the last code."""
        half = 2 ** (int(self.bits) - 1)
        return -half, half - (1 if self.bound == "exact" else 2**self.fraction_bits)

    def whole(self, x: Tensor, *tensors: Tensor) -> Whole:
        step = 2.0**-self.fraction_bits
        values = x.float() if x.dtype == torch.float16 else x  # x / step leaves the range of float16
        low, high = (_towards_zero(end, x.dtype) * step for end in self._ends)
        return Whole((torch.floor(values / step) * step).clamp(low, high).to(x.dtype))

    @property
    def coding(self) -> Coding:
        low, high = self._ends
        return Coding(high - low + 1, low * 2.0**-self.fraction_bits, 2.0**-self.fraction_bits)

    def levels(self, *tensors: Tensor) -> Levels:
        return Levels(*self._ends, torch.tensor(2.0**-self.fraction_bits, dtype=torch.float64))

    def codes(self, x: Tensor, *tensors: Tensor) -> Codes:
        scale = 2.0**-self.fraction_bits
        values = (self.quantize(x).double() / scale).long()
        return Codes(values, torch.tensor(scale, dtype=torch.float64, device=x.device))


def _towards_zero(code: int, dtype: torch.dtype) -> int:
    """Return the nearest whole number to the code, towards zero, that the dtype represents."""
    too_long = max(abs(code).bit_length() - DIGITS[dtype], 0)
    return (abs(code) >> too_long << too_long) * (-1 if code < 0 else 1)


@named
def shift_q(
    weight_bits: int = 5, fixed_point: tuple[int, int] | None = None, rounding: Rounding = "deterministic"
) -> Scheme:
    """DeepShift-Q: weights rounded to powers of two (arXiv:1905.13298).

    ``fixed_point=(integer_bits, fraction_bits)`` also puts the input in fixed point; the authors use (16, 16).
    ``rounding="stochastic"`` rounds the exponent at random in training.
    """
    return _scheme(partial(ShiftQ, weight_bits, rounding), rounding, fixed_point)


@named
def shift_ps(
    weight_bits: int = 5,
    fixed_point: tuple[int, int] | None = None,
    rounding: Rounding = "deterministic",
    random_until: float = 0.8,
) -> Scheme:
    """DeepShift-PS: weights as a learned shift and a learned sign (arXiv:1905.13298).

    The authors give shift and sign no weight decay and add ``wd · ½ · Σ (2^shift)²`` to the loss; here the optimizer's
    decay acts on them unless they are put in their own group.

    ``fixed_point=(integer_bits, fraction_bits)`` also puts the input in fixed point; the authors use (16, 16).
    ``rounding="stochastic"`` rounds shift and sign at random in training, up to the progress ``random_until``: a
    network trained with random signs to the end is worse when evaluated with rounded ones.
    """
    return _scheme(partial(ShiftPS, weight_bits, rounding, random_until=random_until), rounding, fixed_point)


def _scheme(weight: Factory, rounding: Rounding, fixed_point: tuple[int, int] | None) -> Scheme:
    check_choice("rounding", rounding, "deterministic", "stochastic")  # a made quantizer would draw a random key
    if fixed_point is None:
        return Scheme(weight=weight)
    try:
        integer_bits, fraction_bits = fixed_point
    except (TypeError, ValueError) as error:
        raise ValueError(f"fixed_point (={fixed_point!r}) must be (integer_bits, fraction_bits)") from error
    return Scheme(input=partial(FixedPoint, integer_bits, fraction_bits), weight=weight)
