"""What uniform methods, 8-bit floats and gradients of few bits have of their own: first values, ties, noise.

The formulas are held by test_golden.py, what all methods have in common by test_quantizers.py and test_methods.py.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import golden
import pytest
import torch
from methods import handed, ready
from torch import Tensor

import qconv
from qconv.methods.apot import APoTInput
from qconv.methods.dsq import DSQInput, DSQWeight
from qconv.methods.ewgs import EWGSInput
from qconv.methods.fp8 import FORMATS, FP8, Format, round_fp8
from qconv.methods.lsq import LSQ, LSQInput, lsq
from qconv.methods.lsq_plus import LSQPlus, LSQPlusInput, least_squares_range
from qconv.methods.minmax import MinMaxInput, MinMaxWeight, PercentileInput, PercentileWeight, uniform_range
from qconv.methods.n2uq import N2UQInput, N2UQWeight
from qconv.quantizers import PACT, DoReFaGradient, DoReFaInput, DoReFaWeight, Int8Stochastic, Quantizer
from qconv.quantizers.numbers import wide

NAN, INF = math.nan, math.inf
F64 = torch.float64
DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)


def double(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def near(found: Tensor | None, expected: Tensor | float, rtol: float = 1e-12) -> None:
    assert found is not None
    torch.testing.assert_close(found, torch.as_tensor(expected, dtype=F64).view_as(found), rtol=rtol, atol=1e-12)


def gradients(quantizer: Quantizer, grad: Tensor, x: Tensor) -> tuple[Tensor | None, ...]:
    return quantizer.backward(grad.clone(), x, *handed(quantizer))


# DoReFa and PACT


def test_infinity_and_nan() -> None:
    x = torch.tensor([math.inf, -math.inf, math.nan, 0.3])
    for quantizer, top, bottom in (
        (DoReFaInput(2), 1, 0),
        (PACT(2, 6.0), 6, 0),
        (LSQInput(2, step_init=2.0), 6, 0),
        (LSQInput(2, signed=True, step_init=2.0), 2, -4),
        (LSQPlusInput(2), 3, 0),
    ):
        x_q = quantizer(x).detach()
        assert x_q[:2].tolist() == [top, bottom]
        assert x_q[2].isnan()
        assert x_q[3].isfinite()
        dx = gradients(quantizer, torch.ones(4), x)[0]
        assert dx is not None
        assert dx.tolist() == [0, 0, 0, 1]
        finite = gradients(quantizer, torch.ones(3), x[[0, 1, 3]])
        assert all(grad is None or grad.isfinite().all() for grad in finite)
    assert gradients(PACT(2), torch.ones(4), x)[1] == 1
    assert DoReFaWeight(2)(torch.tensor([[math.inf, -math.inf, 0.1]])).tolist()[0][:2] == [1, -1]
    assert DoReFaWeight(2)(torch.tensor([[math.nan, 0.1]])).isnan().all()


def test_pact_starts_where_few_bits_have_levels() -> None:
    assert [PACT(bits).alpha.item() for bits in (1, 2, 3, 4, 8)] == pytest.approx([8 / 15, 1.6, 56 / 15, 8, 8])


# LSQ and LSQ+


def test_first_steps() -> None:
    w = torch.randn(3, 2, 4, dtype=F64) + 0.2
    near(ready(partial(LSQ, 1), w)[1][0], w.abs().mean())
    near(ready(partial(LSQ, 3, per_channel=True), w)[1][0], 2 * w.abs().mean((1, 2)) / math.sqrt(3))
    mu, sigma = w.mean(), w.std(correction=0)
    near(ready(partial(LSQPlus, 3), w)[1][0], torch.maximum((mu - 3 * sigma).abs(), (mu + 3 * sigma).abs()) / 4)
    mu, sigma = w.mean((1, 2)), w.std((1, 2), correction=0)
    found = ready(partial(LSQPlus, 2, per_channel=True), w)[1][0]
    near(found, torch.maximum((mu - 3 * sigma).abs(), (mu + 3 * sigma).abs()) / 2)
    unsigned, signed = LSQInput(4, signed=False), LSQInput(4, signed=True)
    assert (unsigned.step.item(), unsigned.calibrated) == (1.0, False)
    for quantizer, high in ((unsigned, 15), (signed, 7)):
        step = quantizer.step
        quantizer.initialize(w)
        assert (quantizer.step is step, quantizer.calibrated) == (True, True)
        assert step.item() == pytest.approx(2 * w.abs().mean().item() / math.sqrt(high), rel=1e-6)


def test_lsq_input_keeps_the_step_where_the_first_batch_is_zero() -> None:
    x = torch.randn(2, 3, 5)
    x[:, 1] = 0
    quantizer = LSQInput(2, signed=False, per_channel=True)
    quantizer.build(3, 1)
    quantizer.initialize(x)
    expected = 2 * x.abs().mean((0, 2)) / math.sqrt(3)
    torch.testing.assert_close(quantizer.step.detach(), torch.where(expected > 0, expected, 1.0))
    fixed = LSQInput(2, per_channel=True, step_init=0.25)
    fixed.build(3, 1)
    fixed.initialize(x)
    assert (fixed.step.tolist(), fixed.calibrated) == ([0.25] * 3, True)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_lsq_plus_range_is_the_best_of_its_grid(bits: int) -> None:
    x = torch.cat([torch.randn(999, dtype=F64).relu() - 0.17, torch.tensor([9.0], dtype=F64)])  # one far outlier
    n = 2**bits - 1
    best = (math.inf, 0.0, 0.0)
    low, high, mu = x.min().item(), x.max().item(), x.mean().item()
    for a in range(16, 0, -1):
        for b in range(16, 0, -1):
            lowest, highest = mu - a / 16 * (mu - low), mu + b / 16 * (high - mu)
            s = (highest - lowest) / n
            error = sum((min(max(round((v - lowest) / s), 0), n) * s + lowest - v) ** 2 for v in x.tolist())
            best = min(best, (error, s, lowest))
    step, beta = least_squares_range(x, n)
    near(step, best[1], rtol=1e-9)
    near(beta, best[2], rtol=1e-9)


def test_lsq_plus_of_many_values_and_of_a_constant() -> None:
    x = torch.randn(64, 8, 16, 16).relu()
    first, again = LSQPlusInput(4), LSQPlusInput(4)
    first.initialize(x)
    again.initialize(x)
    assert first.step.equal(again.step)
    assert first.beta.equal(again.beta)
    assert (first(x) - x).square().mean() < 0.01
    constant = LSQPlusInput(2)
    constant.initialize(torch.full((3, 4), 0.3))
    assert (constant.step.item(), constant.beta.item(), constant.calibrated) == (1.0, 0.0, False)  # no range


def test_schemes_make_what_they_say() -> None:
    layer = qconv.QConv2d(3, 4, 3, scheme=lsq(3, 2, signed_input=True, per_channel=True, step_init=0.5))
    assert layer.scheme.name == "lsq(weight_bits=3, input_bits=2, signed_input=True, per_channel=True, step_init=0.5)"
    weight, input = layer.weight_quantizer, layer.input_quantizer
    assert isinstance(weight, LSQ)
    assert isinstance(input, LSQInput)
    assert (weight.bits, weight.per_channel, weight.step.shape) == (3, True, (4,))
    assert (input.bits, input.signed, input.step.shape) == (2, True, (1,))


def test_golden_steps() -> None:
    w = torch.tensor(golden.FILTERS[:1])
    for bits, step in ((2, 0.9624999999999999), (4, 0.36379080527138113)):
        for per_channel in (False, True):
            near(ready(partial(LSQ, bits, per_channel=per_channel), w)[1][0], step)


# N2UQ


def test_n2uq_input_with_nan() -> None:
    q = N2UQInput(3)
    x = torch.tensor([[0.3, NAN, 0.9]])
    x_q = q.quantize(x, *handed(q))
    assert x_q.isnan().tolist() == [[False, True, False]]
    dx, widths, start, s1, s2 = q.backward(torch.ones_like(x), x, *handed(q))
    assert dx is not None
    assert dx[0, 1] == 0
    assert dx.isfinite().all()
    assert all(other is not None and other.isfinite().all() for other in (widths, start, s1))
    assert s2 is not None
    assert s2.isnan()


@pytest.mark.parametrize("make", [N2UQWeight, *(partial(DoReFaWeight, bits) for bits in range(2, 9))])
@pytest.mark.parametrize("value", [0.0, 1e-42])
def test_gradients_of_filters_of_zeros_pass(make: Callable[..., Quantizer], value: float) -> None:
    w = torch.full((2, 3, 1, 2), value)
    (dw,) = make().backward(torch.ones_like(w), w)
    assert dw is not None
    assert dw.eq(1).all()


def test_n2uq_input_starts_uniform() -> None:
    q = N2UQInput(2)
    assert q.widths.tolist() == pytest.approx([2 / 3] * 3)
    assert (q.start.item(), q.input_scale.item(), q.output_scale.item()) == (0, 1, 1)
    with torch.no_grad():
        q.widths.copy_(torch.tensor([-1.0, 1e-3, 0.4]))
        q.after_step_(None)
    assert q.widths.tolist() == pytest.approx([1e-3, 1e-3, 0.4])


# DSQ


def test_dsq_is_initialized_from_the_data() -> None:
    w = torch.randn(4, 3)
    for quantizer in (DSQWeight(3, alpha=0.3), DSQInput(3)):
        quantizer.initialize(w)
        assert (quantizer.lower, quantizer.upper) == (w.min(), w.max())
    assert DSQWeight(3, alpha=0.3).alpha.item() == pytest.approx(0.3)


def test_dsq_stays_in_range() -> None:
    w, q = torch.randn(2, 3), DSQWeight(3)
    q.initialize(w)
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


# Minimum and maximum, percentiles


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("dim", [None, 1, -1])
@pytest.mark.parametrize("p", [100.0, 90.0])
def test_range_of_inputs(symmetric: bool, dim: int | None, p: float) -> None:
    seen = torch.randn(5, 3, 4, dtype=F64) + 0.4
    per_channel = dim is not None
    q = MinMaxInput(8, symmetric, per_channel) if p == 100 else PercentileInput(8, p, symmetric, per_channel)
    q.build(seen.shape[dim or 1], dim or 1)
    q.double()
    q.initialize(seen)
    assert q.calibrated
    parts = [seen] if dim is None else seen.movedim(dim, 0)
    expected = [golden.extent(part.numpy(), p, symmetric) for part in parts]
    assert list(zip(q.low.flatten().tolist(), q.high.flatten().tolist(), strict=True)) == expected


def test_a_range_of_more_bits_than_the_input_has() -> None:
    low, high = torch.tensor(-1.0), torch.tensor(1.003)
    dx, *_ = MinMaxInput(3).backward(torch.ones(2).bfloat16(), torch.tensor([1.0, 1.0078125]).bfloat16(), low, high)
    assert dx is not None
    assert dx.tolist() == [1, 0]


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


# FP8


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


def test_fp8_edges() -> None:
    scaled = FP8("e5m2")
    for zero in (torch.zeros(3), torch.full((3,), 1e-38), torch.empty(0)):
        assert scaled.quantize(zero).eq(0).all()
    for bad in (NAN, INF):
        assert scaled.quantize(torch.tensor([1.0, bad])).isnan().all()
    (dx,) = FP8("e4m3", None).backward(torch.ones(3), torch.tensor([-INF, NAN, 448.0]))
    assert dx is not None
    assert dx.tolist() == [0, 0, 1]


# Gradients of few bits


def test_stochastic_rounding_never_lifts_whole_steps() -> None:
    q = Int8Stochastic(8)
    x = torch.arange(-127, 128.0).repeat(4000)[None]
    assert q.quantize(x, *q.tensors()).equal(x)


@pytest.mark.parametrize("make", [DoReFaGradient, Int8Stochastic])
def test_gradients_show_overflow_and_keep_zeros(make: Callable[..., Quantizer]) -> None:
    quantizer = make()
    for bad in (NAN, INF, -INF):
        g_q = quantizer(torch.tensor([[bad, 1.0, 0.0], [1.0, 2.0, 3.0], [0.0, 0.0, -0.0]]))
        assert not g_q[0].isfinite().any()
        assert g_q[1].isfinite().all()
        assert g_q[2].eq(0).all()
    x = torch.randn(20, 4) * 1e-3
    largest = x.abs().amax(1, keepdim=True)
    assert (quantizer(x).abs() <= largest * (1 + 1e-6)).all()
    for bits in (2, 3, 4, 8):
        quantizer = make(bits)
        codes = quantizer.codes(torch.randn(4000, 9) * 1e-3, *quantizer.tensors()).values.long()
        assert codes.abs().amax() <= (2**bits - 1 if make is DoReFaGradient else 2 ** (bits - 1) - 1)


@DTYPES
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 8])
def test_a_range_around_zero_has_one_zero_point_in_all_dtypes(bits: int, dtype: torch.dtype) -> None:
    """Half of its steps lie below 0, which is half way between two whole numbers: the even one, whatever the range."""
    for high in torch.rand(200, dtype=torch.float64).add(0.5).to(dtype):
        first, last, _ = uniform_range(wide(-high), wide(high), bits, symmetric=False)
        assert (-first, last - first) == (2 ** (bits - 1), 2**bits - 1)


def test_inputs_of_which_each_channel_has_its_levels() -> None:
    quantizer = MinMaxInput(4, per_channel=True)
    quantizer.build(2, 1)
    quantizer.initialize(torch.tensor([[[-1.0, 2.0], [-3.0, 1.0]]]))
    assert quantizer.levels(*quantizer.tensors()) is None
    alike = MinMaxInput(4, symmetric=True, per_channel=True)
    alike.build(2, 1)
    alike.initialize(torch.tensor([[[-1.0, 2.0], [-3.0, 1.0]]]))
    levels = alike.levels(*alike.tensors())
    assert levels is not None
    assert (levels.low, levels.high) == (-7, 7)


OF_STEPS = LSQ, LSQInput, partial(LSQ, per_channel=True), partial(LSQInput, per_channel=True), LSQPlusInput


@pytest.mark.parametrize(
    ("make", "name"), [*((make, "step") for make in OF_STEPS), (PACT, "alpha"), (APoTInput, "alpha")]
)
def test_what_is_learned_is_positive_where_nobody_calls_after_step(make: Any, name: str) -> None:
    x, (wrong, clamped) = torch.randn(3, 5, 2, 2) * 2, (make(4) for _ in range(2))
    for quantizer in (wrong, clamped):
        quantizer.build(5, 1)
        quantizer.initialize(x)
        with torch.no_grad():
            getattr(quantizer, name).fill_(-2)
    with torch.no_grad():
        clamped.after_step_(x)
    assert (getattr(clamped, name) > 0).all()
    assert wrong(x).equal(clamped(x))
    grads = (quantizer.backward(torch.ones_like(x), x, *quantizer.tensors()) for quantizer in (wrong, clamped))
    torch.testing.assert_close(*grads, rtol=0, atol=0)


@pytest.mark.parametrize("make", [EWGSInput, partial(DSQInput, 4)], ids=["ewgs", "dsq"])
def test_the_end_that_is_trained_leaves_the_other(make: Any) -> None:
    for name, other, to in (("lower", "upper", 5.0), ("upper", "lower", -5.0)):
        quantizer = make()
        quantizer.calibrated = True
        getattr(quantizer, other).requires_grad_(False)
        before = getattr(quantizer, other).item()
        with torch.no_grad():
            getattr(quantizer, name).fill_(to)
            quantizer.after_step_(None)
        assert getattr(quantizer, other) == before
        assert quantizer.lower < quantizer.upper
        make().load_state_dict(quantizer.state_dict())
