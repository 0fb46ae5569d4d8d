"""Schemes of few bits whose levels follow learned thresholds, a learned range, the data's range, or 8-bit floats."""

from functools import partial
from typing import Literal

from ..quantizers import Identity, Quantizer
from ..quantizers.dsq import DSQInput, DSQWeight
from ..quantizers.fp8 import FP8, Format, check_format
from ..quantizers.minmax import MinMaxInput, MinMaxWeight, PercentileInput, PercentileWeight, check_percentile
from ..quantizers.n2uq import N2UQInput, N2UQWeight
from ..quantizers.numbers import check_bits, check_flags
from .scheme import Factory, Scheme, written


def n2uq(weight_bits: int = 2, input_bits: int | None = 2, rescale_grad: bool = True) -> Scheme:
    """N2UQ: learned thresholds of the input between uniform levels (arXiv:2111.14826).

    The input is to lie in [0, 2] at first. The authors train the thresholds and scales with a tenth of the learning
    rate, leave first and last layer float, and put a learned shift, PReLU and shift before each convolution.
    ``input_bits=None`` leaves the input float. ``rescale_grad=False`` takes the weight's gradient as it is, where the
    authors' code divides it by the filter's scale.
    """
    _check(weight_bits, input_bits, "n2uq", 2)
    name = written(
        "n2uq",
        weight_bits=(weight_bits, None),
        input_bits=(input_bits, 0),
        rescale_grad=(rescale_grad, True),
    )
    return Scheme(name, _input(N2UQInput, input_bits), partial(N2UQWeight, weight_bits, rescale_grad))


def dsq(weight_bits: int = 4, input_bits: int | None = 4, alpha: float = 0.2) -> Scheme:
    """DSQ: the slope of a tanh in place of rounding's, its steepness and both ranges learned (arXiv:1908.05033).

    ``input_bits=None`` leaves the input float. The input's range comes from the first training batch or `calibrate`.
    """
    _check(weight_bits, input_bits, "dsq", 1)
    name = written("dsq", weight_bits=(weight_bits, None), input_bits=(input_bits, 0), alpha=(alpha, 0.2))
    weight = partial(DSQWeight, weight_bits, alpha)
    weight()  # a wrong alpha is told here, not when the first layer is built
    return Scheme(name, _input(DSQInput, input_bits, alpha), weight)


def minmax(
    weight_bits: int = 8,
    input_bits: int | None = 8,
    symmetric: bool = True,
    input_symmetric: bool = False,
    per_channel: bool = True,
) -> Scheme:
    """Plain fake quantization from minimum to maximum (arXiv:1712.05877, arXiv:1806.08342).

    Args:
        weight_bits: 2 to 8.
        input_bits: 2 to 8; None leaves the input float. Its range comes from the first training batch or `calibrate`.
        symmetric: whether the range of the weight is the same on both sides of 0.
        input_symmetric: whether that of the input is.
        per_channel: whether each filter has a range of its own; the input has one for the layer.
    """
    _check(weight_bits, input_bits, "minmax", 2)
    check_flags(input_symmetric=input_symmetric)
    name = written(
        "minmax",
        weight_bits=(weight_bits, None),
        input_bits=(input_bits, 0),
        symmetric=(symmetric, True),
        input_symmetric=(input_symmetric, False),
        per_channel=(per_channel, True),
    )
    weight = partial(MinMaxWeight, weight_bits, symmetric, per_channel)
    return Scheme(name, _input(MinMaxInput, input_bits, input_symmetric), weight)


def percentile(
    weight_bits: int = 8,
    input_bits: int | None = 8,
    percentile: float = 99.9,
    symmetric: bool = True,
    input_symmetric: bool = False,
    per_channel: bool = True,
) -> Scheme:
    """Fake quantization on the range that ends at a percentile (arXiv:1809.04191); all else as in `minmax`.

    Args:
        weight_bits: 2 to 8.
        input_bits: 2 to 8; None leaves the input float.
        percentile: above 50, at most 100, of weights and of inputs.
        symmetric: whether the range of the weight is the same on both sides of 0.
        input_symmetric: whether that of the input is.
        per_channel: whether each filter has a range of its own; the input has one for the layer.
    """
    _check(weight_bits, input_bits, "percentile", 2)
    check_flags(input_symmetric=input_symmetric)
    check_percentile(percentile)
    name = written(
        "percentile",
        weight_bits=(weight_bits, None),
        input_bits=(input_bits, 0),
        percentile=(percentile, 99.9),
        symmetric=(symmetric, True),
        input_symmetric=(input_symmetric, False),
        per_channel=(per_channel, True),
    )
    weight = partial(PercentileWeight, weight_bits, percentile, symmetric, per_channel)
    return Scheme(name, _input(PercentileInput, input_bits, percentile, input_symmetric), weight)


def fp8(
    format: Format = "e4m3",
    input_format: Format | None = "e4m3",
    grad_format: Format | None = None,
    scale: Literal["dynamic"] | None = "dynamic",
) -> Scheme:
    """Weights and inputs in 8-bit floating point (arXiv:2209.05433).

    Args:
        format: of the weight, ``"e4m3"`` or ``"e5m2"``.
        input_format: of the input; None leaves it float.
        grad_format: of the output's gradient, ``"e5m2"`` in the paper; None leaves it float.
        scale: ``"dynamic"``, the largest magnitude on the largest number of the format; or None, which clips there.
    """
    check_format(format)
    for key, value in (("input_format", input_format), ("grad_format", grad_format)):
        if value is not None:
            check_format(value, key)
    FP8(format, scale)  # a wrong scale is told here, not when the first layer is built
    name = written(
        "fp8",
        format=(format, None),
        input_format=(input_format, ""),
        grad_format=(grad_format, None),
        scale=(scale, "dynamic"),
    )
    return Scheme(
        name,
        Identity if input_format is None else partial(FP8, input_format, scale),
        partial(FP8, format, scale),
        None if grad_format is None else partial(FP8, grad_format, scale),
    )


def _check(weight_bits: int, input_bits: int | None, method: str, low: int) -> None:
    """A ValueError for a number of bits that ``method`` has not."""
    check_bits("weight_bits", weight_bits, low, 8, method)
    if input_bits is not None:
        check_bits("input_bits", input_bits, low, 8, method)


def _input(quantizer: type[Quantizer], bits: int | None, *arguments: object) -> Factory:
    return Identity if bits is None else partial(quantizer, bits, *arguments)
