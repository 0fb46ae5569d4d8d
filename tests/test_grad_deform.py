"""The gradients of deformable convolution against torchvision's autograd, slow formulas, and finite differences."""

import sys
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torchvision.ops import deform_conv2d

from qconv.grad import deform as grad_deform
from qconv.grad.deform import (
    deform_conv2d_backward,
    deform_conv2d_input,
    deform_conv2d_mask,
    deform_conv2d_offset,
    deform_conv2d_weight,
)

Pair = tuple[int, int]
NAMES = ("input", "weight", "offset", "mask", "bias")


class Case(NamedTuple):
    """One deformable convolution."""

    groups: int = 1
    offset_groups: int = 1
    stride: Pair = (1, 1)
    padding: Pair = (0, 0)
    dilation: Pair = (1, 1)
    kernel: Pair = (3, 3)
    size: Pair = (5, 6)
    channels: Pair = (4, 6)
    batch: int = 2
    masked: bool = True

    @property
    def geometry(self) -> dict[str, Any]:
        return dict(stride=self.stride, padding=self.padding, dilation=self.dilation)

    @property
    def output(self) -> Pair:
        height, width = (
            (self.size[i] + 2 * self.padding[i] - self.dilation[i] * (self.kernel[i] - 1) - 1) // self.stride[i] + 1
            for i in range(2)
        )
        return height, width

    def tensors(self, dtype: torch.dtype = torch.float64) -> list[Any]:
        """grad_output, input, weight, offset and mask; no sampling point is closer than 0.05 to a whole number."""
        taps = self.kernel[0] * self.kernel[1]
        grad_output = torch.randn(self.batch, self.channels[1], *self.output, dtype=torch.float64)
        input = torch.randn(self.batch, self.channels[0], *self.size, dtype=torch.float64)
        weight = torch.randn(self.channels[1], self.channels[0] // self.groups, *self.kernel, dtype=torch.float64)
        offset_size = self.batch, 2 * taps * self.offset_groups, *self.output
        offset = torch.randint(-3, 3, offset_size) + torch.empty(offset_size, dtype=torch.float64).uniform_(0.05, 0.95)
        mask = torch.rand(self.batch, taps * self.offset_groups, *self.output, dtype=torch.float64)
        drawn = [tensor.to(dtype) for tensor in (grad_output, input, weight, offset, mask)]
        return drawn if self.masked else [*drawn[:4], None]


CASES = {
    "plain": Case(),
    "v1": Case(masked=False),
    "groups": Case(groups=2),
    "offset groups": Case(offset_groups=2),
    "groups and more offset groups": Case(groups=2, offset_groups=4, channels=(4, 2)),
    "depthwise": Case(groups=4, channels=(4, 4), offset_groups=2, masked=False),
    "strided": Case(stride=(2, 1), padding=(1, 2)),
    "dilated": Case(dilation=(2, 1), padding=(2, 0), kernel=(3, 2)),
    "rectangular": Case(kernel=(1, 4), padding=(0, 2), stride=(1, 3), offset_groups=2),
    "pointwise": Case(kernel=(1, 1), padding=(1, 0), groups=2, masked=False),
    "one output": Case(kernel=(5, 6), batch=1),
    "many samples": Case(batch=37, size=(3, 4), channels=(2, 2)),  # torchvision works on blocks of at most 32
    "everything": Case(2, 2, (2, 3), (3, 1), (3, 2), (2, 3), (7, 9), (8, 6), 3),
}
EVERY_CASE = pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))


def by_formula(
    case: Case, grad_output: Tensor, input: Tensor, weight: Tensor, offset: Tensor, mask: Tensor | None
) -> tuple[Tensor, list[Tensor]]:
    """Output without bias, and the five gradients: the formulas of `qconv.grad_deform` over all pairs of points."""
    n, c_in, *size = input.shape
    groups, taps, d = case.groups, case.kernel[0] * case.kernel[1], case.offset_groups
    moved = offset.reshape(n, d, taps, 2, *case.output)
    factors = torch.ones_like(moved[:, :, :, 0]) if mask is None else mask.reshape(n, d, taps, *case.output)

    hats, slopes = [], []  # of y and x, (n, d, tap, output y, output x, input position)
    for axis in range(2):
        first = torch.arange(case.output[axis]) * case.stride[axis] - case.padding[axis]
        first = first[:, None] if axis == 0 else first[None, :]
        tap = torch.arange(taps) // case.kernel[1] if axis == 0 else torch.arange(taps) % case.kernel[1]
        points = first + (tap * case.dilation[axis])[:, None, None] + moved[:, :, :, axis]
        distance = torch.arange(size[axis]) - points[..., None]
        hats.append((1 - distance.abs()).clamp(min=0))
        rises, falls = (distance > 0) & (distance <= 1), (distance > -1) & (distance <= 0)  # as the point moves right
        slopes.append(rises.to(input.dtype) - falls.to(input.dtype))

    pictures = input.reshape(n, d, c_in // d, *size)
    filters = weight.reshape(groups, weight.shape[0] // groups, weight.shape[1], taps)
    grads = grad_output.reshape(n, groups, -1, *case.output)
    sample = partial(torch.einsum, "ndkyxh,ndkyxw,ndchw->ndckyx")
    at = sample(hats[0], hats[1], pictures)
    sampled = (at * factors[:, :, None]).reshape(n, groups, c_in // groups, taps, *case.output)
    output = torch.einsum("gock,ngckyx->ngoyx", filters, sampled).reshape(grad_output.shape)

    back = torch.einsum("gock,ngoyx->ngckyx", filters, grads).reshape(at.shape)
    masked = back * factors[:, :, None]
    grad_input = torch.einsum("ndkyxh,ndkyxw,ndckyx->ndchw", hats[0], hats[1], masked).reshape(input.shape)
    grad_weight = torch.einsum("ngoyx,ngckyx->gock", grads, sampled).reshape(weight.shape)
    along = sample(slopes[0], hats[1], pictures), sample(hats[0], slopes[1], pictures)
    grad_offset = torch.stack([(masked * slope).sum(2) for slope in along], 3).reshape(offset.shape)
    grad_mask = (back * at).sum(2).reshape(n, d * taps, *case.output)
    return output, [grad_input, grad_weight, grad_offset, grad_mask, grad_output.sum((0, 2, 3))]


def check_close(given: Any, expected: Any) -> None:
    for name, g, e in zip(NAMES, given, expected, strict=True):
        torch.testing.assert_close(g, e, rtol=1e-12, atol=1e-12, msg=lambda text, name=name: f"grad_{name}: {text}")


def expected_of(case: Case, tensors: list[Any]) -> list[Tensor | None]:
    grads: list[Tensor | None] = [*by_formula(case, *tensors)[1]]
    return [None if name == "mask" and not case.masked else g for name, g in zip(NAMES, grads, strict=True)]


@EVERY_CASE
def test_against_the_formulas(case: Case) -> None:
    tensors = case.tensors()
    check_close(deform_conv2d_backward(*tensors, **case.geometry), expected_of(case, tensors))


@EVERY_CASE
def test_against_autograd_of_torchvision(case: Case) -> None:
    tensors = case.tensors()
    found = deform_conv2d_backward(*tensors, **case.geometry)
    grad_output, *leaves = tensors
    leaves: list[Any] = [None if leaf is None else leaf.requires_grad_() for leaf in leaves]
    input, weight, offset, mask = leaves
    bias = torch.randn(case.channels[1], dtype=torch.float64, requires_grad=True)
    output = deform_conv2d(input, offset, weight, bias, mask=mask, **case.geometry)
    torch.testing.assert_close(output - bias[:, None, None], by_formula(case, *tensors)[0], rtol=1e-12, atol=1e-12)
    expected = torch.autograd.grad(output, [leaf for leaf in (*leaves, bias) if leaf is not None], grad_output)
    assert (found[3] is None) == (mask is None)
    assert all(map(torch.equal, [grad for grad in found if grad is not None], expected))


@pytest.mark.parametrize("case", [CASES["plain"], CASES["v1"], CASES["everything"]], ids=["plain", "v1", "everything"])
def test_one_by_one(case: Case) -> None:
    grad_output, input, weight, offset, mask = tensors = case.tensors()
    expected = expected_of(case, tensors)
    found = [
        deform_conv2d_input(input.shape, weight, offset, grad_output, **case.geometry, mask=mask),
        deform_conv2d_weight(input, weight.shape, offset, grad_output, **case.geometry, mask=mask),
        deform_conv2d_offset(input, weight, offset, grad_output, **case.geometry, mask=mask),
        deform_conv2d_mask(input, weight, offset, grad_output, **case.geometry) if case.masked else None,
        expected[4],
    ]
    check_close(found, expected)


def test_at_whole_numbers_the_slope_is_the_one_to_the_right() -> None:
    """Where pixels are hit exactly, as with offsets of 0, and at the first and last point outside the image."""
    case = Case(offset_groups=2, padding=(1, 1), size=(4, 4))
    tensors = case.tensors()
    tensors[3] = torch.randint(-3, 4, tensors[3].shape).double()
    check_close(deform_conv2d_backward(*tensors, **case.geometry), expected_of(case, tensors))
    tensors[3] = torch.zeros_like(tensors[3])
    check_close(deform_conv2d_backward(*tensors, **case.geometry), expected_of(case, tensors))


def test_without_offsets_it_is_a_convolution() -> None:
    case = Case(groups=2, stride=(2, 1), padding=(1, 2), dilation=(1, 2))
    grad_output, input, weight, offset, _ = case.tensors()
    found = deform_conv2d_backward(grad_output, input, weight, offset * 0, None, **case.geometry)
    expected = torch.ops.aten.convolution_backward(
        grad_output, input, weight, [6], case.stride, case.padding, case.dilation, False, [0, 0], 2, [True] * 3
    )
    torch.testing.assert_close((found[0], found[1], found[4]), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("output_mask", list(product([False, True], repeat=5)), ids=str)
def test_what_is_asked_for(output_mask: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors: dict[str, Any] = dict(zip(("grad_output", *NAMES), Case(batch=1, size=(3, 3)).tensors(), strict=False))
    expected = deform_conv2d_backward(**tensors)
    if not any(output_mask[:4]):
        monkeypatch.setattr(grad_deform, "_operator", None)  # the sum of the bias needs none
    found = deform_conv2d_backward(**tensors, output_mask=output_mask)
    for given, reference, asked in zip(found, expected, output_mask, strict=True):
        assert (given is not None) == asked
        assert given is None or (reference is not None and given.allclose(reference, rtol=1e-12))


@pytest.mark.parametrize("masked", [True, False])
def test_empty_batch(masked: bool) -> None:
    case = Case(batch=0, offset_groups=2, masked=masked)
    tensors = case.tensors(torch.float32)
    grads = deform_conv2d_backward(*tensors, **case.geometry)
    sizes = [None if grad is None else grad.shape for grad in grads]
    assert sizes == [None if t is None else t.shape for t in tensors[1:]] + [torch.Size([6])]
    assert not any(grad.any() for grad in grads if grad is not None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_rounds_once(dtype: torch.dtype) -> None:
    case = CASES["everything"]
    tensors = case.tensors(dtype)
    exact = expected_of(case, [None if tensor is None else tensor.double() for tensor in tensors])
    for given, reference in zip(deform_conv2d_backward(*tensors, **case.geometry), exact, strict=True):
        assert given is not None
        assert reference is not None
        assert given.dtype == dtype
        error = (given.double() - reference).abs() - 0.51 * torch.finfo(dtype).eps * reference.abs()
        assert error.max() <= 2e-6 * reference.abs().max()


def test_memory_formats_and_expanded_gradients() -> None:
    case = CASES["groups"]
    tensors = case.tensors()
    tensors[0] = torch.ones((), dtype=torch.float64).expand(tensors[0].shape)
    other = [tensor.to(memory_format=torch.channels_last) for tensor in tensors]
    check_close(deform_conv2d_backward(*other, **case.geometry), expected_of(case, tensors))


def test_offsets_far_away_and_nan() -> None:
    """A sample far outside is 0 and so is the gradient of its offset; one at no place is NaN, and so is its pixel."""
    case = Case()
    grad_output, input, weight, offset, mask = case.tensors()
    offset[0, 0, 0, 0] = 1e30
    far = deform_conv2d_backward(grad_output, input, weight, offset, mask)
    assert all(grad is not None and grad.isfinite().all() for grad in far)
    assert far[2] is not None
    assert (far[2][0, :2, 0, 0] == 0).all()
    offset[0, 0, 0, 0] = torch.nan
    _, grad_weight, grad_offset, grad_mask, _ = deform_conv2d_backward(grad_output, input, weight, offset, mask)
    assert grad_weight is not None
    assert grad_weight.isnan().all()
    for found, before in ((grad_offset, far[2]), (grad_mask, far[3])):
        assert found is not None
        assert before is not None
        assert found[0, :, 0, 0].isnan().all()
        found[0, :, 0, 0] = before[0, :, 0, 0]
        assert torch.equal(found, before)


@pytest.mark.parametrize("masked", [True, False])
def test_compiles_to_one_graph(masked: bool) -> None:
    case = Case(groups=2, masked=masked)
    tensors = case.tensors()
    compiled = torch.compile(deform_conv2d_backward, fullgraph=True, backend="aot_eager")
    check_close(compiled(*tensors, **case.geometry), expected_of(case, tensors))


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    # what differs from a correct call, and the message
    "stride": (dict(stride=0), ValueError, r"stride \(=0\) must be at least 1"),
    "padding": (dict(padding=(1, 1, 1)), ValueError, r"padding \(=\(1, 1, 1\)\) must be an int or 2 ints"),
    "dilation": (dict(dilation=(1, -1)), ValueError, r"dilation \(=\(1, -1\)\) must be at least 1"),
    "input's dimensions": (dict(input=torch.ones(4, 5, 6)), ValueError, r"input's size \(=\(4, 5, 6\)\) must have 4"),
    "channels": (
        dict(input=torch.ones(2, 5, 5, 6)),
        ValueError,
        r"weight's size \(=\(6, 4, 3, 3\)\) must have a divisor of in_channels \(=5\) in dimension 1",
    ),
    "no channels": (dict(weight=torch.ones(6, 0, 3, 3)), ValueError, r"weight's size .* divisor of in_channels \(=4\)"),
    "groups": (dict(weight=torch.ones(6, 1, 3, 3)), ValueError, r"groups \(=4\) must divide out_channels \(=6\)"),
    "small input": (dict(input=torch.ones(2, 4, 2, 6)), ValueError, r"is too small for .* its output would be 0×4"),
    "offset's channels": (dict(offset=torch.ones(2, 19, 3, 4)), ValueError, "must have 2·9·D channels for kernel_"),
    "few offsets": (dict(offset=torch.ones(2, 17, 3, 4)), ValueError, r"offset's size \(=\(2, 17, 3, 4\)\) must h"),
    "offset groups": (dict(offset=torch.ones(2, 54, 3, 4)), ValueError, r"a D that divides in_channels \(=4\)"),
    "offset's image": (dict(offset=torch.ones(2, 18, 4, 4)), ValueError, r"must be \(2, 18, 3, 4\), as the output's"),
    "offset's batch": (dict(offset=torch.ones(1, 18, 3, 4)), ValueError, r"offset's size .* must be \(2, 18, 3, 4\)"),
    "mask's channels": (dict(mask=torch.ones(2, 18, 3, 4)), ValueError, r"mask's .* must be \(2, 9, 3, 4\) for off"),
    "mask's batch": (dict(mask=torch.ones(1, 9, 3, 4)), ValueError, r"mask's size .* must be \(2, 9, 3, 4\)"),
    "grad_output": (dict(grad_output=torch.ones(2, 6, 3, 3)), ValueError, r"grad_output's size .* \(2, 6, 3, 4\)"),
    "dtype": (dict(mask=torch.ones(2, 9, 3, 4).double()), TypeError, r"mask's dtype .* must be grad_output's"),
    "integers": (dict(input=torch.ones(2, 4, 5, 6).int()), TypeError, r"input's dtype .* must be floating point"),
    "device": (dict(weight=torch.ones(6, 4, 3, 3, device="meta")), ValueError, r"weight's device \(=meta\) must be"),
}


@pytest.mark.parametrize(("wrong", "error", "message"), BAD.values(), ids=list(BAD))
def test_bad_input(wrong: dict[str, Any], error: type[Exception], message: str) -> None:
    right = dict(zip(("grad_output", "input", "weight", "offset", "mask"), Case().tensors(torch.float32), strict=True))
    with pytest.raises(error, match=message):
        deform_conv2d_backward(**{**right, **wrong})


def test_bad_sizes_where_only_a_size_is_given() -> None:
    grad_output, input, weight, offset, _ = Case().tensors()
    with pytest.raises(ValueError, match=r"input's size .* must have 4 dimensions"):
        deform_conv2d_input((4, 5, 6), weight, offset, grad_output)
    with pytest.raises(ValueError, match=r"weight's size .* must have 4 dimensions"):
        deform_conv2d_weight(input, (4, 3, 3), offset, grad_output)
    with pytest.raises(ValueError, match=r"offset's size .* must have 4 dimensions"):
        deform_conv2d_mask(input, weight, offset[0], grad_output)


def test_without_torchvision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(ImportError, match=r'needs torchvision: pip install "qconv\[train\]"'):
        deform_conv2d_backward(*Case().tensors())


def test_on_cuda_it_is_not_deterministic() -> None:
    cuda = torch.device("cuda")
    grad_deform._alert_not_deterministic(cuda)
    try:
        torch.use_deterministic_algorithms(True)
        grad_deform._alert_not_deterministic(torch.device("cpu"))
        with pytest.raises(RuntimeError, match=r"deformable convolution on cuda is not deterministic"):
            grad_deform._alert_not_deterministic(cuda)
        torch.use_deterministic_algorithms(True, warn_only=True)
        with pytest.warns(UserWarning, match="is not deterministic"):
            grad_deform._alert_not_deterministic(cuda)
    finally:
        torch.use_deterministic_algorithms(False)
