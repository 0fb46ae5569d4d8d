"""Every quantizer against `golden`, its definition written again with loops, at ties too; forward and all gradients."""

from collections.abc import Callable
from functools import partial
from typing import Any

import golden
import numpy as np
import pytest
import torch
from golden import Array, Found
from torch import Tensor

from qconv import quantizers
from qconv.quantizers import (
    EDE,
    FP8,
    INQ,
    LSQ,
    PACT,
    TTQ,
    TWN,
    AdaBinInput,
    AdaBinWeight,
    APoTInput,
    APoTWeight,
    ApproxSign,
    BiRealWeight,
    DoReFaGradient,
    DoReFaInput,
    DoReFaWeight,
    DSQInput,
    DSQWeight,
    FixedPoint,
    HardClip,
    Identity,
    Int8Stochastic,
    IRNetWeight,
    LSQInput,
    LSQPlus,
    LSQPlusInput,
    MinMaxInput,
    MinMaxWeight,
    N2UQInput,
    N2UQWeight,
    PercentileInput,
    PercentileWeight,
    Polynomial,
    Quantizer,
    ReActNetInput,
    ReCUInput,
    ReCUWeight,
    ReSTE,
    ReSTEWeight,
    ScaledSign,
    ShiftPS,
    ShiftQ,
    Sign,
    Stages,
    Straight,
    Surrogate,
    SwishSign,
    XNORppWeight,
    input_scale,
)

Slow = Callable[..., Found]
Row = tuple[Callable[..., Any], Slow, tuple[float | Array, ...]]
"""What makes the quantizer, its definition in `golden`, and the learned or scheduled tensors that both are given."""

PER_FILTER = np.array([0.8, -1.3, 0.6])
STEPS = np.array([0.4, 0.5, 0.25])
PER_CHANNEL = np.linspace(-0.75, 1.0, 8)  # shifted by these, some inputs are 0, and some ±1
WIDTHS = np.array([0.5, 0.25, 1.25])
FLOATS = np.array([[1.0625, -1.1875, 448, 449, -460, 2**-10, 3 * 2**-10, -0.0]])  # half way, the end, subnormal
VARIANTS = "cifar", "imagenet"


def sign_row(surrogate: Callable[[], Surrogate], slope: Callable[..., float], *tensors: float) -> Row:
    return partial(Sign, surrogate), lambda v, g, *given: golden.bnn(v, g, lambda x: slope(x, *given)), tensors


def evaluated() -> ReCUInput:
    return ReCUInput().eval()


LSQ_ALL, LSQ_ROW = golden.FILTERS.size, golden.FILTERS.shape[1]
WEIGHTS: dict[str, Row] = {
    "Sign(Straight)": (partial(Sign, Straight), partial(golden.bnn, d=golden.straight), ()),
    "ScaledSign": (ScaledSign, partial(golden.scaled_sign, gradient="exact"), ()),
    "ScaledSign(detach)": (partial(ScaledSign, True), partial(golden.scaled_sign, gradient="detached"), ()),
    "ScaledSign(paper)": (
        partial(ScaledSign, paper_gradient=True),
        partial(golden.scaled_sign, gradient="paper"),
        (),
    ),
    "BiRealWeight": (BiRealWeight, partial(golden.scaled_sign, gradient="code"), ()),
    "BiRealWeight(paper)": (partial(BiRealWeight, "paper"), partial(golden.scaled_sign, gradient="detached"), ()),
    "XNORppWeight": (XNORppWeight, golden.xnorpp, (PER_FILTER,)),
    "IRNetWeight(early)": (IRNetWeight, golden.irnet, (0.1, 10.0)),
    "IRNetWeight(late)": (IRNetWeight, golden.irnet, (4.0, 1.0)),
    "ReCUWeight(0.85)": (ReCUWeight, golden.recu_weight, (PER_FILTER, 0.85)),
    "ReCUWeight(0.9)": (ReCUWeight, golden.recu_weight, (PER_FILTER, 0.9)),
    "AdaBinWeight": (AdaBinWeight, golden.adabin_weight, (0.1, 10.0)),
    "AdaBinWeight(late)": (AdaBinWeight, golden.adabin_weight, (4.0, 1.0)),
    "ReSTEWeight": (ReSTEWeight, golden.reste_weight, (3.0,)),
    "TWN": (TWN, partial(golden.twn, threshold=0.7, per_channel=True), ()),
    "TWN(1)": (partial(TWN, 1.0), partial(golden.twn, threshold=1.0, per_channel=True), ()),
    "TWN(layer)": (partial(TWN, 0.75, False), partial(golden.twn, threshold=0.75, per_channel=False), ()),
    "TTQ": (TTQ, partial(golden.ttq, threshold=0.05), (1.3, 0.7)),
    "TTQ(0.25)": (partial(TTQ, 0.25), partial(golden.ttq, threshold=0.25), (1.3, 0.7)),
    **{f"ShiftQ({b})": (partial(ShiftQ, b), partial(golden.shift_q, bits=b), ()) for b in (2, 3, 5)},
    **{
        f"APoTWeight({b}, {v})": (partial(APoTWeight, b, v), partial(golden.apot_weight, bits=b, variant=v), (1.5,))
        for b in (2, 3, 4, 5)
        for v in VARIANTS
    },
    **{f"DoReFaWeight({b})": (partial(DoReFaWeight, b), partial(golden.dorefa_weight, bits=b), ()) for b in (1, 2, 4)},
    "DoReFaWeight(2, max)": (
        partial(DoReFaWeight, 2, False),
        partial(golden.dorefa_weight, bits=2, detach=False),
        (),
    ),
    "LSQ(1)": (partial(LSQ, 1), partial(golden.lsq, low=-1, high=1, count=LSQ_ALL), (0.5,)),
    "LSQ(2)": (partial(LSQ, 2), partial(golden.lsq, low=-2, high=1, count=LSQ_ALL), (0.5,)),
    "LSQ(4)": (partial(LSQ, 4), partial(golden.lsq, low=-8, high=7, count=LSQ_ALL), (0.25,)),
    "LSQ(2, strict)": (
        partial(LSQ, 2, strict=True),
        partial(golden.lsq, low=-2, high=1, count=LSQ_ALL, strict=True),
        (0.5,),
    ),
    "LSQ(2, filters)": (
        partial(LSQ, 2, per_channel=True),
        partial(golden.lsq, low=-2, high=1, count=LSQ_ROW, axis=0),
        (STEPS,),
    ),
    "LSQ(2, filters, numel)": (
        partial(LSQ, 2, per_channel=True, grad_scale="numel"),
        partial(golden.lsq, low=-2, high=1, count=LSQ_ALL, axis=0),
        (STEPS,),
    ),
    "LSQPlus(2)": (partial(LSQPlus, 2), partial(golden.lsq, low=-2, high=1, count=LSQ_ALL), (0.5,)),
    **{
        f"N2UQWeight({b})": (partial(N2UQWeight, b), partial(golden.n2uq_weight, bits=b, rescale=True), ())
        for b in (2, 3, 4)
    },
    "N2UQWeight(2, g)": (partial(N2UQWeight, 2, False), partial(golden.n2uq_weight, bits=2, rescale=False), ()),
    "DSQWeight(1)": (partial(DSQWeight, 1), partial(golden.dsq, bits=1), (-1.0, 1.0, 0.2)),
    "DSQWeight(4)": (DSQWeight, partial(golden.dsq, bits=4), (-1.0, 0.875, 0.35)),
    **{
        f"MinMaxWeight({b}, {s})": (
            partial(MinMaxWeight, b, s),
            partial(golden.minmax_weight, bits=b, symmetric=s),
            (),
        )
        for b in (2, 3, 8)
        for s in (True, False)
    },
    "PercentileWeight(4, 80)": (
        partial(PercentileWeight, 4, 80.0),
        partial(golden.minmax_weight, bits=4, symmetric=True, percentile=80),
        (),
    ),
}
INPUTS: dict[str, Row] = {
    "Identity": (Identity, golden.identity, ()),
    "Sign": sign_row(HardClip, golden.hard_clip),
    "Sign(ApproxSign)": sign_row(ApproxSign, golden.approx_sign),
    "Sign(EDE, early)": sign_row(EDE, golden.ede, 0.1, 10.0),
    "Sign(EDE, late)": sign_row(EDE, golden.ede, 4.0, 1.0),
    "Sign(Polynomial)": sign_row(Polynomial, golden.polynomial, 0.5, 2.0),
    "Sign(ReSTE, early)": sign_row(ReSTE, golden.reste_slope, 1.0),
    "Sign(ReSTE, late)": sign_row(ReSTE, golden.reste_slope, 3.0),
    "Sign(SwishSign)": sign_row(SwishSign, golden.swish_sign),
    "ReActNetInput": (ReActNetInput, golden.reactnet_input, (PER_CHANNEL,)),
    "ReCUInput": (ReCUInput, lambda v, g, mark: golden.recu_input(v, g, training=True), (1.0,)),
    "ReCUInput(evaluation)": (evaluated, partial(golden.recu_input, training=False), ()),
    "AdaBinInput(paper)": (AdaBinInput, partial(golden.adabin_input, offset="paper"), (1.25, 0.25)),
    "AdaBinInput(code)": (partial(AdaBinInput, "code"), partial(golden.adabin_input, offset="code"), (1.25, 0.25)),
    "FixedPoint(2, 1)": (partial(FixedPoint, 2, 1), partial(golden.fixed_point, integer_bits=2, fraction_bits=1), ()),
    **{
        f"APoTInput({b}, {v})": (partial(APoTInput, b, v), partial(golden.apot_input, bits=b, variant=v), (a,))
        for b, a in ((2, 2.0), (3, 1.0), (4, 2.0))  # with these, no value is half way but for its rounding
        for v in VARIANTS
    },
    **{f"DoReFaInput({b})": (partial(DoReFaInput, b), partial(golden.dorefa_input, bits=b), ()) for b in (1, 2, 4)},
    **{f"PACT({b})": (partial(PACT, b), partial(golden.pact, bits=b), (1.0,)) for b in (1, 2, 4)},
    "LSQInput(2)": (partial(LSQInput, 2), partial(golden.lsq, low=0, high=3, count=8), (0.5,)),
    "LSQInput(1)": (partial(LSQInput, 1), partial(golden.lsq, low=0, high=1, count=8), (0.5,)),
    "LSQInput(2, numel)": (
        partial(LSQInput, 2, grad_scale="numel"),
        partial(golden.lsq, low=0, high=3, count=16),
        (0.5,),
    ),
    "LSQInput(2, signed)": (partial(LSQInput, 2, True), partial(golden.lsq, low=-2, high=1, count=8), (0.5,)),
    "LSQInput(2, channels)": (
        partial(LSQInput, 2, per_channel=True),
        partial(golden.lsq, low=0, high=3, count=1, axis=1),
        (PER_CHANNEL + 1,),
    ),
    "LSQPlusInput(2)": (partial(LSQPlusInput, 2), partial(golden.lsq_plus, high=3, count=8), (0.5, -0.5)),
    "LSQPlusInput(2, numel)": (
        partial(LSQPlusInput, 2, "numel"),
        partial(golden.lsq_plus, high=3, count=16),
        (0.5, -0.5),
    ),
    "N2UQInput": (N2UQInput, golden.n2uq_input, (WIDTHS, -0.25, 1.0, 1.5)),
    "N2UQInput(scaled)": (N2UQInput, golden.n2uq_input, (WIDTHS, 0.0, 2.0, 0.75)),
    "DSQInput(2)": (partial(DSQInput, 2), partial(golden.dsq, bits=2), (-1.0, 2.0, 0.2)),
    "MinMaxInput(3)": (
        partial(MinMaxInput, 3),
        partial(golden.uniform, bits=3, symmetric=False),
        golden.extent(golden.INPUTS, 100, symmetric=False),
    ),
    "PercentileInput(4)": (
        partial(PercentileInput, 4, 80.0, True),
        partial(golden.uniform, bits=4, symmetric=True),
        golden.extent(golden.INPUTS, 80, symmetric=True),
    ),
    "FP8(e4m3)": (FP8, partial(golden.fp8, format="e4m3", dynamic=True), ()),
    "FP8(e5m2)": (partial(FP8, "e5m2"), partial(golden.fp8, format="e5m2", dynamic=True), ()),
}
OTHERS: dict[str, tuple[Row, Array]] = {
    "FP8(e4m3, clipped)": ((partial(FP8, "e4m3", None), partial(golden.fp8, format="e4m3", dynamic=False), ()), FLOATS),
    "FP8(e5m2, clipped)": (
        (partial(FP8, "e5m2", None), partial(golden.fp8, format="e5m2", dynamic=False), ()),
        FLOATS * 128,
    ),
}
CASES: dict[str, tuple[Row, Array, Array]] = {
    **{name: (row, golden.FILTERS, golden.GRAD_FILTERS) for name, row in WEIGHTS.items()},
    **{name: (row, golden.INPUTS, golden.GRAD_INPUTS) for name, row in INPUTS.items()},
    **{name: (row, values, golden.GRAD_INPUTS[:1]) for name, (row, values) in OTHERS.items()},
}
EACH = pytest.mark.parametrize(("row", "values", "grad"), CASES.values(), ids=list(CASES))


def tensor(values: float | Array) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def found(quantizer: Quantizer, v: Array, g: Array, *tensors: Tensor) -> list[Array]:
    """The quantized values and every gradient that isn't None."""
    grads = quantizer.backward(tensor(g), tensor(v), *tensors)
    return [t.numpy() for t in (quantizer.quantize(tensor(v), *tensors), *grads) if t is not None]


def run(row: Row, v: Array, g: Array) -> tuple[list[Array], Found]:
    """What qconv finds, and what the definition says."""
    make, slow, tensors = row
    quantizer: Quantizer = make()
    quantizer.build(v.shape[1], 1)
    return found(quantizer, v, g, *map(tensor, tensors)), slow(v, g, *tensors)


def agree(found: list[Array], expected: Found) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.shape == np.shape(other)
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-14)


@EACH
def test_forward_and_every_gradient(row: Row, values: Array, grad: Array) -> None:
    agree(*run(row, values, grad))


@EACH
def test_a_planted_error_is_rejected(row: Row, values: Array, grad: Array) -> None:
    right, expected = run(row, values, grad)
    for which, array in enumerate(right):
        place = np.unravel_index(np.abs(array).argmax(), array.shape)
        wrong = [each.copy() for each in right]
        wrong[which][place] *= 1 + 1e-9
        with pytest.raises(AssertionError, match="Not equal to tolerance"):
            agree(wrong, expected)


@pytest.mark.parametrize("bits", [2, 3, 5])
@pytest.mark.parametrize("portion", [0.5, 0.75, 1.0])
@pytest.mark.parametrize("size", [1.0, 0.75])
def test_inq(bits: int, portion: float, size: float) -> None:
    weight, grad = golden.FILTERS * size, golden.GRAD_FILTERS  # with 0.75 some are half way between two levels
    quantizer = INQ(bits, portions=(portion, 1.0) if portion < 1 else (1.0,))
    latent = tensor(weight)
    quantizer.initialize(latent)
    quantizer.set_progress_(0.0, latent)
    expected = golden.inq(weight, grad, bits, portion)
    agree(found(quantizer, weight, grad, *quantizer.tensors()), expected)
    np.testing.assert_array_equal(latent.numpy(), expected[0])  # the weight itself goes to its level


@pytest.mark.parametrize("bits", [2, 3, 5])
def test_shift_ps(bits: int) -> None:
    shift, sign = golden.FILTERS - 1.5, golden.GRAD_FILTERS  # exponents and signs at half steps
    quantizer = ShiftPS(bits)
    expected = golden.shift_ps(shift, golden.GRAD_FILTERS, sign, bits)
    agree(found(quantizer, shift, golden.GRAD_FILTERS, tensor(shift), tensor(sign)), expected)


@pytest.mark.parametrize("noise", [0.0, 0.25, 0.5, 0.875])
def test_stochastic_rounding_of_weights(noise: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantizers.stochastic, "uniform", lambda shape, *_: torch.full(shape, noise))
    monkeypatch.setattr("qconv.methods.deepshift.uniform", lambda shape, *_: torch.full(shape, noise))
    v, g = golden.FILTERS, golden.GRAD_FILTERS
    q, ps = ShiftQ(4, "stochastic"), ShiftPS(4, "stochastic")
    agree(found(q, v, g, *q.tensors()), golden.shift_q(v, g, 4, noise))
    assert ps.stream is not None
    assert ps.is_random is not None
    expected = golden.shift_ps(v - 1.5, g, g, 4, noise)
    agree(found(ps, v, g, tensor(v - 1.5), tensor(g), *ps.stream.tensors(), ps.is_random), expected)


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize(
    ("make", "slow"), [(DoReFaGradient, golden.dorefa_gradient), (Int8Stochastic, golden.int8_stochastic)]
)
def test_gradients_of_few_bits(make: type[DoReFaGradient] | type[Int8Stochastic], slow: Slow, bits: int) -> None:
    quantizer = make(bits)
    v, tensors = golden.INPUTS, quantizer.tensors()
    noise = quantizer.stream.uniform(tensor(v), *tensors).double().numpy()
    agree(found(quantizer, v, golden.GRAD_INPUTS, *tensors), slow(v, golden.GRAD_INPUTS, noise, bits))


def test_stochastic_signs(monkeypatch: pytest.MonkeyPatch) -> None:
    quantizer = Sign(stochastic=True)
    monkeypatch.setattr(quantizers.stochastic, "uniform", lambda shape, *_: torch.full(shape, 0.3))
    up = (golden.INPUTS + 1) / 2 > 0.3
    np.testing.assert_array_equal(found(quantizer, golden.INPUTS, golden.INPUTS, *quantizer.tensors())[0], 2 * up - 1)


@pytest.mark.parametrize(("groups", "padding"), [(1, 0), (2, 1), (4, 1)])
def test_scale_map_of_xnor_net(groups: int, padding: int) -> None:
    x = torch.randn(4, 5, 4, dtype=torch.float64)
    found = input_scale(x[None], (3, 3), (1, 1), (padding, padding), (1, 1), groups)[0]
    np.testing.assert_allclose(found.numpy(), golden.scale_map(x.numpy(), 3, padding, groups), rtol=1e-12)


def test_printed_values_that_no_other_test_has() -> None:
    """Of the numpy golden vectors; the tests of the methods hold all others."""
    v, g = golden.FILTERS[:1], golden.GRAD_FILTERS[:1]
    _, masked = found(Sign(), v, g)
    assert masked.tolist() == [[0, -0.2, 0.3, -0.4, 0.5, 0.6, 0.7, -0.8]]
    assert golden.recu_bound(v, 0.9) == pytest.approx(3.366234721901584, rel=1e-15)
    codes = AdaBinWeight().codes(tensor(v))
    assert codes.offset is not None
    assert (codes.offset.item(), codes.scale.item()) == pytest.approx(
        (-0.06874999999999998, 0.6087577001566387), rel=1e-14
    )
    standardized = golden.jacobian(v[0], correction=1)[0][None]
    _, slope = found(Sign(EDE), standardized, g, tensor(0.1), tensor(10.0))
    printed = [0.097038, -0.198673, 0.299622, -0.399991, 0.499834, 0.598978, 0.694681, -0.782532]
    np.testing.assert_allclose(slope[0], printed, rtol=0, atol=5.1e-7)
    assert [(ShiftQ(bits).low, ShiftPS(bits).low) for bits in (5, 3)] == [(-15, -14), (-3, -2)]


def test_no_method_is_left_out() -> None:
    def classes(base: type) -> set[type]:
        public = (getattr(quantizers, name) for name in dir(quantizers))
        return {each for each in public if isinstance(each, type) and issubclass(each, base)}

    made = [row[0]() for row, *_ in CASES.values()]
    above = {INQ, ShiftPS, DoReFaGradient, Int8Stochastic}  # with tests of their own
    assert classes(Quantizer) - {Quantizer, Stages} == {type(each) for each in made} | above
    surrogates = {type(each.surrogate) for each in made if isinstance(each, Sign)}
    assert classes(Surrogate) - {Surrogate} == surrogates
