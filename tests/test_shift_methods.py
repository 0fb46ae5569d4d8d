"""TWN, TTQ, INQ, APoT and DeepShift's stochastic rounding against golden values and formulas in float64."""

import copy
import math
import pickle
from collections.abc import Callable
from itertools import pairwise, product
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import qconv
from qconv.methods.apot import APoTInput, APoTWeight, apot, levels, project
from qconv.methods.deepshift import shift_ps, shift_q
from qconv.methods.inq import INQ, inq, power_exponent
from qconv.methods.ttq import TTQ, ttq
from qconv.methods.twn import TWN, twn
from qconv.quantizers import Quantizer, ShiftPS, ShiftQ
from qconv.quantizers.levels import ternary
from qconv.scheme import Scheme

W = torch.tensor([-1.2, -0.6, -0.3, -0.1, 0.05, 0.2, 0.5, 0.9], dtype=torch.float64)[None]
G = torch.tensor([0.1, -0.2, 0.3, -0.4, 0.5, 0.6, 0.7, -0.8], dtype=torch.float64)[None]

WEIGHTS: dict[str, tuple[Callable[[], Quantizer], float]] = {
    # what makes the quantizer, and the number of levels of a filter
    "TWN": (TWN, 3),
    "TWN(layer)": (lambda: TWN(0.75, per_channel=False), 3),
    "TTQ": (TTQ, 3),
    **{
        f"APoTWeight({bits}, {variant})": (lambda b=bits, v=variant: APoTWeight(b, v), 2**bits - 1)
        for bits in range(2, 6)
        for variant in ("cifar", "imagenet")
    },
    **{f"INQ({bits})": (lambda b=bits: INQ(b), 2 ** (bits - 1) + 1) for bits in range(2, 8)},
}
INPUTS: dict[str, tuple[Callable[[], Quantizer], float]] = {
    f"APoTInput({bits}, {variant})": (lambda b=bits, v=variant: APoTInput(b, v), 2**bits)
    for bits in range(2, 6)
    for variant in ("cifar", "imagenet")
}
EACH = pytest.mark.parametrize(("make", "count"), (WEIGHTS | INPUTS).values(), ids=(WEIGHTS | INPUTS).keys())
EACH_WEIGHT = pytest.mark.parametrize(("make", "count"), WEIGHTS.values(), ids=WEIGHTS.keys())
DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)

SCHEMES = (
    twn(),
    twn(0.75, per_channel=False),
    ttq(),
    inq(3),
    apot(),
    apot(2, None, "imagenet"),
    apot(5, 3, "imagenet"),
    shift_q(4, rounding="stochastic"),
    shift_ps(4, rounding="stochastic"),
)
EACH_SCHEME = pytest.mark.parametrize("scheme", SCHEMES, ids=str)


def ready(quantizer: Quantizer, x: Tensor, progress: float = 1.0) -> tuple[Tensor, ...]:
    """Initialize from ``x``, bring schedules to ``progress`` and return the tensors."""
    if not isinstance(quantizer, APoTInput):
        quantizer.initialize(x)
    with torch.no_grad():
        quantizer.set_progress_(progress, x)
    return tuple(tensor.detach() for tensor in quantizer.tensors())


def gradients(output: Tensor, grad: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
    """By autograd; zeros for a leaf that the output does not depend on."""
    return torch.autograd.grad(output, leaves, grad, materialize_grads=True)


def agree(found: tuple[Tensor | None, ...], expected: tuple[Tensor, ...]) -> bool:
    """Whether all gradients are equal but for rounding in float64."""
    return all(
        got is not None and torch.allclose(got, value, rtol=1e-12, atol=1e-13)
        for got, value in zip(found, expected, strict=True)
    )


# All quantizers


@EACH
@DTYPES
def test_levels_codes_and_dtypes(make: Callable[[], Quantizer], count: float, dtype: torch.dtype) -> None:
    quantizer = make()
    x = torch.cat([torch.randn(4, 60), torch.tensor([0.0, -0.0, 5.0, -5.0, 1e-6]).expand(4, 5)], 1).to(dtype)
    tensors = ready(quantizer, x)
    for cast in (dtype, torch.promote_types(dtype, torch.float32)):
        given = tuple(tensor.to(cast) if tensor.is_floating_point() else tensor for tensor in tensors)
        x_q = quantizer.quantize(x, *given)
        assert (x_q.shape, x_q.dtype) == (x.shape, dtype)
        assert x_q.isfinite().all()
        assert all(filter_q.unique().numel() <= count for filter_q in x_q)
        codes = quantizer.codes(x, *given)
        assert not codes.values.is_floating_point()
        assert codes.dequantize().to(dtype).equal(x_q)
        for grad, tensor in zip(quantizer.backward(torch.randn_like(x), x, *given), (x, *given), strict=True):
            if grad is None:
                assert not tensor.requires_grad
            else:
                assert (grad.shape, grad.dtype) == (tensor.shape, tensor.dtype)


@EACH
def test_nothing_in_float64_falls_to_float32(make: Callable[[], Quantizer], count: float) -> None:
    quantizer = make()
    x = torch.randn(3, 20, dtype=torch.float64)
    tensors = ready(quantizer, x)
    exact = tuple(tensor.double() * (1 + 1e-11) if tensor.is_floating_point() else tensor for tensor in tensors)
    x_q = quantizer.quantize(x, *exact)
    if not isinstance(quantizer, INQ):  # whose levels are powers of two
        assert not x_q.equal(x_q.float().double())
    for grad, tensor in zip(quantizer.backward(torch.randn_like(x), x, *exact), (x, *exact), strict=True):
        if grad is not None and grad.any():
            assert grad.dtype == tensor.dtype == torch.float64
            assert not grad.equal(grad.float().double())


@EACH
@pytest.mark.parametrize("shape", [(0, 3, 2, 2), (2, 0, 3, 3), (0,), (5,), (1, 1), (3, 1, 1, 1)], ids=str)
def test_odd_shapes_make_no_nan(make: Callable[[], Quantizer], count: float, shape: tuple[int, ...]) -> None:
    for x in (torch.randn(shape), torch.zeros(shape), torch.full(shape, -0.7)):
        quantizer = make()
        tensors = ready(quantizer, x)
        x_q = quantizer.quantize(x, *tensors)
        assert x_q.shape == x.shape
        assert x_q.isfinite().all()
        if not x.any():
            assert not x_q.any()
        for grad in quantizer.backward(torch.ones_like(x), x, *tensors):
            assert grad is None or grad.isfinite().all()


@EACH_WEIGHT
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_are_not_hidden(make: Callable[[], Quantizer], count: float, value: float) -> None:
    quantizer = make()
    x = torch.randn(2, 9)
    x[1, 4] = value
    if isinstance(quantizer, INQ):
        quantizer.initialize(x)
        assert not quantizer.quantize(x, *quantizer.tensors()).isfinite()[1, 4]
        with pytest.raises(ValueError, match="NaN or inf: INQ can't freeze it"):
            quantizer.set_progress_(0.0, x)
        return
    x_q = quantizer.quantize(x, *ready(quantizer, x))
    assert x_q[1].isnan().all()
    per_filter = isinstance(quantizer, TWN) and quantizer.per_channel
    assert x_q[0].isfinite().all() if per_filter else x_q[0].isnan().all()


@pytest.mark.parametrize(
    "make",
    [TWN, TTQ, APoTWeight, APoTInput, INQ, lambda: ShiftQ(4, "stochastic"), lambda: ShiftPS(4, "stochastic")],
    ids=["TWN", "TTQ", "APoTWeight", "APoTInput", "INQ", "ShiftQ", "ShiftPS"],
)
def test_compiled_equals_eager(make: Callable[[], Quantizer]) -> None:
    quantizer = make()
    x = torch.randn(4, 60)
    grad = torch.randn_like(x)
    tensors = ready(quantizer, x, 0.3)

    def both(x: Tensor, grad: Tensor, *tensors: Tensor) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        return quantizer.quantize(x, *tensors), quantizer.backward(grad.clone(), x, *tensors)

    # Tracing is what a class may fail at; the contract tests run the code that is generated.
    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")(x, grad, *tensors)
    torch.testing.assert_close(compiled, both(x, grad, *tensors), rtol=1e-6, atol=1e-7)


@EACH
def test_state_is_saved_and_restored(make: Callable[[], Quantizer], count: float) -> None:
    first, x = make(), torch.randn(4, 6, 3, 3)
    ready(first, x, 0.3)
    with torch.no_grad():
        for parameter in first.parameters():
            parameter.mul_(1.25)
    second = make()
    if not isinstance(second, APoTInput):
        second.initialize(torch.randn(4, 6, 3, 3))
    second.load_state_dict(first.state_dict())
    assert second(x).equal(first(x))


@EACH_SCHEME
@pytest.mark.parametrize("autocast", [False, True])
def test_one_training_step_of_a_layer(scheme: Scheme, autocast: bool) -> None:
    layer = qconv.QConv2d(3, 4, 3, scheme=pickle.loads(pickle.dumps(scheme)))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    handle = qconv.after_every_step(optimizer, layer)
    qconv.set_progress(layer, 0.3)
    input = torch.randn(2, 3, 8, 8, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        output = layer(input.relu())
    assert output.dtype == (torch.bfloat16 if autocast else torch.float32)
    output.float().square().mean().backward()
    for name, parameter in [*layer.named_parameters(), ("input", input)]:
        if parameter.requires_grad:
            assert parameter.grad is not None, name
            assert parameter.grad.isfinite().all(), name
    before = [parameter.detach().clone() for parameter in layer.parameters() if parameter.requires_grad]
    optimizer.step()
    handle.remove()
    after = [parameter for parameter in layer.parameters() if parameter.requires_grad]
    assert all(not old.equal(new) for old, new in zip(before, after, strict=True))


@pytest.mark.parametrize("scheme", [twn(), ttq(), inq(3), apot()], ids=str)
def test_a_float_checkpoint_loads_on_the_meta_device_too(scheme: Scheme) -> None:
    float_layer = nn.Conv2d(3, 4, 3)
    with torch.device("meta"):
        layer = qconv.QConv2d(3, 4, 3, scheme=scheme)
    layer.load_state_dict(float_layer.state_dict(), assign=True)
    layer.input_quantizer = scheme.input()  # which has nothing to be set from
    expected = qconv.QConv2d(3, 4, 3, scheme=scheme)
    expected.load_state_dict(float_layer.state_dict())
    x = torch.rand(1, 3, 5, 5)
    assert layer(x).equal(expected(x))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: twn(0.0), r"threshold \(=0.0\) must be positive and finite"),
        (lambda: twn(math.nan), r"threshold \(=nan\) must be positive"),
        (lambda: ttq(1.0), r"threshold \(=1.0\) must be from 0 to below 1"),
        (lambda: ttq(-0.1), r"threshold \(=-0.1\) must be from 0"),
        (lambda: inq(1), r"weight_bits \(=1\) must be a whole number from . to . for INQ"),
        (lambda: inq(8), r"weight_bits \(=8\) must be a whole number from . to . for INQ"),
        (lambda: inq(2.5), r"weight_bits \(=2.5\) must be a whole number from 2 to 7 for INQ"),  # pyright: ignore[reportArgumentType]
        (lambda: inq(portions=(0.5, 0.9)), r"portions \(=\(0.5, 0.9\)\) must increase from above 0 to 1"),
        (lambda: inq(portions=(0.5, 0.5, 1)), "must increase from above 0 to 1"),
        (lambda: inq(portions=(0.0, 1)), "must increase from above 0 to 1"),
        (lambda: inq(portions=()), "must increase from above 0 to 1"),
        (lambda: inq(portions=(0.5, math.nan, 1)), "must increase from above 0 to 1"),
        (lambda: apot(1), r"weight_bits \(=1\) must be a whole number from . to . for APoT"),
        (lambda: apot(6), r"weight_bits \(=6\) must be a whole number from . to . for APoT"),
        (lambda: apot(4, 1), r"input_bits \(=1\) must be a whole number from . to . for APoT"),
        (lambda: apot(4, 6), r"input_bits \(=6\) must be a whole number from . to . for APoT"),
        (lambda: apot(variant="coco"), r"variant \(='coco'\) must be 'cifar' or 'imagenet'"),  # pyright: ignore[reportArgumentType]
        (lambda: shift_q(1), r"weight_bits \(=1\) must be a whole number from . to . for DeepShift-Q"),
        (lambda: shift_q(rounding="up"), r"rounding \(='up'\) must be 'deterministic' or 'stochastic'"),  # pyright: ignore[reportArgumentType]
        (lambda: shift_ps(rounding=""), r"rounding \(=''\) must be"),  # pyright: ignore[reportArgumentType]
        (lambda: ShiftPS(5, "determinstic"), r"rounding \(='determinstic'\) must be"),  # pyright: ignore[reportArgumentType]
        (lambda: shift_q(fixed_point=(1, 2, 3)), r"fixed_point \(=\(1, 2, 3\)\) must be"),  # pyright: ignore[reportArgumentType]
    ],
)
def test_wrong_arguments(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("name", ["twn", "ttq", "inq", "apot", "shift_q", "shift_ps"])
def test_configs_name_every_argument_with_its_default(name: str) -> None:
    import inspect

    import yaml

    from qconv import schemes as shift

    config = yaml.safe_load((Path(__file__).parents[1] / "configs/scheme" / f"{name}.yaml").read_text())
    assert config.pop("_target_") == f"qconv.schemes.{name}"
    function = getattr(shift, name)
    defaults = {key: argument.default for key, argument in inspect.signature(function).parameters.items()}
    assert {key: tuple(value) if isinstance(value, list) else value for key, value in config.items()} == defaults
    assert function(**config).name == function().name


def test_names_of_the_schemes() -> None:
    assert [str(scheme) for scheme in SCHEMES] == [
        "twn()",
        "twn(threshold=0.75, per_channel=False)",
        "ttq()",
        "inq(weight_bits=3)",
        "apot(weight_bits=4, input_bits=4)",
        "apot(weight_bits=2, input_bits=None, variant=imagenet)",
        "apot(weight_bits=5, input_bits=3, variant=imagenet)",
        "shift_q(weight_bits=4, rounding=stochastic)",
        "shift_ps(weight_bits=4, rounding=stochastic)",
    ]


# TWN


@pytest.mark.parametrize("threshold", [0.7, 0.75])
@pytest.mark.parametrize("per_channel", [False, True])
def test_twn_golden(threshold: float, per_channel: bool) -> None:
    expected = torch.tensor([-0.8, -0.8, 0, 0, 0, 0, 0.8, 0.8], dtype=torch.float64)
    quantizer = TWN(threshold, per_channel)
    torch.testing.assert_close(quantizer.quantize(W)[0], expected, rtol=1e-12, atol=0)
    assert quantizer.backward(G, W)[0] is G


def test_twn_against_a_loop_over_filters() -> None:
    w = torch.randn(5, 3, 2, 2, dtype=torch.float64)
    expected = torch.empty_like(w)
    for index, row in enumerate(w.flatten(1).tolist()):
        bound = 0.7 * sum(map(abs, row)) / len(row)
        large = [abs(v) for v in row if abs(v) > bound]
        alpha = sum(large) / len(large)
        signs = [math.copysign(alpha, v) if abs(v) > bound else 0.0 for v in row]
        expected[index] = torch.tensor(signs, dtype=torch.float64).view(3, 2, 2)
    torch.testing.assert_close(TWN().quantize(w), expected, rtol=1e-12, atol=0)
    layer = TWN(per_channel=False).quantize(w)
    assert layer.abs().unique().numel() == 2
    flat = TWN().quantize(w.flatten()[None]).view_as(w)
    torch.testing.assert_close(layer, flat, rtol=1e-12, atol=0)


def test_twn_at_the_threshold_and_above_it() -> None:
    w = torch.tensor([[1.0, -1.0, 1.0, 5.0], [2.0, -2.0, 2.0, 2.0]], dtype=torch.float64)
    assert TWN(0.5).quantize(w).tolist() == [[0, 0, 0, 5], [2, -2, 2, 2]]  # D = 1 and 1
    assert TWN(1.0).quantize(w)[1].tolist() == [0, 0, 0, 0]
    assert ternary(torch.tensor([1.0, -1.0, 1.1, -1.1, math.nan]), torch.tensor(1.0)).tolist() == [0, 0, 1, -1, 0]


def test_twn_in_float16_does_not_overflow() -> None:
    w = torch.full((2, 3000), 60.0, dtype=torch.float16)
    assert TWN().quantize(w).equal(w)


# TTQ


def with_values(positive: float, negative: float, threshold: float = 0.05) -> tuple[TTQ, Tensor, Tensor]:
    values = torch.tensor(positive, dtype=torch.float64), torch.tensor(negative, dtype=torch.float64)
    return TTQ(threshold), *values


def test_ttq_golden() -> None:
    quantizer, positive, negative = with_values(1.3, 0.7)
    assert quantizer.quantize(W, positive, negative)[0].tolist() == [-0.7, -0.7, -0.7, -0.7, 0, 1.3, 1.3, 1.3]
    dw, dp, dn = quantizer.backward(G.clone(), W, positive, negative)
    expected = [0.07, -0.14, 0.21, -0.28, 0.5, 0.78, 0.91, -1.04]
    torch.testing.assert_close(dw, torch.tensor([expected], dtype=torch.float64), rtol=1e-12, atol=0)
    assert dp is not None
    assert dn is not None
    assert (dp.item(), dn.item()) == (pytest.approx(0.5, rel=1e-12), pytest.approx(0.2, rel=1e-12))


def test_ttq_gradients_are_autograd_of_the_formula() -> None:
    quantizer, positive, negative = with_values(1.3, 0.7, 0.2)
    w = torch.randn(4, 3, 5, dtype=torch.float64)
    grad = torch.randn_like(w)
    leaves = [tensor.clone().requires_grad_() for tensor in (w, positive, negative)]
    bound = 0.2 * w.abs().max()
    is_above, is_below = (w > bound).double(), (w < -bound).double()
    # The paper's: a factor for each of the three sets, and the values' own derivatives.
    formula = leaves[1] * is_above - leaves[2] * is_below
    slope = positive * is_above + negative * is_below + (1 - is_above - is_below)
    formula = formula + slope * (leaves[0] - leaves[0].detach())
    expected = gradients(formula, grad, *leaves)
    found = quantizer.backward(grad.clone(), w, positive, negative)
    assert agree(found, expected)
    assert not agree((found[0], found[1], -expected[2]), expected)  # the paper's missing minus
    assert not agree((grad, *found[1:]), expected)


def test_ttq_threshold_is_zero_and_a_constant_in_the_gradient() -> None:
    quantizer, positive, negative = with_values(2.0, 3.0, 0.25)
    w = torch.tensor([[1.0, -1.0, 4.0, -4.0, 1.5, 0.0]], dtype=torch.float64)
    assert quantizer.quantize(w, positive, negative).tolist() == [[0, 0, 2, -3, 2, 0]]
    dw, dp, dn = quantizer.backward(torch.ones_like(w), w, positive, negative)
    assert dw is not None
    assert dw.tolist() == [[1, 1, 2, 3, 2, 1]]
    assert (dp, dn) == (2, -1)


def test_ttq_starts_at_one_and_stays_positive() -> None:
    quantizer = TTQ()
    with torch.no_grad():
        quantizer.positive.fill_(-3.0)
        quantizer.negative.fill_(0.0)
        quantizer.after_step_(None)
    assert [value.item() for value in quantizer.tensors()] == [2**-20, 2**-20]
    held = quantizer.positive
    quantizer.initialize(torch.randn(3, 4))
    assert [value.item() for value in quantizer.tensors()] == [1, 1]
    assert quantizer.positive is held  # the optimizer's
    quantizer.initialize(torch.randn(3, 4, dtype=torch.float64))
    assert quantizer.positive.dtype == torch.float64


# INQ


def python_inq(value: float, largest: float, bits: int) -> float:
    """The paper's rule, level by level."""
    n1 = math.floor(math.log2(4 * largest / 3))
    n2 = n1 + 1 - 2 ** (bits - 1) // 2
    powers = [0.0, *(2.0**n for n in range(n2, n1 + 1))]
    for alpha, beta in pairwise(powers):
        if (alpha + beta) / 2 <= abs(value) < 3 * beta / 2:
            return math.copysign(beta, value)
    return 0.0


def test_inq_golden() -> None:
    quantizer = INQ(3)
    assert quantizer.quantize(W, *ready(quantizer, W.clone())).tolist() == [[-1, -0.5, -0.5, 0, 0, 0, 0.5, 1]]
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
    expected = [python_inq(value, w.abs().max().item(), bits) for value in w.tolist()]
    assert quantizer.quantize(w, *ready(quantizer, w.clone())).tolist() == expected


def test_power_exponent_is_exact_at_both_ends() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        low = 0.75 * torch.exp2(torch.arange(-14, 15).to(dtype))
        assert power_exponent(low).tolist() == list(range(-14, 15))
        assert power_exponent(-torch.nextafter(low, torch.zeros_like(low))).tolist() == list(range(-15, 14))


@pytest.mark.parametrize(
    ("progress", "count"),
    [(0.0, 4), (0.2499, 4), (0.25, 6), (0.49, 6), (0.5, 7), (0.75, 8), (0.9, 8), (1.0, 8)],
)
def test_inq_portions(progress: float, count: int) -> None:
    quantizer, w = INQ(3), W.clone()
    ready(quantizer, w, progress)
    largest = W.abs().argsort(descending=True)[0, :count]
    assert quantizer.frozen.sum() == count
    frozen = quantizer.frozen > 0
    assert frozen[0, largest].all()
    rounded = torch.tensor([[python_inq(value, 1.2, 3) for value in W[0].tolist()]], dtype=torch.float64)
    expected = torch.where(frozen, rounded, W)
    assert w.equal(expected)  # the latent weight is at its level
    assert quantizer.quantize(W, *quantizer.tensors()).equal(expected)
    dw, *others = quantizer.backward(G.clone(), W, *quantizer.tensors())
    assert dw is not None
    assert dw.equal(G * ~frozen)
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
    expected = quantizer.quantize(w, *ready(quantizer, w.clone()))
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


def test_apot_weight_golden() -> None:
    quantizer, alpha = APoTWeight(4), torch.tensor(1.5, dtype=torch.float64)
    expected = torch.tensor([[-1.5, -0.9, -0.3, 0, 0.15, 0.45, 0.9, 1.5]], dtype=torch.float64)
    torch.testing.assert_close(quantizer.quantize(W, alpha), expected, rtol=1e-12, atol=0)
    dw, dalpha = quantizer.backward(G.clone(), W, alpha)
    assert dalpha is not None
    assert dalpha.item() == pytest.approx(-0.0805175701518656, rel=1e-12)
    torch.testing.assert_close(dw, G / W.std(), rtol=1e-12, atol=0)


def nearest(z: Tensor, grid: tuple[int, ...]) -> Tensor:
    """The nearest of the levels on [0, 1], element by element against every level."""
    on_one = torch.tensor(grid, dtype=z.dtype) / grid[-1]
    return on_one[(z[..., None] - on_one).abs().argmin(-1)]


@pytest.mark.parametrize("bits", range(2, 6))
@pytest.mark.parametrize("variant", ["cifar", "imagenet"])
def test_apot_weight_gradients_are_autograd_of_the_formula(bits: int, variant: str) -> None:
    w = torch.randn(4, 3, 5, dtype=torch.float64) * 0.3 + 0.1
    grad = torch.randn_like(w)
    leaf, alpha = w.clone().requires_grad_(), torch.tensor(1.4, dtype=torch.float64, requires_grad=True)
    mean, std = leaf.mean(), leaf.std()
    if variant == "cifar":
        mean, std = mean.detach(), std.detach()
    normalized = (leaf - mean) / std
    clipped = (normalized / alpha).clamp(-1, 1)
    q = nearest(clipped.detach().abs(), levels(bits - 1)) * clipped.detach().sign()
    output = (q + clipped - clipped.detach()) * alpha
    if variant == "cifar" or bits == 2:  # not masked: the clip acts on alpha's gradient alone
        fixed = (normalized.detach() / alpha).clamp(-1, 1)
        output = (q + fixed - fixed.detach()) * alpha + normalized - normalized.detach()
    expected = gradients(output, grad, leaf, alpha)
    quantizer = APoTWeight(bits, variant)  # pyright: ignore[reportArgumentType]
    found = quantizer.backward(grad.clone(), w, alpha.detach())
    assert clipped.abs().eq(1).any()
    torch.testing.assert_close(quantizer.quantize(w, alpha.detach()), output.detach(), rtol=1e-12, atol=1e-14)
    assert agree(found, expected)
    other = APoTWeight(bits, "imagenet" if variant == "cifar" else "cifar")
    assert not agree(other.backward(grad.clone(), w, alpha.detach()), expected)


@pytest.mark.parametrize("bits", range(2, 6))
@pytest.mark.parametrize("variant", ["cifar", "imagenet"])
def test_apot_input_gradients_are_autograd_of_the_formula(bits: int, variant: str) -> None:
    x = torch.randn(4, 3, 5, dtype=torch.float64)
    grad = torch.randn_like(x)
    leaf, alpha = x.clone().requires_grad_(), torch.tensor(0.9, dtype=torch.float64, requires_grad=True)
    z = leaf / alpha
    clipped = z.clamp(max=1) if variant == "cifar" else z.clamp(0, 1)
    q = nearest(clipped.detach().clamp(min=0), levels(bits))
    output = (q + clipped - clipped.detach()) * alpha
    expected = gradients(output, grad, leaf, alpha)
    quantizer = APoTInput(bits, variant)  # pyright: ignore[reportArgumentType]
    found = quantizer.backward(grad.clone(), x, alpha.detach())
    torch.testing.assert_close(quantizer.quantize(x, alpha.detach()), output.detach(), rtol=1e-12, atol=1e-14)
    assert agree(found, expected)
    other = APoTInput(bits, "imagenet" if variant == "cifar" else "cifar")
    assert not agree(other.backward(grad.clone(), x, alpha.detach()), expected)


@pytest.mark.parametrize(("variant", "below"), [("cifar", 3.0), ("imagenet", 0.0)])
def test_apot_input_at_its_ends(variant: str, below: float) -> None:
    alpha = torch.tensor(1.7, dtype=torch.float64)
    x = torch.stack([alpha, torch.nextafter(alpha, 2 * alpha), 0 * alpha, -0.0 * alpha, -alpha])
    quantizer = APoTInput(3, variant)  # pyright: ignore[reportArgumentType]
    torch.testing.assert_close(quantizer.quantize(x, alpha), torch.tensor([1.7, 1.7, 0, 0, 0]).double())
    dx, _ = quantizer.backward(torch.full_like(x, 3.0), x, alpha)
    assert dx is not None
    assert dx.tolist() == [3, 0, 3, 3, below]
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


def test_apot_ranges_start_where_the_authors_do_and_stay_positive() -> None:
    starts = [APoTWeight(), APoTWeight(variant="imagenet"), APoTInput(), APoTInput(variant="imagenet")]
    assert [quantizer.alpha.item() for quantizer in starts] == [3, 3, 8, 6]
    for quantizer in starts:
        with torch.no_grad():
            quantizer.alpha.fill_(-1.0)
            quantizer.after_step_(None)
        assert quantizer.alpha.item() == 2**-20
    weight, held = starts[0], starts[0].alpha
    weight.initialize(torch.randn(3, 3))
    assert weight.alpha is held
    assert held == 3


# DeepShift with stochastic rounding


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
    assert quantizer.eval().quantize(x, *tensors).equal(deterministic)


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
    input = torch.randn(2, 4, 6, 6)
    evaluated = layer.eval()(input)
    for progress, is_random in ((0.0, True), (0.79, True), (0.8, False), (0.9, False)):
        qconv.set_progress(layer.train(), progress)
        assert torch.equal(layer(input), evaluated) is not is_random
    older = {key: value for key, value in layer.state_dict().items() if not key.endswith("is_random")}
    assert not any(layer.load_state_dict(older))
    assert not torch.equal(layer(input), evaluated)
    with pytest.raises(ValueError, match=r"random_until \(=1.5\) must be from 0 to 1"):
        shift_ps(4, rounding="stochastic", random_until=1.5)


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


def test_ps_initializes_again_with_another_shape() -> None:
    quantizer = ShiftPS(4)
    quantizer.initialize(torch.randn(3, 4))
    quantizer.initialize(torch.randn(2, 5))
    assert quantizer.shift.shape == quantizer.sign.shape == (2, 5)
