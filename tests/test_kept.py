"""What quantizers keep of an input for a lean layer: it stands for the input, bit for bit, in few bits."""

import copy
import math
from functools import partial
from typing import Any

import pytest
import torch
from methods import QUANTIZERS, Make, handed, ready, tensor_dtypes
from settings import mostly_nightly
from test_lean import assert_same, gradients
from torch import Tensor, nn

import qconv
from qconv import schemes
from qconv.kernels import onednn
from qconv.quantizers import (
    PACT,
    TWN,
    AdaBinInput,
    DoReFaWeight,
    HardClip,
    LSQInput,
    Quantizer,
    ReActNetInput,
    Sign,
    Stages,
    Straight,
    Whole,
    kept_codes,
)
from qconv.quantizers.form import Form
from qconv.quantizers.kept_codes import Coding


class OwnParts(PACT):
    """Keeps codes of numbers that are not those of `whole`."""

    @property
    def coding(self) -> Coding:
        return super().coding._replace(low=-128)

    def parts(self, x: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        values, scale = super().parts(x, *tensors)
        return values - 128, scale

    def joined(self, form: Form, values: Tensor, *others: Tensor) -> Whole | Tensor:
        return super().joined(form, values + 128, *others)


MORE: dict[str, tuple[Make, float]] = {
    "ReActNetInput(HardClip)": (partial(ReActNetInput, HardClip), 2),
    "ReActNetInput(Straight)": (partial(ReActNetInput, Straight), 2),
    "AdaBinInput(HardClip)": (partial(AdaBinInput, surrogate=HardClip), 2),
    "OwnParts": (partial(OwnParts, 8), 256),
    "Stages(inputs)": (partial(Stages, [(0, partial(LSQInput, 4)), (0.5, PACT)]), 16),
}
INPUTS = {name: case for name, case in (QUANTIZERS | MORE).items() if "input" in case[0]().roles}
WEIGHTS = {name: case for name, case in QUANTIZERS.items() if "weight" in case[0]().roles}
ALL = pytest.mark.parametrize(("make", "levels"), INPUTS.values(), ids=INPUTS.keys())
SHAPES = (7, 66), (3, 66, 5), (2, 66, 3, 4)
WIDTHS = 1, 2, 4, 8
"""The bits that a kept code may have."""


def ends_and_ties(quantizer: Quantizer, tensors: tuple[Tensor, ...]) -> list[float]:
    """Values at which something changes: levels, half way between them, and beyond their ends."""
    values = [0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 1.3, 1e-6, -1e-6, 50.0, -50.0, 1e30, -1e30, math.inf, -math.inf]
    levels = quantizer.levels(*tensors)
    if levels is None:
        return values
    offset = 0 if levels.offset is None else levels.offset.flatten()[0].item()
    codes = torch.linspace(float(levels.low), float(levels.high), min(2 * (levels.high - levels.low) + 1, 99))
    return values + [code * levels.scale.flatten()[0].item() + offset for code in codes.tolist()]


def example(make: Make, shape: tuple[int, ...], dtype: torch.dtype, of_tensors: torch.dtype) -> Any:
    """A quantizer that has seen data, its tensors, and an input with all that is special."""
    torch.manual_seed(0)
    x = torch.randn(shape).mul(1.5).to(dtype)
    quantizer, tensors = ready(make, x, of_tensors)
    special = torch.tensor(ends_and_ties(quantizer, tensors), dtype=torch.float64)
    x.view(-1)[: len(special)] = special.to(dtype)[: x.numel()]
    if not quantizer.quantize(x, *tensors).isfinite().all():  # its scale is that of the data
        x.clamp_(-50, 50)
    return quantizer, tensors, x


def count_of(quantizer: Quantizer, levels: float) -> float:
    """The values that one element may take, of those of a filter."""
    return 2**quantizer.bits if getattr(quantizer, "per_channel", False) else levels


def same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and one.nan_to_num(7).equal(other.nan_to_num(7))


def check(quantizer: Quantizer, tensors: tuple[Tensor, ...], x: Tensor, groups: int) -> tuple[Tensor, ...] | None:
    """Raise unless what is kept stands for ``x``; return it."""
    form = Form.of(x, groups)
    with torch.no_grad():
        kept = quantizer.keep(x, form, *tensors)
    if kept is None:
        return None
    restored = quantizer.restore(kept, form, *tensors)
    if isinstance(restored, Whole):
        expected = quantizer.whole(x, *tensors)
        assert expected is not None
        assert expected.values.equal(restored.values.to(expected.values.dtype))
        assert (expected.scale is None) == (restored.scale is None)
        assert expected.scale is None or restored.scale is None or same(expected.scale, restored.scale)
        assert restored.values.stride() == x.stride() or x.numel() == 0
        check_bytes(quantizer, tensors, x, form, kept)
    else:
        assert not quantizer.has_whole or quantizer.whole(x, *tensors) is None
        assert same(quantizer.quantize(x, *tensors), restored)
    grad = torch.randn_like(x)
    for of_grad in () if quantizer.needs_input else (grad, grad.contiguous()):
        expected = quantizer.backward(of_grad.clone(), x, *tensors)
        found = quantizer.backward_kept(of_grad.clone(), kept, form, *tensors)
        for one, other in zip(expected, found, strict=True):
            assert (one is None) == (other is None)
            assert one is None or other is None or same(one, other)
    return kept


def check_bytes(
    quantizer: Quantizer, tensors: tuple[Tensor, ...], x: Tensor, form: Form, kept: tuple[Tensor, ...]
) -> None:
    """Raise unless bytes are the same from what is kept."""
    low, high = quantizer.whole_ends or (0, 256)
    if high - low > 255 or x.isnan().any():
        return
    of_x = quantizer.whole_bytes(x, *tensors, offset=-low)
    restored = quantizer.restore_bytes(kept, form, *tensors, offset=-low)
    assert of_x is not None
    assert restored is not None
    assert of_x.values.equal(restored.values)


@ALL
@pytest.mark.parametrize(
    "dtype", mostly_nightly([torch.float32, torch.bfloat16, torch.float64], {torch.float32}), ids=str
)
def test_it_stands_for_the_input(make: Make, levels: float, dtype: torch.dtype) -> None:
    for shape in SHAPES:
        for of_tensors in tensor_dtypes(make, dtype):
            quantizer, tensors, x = example(make, shape, dtype, of_tensors)
            for given in (x, *([x.to(memory_format=torch.channels_last)] if x.ndim == 4 else [])):
                for groups in (1, 2):
                    kept = check(quantizer, tensors, given, groups)
                    assert (kept is None) == (count_of(quantizer, levels) > 2 ** WIDTHS[-1])


@ALL
def test_it_is_small(make: Make, levels: float) -> None:
    """Codes as wide as they must be, a bit for where the gradient passes, and scales."""
    quantizer, tensors, x = example(make, (2, 64, 16, 16), torch.float32, torch.float32)
    kept = check(quantizer, tensors, x, 1)
    if kept is None:
        return
    width = next(width for width in WIDTHS if count_of(quantizer, levels) <= 2**width)
    assert kept[0].nbytes * 8 == width * x.numel()
    others = sum(tensor.nbytes for tensor in kept[1:])
    assert others <= x.numel() / 8 + 2 * 4 * x.shape[1]
    assert quantizer.needs_input <= (others <= 2 * 4 * x.shape[1])


@ALL
def test_where_all_passes_no_bits_say_so(make: Make, levels: float) -> None:
    quantizer, tensors, _ = example(make, (2, 64, 4, 4), torch.float32, torch.float32)
    x = torch.rand(2, 64, 4, 4).mul(0.5).add(0.1)
    kept = check(quantizer, tensors, x, 1)
    assert kept is None or all(tensor.numel() <= 64 for tensor in kept[1:])


@ALL
def test_nan_and_empty_inputs(make: Make, levels: float) -> None:
    for shape in ((0, 4), (0, 4, 5), (2, 4, 0), (2, 4, 0, 3)):
        quantizer, _ = ready(make, torch.randn(2, *shape[1:2], 5))
        check(quantizer, handed(quantizer), torch.randn(shape), 2)
    quantizer, tensors, x = example(make, (3, 4, 7), torch.float32, torch.float32)
    x[1, 2] = math.nan
    form = Form.of(x)
    kept = quantizer.keep(x, form, *tensors)
    if kept is None:
        return
    found, whole, x_q = quantizer.restore(kept, form, *tensors), x.isfinite(), quantizer.quantize(x, *tensors)
    values = found if isinstance(found, Tensor) else found.values * (1 if found.scale is None else found.scale)
    is_apart = torch.equal(x_q[whole], quantizer.quantize(x.nan_to_num(0), *tensors)[whole])  # NaN spoils itself alone
    assert not is_apart or torch.equal(values[whole].to(x.dtype), x_q[whole])
    if not quantizer.needs_input:
        grad = torch.randn_like(x)
        grads = [quantizer.backward_kept(grad, kept, form, *tensors)[0], quantizer.backward(grad, x, *tensors)[0]]
        if is_apart and all(each is not None for each in grads):
            torch.testing.assert_close(*(each[whole] for each in grads))


def test_stages_keep_what_their_stage_keeps() -> None:
    quantizer, _, x = example(MORE["Stages(inputs)"][0], (2, 64, 4, 4), torch.float32, torch.float32)
    assert quantizer.needs_input
    quantizer.set_progress_(0.7, None)
    quantizer.initialize(x)
    assert not quantizer.needs_input
    assert check(quantizer, handed(quantizer), x, 1) is not None


class OwnValues(PACT):
    def whole(self, x: Tensor, *tensors: Tensor) -> Whole:
        return Whole(x + 0.1)


class OwnQuantize(Sign):
    def quantize(self, x: Tensor, *tensors: Tensor) -> Tensor:
        return super().quantize(x) / 2


class OwnGradient(PACT):
    def backward(self, grad: Tensor, x: Tensor, *tensors: Tensor) -> tuple[Tensor | None, ...]:
        return grad * x, torch.zeros_like(tensors[0])


class OwnOfBits(Sign):
    def backward(self, grad: Tensor, x: Tensor, *tensors: Tensor) -> tuple[Tensor | None, ...]:
        return (grad * x,)


@pytest.mark.parametrize(("kind", "keeps"), [(OwnValues, 0), (OwnQuantize, 0), (OwnGradient, 1), (OwnOfBits, 1)])
def test_a_subclass_keeps_nothing_that_is_wrong(kind: type[Quantizer], keeps: bool) -> None:
    quantizer, x = kind(), torch.randn(2, 6, 5)
    assert (check(quantizer, handed(quantizer), x, 1) is not None) == keeps
    assert quantizer.needs_input or not keeps


@pytest.mark.parametrize(("make", "levels"), WEIGHTS.values(), ids=WEIGHTS.keys())
def test_which_weights_are_binary(make: Make, levels: float) -> None:
    """The values are +1 and −1, and there is one scale or one for each filter: the layer runs on bits."""
    x = torch.cat([torch.randn(5, 6, 3, 3), torch.zeros(1, 6, 3, 3), torch.full((1, 6, 3, 3), -0.7)])
    quantizer, tensors = ready(make, x)
    whole = quantizer.whole(x, *tensors) if quantizer.has_whole else None
    if whole is None:
        assert not quantizer.is_binary
        return
    by_filter = whole.scale is None or whole.scale.numel() == 1 or whole.scale.shape == (7, 1, 1, 1)
    assert quantizer.is_binary == (by_filter and bool(whole.values.abs().eq(1).all()))


@pytest.mark.skipif(not hasattr(torch.ops.onednn, "qconv_pointwise"), reason="torch without oneDNN")
@pytest.mark.parametrize(
    "scheme",
    [
        qconv.Scheme("own parts", partial(OwnParts, 8), partial(DoReFaWeight, 4)),
        qconv.Scheme("signs and ternary weights", ReActNetInput, TWN),
        schemes.minmax(4, 4, input_symmetric=True),
    ],
    ids=str,
)
def test_lean_layers_of_bits_that_are_not_the_whole_numbers(
    scheme: qconv.Scheme, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batch norm, which computes the layer's output again in integers, and the gradients read them right."""
    torch.manual_seed(0)
    layer = qconv.QConv2d(64, 64, 3, padding=1, bias=False, scheme=scheme)
    model = nn.Sequential(layer, nn.BatchNorm2d(64), nn.Hardtanh())
    input = torch.randn(16, 64, 16, 16)
    model(input)
    monkeypatch.setattr(onednn, "has_fast_integers", lambda: False)
    expected = gradients(copy.deepcopy(model), input)
    monkeypatch.setattr(onednn, "has_fast_integers", lambda: True)
    assert_same(gradients(qconv.lean(model, exact=True), input), expected)


@pytest.mark.parametrize("quantizer", [LSQInput(4), LSQInput(3, signed=True), PACT(2)], ids=str)
def test_no_value_is_read_where_reading_waits(quantizer: Quantizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: NaN is not looked for, and the codes of numbers are the same."""
    x = torch.randn(2, 6, 4, 3)
    form, tensors = Form.of(x), tuple(tensor.detach() for tensor in quantizer.tensors())
    wanted, with_nan = quantizer.keep(x, form, *tensors), x.clone()
    with_nan[0, 0, 0, 0] = torch.nan
    assert wanted is not None
    assert quantizer.keep(with_nan, form, *tensors) is None
    monkeypatch.setattr(kept_codes, "is_plain_cpu", lambda x: False)
    found, other = quantizer.keep(x, form, *tensors), quantizer.keep(with_nan, form, *tensors)
    assert found is not None
    assert other is not None
    assert torch.equal(found[0], wanted[0])
    assert torch.equal(other[0].flatten()[1:], wanted[0].flatten()[1:])
