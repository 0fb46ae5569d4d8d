"""What binary and ternary methods and powers of two have of their own: schedules, first values, what a paper computes.

The formulas are held by test_golden.py, what all methods have in common by test_quantizers.py and test_methods.py.
"""

import copy
import math
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, cast

import golden
import numpy as np
import pytest
import torch
from methods import ready
from torch import Tensor, nn

import qconv
from qconv import quantizers, schemes
from qconv.methods.apot import APoTInput, APoTWeight, levels, project
from qconv.methods.deepshift import shift_ps
from qconv.methods.inq import INQ, inq, power_exponent
from qconv.quantizers import (
    EDE,
    FP8,
    TTQ,
    TWN,
    AdaBinInput,
    AdaBinWeight,
    BiRealWeight,
    FixedPoint,
    HardClip,
    IRNetWeight,
    Polynomial,
    Quantizer,
    ReCUInput,
    ReCUWeight,
    ReSTE,
    ReSTEWeight,
    ScaledSign,
    ShiftPS,
    ShiftQ,
    Sign,
    SiManInput,
    SiManWeight,
    Straight,
    XNORppWeight,
)
from qconv.quantizers.filters import standardize
from qconv.quantizers.levels import ternary
from qconv.quantizers.percentiles import quantile
from qconv.training.checkpoint_io import CheckpointError
from qconv.training.initial_weights import load_weights

W = torch.tensor(golden.FILTERS[:1])
G = torch.tensor(golden.GRAD_FILTERS[:1])
DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)


def near(found: Tensor | None, expected: Any) -> None:
    """Equal to the six decimals of the golden vectors."""
    assert found is not None
    np.testing.assert_allclose(found.detach().squeeze(0).numpy(), expected, rtol=0, atol=6e-7)


@pytest.mark.parametrize(
    "quantizer",
    [Sign(Straight), ShiftQ(), TWN(), FixedPoint(), FP8(), quantizers.DoReFaWeight(), quantizers.MinMaxWeight()],
    ids=repr,
)
def test_what_is_straight_through_copies_nothing(quantizer: Quantizer) -> None:
    assert quantizer.backward(G, W)[0] is G


# Surrogates


@pytest.mark.parametrize(
    ("make", "progress", "expected"),
    [
        (EDE, 0.0, (0.1, 10.0)),
        (EDE, 0.5, (1.0, 1.0)),
        (EDE, 1.0, (10.0, 1.0)),
        (partial(EDE, 0.001), 0.0, (0.001, 1000.0)),
        (Polynomial, 0.0, (0.01, 100.0)),
        (Polynomial, 0.5, (0.1**0.5, 10**0.5)),
        (partial(Polynomial, input=True), 0.0, (1.0, 1.0)),
        (partial(Polynomial, input=True), 0.5, (1.0, 1.0)),
        (partial(Polynomial, input=True), 1.0, (10.0, 1.0)),
        (ReSTE, 0.0, (1.0,)),
        (ReSTE, 0.25, (1 + 2 * (1 - math.cos(math.pi / 8)),)),  # as the authors' code computes it
        (ReSTE, 0.5, (1 + 2 * (1 - math.cos(math.pi / 4)),)),
        (ReSTE, 0.75, (1 + 2 * (1 - math.cos(3 * math.pi / 8)),)),
        (partial(ReSTE, schedule="linear"), 0.25, (1.5,)),
        (partial(ReSTE, schedule="linear"), 0.75, (2.5,)),
        (ReSTE, 1.0, (3.0,)),
    ],
)
def test_schedules(make: Callable[[], EDE | ReSTE], progress: float, expected: tuple[float, ...]) -> None:
    surrogate = make()
    if progress == 0:
        assert [tensor.item() for tensor in surrogate.tensors()] == pytest.approx(expected)
    surrogate.double().set_progress_(progress)
    assert [tensor.item() for tensor in surrogate.tensors()] == pytest.approx(expected, rel=1e-12)
    quantizer = Sign(make).double()
    quantizer.set_progress_(progress, None)
    assert [tensor.item() for tensor in quantizer.tensors()] == pytest.approx(expected, rel=1e-12)


@DTYPES
@pytest.mark.parametrize("clip", [1.0, 1.25, 0.5, 3.0], ids=str)
def test_sign_gradient_passes_at_the_clip_and_not_above(dtype: torch.dtype, clip: float) -> None:
    at = torch.tensor(clip, dtype=dtype)
    above, below = (torch.nextafter(at, torch.tensor(end, dtype=dtype)) for end in (math.inf, 0.0))
    x = torch.stack([at, above, below, -at, -above, -below]).repeat(16)  # enough for the vectorized loop
    grad = Sign(partial(HardClip, clip)).backward(torch.full_like(x, 2.0), x)[0]
    assert grad is not None
    assert grad.tolist() == [2, 0, 2, 2, 0, 2] * 16


@DTYPES
def test_sign_of_the_smallest_numbers(dtype: torch.dtype) -> None:
    zero = torch.zeros((), dtype=dtype)
    tiny = torch.nextafter(zero, torch.ones((), dtype=dtype))
    x = torch.stack([tiny, -tiny, zero, -zero]).repeat(16)
    assert quantizers.sign(x).tolist() == [1, -1, 1, 1] * 16


def test_infinity_and_nan_of_signs() -> None:
    x = torch.tensor([math.inf, -math.inf, math.nan, 1.0])[None]
    x_q = Sign().quantize(x)[0]
    assert x_q[[0, 1, 3]].tolist() == [1, -1, 1]
    assert abs(x_q[2]) == 1  # a binary code has no place for NaN
    assert ScaledSign().quantize(x).isnan().all()  # the mean of the filter


def test_stochastic_draws_the_input_alone() -> None:
    scheme = schemes.bnn(stochastic=True)
    input, weight = scheme.input(), scheme.weight()
    assert isinstance(input, Sign)
    assert input.stream is not None
    assert input.stream.sharded
    assert isinstance(weight, Sign)
    assert weight.stream is None


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
    "siman": ("ApproxSign()", "Straight()"),
    "adabin": ("ApproxSign()", "EDE(t_min=0.001, t_max=10.0)"),
    "reste": ("ReSTE(o_max=3.0, m=0.1, t=1.5, schedule='cosine')",) * 2,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_surrogates_and_bits(name: str) -> None:
    scheme: qconv.Scheme = getattr(schemes, name)()
    input, weight = scheme.input(), scheme.weight()
    assert (input.bits, weight.bits) == (32 if name == "bwn" else 1, 1)
    expected = PUBLISHED[name]
    assert (repr(input.surrogate) if name != "bwn" else None, repr(weight.surrogate)) == expected
    assert input.signs == (name not in ("bwn", "adabin"))


# BWN and XNOR-Net


def test_the_gradient_times_the_number_of_weights() -> None:
    weight, grad = torch.randn(4, 3, 5, 5).double(), torch.randn(4, 3, 5, 5).double()
    forms: tuple[dict[str, Any], ...] = ({}, {"detach_scale": True}, {"paper_gradient": True})
    for options in forms:
        times = ScaledSign(numel_gradient=True, **options).backward(grad.clone(), weight)[0]
        scaled = 75 * (1 - 1 / 3) * grad
        torch.testing.assert_close(times, ScaledSign(**options).backward(scaled, weight)[0])
    depthwise = ScaledSign(numel_gradient=True).backward(grad[:, :1].clone(), weight[:, :1])[0]
    torch.testing.assert_close(depthwise, ScaledSign().backward(25 * grad[:, :1], weight[:, :1])[0])
    assert schemes.bwn(numel_gradient=True).name == "bwn(numel_gradient=True)"


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
    layer = qconv.QConv2d(3, 4, 3, scheme=schemes.xnor(center=True))
    layer.after_step_()
    torch.testing.assert_close(layer.weight.detach().mean(1), torch.zeros(4, 3, 3))


def test_clip_brings_latent_weights_back() -> None:
    w = torch.tensor([-3.0, -0.5, 0.0, 1e-9, 2.0])
    expected = {
        Sign(weight_clip=1.0): [-1, -0.5, 0, 1e-9, 1],
        Sign(): w.tolist(),
        ScaledSign(): [-1, -0.5, 0, 1e-9, 1],
        ShiftQ(3): [-1, -0.5, 0, 0.125, 1],
    }
    for quantizer, values in expected.items():
        clipped = w.clone()
        quantizer.after_step_(clipped)
        assert clipped.equal(torch.tensor(values))
    w_bnn = w.clone()
    schemes.bnn().weight().after_step_(w_bnn)
    assert w_bnn.equal(w.clamp(-1, 1))
    shift = ShiftPS(5)
    shift.initialize(w)
    with torch.no_grad():
        shift.shift.add_(torch.tensor([5.0, -30, 0, 0, 0]))
        shift.after_step_(w)
    assert shift.shift.min() >= -14
    assert shift.shift.max() <= 0


# IR-Net, ReCU, AdaBin


def test_golden_irnet() -> None:
    w_hat = [-1.738274, -0.816316, -0.355338, -0.048019, 0.182471, 0.41296, 0.873939, 1.488577]
    near(standardize(W).values, w_hat)
    near(IRNetWeight().quantize(W), golden.SIGNS)
    near(IRNetWeight().quantize(W + 5), golden.SIGNS)  # mean and deviation of the filter play no part
    near(IRNetWeight().quantize(W * 7), golden.SIGNS)
    heavy = torch.tensor([[*[0.0] * 60, 1.0, -1.0, 1.0, -1.0]], dtype=torch.float64)  # mean |w_hat| is 0.248
    assert IRNetWeight().quantize(heavy).abs().eq(0.25).all()


def test_golden_recu() -> None:
    w1 = [-4.916522, -2.308864, -1.005035, -0.135816, 0.516099, 1.168014, 2.471843, 4.210282]
    near(standardize(W, eps=1e-5).values * 2 * math.sqrt(2), w1)
    assert golden.recu_bound(W.numpy(), 0.9) == pytest.approx(3.366234721901584, rel=1e-15)


def adabin_layer(offset: Any) -> qconv.QConv2d:
    return qconv.QConv2d(4, 8, 3, bias=False, scheme=schemes.adabin(offset=offset))


def test_weights_of_the_authors_of_adabin(tmp_path: Path) -> None:
    """Their layer has these names; its output is that of `offset="code"`, and the default says so."""
    torch.manual_seed(0)
    alpha, beta, weight = torch.tensor(0.7), torch.tensor(-0.3), torch.randn(8, 4, 3, 3)
    theirs = {"0.weight": weight, "0.binary_a.alpha_a": alpha, "0.binary_a.beta_a": beta}
    x = torch.randn(2, 4, 6, 6, dtype=torch.float64)
    made = {code: torch.nn.Sequential(adabin_layer(code)) for code in ("paper", "code")}
    made["code"].load_state_dict(theirs)
    with pytest.raises(RuntimeError, match=r"layer 0: binary_a.alpha_a and .*load them with adabin\(offset='code'\)"):
        made["paper"].load_state_dict(theirs)
    with pytest.raises(RuntimeError, match=r"size mismatch for 0\.input_quantizer\.alpha"):
        made["code"].load_state_dict(theirs | {"0.binary_a.alpha_a": torch.ones(4)})
    torch.save(theirs, tmp_path / "theirs.pth")  # init_from=
    made["init_from"] = torch.nn.Sequential(adabin_layer("code"))
    load_weights(made["init_from"], str(tmp_path / "theirs.pth"))
    with pytest.raises(CheckpointError, match="load them with adabin"):
        load_weights(torch.nn.Sequential(adabin_layer("paper")), str(tmp_path / "theirs.pth"))
    mean, w = weight.double().mean((1, 2, 3), keepdim=True), weight.double()
    w_q = mean + (w - mean).square().mean((1, 2, 3), keepdim=True).sqrt() * (w - mean).sign()
    x_q = alpha.double() * (((x - beta) / alpha).sign() + beta)
    expected = torch.nn.functional.conv2d(x_q, w_q)
    for name in ("code", "init_from"):
        torch.testing.assert_close(made[name].double()(x), expected, rtol=1e-12, atol=1e-12)


def test_golden_adabin() -> None:
    codes = AdaBinWeight().codes(W)
    assert codes.offset is not None
    found = codes.offset.item(), codes.scale.item()
    assert found == pytest.approx((-0.06874999999999998, 0.6087577001566387), rel=1e-14)


def test_recu_schedule() -> None:
    quantizer = ReCUWeight().double()
    for epoch, epochs in ((0, 600), (150, 600), (599, 600), (600, 600)):
        quantizer.set_progress_(epoch / epochs, None)
        a = 0.14 / (math.e - 1)
        assert quantizer.tau.item() == pytest.approx(a * math.e ** (epoch / epochs) + 0.85 - a, rel=1e-12)
    assert quantizer.tau.item() == pytest.approx(0.99, rel=1e-12)
    quantizer.set_progress_(0, None)
    assert quantizer.tau.item() == pytest.approx(0.85, rel=1e-12)


def test_the_schedule_of_recu_in_a_model_of_16_bits() -> None:
    layer = qconv.QConv2d(4, 4, 3, scheme=schemes.recu(tau_max=0.999))
    qconv.set_progress(layer, 1.0)
    tau = cast(Any, layer.weight_quantizer).tau.clone()
    layer.to(torch.bfloat16)
    assert cast(Any, layer.weight_quantizer).tau.equal(tau)  # rounded it would be 1, where Q is infinite
    layer.load_state_dict(layer.state_dict())
    assert layer.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("scheme", [schemes.bwn(), schemes.xnor(), schemes.fda()], ids=str)
def test_sums_over_a_filter_of_16_bits(scheme: qconv.Scheme) -> None:
    layer = qconv.QConv2d(64, 8, 3, padding=1, scheme=scheme)
    grad = 30 * torch.sign(layer.weight.detach().sum((1, 2, 3))).view(1, -1, 1, 1).expand(2, -1, 8, 8)
    found = []
    for dtype in (torch.float32, torch.float16):
        layer.zero_grad()
        layer.to(dtype)(torch.ones(2, 64, 8, 8, dtype=dtype)).backward(grad.to(dtype))
        found.append(cast(Tensor, layer.weight.grad).float())
    torch.testing.assert_close(found[1], found[0], rtol=0.02, atol=0.01 * float(found[0].abs().max()))


def test_a_weight_at_the_bound_of_recu_passes() -> None:
    w = torch.tensor([[-1.0, 0.0, 1.0]], dtype=torch.float64)  # w1 = 2√2 w
    quantizer = ReCUWeight().double()
    quantizer.initialize(w)
    quantizer.tau.fill_(0.5)  # Q = 0, where only the middle weight lies
    grad = quantizer.backward(torch.tensor([[5.0, 1.0, 7.0]], dtype=torch.float64), w, *quantizer.tensors())[0]
    factor = 2 * math.sqrt(2) * quantizer.alpha.item() / math.sqrt(1 + 1e-5)
    assert grad is not None
    np.testing.assert_allclose(grad[0].detach().numpy(), factor * np.array([-1 / 3, 2 / 3, -1 / 3]), rtol=1e-12)


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
    torch.testing.assert_close(grad, g.mean(tuple(range(1, g.ndim)), keepdim=True).expand(shape))
    recu = ReCUWeight()
    recu.initialize(w)
    assert recu(w).equal(recu.alpha.view(-1, *[1] * (w.ndim - 1)).expand(shape))
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


def test_first_scales() -> None:
    w = torch.randn(4, 3, 3, 3)
    assert ready(XNORppWeight, w)[1][0].tolist() == [1] * 4
    alpha = ready(ReCUWeight, w)[1][0]
    assert ((alpha >= 0) & (alpha < 1)).all()
    assert alpha.unique().numel() == 4
    torch.testing.assert_close(ready(partial(ReCUWeight, scale_init="mean"), w)[1][0], w.abs().mean((1, 2, 3)))
    assert [tensor.item() for tensor in AdaBinInput().tensors()] == [1, 0]
    assert not ready(quantizers.ReActNetInput, w)[1][0].any()
    assert [tensor.item() for tensor in TTQ().tensors()] == [1, 1]


# TWN


def test_twn_in_float16_does_not_overflow() -> None:
    w = torch.full((2, 3000), 60.0, dtype=torch.float16)
    assert TWN().quantize(w).equal(w)


def test_ternary_at_the_threshold() -> None:
    assert ternary(torch.tensor([1.0, -1.0, 1.1, -1.1, math.nan]), torch.tensor(1.0)).tolist() == [0, 0, 1, -1, 0]


# INQ


def frozen_to(quantizer: INQ, x: Tensor, progress: float = 1.0) -> tuple[Tensor, ...]:
    """Its tensors, with the weights of ``x`` frozen that are at ``progress``."""
    quantizer.initialize(x)
    quantizer.set_progress_(progress, x)
    return quantizer.tensors()


def test_inq_golden() -> None:
    quantizer = INQ(3)
    assert quantizer.quantize(W, *frozen_to(quantizer, W.clone())).tolist() == [[-1, -0.5, -0.5, 0, 0, 0, 0.5, 1]]
    assert quantizer.top == 0
    assert quantizer.codes(W, *quantizer.tensors()).scale == 0.5
    assert quantizer.codes(W, *quantizer.tensors()).values.tolist() == [[-2, -1, -1, 0, 0, 0, 1, 2]]


@pytest.mark.parametrize("bits", range(2, 8))
@pytest.mark.parametrize("scale", [1.0, 0.75, 1.4999, 3e-3, 96.0])
def test_inq_against_the_rule(bits: int, scale: float) -> None:
    w = torch.randn(300, dtype=torch.float64)
    edges = [sign * f * 2.0**-k for sign, f, k in product((-1, 1), (0.5, 0.75, 1.0), range(0, 36, 3))]
    just_below = [math.nextafter(edge, 0.0) for edge in edges]
    w = torch.cat([w / w.abs().max(), torch.tensor([0.0, -0.0, *edges, *just_below], dtype=torch.float64)]) * scale
    quantizer = INQ(bits)
    expected, _ = golden.inq(w.numpy(), w.numpy(), 1.0, bits)
    assert quantizer.quantize(w, *frozen_to(quantizer, w.clone())).tolist() == expected.tolist()


def test_power_exponent_is_exact_at_both_ends() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        low = 0.75 * torch.exp2(torch.arange(-14, 15).to(dtype))
        assert power_exponent(low).tolist() == list(range(-14, 15))
        assert power_exponent(-torch.nextafter(low, torch.zeros_like(low))).tolist() == list(range(-15, 14))


@pytest.mark.parametrize(
    ("progress", "count"), [(0.0, 4), (0.2499, 4), (0.25, 6), (0.49, 6), (0.5, 7), (0.75, 8), (0.9, 8), (1.0, 8)]
)
def test_inq_portions(progress: float, count: int) -> None:
    quantizer, w = INQ(3), W.clone()
    frozen_to(quantizer, w, progress)
    largest = W.abs().argsort(descending=True)[0, :count]
    assert quantizer.frozen.sum() == count
    frozen = quantizer.frozen > 0
    assert frozen[0, largest].all()
    expected, expected_grad = map(torch.tensor, golden.inq(W.numpy(), G.numpy(), progress, 3))
    assert w.equal(expected)  # the latent weight is at its level
    assert quantizer.quantize(W, *quantizer.tensors()).equal(expected)
    dw, *others = quantizer.backward(G.clone(), W, *quantizer.tensors())
    assert dw is not None
    assert dw.equal(expected_grad)
    assert others == [None, None, None]


def test_inq_moves_on_at_the_right_epoch() -> None:
    counts = []
    quantizer, w = INQ(5, tuple((i + 1) / 50 for i in range(50))), torch.randn(50)
    quantizer.initialize(w)
    for epoch in range(100):
        quantizer.set_progress_(epoch / 100, w)
        counts.append(int(quantizer.frozen.sum()))
    assert counts == [1 + epoch // 2 for epoch in range(100)]


def test_inq_breaks_ties_by_index_and_keeps_what_is_frozen() -> None:
    quantizer, w = INQ(3), torch.tensor([0.5, -0.5, 0.5, 0.5, -0.5, 0.5, -0.5, 0.5])
    quantizer.initialize(w)
    quantizer.set_progress_(0.0, w)
    assert quantizer.frozen.tolist() == [True] * 4 + [False] * 4
    w[7] = 9.0  # larger than what is frozen already: next, and clamped to the largest level
    quantizer.set_progress_(0.25, w)
    assert quantizer.frozen.tolist() == [True] * 5 + [False, False, True]
    assert w.tolist() == [0.5, -0.5, 0.5, 0.5, -0.5, 0.5, -0.5, 0.5]
    quantizer.set_progress_(0.0, w)
    assert quantizer.frozen.sum() == 6


def test_inq_brings_frozen_weights_back() -> None:
    layer = qconv.QConv2d(3, 4, 3, bias=False, scheme=inq(4))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5, momentum=0.9, weight_decay=0.1)
    qconv.after_every_step(optimizer, layer)
    input = torch.randn(2, 3, 6, 6)

    def step() -> None:
        optimizer.zero_grad()
        layer(input).square().mean().backward()
        optimizer.step()

    for _ in range(3):
        step()  # momentum
    qconv.set_progress(layer, 0.25)
    quantizer = layer.weight_quantizer
    assert isinstance(quantizer, INQ)
    frozen, before = quantizer.frozen > 0, layer.weight.detach().clone()
    for _ in range(3):
        step()
        assert layer.weight[frozen].equal(before[frozen])
    assert not layer.weight[~frozen].eq(before[~frozen]).any()
    with pytest.raises(TypeError, match="INQ has integer codes once all weights are frozen; 81 of 108 are"):
        layer.weight_codes()
    qconv.set_progress(layer, 1.0)
    assert layer.weight_codes().dequantize().float().equal(layer.quantized_weight())
    assert layer.weight[frozen].equal(before[frozen])


def test_inq_resumes_in_the_middle() -> None:
    def train(layer: qconv.QConv2d, optimizer: torch.optim.Optimizer, epochs: range) -> None:
        for epoch in epochs:
            qconv.set_progress(layer, epoch / 8)
            optimizer.zero_grad()
            input = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(epoch))
            layer(input).square().mean().backward()
            optimizer.step()
            qconv.after_step(layer)

    def make() -> tuple[qconv.QConv2d, torch.optim.Optimizer]:
        layer = qconv.QConv2d(3, 4, 3, scheme=inq(3))
        return layer, torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)

    first, optimizer = make()
    train(first, optimizer, range(5))
    state = copy.deepcopy((first.state_dict(), optimizer.state_dict()))
    train(first, optimizer, range(5, 8))
    second, optimizer = make()
    second.load_state_dict(state[0])
    optimizer.load_state_dict(state[1])
    train(second, optimizer, range(5, 8))
    for name, tensor in first.state_dict().items():
        assert tensor.equal(second.state_dict()[name]), name


def test_inq_levels_survive_a_cast_and_a_float_checkpoint_sets_them_anew() -> None:
    w = torch.tensor([[1.4999, 0.3, -0.7, 0.1]])  # bfloat16 rounds the largest to 1.5, which would double all levels
    quantizer = INQ(4)
    expected = quantizer.quantize(w, *frozen_to(quantizer, w.clone()))
    quantizer.to(torch.bfloat16)
    assert quantizer.quantize(w.bfloat16(), *quantizer.tensors()).equal(expected.bfloat16())
    quantizer.initialize(w)
    assert not quantizer.frozen.any()
    assert quantizer(w).equal(w)
    quantizer.initialize(torch.zeros(3, 2))
    assert quantizer.frozen.shape == (3, 2)


def test_inq_of_zeros_waits_for_a_weight() -> None:
    quantizer, w = INQ(3), torch.zeros(4)
    quantizer.initialize(w)
    quantizer.set_progress_(0.0, w)
    w[3] = -0.5
    quantizer.after_step_(w)
    quantizer.set_progress_(1.0, w)
    assert w.tolist() == [0, 0, 0, -0.5]
    assert quantizer.top == -1


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_inq_freezes_only_numbers(value: float) -> None:
    x = torch.randn(2, 9)
    x[1, 4] = value
    quantizer = INQ()
    quantizer.initialize(x)
    assert not quantizer.quantize(x, *quantizer.tensors()).isfinite()[1, 4]
    with pytest.raises(ValueError, match="NaN or inf: INQ can't freeze it"):
        quantizer.set_progress_(0.0, x)


# APoT


def test_apot_grids() -> None:
    def over_largest(bits: int) -> list[float]:
        return [round(level / levels(bits)[-1], 6) for level in levels(bits)]

    assert over_largest(1) == [0, 1]
    assert over_largest(2) == [0, 0.25, 0.5, 1]
    assert over_largest(3) == [0, 0.1, 0.2, 0.3, 0.4, 0.6, 0.8, 1]
    four = "0 .020833 .041667 .0625 .083333 .125 .166667 .1875 .25 .333333 .375 .5 .666667 .6875 .75 1"
    assert over_largest(4) == [float(level) for level in four.split()]
    terms = (0, 1 / 2, 1 / 8, 1 / 64), (0, 1 / 4, 1 / 16, 1 / 128), (0, 1 / 32)
    assert [level / 128 for level in levels(5)] == sorted(sum(term) for term in product(*terms))
    assert all(len(set(levels(bits))) == 2**bits for bits in range(1, 6))


def test_project_takes_the_nearest_and_the_smaller_of_two() -> None:
    for bits in range(1, 6):
        grid = levels(bits)
        x = torch.cat([torch.randn(300).double() * grid[-1], torch.arange(-2 * grid[-1], 2 * grid[-1] + 1) / 2])
        expected = [math.copysign(min(grid, key=lambda level: (abs(abs(v) - level), level)), v) for v in x.tolist()]
        assert project(x, grid).tolist() == expected
    ends = project(torch.tensor([math.inf, -math.inf, math.nan, -0.0]), levels(3))
    assert ends[:2].tolist() == [10, -10]
    assert ends[2].isnan()
    assert ends[3] == 0


@pytest.mark.parametrize("variant", ["cifar", "imagenet"])
def test_apot_input_at_its_ends(variant: str) -> None:
    alpha = torch.tensor(1.7, dtype=torch.float64)
    x = torch.stack([alpha, torch.nextafter(alpha, 2 * alpha), 0 * alpha, -0.0 * alpha, -alpha])
    quantizer = APoTInput(3, variant)  # pyright: ignore[reportArgumentType]
    torch.testing.assert_close(quantizer.quantize(x, alpha), torch.tensor([1.7, 1.7, 0, 0, 0]).double())
    dx, _ = quantizer.backward(torch.full_like(x, 3.0), x, alpha)
    assert dx is not None
    assert dx.tolist() == [3, 0, 3, 3, 0]
    ends = quantizer.quantize(torch.tensor([math.inf, -math.inf, math.nan]), torch.tensor(2.0))
    assert ends[:2].tolist() == [2, 0]
    assert ends[2].isnan()
    for value, expected in ((1.0, 0.0), (1.0 + 2**-50, 1.0)):  # z = 1: q - z; above: 1
        x, one = torch.tensor([value], dtype=torch.float64), torch.ones((), dtype=torch.float64)
        assert quantizer.backward(torch.ones_like(x), x, one)[1] == expected


def test_apot_constant_layers_give_zeros() -> None:
    for value in (0.0, 0.1, -0.7, 1e4, 1e-6):
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            w = torch.full((7, 3, 11, 13), value, dtype=dtype)
            assert not APoTWeight(5).quantize(w, torch.tensor(3.0)).any()


def test_apot_ranges_start_where_few_bits_have_levels() -> None:
    assert [APoTInput(bits).alpha.item() for bits in (2, 3, 4, 5)] == pytest.approx([1.6, 56 / 15, 8, 8])
    starts = [APoTInput(bits, "imagenet").alpha.item() for bits in (2, 3, 4, 5)]
    assert starts == pytest.approx([1.2, 2.8, 6, 6])
    for variant in ("cifar", "imagenet"):
        behind_a_hardtanh = torch.linspace(-1, 1, 201)
        assert (APoTInput(2, variant)(behind_a_hardtanh) != 0).float().mean() > 0.3


def test_apot_ranges_start_where_the_authors_do() -> None:
    starts = [APoTWeight(), APoTWeight(variant="imagenet"), APoTInput(), APoTInput(variant="imagenet")]
    assert [quantizer.alpha.item() for quantizer in starts] == [3, 3, 8, 6]


# DeepShift


@pytest.mark.parametrize(
    ("quantizer", "ends"),
    [
        (ShiftQ(5), (-1, 1)),
        (ShiftPS(5), (-1, 1)),
        (FixedPoint(3, 2), (-4, 3.75)),
        (FixedPoint(3, 2, bound="code"), (-4, 3)),
        (FixedPoint(16, 16), (-(2**15), 2**15 - 2**-9)),  # 2^15 − 2^−16 is no float32
        (FixedPoint(16, 16, bound="code"), (-(2**15), 2**15 - 1)),
    ],
    ids=str,
)
def test_infinity_is_the_last_level_and_nan_stays(quantizer: quantizers.Quantizer, ends: tuple[float, float]) -> None:
    x = torch.tensor([math.inf, -math.inf, math.nan, 1.0])[None]
    quantizer.initialize(x)
    x_q = quantizer.quantize(x, *quantizer.tensors())[0]
    assert (x_q[1], x_q[0]) == ends
    assert x_q[2].isnan()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_fixed_point_fits_its_bits(dtype: torch.dtype) -> None:
    x = torch.tensor([3e4, -3e4, 1e30, -1e30], dtype=torch.float64).to(dtype)
    for integer_bits, fraction_bits in ((16, 16), (8, 8), (3, 2), (1, 0), (1, 31)):
        quantizer = FixedPoint(integer_bits, fraction_bits)
        codes = quantizer.codes(x).values
        assert -(2 ** (quantizer.bits - 1)) <= codes.min() < codes.max() < 2 ** (quantizer.bits - 1)
    with pytest.raises(ValueError, match=r"bound \(='paper'\) must be 'exact' or 'code'"):
        FixedPoint(bound="paper")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_powers_of_two_are_chosen_exactly(dtype: torch.dtype) -> None:
    """The numbers beside each threshold 2^(e − ½), squared as fractions: 2·m² is below or above 1."""
    for exponent in range(-13, 1):
        threshold = torch.tensor(2.0 ** (exponent - 0.5), dtype=dtype)
        for direction in (-math.inf, math.inf):
            x = threshold.clone()
            for _ in range(3):
                above = Fraction(x.item()) ** 2 > Fraction(2) ** (2 * exponent - 1)
                rounded = quantizers.round_power_of_two(torch.stack([x, -x]), -15, 0)
                power = 2.0 ** (exponent if above else exponent - 1)
                assert rounded.tolist() == [power, -power], x
                x = torch.nextafter(x, torch.tensor(direction, dtype=dtype))
    special = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, torch.finfo(dtype).smallest_normal / 4]).to(dtype)
    rounded = quantizers.round_power_of_two(special, -15, 3)
    assert rounded[:4].tolist() == [0, 0, 8, -8]
    assert rounded[4].isnan()
    assert rounded[5] == (2.0**-15 if special[5] else 0)


def test_shift_ps_golden() -> None:
    shift = torch.tensor([-3.4, -1.6, -0.4, -2.6], dtype=torch.float64)
    sign = torch.tensor([0.9, -0.7, 0.2, -0.4], dtype=torch.float64)
    grad = torch.tensor([1.0, 2, 3, 4], dtype=torch.float64)
    w_q = [0.125, -0.25, 0, 0]
    assert ShiftPS(5).quantize(shift, shift, sign).tolist() == w_q
    no_grad, grad_shift, grad_sign = ShiftPS(5).backward(grad, shift, shift, sign)
    assert no_grad is None
    torch.testing.assert_close(
        grad_shift, grad * torch.tensor(w_q, dtype=torch.float64) * math.log(2), rtol=1e-12, atol=0
    )
    assert grad_sign is grad


def test_shift_ps_starts_at_the_rounded_weight() -> None:
    w = torch.randn(4, 3, 3) * 0.1
    quantizer = ShiftPS(5)
    quantizer.initialize(w)
    expected = quantizers.round_power_of_two(w, -14, 0)
    assert quantizer(w).equal(expected)


def test_stochastic_exponents_are_right_in_the_mean() -> None:
    w = torch.tensor([0.6, -0.3, 0.8, -0.0312, 0.1, 0.5, -1.0, 0.0], dtype=torch.float64)
    quantizer = ShiftQ(5, "stochastic")
    drawn = []
    for _ in range(1500):
        drawn.append(quantizer.quantize(w, *quantizer.tensors()))
        quantizer.after_step_(None)
    exponents = torch.stack(drawn)[:, :7].abs().log2()
    # The variance of a rounded number is at most 1/4: five standard errors.
    torch.testing.assert_close(exponents.mean(0), w[:7].abs().log2(), rtol=0, atol=5 * 0.5 / math.sqrt(1500))
    assert all(column.unique().numel() == (1 if index in (5, 6) else 2) for index, column in enumerate(exponents.T))
    assert torch.stack(drawn).sign().equal(w.sign().expand(1500, 8))
    assert abs(torch.corrcoef(exponents[:, :5].T).triu(1)).max() < 5 / math.sqrt(1500)


def test_stochastic_shift_and_sign_are_right_in_the_mean_and_independent() -> None:
    quantizer = ShiftPS(5, "stochastic")
    quantizer.initialize(torch.ones(3, dtype=torch.float64))
    shift = torch.tensor([-3.4, -0.25, -14.0], dtype=torch.float64)
    sign = torch.tensor([0.7, -0.3, 1.0], dtype=torch.float64)
    drawn = []
    for _ in range(1500):
        drawn.append(quantizer.quantize(shift, shift, sign, *quantizer.tensors()[2:]))
        with torch.no_grad():
            quantizer.after_step_(None)
    w_q = torch.stack(drawn)
    bound = 5 * 0.5 / math.sqrt(1500)
    torch.testing.assert_close(w_q.sign().mean(0), sign, rtol=0, atol=bound)
    for index in range(3):
        exponent = w_q[:, index][w_q[:, index] != 0].abs().log2()  # given the sign
        assert exponent.mean().item() == pytest.approx(shift[index].item(), abs=2 * bound)


@DTYPES
def test_stochastic_rounding_stays_on_the_levels(dtype: torch.dtype) -> None:
    x = torch.cat([torch.randn(500) * 2, torch.tensor([1e-9, 2.0, 1.0, 0.0, -0.0, math.inf, -math.inf])]).to(dtype)
    quantizer = ShiftQ(3, "stochastic")
    tensors = quantizer.tensors()
    x_q = quantizer.quantize(x, *tensors)
    assert x_q.dtype == dtype
    assert set(x_q.abs().unique().tolist()) == {0, 0.125, 0.25, 0.5, 1}
    assert x_q[-7:].tolist() == [0.125 if dtype != torch.float16 else 0, 1, 1, 0, 0, 1, -1]
    assert quantizer.codes(x, *tensors).dequantize().to(dtype).equal(x_q)
    assert quantizer.quantize(torch.tensor([math.nan], dtype=dtype), *tensors).isnan().all()
    deterministic = ShiftQ(3).quantize(x)
    assert not x_q.equal(deterministic)
    assert quantizer.eval().quantize(x, *quantizer.tensors()).equal(deterministic)


def test_stochastic_ps_is_deterministic_in_evaluation() -> None:
    x = torch.randn(40)
    quantizer = ShiftPS(4, "stochastic")
    quantizer.initialize(x)
    with torch.no_grad():
        quantizer.shift.add_(torch.rand(40) - 0.5)
    plain = ShiftPS(4)
    plain.initialize(x)
    plain.load_state_dict(quantizer.state_dict(), strict=False)
    assert not quantizer(x).equal(plain(x))
    assert quantizer.eval()(x).equal(plain(x))


@pytest.mark.parametrize("make", [lambda: ShiftQ(4, "stochastic"), lambda: ShiftPS(4, "stochastic")], ids=["Q", "PS"])
def test_numbers_are_the_same_after_a_restore_and_others_after_a_step(make: Callable[[], ShiftQ | ShiftPS]) -> None:
    x = torch.rand(200) + 0.1
    first, second = make(), make()
    for quantizer in (first, second):
        quantizer.initialize(x)
        if isinstance(quantizer, ShiftPS):
            with torch.no_grad():
                quantizer.shift.sub_(0.5)
    assert not first(x).equal(second(x))  # keys of their own

    def walk(quantizer: Quantizer) -> list[Tensor]:
        found = []
        for _ in range(3):
            found.append(quantizer(x.clone()).detach())
            with torch.no_grad():
                quantizer.after_step_(x.clone())
        return found

    walk(first)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert first.state_dict()["stream.step"] == 3
    one, other = walk(first), walk(second)
    assert all(a.equal(b) for a, b in zip(one, other, strict=True))
    assert not one[0].equal(one[1])


def test_stochastic_ps_ends_as_it_is_evaluated() -> None:
    layer = qconv.QConv2d(4, 8, 3, scheme=shift_ps(4, rounding="stochastic"))
    for tensor in layer.weight_quantizer.parameters():
        nn.init.uniform_(tensor, -1.5, 0)
    layer.weight_quantizer.settle_()  # they do not come from the weight
    input = torch.randn(2, 4, 6, 6)
    evaluated = layer.eval()(input)
    for progress, is_random in ((0.0, True), (0.79, True), (0.8, False), (0.9, False)):
        qconv.set_progress(layer.train(), progress)
        assert torch.equal(layer(input), evaluated) is not is_random
    older = {key: value for key, value in layer.state_dict().items() if not key.endswith("is_random")}
    assert not any(layer.load_state_dict(older))
    assert not torch.equal(layer(input), evaluated)


def test_stochastic_gradients_belong_to_the_numbers_of_the_forward() -> None:
    quantizer = ShiftPS(4, "stochastic")
    x = torch.randn(60, dtype=torch.float64)
    quantizer.initialize(x)
    with torch.no_grad():
        quantizer.shift.add_(torch.rand_like(x) - 0.5)
        quantizer.sign.mul_(0.6)
    x_q = quantizer(x)
    grad = torch.randn_like(x)
    x_q.backward(grad)
    assert quantizer.shift.grad is not None
    torch.testing.assert_close(quantizer.shift.grad, grad * x_q.detach() * math.log(2), rtol=1e-12, atol=0)
    assert not quantizer.shift.grad.allclose(grad * quantizer.eval()(x).detach() * math.log(2))
    plain = ShiftQ(4, "stochastic")
    leaf = x.clone().requires_grad_()
    plain(leaf).backward(grad)
    assert leaf.grad is not None
    assert leaf.grad.equal(grad)


def test_where_ewgs_starts() -> None:
    """As in the authors' code, whose factor of the output is the weight's scale here."""
    weight = torch.randn(4, 3, 3, 3, dtype=torch.float64)
    quantizer = qconv.quantizers.EWGSWeight(3)
    quantizer.to(torch.float64)
    quantizer.initialize(weight)
    lower, upper, *others = (tensor.detach() for tensor in quantizer.tensors())
    assert (-lower).equal(upper)
    torch.testing.assert_close(upper, 3 * weight.std())
    torch.testing.assert_close(quantizer.quantize(weight, lower, upper, *others).abs().mean(), weight.abs().mean())
    for value in (0.25, -0.25, 1e-3, -7.0):
        equal = torch.full((2, 3, 1, 1), value, dtype=torch.float64)
        quantizer.initialize(equal)
        torch.testing.assert_close(quantizer(equal), equal)
    of_input = qconv.quantizers.EWGSInput(3)
    for inputs, end in (
        (torch.randn(4096).relu(), None),
        (torch.rand(4096) * 0.2 + 10, "highest"),
    ):
        of_input.calibrated = False
        of_input.initialize(inputs)
        assert of_input.calibrated
        upper = inputs.max() if end else 3 * inputs.std() / math.sqrt(1 - 2 / math.pi)
        torch.testing.assert_close(of_input.upper.detach()[0], upper)
        assert of_input.lower == inputs.min()
        torch.testing.assert_close(of_input.width, upper - inputs.min())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_ewgs_with_half_the_bits(dtype: torch.dtype) -> None:
    inputs, grad = torch.rand(64, dtype=dtype) * 2, torch.full((64,), 4e4, dtype=dtype)
    tensors = torch.tensor(0.0), torch.tensor(1.5), torch.tensor(3.0), torch.tensor(0.5)
    quantizer = qconv.quantizers.EWGSInput(2)
    narrow = quantizer.backward(grad, inputs, *tensors)
    wide = quantizer.backward(grad.double(), inputs.double(), *(tensor.double() for tensor in tensors))
    assert narrow[1] is not None
    assert wide[1] is not None
    torch.testing.assert_close(narrow[1].double(), wide[1], rtol=1e-5, atol=0)


def test_how_many_cosines_fda_has() -> None:
    surrogate = qconv.quantizers.Fourier()
    for epoch, count in ((0, 10), (11, 10), (12, 11), (99, 18)):  # of 100 epochs: 9 + int(epoch / 100 · 9), from 0 on
        surrogate.set_progress_(epoch / 100)
        assert surrogate.terms == count
    far = torch.tensor([-torch.inf, -1.5, 1.5, torch.inf])
    assert surrogate.backward(torch.ones(4), far, surrogate.terms).equal(torch.zeros(4))


def test_half_of_a_filter_of_siman_is_positive() -> None:
    weight = torch.randn(6, 5, 3, 3)
    weight[0] = 0.7  # all are equal: the first ones count as larger
    quantizer = SiManWeight()
    quantizer.initialize(weight)
    found = quantizer(weight).detach() / quantizer.alpha.detach().view(-1, 1, 1, 1)
    assert (found == 1).flatten(1).sum(1).tolist() == [45 // 2] * 6
    assert (found[0].flatten() == 1).tolist() == [True] * 22 + [False] * 23
    for c in range(1, 6):
        distance = (weight[c] - weight[c].mean()).abs()
        assert distance[found[c] == 1].min() >= distance[found[c] == -1].max()
    torch.testing.assert_close(quantizer.alpha.detach(), weight.abs().mean((1, 2, 3)))


@pytest.mark.parametrize("progress", [0.0, 0.6, 1.0])
def test_latent_weights_of_siman_after_a_step(progress: float) -> None:
    weight = torch.randn(6, 5, 3, 3, dtype=torch.double) * torch.arange(1, 7).view(-1, 1, 1, 1) + 0.3
    quantizer = SiManWeight(percent=20.0)
    quantizer.set_progress_(progress, weight)
    expected = (weight - weight.mean((1, 2, 3), keepdim=True)).numpy()
    low, high = np.percentile(abs(expected), [20 * (1 - progress), 100 - 20 * (1 - progress)])
    expected = np.sign(expected) * abs(expected).clip(low, high)
    quantizer.after_step_(weight)
    np.testing.assert_allclose(weight.numpy(), expected, rtol=1e-6)
    quantizer.after_step_(torch.empty(0, 5, 3, 3))
    with pytest.raises(ValueError, match=r"percent \(=50.0\) must be at least 0 and below 50"):
        SiManWeight(percent=50.0)


@pytest.mark.parametrize("share", [0.0, 0.1, 1 / 3, 0.999, 1.0])
def test_quantile_is_numpys(share: float) -> None:
    values = torch.randn(1001, dtype=torch.double)
    assert float(quantile(values, share)) == pytest.approx(np.percentile(values.numpy(), 100 * share), rel=1e-9)


def test_inputs_of_siman_are_those_of_their_sample() -> None:
    x = torch.randn(3, 4, 5, 5) + torch.tensor([0.0, 5.0, -5.0]).view(-1, 1, 1, 1)
    quantizer = SiManInput()
    expected = torch.where(x >= x.mean((1, 2, 3), keepdim=True), 1.0, -1.0)
    for mode in (True, False):
        assert quantizer.train(mode)(x).equal(expected)
    assert quantizer(torch.full((2, 3, 4, 4), 0.1)).equal(torch.ones(2, 3, 4, 4))
