"""The binary methods against golden vectors and against autograd of their formulas in float64."""

import copy
import inspect
import math
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import Tensor

import qconv
from qconv import schemes as binary
from qconv.methods.adabin import AdaBinInput, AdaBinWeight
from qconv.methods.bireal import BiRealWeight
from qconv.methods.irnet import IRNetWeight
from qconv.methods.reactnet import ReActNetInput
from qconv.methods.recu import ReCUInput, ReCUWeight
from qconv.methods.reste import ReSTEWeight
from qconv.methods.xnorpp import XNORppWeight
from qconv.quantizers import Quantizer, ScaledSign, Sign
from qconv.quantizers.filters import standardize
from qconv.quantizers.surrogates import EDE, ApproxSign, HardClip, Polynomial, ReSTE, Straight, Surrogate, SwishSign
from qconv.scheme import Scheme

W = torch.tensor([-1.2, -0.6, -0.3, -0.1, 0.05, 0.2, 0.5, 0.9], dtype=torch.float64)[None]
G = torch.tensor([0.1, -0.2, 0.3, -0.4, 0.5, 0.6, 0.7, -0.8], dtype=torch.float64)[None]
X = torch.tensor([-1.5, -1.0, -0.4, 0.0, 0.3, 0.7, 1.0, 1.8], dtype=torch.float64)
GX = torch.tensor([1.0, 2, 3, 4, 5, 6, 7, 8], dtype=torch.float64)
SIGNS = np.array([-1, -1, -1, -1, 1, 1, 1, 1])

Derivative = Callable[[Tensor], Tensor]
Formula = Callable[..., Tensor]


def near(found: Tensor | None, expected: Any) -> None:
    """Equal to the six decimals of the golden vectors."""
    assert found is not None
    np.testing.assert_allclose(found.detach().squeeze(0).numpy(), expected, rtol=0, atol=6e-7)


def prepared(make: Callable[[], Quantizer], x: Tensor) -> Quantizer:
    """In float64, with learned tensors that are not their initial values, half-way in its schedule."""
    quantizer = make()
    quantizer.build(x.shape[1], 1)
    quantizer.initialize(x)
    quantizer.double().set_progress_(0.5, x)
    with torch.no_grad():
        for parameter in quantizer.parameters():
            parameter.copy_(torch.rand_like(parameter) + 0.5)
    return quantizer


# --- The surrogates


def each_derivative(o: float) -> dict[str, tuple[Callable[[], Surrogate], Derivative]]:
    """What makes the surrogate, and its published derivative, half-way in the schedule (o of ReSTE is given)."""
    t = math.sqrt(0.1 * 10)
    t_poly = math.sqrt(0.01 * 10)
    k_poly = 1 / t_poly

    def reste(x: Tensor) -> Tensor:
        inner = torch.full_like(x, 0.1 ** (1 / o) / 0.1)
        middle = x.abs().clamp(min=1e-9) ** ((1 - o) / o) / o
        return torch.where(x.abs() <= 0.1, inner, torch.where(x.abs() <= 1.5, middle, torch.zeros_like(x)))

    return {
        "Straight": (Straight, torch.ones_like),
        "HardClip": (HardClip, lambda x: (x.abs() <= 1).double()),
        "HardClip(1.3)": (partial(HardClip, 1.3), lambda x: (x.abs() <= 1.3).double()),
        "ApproxSign": (ApproxSign, lambda x: torch.relu(2 - 2 * x.abs())),
        "EDE": (EDE, lambda x: t * max(1 / t, 1) * (1 - torch.tanh(t * x) ** 2)),
        "Polynomial": (Polynomial, lambda x: k_poly * torch.relu(math.sqrt(2) * t_poly - t_poly**2 * x.abs())),
        "Polynomial(input)": (
            partial(Polynomial, input=True),
            lambda x: torch.relu(math.sqrt(2) * torch.ones_like(x) - x.abs()),
        ),
        "ReSTE": (ReSTE, reste),
        "SwishSign": (
            SwishSign,
            lambda x: 5 * (2 - 5 * x * torch.tanh(2.5 * x)) / (1 + torch.cosh(5 * x)),
        ),
    }


DERIVATIVES = each_derivative(2.0)


@pytest.mark.parametrize(("make", "derivative"), DERIVATIVES.values(), ids=list(DERIVATIVES))
def test_surrogate_is_its_derivative(make: Callable[[], Surrogate], derivative: Derivative) -> None:
    surrogate = make().double()
    surrogate.set_progress_(0.5)
    x = torch.cat([torch.linspace(-3, 3, 121, dtype=torch.float64), X, torch.randn(50, dtype=torch.float64)])
    grad = torch.randn_like(x)
    found = surrogate.backward(grad.clone(), x, *surrogate.tensors())
    torch.testing.assert_close(found, grad * derivative(x), rtol=1e-12, atol=1e-13)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(found, grad * derivative(x) * 1.001, rtol=1e-12, atol=1e-13)


def test_surrogates_golden() -> None:
    dx = Sign(ApproxSign).backward(GX.clone(), X)[0]
    near(dx, [0, 0, 3.6, 8, 7, 3.6, 0, 0])
    ede = Sign(EDE).double()
    ede.set_progress_(0, None)
    dx = ede.backward(GX.clone(), X, *ede.tensors())[0]
    near(dx, [0.977833, 1.980133, 2.995205, 4, 4.995503, 5.970696, 6.930464, 7.746298])
    reste = Sign(ReSTE).double()
    reste.set_progress_(1, None)
    dx = reste.backward(GX.clone(), X, *reste.tensors())[0]
    near(dx, [0.254381, 0.666667, 1.842016, 18.566355, 3.719072, 2.536869, 2.333333, 0])


# --- Golden vectors


def test_golden_xnor() -> None:
    near(ScaledSign().quantize(W), 0.48125 * SIGNS)
    exact = [-0.15, -0.24625, -0.005625, -0.3425, 0.390625, 0.43875, 0.486875, -0.235]
    paper = [0.0125, -0.12125, 0.181875, -0.2425, 0.303125, 0.36375, 0.424375, -0.485]
    near(ScaledSign().backward(G.clone(), W)[0], exact)
    near(ScaledSign(paper_gradient=True).backward(G.clone(), W)[0], paper)


def test_the_gradient_times_the_number_of_weights() -> None:
    weight, grad = torch.randn(4, 3, 5, 5).double(), torch.randn(4, 3, 5, 5).double()
    forms: tuple[dict[str, Any], ...] = ({}, {"detach_scale": True}, {"paper_gradient": True})
    for options in forms:
        times = ScaledSign(numel_gradient=True, **options).backward(grad.clone(), weight)[0]
        scaled = 75 * (1 - 1 / 3) * grad
        torch.testing.assert_close(times, ScaledSign(**options).backward(scaled, weight)[0])
    depthwise = ScaledSign(numel_gradient=True).backward(grad[:, :1].clone(), weight[:, :1])[0]
    torch.testing.assert_close(depthwise, ScaledSign().backward(25 * grad[:, :1], weight[:, :1])[0])
    assert binary.bwn(numel_gradient=True).name == "bwn(numel_gradient=True)"


def test_golden_bireal() -> None:
    masked = np.array([0, -0.2, 0.3, -0.4, 0.5, 0.6, 0.7, -0.8])
    near(BiRealWeight().quantize(W), 0.48125 * SIGNS)
    near(BiRealWeight().backward(G.clone(), W)[0], masked)
    near(BiRealWeight("paper").backward(G.clone(), W)[0], 0.48125 * masked)


def test_golden_irnet() -> None:
    w_hat = [-1.738274, -0.816316, -0.355338, -0.048019, 0.182471, 0.41296, 0.873939, 1.488577]
    near(standardize(W).values, w_hat)
    near(IRNetWeight().quantize(W), SIGNS)
    near(IRNetWeight().quantize(W + 5), SIGNS)  # mean and deviation of the filter play no part
    near(IRNetWeight().quantize(W * 7), SIGNS)
    heavy = torch.tensor([[*[0.0] * 60, 1.0, -1.0, 1.0, -1.0]], dtype=torch.float64)  # mean |w_hat| is 0.248
    assert IRNetWeight().quantize(heavy).abs().eq(0.25).all()


def test_golden_recu() -> None:
    w1 = [-4.916522, -2.308864, -1.005035, -0.135816, 0.516099, 1.168014, 2.471843, 4.210282]
    near(standardize(W, eps=1e-5).values * 2 * math.sqrt(2), w1)
    quantizer = ReCUWeight(0.9, 0.9).double()
    quantizer.initialize(W)
    quantizer.set_progress_(0, None)
    near(quantizer.quantize(W, *quantizer.tensors()), quantizer.alpha.item() * SIGNS)
    # Q = 3.366: the two outer weights get nothing but what comes through mean and variance.
    w = W.clone().requires_grad_()
    values = 2 * math.sqrt(2) * (w - w.mean()) / (w.var() + 1e-5).sqrt()
    inside = torch.tensor([0, 1, 1, 1, 1, 1, 1, 0.0])
    (values * inside * G * quantizer.alpha.detach()).sum().backward()
    found = quantizer.backward(G.clone(), W, *quantizer.tensors())[0]
    torch.testing.assert_close(found, w.grad, rtol=1e-12, atol=1e-14)


def test_golden_adabin() -> None:
    near(AdaBinWeight().quantize(W), [-0.677508] * 4 + [0.540008] * 4)
    for offset, low, high in (("paper", -0.9, 1.5), ("code", -0.84, 1.56)):
        quantizer = AdaBinInput(offset)  # pyright: ignore[reportArgumentType]
        alpha, beta = torch.tensor(1.2, dtype=torch.float64), torch.tensor(0.3, dtype=torch.float64)
        near(quantizer.quantize(X[None], alpha, beta), [low] * 4 + [high] * 4)
        dx = quantizer.backward(GX.clone(), X, alpha, beta)[0]
        near(dx, [0, 0, 2.5, 6, 10, 8, 5.833333, 0])


def test_recu_schedule() -> None:
    quantizer = ReCUWeight().double()
    for epoch, epochs in ((0, 600), (150, 600), (599, 600), (600, 600)):
        quantizer.set_progress_(epoch / epochs, None)
        a = 0.14 / (math.e - 1)
        assert quantizer.tau.item() == pytest.approx(a * math.e ** (epoch / epochs) + 0.85 - a, rel=1e-12)
    assert quantizer.tau.item() == pytest.approx(0.99, rel=1e-12)
    quantizer.set_progress_(0, None)
    assert quantizer.tau.item() == pytest.approx(0.85, rel=1e-12)


# --- Each gradient against autograd of the formula, with the surrogate as what the sign's derivative is


class _SignOf(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, derivative: Derivative) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(derivative(x))
        return torch.where(x >= 0, torch.ones_like(x), -torch.ones_like(x))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad * ctx.saved_tensors[0], None


def ste(x: Tensor, derivative: Derivative) -> Tensor:
    return _SignOf.apply(x, derivative)  # pyright: ignore[reportReturnType]


def along(x: Tensor) -> tuple[int, ...]:
    return tuple(range(1, x.ndim))


def column(vector: Tensor, x: Tensor) -> Tensor:
    return vector.reshape(-1, *[1] * (x.ndim - 1))


def xnor_formula(w: Tensor, d: Derivative) -> Tensor:
    return w.abs().mean(along(w), keepdim=True) * ste(w, d)


def detached_formula(w: Tensor, d: Derivative) -> Tensor:
    return w.abs().mean(along(w), keepdim=True).detach() * ste(w, d)


def bireal_code_formula(w: Tensor, d: Derivative) -> Tensor:
    passed = ste(w, d)
    return passed + (w.abs().mean(along(w), keepdim=True) * passed - passed).detach()


def xnorpp_formula(w: Tensor, d: Derivative, gamma: Tensor) -> Tensor:
    return column(gamma, w) * ste(w, d)


def irnet_formula(w: Tensor, d: Derivative) -> Tensor:
    w_hat = (w - w.mean(along(w), keepdim=True)) / w.std(along(w), keepdim=True)
    s = 2 ** w_hat.abs().mean(along(w), keepdim=True).log2().round()
    return s.detach() * ste(w_hat, d)


def recu_formula(w: Tensor, d: Derivative, alpha: Tensor) -> Tensor:
    a = 0.14 / (math.e - 1)
    tau = a * math.e**0.5 + 0.85 - a
    w0 = w - w.mean(along(w), keepdim=True)
    w1 = w0 / (torch.sqrt(w0.var(along(w), keepdim=True) + 1e-5) / 2 / math.sqrt(2))
    q = (-w1.abs().mean() * math.log(2 - 2 * tau)).item()
    clamped = w1.clamp(-q, q)
    return column(alpha, w) * ste(clamped, d)


def adabin_formula(w: Tensor, d: Derivative) -> Tensor:
    beta = w.mean(along(w), keepdim=True)
    alpha = ((w - beta) ** 2).mean(along(w), keepdim=True).sqrt()
    return alpha * ste((w - beta) / alpha, d) + beta


def reste_formula(w: Tensor, d: Derivative) -> Tensor:
    return w.abs().mean() * ste(w, d)


def reactnet_formula(x: Tensor, d: Derivative, bias: Tensor) -> Tensor:
    return ste(x + bias.reshape(1, -1, *[1] * (x.ndim - 2)), d)


def recu_input_formula(x: Tensor, d: Derivative) -> Tensor:
    return ste(x / torch.sqrt(x.var(along(x), keepdim=True) + 1e-5), d)


def adabin_paper_formula(x: Tensor, d: Derivative, alpha: Tensor, beta: Tensor) -> Tensor:
    return alpha * ste((x - beta) / alpha, d) + beta


def adabin_code_formula(x: Tensor, d: Derivative, alpha: Tensor, beta: Tensor) -> Tensor:
    return alpha * (ste((x - beta) / alpha, d) + beta)


FORMULAS: dict[str, tuple[Callable[..., Quantizer], Formula, str]] = {
    # what makes the quantizer from a surrogate, its textbook formula, its own surrogate
    "ScaledSign": (ScaledSign, xnor_formula, "HardClip"),
    "ScaledSign(detach)": (partial(ScaledSign, True), detached_formula, "HardClip"),
    "XNORppWeight": (XNORppWeight, xnorpp_formula, "HardClip"),
    "BiRealWeight(code)": (BiRealWeight, bireal_code_formula, "HardClip"),
    "BiRealWeight(paper)": (partial(BiRealWeight, "paper"), detached_formula, "HardClip"),
    "IRNetWeight": (IRNetWeight, irnet_formula, "EDE"),
    "ReCUWeight": (ReCUWeight, recu_formula, "Straight"),
    "AdaBinWeight": (partial(AdaBinWeight, surrogate=EDE), adabin_formula, "EDE"),
    "ReSTEWeight": (ReSTEWeight, reste_formula, "ReSTE"),
    "ReActNetInput": (ReActNetInput, reactnet_formula, "ApproxSign"),
    "ReCUInput": (ReCUInput, recu_input_formula, "ApproxSign"),
    "AdaBinInput(paper)": (AdaBinInput, adabin_paper_formula, "ApproxSign"),
    "AdaBinInput(code)": (partial(AdaBinInput, "code"), adabin_code_formula, "ApproxSign"),
}
EACH = pytest.mark.parametrize(("make", "formula", "own"), FORMULAS.values(), ids=list(FORMULAS))
SHAPES = pytest.mark.parametrize("shape", [(3, 5, 3, 3), (1, 7), (4, 2, 3)], ids=str)


def expected_gradients(
    quantizer: Quantizer, formula: Formula, derivative: Derivative, x: Tensor, grad: Tensor
) -> tuple[Tensor, list[Tensor]]:
    learned = [tensor for tensor in quantizer.tensors() if tensor.requires_grad]
    leaves = [x.clone().requires_grad_(), *(tensor.detach().clone().requires_grad_() for tensor in learned)]
    x_q = formula(leaves[0], derivative, *leaves[1:])
    return x_q.detach(), list(torch.autograd.grad(x_q, leaves, grad))


def check(quantizer: Quantizer, formula: Formula, derivative: Derivative, shape: tuple[int, ...]) -> list[Tensor]:
    x, grad = torch.randn(shape, dtype=torch.float64), torch.randn(shape, dtype=torch.float64)
    quantizer.build(shape[1], 1)
    quantizer = prepared(lambda: quantizer, x)
    tensors = tuple(tensor.detach() for tensor in quantizer.tensors())
    x_q, expected = expected_gradients(quantizer, formula, derivative, x, grad)
    torch.testing.assert_close(quantizer.quantize(x, *tensors), x_q, rtol=1e-12, atol=1e-14)
    all_grads = quantizer.backward(grad.clone(), x, *tensors)
    assert len(all_grads) == 1 + len(tensors)
    found = [g for g in all_grads if g is not None]
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == torch.float64
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)
    return expected


@EACH
@SHAPES
def test_gradients_are_autograd_of_the_formula(
    make: Callable[..., Quantizer], formula: Formula, own: str, shape: tuple[int, ...]
) -> None:
    check(make(), formula, DERIVATIVES[own][1], shape)


@EACH
@pytest.mark.parametrize("name", list(DERIVATIVES))
def test_takes_any_surrogate(make: Callable[..., Quantizer], formula: Formula, own: str, name: str) -> None:
    surrogate, derivative = DERIVATIVES[name]
    check(make(surrogate=surrogate), formula, derivative, (3, 4, 2, 2))


@EACH
def test_a_wrong_gradient_is_rejected(make: Callable[..., Quantizer], formula: Formula, own: str) -> None:
    class Wrong(make().__class__):
        which = 0

        def backward(self, grad: Tensor, x: Tensor, *tensors: Tensor) -> tuple[Tensor | None, ...]:
            grads = list(super().backward(grad, x, *tensors))
            grads[self.which] = grads[self.which] * 1.0001  # pyright: ignore[reportOptionalOperand]
            return tuple(grads)

    quantizer = make()
    quantizer.__class__ = Wrong
    learned = 1 + sum(1 for _ in prepared(make, torch.ones(3, 4, 2, 2)).parameters())
    for which in range(learned):
        Wrong.which = which
        with pytest.raises(AssertionError, match="not close"):
            check(copy.deepcopy(quantizer), formula, DERIVATIVES[own][1], (3, 4, 2, 2))


@EACH
def test_compiled_equals_eager(make: Callable[..., Quantizer], formula: Formula, own: str) -> None:
    x, grad = torch.randn(3, 4, 2, 2), torch.randn(3, 4, 2, 2)
    quantizer = prepared(make, x).float()
    tensors = tuple(tensor.detach() for tensor in quantizer.tensors())

    def both(x: Tensor, grad: Tensor, *tensors: Tensor) -> tuple[Tensor | None, ...]:
        return quantizer.quantize(x, *tensors), *quantizer.backward(grad.clone(), x, *tensors)

    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")(x, grad, *tensors)
    for found, expected in zip(compiled, both(x, grad, *tensors), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


# --- Ties, odd filters, NaN


def test_ties_pass_the_clip() -> None:
    one = torch.tensor(1.0, dtype=torch.float64)
    w = torch.stack([one, torch.nextafter(one, 2 * one), -one, torch.nextafter(-one, -2 * one), 0 * one, -0 * one])[
        None
    ]
    grad = torch.full_like(w, 2.0)
    inside = [2, 0, 2, 0, 2, 2]
    assert BiRealWeight().backward(grad.clone(), w)[0].tolist() == [inside]  # pyright: ignore[reportOptionalMemberAccess]
    quantizer = XNORppWeight()
    quantizer.initialize(w)
    assert quantizer.quantize(w, *quantizer.tensors()).tolist() == [[1, 1, -1, -1, 1, 1]]
    dw, dgamma = quantizer.backward(grad.clone(), w, *quantizer.tensors())
    assert dw is not None
    assert dw.tolist() == [inside]
    assert dgamma is not None
    assert dgamma.tolist() == [4]
    paper = ScaledSign(paper_gradient=True)
    alpha = w.abs().mean().item()
    dw = paper.backward(grad.clone(), w)[0]
    assert dw is not None
    np.testing.assert_allclose(dw[0].numpy(), 2 / 6 + alpha * np.array(inside), rtol=1e-12)


def test_ties_of_thresholds() -> None:
    x = torch.tensor([[-0.5, 0.5], [-0.25, 0.25]])
    quantizer = ReActNetInput()
    quantizer.build(2, 1)
    with torch.no_grad():
        quantizer.bias.copy_(torch.tensor([0.5, -0.25]))
    assert quantizer(x).tolist() == [[1, 1], [1, 1]]
    assert AdaBinInput()(torch.tensor([0.0, -0.0])).tolist() == [1, 1]
    symmetric = torch.tensor([[-1.0, 0.0, 1.0]])
    assert IRNetWeight()(symmetric).sign().tolist() == [[-1, 1, 1]]  # a weight equal to the mean
    assert AdaBinWeight()(symmetric)[0, 1] > 0


def test_a_weight_at_the_bound_of_recu_passes() -> None:
    w = torch.tensor([[-1.0, 0.0, 1.0]], dtype=torch.float64)  # w1 = 2√2 w
    quantizer = ReCUWeight().double()
    quantizer.initialize(w)
    quantizer.tau.fill_(0.5)  # Q = 0, where only the middle weight lies
    grad = quantizer.backward(torch.tensor([[5.0, 1.0, 7.0]], dtype=torch.float64), w, *quantizer.tensors())[0]
    factor = 2 * math.sqrt(2) * quantizer.alpha.item() / math.sqrt(1 + 1e-5)
    assert grad is not None
    np.testing.assert_allclose(grad[0].detach().numpy(), factor * np.array([-1 / 3, 2 / 3, -1 / 3]), rtol=1e-12)


WEIGHTS = {name: row for name, row in FORMULAS.items() if "Weight" in name or "Scaled" in name}


@pytest.mark.parametrize("make", [row[0] for row in WEIGHTS.values()], ids=list(WEIGHTS))
@pytest.mark.parametrize("value", [0.0, 0.7, -0.3, 1e-30, 1e30], ids=str)
@pytest.mark.parametrize("shape", [(2, 3, 3, 3), (2, 1), (2, 1, 1, 1), (2, 0, 3, 3), (0, 3, 3, 3)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_odd_filters_make_no_nan(
    make: Callable[..., Quantizer], value: float, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    x = torch.full(shape, value, dtype=dtype)
    quantizer = make()
    quantizer.initialize(x)
    x_q = quantizer.quantize(x, *quantizer.tensors())
    assert x_q.shape == shape
    assert x_q.isfinite().all()
    for grad in quantizer.backward(torch.ones_like(x), x, *quantizer.tensors()):
        assert grad is None or grad.isfinite().all()


@pytest.mark.parametrize("value", [0.0, 0.7, -0.3], ids=str)
@pytest.mark.parametrize("shape", [(2, 3, 3, 3), (2, 1)], ids=str)
def test_constant_filters_give_what_is_said(value: float, shape: tuple[int, ...]) -> None:
    w = torch.full(shape, value)
    assert IRNetWeight()(w).eq(0).all()
    grad = IRNetWeight().backward(torch.randn(shape), w, *IRNetWeight().tensors())[0]
    assert grad is not None
    assert grad.eq(0).all()
    torch.testing.assert_close(AdaBinWeight()(w), w)
    g = torch.randn(shape)
    grad = AdaBinWeight().backward(g.clone(), w, *AdaBinWeight().tensors())[0]
    torch.testing.assert_close(grad, g.mean(along(g), keepdim=True).expand(shape))
    recu = ReCUWeight()
    recu.initialize(w)
    assert recu(w).equal(column(recu.alpha, w).expand(shape))
    torch.testing.assert_close(BiRealWeight()(w), w)
    torch.testing.assert_close(ReSTEWeight()(w), w)


def test_nan_and_infinity() -> None:
    w = torch.randn(3, 5)
    w[0, 0], w[1, 1] = math.nan, math.inf
    for quantizer in (IRNetWeight(), AdaBinWeight()):
        w_q = quantizer(w)
        assert w_q[:2].isnan().all()
        assert w_q[2].isfinite().all()
    assert BiRealWeight()(w)[0].isnan().all()
    assert not ReSTEWeight()(w).isfinite().any()
    recu = ReCUWeight()
    recu.initialize(w)
    assert recu(w).abs().equal(recu.alpha.detach()[:, None].expand(3, 5))
    grad = recu.backward(torch.ones_like(w), w, *recu.tensors())[0]
    assert grad is not None
    assert grad[:2].isnan().all()
    assert grad[2].eq(0).all()
    x = torch.tensor([[math.inf, -math.inf, math.nan]])
    for quantizer in (ReCUInput(), AdaBinInput()):
        x_q = quantizer(x)[0]
        assert x_q[:2].tolist() == [1, -1]
        assert x_q[2].abs() == 1


@pytest.mark.parametrize("shape", [(1,), (4,), (0, 3), (2, 0), (3, 1), (2, 3, 4)], ids=str)
def test_inputs_of_odd_shapes(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    for quantizer in (ReActNetInput(), ReCUInput(), AdaBinInput()):
        quantizer.build(x.shape[-1], -1)
        x_q = quantizer.quantize(x, *quantizer.tensors())
        assert (x_q.shape, x_q.dtype) == (x.shape, x.dtype)
        grads = quantizer.backward(torch.ones_like(x), x, *quantizer.tensors())
        assert all(grad is None or grad.isfinite().all() for grad in grads)


def test_channels_of_the_last_dimension() -> None:
    x = torch.randn(2, 3, 4, dtype=torch.float64)
    quantizer = ReActNetInput()
    quantizer.build(4, -1)
    bias = torch.randn(4, dtype=torch.float64)
    grad = torch.randn_like(x)
    assert quantizer.quantize(x, bias).equal(torch.where(x + bias >= 0, 1.0, -1.0).double())
    dx, dbias = quantizer.backward(grad.clone(), x, bias)
    expected = grad * torch.relu(2 - 2 * (x + bias).abs())
    torch.testing.assert_close(dx, expected, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(dbias, expected.sum((0, 1)), rtol=1e-12, atol=1e-14)


def test_recu_normalizes_in_training_only() -> None:
    x, grad = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    quantizer = ReCUInput()
    training = quantizer.backward(grad.clone(), x)[0]
    evaluation = quantizer.eval().backward(grad.clone(), x)[0]
    assert evaluation is not None
    assert training is not None
    assert not training.equal(evaluation)
    assert evaluation.equal(grad * torch.relu(2 - 2 * x.abs()))


# --- Initialization, steps, state


@pytest.mark.parametrize("make", [XNORppWeight, ReCUWeight, partial(ReCUWeight, scale_init="mean")])
def test_learned_scale_starts_again_with_the_weight(make: Callable[[], Any]) -> None:
    quantizer = make()
    w = torch.randn(4, 3, 3, 3)
    quantizer.initialize(w)
    (parameter,) = quantizer.parameters()
    assert parameter.shape == (4,)
    if make is XNORppWeight:
        assert parameter.eq(1).all()
    elif make is ReCUWeight:
        assert ((parameter >= 0) & (parameter < 1)).all()
        assert parameter.unique().numel() == 4
    else:
        torch.testing.assert_close(parameter.detach(), w.abs().mean((1, 2, 3)))
    with torch.no_grad():
        parameter.fill_(9.0)
    quantizer.initialize(w)
    assert next(quantizer.parameters()) is parameter
    assert parameter.ne(9).all()
    parameter.requires_grad_(False)
    quantizer.initialize(torch.randn(6, 3, dtype=torch.float64))
    (other,) = quantizer.parameters()
    assert (other.shape, other.dtype, other.requires_grad) == ((6,), torch.float64, False)
    quantizer.initialize(torch.empty(6, 3, device="meta"))
    assert next(quantizer.parameters()).is_meta


def test_centred_after_the_step() -> None:
    w = torch.randn(4, 3, 2, 2, dtype=torch.float64) * 2
    expected = (w - w.mean(1, keepdim=True)).clamp(-1, 1)
    ScaledSign(center=True).after_step_(w)
    assert w.equal(expected)
    depthwise = torch.randn(4, 1, 2, 2)
    same = depthwise.clone()
    ScaledSign(center=True, weight_clip=None).after_step_(depthwise)
    assert depthwise.equal(same)
    ScaledSign(center=True).after_step_(None)
    layer = qconv.QConv2d(3, 4, 3, scheme=binary.xnor(center=True))
    layer.after_step_()
    torch.testing.assert_close(layer.weight.detach().mean(1), torch.zeros(4, 3, 3))


def test_adabin_keeps_its_distance_positive() -> None:
    quantizer = AdaBinInput()
    with torch.no_grad():
        quantizer.alpha.fill_(-0.3)
        quantizer.after_step_(None)
    assert quantizer.alpha.item() == 2.0**-20
    state = quantizer.state_dict()
    state["alpha"] = torch.tensor(0.0)
    with pytest.raises(ValueError, match=r"alpha \(=0.0\) in the checkpoint must be positive"):
        quantizer.load_state_dict(state)


@EACH
def test_state_is_saved(make: Callable[..., Quantizer], formula: Formula, own: str) -> None:
    x = torch.randn(3, 4, 2, 2, dtype=torch.float64)
    quantizer = prepared(make, x)
    quantizer.set_progress_(0.7, x)
    other = prepared(make, x)
    other.load_state_dict(copy.deepcopy(quantizer.state_dict()))
    for one, another in zip(quantizer.tensors(), other.tensors(), strict=True):
        assert one.equal(another)


@EACH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_codes_and_dtypes(make: Callable[..., Quantizer], formula: Formula, own: str, dtype: torch.dtype) -> None:
    x = torch.randn(3, 4, 3, 3).to(dtype)
    for of_tensors in {dtype, torch.promote_types(dtype, torch.float32)}:
        quantizer = prepared(make, x).to(of_tensors)
        tensors = tuple(tensor.detach() for tensor in quantizer.tensors())
        x_q = quantizer.quantize(x, *tensors)
        assert x_q.dtype == dtype
        assert all(filter_q.unique().numel() <= 2 for filter_q in x_q)
        for grad, tensor in zip(quantizer.backward(torch.randn_like(x), x, *tensors), (x, *tensors), strict=True):
            assert grad is None or (grad.dtype, grad.shape) == (tensor.dtype, tensor.shape)
        codes = quantizer.codes(x, *tensors)
        assert codes.values.abs().eq(1).all()
        assert codes.dequantize().to(dtype).equal(x_q)
        if quantizer.signs:
            assert x_q.abs().eq(1).all()


# --- The schemes

NAMES = ["bnn", "bwn", "xnor", "xnorpp", "bireal", "reactnet", "irnet", "recu", "adabin", "reste"]
SCHEMES: list[Scheme] = [
    *(getattr(binary, name)() for name in NAMES),
    binary.bnn(stochastic=True),
    binary.bwn(paper_gradient=True, center=True),
    binary.bireal("paper"),
    binary.irnet(0.001),
    binary.irnet(binary_input=False),
    binary.recu(scale_init="mean"),
    binary.adabin(offset="code"),
    binary.reste(binary_input=False),
]
EACH_SCHEME = pytest.mark.parametrize("scheme", SCHEMES, ids=str)


@EACH_SCHEME
@pytest.mark.parametrize("autocast", [False, True])
def test_a_training_step(scheme: Scheme, autocast: bool) -> None:
    layer = qconv.QConv2d(4, 6, 3, padding=1, groups=2, scheme=scheme)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        output = layer(torch.randn(2, 4, 5, 5))
    output.float().square().sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.ne(0).any(), name
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.sub_(0.01 * parameter.grad)  # pyright: ignore[reportOperatorIssue]
    layer.after_step_()
    layer.set_progress_(0.5)
    assert layer.eval()(torch.randn(0, 4, 5, 5)).shape == (0, 6, 5, 5)


@EACH_SCHEME
def test_linear_and_transposed_layers(scheme: Scheme) -> None:
    linear = qconv.QLinear(5, 3, scheme=scheme)
    linear(torch.randn(2, 7, 5)).sum().backward()
    transposed = qconv.QConvTranspose1d(4, 2, 3, scheme=scheme)
    transposed(torch.randn(2, 4, 6)).sum().backward()
    for parameter in (*linear.parameters(), *transposed.parameters()):
        assert parameter.grad is not None
        assert parameter.grad.isfinite().all()


@EACH_SCHEME
def test_a_layer_is_pickled_and_loads_a_float_checkpoint(scheme: Scheme) -> None:
    pickle.loads(pickle.dumps(scheme))
    layer = qconv.QConv2d(3, 4, 3, scheme=scheme)
    weight = torch.randn(4, 3, 3, 3)
    layer.load_state_dict({"weight": weight, "bias": torch.zeros(4)})
    assert layer.weight.equal(weight)
    other = qconv.QConv2d(3, 4, 3, scheme=scheme)
    other.load_state_dict(layer.state_dict())
    x = torch.randn(2, 3, 5, 5)
    assert other.eval()(x).equal(layer.eval()(x))


@pytest.mark.parametrize("name", NAMES)
def test_config_holds_every_argument_with_its_default(name: str) -> None:
    config = yaml.safe_load((Path(__file__).parents[1] / "configs/scheme" / f"{name}.yaml").read_text())
    assert config.pop("_target_") == f"qconv.schemes.{name}"
    assert config == {key: p.default for key, p in inspect.signature(getattr(binary, name)).parameters.items()}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("make", [Polynomial, SwishSign, partial(EDE, 0.01)], ids=["Polynomial", "SwishSign", "EDE"])
def test_every_scheme_takes_a_surrogate(name: str, make: Callable[[], Surrogate]) -> None:
    scheme: Scheme = getattr(binary, name)(surrogate=make)
    assert str(scheme) == f"{name}(surrogate={make()})"
    of_weight, of_input = scheme.weight(), scheme.input()
    assert isinstance((of_weight if name == "bwn" else of_input).surrogate, Surrogate)
    assert repr((of_weight if name == "bwn" else of_input).surrogate) == repr(make())
    if name != "bwn":
        published = getattr(binary, name)()
        assert repr(of_weight.surrogate) == repr(published.weight().surrogate)
        both = getattr(binary, name)(weight_surrogate=make)
        assert repr(both.weight().surrogate) == repr(make())
        assert repr(both.input().surrogate) == repr(published.input().surrogate)
    layer = qconv.QConv2d(4, 4, 3, scheme=scheme)
    layer.set_progress_(0.5)
    layer(torch.randn(2, 4, 5, 5)).sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.isfinite().all()


PUBLISHED = {
    # the surrogates of input and weight
    "bnn": ("HardClip(1.0)", "Straight()"),
    "bwn": (None, "HardClip(1.0)"),
    "xnor": ("HardClip(1.0)", "HardClip(1.0)"),
    "xnorpp": ("HardClip(1.0)", "HardClip(1.0)"),
    "bireal": ("ApproxSign()", "HardClip(1.0)"),
    "reactnet": ("ApproxSign()", "HardClip(1.0)"),
    "irnet": ("EDE(t_min=0.1, t_max=10.0)", "EDE(t_min=0.1, t_max=10.0)"),
    "recu": ("ApproxSign()", "Straight()"),
    "adabin": ("ApproxSign()", "EDE(t_min=0.001, t_max=10.0)"),
    "reste": ("ReSTE(o_max=3.0, m=0.1, t=1.5)", "ReSTE(o_max=3.0, m=0.1, t=1.5)"),
}


@pytest.mark.parametrize("name", NAMES)
def test_published_surrogates_and_bits(name: str) -> None:
    scheme: Scheme = getattr(binary, name)()
    input, weight = scheme.input(), scheme.weight()
    assert (input.bits, weight.bits) == (32 if name == "bwn" else 1, 1)
    expected = PUBLISHED[name]
    assert (repr(input.surrogate) if name != "bwn" else None, repr(weight.surrogate)) == expected
    assert input.signs == (name not in ("bwn", "adabin"))


def test_stochastic_draws_the_input_alone() -> None:
    scheme = binary.bnn(stochastic=True)
    input, weight = scheme.input(), scheme.weight()
    assert isinstance(input, Sign)
    assert input.stream is not None
    assert input.stream.sharded
    assert isinstance(weight, Sign)
    assert weight.stream is None


WRONG: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "surrogate": (
        lambda: binary.bnn(surrogate=HardClip()),  # pyright: ignore[reportArgumentType]
        TypeError,
        r"surrogate \(=HardClip\(1.0\)\) must make a surrogate",
    ),
    "weight_surrogate": (
        lambda: binary.xnorpp(weight_surrogate="ede"),  # pyright: ignore[reportArgumentType]
        TypeError,
        r"weight_surrogate \(=ede\) must make a surrogate",
    ),
    "factory": (
        lambda: binary.bwn(surrogate=list),  # pyright: ignore[reportArgumentType]
        TypeError,
        r"surrogate \(=<class 'list'>\) must make a surrogate",
    ),
    "detach and paper": (
        lambda: binary.bwn(True, paper_gradient=True),
        ValueError,
        r"detach_scale \(=True\) and paper_gradient \(=True\)",
    ),
    "clip": (lambda: ScaledSign(weight_clip=0), ValueError, r"weight_clip \(=0\) must be positive or None"),
    "gradient": (
        lambda: binary.reactnet("ours"),  # pyright: ignore[reportArgumentType]
        ValueError,
        r"gradient \(='ours'\) must be 'code' or 'paper'",
    ),
    "t_min": (lambda: binary.irnet(0), ValueError, r"t_min \(=0\) must be positive"),
    "t_min of AdaBin": (lambda: binary.adabin(11.0), ValueError, r"t_min \(=11.0\) must be .* at most t_max \(=10.0\)"),
    "offset": (
        lambda: binary.adabin(offset="no"),  # pyright: ignore[reportArgumentType]
        ValueError,
        r"offset \(='no'\) must be 'paper' or 'code'",
    ),
    "o_max": (lambda: binary.reste(0.5), ValueError, r"o_max \(=0.5\) must be at least 1"),
    "tau": (lambda: binary.recu(0.5), ValueError, r"tau_min \(=0.5\) must be above 0.5"),
    "tau_max": (lambda: binary.recu(0.9, 1.0), ValueError, r"tau_max \(=1.0\), and that below 1"),
    "scale_init": (
        lambda: binary.recu(scale_init="one"),  # pyright: ignore[reportArgumentType]
        ValueError,
        r"scale_init \(='one'\) must be 'uniform' or 'mean'",
    ),
    "float padding": (
        lambda: binary.irnet(padding_value=1, binary_input=False),
        ValueError,
        r"padding_value \(=1\) must be 0 with binary_input=False",
    ),
    "float surrogate": (
        lambda: binary.reste(surrogate=EDE, binary_input=False),
        ValueError,
        r"surrogate \(=.*EDE.*\) must be None with binary_input=False: give weight_surrogate",
    ),
    "padding": (lambda: binary.recu(padding_value=2), ValueError, r"padding_value \(=2\) must be 0, \+1 or -1"),
    "unbuilt": (lambda: ReActNetInput()(torch.ones(2)), ValueError, r"bias \(=None\) .* call build"),
}


@pytest.mark.parametrize(("call", "error", "message"), WRONG.values(), ids=list(WRONG))
def test_wrong_arguments(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
