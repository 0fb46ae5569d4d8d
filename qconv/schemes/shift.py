"""Schemes with ternary and power-of-two weights."""

from functools import partial

from ..quantizers import FixedPoint, ShiftPS, ShiftQ
from .scheme import Scheme, written


def shift_q(weight_bits: int = 5, fixed_point: tuple[int, int] | None = None) -> Scheme:
    """DeepShift-Q: weights rounded to powers of two (arXiv:1905.13298).

    ``fixed_point=(integer_bits, fraction_bits)`` also puts the input in fixed point; the authors use (16, 16).
    """
    return _shift("shift_q", ShiftQ, weight_bits, fixed_point)


def shift_ps(weight_bits: int = 5, fixed_point: tuple[int, int] | None = None) -> Scheme:
    """DeepShift-PS: weights as a learned shift and a learned sign (arXiv:1905.13298).

    The authors give shift and sign no weight decay and add ``wd · ½ · Σ (2^shift)²`` to the loss; here the optimizer's
    decay acts on them unless they are put in a group of their own.

    ``fixed_point=(integer_bits, fraction_bits)`` also puts the input in fixed point; the authors use (16, 16).
    """
    return _shift("shift_ps", ShiftPS, weight_bits, fixed_point)


def _shift(
    method: str, quantizer: type[ShiftQ] | type[ShiftPS], weight_bits: int, fixed_point: tuple[int, int] | None
) -> Scheme:
    quantizer(weight_bits)  # a wrong number of bits is told here, not when the first layer is built
    name = written(method, weight_bits=(weight_bits, None), fixed_point=(fixed_point, None))
    if fixed_point is not None and len(fixed_point) != 2:
        raise ValueError(f"fixed_point (={fixed_point}) must be (integer_bits, fraction_bits)")
    if fixed_point is None:
        return Scheme(name, weight=partial(quantizer, weight_bits))
    integer_bits, fraction_bits = fixed_point
    FixedPoint(integer_bits, fraction_bits)
    return Scheme(name, partial(FixedPoint, integer_bits, fraction_bits), partial(quantizer, weight_bits))
