"""DoReFa, PACT, LSQ and LSQ+ against golden vectors and against autograd of their formulas in float64."""

import copy
import math
import pickle
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn

import qconv
from qconv import schemes
from qconv.lifecycle.calibrate import calibrate
from qconv.methods.dorefa import DoReFaGradient, DoReFaInput, DoReFaWeight, dorefa
from qconv.methods.lsq import LSQ, LSQInput, lsq
from qconv.methods.lsq_plus import LSQPlus, LSQPlusInput, least_squares_range, lsq_plus
from qconv.methods.pact import PACT, pact
from qconv.quantizers import Identity, Quantizer
from qconv.quantizers.numbers import SMALLEST

F64 = torch.float64
W = torch.tensor([-1.2, -0.6, -0.3, -0.1, 0.05, 0.2, 0.5, 0.9], dtype=F64)[None]
G = torch.tensor([0.1, -0.2, 0.3, -0.4, 0.5, 0.6, 0.7, -0.8], dtype=F64)[None]
X = torch.tensor([-1.5, -1.0, -0.4, 0.0, 0.3, 0.7, 1.0, 1.8], dtype=F64)[None]
GX = torch.tensor([1.0, 2, 3, 4, 5, 6, 7, 8], dtype=F64)[None]

DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
BITS = pytest.mark.parametrize("bits", range(1, 9))


def near(found: Tensor | None, expected: Tensor | list[float] | float, rtol: float = 1e-12) -> None:
    assert found is not None
    torch.testing.assert_close(found, torch.as_tensor(expected, dtype=F64).view_as(found), rtol=rtol, atol=1e-12)


def gradients(quantizer: Quantizer, grad: Tensor, x: Tensor) -> tuple[Tensor | None, ...]:
    return quantizer.backward(grad.clone(), x, *(tensor.detach() for tensor in quantizer.tensors()))


def against_autograd(quantizer: Quantizer, formula: Callable[..., Tensor], x: Tensor, *, planted: bool = False) -> None:
    """Compare forward and every gradient with autograd of ``formula(x, *learned tensors)``."""
    learned = [tensor.detach().double() for tensor in quantizer.tensors()]
    leaves = [tensor.clone().requires_grad_() for tensor in (x, *learned)]
    expected = formula(*leaves)
    near(quantizer.quantize(x, *learned), expected.detach())
    grad = torch.randn_like(x)
    wanted = torch.autograd.grad(expected, leaves, grad)
    found = quantizer.backward(grad.clone(), x, *learned)
    if planted:
        found = (*found[:-1], found[-1] * 1.000001)  # pyright: ignore[reportOptionalOperand]
    for got, want in zip(found, wanted, strict=True):
        near(got, want)


def rounded(x: Tensor) -> Tensor:
    return x + (x.round() - x).detach()


def clamped(x: Tensor, low: float, high: float) -> Tensor:
    """The clamp whose gradient passes at both limits; torch's passes there in some versions only."""
    return torch.where((x >= low) & (x <= high), x, x.detach().clamp(low, high))


def binary(x: Tensor) -> Tensor:
    """The sign, passing the gradient of the clamp to [-1, 1]."""
    clipped = clamped(x, -1, 1)
    return clipped + (signs(x) - clipped).detach()


def signs(x: Tensor) -> Tensor:
    return torch.where(x >= 0, 1.0, -1.0).double()


def ready(quantizer: Quantizer, x: Tensor) -> Quantizer:
    dim = 1 if x.ndim > 1 else -1
    quantizer.build(x.shape[dim], dim)
    quantizer.initialize(x)
    return quantizer


def every_quantizer() -> Iterator[Quantizer]:
    for bits in range(1, 9):
        yield from (DoReFaWeight(bits), DoReFaInput(bits), PACT(bits, 1.3), LSQ(bits), LSQ(bits, per_channel=True))
        yield from (LSQInput(bits), LSQInput(bits, signed=True), LSQInput(bits, per_channel=True), LSQPlus(bits))
        yield from (LSQPlus(bits, per_channel=True), LSQPlusInput(bits), DoReFaGradient(bits))


# Golden vectors


def test_dorefa_golden() -> None:
    one = DoReFaWeight(1)
    near(one.quantize(W), 0.48125 * torch.tensor([-1, -1, -1, -1, 1, 1, 1, 1], dtype=F64))
    near(one.backward(G.clone(), W)[0], G)
    dw = [0.036588, -0.170713, 0.329322, -0.475049, 0.598272, 0.691684, 0.660362, -0.467261]
    third = 1 / 3
    near(DoReFaWeight(2).quantize(W), [-1, -third, -third, -third, third, third, third, 1])
    near(DoReFaWeight(4).quantize(W) * 15, [-15, -9, -5, -1, 1, 3, 9, 13])
    for bits in (2, 4):
        near(DoReFaWeight(bits).backward(G.clone(), W)[0], dw, rtol=3e-5)
        near(DoReFaInput(bits).backward(GX.clone(), X)[0], [0, 0, 0, 4, 5, 6, 7, 0])
    near(DoReFaInput(2).quantize(X), [0, 0, 0, 0, third, 2 * third, 1, 1])
    near(DoReFaInput(4).quantize(X) * 15, [0, 0, 0, 0, 4, 10, 15, 15])


def test_pact_golden() -> None:
    quantizer = PACT(2, alpha=1.0).double()
    near(quantizer(X).detach(), [0, 0, 0, 0, 1 / 3, 2 / 3, 1, 1])
    dx, dalpha = gradients(quantizer, GX, X)
    near(dx, [0, 0, 0, 4, 5, 6, 0, 0])
    near(dalpha, 15.0)


@pytest.mark.parametrize(
    ("bits", "step", "levels", "ds"),
    [
        (2, 0.9624999999999999, [-1, -1, 0, 0, 0, 0, 1, 1], 0.10101525445522107),
        (4, 0.36379080527138113, [-3, -2, -1, 0, 0, 1, 1, 2], 0.03419994397711499),
    ],
)
@pytest.mark.parametrize("per_channel", [False, True])
def test_lsq_weight_golden(bits: int, step: float, levels: list[float], ds: float, per_channel: bool) -> None:
    quantizer = ready(LSQ(bits, per_channel=per_channel), W)
    near(quantizer.tensors()[0].detach(), step)
    near(quantizer(W).detach(), step * torch.tensor(levels, dtype=F64))
    dw, found = gradients(quantizer, G, W)
    near(dw, G)
    near(found, ds)


@pytest.mark.parametrize("x", [X, X[0]], ids=["a sample", "one dimension"])
def test_lsq_input_golden(x: Tensor) -> None:
    quantizer = LSQInput(2, step_init=0.5).double()
    near(quantizer(x).detach(), [0, 0, 0, 0, 0.5, 0.5, 1, 1.5])
    dx, ds = gradients(quantizer, GX.view_as(x), x)
    near(dx, [0, 0, 0, 4, 5, 6, 7, 0])
    near(ds, 4.817329827473585)


def test_lsq_plus_golden() -> None:
    quantizer = LSQPlusInput(2).double()
    with torch.no_grad():
        quantizer.step.fill_(0.5)
        quantizer.beta.fill_(-0.2)
    near(quantizer(X).detach(), [-0.2, -0.2, -0.2, -0.2, 0.3, 0.8, 0.8, 1.3])
    dx, ds, dbeta = gradients(quantizer, GX, X)
    near(dx, [0, 0, 0, 4, 5, 6, 7, 0])
    near(ds, 20.8 / math.sqrt(8 * 3))
    near(dbeta, 14 / math.sqrt(8 * 3))


# Every gradient against autograd of the formula


@BITS
def test_dorefa_weight_is_autograd_of_its_formula(bits: int) -> None:
    def formula(w: Tensor, detach: bool) -> Tensor:
        if bits == 1:
            return w + (signs(w) * w.abs().mean() - w).detach()
        t, n = w.tanh(), 2**bits - 1
        m = t.abs().max()
        return 2 * rounded((t / (2 * (m.detach() if detach else m)) + 0.5) * n) / n - 1

    w = torch.randn(5, 3, 3, dtype=F64)
    tied = w.clone()
    tied[0, 0, 0], tied[1, 1, 1], tied[2, 2, 2] = 4.0, -4.0, 4.0  # three largest ones share the gradient of m
    for x in (w, tied):
        against_autograd(DoReFaWeight(bits), partial(formula, detach=True), x)
        against_autograd(DoReFaWeight(bits, detach_max=False), partial(formula, detach=False), x)
    if bits > 1:
        with pytest.raises(AssertionError):
            against_autograd(DoReFaWeight(bits, detach_max=True), partial(formula, detach=False), w)


@BITS
def test_activations_are_autograd_of_their_formula(bits: int) -> None:
    n = 2**bits - 1

    def clipped(x: Tensor) -> Tensor:
        return rounded(clamped(x, 0, 1) * n) / n

    def pact(x: Tensor, alpha: Tensor) -> Tensor:
        # alpha · clamp(x / alpha, 0, 1), of which neither passes the gradient of the other at alpha
        y = torch.where(x < 0, 0.0, torch.where(x < alpha, x, alpha))
        return y + ((x.clamp(min=0).minimum(alpha) * n / alpha).round() * alpha / n - y).detach()

    x = torch.randn(4, 3, 5, dtype=F64)
    against_autograd(DoReFaInput(bits), clipped, torch.cat([x.flatten(), torch.tensor([0.0, 1.0], dtype=F64)]))
    ties = torch.cat([x.flatten(), torch.tensor([0.0, 0.75, 0.75, 5.0], dtype=F64)])
    against_autograd(PACT(bits, 0.75), pact, ties)
    with pytest.raises(AssertionError):
        against_autograd(PACT(bits, 0.75), pact, ties, planted=True)


def lsq_formula(low: int, high: int, scale: float, shape: tuple[int, ...]) -> Callable[[Tensor, Tensor], Tensor]:
    """LSQ as in the paper's appendix: the gradient of s scaled, the rounding straight through."""

    def formula(v: Tensor, s: Tensor) -> Tensor:
        s = s * scale + (s - s * scale).detach()
        s = s.view(shape)
        z = v / s
        return (binary(z) if low == -1 and high == 1 else rounded(clamped(z, low, high))) * s

    return formula


def limits(bits: int, signed: bool) -> tuple[int, int]:
    if not signed:
        return 0, 2**bits - 1
    return (-1, 1) if bits == 1 else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


@BITS
@pytest.mark.parametrize("kind", [LSQ, LSQPlus])
@pytest.mark.parametrize("grad_scale", ["paper", "numel"])
def test_lsq_weight_is_autograd_of_its_formula(bits: int, kind: type[LSQ], grad_scale: str) -> None:
    w = torch.randn(4, 3, 5, dtype=F64)
    low, high = limits(bits, signed=True)
    for per_channel in (False, True):
        quantizer = kind(bits, per_channel, grad_scale)  # pyright: ignore[reportArgumentType]
        quantizer.initialize(w)
        quantizer.step.detach().mul_(0.7)
        count = 15 if per_channel and grad_scale == "paper" else 60
        shape = (4, 1, 1) if per_channel else ()
        formula = lsq_formula(low, high, 1 / math.sqrt(count * high), shape)
        against_autograd(quantizer, formula, w)
        with pytest.raises(AssertionError):
            against_autograd(quantizer, formula, w, planted=True)


@BITS
@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("grad_scale", ["paper", "numel"])
def test_lsq_input_is_autograd_of_its_formula(bits: int, signed: bool, grad_scale: str) -> None:
    x = torch.randn(2, 3, 5, 7, dtype=F64)
    low, high = limits(bits, signed)
    for per_channel, dim in ((False, 1), (True, 1), (True, -1)):
        quantizer = LSQInput(bits, signed, per_channel, grad_scale)  # pyright: ignore[reportArgumentType]
        quantizer.build(x.shape[dim], dim)
        quantizer.initialize(x)
        quantizer.double()
        quantizer.step.detach().mul_(0.7)
        count = 210 if grad_scale == "numel" else 105
        if per_channel and grad_scale == "paper":
            count //= x.shape[dim]
        shape = () if not per_channel else (3, 1, 1) if dim == 1 else (7,)
        against_autograd(quantizer, lsq_formula(low, high, 1 / math.sqrt(count * high), shape), x)


@BITS
@pytest.mark.parametrize("grad_scale", ["paper", "numel"])
def test_lsq_plus_input_is_autograd_of_its_formula(bits: int, grad_scale: str) -> None:
    high = 2**bits - 1
    scale = 1 / math.sqrt((60 if grad_scale == "numel" else 15) * high)

    def formula(x: Tensor, s: Tensor, beta: Tensor) -> Tensor:
        s, beta = (t * scale + (t - t * scale).detach() for t in (s, beta))
        return rounded(clamped((x - beta) / s, 0, high)) * s + beta

    x = torch.randn(4, 3, 5, dtype=F64)
    quantizer = LSQPlusInput(bits, grad_scale)  # pyright: ignore[reportArgumentType]
    quantizer.initialize(x)
    quantizer.double()
    quantizer.step.detach().mul_(0.7)
    against_autograd(quantizer, formula, x)
    with pytest.raises(AssertionError):
        against_autograd(quantizer, formula, x, planted=True)


# Ties, levels, and what is not a number


@DTYPES
def test_ties_of_the_clips(dtype: torch.dtype) -> None:
    low, top = torch.tensor(0.0, dtype=dtype), torch.tensor(1.0, dtype=dtype)
    up, down = torch.tensor(math.inf, dtype=dtype), torch.tensor(-math.inf, dtype=dtype)
    x = torch.stack([low, -low, torch.nextafter(low, down), top, torch.nextafter(top, up), torch.nextafter(top, down)])
    ones = torch.ones_like(x)
    assert gradients(DoReFaInput(3), ones, x)[0].tolist() == [1, 1, 0, 1, 0, 1]  # pyright: ignore[reportOptionalMemberAccess]
    dx, dalpha = gradients(PACT(3, alpha=1.0), ones, x)
    assert dx is not None
    assert dalpha is not None
    assert (dx.tolist(), dx.dtype) == ([1, 1, 0, 0, 0, 1], dtype)
    assert (dalpha.item(), dalpha.dtype) == (2, torch.float32)


@DTYPES
def test_ties_of_lsq(dtype: torch.dtype) -> None:
    v = torch.tensor([-1.25, -1.0, -0.75, 0.0, 0.25, 0.5, 0.75, 1.0], dtype=dtype)  # z = 2 v in -2 ... 1
    closed = LSQInput(2, signed=True, step_init=0.5)
    strict = LSQInput(2, signed=True, strict=True, step_init=0.5)
    ones = torch.ones_like(v)
    assert closed(v).tolist() == [-1, -1, -1, 0, 0, 0.5, 0.5, 0.5]  # -1.5 and 0.5 go to the even number
    for quantizer, passing in ((closed, [0, 1, 1, 1, 1, 1, 0, 0]), (strict, [0, 0, 1, 1, 1, 0, 0, 0])):
        dv, _ = gradients(quantizer, ones, v)
        assert dv is not None
        assert (dv.tolist(), dv.dtype) == (passing, dtype)
        for i, expected in enumerate([-2, -2, -0.5, 0, -0.5, 1, 1, 1]):  # the limit itself at the limit
            ds = gradients(quantizer, ones[i : i + 1], v[i : i + 1])[1]
            assert ds is not None
            assert ds.item() == expected


def test_ties_of_one_bit() -> None:
    v = torch.tensor([-1.0, -0.5, -0.25, -0.0, 0.0, 0.5, 1.0])
    quantizer = LSQInput(1, signed=True, step_init=0.5)
    assert quantizer(v).tolist() == [-0.5, -0.5, -0.5, 0.5, 0.5, 0.5, 0.5]
    assert gradients(quantizer, torch.ones(7), v)[0].tolist() == [0, 1, 1, 1, 1, 1, 0]  # pyright: ignore[reportOptionalMemberAccess]
    for value, expected in ((-1.0, -1), (-0.5, -1), (-0.25, -0.5), (0.0, 1), (0.5, 1), (1.0, 1)):
        ds = gradients(quantizer, torch.ones(1), torch.tensor([value]))[1]
        assert ds is not None
        assert ds.item() == expected


def test_lsq_plus_passes_at_both_limits() -> None:
    quantizer = LSQPlusInput(2)
    with torch.no_grad():
        quantizer.step.fill_(0.5)
        quantizer.beta.fill_(-0.25)
    x = torch.tensor([-0.5, -0.25, 1.25, 1.5])
    dx, ds, dbeta = gradients(quantizer, torch.ones(4), x)
    assert dx is not None
    assert ds is not None
    assert dbeta is not None
    assert dx.tolist() == [0, 1, 1, 0]
    scale = 1 / math.sqrt(4 * 3)
    assert ds.item() == pytest.approx(3 * scale)
    assert dbeta.item() == pytest.approx(2 * scale)


@DTYPES
def test_levels_dtype_and_codes(dtype: torch.dtype) -> None:
    ends = torch.tensor([0.0, -0.0, 1.0, -5.0, 50.0, 1e-6]).expand(4, 6)
    x = torch.cat([torch.randn(4, 600), ends], 1).to(dtype)
    for quantizer in every_quantizer():
        ready(quantizer, x)
        tensors = [tensor.detach() for tensor in quantizer.tensors()]
        x_q = quantizer.quantize(x, *tensors)
        assert (x_q.shape, x_q.dtype) == (x.shape, dtype)
        assert x_q.isfinite().all()
        shared = x_q.unbind(1) if isinstance(quantizer, LSQInput) and quantizer.per_channel else x_q.unbind(0)
        assert all(part.unique().numel() <= 2**quantizer.bits for part in shared)
        for grad, tensor in zip(gradients(quantizer, torch.randn_like(x), x), (x, *tensors), strict=True):
            assert grad is None or (grad.shape, grad.dtype) == (tensor.shape, tensor.dtype)
        codes = quantizer.codes(x, *tensors)
        assert not codes.values.is_floating_point()
        assert codes.dequantize().to(dtype).equal(x_q)


def test_learned_tensors_stay_float32_beside_bfloat16() -> None:
    x = torch.randn(2, 3, 4).bfloat16()
    for quantizer in (PACT(3), LSQInput(3, step_init=0.3), LSQPlusInput(3)):
        x_q = quantizer(x)
        x_q.backward(torch.ones_like(x))
        assert x_q.dtype == torch.bfloat16
        assert all(tensor.grad is not None and tensor.grad.dtype == torch.float32 for tensor in quantizer.parameters())


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


@pytest.mark.parametrize("shape", [(0, 3, 2, 2), (2, 0, 3, 3), (0,), (2, 3, 0)], ids=str)
def test_empty(shape: tuple[int, ...]) -> None:
    x = torch.empty(shape)
    for quantizer in every_quantizer():
        ready(quantizer, x)
        grads = gradients(quantizer, x, x)
        assert quantizer(x).shape == shape
        assert grads[0] is not None
        assert grads[0].shape == shape
        assert all(grad is None or grad.isfinite().all() for grad in grads)
        if isinstance(quantizer, LSQInput | LSQPlusInput):
            assert not quantizer.calibrated


@pytest.mark.parametrize(
    "w", [torch.zeros(2, 3, 3), torch.full((2, 3, 3), -0.4), torch.tensor([[0.7]]), torch.tensor([0.7])], ids=str
)
def test_zero_constant_and_single_filters(w: Tensor) -> None:
    for quantizer in every_quantizer():
        ready(quantizer, w)
        grads = gradients(quantizer, torch.ones_like(w), w)
        w_q = quantizer(w).detach()
        assert w_q.isfinite().all()
        assert all(grad is None or grad.isfinite().all() for grad in grads)
        if w.eq(0).all() and isinstance(quantizer, LSQ):
            first = 1.0 if isinstance(quantizer, LSQInput) else SMALLEST
            assert quantizer.step.eq(first).all()
            assert w_q.eq(first if quantizer.low == -1 else 0).all()
        if isinstance(quantizer, DoReFaWeight) and quantizer.bits > 1:
            expected = torch.full_like(w, 1 / (2**quantizer.bits - 1)) if w.eq(0).all() else w.sign()
            torch.testing.assert_close(w_q, expected)
            assert grads[0] is not None
            assert not w.eq(0).all() or grads[0].eq(1).all()


# Gradients of few bits


@BITS
def test_dorefa_gradient_against_its_formula(bits: int) -> None:
    quantizer = DoReFaGradient(bits)
    g = torch.randn(3, 4, 5, dtype=F64)
    g[1] = 0
    key, step = quantizer.tensors()
    u = quantizer.stream.uniform(g, key, step).double() - 0.5
    g_q = quantizer.quantize(g, key, step)
    n = 2**bits - 1
    for i in (0, 2):
        m = g[i].abs().max()
        inner = (g[i] / (2 * m) + 0.5 + u[i] / n).clamp(0, 1)
        near(g_q[i], 2 * m * ((inner * n).round() / n - 0.5))
        assert g_q[i].abs().max() <= m * (1 + 1e-12)
    assert g_q[1].eq(0).all()
    assert quantizer.backward(g, g, key, step) == (g, None, None)


def test_dorefa_gradient_is_unbiased_and_moves_on() -> None:
    torch.manual_seed(3)
    quantizer = DoReFaGradient(3)
    g = torch.linspace(-1, 1, 9).expand(1, 9)
    drawn = []
    for _ in range(4000):
        drawn.append(quantizer(g))
        quantizer.after_step_(None)
    mean = torch.stack(drawn).mean(0)
    assert (mean - g).abs().max() < 4 * (1 / 7) / math.sqrt(4000)  # half a step is 1/7, the largest deviation
    assert not drawn[0].equal(drawn[1])
    assert quantizer(g).equal(quantizer(g))  # a recomputation draws the same


def test_dorefa_gradient_shows_what_is_not_finite() -> None:
    quantizer = DoReFaGradient(4)
    for wrong in (math.nan, math.inf, -math.inf):
        g_q = quantizer(torch.tensor([[wrong, 1.0, 0.0], [1.0, 2.0, 3.0]]))
        assert not g_q[0].isfinite().any()
        assert g_q[1].isfinite().all()


def test_dorefa_gradient_in_a_layer() -> None:
    layer = qconv.QLinear(6, 3, bias=False, scheme=dorefa(2, None, grad_bits=3))
    assert isinstance(layer.grad_quantizer, DoReFaGradient)
    x, g = torch.randn(5, 6), torch.randn(5, 3)
    layer(x).backward(g)
    expected = layer.grad_quantizer(g).T @ x
    torch.testing.assert_close(layer.weight.grad, layer.weight_quantizer.backward(expected, layer.weight.detach())[0])


# The first values


def test_first_steps() -> None:
    w = torch.randn(3, 2, 4, dtype=F64) + 0.2
    near(ready(LSQ(1), w).tensors()[0].detach(), w.abs().mean())
    near(ready(LSQ(3, per_channel=True), w).tensors()[0].detach(), 2 * w.abs().mean((1, 2)) / math.sqrt(3))
    mu, sigma = w.mean(), w.std(correction=0)
    near(ready(LSQPlus(3), w).tensors()[0].detach(), torch.maximum((mu - 3 * sigma).abs(), (mu + 3 * sigma).abs()) / 4)
    mu, sigma = w.mean((1, 2)), w.std((1, 2), correction=0)
    found = ready(LSQPlus(2, per_channel=True), w).tensors()[0].detach()
    near(found, torch.maximum((mu - 3 * sigma).abs(), (mu + 3 * sigma).abs()) / 2)
    unsigned, signed = LSQInput(4), LSQInput(4, signed=True)
    assert (unsigned.step.item(), unsigned.calibrated) == (1.0, False)
    for quantizer, high in ((unsigned, 15), (signed, 7)):
        step = quantizer.step
        quantizer.initialize(w)
        assert (quantizer.step is step, quantizer.calibrated) == (True, True)
        assert step.item() == pytest.approx(2 * w.abs().mean().item() / math.sqrt(high), rel=1e-6)


def test_lsq_input_keeps_the_step_where_the_first_batch_is_zero() -> None:
    x = torch.randn(2, 3, 5)
    x[:, 1] = 0
    quantizer = LSQInput(2, per_channel=True)
    quantizer.build(3, 1)
    quantizer.initialize(x)
    expected = 2 * x.abs().mean((0, 2)) / math.sqrt(3)
    torch.testing.assert_close(quantizer.step.detach(), torch.where(expected > 0, expected, 1.0))
    fixed = LSQInput(2, per_channel=True, step_init=0.25)
    fixed.build(3, 1)
    fixed.initialize(x)
    assert (fixed.step.tolist(), fixed.calibrated) == ([0.25] * 3, True)


def test_initialize_again_with_another_shape() -> None:
    quantizer = LSQ(3, per_channel=True)
    quantizer.initialize(torch.randn(4, 5))
    step = quantizer.step
    quantizer.initialize(torch.ones(4, 5))
    assert quantizer.step is step
    step.requires_grad_(False)
    quantizer.initialize(torch.ones(6, 5))
    assert (quantizer.step.shape, quantizer.step.requires_grad) == ((6,), False)
    quantizer.initialize(torch.empty(6, 5, device="meta"))
    assert quantizer.step.is_meta


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


def test_after_a_step_what_is_learned_stays_positive() -> None:
    w = torch.randn(3, 4)
    for quantizer in (PACT(2), LSQInput(2), LSQPlusInput(2), LSQ(2), LSQ(2, per_channel=True), LSQPlus(2)):
        ready(quantizer, w)
        learned = quantizer.tensors()[0]
        with torch.no_grad():
            learned.fill_(-1.0)
            quantizer.after_step_(None if isinstance(quantizer, LSQInput | LSQPlusInput | PACT) else w)
            assert learned.eq(2.0**-20).all()
            learned.fill_(0.5)
            quantizer.after_step_(w)
            assert learned.eq(0.5).all()
        assert quantizer.half()(w.half()).isfinite().all()
        with torch.no_grad():
            quantizer.tensors()[0].fill_(0.0)
            quantizer.after_step_(w)
        assert quantizer.tensors()[0].gt(0).all()


# Checkpoints


@pytest.mark.parametrize("wrong", [0.0, -0.5, math.nan, math.inf])
def test_a_checkpoint_with_a_wrong_step(wrong: float) -> None:
    for scheme, key in (
        (lsq(3, 3), "weight_quantizer.step"),
        (lsq(3, 3), "input_quantizer.step"),
        (lsq_plus(3, 3, per_channel=True), "weight_quantizer.step"),
        (lsq_plus(3, 3), "input_quantizer.step"),
        (pact(3, 3), "input_quantizer.alpha"),
    ):
        model = nn.Sequential(qconv.QConv2d(2, 3, 3, scheme=scheme))
        state = copy.deepcopy(model.state_dict())
        state[f"0.{key}"].view(-1)[-1] = wrong
        message = rf"0\.{key} \(={wrong}\) in the checkpoint must be positive and finite"
        with pytest.raises(ValueError, match=message):
            model.load_state_dict(state)
        state = {name: value.to("meta") for name, value in state.items() if "calibrated" not in name}
        with torch.device("meta"):
            empty = nn.Sequential(qconv.QConv2d(2, 3, 3, scheme=scheme))
        empty.load_state_dict(state, strict=False, assign=True)  # nothing to look at there


def test_a_checkpoint_with_another_shape() -> None:
    state = qconv.QConv2d(2, 3, 3, scheme=lsq(3, 3, per_channel=True)).state_dict()
    with pytest.raises(RuntimeError, match=r"size mismatch for weight_quantizer\.step"):
        qconv.QConv2d(2, 3, 3, scheme=lsq(3, 3)).load_state_dict(state)


SCHEMES: dict[str, qconv.Scheme] = {
    scheme.name: scheme
    for scheme in (
        dorefa(),
        dorefa(2, 3, grad_bits=6),
        dorefa(4, None, detach_max=False),
        pact(),
        pact(2, 1, alpha=2.0),
        lsq(),
        lsq(1, 1, signed_input=True),
        lsq(3, 3, per_channel=True, grad_scale="numel", strict=True, step_init=0.3),
        lsq(2, None),
        lsq_plus(),
        lsq_plus(1, 2, per_channel=True),
        lsq_plus(8, None),
    )
}
ALL = pytest.mark.parametrize("scheme", SCHEMES.values(), ids=list(SCHEMES))


def trained(scheme: qconv.Scheme, *, autocast: bool = False) -> tuple[nn.Module, Tensor]:
    """A model after one step, and inputs."""
    layers = qconv.QConv2d(3, 4, 3, padding=1, scheme=scheme), nn.Flatten(), qconv.QLinear(100, 5, scheme=scheme)
    model, x = nn.Sequential(*layers), torch.randn(2, 3, 5, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(x).float().square().mean()
    loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
    optimizer.step()
    qconv.after_step(model)
    return model, x


@ALL
@pytest.mark.parametrize("autocast", [False, True])
def test_a_training_step(scheme: qconv.Scheme, autocast: bool) -> None:
    model, x = trained(scheme, autocast=autocast)
    assert model(x).isfinite().all()
    quantizers = [module for module in model.modules() if isinstance(module, Quantizer)]
    assert all(quantizer.calibrated for quantizer in quantizers)


@ALL
def test_state_goes_round(scheme: qconv.Scheme) -> None:
    model, x = trained(scheme)
    torch.manual_seed(1)
    layers = qconv.QConv2d(3, 4, 3, padding=1, scheme=scheme), nn.Flatten(), qconv.QLinear(100, 5, scheme=scheme)
    other = nn.Sequential(*layers)
    other.load_state_dict(model.state_dict())
    assert all(module.calibrated for module in other.modules() if isinstance(module, Quantizer))
    assert other(x).equal(model(x))
    again = pickle.loads(pickle.dumps(model))
    assert again(x).equal(model(x))


def test_a_float_checkpoint_sets_the_steps() -> None:
    conv = nn.Conv2d(3, 4, 3)
    layer = qconv.QConv2d(3, 4, 3, scheme=lsq(3, 3, per_channel=True))
    layer.load_state_dict(conv.state_dict())
    expected = 2 * conv.weight.detach().abs().mean((1, 2, 3)) / math.sqrt(3)
    torch.testing.assert_close(layer.weight_quantizer.tensors()[0].detach(), expected)


@pytest.mark.parametrize(
    "make",
    [
        partial(DoReFaWeight, 1),
        partial(DoReFaWeight, 3, detach_max=False),
        partial(DoReFaInput, 2),
        partial(DoReFaGradient, 4),
        partial(PACT, 3, 1.3),
        partial(LSQ, 1),
        partial(LSQ, 3, per_channel=True),
        partial(LSQInput, 3, per_channel=True),
        partial(LSQPlus, 4),
        partial(LSQPlusInput, 3),
    ],
    ids=str,
)
def test_compiled_equals_eager(make: Callable[[], Quantizer]) -> None:
    x = torch.cat([torch.randn(4, 60), torch.tensor([0.0, -0.0, 1.0, -1.0]).expand(4, 4)], 1)
    quantizer = ready(make(), x)
    tensors = [tensor.detach() for tensor in quantizer.tensors()]
    grad = torch.randn_like(x)

    def both(x: Tensor, grad: Tensor, *tensors: Tensor) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        return quantizer.quantize(x, *tensors), quantizer.backward(grad.clone(), x, *tensors)

    x_q, grads = both(x, grad, *tensors)
    compiled_x_q, compiled = torch.compile(both, fullgraph=True, backend="aot_eager")(x, grad, *tensors)
    assert compiled_x_q.equal(x_q)
    for found, expected in zip(compiled, grads, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


# Schemes


def test_schemes_make_what_they_say() -> None:
    layer = qconv.QConv2d(3, 4, 3, scheme=lsq(3, 2, signed_input=True, per_channel=True, step_init=0.5))
    assert layer.scheme.name == "lsq(weight_bits=3, input_bits=2, signed_input=True, per_channel=True, step_init=0.5)"
    weight, input = layer.weight_quantizer, layer.input_quantizer
    assert isinstance(weight, LSQ)
    assert isinstance(input, LSQInput)
    assert (weight.bits, weight.per_channel, weight.step.shape) == (3, True, (4,))
    assert (input.bits, input.signed, input.step.shape) == (2, True, (1,))
    assert isinstance(dorefa(2, None).input(), Identity)
    assert dorefa(2, None).name == "dorefa(weight_bits=2, input_bits=None)"
    assert pact(5, 3).input().bits == 3
    assert isinstance(lsq_plus().weight(), LSQPlus)


@pytest.mark.parametrize("name", ["dorefa", "pact", "lsq", "lsq_plus"])
def test_configs_hold_the_defaults(name: str) -> None:
    text = (Path(__file__).parents[1] / "configs" / "scheme" / f"{name}.yaml").read_text()
    config = yaml.safe_load(text)
    assert config.pop("_target_") == f"qconv.schemes.{name}"
    make = getattr(schemes, name)
    assert set(config) == set(make.__annotations__) - {"return"}
    assert make(**config).name == make().name


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DoReFaWeight(0), r"bits \(=0\) must be a whole number from 1 to 8"),
        (lambda: DoReFaInput(9), r"bits \(=9\) must be a whole number from 1 to 8"),
        (lambda: DoReFaGradient(2.5), r"bits \(=2.5\) must be a whole number from 1 to 8"),  # pyright: ignore[reportArgumentType]
        (lambda: PACT(32), r"bits \(=32\) must be a whole number from 1 to 8"),
        (lambda: PACT(2, alpha=0.0), r"alpha \(=0.0\) must be positive"),
        (lambda: PACT(2, alpha=math.nan), r"alpha \(=nan\) must be positive"),
        (lambda: LSQ(-1), r"bits \(=-1\) must be a whole number"),
        (lambda: LSQ(2, grad_scale="code"), r"grad_scale \(='code'\) must be 'paper' or 'numel'"),  # pyright: ignore[reportArgumentType]
        (lambda: LSQInput(2, step_init=-1.0), r"step_init \(=-1.0\) must be positive"),
        (lambda: LSQPlusInput(2, "code"), r"grad_scale \(='code'\)"),  # pyright: ignore[reportArgumentType]
        (lambda: LSQPlusInput(9), r"bits \(=9\)"),
        (lambda: dorefa(0), r"weight_bits \(=0\) must be a whole number from 1 to 8"),
        (lambda: dorefa(1, 32), r"input_bits \(=32\) must be a whole number from 1 to 8"),
        (lambda: dorefa(1, 2, 9), r"grad_bits \(=9\) must be a whole number from 1 to 8"),
        (lambda: pact(9), r"weight_bits \(=9\)"),
        (lambda: pact(2, 2, -3.0), r"alpha \(=-3.0\) must be positive"),
        (lambda: lsq(2, 0), r"input_bits \(=0\)"),
        (lambda: lsq(2, 2, step_init=0.0), r"step_init \(=0.0\) must be positive"),
        (lambda: lsq(2, None, grad_scale="batch"), r"grad_scale \(='batch'\)"),  # pyright: ignore[reportArgumentType]
        (lambda: lsq_plus(33), r"weight_bits \(=33\)"),
    ],
)
def test_wrong_arguments(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("scheme", [lsq(3, 3), lsq_plus(3, 3)], ids=str)
def test_calibrate_sets_what_starts_from_data(scheme: qconv.Scheme) -> None:
    model = nn.Sequential(qconv.QConv2d(3, 4, 3, scheme=scheme), qconv.QConv2d(4, 2, 3, scheme=scheme))
    x = torch.randn(6, 3, 7, 7)
    assert calibrate(model, [x[:4], x[4:]]) == ["0", "1"]
    expected = scheme.input()
    expected.initialize(x)
    first = model[0]
    assert isinstance(first, qconv.QConv2d)
    for found, wanted in zip(first.input_quantizer.tensors(), expected.tensors(), strict=True):
        assert found.equal(wanted)


def test_nan_is_no_calibration() -> None:
    layer = qconv.QConv2d(2, 3, 3, scheme=lsq(2, 2))
    with pytest.raises(ValueError, match="NaN or inf"):
        layer(torch.full((1, 2, 4, 4), math.nan))


@pytest.mark.parametrize("make", [LSQ, LSQInput, partial(LSQ, per_channel=True), partial(LSQInput, per_channel=True)])
def test_a_step_that_nobody_keeps_positive(make: Any) -> None:
    quantizer, x = make(4), torch.rand(3, 5, 2, 2)
    quantizer.build(5, 1)
    quantizer.initialize(x)
    with torch.no_grad():
        quantizer.step.fill_(-1.0)
    least = make(4)
    least.build(5, 1)
    least.initialize(x)
    with torch.no_grad():
        least.step.fill_(SMALLEST)
    assert quantizer(x).equal(least(x))
