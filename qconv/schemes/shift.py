"""Schemes with ternary and power-of-two weights."""

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

from ..quantizers import FixedPoint, Identity, ShiftPS, ShiftQ
from ..quantizers.apot import APoTInput, APoTWeight, Variant
from ..quantizers.inq import INQ
from ..quantizers.ttq import TTQ
from ..quantizers.twn import TWN
from .scheme import Scheme, written

Rounding = Literal["deterministic", "stochastic"]


def twn(threshold: float = 0.7, per_channel: bool = True) -> Scheme:
    """TWN: weights ``{−alpha, 0, alpha}``, threshold and alpha from the mean magnitude (arXiv:1605.04711).

    ``per_channel=False`` takes both over the layer, as the authors' Caffe code does.
    """
    TWN(threshold, per_channel)  # a wrong argument is told here, not when the first layer is built
    name = written("twn", threshold=(threshold, 0.7), per_channel=(per_channel, True))
    return Scheme(name, weight=partial(TWN, threshold, per_channel))


def ttq(threshold: float = 0.05) -> Scheme:
    """TTQ: weights ``{−W_n, 0, W_p}`` with two learned values for each layer (arXiv:1612.01064).

    The authors start from a trained float network and leave the first and last layer float.
    """
    TTQ(threshold)
    return Scheme(written("ttq", threshold=(threshold, 0.05)), weight=partial(TTQ, threshold))


def inq(weight_bits: int = 5, portions: Sequence[float] = (0.5, 0.75, 0.875, 1.0)) -> Scheme:
    """INQ: weights become powers of two in portions, and those that have are frozen (arXiv:1702.03044).

    ``portions`` are accumulated; `qconv.set_progress` moves from one to the next. The authors start from a trained
    float network and restart the learning rate with each portion.
    """
    if not isinstance(portions, Sequence) or isinstance(portions, str):
        raise TypeError(f"portions (={portions!r}) must be a sequence of numbers")
    portions = tuple(portions)
    INQ(weight_bits, portions)
    name = written("inq", weight_bits=(weight_bits, None), portions=(portions, (0.5, 0.75, 0.875, 1.0)))
    return Scheme(name, weight=partial(INQ, weight_bits, portions))


def apot(weight_bits: int = 4, input_bits: int | None = 4, variant: Variant = "cifar") -> Scheme:
    """APoT: weights and inputs on sums of powers of two, each on a learned range (arXiv:1909.13144).

    ``input_bits=None`` leaves the input float; otherwise a ReLU should come before the layer, for the levels are not
    negative. ``variant`` is that of the authors' code for CIFAR-10 or for ImageNet.
    """
    APoTWeight(weight_bits, variant)
    name = written("apot", weight_bits=(weight_bits, None), input_bits=(input_bits, 0), variant=(variant, "cifar"))
    weight = partial(APoTWeight, weight_bits, variant)
    if input_bits is None:
        return Scheme(name, Identity, weight)
    APoTInput(input_bits, variant)
    return Scheme(name, partial(APoTInput, input_bits, variant), weight)


def shift_q(
    weight_bits: int = 5, fixed_point: tuple[int, int] | None = None, rounding: Rounding = "deterministic"
) -> Scheme:
    """DeepShift-Q: weights rounded to powers of two (arXiv:1905.13298).

    ``fixed_point=(integer_bits, fraction_bits)`` also puts the input in fixed point; the authors use (16, 16).
    ``rounding="stochastic"`` rounds the exponent at random in training.
    """
    return _shift("shift_q", ShiftQ, weight_bits, fixed_point, rounding)


def shift_ps(
    weight_bits: int = 5,
    fixed_point: tuple[int, int] | None = None,
    rounding: Rounding = "deterministic",
    random_until: float = 0.8,
) -> Scheme:
    """DeepShift-PS: weights as a learned shift and a learned sign (arXiv:1905.13298).

    The authors give shift and sign no weight decay and add ``wd · ½ · Σ (2^shift)²`` to the loss; here the optimizer's
    decay acts on them unless they are put in a group of their own.

    ``fixed_point=(integer_bits, fraction_bits)`` also puts the input in fixed point; the authors use (16, 16).
    ``rounding="stochastic"`` rounds shift and sign at random in training, up to the progress ``random_until``: what
    was trained with random signs to the end is worse when it is evaluated with rounded ones.
    """
    return _shift("shift_ps", ShiftPS, weight_bits, fixed_point, rounding, random_until=(random_until, 0.8))


def _shift(
    method: str,
    quantizer: type[ShiftQ] | type[ShiftPS],
    weight_bits: int,
    fixed_point: tuple[int, int] | None,
    rounding: Rounding,
    **others: tuple[float, float],
) -> Scheme:
    more: dict[str, Any] = {name: value for name, (value, _) in others.items()}
    quantizer(weight_bits, **more)
    if rounding not in ("deterministic", "stochastic"):  # not by making one, which would draw a random key
        raise ValueError(f"rounding (={rounding!r}) must be 'deterministic' or 'stochastic'")
    name = written(
        method,
        weight_bits=(weight_bits, None),
        fixed_point=(fixed_point, None),
        rounding=(rounding, "deterministic"),
        **others,
    )
    weight = partial(quantizer, weight_bits, rounding, **more)
    if fixed_point is None:
        return Scheme(name, weight=weight)
    try:
        integer_bits, fraction_bits = fixed_point
    except (TypeError, ValueError) as error:
        raise ValueError(f"fixed_point (={fixed_point!r}) must be (integer_bits, fraction_bits)") from error
    FixedPoint(integer_bits, fraction_bits)
    return Scheme(name, partial(FixedPoint, integer_bits, fraction_bits), weight)
