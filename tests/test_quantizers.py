"""One contract over all quantizers."""

import copy
import math
import pickle
import re
from functools import partial

import pytest
import torch
from methods import QUANTIZERS, Make, entry_of, handed, ready, tensor_dtypes
from torch import Tensor, nn

from qconv.quantizers import FP8, BiPerWeight, Quantizer, ReCUWeight, Sign, SiManWeight, SineWeight, Stages

ALL = pytest.mark.parametrize(("make", "levels"), QUANTIZERS.values(), ids=QUANTIZERS.keys())
DTYPES = torch.float64, torch.float32, torch.float16, torch.bfloat16


def check_codes(quantizer: Quantizer, x: Tensor, x_q: Tensor, tensors: tuple[Tensor, ...], are_there: bool) -> None:
    """That codes, and whole numbers times their scale, are the quantized values; a TypeError where there are none."""
    if not are_there:
        with pytest.raises(TypeError, match=type(quantizer).__name__):
            quantizer.codes(x, *tensors)
        return
    codes = quantizer.codes(x, *tensors)
    assert codes.values.eq(codes.values.round()).all()
    assert codes.dequantize().to(x.dtype).equal(x_q)
    if (whole := quantizer.whole(x, *tensors)) is None:
        return
    values, scale = whole
    assert values.is_floating_point()
    assert torch.promote_types(values.dtype, x.dtype) == values.dtype
    if scale is None:
        assert codes.scale.log2().frac() == 0  # they are whole multiples of a power of two
        assert values.equal(codes.dequantize().to(values.dtype))
    else:
        assert values.equal(codes.values.to(values.dtype))
    assert (values if scale is None else values * scale).to(x.dtype).equal(x_q)


def check_gradients(quantizer: Quantizer, x: Tensor, tensors: tuple[Tensor, ...]) -> None:
    """That each has shape and dtype of its tensor, and that buffers have none."""
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
@pytest.mark.parametrize("at_the_end", [False, True])
def test_levels_codes_and_gradients(make: Make, levels: float, at_the_end: bool) -> None:
    ends = torch.tensor([0.0, -0.0, 1.0, 5.0, -5.0, 50.0, 1e-6, -1e-6, -50.0]).view(3, 3).expand(4, 6, 1, 3, 3)
    values = torch.cat([torch.randn(4, 6, 8, 3, 3).mul(2), ends], 2).flatten(3)
    for dtype in DTYPES:
        x = values.to(dtype)
        for of_tensors in tensor_dtypes(make, dtype):
            quantizer, tensors = ready(make, x, of_tensors)
            if at_the_end and isinstance(quantizer, Stages):
                return  # it is another one then
            if at_the_end:
                quantizer.set_progress_(1.0, x.clone())
                tensors = handed(quantizer)
            x_q = quantizer.quantize(x, *tensors)
            assert (x_q.shape, x_q.dtype, x_q.device) == (x.shape, dtype, x.device)
            assert x_q.isfinite().all()
            assert quantizer(x).equal(x_q)
            if quantizer.signs:
                assert x_q.abs().eq(1).all()
            if quantizer.is_final:
                assert all(filter_q.unique().numel() <= levels for filter_q in x_q)
            are_there = entry_of(quantizer).has_codes or (at_the_end and levels < math.inf)
            check_codes(quantizer, x, x_q, tensors, are_there)
            check_gradients(quantizer, x, tensors)


SHAPES = (0, 3, 2, 2), (2, 0, 3, 3), (2, 3, 0), (0, 3), (0,), (1,), (5,), (1, 1), (2, 1), (3, 1, 1, 1), (2, 3, 4)
FILLED = 0.0, 0.7, -0.7, 1e-30, 1e30


def check_finite(make: Make, x: Tensor) -> None:
    if x.ndim == 1 and isinstance(make(), ReCUWeight | BiPerWeight | SineWeight | SiManWeight):
        return  # a weight has filters, and it a scale for each
    quantizer, tensors = ready(make, x)
    x_q = quantizer.quantize(x, *tensors)
    assert (x_q.shape, x_q.dtype) == (x.shape, x.dtype)
    assert x_q.isfinite().all()
    grads = quantizer.backward(torch.ones_like(x), x, *tensors)
    assert all(grad is None or grad.isfinite().all() for grad in grads)
    if quantizer.needs_data and not x.numel():
        assert not quantizer.calibrated


@ALL
def test_odd_shapes_and_constants_make_no_nan(make: Make, levels: float) -> None:
    for shape in SHAPES:
        check_finite(make, torch.randn(shape))
        check_finite(make, torch.full(shape, FILLED[-1]))
    for dtype in (torch.float32, torch.bfloat16):
        for value in FILLED:
            check_finite(make, torch.full((2, 3, 3, 3), value, dtype=dtype))


@ALL
def test_zeros_of_both_signs_are_one_value(make: Make, levels: float) -> None:
    x = torch.tensor([0.0, -0.0, 1.0, -1.0])[None]
    quantizer, _ = ready(make, x)
    x_q = quantizer.eval().quantize(x, *quantizer.tensors())[0]
    assert x_q[0] == x_q[1]
    if quantizer.signs:
        assert x_q.tolist() == [1, 1, 1, -1]


@pytest.mark.parametrize("name", [name for name, (make, _) in QUANTIZERS.items() if not make().replaces_weight])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
def test_what_is_not_finite_stays_in_its_filter_and_is_not_hidden(name: str, value: float) -> None:
    make, levels = QUANTIZERS[name]
    x = torch.randn(4, 30)
    quantizer, _ = ready(make, x)
    tensors = handed(quantizer.eval())
    clean = quantizer.quantize(x, *tensors)
    x[1, 5] = value
    x_q = quantizer.quantize(x, *tensors)
    grad = quantizer.backward(torch.ones_like(x), x, *tensors)[0]
    assert x_q.shape == x.shape
    assert x_q.dtype == x.dtype
    assert grad is None or grad.shape == x.shape
    spreads = entry_of(quantizer).spreads
    if spreads is None or not spreads(quantizer):
        assert x_q[[0, 2, 3]].equal(clean[[0, 2, 3]])
    elif math.isnan(value) and getattr(quantizer, "percentile", 100) == 100:
        assert x_q.isnan().all()
    if math.isnan(value):  # of two levels it has one
        assert x_q[1, 5].isnan() or levels == 2
    elif x_q[1, 5].isfinite() and tensors and tensors[0].shape == (30,):  # each channel has its own last level
        x[1, 5] = math.copysign(1e30, value)
        assert x_q[1, 5] == quantizer.quantize(x, *tensors)[1, 5]
    elif x_q[1, 5].isfinite():
        assert x_q[1, 5] == (x_q[1].max() if value > 0 else x_q[1].min())


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
    for again in (other, pickle.loads(pickle.dumps(quantizer))):
        assert again(x).equal(quantizer(x))
        mine, others = (q.backward(grad.clone(), x, *handed(q)) for q in (quantizer, again))
        torch.testing.assert_close(mine, others, rtol=0, atol=0)
        assert again.calibrated == quantizer.calibrated
        torch.testing.assert_close(quantizer.tensors(), again.tensors(), rtol=0, atol=0)
    assert repr(quantizer).startswith(type(quantizer).__name__)


@ALL
def test_alone_it_backpropagates_its_pseudo_gradient_once(make: Make, levels: float) -> None:
    x = torch.randn(3, 8, dtype=torch.float64)
    quantizer, tensors = ready(make, x)
    grad = torch.randn_like(x)
    leaf = x.clone().requires_grad_()
    quantizer(leaf).backward(grad)
    owners = quantizer.tensors()
    owners = [tensor if tensor._base is None else tensor._base for tensor in owners]  # learned numbers have a dimension
    grads = (
        None if owner.grad is None else owner.grad.view_as(tensor)
        for owner, tensor in zip(owners, quantizer.tensors(), strict=True)
    )
    found = (leaf.grad, *grads)
    torch.testing.assert_close(found, quantizer.backward(grad.clone(), x, *tensors), rtol=0, atol=0)
    quantizer.zero_grad()
    leaves = [leaf, *quantizer.parameters()]
    first = torch.autograd.grad(quantizer(leaf).sum(), leaves, create_graph=True, allow_unused=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        sum(grad.sum() for grad in first if grad is not None).backward()  # pyright: ignore[reportAttributeAccessIssue]


@ALL
def test_strides_make_no_difference(make: Make, levels: float) -> None:
    x, grad = torch.randn(2, 6, 4, 5), torch.randn(2, 6, 4, 5)
    quantizer, tensors = ready(make, x)
    x_q, grads = quantizer.quantize(x, *tensors), quantizer.backward(grad.clone(), x, *tensors)
    turned = (each.transpose(1, 3).contiguous().transpose(1, 3) for each in (x, grad))
    last = (each.contiguous(memory_format=torch.channels_last) for each in (x, grad))
    for other, other_grad in (turned, last):
        torch.testing.assert_close(quantizer.quantize(other, *tensors), x_q)
        torch.testing.assert_close(quantizer.backward(other_grad.clone(), other, *tensors), grads)
    has_own = any(tensor.shape == x.shape for tensor in tensors)  # of each element, in the format that it has
    if getattr(quantizer, "stream", None) is None and not has_own:
        assert quantizer.quantize(other, *tensors).is_contiguous(memory_format=torch.channels_last)


OF_WEIGHTS = [name for name, (make, _) in QUANTIZERS.items() if make().roles == ("weight",)]


@pytest.mark.parametrize("name", OF_WEIGHTS)
def test_what_is_learned_starts_again_with_the_weight(name: str) -> None:
    w = torch.randn(4, 3, 3, 3)
    quantizer, tensors = ready(QUANTIZERS[name][0], w)
    first = [tensor.clone() for tensor in tensors]
    parameters = dict(quantizer.named_parameters())
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.fill_(9.0)
    quantizer.initialize(w)
    for key, parameter in quantizer.named_parameters():
        assert parameter is parameters[key]  # the optimizer's
        parameter.requires_grad_(False)
    torch.testing.assert_close([*quantizer.tensors()], first, rtol=0, atol=0)
    quantizer.initialize(torch.randn(6, 3, dtype=torch.float64))
    for key, parameter in quantizer.named_parameters():
        assert not parameter.requires_grad
        assert parameter.shape == parameters[key].shape or parameter.dtype == torch.float64
        assert parameter.shape[0] in (1, 6)
    quantizer.initialize(torch.empty(6, 3, device="meta"))
    assert all(parameter.is_meta for parameter in quantizer.parameters())


@ALL
def test_what_must_be_positive_is_after_a_step(make: Make, levels: float) -> None:
    x = torch.randn(4, 6)
    quantizer, _ = ready(make, x)
    latent = x if "weight" in quantizer.roles else None
    learned = [
        (key, rule) for key, (rule, _) in quantizer.rules().items() if isinstance(getattr(quantizer, key), nn.Parameter)
    ]
    for key, rule in learned:
        parameter: nn.Parameter = getattr(quantizer, key)
        if rule(torch.tensor(-1.0)):
            continue
        with torch.no_grad():
            for wrong in (-1.0, 0.0):
                parameter.fill_(wrong)
                quantizer.after_step_(latent)
                assert ((parameter >= 2.0**-20) & (parameter <= 1e-3)).all()
            parameter.fill_(0.5)
            quantizer.after_step_(latent)
            assert parameter.eq(0.5).all()
            parameter.requires_grad_(False).fill_(-1.0)
            quantizer.after_step_(latent)
            assert parameter.eq(-1.0).all()  # what is frozen stays
            parameter.requires_grad_().fill_(0.0)
        quantizer.half()
        with torch.no_grad():
            quantizer.after_step_(latent)
        assert getattr(quantizer, key).gt(0).all()
        assert quantizer(x.half()).isfinite().all()
        quantizer.float()


# One of each class, in code that is generated; the others are traced alone.
GENERATED = {make().__class__: name for name, (make, _) in reversed(QUANTIZERS.items())}.values()
OTHERS = [name for name in QUANTIZERS if name not in GENERATED and not re.search("bits=[2-9]|percentile=", name)]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("names", "backend", "progress"), [(GENERATED, "inductor", 0.0), (OTHERS, "aot_eager", 0.5)], ids=["one", "others"]
)
@pytest.mark.parametrize("exact", [True, False])
def test_compiled_equals_eager(names: list[str], backend: str, progress: float, exact: bool) -> None:
    """All in one graph: one for each takes three times as long."""
    above = torch.nextafter(torch.tensor(1.0), torch.tensor(2.0)).item()
    x = torch.cat([torch.randn(4, 58), torch.tensor([0.0, -0.0, 1.0, -1.0, above, -above]).expand(4, 6)], 1)
    x = x if exact else x.double()
    grad = torch.randn_like(x)
    made = {name: ready(QUANTIZERS[name][0], x)[0] for name in names}
    made = {name: each for name, each in made.items() if entry_of(each).exact == exact}
    for quantizer in made.values():
        quantizer.set_progress_(progress, x.clone())

    def all_of_them(
        x: Tensor, grad: Tensor, tensors: dict[str, tuple[Tensor, ...]]
    ) -> dict[str, tuple[Tensor, tuple[Tensor | None, ...]]]:
        return {
            name: (quantizer.quantize(x, *tensors[name]), quantizer.backward(grad.clone(), x, *tensors[name]))
            for name, quantizer in made.items()
        }

    tensors = {name: handed(quantizer) for name, quantizer in made.items()}
    eager = all_of_them(x, grad, tensors)
    compiled = torch.compile(all_of_them, fullgraph=True, backend=backend)(x, grad, tensors)
    for name, (x_q, grads) in eager.items():
        near = partial(torch.testing.assert_close, msg=partial("{}: {}".format, name))
        near(compiled[name][0], x_q, rtol=0 if exact else 1e-13, atol=0 if exact else 1e-14)
        # Gradients of learned tensors are sums of 256 numbers in any case.
        for one, other in zip(compiled[name][1], grads, strict=True):
            near(one, other, rtol=1e-5 if exact else 1e-12, atol=1e-6 if exact else 1e-13)


@ALL
def test_inputs_are_quantized_each_by_itself_or_it_says_so(make: Make, levels: float) -> None:
    x = torch.randn(2, 6, 8, 8)
    others = x * 7
    others[:, :, 0] = x[:, :, 0]
    quantizer, _ = ready(make, x)
    tensors = handed(quantizer.eval())
    of_inputs = quantizer.roles == ("input",) or isinstance(quantizer, Sign | FP8)  # others are there for weights
    if of_inputs and quantizer.is_elementwise:
        assert quantizer.quantize(others, *tensors)[:, :, 0].equal(quantizer.quantize(x, *tensors)[:, :, 0])
