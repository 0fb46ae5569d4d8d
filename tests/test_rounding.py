"""Rounding to levels and the gradients through it: the kernel against torch's operators, bit for bit."""

import math

import numpy as np
import pytest
import torch
from settings import each_instruction_set, threads
from torch import Tensor

from qconv.kernels import level_rounding, native
from qconv.quantizers import LSQ, PACT, DoReFaInput, LSQInput, Quantizer, Whole
from qconv.quantizers.form import Form
from qconv.quantizers.rounding import Rounding

ops = torch.ops.qconv
ODD = [0.0, -0.0, torch.inf, -torch.inf, 1e-45, 0.25, -0.25, 0.75, 1.25, -0.75, 3e38, 3.75, 4.0, 99.0]
SHAPES = [(1,), (31,), (2, 3), (3, 65, 5), (2, 70, 9, 7), (2, 20, 3, 4, 5), (5, 64, 33, 31)]
ENDS = [(0.0, 15.0, 1.0, 0), (-8.0, 7.0, 1.0, 8), (-128.0, 127.0, 1.0, 0), (0.0, 1.0, 255.0, 0), (0.0, 0.0, 1.0, 0)]


def numbers(shape: tuple[int, ...], last: bool = False) -> Tensor:
    torch.manual_seed(0)
    input = torch.randn(shape) * 3
    input.view(-1)[: len(ODD)] = torch.tensor(ODD)[: input.numel()]
    return input.movedim(1, -1).contiguous().movedim(-1, 1) if last and len(shape) > 2 else input


def divisors(input: Tensor) -> list[Tensor]:
    rows = torch.rand(len(input), *[1] * (input.ndim - 1)) + 0.1
    return [torch.tensor(0.5), torch.tensor([0.3]).reshape([1] * input.ndim), rows]


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_instruction_sets_give_what_torch_does(shape: tuple[int, ...], last: bool) -> None:
    input = numbers(shape, last)
    grad = torch.randn_like(input)
    for divisor in divisors(input):
        for low, high, factor, offset in ENDS:
            wanted = ((input / divisor).clamp(low, high) * factor).round() + offset
            for name in each_instruction_set():
                found = level_rounding.rounded(input, divisor, low, high, factor, offset)
                assert found is not None
                codes, is_nan = found
                assert torch.equal(codes, wanted.to(torch.int16).to(torch.uint8)), name
                assert codes.stride() == input.stride()
                assert not is_nan
        for strict in (False, True):
            z = input / divisor
            c, between = z.clamp(-3, 4), (z > -3) & (z < 4)
            of_step = (grad * (c.round() - c * between)).sum_to_size(divisor.shape) * 0.3
            wanted, given = (grad * (between if strict else c == z), of_step), (grad, input, divisor, -3, 4, strict)
            for name in each_instruction_set():
                found = level_rounding.stepped_back(*given, 0.3, 1e-6)
                assert found is not None
                for one, other in zip(found, wanted, strict=True):
                    assert torch.equal(one.view(torch.int32), other.view(torch.int32)), (name, strict)


def test_halves_go_to_even_numbers() -> None:
    halves = torch.arange(-20.5, 21)
    codes, _ = ops.round_codes(halves, torch.tensor(1.0), -100.0, 100.0, 1.0, 0)
    assert codes.view(torch.int8).tolist() == [2 * round(each / 2) for each in (halves * 1).tolist()]


@pytest.mark.skipif(not native.instruction_sets(), reason="there is no compiled module")
@pytest.mark.parametrize("place", [0, 17, 40_000, -1])
def test_nan_is_reported_wherever_it_is(place: int) -> None:
    input = torch.randn(3, 64, 33, 31)
    input.view(-1)[place] = torch.nan
    one = torch.tensor(1.0)
    for _ in each_instruction_set():
        found = level_rounding.rounded(input, one, 0.0, 3.0, 1.0, 0)
        assert found is not None
        assert found[1].item() is True
    assert level_rounding.round_codes(input, one, 0.0, 3.0, 1.0, 0)[1].item() is True
    assert ops.round_codes(torch.zeros(3), torch.tensor(0.0), 0.0, 3.0, 1.0, 0)[1].item() is True  # 0 / 0


def test_nan_is_nan_in_the_gradients() -> None:
    input = torch.tensor([torch.nan, 1.0, torch.inf])
    grad = torch.tensor([1.0, torch.nan, torch.inf])
    for function in (ops.step_backward, level_rounding.step_backward):
        of_input, _ = function(grad, input, torch.tensor(1.0), 0, 3, False, 1.0, 1e-6)
        assert of_input.isnan().tolist() == [False, True, True]  # nothing passes NaN; inf · 0
        _, of_step = function(grad, input, torch.ones(3), 0, 3, False, 1.0, 1e-6)
        assert of_step.isnan().tolist() == [True, True, False]


def test_threads_change_nothing() -> None:
    input = numbers((7, 48, 31, 30))
    grad, one = torch.randn_like(input), torch.tensor(0.4)
    codes, slopes = (input, one, 0.0, 15.0, 1.0, 0), (grad, input, one.expand(len(input), 1, 1, 1), 0, 15, False)
    wanted = ops.round_codes(*codes), level_rounding.stepped_back(*slopes, 1.0, 1e-6)
    with threads(3):
        found = ops.round_codes(*codes), level_rounding.stepped_back(*slopes, 1.0, 1e-6)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def test_torch_may_be_asked_for_a_lesser_instruction_set(monkeypatch: pytest.MonkeyPatch) -> None:
    names, best = native.instruction_sets(), native.best
    for asked in ("default", "avx2", "avx512", ""):
        monkeypatch.setenv("ATEN_CPU_CAPABILITY", asked)
        best.cache_clear()
        wanted = {"default": "portable", "avx2": "avx2"}.get(asked, names[-1])
        assert native.INSTRUCTION_SETS[best()] == (wanted if wanted in names else "portable")
    monkeypatch.undo()
    best.cache_clear()


def by_formula(x: Tensor, step: Tensor, low: int, high: int) -> tuple[Tensor, Tensor]:
    """LSQ's derivatives (arXiv:1902.08153, equations 3 and 5), element by element, for gradients of 1."""
    of_x, of_step = torch.ones_like(x), torch.zeros_like(x)
    position = x / step
    for place in np.ndindex(*x.shape):
        v = float(position[place])
        of_x[place] = 1.0 if low <= v <= high else 0.0
        of_step[place] = v if math.isnan(v) else low if v <= low else high if v >= high else round(v) - v
    return of_x, of_step


def test_what_the_kernel_leaves_to_the_definition() -> None:
    input, one = numbers((2, 6, 4, 5)), torch.tensor(0.5)
    for given, divisor in (
        (input.double(), one.double()),
        (input.bfloat16(), one),
        (input.transpose(1, 2), one),
        (input, torch.rand(1, 6, 1, 1) + 0.1),  # a step for each channel
        (input[:0], one),
    ):
        assert level_rounding.rounded(given, divisor, 0.0, 15.0, 1.0, 0) is None
        wanted = (given.to(torch.promote_types(given.dtype, torch.float32)) / divisor).clamp(0, 15).round()
        assert torch.equal(ops.round_codes(given, divisor, 0.0, 15.0, 1.0, 0)[0], wanted.to(torch.uint8))
        grad = torch.ones_like(given)
        assert ops.step_backward(grad, given, divisor, 0, 3, False, 1.0, 1e-6)[0].shape == given.shape
        if given.numel():
            found = ops.step_backward(grad, given, divisor, 0, 3, False, 0.5, 1e-6)
            of_x, of_step = by_formula(given.to(torch.promote_types(given.dtype, torch.float32)), divisor, 0, 3)
            wanted = of_x, of_step.sum_to_size(divisor.shape) * 0.5
            torch.testing.assert_close(
                found, tuple(each.to(f) for each, f in zip(wanted, found, strict=True)), equal_nan=True
            )
    last = input.contiguous(memory_format=torch.channels_last)
    grad = torch.randn_like(input)
    assert torch.equal(*(ops.step_backward(grad, given, one, 0, 3, True, 1.0, 1e-6)[0] for given in (last, input)))


@pytest.mark.parametrize(
    ("ends", "offset"), [((0.0, 256.0), 0), ((-129.0, 0.0), 0), ((-100.0, 200.0), 0), ((0.0, 9.0), 250)]
)
def test_codes_that_no_byte_holds(ends: tuple[float, float], offset: int) -> None:
    with pytest.raises(ValueError, match=r"codes \(from .* to .*\) must fit a byte"):
        level_rounding.round_codes(torch.zeros(2), torch.tensor(1.0), *ends, 1.0, offset)
    with pytest.raises(ValueError, match="must fit a byte"):
        ops.round_codes(torch.zeros(2), torch.tensor(1.0), *ends, 1.0, offset)


def test_a_gradient_of_another_shape() -> None:
    with pytest.raises(ValueError, match=r"grad \(of shape \(2,\)\) must have the shape of input, \(3,\)"):
        ops.step_backward(torch.zeros(2), torch.zeros(3), torch.tensor(1.0), 0, 3, False, 1.0, 1e-6)


def test_torch_finds_the_operators_well_made() -> None:
    input, one = numbers((2, 70, 3, 3)), torch.tensor(0.5)
    torch.library.opcheck(ops.round_codes.default, (input, one, 0.0, 15.0, 1.0, 0))
    torch.library.opcheck(ops.step_backward.default, (torch.randn_like(input), input, one, 0, 15, False, 1.0, 1e-6))


QUANTIZERS = [LSQ(4), LSQ(8, per_channel=True), LSQInput(4), LSQInput(3, signed=True), PACT(4), PACT(8), DoReFaInput(2)]


@pytest.mark.parametrize("quantizer", QUANTIZERS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_bytes_are_the_whole_numbers(quantizer: Quantizer, dtype: torch.dtype) -> None:
    x = numbers((4, 6, 5, 3)).nan_to_num(1, 2, -2).clamp(-99, 99).to(dtype)
    quantizer.initialize(x.float())
    tensors = tuple(tensor.detach() for tensor in quantizer.tensors())
    (low, high), whole = quantizer.whole_ends or (0, 0), quantizer.whole(x, *tensors)
    in_bytes = quantizer.whole_bytes(x, *tensors, offset=-low)
    assert whole is not None
    assert in_bytes is not None
    assert torch.equal(in_bytes.values.to(whole.values.dtype) + low, whole.values)
    assert whole.scale is not None
    assert in_bytes.scale is not None
    assert torch.equal(in_bytes.scale, whole.scale)
    assert low <= whole.values.min().item() <= whole.values.max().item() <= high
    x[0, 0, 0, 0] = torch.nan
    assert quantizer.whole_bytes(x, *tensors, offset=-low) is None


class Doubled(PACT):
    """Rounds otherwise than it inherits."""

    def whole(self, x: Tensor, *tensors: Tensor) -> Whole:
        values, scale = super().whole(x, *tensors)
        return Whole((values / 2).floor() * 2, scale)


def test_a_subclass_that_rounds_otherwise_is_believed() -> None:
    x, quantizer = torch.rand(2, 3, 4, 4) * 9, Doubled(4)
    whole, in_bytes = quantizer.whole(x, *quantizer.tensors()), quantizer.whole_bytes(x, *quantizer.tensors(), offset=0)
    assert quantizer.known_rounding(x, *quantizer.tensors()) is None
    assert quantizer.whole_ends is None
    assert in_bytes is None
    assert whole.values.unique().numel() == 8


def test_values_of_a_rounding() -> None:
    x = torch.tensor([-1.0, 0.26, 0.74, 5.0])
    rounding = Rounding(torch.tensor(1.0), 0, 1, 3)
    assert rounding.whole(x).values.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert rounding.scale(x).item() == pytest.approx(1 / 3)
    assert (found := rounding.bytes(x, 1)) is not None
    assert found.tolist() == [1, 2, 3, 4]
    assert Rounding(None, -2, 2).whole(x).values.tolist() == [-1.0, 0.0, 1.0, 2.0]
    for rounding in (
        Rounding(None, 0, 1, 3),
        Rounding(torch.tensor(0.1), -2, 2, least=0.5),
        Rounding(torch.zeros(()), 0, 3),
    ):
        values, scale = rounding.whole(x)
        assert scale is not None
        assert rounding.quantized(x).equal(values * scale)


ENDED = [PACT(4, alpha=1.5), DoReFaInput(4)]


@pytest.mark.parametrize("quantizer", ENDED, ids=str)
def test_where_a_gradient_stops(quantizer: PACT | DoReFaInput) -> None:
    edges = [-0.0, 0.0, 1e-45, -1e-45, 1.0, 1 - 2.0**-24, 1 + 2.0**-23, 1.5, 1.5 - 2.0**-23, 1.5 + 2.0**-23, -1.0, 9.0]
    x = torch.tensor(edges).view(1, 12, 1, 1)
    tensors = tuple(tensor.detach() for tensor in quantizer.tensors())
    low, high = quantizer.stops_at(*tensors)
    assert torch.equal(quantizer.passes(x, *tensors), (x > low) & (x < high))


class Everywhere(PACT):
    """Lets the gradient pass otherwise than it inherits."""

    def passes(self, x: Tensor, *tensors: Tensor) -> Tensor:
        return x < 99


def test_a_subclass_that_passes_otherwise_is_believed() -> None:
    quantizer, x = Everywhere(4, alpha=1.5), torch.rand(1, 12, 2, 2) * 200
    form = Form.of(x)
    kept = quantizer.keep(x, form, *quantizer.tensors())
    assert kept is not None
    passes = kept[-1]
    assert torch.equal(ops.where_passes(torch.ones_like(x), passes) == 1, x < 99)
