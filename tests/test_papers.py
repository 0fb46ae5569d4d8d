"""What binary and ternary methods and powers of two have of their own: schedules, first values, what a paper computes.

The formulas are held by test_golden.py, what all methods have in common by test_quantizers.py and test_methods.py.
"""

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
from qconv.methods.apot import APoTInput, APoTWeight
from qconv.methods.deepshift import shift_ps
from qconv.methods.inq import INQ, inq, power_exponent
from qconv.quantizers import (
    EDE,
    TTQ,
    TWN,
    AdaBinInput,
    AdaBinWeight,
    FixedPoint,
    Fourier,
    HardClip,
    IRNetWeight,
    Polynomial,
    Quantizer,
    ReCUWeight,
    ReSTE,
    ScaledSign,
    ShiftPS,
    ShiftQ,
    Sign,
    SiManWeight,
    XNORppWeight,
)
from qconv.quantizers.filters import standardize
from qconv.quantizers.percentiles import quantile
from qconv.training.checkpoint_io import CheckpointError
from qconv.training.initial_weights import load_weights

W = torch.tensor(golden.FILTERS[:1])
DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)


def near(found: Tensor | None, expected: Any) -> None:
    """Equal to the six decimals of the golden vectors."""
    assert found is not None
    np.testing.assert_allclose(found.detach().squeeze(0).numpy(), expected, rtol=0, atol=6e-7)


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
        *((Fourier, progress, (count,)) for progress, count in ((0.0, 10), (0.11, 10), (0.12, 11), (0.99, 18))),
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


def test_golden_standardized_filters() -> None:
    w_hat = [-1.738274, -0.816316, -0.355338, -0.048019, 0.182471, 0.41296, 0.873939, 1.488577]
    near(standardize(W).values, w_hat)
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


@pytest.mark.parametrize("progress", [0.0, 0.25, 599 / 600, 1.0])
def test_recu_schedule(progress: float) -> None:
    quantizer, a = ReCUWeight().double(), 0.14 / (math.e - 1)
    quantizer.set_progress_(progress, None)
    assert quantizer.tau.item() == pytest.approx(a * math.e**progress + 0.85 - a, rel=1e-12)


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
def test_gradients_of_constant_filters(value: float, shape: tuple[int, ...]) -> None:
    w, g = torch.full(shape, value), torch.randn(shape)
    torch.testing.assert_close(IRNetWeight().backward(g.clone(), w, *IRNetWeight().tensors())[0], 0 * g)
    mean = g.mean(tuple(range(1, g.ndim)), keepdim=True).expand(shape)
    torch.testing.assert_close(AdaBinWeight().backward(g.clone(), w, *AdaBinWeight().tensors())[0], mean)


def test_gradients_of_filters_that_are_not_finite() -> None:
    w = torch.randn(3, 5)
    w[0, 0], w[1, 1] = math.nan, math.inf
    recu = ReCUWeight()
    recu.initialize(w)
    assert recu(w).abs().equal(recu.alpha.detach()[:, None].expand(3, 5))
    grad = recu.backward(torch.ones_like(w), w, *recu.tensors())[0]
    assert grad is not None
    assert grad[:2].isnan().all()
    assert grad[2].eq(0).all()


def test_first_scales() -> None:
    w = torch.randn(4, 3, 3, 3)
    assert ready(XNORppWeight, w)[1][0].tolist() == [1] * 4
    alpha = ready(ReCUWeight, w)[1][0]
    assert ((alpha >= 0) & (alpha < 1)).all()
    assert alpha.unique().numel() == 4
    for make in (partial(ReCUWeight, scale_init="mean"), SiManWeight):
        torch.testing.assert_close(ready(make, w)[1][0], w.abs().mean((1, 2, 3)))
    assert [tensor.item() for tensor in AdaBinInput().tensors()] == [1, 0]
    assert not ready(quantizers.ReActNetInput, w)[1][0].any()
    assert [tensor.item() for tensor in TTQ().tensors()] == [1, 1]


# TWN


def test_twn_in_float16_does_not_overflow() -> None:
    w = torch.full((2, 3000), 60.0, dtype=torch.float16)
    assert TWN().quantize(w).equal(w)


# INQ


def frozen_to(quantizer: INQ, x: Tensor, progress: float = 1.0) -> tuple[Tensor, ...]:
    """Its tensors, with the weights of ``x`` frozen that are at ``progress``."""
    quantizer.initialize(x)
    quantizer.set_progress_(progress, x)
    return quantizer.tensors()


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


def test_apot_constant_layers_give_zeros() -> None:
    for value in (0.0, 0.1, -0.7, 1e4, 1e-6):
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            w = torch.full((7, 3, 11, 13), value, dtype=dtype)
            assert not APoTWeight(5).quantize(w, torch.tensor(3.0)).any()


def test_apot_ranges_start_where_the_authors_do_and_few_bits_have_levels() -> None:
    assert [APoTWeight(variant=variant).alpha.item() for variant in ("cifar", "imagenet")] == [3, 3]
    assert [APoTInput(bits).alpha.item() for bits in (2, 3, 4, 5)] == pytest.approx([1.6, 56 / 15, 8, 8])
    starts = [APoTInput(bits, "imagenet").alpha.item() for bits in (2, 3, 4, 5)]
    assert starts == pytest.approx([1.2, 2.8, 6, 6])
    for variant in ("cifar", "imagenet"):
        behind_a_hardtanh = torch.linspace(-1, 1, 201)
        assert (APoTInput(2, variant)(behind_a_hardtanh) != 0).float().mean() > 0.3


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


STOCHASTIC: dict[str, Callable[[], Quantizer]] = {
    "Sign": partial(Sign, stochastic=True),
    "ShiftQ": partial(ShiftQ, 4, "stochastic"),
    "ShiftPS": partial(ShiftPS, 4, "stochastic"),
    "DoReFaGradient": quantizers.DoReFaGradient,
    "Int8Stochastic": quantizers.Int8Stochastic,
}


@pytest.mark.parametrize("name", STOCHASTIC)
def test_each_step_and_each_quantizer_draws_numbers_of_its_own(name: str) -> None:
    x, (quantizer, other) = torch.rand(20, 10) * 0.8 + 0.1, (STOCHASTIC[name]() for _ in range(2))
    for each in (quantizer, other):
        each.initialize(x)
        for shift in each.parameters():
            nn.init.uniform_(shift, 0.1, 0.9)
    other.load_state_dict(quantizer.state_dict() | {k: v for k, v in other.state_dict().items() if "stream" in k})
    first = quantizer(x)
    assert quantizer(x).equal(first)  # as a recomputation draws
    assert not other(x).equal(first)
    with torch.no_grad():
        quantizer.after_step_(x.clone())
    assert not quantizer(x).equal(first)
    assert cast(Any, quantizer).stream.sharded == (not name.startswith("Shift"))  # each process has its own samples
    if "Shift" in name:
        plain = (ShiftQ if name == "ShiftQ" else ShiftPS)(4)
        plain.initialize(x)
        plain.load_state_dict(quantizer.state_dict(), strict=False)
        assert quantizer.eval()(x).equal(plain(x))


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
    for inputs, end in ((torch.randn(4096).relu(), None), (torch.rand(4096) * 0.2 + 10, "highest")):
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


@pytest.mark.parametrize("share", [0.0, 0.1, 1 / 3, 0.999, 1.0])
def test_quantile_is_numpys(share: float) -> None:
    values = torch.randn(1001, dtype=torch.double)
    assert float(quantile(values, share)) == pytest.approx(np.percentile(values.numpy(), 100 * share), rel=1e-9)
