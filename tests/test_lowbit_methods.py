"""N2UQ, DSQ, min-max, percentile and fp8: against formulas written again, and what each does at its edges."""

import inspect
import math
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import yaml
from torch import Tensor

import qconv
from qconv.methods.dsq import DSQInput, DSQWeight, dsq
from qconv.methods.fp8 import FORMATS, FP8, Format, fp8, round_fp8
from qconv.methods.int8 import Int8Stochastic
from qconv.methods.minmax import MinMaxInput, MinMaxWeight, PercentileInput, PercentileWeight, minmax, percentile
from qconv.methods.n2uq import N2UQInput, N2UQWeight, n2uq
from qconv.quantizers import Identity, Quantizer, stochastic
from qconv.scheme import Scheme

NAN, INF = math.nan, math.inf
W = [-1.2, -0.7, -0.3, -0.05, 0.05, 0.25, 0.6, 0.7]


def double(values: list[float] | list[list[float]]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def hand_over(q: Quantizer) -> tuple[Tensor, ...]:
    return tuple(tensor.detach() for tensor in q.tensors())


def check_gradients(q: Quantizer, textbook: Callable[..., Tensor], x: Tensor, *tensors: Tensor) -> None:
    """Forward and gradients equal those of autograd through ``textbook``, and a gradient 1e-9 off is rejected."""
    leaves = [tensor.clone().requires_grad_() for tensor in (x, *tensors)]
    expected = textbook(*leaves)
    torch.testing.assert_close(q.quantize(x, *tensors), expected.detach(), rtol=1e-12, atol=1e-12)
    grad = torch.randn_like(x)
    wanted = torch.autograd.grad(expected, leaves, grad)
    found = q.backward(grad.clone(), x, *tensors)
    assert len(found) == len(wanted)
    for got, want in zip(found, wanted, strict=True):
        assert got is not None
        assert want.abs().max() > 1e-3
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
        with pytest.raises(AssertionError, match="not close"):
            torch.testing.assert_close(got * (1 + 1e-9) + 1e-9, want, rtol=1e-12, atol=1e-12)


def hard(soft: Tensor, value: Tensor) -> Tensor:
    """``value`` forward, the gradient of ``soft``."""
    return value.detach() + soft - soft.detach()


# --- N2UQ ---


def n2uq_weight(w: Tensor, bits: int, rescale: bool) -> Tensor:
    filters = []
    n = (2**bits - 1) / 2
    for row in w:
        scale = (2**bits - 1) / 2 ** (bits - 1) * row.abs().mean().detach()
        value = scale * (torch.round((torch.clip(row / scale, -1, 1) + 1) * n) / n - 1)
        filters.append(hard(row / scale if rescale else row, value))
    return torch.stack(filters)


def n2uq_input(x: Tensor, widths: Tensor, start: Tensor, s1: Tensor, s2: Tensor) -> Tensor:
    step = 2 / len(widths)
    flat = (x * s1).flatten()
    outs = []
    for z in flat:
        left, level, soft = start, 0, z * 0
        for i, width in enumerate(widths):
            level += int(z > left + width / 2)
            if z > left:
                soft = step * (i + (z - left) / width)
            left = left + width
        if z > left:
            soft = z * 0
        outs.append(hard(soft, soft * 0 + step * level))
    return torch.stack(outs).view_as(x) * s2


def test_n2uq_weight_golden() -> None:
    w, g = double([W]), double([[0.1, -0.2, 0.3, -0.4, 0.5, 0.6, 0.7, -0.8]])
    q = N2UQWeight(2)
    expected = [-0.721875, -0.721875, -0.240625, -0.240625, 0.240625, 0.240625, 0.721875, 0.721875]
    torch.testing.assert_close(q.quantize(w), double([expected]), rtol=1e-12, atol=0)
    (dw,) = q.backward(g.clone(), w)
    expected = [0.138528, -0.277056, 0.415584, -0.554113, 0.692641, 0.831169, 0.969697, -1.108225]
    torch.testing.assert_close(dw, double([expected]), rtol=0, atol=1e-6)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("rescale", [True, False])
def test_n2uq_weight(bits: int, rescale: bool) -> None:
    w = torch.randn(5, 3, 3, 2, dtype=torch.float64) * 0.1
    check_gradients(N2UQWeight(bits, rescale), partial(n2uq_weight, bits=bits, rescale=rescale), w)


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("shape", [(7, 3, 3, 2), (40,)], ids=str)
def test_n2uq_input(bits: int, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, dtype=torch.float64) * 1.5 + 1
    count = 2**bits - 1
    widths = torch.rand(count, dtype=torch.float64) * 2 / count + 0.05
    check_gradients(N2UQInput(bits), n2uq_input, x, widths, double([0.15])[0], double([0.9])[0], double([1.3])[0])


def test_n2uq_input_at_ties() -> None:
    q = N2UQInput(2)
    # binary fractions, so that thresholds (at ¼, ¾, 1½) and corners (0, ½, 1, 2) are hit exactly
    tensors = double([0.5, 0.5, 1.0]), double([0.0])[0], double([2.0])[0], double([3.0])[0]
    x = double([-1.0, -0.0, 0.0, 0.125, 0.25, 0.375, 0.5, 0.75, 0.75001, 1.0, 1.01, INF, -INF])
    levels = q.codes(x, *tensors).values.tolist()
    assert levels == [0, 0, 0, 0, 1, 1, 2, 2, 3, 3, 3, 3, 0]
    assert q.quantize(x, *tensors).tolist() == pytest.approx([level * 2.0 for level in levels], rel=1e-15)
    dx, *others = q.backward(torch.ones_like(x), x, *tensors)
    assert dx is not None
    slope = 3.0 * (2 / 3) * 2.0  # s2 · interval · s1, to be divided by the width
    inside = [slope / 0.5] * 4 + [slope / 1.0] * 3
    assert dx.tolist() == pytest.approx([0, 0, 0, *inside, 0, 0, 0], rel=1e-15)
    assert all(other is not None and other.isfinite().all() for other in others)


def test_n2uq_input_with_nan() -> None:
    q = N2UQInput(3)
    x = torch.tensor([[0.3, NAN, 0.9]])
    x_q = q.quantize(x, *hand_over(q))
    assert x_q.isnan().tolist() == [[False, True, False]]
    dx, widths, start, s1, s2 = q.backward(torch.ones_like(x), x, *hand_over(q))
    assert dx is not None
    assert dx[0, 1] == 0
    assert dx.isfinite().all()
    assert all(other is not None and other.isfinite().all() for other in (widths, start, s1))
    assert s2 is not None
    assert s2.isnan()


def test_n2uq_input_after_a_step() -> None:
    q = N2UQInput(2)
    assert q.widths.tolist() == pytest.approx([2 / 3] * 3)
    assert (q.start.item(), q.input_scale.item(), q.output_scale.item()) == (0, 1, 1)
    with torch.no_grad():
        q.widths.copy_(torch.tensor([-1.0, 1e-3, 0.4]))
        q.input_scale.fill_(-2)
        q.output_scale.fill_(0)
        q.after_step_(None)
    assert q.widths.tolist() == pytest.approx([1e-3, 1e-3, 0.4])
    assert q.input_scale.item() == q.output_scale.item() == 2.0**-20


def test_n2uq_input_keeps_channels_last() -> None:
    x = torch.rand(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    q = N2UQInput(2)
    x_q = q.quantize(x, *hand_over(q))
    assert x_q.is_contiguous(memory_format=torch.channels_last)
    assert x_q.equal(q.quantize(x.contiguous(), *hand_over(q)))
    turned = x.transpose(0, 2)
    grads = q.backward(torch.ones_like(turned), turned, *hand_over(q))
    assert q.quantize(turned, *hand_over(q)).equal(x_q.transpose(0, 2))
    for got, want in zip(grads, q.backward(torch.ones_like(x), x, *hand_over(q)), strict=True):
        assert got is not None
        assert want is not None
        torch.testing.assert_close(got if got.ndim < 4 else got.transpose(0, 2), want)


@pytest.mark.parametrize("shape", [(2, 3, 1, 2), (3, 1)], ids=str)
def test_n2uq_weight_of_constant_filters(shape: tuple[int, ...]) -> None:
    q = N2UQWeight(3)
    assert q.quantize(torch.zeros(shape)).eq(0).all()
    (dw,) = q.backward(torch.ones(shape), torch.zeros(shape))
    assert dw is not None
    assert dw.eq(1).all()
    (dw,) = q.backward(torch.ones(shape), torch.full(shape, 1e-42))
    assert dw is not None
    assert dw.eq(1).all()
    for value in (0.4, -1.7):  # half way between two levels
        found = q.quantize(torch.full(shape, value, dtype=torch.float64)).flatten().tolist()
        assert all(v == pytest.approx(value * 0.75) or v == pytest.approx(value * 1.25) for v in found)


# --- DSQ ---


def dsq_textbook(x: Tensor, lower: Tensor, upper: Tensor, alpha: Tensor, bits: int) -> Tensor:
    count = 2**bits - 1
    step = (upper - lower) / count
    clipped = torch.where(x < lower, lower, torch.where(x > upper, upper, x))
    interval = ((clipped - lower) / step).detach().floor().clamp(0, count - 1)
    middle = lower + (interval + 0.5) * step
    k = torch.log(2 / alpha - 1) / step
    phi = torch.tanh(k * (clipped - middle)) / (1 - alpha)
    sign = hard(phi, torch.where(phi >= 0, 1.0, -1.0).to(x.dtype))
    return lower + step * (interval + (sign + 1) / 2)


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("make", [DSQWeight, DSQInput])
@pytest.mark.parametrize("alpha", [0.03, 0.2, 0.5])
def test_dsq(bits: int, make: type[DSQWeight] | type[DSQInput], alpha: float) -> None:
    x = torch.randn(4, 3, 3, 5, dtype=torch.float64)
    check_gradients(
        make(bits), partial(dsq_textbook, bits=bits), x, double([-0.9])[0], double([1.3])[0], double([alpha])[0]
    )


def test_dsq_at_ties() -> None:
    q = DSQInput(2)
    tensors = double([-1.0])[0], double([2.0])[0], double([0.2])[0]  # levels -1, 0, 1, 2
    x = double([-INF, -1.5, -1.0, -0.5, -0.0, 0.0, 0.5, 1.5, 2.0, 2.5, INF])
    assert q.quantize(x, *tensors).tolist() == [-1, -1, -1, 0, 0, 0, 1, 2, 2, 2, 2]
    dx, lower, upper, alpha = q.backward(torch.ones_like(x), x, *tensors)
    assert dx is not None
    assert lower is not None
    assert upper is not None
    assert alpha is not None
    height, k = 1 / 0.8, math.log(9.0)
    end, middle = height * k / 2 * (1 - math.tanh(k / 2) ** 2), height * k / 2
    assert dx.tolist() == pytest.approx([0, 0, end, middle, end, end, middle, middle, end, 0, 0], rel=1e-12)
    dl, du = 0.0, 0.0
    positions, levels = (0, 0, 0, 0.5, 1, 1, 1.5, 2.5, 3, 3, 3), q.codes(x, *tensors).values
    for value, z, level in zip(x.tolist(), positions, levels, strict=True):
        slope = middle if z % 1 else end * (-1 <= value <= 2)
        du += (level.item() - z * slope) / 3
        dl += 1 - slope - (level.item() - z * slope) / 3
    assert lower.item() == pytest.approx(dl, rel=1e-12)
    assert upper.item() == pytest.approx(du, rel=1e-12)
    assert alpha.item() == pytest.approx(0, abs=1e-12)  # φ is odd and its ends are fixed


def test_dsq_is_initialized_from_the_data() -> None:
    w = torch.randn(4, 3)
    q = DSQWeight(3, alpha=0.3)
    q.initialize(w)
    assert (q.lower, q.upper) == (w.min(), w.max())
    assert q.alpha.item() == pytest.approx(0.3)
    first = q.lower
    q.initialize(w * 2)
    assert q.lower is first
    assert q.lower == w.min() * 2
    q.lower.requires_grad_(False)
    q.initialize(w.double())
    assert q.lower.dtype == torch.float64
    assert not q.lower.requires_grad
    a = DSQInput(3)
    a.initialize(torch.empty(0, 3))
    assert not a.calibrated
    a.initialize(w)
    assert a.calibrated
    assert (a.lower, a.upper) == (w.min(), w.max())


def test_dsq_leaves_a_constant_and_stays_in_range() -> None:
    for value in (0.0, 0.7, -0.3):
        w = torch.full((2, 3), value)
        q = DSQWeight(3)
        q.initialize(w)
        assert q.quantize(w, *hand_over(q)).equal(w)
        assert all(g is not None and g.isfinite().all() for g in q.backward(torch.ones_like(w), w, *hand_over(q)))
    with torch.no_grad():
        q.upper.copy_(q.lower - 1)
        q.alpha.fill_(-1)
        q.after_step_(w)
    assert q.upper > q.lower
    assert q.upper - q.lower < 1e-5
    assert q.alpha.item() == pytest.approx(1e-3)
    with torch.no_grad():
        q.alpha.fill_(2)
        q.after_step_(w)
    assert q.alpha == 0.5
    assert q.quantize(torch.tensor([NAN]), *hand_over(q)).isnan().all()


# --- minimum and maximum, percentiles ---


def uniform(values: list[float], ranged: list[float], bits: int, symmetric: bool, p: float) -> tuple[list[float], ...]:
    """``values`` on the levels of the range of ``ranged``; whether each lies in the range."""
    ordered = sorted(abs(v) if symmetric else v for v in ranged)
    cut = int(len(ordered) * (100 - p) / 100 + 1e-9)
    high = max(ordered[len(ordered) - 1 - cut], 0.0)
    low = -high if symmetric else min(ordered[cut], 0.0)
    if symmetric:
        count, step = 2 ** (bits - 1) - 1, high / (2 ** (bits - 1) - 1)
        first, last = -count, count
    else:
        step = (high - low) / (2**bits - 1)
        first = -round(-low / step)
        last = 2**bits - 1 + first
    out = [min(max(round(v / step), first), last) * step for v in values]
    return out, [float(low <= v <= high) for v in values]


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("per_channel", [True, False])
@pytest.mark.parametrize("p", [100.0, 90.0])
def test_range_of_weights(bits: int, symmetric: bool, per_channel: bool, p: float) -> None:
    w = torch.randn(3, 2, 7, dtype=torch.float64) + 0.4
    q = MinMaxWeight(bits, symmetric, per_channel) if p == 100 else PercentileWeight(bits, p, symmetric, per_channel)
    g = torch.randn_like(w)
    w_q, (dw,) = q.quantize(w), q.backward(g.clone(), w)
    assert dw is not None
    for i in range(3):
        row = w[i].flatten().tolist()
        expected, inside = uniform(row, row if per_channel else w.flatten().tolist(), bits, symmetric, p)
        torch.testing.assert_close(w_q[i].flatten(), double(expected), rtol=1e-12, atol=1e-15)
        assert dw[i].flatten().equal(g[i].flatten() * double(inside))
    assert p == 100 or dw.eq(0).any()


@pytest.mark.parametrize("bits", [2, 5, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("dim", [None, 1, -1])
@pytest.mark.parametrize("p", [100.0, 90.0])
def test_range_of_inputs(bits: int, symmetric: bool, dim: int | None, p: float) -> None:
    seen, x = (torch.randn(5, 3, 4, dtype=torch.float64) * scale + 0.4 for scale in (1, 1.5))
    per_channel = dim is not None
    q = MinMaxInput(bits, symmetric, per_channel) if p == 100 else PercentileInput(bits, p, symmetric, per_channel)
    q.build(seen.shape[dim or 1], dim or 1)
    q.double()
    q.initialize(seen)
    assert q.calibrated
    g = torch.randn_like(x)
    x_q, (dx, *none) = q.quantize(x, *q.tensors()), q.backward(g.clone(), x, *q.tensors())
    assert none == [None, None]
    assert dx is not None
    parts = [slice(None)] if dim is None else list(range(x.shape[dim]))
    for part in parts:
        mine, ranged, out, grads, given = (
            t.flatten() if dim is None else t.movedim(dim, 0)[part].flatten() for t in (x, seen, x_q, dx, g)
        )
        expected, inside = uniform(mine.tolist(), ranged.tolist(), bits, symmetric, p)
        torch.testing.assert_close(out, double(expected), rtol=1e-12, atol=1e-15)
        assert grads.equal(given * double(inside))
    assert dx.eq(0).any()


def test_zero_is_always_a_level_and_ends_are_closed() -> None:
    x = torch.tensor([-0.37, -0.0, 0.0, 1.21])
    q = MinMaxInput(3)
    q.initialize(x)
    assert q.quantize(x, *q.tensors())[1:3].tolist() == [0, 0]
    beyond = torch.tensor([-INF, -0.38, 1.22, INF, NAN])
    ends = q.quantize(beyond, *q.tensors())
    assert ends[0] == ends[1] < -0.3
    assert ends[2] == ends[3] > 1.1
    assert ends[4].isnan()
    dx, *_ = q.backward(torch.ones(9), torch.cat([x, beyond]), *q.tensors())
    assert dx is not None
    assert dx.tolist() == [1, 1, 1, 1, 0, 0, 0, 0, 0]
    # a bfloat16 input beside a float32 range: nothing is compared in fewer bits than it has
    low, high = torch.tensor(-1.0), torch.tensor(1.003)
    dx, *_ = q.backward(torch.ones(2, dtype=torch.bfloat16), torch.tensor([1.0, 1.0078125]).bfloat16(), low, high)
    assert dx is not None
    assert dx.tolist() == [1, 0]


def test_range_of_constants() -> None:
    for make in (MinMaxWeight, PercentileWeight):
        for symmetric in (True, False):
            q = make(8, symmetric=symmetric)
            for value in (0.0, 0.7, -0.7):
                for shape in ((2, 3, 2), (2, 1)):
                    w = torch.full(shape, value)
                    torch.testing.assert_close(q.quantize(w), w, rtol=1e-6, atol=0)


@pytest.mark.parametrize("make", [MinMaxInput, partial(PercentileInput, percentile=60.0)])
@pytest.mark.parametrize("symmetric", [True, False])
def test_an_empty_range_is_waited_through(make: Callable[..., MinMaxInput], symmetric: bool) -> None:
    q = make(4, symmetric=symmetric)
    q.initialize(torch.full((2, 3), 0.7))
    q.initialize(torch.zeros(2, 3))
    assert not q.calibrated
    assert (q.low, q.high) == (-1, 1)
    q.initialize(torch.tensor([1.0, 0.0, 0.0, 0.0]))
    assert q.calibrated == (q.percentile == 100)  # most of them zeros
    channels = make(4, symmetric=symmetric, per_channel=True)
    channels.build(3, 1)
    channels.initialize(torch.tensor([[0.0, 2.0, 0.0], [0.0, 3.0, -1.0]]))
    assert channels.calibrated
    assert (channels.low[0], channels.high[0]) == (channels.low.min(), channels.high.max())  # a channel of zeros


def test_nan_and_inf_in_weights() -> None:
    w = torch.tensor([[1.0, NAN, 0.5], [1.0, 0.2, INF], [1.0, 0.2, -0.5]])
    for symmetric in (True, False):
        assert MinMaxWeight(4, symmetric).quantize(w).isnan().all(1).tolist() == [True, True, False]
        w_q = PercentileWeight(4, 60, symmetric).quantize(w)
        assert w_q.isnan().tolist() == [[False, True, False], [False, False, False], [False, False, False]]
        assert w_q[1, 2] == w_q[1].max()


def test_rank_of_a_percentile_is_exact() -> None:
    x = torch.arange(1, 1001.0)
    for p, high in ((99.9, 999), (99.95, 1000), (99.0, 990), (50.1, 501)):
        q = PercentileInput(8, p)
        q.initialize(x[torch.randperm(1000)])
        assert q.high == high


def test_input_waits_for_data() -> None:
    q = MinMaxInput(8, per_channel=True)
    with pytest.raises(ValueError, match=r"per_channel \(=True\) needs the number of channels: call build"):
        q.initialize(torch.randn(2, 3))
    q.build(3, 1)
    q.initialize(torch.empty(0, 3))
    assert not q.calibrated
    assert q.low.tolist() == [-1] * 3
    q.initialize(torch.tensor([[1.0, -2.0, 3.0]]))
    assert q.calibrated
    assert (q.low.tolist(), q.high.tolist()) == ([0, -2, 0], [1, 0, 3])


# --- fp8 ---


@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
def test_fp8_rounds_as_the_cast_does(format: Format) -> None:
    dtype, *_, largest = FORMATS[format]
    halves = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16).float()
    x = torch.cat([halves, halves * 2.0**-9, torch.randn(10000) * 100])
    x = x[x.abs() <= largest]
    expected = x.to(dtype).float()
    assert round_fp8(x, format).equal(expected)
    assert round_fp8(x.double(), format).equal(expected.double())  # the other way of computing it
    beyond = torch.tensor([largest * 2, -largest * 1.01, INF, -INF, NAN])
    for wanted in (torch.float32, torch.float64):
        y = round_fp8(beyond.to(wanted), format)
        assert y[:4].tolist() == [largest, -largest, largest, -largest]
        assert y[4].isnan()


def test_fp8_of_float64_is_not_rounded_twice() -> None:
    above = double([1.0625 + 2.0**-40])  # a little above half way between 1 and 1.125; float32 sees the middle
    assert above.float().to(torch.float8_e4m3fn).item() == 1.0
    assert FP8("e4m3", None).quantize(above).item() == 1.125


@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_fp8_scaled(format: Format, dtype: torch.dtype) -> None:
    q = FP8(format)
    x = (torch.randn(3, 50) * 3e-3).to(dtype)
    wide = x if dtype == torch.float64 else x.float()
    scale = wide.abs().max() / FORMATS[format].largest
    expected = ((wide / scale).to(FORMATS[format].dtype).to(wide.dtype) * scale).to(dtype)
    assert q.quantize(x).equal(expected)
    codes = q.codes(x)
    assert codes.values.dtype == torch.int64
    assert codes.dequantize().to(dtype).equal(expected)
    grad = torch.randn_like(x)
    (dx,) = q.backward(grad.clone(), x)
    assert dx is not None
    assert dx.equal(grad)


def test_fp8_edges() -> None:
    plain = FP8("e4m3", None)
    x = torch.tensor([448.0, -448.0, 449.0, -INF, 2.0**-9, 2.0**-10, -0.0, NAN])
    assert plain.quantize(x)[:7].tolist() == [448, -448, 448, -448, 2.0**-9, 0, 0]
    assert plain.quantize(x)[7].isnan()
    assert plain.codes(x[:7]).values.tolist() == [448 * 512, -448 * 512, 448 * 512, -448 * 512, 1, 0, 0]
    (dx,) = plain.backward(torch.ones(8), x)
    assert dx is not None
    assert dx.tolist() == [1, 1, 0, 0, 1, 1, 1, 0]
    scaled = FP8("e5m2")
    assert scaled.codes(torch.tensor([1.0])).values.item() == 57344 * 2**16
    for zero in (torch.zeros(3), torch.full((3,), 1e-38), torch.empty(0)):
        assert scaled.quantize(zero).eq(0).all()
    for bad in (NAN, INF):
        assert scaled.quantize(torch.tensor([1.0, bad])).isnan().all()


# --- stochastic gradients ---


def exact(x: Tensor, noise: Tensor, bits: int, dims: tuple[int, ...]) -> Tensor:
    count = 2 ** (bits - 1) - 1
    step = x.abs().amax(dims, keepdim=True) / count
    return torch.floor((x / step).double() + noise.double()).to(x.dtype) * step


@pytest.mark.parametrize("per_sample", [True, False])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_stochastic_rounding_is_floor_of_the_sum(per_sample: bool, bits: int) -> None:
    q = Int8Stochastic(bits, per_sample)
    x = torch.randn(5, 3, 4, 4) * 1e-3
    noise = q.stream.uniform(x, *q.tensors())
    assert q.quantize(x, *q.tensors()).equal(exact(x, noise, bits, (1, 2, 3) if per_sample else (0, 1, 2, 3)))
    assert q.codes(x, *q.tensors()).values.abs().amax() <= 2 ** (bits - 1) - 1


def test_stochastic_rounding_at_a_tie(monkeypatch: pytest.MonkeyPatch) -> None:
    q = Int8Stochastic(8)
    monkeypatch.setattr(q.stream, "uniform", lambda x, *_: torch.full_like(x, 0.5))
    assert q.quantize(torch.tensor([[127.0, 2.5, -2.5, 2.25]]), *q.tensors()).tolist() == [[127, 3, -2, 2]]


def test_stochastic_rounding_is_unbiased() -> None:
    q = Int8Stochastic(3)
    x = torch.tensor([[-1.0, -0.6, -0.01, 0.0, 0.25, 0.9, 1.0, 1 / 3]])
    mean, repeats = torch.zeros_like(x, dtype=torch.float64), 4000
    for _ in range(repeats):
        mean += q.quantize(x, *q.tensors()) / repeats
        q.after_step_(None)
    error = (mean - x).abs()[0]
    assert error.max() < 4 * (1 / 3) / 2 / math.sqrt(repeats)  # 4 standard deviations of the worst case
    assert error[[0, 3, 6]].max() < 1e-6  # whole steps are exact every time
    assert q.quantize(torch.zeros(2, 9), *q.tensors()).eq(0).all()


def test_stochastic_rounding_never_lifts_whole_steps() -> None:
    q = Int8Stochastic(8)
    x = torch.arange(-127, 128.0).repeat(4000)[None]
    assert q.quantize(x, *q.tensors()).equal(x)


def test_stochastic_rounding_draws_again_what_it_drew(monkeypatch: pytest.MonkeyPatch) -> None:
    q, other = Int8Stochastic(4), Int8Stochastic(4)
    x = torch.randn(4, 3, 5)
    for _ in range(3):
        q.after_step_(None)
    first = q.quantize(x, *q.tensors())
    assert q.quantize(x, *q.tensors()).equal(first)
    other.load_state_dict(q.state_dict())
    assert other.quantize(x, *other.tensors()).equal(first)
    q.after_step_(None)
    assert not q.quantize(x, *q.tensors()).equal(first)
    other.after_step_(None)
    assert other.quantize(x, *other.tensors()).equal(q.quantize(x, *q.tensors()))
    shards = []
    for rank in range(2):
        monkeypatch.setattr(stochastic, "_place", lambda rank=rank: (rank, 2))
        shards.append(q.quantize(x[rank::2], *q.tensors()))
    monkeypatch.undo()
    assert torch.stack(shards, 1).flatten(0, 1).equal(q.quantize(x, *q.tensors()))
    assert not shards[1].equal(q.quantize(x[1::2], *q.tensors()))


def test_stochastic_rounding_shows_overflow() -> None:
    q = Int8Stochastic(8)
    for bad in (NAN, INF):
        x_q = q.quantize(torch.tensor([[1.0, bad], [1.0, 0.5]]), *q.tensors())
        assert not x_q[0].isfinite().any()
        assert x_q[1].isfinite().all()


# --- all ---

EACH: dict[str, Callable[[], Quantizer]] = {
    "N2UQWeight": N2UQWeight,
    "N2UQInput": partial(N2UQInput, 3),
    "DSQWeight": DSQWeight,
    "DSQInput": DSQInput,
    "MinMaxWeight": partial(MinMaxWeight, 4, False),
    "MinMaxInput": partial(MinMaxInput, 4, per_channel=True),
    "PercentileWeight": partial(PercentileWeight, 4, 80.0),
    "PercentileInput": partial(PercentileInput, 4, 80.0, True),
    "FP8": FP8,
    "FP8(None)": partial(FP8, "e5m2", None),
    "Int8Stochastic": Int8Stochastic,
}


def ready(make: Callable[[], Quantizer], x: Tensor) -> Quantizer:
    q = make()
    q.build(x.shape[1], 1)
    q.to(x.dtype)
    q.initialize(x)
    return q


@pytest.mark.parametrize("make", EACH.values(), ids=EACH.keys())
def test_state_goes_round(make: Callable[[], Quantizer]) -> None:
    x = torch.randn(6, 4)
    q, other = ready(make, x), ready(make, x * 3)
    with torch.no_grad():
        for parameter in q.parameters():
            parameter.mul_(0.7)
    assert pickle.loads(pickle.dumps(q))(x).equal(q(x))
    other.load_state_dict(q.state_dict())
    assert other(x).equal(q(x))
    assert other.calibrated == q.calibrated
    assert repr(q).startswith(type(q).__name__)


@pytest.mark.parametrize("make", EACH.values(), ids=EACH.keys())
def test_float64_is_never_less(make: Callable[[], Quantizer]) -> None:
    x = torch.randn(6, 4, dtype=torch.float64)
    q = ready(make, x)
    codes = q.codes(x, *q.tensors())
    assert codes.scale.dtype == torch.float64
    assert codes.dequantize().equal(q.quantize(x, *q.tensors()))
    grads = q.backward(torch.randn_like(x), x, *hand_over(q))
    assert all(grad is None or grad.dtype == torch.float64 for grad in grads)


BAD_CHECKPOINTS = {
    "width": (N2UQInput, {"widths": torch.tensor([0.5, 0.0, 0.5])}, r"widths \(=0.0\) in the checkpoint must"),
    "scale": (
        N2UQInput,
        {"output_scale": torch.tensor(-1.0)},
        r"output_scale \(=-1.0\) in the checkpoint must be positive",
    ),
    "range": (DSQInput, {"lower": torch.tensor(3.0)}, r"lower \(=3.0\) must be at most upper \(=1.0\)"),
    "alpha": (DSQWeight, {"alpha": torch.tensor(1.0)}, r"alpha \(=1.0\) in the checkpoint must be above 0"),
    "low": (MinMaxInput, {"low": torch.tensor(0.5)}, r"low \(=0.5\) in the checkpoint must be at most 0"),
    "high": (MinMaxInput, {"high": torch.tensor(NAN)}, r"high \(=nan\) in the checkpoint must be at least 0"),
}


@pytest.mark.parametrize(("make", "wrong", "message"), BAD_CHECKPOINTS.values(), ids=BAD_CHECKPOINTS.keys())
def test_bad_checkpoint(make: type[Quantizer], wrong: dict[str, Tensor], message: str) -> None:
    q = make()
    with pytest.raises(ValueError, match=message):
        q.load_state_dict({**q.state_dict(), **wrong})


BAD: list[tuple[Callable[[], object], str]] = [
    (lambda: N2UQWeight(1), r"bits \(=1\) must be a whole number from"),
    (lambda: N2UQInput(9), r"bits \(=9\) must be a whole number from"),
    (lambda: DSQWeight(0), r"bits \(=0\) must be a whole number from 1 to 8"),
    (lambda: DSQInput(4, 0.6), r"alpha \(=0.6\) must be from 0.001 to 0.5"),
    (lambda: MinMaxWeight(1), r"bits \(=1\) must be a whole number from . to . for MinMaxWeight"),
    (lambda: MinMaxInput(9), r"bits \(=9\) must be a whole number from . to . for MinMaxInput"),
    (lambda: PercentileWeight(8, 50), r"percentile \(=50\) must be above 50 and at most 100"),
    (lambda: PercentileInput(8, 100.5), r"percentile \(=100.5\) must be above 50"),
    (lambda: FP8("e3m4"), r"format \(='e3m4'\) must be 'e4m3' or 'e5m2'"),  # pyright: ignore[reportArgumentType]
    (lambda: FP8("e4m3", "static"), r"scale \(='static'\) must be"),  # pyright: ignore[reportArgumentType]
    (lambda: Int8Stochastic(1), r"bits \(=1\) must be a whole number from"),
    (lambda: n2uq(1), r"weight_bits \(=1\) must be a whole number from . to . for n2uq"),
    (lambda: n2uq(2, 9), r"input_bits \(=9\) must be a whole number from . to . for n2uq"),
    (lambda: dsq(4, 0), r"input_bits \(=0\) must be a whole number from . to . for dsq"),
    (lambda: dsq(alpha=0.7), r"alpha \(=0.7\) must be from"),
    (lambda: minmax(2.5), r"weight_bits \(=2.5\) must be a whole number"),  # pyright: ignore[reportArgumentType]
    (lambda: percentile(percentile=40), r"percentile \(=40\) must be above 50"),
    (lambda: fp8(input_format="e3"), r"input_format \(='e3'\) must be"),  # pyright: ignore[reportArgumentType]
    (lambda: fp8(grad_format="e3"), r"grad_format \(='e3'\) must be"),  # pyright: ignore[reportArgumentType]
    (lambda: fp8(scale="x"), r"scale \(='x'\) must be"),  # pyright: ignore[reportArgumentType]
]


@pytest.mark.parametrize(("make", "message"), BAD, ids=[message for _, message in BAD])
def test_bad_arguments(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


SCHEMES = [
    n2uq(),
    n2uq(4, None, rescale_grad=False),
    dsq(),
    dsq(1, 2, alpha=0.1),
    minmax(),
    minmax(2, 4, symmetric=False, input_symmetric=True, per_channel=False),
    percentile(),
    percentile(4, None, 99.0),
    fp8(),
    fp8("e5m2", None, "e5m2", None),
    minmax().with_grad(Int8Stochastic),
]


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("autocast", [False, True])
def test_training_step(scheme: Scheme, autocast: bool) -> None:
    layer = qconv.QConv2d(3, 4, 3, padding=1, scheme=pickle.loads(pickle.dumps(scheme)))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.05)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        output = layer(torch.rand(2, 3, 6, 6) * 2)
    assert layer.input_quantizer.calibrated
    output.float().square().mean().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
    before = layer.weight.detach().clone()
    optimizer.step()
    layer.after_step_()
    assert layer(torch.rand(2, 3, 6, 6)).isfinite().all()
    assert not layer.weight.equal(before)


def test_schemes_are_written_as_they_were_called() -> None:
    assert n2uq().name == "n2uq(weight_bits=2, input_bits=2)"
    assert dsq(3, None).name == "dsq(weight_bits=3, input_bits=None)"
    assert percentile(4, 8, 99.0).name == "percentile(weight_bits=4, input_bits=8, percentile=99.0)"
    assert fp8().name == "fp8(format=e4m3, input_format=e4m3)"
    for scheme in (n2uq(2, None), dsq(2, None), minmax(2, None), percentile(2, None), fp8(input_format=None)):
        assert scheme.input is Identity
    assert fp8(grad_format="e5m2").grad is not None


@pytest.mark.parametrize("make", [n2uq, dsq, minmax, percentile, fp8])
def test_config_has_the_defaults(make: Callable[..., Scheme]) -> None:
    path = Path(__file__).parent.parent / "configs" / "scheme" / f"{make.__name__}.yaml"
    config = yaml.safe_load(path.read_text())
    assert config.pop("_target_") == f"qconv.schemes.{make.__name__}"
    assert list(config) == list(inspect.signature(make).parameters)
    assert make(**config).name == make().name


def test_float_checkpoint_sets_the_range_again() -> None:
    layer = qconv.QConv2d(3, 4, 3, scheme=dsq())
    weight = torch.randn(4, 3, 3, 3)
    layer.load_state_dict({"weight": weight, "bias": torch.zeros(4)})
    q = layer.weight_quantizer
    assert isinstance(q, DSQWeight)
    assert q.lower == weight.min()
    assert q.upper == weight.max()
