"""Uniform levels on the range of the data: minimum and maximum, or percentiles."""

import math
from functools import partial

import torch
from torch import Tensor

from ..ground.checks import check_bits, check_flags, check_numbers
from ..quantizers.base import Levels, Whole, is_eager_cuda
from ..quantizers.form import Form
from ..quantizers.from_data import FromData
from ..quantizers.kept_codes import Coding, Passing
from ..quantizers.numbers import wide
from ..quantizers.observers import Extremes
from ..quantizers.part import Rule
from ..quantizers.percentiles import Percentiles, extent
from ..quantizers.rounding import Rounding, divisor, range_levels
from ..scheme import Scheme, named, of_input


def uniform_range(low: Tensor, high: Tensor, bits: int, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The first and the last of the whole numbers on ``2^bits`` levels from ``low`` to ``high``, and the step.

    Symmetric: from ``−n`` to ``n = 2^(bits−1) − 1``, one level less, with ``step = high / n``; else `range_levels`.
    """
    if not symmetric:
        return range_levels(low, high, bits)
    count = 2 ** (bits - 1) - 1
    step = high / count
    first = torch.full_like(step, -count)
    return first, -first, step


def check_percentile(percentile: float) -> float:
    """Return ``percentile``; raise a ValueError unless it is above 50 and at most 100."""
    check_numbers(percentile=percentile)
    if not 50 < percentile <= 100:
        raise ValueError(f"percentile (={percentile}) must be above 50 and at most 100")
    return float(percentile)


class _FromFirst(Passing):
    """The shared part of weights and inputs: codes from the first level, with 0 at a code that depends on the range."""

    max_bits: int = 8
    percentile: float = 100.0

    def __init__(self, bits: int, symmetric: bool, per_channel: bool) -> None:
        super().__init__()
        self.bits = self._bits = check_bits("bits", bits, 2, self.max_bits, type(self).__name__)
        check_flags(symmetric=symmetric, per_channel=per_channel)
        self.symmetric, self.per_channel = symmetric, per_channel

    def whole(self, x: Tensor, *tensors: Tensor) -> Whole:
        rounding = self.rounding_of(x, *tensors)
        if rounding is not None:
            return rounding.whole(x)
        first, last, step = range_levels(*self._range(x, *tensors), self._bits)
        return Whole((wide(x) / divisor(step)).round_().clamp_(first, last), step)

    def quantize(self, x: Tensor, *tensors: Tensor) -> Tensor:
        if self.symmetric or not is_eager_cuda(x):
            return super().quantize(x, *tensors)
        return torch.ops.qconv.round_range(x, *self._range(x, *tensors), self._bits)

    def rounding_of(self, x: Tensor, *tensors: Tensor) -> Rounding | None:
        if self.whole_ends is None:
            return None
        low, high = self.whole_ends
        return Rounding(self._high(x, *tensors) / high, low, high)

    @property
    def coding(self) -> Coding:
        return Coding(2**self._bits)

    @property
    def whole_ends(self) -> tuple[int, int] | None:
        count = 2 ** (self._bits - 1) - 1
        return (-count, count) if self.symmetric else None

    def parts(self, x: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        values, step = super().parts(x, *tensors)
        first, _, _ = uniform_range(*self._range(x, *tensors), self._bits, self.symmetric)
        return values - first, step, first

    def joined(self, form: Form, values: Tensor, *others: Tensor) -> Whole:
        step, first = others
        return Whole(values + first, step)

    def passes(self, x: Tensor, *tensors: Tensor) -> Tensor | None:
        wide_x = wide(x)
        return wide_x.clamp(*self._range(x, *tensors)) == wide_x

    def passed(self, grad: Tensor, x: Tensor, *tensors: Tensor) -> Tensor:
        if not is_eager_cuda(x) or not tensors:
            return super().passed(grad, x, *tensors)
        return torch.ops.qconv.pass_between(grad, x, *self._range(x, *tensors))

    def _range(self, x: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        """Both ends in at least float32; they broadcast against ``x``."""
        raise NotImplementedError(f"{type(self).__name__} defines no _range()")

    def _high(self, x: Tensor, *tensors: Tensor) -> Tensor:
        return self._range(x, *tensors)[1]


class MinMaxWeight(_FromFirst):
    r"""Weights on uniform levels from their minimum to their maximum.

    ``w_q = clamp(round(w / step), first, last) · step``, half to even, with range, step and codes of the filter, or of
    the whole layer, at every forward. Symmetric: ``step = max |w| / n``, codes −n … n with ``n = 2^(b−1) − 1`` (2 bits
    are ternary). Affine: the range from the minimum to the maximum, widened to hold 0, in 2^b levels, moved by at most
    half a step so that 0 is one of them: ``±0`` is always exactly 0.

    ``dw = g``: straight through, the range a constant. Nothing lies outside, nothing is masked, and latent weights are
    not clipped.

    A filter of zeros, whose range is 0, gives zeros; a constant or single weight gives itself up to rounding; an empty
    filter stays empty. A NaN or inf makes its filter NaN (with ``per_channel=False`` the layer).

    Jacob et al. (arXiv:1712.05877) use the affine form with one range per layer; Krishnamoorthi (arXiv:1806.08342)
    finds a symmetric range for each filter better. Both move the ends so that 0 is a level.

    Args:
        bits: 2 to 8.
        symmetric: whether the range is the same on both sides of 0.
        per_channel: whether each filter has its own range, or the layer one.

    Raises:
        ValueError: ``bits`` out of range.
    """

    def __init__(self, bits: int = 8, symmetric: bool = True, per_channel: bool = True) -> None:
        super().__init__(bits, symmetric, per_channel)

    def passes(self, x: Tensor, *tensors: Tensor) -> Tensor | None:
        return None if self.percentile == 100 else super().passes(x)

    def _range(self, x: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        rows = _first_rows(wide(x)) if self.per_channel else wide(x).reshape(1, -1)
        low, high = extent(rows, self.percentile, self.symmetric)
        shape = -1, *[1] * (x.ndim - 1)
        return low.view(shape), high.view(shape)

    def _high(self, x: Tensor, *tensors: Tensor) -> Tensor:
        if self.percentile < 100 or not self.symmetric or x.ndim < 2 or not x.numel():
            return super()._high(x, *tensors)
        dims = tuple(range(1 if self.per_channel else 0, x.ndim))
        return torch.linalg.vector_norm(wide(x), math.inf, dims, keepdim=True)


class PercentileWeight(MinMaxWeight):
    r"""Weights on uniform levels between percentiles: `MinMaxWeight` that clips the few largest.

    The range ends at the weight of rank ``ceil(percentile / 100 · n)`` of the n in a filter (or in the layer), without
    interpolation: of the magnitudes if symmetric, else of the weights, from below and from above. So of n weights
    ``n − rank`` are clipped on a side: none of a small filter, one in a thousand with 99.9. Beyond the range weights
    take the last level. ``dw = g · 1[low ≤ w ≤ high]`` with both ends included. Latent weights are not clipped.

    ±inf takes the last level and NaN gives only NaN, as long as the range excludes them; else the filter is NaN. A
    filter with so many zeros that both ends are 0 gives zeros.

    McKinstry et al. (arXiv:1809.04191) calibrate with percentiles of 99.9 and above.

    Args:
        bits: 2 to 8.
        percentile: above 50, at most 100, which is `MinMaxWeight`.
        symmetric: whether the range is the same on both sides of 0.
        per_channel: whether each filter has its own range, or the layer one.

    Raises:
        ValueError: ``bits`` or ``percentile`` out of range.
    """

    def __init__(
        self, bits: int = 8, percentile: float = 99.9, symmetric: bool = True, per_channel: bool = True
    ) -> None:
        super().__init__(bits, symmetric, per_channel)
        self.percentile = check_percentile(percentile)


class MinMaxInput(FromData[Extremes], _FromFirst):
    r"""Inputs on uniform levels from the minimum to the maximum of the calibration data.

    The levels are as in `MinMaxWeight`, for the range ``[low, high]`` in two buffers. They come from the first
    training batch or from `qconv.calibrate`, and then stay: the forward is a pure function, so no running average moves
    them. Calibrate again if the inputs have drifted. Before calibration the range is [−1, 1].

    ``dx = g · 1[low ≤ x ≤ high]`` with both ends included. ±inf takes the last level; NaN gives NaN, and 0 as gradient.
    Data of equal values, such as a blank image, set no range; it waits for the next. A channel of zeros takes the
    range of the layer.

    Jacob et al. (arXiv:1712.05877) use a running average instead.

    Args:
        bits: 2 to 16.
        symmetric: whether the range is the same on both sides of 0; after a ReLU it wastes a bit.
        per_channel: whether each channel has its own range, or the layer one.

    Raises:
        ValueError: ``bits`` out of range, a ``low`` above 0 or a ``high`` below it in a checkpoint, or ``per_channel``
            and data before `build`.
    """

    roles = ("input",)
    max_bits = 16
    low: Tensor
    high: Tensor

    def __init__(self, bits: int = 8, symmetric: bool = False, per_channel: bool = False) -> None:
        super().__init__(bits, symmetric, per_channel)
        self.dim: int | None = None
        self.calibrated = False
        self.register_buffer("low", torch.tensor(-1.0))
        self.register_buffer("high", torch.tensor(1.0))

    def build(self, channels: int, dim: int) -> None:
        if self.per_channel:
            self.dim = dim
            self.low = self.low.new_full((channels,), -1.0)
            self.high = self.high.new_full((channels,), 1.0)

    def new_observer(self) -> Extremes:
        if self.per_channel and self.dim is None:
            raise ValueError("per_channel (=True) needs the number of channels: call build(channels, dim) first")
        if self.percentile == 100:
            return Extremes(self.dim, self.symmetric)
        return Percentiles(self.percentile, self.dim, self.symmetric)

    def start(self, observer: Extremes) -> bool:
        low, high = observer.extent()
        if (low == high).all():
            return False
        empty = low == high
        self.low.copy_(torch.where(empty, low.amin(), low).view(self.low.shape))
        self.high.copy_(torch.where(empty, high.amax(), high).view(self.high.shape))
        return True

    def tensors(self) -> tuple[Tensor, ...]:
        return self.low, self.high

    def hold(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return super().hold(*tensors) if self.is_fresh else tensors  # no schedule moves them

    def levels(self, *tensors: Tensor) -> Levels | None:
        if tensors[0].numel() > 1 and not self.symmetric:
            return None  # each channel has its own
        first, last, step = uniform_range(wide(tensors[0]), wide(tensors[1]), self._bits, self.symmetric)
        return Levels(int(first.min()), int(last.max()), step, "nearest")

    def _range(self, x: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(x.dtype, torch.float32)
        low, high = (end.to(dtype) for end in tensors)
        if self.dim is None:
            return low, high
        shape = [1] * x.ndim
        shape[self.dim] = -1
        return low.view(shape), high.view(shape)

    def rules(self) -> dict[str, Rule]:
        return {
            "low": (lambda low: (low <= 0) & low.isfinite(), "must be at most 0 and finite"),
            "high": (lambda high: (high >= 0) & high.isfinite(), "must be at least 0 and finite"),
        }


class PercentileInput(MinMaxInput):
    r"""Inputs on uniform levels between percentiles: `MinMaxInput` that leaves out the few largest when it calibrates.

    The range ends at the value of rank ``ceil(percentile / 100 · n)`` of the n in the calibration data (in the
    channel): of the magnitudes if symmetric, else of the values, from below and from above. It is exact for one batch;
    several are counted in bins (2^8 for a factor of 2, 2^4 with ``per_channel``), so that none has to be kept. If both
    ends are 0 it waits for the next batch. All else is as in `MinMaxInput`.

    McKinstry et al. (arXiv:1809.04191) calibrate with percentiles of 99.9 and above.

    Args:
        bits: 2 to 16.
        percentile: above 50, at most 100, which is `MinMaxInput`.
        symmetric: whether the range is the same on both sides of 0.
        per_channel: whether each channel has its own range, or the layer one.

    Raises:
        ValueError: as `MinMaxInput`, or ``percentile`` out of range.
    """

    def __init__(
        self, bits: int = 8, percentile: float = 99.9, symmetric: bool = False, per_channel: bool = False
    ) -> None:
        super().__init__(bits, symmetric, per_channel)
        self.percentile = check_percentile(percentile)


def _first_rows(x: Tensor) -> Tensor:
    """``x`` with all dimensions after the first in one."""
    return x.flatten(1) if x.ndim > 1 else x[:, None]


@named
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
        input_bits: 2 to 16; None leaves the input float. Its range comes from the first training batch or `calibrate`.
        symmetric: whether the range of the weight is the same on both sides of 0.
        input_symmetric: whether the input's range is symmetric.
        per_channel: whether each filter has its own range; the input has one for the layer.
    """
    check_bits("weight_bits", weight_bits, 2, method="minmax")
    check_flags(input_symmetric=input_symmetric)
    return Scheme(
        input=of_input(MinMaxInput, input_bits, input_symmetric, low=2, high=16, method="minmax"),
        weight=partial(MinMaxWeight, weight_bits, symmetric, per_channel),
    )


@named
def percentile(
    weight_bits: int = 8,
    input_bits: int | None = 8,
    percentile: float = 99.9,
    symmetric: bool = True,
    input_symmetric: bool = False,
    per_channel: bool = True,
) -> Scheme:
    """Fake quantization on a range that ends at a percentile (arXiv:1809.04191); all else as in `minmax`.

    Args:
        weight_bits: 2 to 8.
        input_bits: 2 to 16; None leaves the input float.
        percentile: above 50, at most 100, of weights and of inputs.
        symmetric: whether the range of the weight is the same on both sides of 0.
        input_symmetric: whether the input's range is symmetric.
        per_channel: whether each filter has its own range; the input has one for the layer.
    """
    check_bits("weight_bits", weight_bits, 2, method="percentile")
    check_flags(input_symmetric=input_symmetric)
    return Scheme(
        input=of_input(PercentileInput, input_bits, percentile, input_symmetric, low=2, high=16, method="percentile"),
        weight=partial(PercentileWeight, weight_bits, percentile, symmetric, per_channel),
    )
