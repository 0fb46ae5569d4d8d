"""Each of the first quantizers against golden vectors and an independent formula in float64."""

import math
from functools import partial

import numpy as np
import pytest
import torch

from qconv import quantizers
from qconv.quantizers import FixedPoint, HardClip, ScaledSign, ShiftPS, ShiftQ, Sign, Straight

DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)

W = torch.tensor([-1.2, -0.6, -0.3, -0.1, 0.05, 0.2, 0.5, 0.9], dtype=torch.float64)[None]
G = torch.tensor([0.1, -0.2, 0.3, -0.4, 0.5, 0.6, 0.7, -0.8], dtype=torch.float64)[None]
X = torch.tensor([-1.5, -1.0, -0.4, 0.0, 0.3, 0.7, 1.0, 1.8], dtype=torch.float64)
GX = torch.tensor([1.0, 2, 3, 4, 5, 6, 7, 8], dtype=torch.float64)


@pytest.mark.parametrize(
    ("quantizer", "largest"), [(ShiftQ(5), 1), (ShiftPS(5), 1), (FixedPoint(3, 2), 4), (FixedPoint(16, 16), 2**15)]
)
def test_infinity_is_the_last_level_and_nan_stays(quantizer: quantizers.Quantizer, largest: float) -> None:
    x = torch.tensor([math.inf, -math.inf, math.nan, 1.0])[None]
    quantizer.initialize(x)
    x_q = quantizer.quantize(x, *quantizer.tensors())[0]
    assert x_q[0] == -x_q[1] == largest
    assert x_q[2].isnan()


def test_infinity_and_nan_of_signs() -> None:
    x = torch.tensor([math.inf, -math.inf, math.nan, 1.0])[None]
    x_q = Sign().quantize(x)[0]
    assert x_q[[0, 1, 3]].tolist() == [1, -1, 1]
    assert abs(x_q[2]) == 1  # a binary code has no place for NaN
    assert ScaledSign().quantize(x).isnan().all()  # the mean of the filter


def test_sign_golden() -> None:
    assert Sign().quantize(X).tolist() == [-1, -1, -1, 1, 1, 1, 1, 1]
    assert Sign().backward(GX.clone(), X)[0].tolist() == [0, 2, 3, 4, 5, 6, 7, 0]  # pyright: ignore[reportOptionalMemberAccess]
    assert Sign(Straight).backward(GX, X)[0] is GX


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


def test_scaled_sign_golden() -> None:
    exact = [-0.15, -0.24625, -0.005625, -0.3425, 0.390625, 0.43875, 0.486875, -0.235]
    x_q, grad = ScaledSign().quantize(W), ScaledSign().backward(G.clone(), W)[0]
    np.testing.assert_allclose(x_q[0], 0.48125 * np.array([-1, -1, -1, -1, 1, 1, 1, 1]), rtol=1e-12)
    np.testing.assert_allclose(grad[0], exact, rtol=1e-12)  # pyright: ignore[reportOptionalSubscript]


@pytest.mark.parametrize("detach", [False, True])
def test_scaled_sign_gradient_is_autograd_of_its_formula(detach: bool) -> None:
    w = torch.randn(5, 3, 4, dtype=torch.float64).requires_grad_()
    alpha = w.abs().mean((1, 2), keepdim=True)
    clipped = w.clamp(-1, 1)
    ste = clipped + (torch.where(w >= 0, 1.0, -1.0) - clipped).detach()
    grad = torch.randn_like(w)
    ((alpha.detach() if detach else alpha) * ste).backward(grad)
    found = ScaledSign(detach_scale=detach).backward(grad.clone(), w.detach())[0]
    torch.testing.assert_close(found, w.grad, rtol=1e-12, atol=1e-14)


def test_a_filter_of_zeros_gives_zeros() -> None:
    w = torch.zeros(2, 3, 3)
    assert ScaledSign().quantize(w).eq(0).all()
    assert ScaledSign().backward(torch.ones_like(w), w)[0].isfinite().all()  # pyright: ignore[reportOptionalMemberAccess]


@pytest.mark.parametrize(("bits", "low"), [(2, -1), (3, -3), (4, -7), (5, -15), (8, -127)])
def test_shift_q_against_python(bits: int, low: int) -> None:
    values = [0.0, 1.0, -1.0, 2.0, 0.7, 0.7072, 0.707, -0.35, 1e-3, -3e-5, 1e-9, *torch.randn(200).tolist()]
    expected = [math.copysign(2.0 ** min(max(round(math.log2(abs(v))), low), 0), v) if v else 0.0 for v in values]
    assert ShiftQ(bits).quantize(torch.tensor(values, dtype=torch.float64)).tolist() == expected


def test_shift_q_golden() -> None:
    expected = [-1, -0.5, -0.25, -0.125, 0.0625, 0.25, 0.5, 1]
    assert ShiftQ(5).quantize(W)[0].tolist() == expected
    assert ShiftQ(3).quantize(W)[0].tolist() == [-1, -0.5, -0.25, -0.125, 0.125, 0.25, 0.5, 1]
    assert ShiftQ(5).backward(G, W)[0] is G


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


def test_shift_ps_two_bits_are_ternary() -> None:
    quantizer = ShiftPS(2)
    w = torch.randn(4, 9)
    quantizer.initialize(w)
    with torch.no_grad():
        quantizer.sign[:, :3] = 0.3
    assert set(quantizer(w).unique().tolist()) == {-1.0, 0.0, 1.0}


def test_shift_ps_starts_at_the_rounded_weight() -> None:
    w = torch.randn(4, 3, 3) * 0.1
    quantizer = ShiftPS(5)
    quantizer.initialize(w)
    expected = quantizers.round_power_of_two(w, -14, 0)
    assert quantizer(w).equal(expected)


def test_fixed_point_against_python() -> None:
    values = [*torch.randn(200).mul(3).tolist(), 3.999, 4.0, -4.0, -4.1, 0.25, -0.2499]
    expected = [min(max(math.floor(v * 4) / 4, -4.0), 4.0) for v in values]
    assert FixedPoint(3, 2).quantize(torch.tensor(values, dtype=torch.float64)).tolist() == expected


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
    shift = ShiftPS(5)
    shift.initialize(w)
    with torch.no_grad():
        shift.shift.add_(torch.tensor([5.0, -30, 0, 0, 0]))
        shift.after_step_(w)
    assert shift.shift.min() >= -14
    assert shift.shift.max() <= 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ShiftQ(0), r"weight_bits \(=0\) must be a whole number from . to . for DeepShift-Q"),
        (lambda: ShiftQ(1), r"weight_bits \(=1\) must be a whole number from . to . for DeepShift-Q"),
        (lambda: ShiftPS(1), r"weight_bits \(=1\) must be a whole number from . to . for DeepShift-PS"),
        (lambda: ShiftPS(9), r"weight_bits \(=9\) must be a whole number from"),
        (lambda: HardClip(0.0), r"clip \(=0.0\) must be positive"),
        (lambda: Sign(weight_clip=-1.0), r"weight_clip \(=-1.0\) must be positive"),
        (lambda: ScaledSign(weight_clip=math.nan), r"weight_clip \(=nan\) must be positive"),
        (lambda: FixedPoint(0, 3), r"integer_bits \(=0\) must be at least 1"),
        (lambda: FixedPoint(3, -1), r"fraction_bits \(=-1\) must not be negative"),
        (lambda: FixedPoint(20, 20), r"integer_bits \+ fraction_bits \(=40\) must be at most 32"),
    ],
)
def test_wrong_arguments(make: type, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
