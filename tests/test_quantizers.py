"""One contract over all quantizers."""

import copy
import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from qconv.quantizers import (
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
    Quantizer,
    ReActNetInput,
    ReCUInput,
    ReCUWeight,
    ReSTEWeight,
    ScaledSign,
    ShiftPS,
    ShiftQ,
    Sign,
    Stages,
    Straight,
    XNORppWeight,
)

Make = Callable[[], Quantizer]
QUANTIZERS: dict[str, tuple[Make, float]] = {
    # what makes the quantizer, and the largest number of values that one filter may take
    "Identity": (Identity, math.inf),
    "Sign": (Sign, 2),
    "Sign(Straight)": (partial(Sign, Straight), 2),
    "Sign(HardClip(1.3))": (partial(Sign, partial(HardClip, 1.3)), 2),
    "Sign(stochastic)": (partial(Sign, stochastic=True), 2),
    "ScaledSign": (ScaledSign, 2),
    "ScaledSign(detach)": (partial(ScaledSign, detach_scale=True), 2),
    **{f"ShiftQ({bits})": (partial(ShiftQ, bits), 2**bits + 1) for bits in range(2, 9)},  # the additional one is 0
    **{f"ShiftPS({bits})": (partial(ShiftPS, bits), 2**bits - 1) for bits in range(2, 9)},
    "FixedPoint(3, 2)": (partial(FixedPoint, 3, 2), 2**5 + 1),  # both ends of the range
    "FixedPoint(16, 16)": (partial(FixedPoint, 16, 16), math.inf),
    "ShiftQ(4, stochastic)": (partial(ShiftQ, 4, "stochastic"), 17),
    "ShiftPS(4, stochastic)": (partial(ShiftPS, 4, "stochastic"), 15),
    "ScaledSign(numel_gradient)": (partial(ScaledSign, numel_gradient=True), 2),
    "ScaledSign(paper_gradient, center)": (partial(ScaledSign, center=True, paper_gradient=True), 2),
    "XNORppWeight": (XNORppWeight, 2),
    "BiRealWeight": (BiRealWeight, 2),
    "BiRealWeight(paper)": (partial(BiRealWeight, "paper"), 2),
    "ReActNetInput": (ReActNetInput, 2),
    "IRNetWeight": (IRNetWeight, 2),
    "ReCUWeight": (ReCUWeight, 2),
    "ReCUWeight(scale_init=mean)": (partial(ReCUWeight, scale_init="mean"), 2),
    "ReCUInput": (ReCUInput, 2),
    "AdaBinWeight": (AdaBinWeight, 2),
    "AdaBinInput": (AdaBinInput, 2),
    "AdaBinInput(code)": (partial(AdaBinInput, "code"), 2),
    "ReSTEWeight": (ReSTEWeight, 2),
    "TWN": (TWN, 3),
    "TWN(per_channel=False)": (partial(TWN, per_channel=False), 3),
    "TTQ": (TTQ, 3),
    "INQ": (INQ, math.inf),  # those not frozen yet are float
    **{f"APoTWeight({bits})": (partial(APoTWeight, bits), 2**bits - 1) for bits in range(2, 6)},
    "APoTWeight(imagenet)": (partial(APoTWeight, variant="imagenet"), 15),
    **{f"APoTInput({bits})": (partial(APoTInput, bits), 2**bits) for bits in range(2, 6)},
    "APoTInput(imagenet)": (partial(APoTInput, variant="imagenet"), 16),
    **{
        f"{kind.__name__}({bits})": (partial(kind, bits), 2**bits)
        for kind in (DoReFaWeight, DoReFaInput, PACT, LSQ, LSQInput, DSQWeight, DSQInput)
        for bits in (1, 2, 3, 8)
    },
    "DoReFaWeight(3, detach_max=False)": (partial(DoReFaWeight, 3, False), 8),
    "DoReFaGradient(4)": (partial(DoReFaGradient, 4), 16),
    "LSQ(3, per_channel)": (partial(LSQ, 3, per_channel=True), 8),
    "LSQ(3, strict)": (partial(LSQ, 3, strict=True), 8),
    "LSQ(3, numel)": (partial(LSQ, 3, grad_scale="numel"), 8),
    "LSQInput(3, signed)": (partial(LSQInput, 3, signed=True), 8),
    "LSQInput(3, per_channel)": (partial(LSQInput, 3, per_channel=True), 6 * 8),  # of 6 channels
    "LSQPlus(4)": (partial(LSQPlus, 4), 16),
    "LSQPlusInput(3)": (partial(LSQPlusInput, 3), 8),
    **{
        f"{kind.__name__}({bits})": (partial(kind, bits), 2**bits)
        for kind in (N2UQWeight, N2UQInput, MinMaxInput)
        for bits in (2, 3, 8)
    },
    "N2UQWeight(2, rescale_grad=False)": (partial(N2UQWeight, 2, False), 4),
    **{f"MinMaxWeight({bits})": (partial(MinMaxWeight, bits), 2**bits - 1) for bits in range(2, 9)},
    "MinMaxWeight(4, affine)": (partial(MinMaxWeight, 4, False), 16),
    "MinMaxWeight(4, affine, per layer)": (partial(MinMaxWeight, 4, False, False), 16),
    "MinMaxInput(4, symmetric)": (partial(MinMaxInput, 4, True), 15),
    "PercentileWeight(4, 90)": (partial(PercentileWeight, 4, 90.0), 15),
    "PercentileWeight(4, 90, affine, per layer)": (partial(PercentileWeight, 4, 90.0, False, False), 16),
    "PercentileInput(4, 90)": (partial(PercentileInput, 4, 90.0), 16),
    "FP8": (FP8, 253),
    "FP8(e5m2)": (partial(FP8, "e5m2"), 247),
    "FP8(e5m2, scale=None)": (partial(FP8, "e5m2", None), 247),
    "Stages(first)": (partial(Stages, [(0, partial(LSQ, 3)), (0.5, Sign)]), 8),
    "Stages(Sign)": (partial(Stages, [(0, Sign), (0.9, Identity)]), 2),
    "Int8Stochastic": (Int8Stochastic, 255),
    "Int8Stochastic(4, per_sample=False)": (partial(Int8Stochastic, 4, False), 15),
}
WITHOUT_CODES: set[type[Quantizer]] = {Identity, INQ}
ALL = pytest.mark.parametrize(("make", "levels"), QUANTIZERS.values(), ids=QUANTIZERS.keys())
DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)


def ready(make: Make, x: Tensor, dtype: torch.dtype | None = None) -> tuple[Quantizer, tuple[Tensor, ...]]:
    """A quantizer with its learned tensors set from ``x``, in ``dtype`` (of ``x`` if None), and those tensors."""
    quantizer = make()
    quantizer.build(x.shape[1] if x.ndim > 1 else 1, 1 if x.ndim > 1 else -1)
    quantizer.to(x.dtype if dtype is None else dtype)
    quantizer.initialize(x)
    quantizer.to(x.dtype if dtype is None else dtype)
    return quantizer, tuple(tensor.detach() for tensor in quantizer.tensors())


def tensor_dtypes(make: Make, dtype: torch.dtype) -> set[torch.dtype]:
    """Under autocast learned float32 tensors meet an input of fewer bits, unless they stand for the weight."""
    return {dtype} if make().replaces_weight else {dtype, torch.promote_types(dtype, torch.float32)}


@ALL
@DTYPES
def test_shape_dtype_and_levels(make: Make, levels: float, dtype: torch.dtype) -> None:
    x = torch.randn(4, 6, 3, 3).mul(2).to(dtype)
    for of_tensors in tensor_dtypes(make, dtype):
        quantizer, tensors = ready(make, x, of_tensors)
        x_q = quantizer.quantize(x, *tensors)
        assert (x_q.shape, x_q.dtype, x_q.device) == (x.shape, dtype, x.device)
        assert x_q.isfinite().all()
        assert all(filter_q.unique().numel() <= levels for filter_q in x_q)
        assert quantizer(x).equal(x_q)
        if quantizer.signs:
            assert x_q.abs().eq(1).all()


@ALL
@pytest.mark.parametrize("mixed", [False, True])
def test_gradient_has_shape_and_dtype_of_its_tensor(make: Make, levels: float, mixed: bool) -> None:
    x = torch.randn(4, 6, 3, 3, dtype=torch.bfloat16)
    quantizer, tensors = ready(make, x, sorted(tensor_dtypes(make, x.dtype), key=str)[-1 if mixed else 0])
    grads = quantizer.backward(torch.randn_like(x), x, *tensors)
    assert len(grads) == 1 + len(tensors)
    buffers = {id(buffer) for buffer in quantizer.buffers()}
    for grad, tensor, owner in zip(grads, (x, *tensors), (x, *quantizer.tensors()), strict=True):
        if grad is None:
            assert quantizer.replaces_weight if tensor is x else id(owner) in buffers
        else:
            assert (grad.shape, grad.dtype) == (tensor.shape, tensor.dtype)
            assert id(owner) not in buffers


@ALL
@pytest.mark.parametrize("shape", [(0, 3, 2, 2), (2, 0, 3, 3), (0,)], ids=str)
def test_empty(make: Make, levels: float, shape: tuple[int, ...]) -> None:
    x = torch.empty(shape)
    quantizer, tensors = ready(make, x)
    assert quantizer.quantize(x, *tensors).shape == x.shape
    grads = quantizer.backward(x.clone(), x, *tensors)
    assert all(grad is None or grad.isfinite().all() for grad in grads)


@ALL
def test_zeros_of_both_signs_are_one_value(make: Make, levels: float) -> None:
    x = torch.tensor([0.0, -0.0, 1.0, -1.0])[None]
    quantizer, _ = ready(make, x)
    x_q = quantizer.eval().quantize(x, *quantizer.tensors())[0]
    assert x_q[0] == x_q[1]
    if quantizer.signs:
        assert x_q.tolist() == [1, 1, 1, -1]


@ALL
@pytest.mark.parametrize("value", [0.0, 0.7, -0.7], ids=str)
@pytest.mark.parametrize("shape", [(2, 3, 2, 2), (2, 1)], ids=str)
def test_constant_filters_make_no_nan(make: Make, levels: float, value: float, shape: tuple[int, ...]) -> None:
    x = torch.full(shape, value)
    quantizer, tensors = ready(make, x)
    assert quantizer.quantize(x, *tensors).isfinite().all()
    grads = quantizer.backward(torch.ones_like(x), x, *tensors)
    assert all(grad is None or grad.isfinite().all() for grad in grads)


# A statistic of the whole tensor goes into every filter.
OVER_ALL = (ReSTEWeight, TTQ, APoTWeight, DoReFaWeight)
OVER_ALL_NAMES = ("TWN(per_channel=False)", "per layer)", "FP8", "FP8(e5m2)", "Int8Stochastic(4, per_sample=False)")


@pytest.mark.parametrize("name", [name for name, (make, _) in QUANTIZERS.items() if not make().replaces_weight])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
def test_what_is_not_finite_stays_in_its_filter_and_is_not_hidden(name: str, value: float) -> None:
    make, levels = QUANTIZERS[name]
    x = torch.randn(4, 30)
    quantizer, tensors = ready(make, x)
    quantizer.eval()
    clean = quantizer.quantize(x, *tensors)
    x[1, 5] = value
    x_q = quantizer.quantize(x, *tensors)
    grad = quantizer.backward(torch.ones_like(x), x, *tensors)[0]
    assert x_q.shape == x.shape
    assert x_q.dtype == x.dtype
    assert grad is None or grad.shape == x.shape
    if not (isinstance(quantizer, OVER_ALL) or name.endswith(OVER_ALL_NAMES)):
        assert x_q[[0, 2, 3]].equal(clean[[0, 2, 3]])
    if math.isnan(value):  # of two levels it has one
        assert x_q[1, 5].isnan() or levels == 2
    elif x_q[1, 5].isfinite():
        assert x_q[1, 5] == (x_q[1].max() if value > 0 else x_q[1].min())


@ALL
@DTYPES
def test_codes_reproduce_quantize(make: Make, levels: float, dtype: torch.dtype) -> None:
    x = torch.cat([torch.randn(4, 30), torch.tensor([0.0, -0.0, 5.0, -5.0, 1e-6]).expand(4, 5)], 1).to(dtype)
    for of_tensors in tensor_dtypes(make, dtype):
        quantizer, tensors = ready(make, x, of_tensors)
        if type(quantizer) in WITHOUT_CODES:
            with pytest.raises(TypeError, match=type(quantizer).__name__):
                quantizer.codes(x, *tensors)
            return
        codes = quantizer.codes(x, *tensors)
        assert codes.values.eq(codes.values.round()).all()
        assert codes.dequantize().to(dtype).equal(quantizer.quantize(x, *tensors))


@ALL
def test_saved_and_restored(make: Make, levels: float) -> None:
    x = torch.randn(4, 6, 3, 3)
    quantizer, _ = ready(make, x)
    with torch.no_grad():
        for parameter in quantizer.parameters():
            parameter.mul_(0.8)
        quantizer.set_progress_(0.4, x)
        quantizer.after_step_(x)
    other, _ = ready(make, torch.randn(4, 6, 3, 3) * 2)
    other.load_state_dict(copy.deepcopy(quantizer.state_dict()))
    grad = torch.randn_like(x)
    assert other(x).equal(quantizer(x))
    mine, others = (q.backward(grad.clone(), x, *(t.detach() for t in q.tensors())) for q in (quantizer, other))
    for one, another in zip(mine, others, strict=True):
        assert one is another is None or (one is not None and another is not None and one.equal(another))
    assert other.calibrated == quantizer.calibrated


@ALL
def test_alone_it_backpropagates_its_pseudo_gradient_once(make: Make, levels: float) -> None:
    x = torch.randn(3, 8, dtype=torch.float64)
    quantizer, tensors = ready(make, x)
    grad = torch.randn_like(x)
    leaf = x.clone().requires_grad_()
    quantizer(leaf).backward(grad)
    handed = quantizer.tensors()
    owners = [tensor if tensor._base is None else tensor._base for tensor in handed]  # learned numbers have a dimension
    grads = (
        None if owner.grad is None else owner.grad.view_as(tensor) for owner, tensor in zip(owners, handed, strict=True)
    )
    found = (leaf.grad, *grads)
    for got, expected in zip(found, quantizer.backward(grad.clone(), x, *tensors), strict=True):
        assert (got is None) == (expected is None)
        assert got is None or expected is None or got.equal(expected)
    quantizer.zero_grad()
    leaves = [leaf, *quantizer.parameters()]
    first = torch.autograd.grad(quantizer(leaf).sum(), leaves, create_graph=True, allow_unused=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        sum(grad.sum() for grad in first if grad is not None).backward()  # pyright: ignore[reportAttributeAccessIssue]


# One of each class; those of the same class differ in numbers.
COMPILED = {make().__class__: name for name, (make, _) in reversed(QUANTIZERS.items())}.values()
# Their results are sums over a filter, which may be taken in another order, or products that may be fused.
ROUNDED = (AdaBinWeight, APoTWeight, BiRealWeight, DoReFaWeight, DSQInput, DSQWeight, IRNetWeight, LSQPlusInput)
ROUNDED += (N2UQInput, N2UQWeight, ReCUInput, ReCUWeight, ReSTEWeight, ScaledSign, TTQ, TWN)


@pytest.mark.parametrize("rounded", [False, True])
def test_compiled_equals_eager(rounded: bool) -> None:
    """All in one graph: one for each takes three times as long."""
    above = torch.nextafter(torch.tensor(1.0), torch.tensor(2.0)).item()
    x = torch.cat([torch.randn(4, 58), torch.tensor([0.0, -0.0, 1.0, -1.0, above, -above]).expand(4, 6)], 1)
    x = x.double() if rounded else x
    grad = torch.randn_like(x)
    made = {name: ready(QUANTIZERS[name][0], x) for name in COMPILED}
    made = {name: each for name, each in made.items() if isinstance(each[0], ROUNDED) == rounded}

    def all_of_them(
        x: Tensor, grad: Tensor, tensors: dict[str, tuple[Tensor, ...]]
    ) -> dict[str, tuple[Tensor, tuple[Tensor | None, ...]]]:
        return {
            name: (quantizer.quantize(x, *tensors[name]), quantizer.backward(grad.clone(), x, *tensors[name]))
            for name, (quantizer, _) in made.items()
        }

    tensors = {name: each for name, (_, each) in made.items()}
    eager = all_of_them(x, grad, tensors)
    compiled = torch.compile(all_of_them, fullgraph=True)(x, grad, tensors)
    for name, (x_q, grads) in eager.items():
        near = partial(torch.testing.assert_close, msg=partial("{}: {}".format, name))
        near(compiled[name][0], x_q, rtol=1e-13 if rounded else 0, atol=1e-14 if rounded else 0)
        # Gradients of learned tensors are sums of 256 numbers in any case.
        for one, other in zip(compiled[name][1], grads, strict=True):
            near(one, other, rtol=1e-12 if rounded else 1e-5, atol=1e-13 if rounded else 1e-6)


@ALL
@DTYPES
def test_whole_numbers_times_their_scale_are_the_quantized(make: Make, levels: float, dtype: torch.dtype) -> None:
    x = torch.cat([torch.randn(4, 30), torch.tensor([0.0, -0.0, 5.0, -5.0, 1e-6]).expand(4, 5)], 1).to(dtype)
    quantizer, tensors = ready(make, x)
    quantizer.set_progress_(1.0, x)  # INQ's last weights are frozen
    if (whole := quantizer.whole(x, *tensors)) is None:
        return
    values, scale = whole
    assert values.is_floating_point()
    assert torch.promote_types(values.dtype, dtype) == values.dtype
    codes = quantizer.codes(x, *tensors)
    if scale is None:
        assert codes.scale.log2().frac() == 0  # they are whole multiples of a power of two
        assert values.equal(codes.dequantize().to(values.dtype))
    else:
        assert values.equal(codes.values.to(values.dtype))
    assert (values if scale is None else values * scale).to(dtype).equal(quantizer.quantize(x, *tensors))
