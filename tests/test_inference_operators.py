"""Operators of integer inference: definitions against torch's float convolution, kernels against definitions."""

import logging
import random
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from settings import each_instruction_set, emulated, emulated_module, nbytes, threads
from torch import Tensor

import qconv
from qconv import schemes
from qconv.kernels import native, native_weight, onednn, operators
from qconv.kernels.operators import pack_signs, pack_weight, unpack_signs
from qconv.kernels.window import Window

# channels, outputs, groups, kernel, stride, padding, dilation, padding value, height, width, batch
SHAPES = [
    (3, 5, 1, (3, 3), (1, 1), (1, 1, 1, 1), (1, 1), 0, 7, 9, 2),
    (64, 64, 1, (3, 3), (1, 1), (1, 1, 1, 1), (1, 1), -1, 8, 8, 1),
    (70, 40, 1, (3, 2), (2, 1), (0, 1, 2, 1), (1, 2), 0, 9, 5, 3),
    (128, 128, 2, (3, 3), (2, 2), (1, 1, 1, 1), (1, 1), 1, 8, 8, 2),
    (130, 66, 2, (1, 5), (1, 2), (2, 2, 0, 0), (1, 1), -1, 6, 10, 2),
    (8, 8, 8, (3, 3), (1, 1), (1, 1, 1, 1), (1, 1), 0, 5, 5, 2),
    (64, 20, 1, (1, 1), (2, 2), (0, 0, 0, 0), (1, 1), 0, 5, 5, 2),
    (256, 48, 1, (5, 5), (1, 1), (4, 4, 4, 4), (2, 2), 0, 9, 9, 1),
    (1, 1, 1, (1, 1), (1, 1), (0, 0, 0, 0), (1, 1), 0, 1, 1, 1),
    (64, 64, 1, (3, 3), (1, 1), (0, 0, 0, 0), (1, 1), 0, 6, 6, 0),
    (65, 9, 1, (3, 3), (3, 3), (5, 0, 0, 5), (1, 1), 0, 4, 4, 2),
    (2, 3, 1, (1, 65), (1, 1), (1, 1, 0, 0), (1, 1), 0, 2, 66, 1),
]


def scaled_of(asked: tuple[Tensor | None, ...]) -> Any:
    """What the kernels take for a scale and a bias."""
    return asked if len(asked) == 2 and asked[0] is not None else None


class Case:
    """Operands of a binary convolution, and its sums by torch's float64 convolution."""

    def __init__(self, shape: tuple[Any, ...]) -> None:
        channels, outputs, groups, kernel, stride, padding, dilation, value, height, width, batch = shape
        torch.manual_seed(0)
        self.input = torch.randn(batch, channels, height, width)
        self.input[self.input.abs() < 0.1] = -0.0
        signs = torch.where(torch.randn(outputs, channels // groups, *kernel) < 0, -1, 1)
        self.groups, self.channels = groups, (channels, outputs)
        self.window = Window(stride, padding, dilation, groups, value)
        self.weight, self.tap_sums = pack_weight(signs, groups)
        padded = F.pad(torch.where(self.input < 0, -1.0, 1.0).double(), padding, value=value)
        self.sums = F.conv2d(padded, signs.double(), None, stride, 0, dilation, groups).to(torch.int32)
        self.scale, self.bias = torch.rand(outputs), torch.randn(outputs)

    def inputs(self) -> Iterator[Tensor]:
        yield self.input
        yield self.input.contiguous(memory_format=torch.channels_last)
        yield pack_signs(self.input, self.groups)

    def operands(self, input: Tensor) -> tuple[Any, ...]:
        return input, self.weight, self.tap_sums, self.channels, self.window

    def arguments(self, input: Tensor) -> tuple[Any, ...]:
        """The operator's: the same, flat."""
        *geometry, _, value = self.window
        return input, self.weight, self.tap_sums, *self.channels, *geometry, value

    def results(self) -> Iterator[tuple[tuple[Tensor | None, ...], Tensor]]:
        """What is asked for, and what it is, from the sums."""
        for asked in ((), (self.scale,), (None, self.bias)):  # a scale or a bias alone is none
            yield asked, self.sums
        yield (self.scale, self.bias), self.sums.float() * self.scale.view(-1, 1, 1) + self.bias.view(-1, 1, 1)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_binary_convolution(shape: tuple[Any, ...]) -> None:
    case = Case(shape)
    for input in case.inputs():
        for asked, wanted in case.results():
            scaled = scaled_of(asked)
            assert torch.equal(operators.binary_conv2d(*case.operands(input), scaled=scaled), wanted)
            assert torch.equal(torch.ops.qconv.binary_conv2d(*case.arguments(input), *asked), wanted)
            for name in each_instruction_set():
                got = native.binary_conv2d(*case.operands(input), scaled=scaled)
                assert torch.equal(got, wanted) if got is not None else max(shape[3]) > 64, name


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_the_kernels_are_where_they_are_looked_for() -> None:
    assert native.kernels() is not None


@pytest.fixture(scope="module")
def neon(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The kernels built for another processor, and the emulator that runs them."""
    return emulated("emulated.c", ["binary.c", "look_up.c"], tmp_path_factory.mktemp("emulated"), "-O3")


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_binary_convolution_by_neon(shape: tuple[Any, ...], neon: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    case, sizes = Case(shape), list[int]()
    module = emulated_module(neon, sizes)
    monkeypatch.setattr(native, "kernels", lambda: module)
    for input in case.inputs():
        for asked, wanted in case.results():
            scaled = scaled_of(asked)
            sizes[:] = nbytes(input, case.weight, case.tap_sums, *(scaled or (None, None)), wanted)
            got = native.binary_conv2d(*case.operands(input), scaled=scaled)
            assert torch.equal(got, wanted) if got is not None else max(shape[3]) > 64


@pytest.mark.parametrize("count", [1, 2, 3])
def test_threads_share_images_and_rows(count: int) -> None:
    with threads(count):
        for batch in (1, 5):
            case = Case((64, 64, 1, (3, 3), (1, 1), (1, 1, 1, 1), (1, 1), 0, 31, 30, batch))
            assert torch.equal(torch.ops.qconv.binary_conv2d(*case.arguments(case.input)), case.sums)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_signs_of_other_dtypes(dtype: torch.dtype) -> None:
    case = Case(SHAPES[0])
    tiny = torch.full_like(case.input, -1e-300, dtype=torch.float64)
    input = torch.where(case.input < 0, tiny, 1.0) if dtype == torch.float64 else case.input.to(dtype)
    assert torch.equal(torch.ops.qconv.binary_conv2d(*case.arguments(input)), case.sums)


def test_signs_of_what_is_no_number() -> None:
    input = torch.tensor([-0.0, 0.0, torch.nan, torch.inf, -torch.inf, -1e-45]).view(1, 6, 1, 1)
    assert unpack_signs(pack_signs(input), 6).flatten().tolist() == [1, 1, 1, 1, -1, -1]


def test_weights_of_any_shape_are_packed_as_defined() -> None:
    draw = random.Random(0)
    torch.manual_seed(0)
    for _ in range(150):
        groups, channels = draw.choice([1, 1, 2, 3]), draw.choice([1, 3, 16, 63, 64, 65, 130])
        weight = torch.randn(groups * draw.randint(1, 20), channels, draw.randint(1, 7), draw.randint(1, 7))
        weight[weight.abs() < 0.1], weight[weight > 2] = -0.0, torch.nan
        wanted = pack_weight(torch.where(weight < 0, -1, 1), groups)
        for signs in (weight, weight.contiguous(memory_format=torch.channels_last)):
            assert all(map(torch.equal, wanted, torch.ops.qconv.pack_weight(signs, groups)))
            for name in each_instruction_set():
                packed = native_weight.pack_weight(signs, groups)
                assert packed is not None
                assert all(map(torch.equal, wanted, packed)), name
        assert all(map(torch.equal, wanted, torch.ops.qconv.pack_weight(weight.transpose(2, 3).mT.double(), groups)))
    long = torch.randn(8, 3, 1, 300)
    assert native_weight.pack_weight(long) is None
    assert all(map(torch.equal, pack_weight(long), torch.ops.qconv.pack_weight(long)))


def test_threads_share_a_weight() -> None:
    weight = torch.randn(512, 300, 3, 3)
    for count in (1, 3):
        with threads(count):
            assert all(map(torch.equal, pack_weight(weight), torch.ops.qconv.pack_weight(weight)))


@pytest.mark.nightly
def test_torch_finds_the_operators_well_made() -> None:
    case = Case(SHAPES[3])
    for input in case.inputs():
        for asked, _ in case.results():
            torch.library.opcheck(torch.ops.qconv.binary_conv2d.default, (*case.arguments(input), *asked))
    torch.library.opcheck(torch.ops.qconv.pack_signs.default, (case.input, 2))
    torch.library.opcheck(torch.ops.qconv.pack_weight.default, (torch.randn(6, 5, 3, 3), 2))


def test_a_kernel_larger_than_the_picture() -> None:
    case = Case(SHAPES[0])
    with pytest.raises(ValueError, match=r"kernel_size \(=\(3, 3\), \(3, 3\) dilated\) must not exceed the padded"):
        torch.ops.qconv.binary_conv2d(case.input[:, :, :1, :1], *case.arguments(case.input)[1:6], (0,) * 4, (1, 1), 0)


def test_operands_that_do_not_belong_together() -> None:
    if native.kernels() is None:
        pytest.skip("installed without a compiler")
    case = Case(SHAPES[1])
    weight, sums, (*geometry, _, value) = case.weight, case.tap_sums, case.window
    rest = *case.channels, *geometry, value
    call = torch.ops.qconv.binary_conv2d
    for input in (case.input[:, :3], case.input[0], pack_signs(case.input).repeat(1, 1, 1, 2)):
        with pytest.raises(ValueError, match="must be"):
            call(input, weight, sums, *rest)
    with pytest.raises(ValueError, match="must be those of 64 channels in and 9 out"):
        call(case.input, weight, sums, 64, 9, *rest[2:])
    for scale in (case.scale.double(), case.scale[:5]):
        with pytest.raises(ValueError, match=r"must be torch.float32, 64 on the CPU"):
            call(case.input, weight, sums, *rest, scale, case.bias)
    with pytest.raises(ValueError, match="must have a padding of at least 0"):
        call(case.input, weight, sums, *case.channels, (1, 1), (-1, 0, 0, 0), (1, 1), 0)


def test_without_the_kernels_it_is_said_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    case = Case(SHAPES[0])
    monkeypatch.setattr(native, "_binary", None)
    native.kernels.cache_clear()
    try:
        with caplog.at_level(logging.WARNING, logger="qconv"):
            for _ in range(2):
                assert torch.equal(torch.ops.qconv.binary_conv2d(*case.arguments(case.input)), case.sums)
    finally:
        monkeypatch.undo()
        native.kernels.cache_clear()
    (record,) = caplog.records
    assert "installed without its C kernels" in record.getMessage()


def test_the_kernels_take_no_other_call() -> None:
    module = native.kernels()
    if module is None:
        pytest.skip("installed without a compiler")
    with pytest.raises(TypeError, match=r"convolve\(\) takes 32 numbers, not 31"):
        module.convolve(*[0] * 31)
    with pytest.raises(TypeError):
        module.convolve(*[0] * 31, 1.5)
    with pytest.raises(OverflowError):
        module.convolve(*[0] * 31, 2**64)


def check_codes(codes: Tensor, weight: Tensor, window: Window, zero: int) -> None:
    """Compare oneDNN's sums with float64's, unless it is said to be wrong.

    Two products of 255 and 64 fit in 16 bits, in which processors without VNNI add them.
    """
    if not onednn.is_wrong(codes.shape, weight.shape, window, zero):
        padded = F.pad(codes.double() - zero, window.padding)
        wanted = F.conv2d(padded, weight.double(), None, window.stride, 0, window.dilation, window.groups)
        got = onednn.conv2d_codes(codes, zero, weight, window)
        assert torch.equal(got.double(), wanted), (codes.shape, weight.shape, window, zero)


@pytest.mark.parametrize(("outputs", "kernel", "padding", "zero"), [(8, 1, 2, 0), (20, 2, 2, 100), (20, 3, 3, 255)])
def test_a_grouped_kernel_that_lies_in_the_padding(outputs: int, kernel: int, padding: int, zero: int) -> None:
    codes = torch.randint(0, 256, (2, 4, 9, 8), dtype=torch.uint8)
    weight = torch.randint(-64, 65, (outputs, 1, kernel, kernel), dtype=torch.int8)
    check_codes(codes, weight, Window.of((1, 1), (padding,) * 4, (1, 1), 4), zero)


def test_random_geometries() -> None:
    draw = random.Random(0)
    for _ in range(1000):
        groups = draw.choice((1, 1, 2, 4))
        inputs, outputs = groups * draw.choice((1, 1, 2, 5, 16)), groups * draw.choice((1, 2, 5))
        (kernel, dilation, stride), sides = ([(draw.randint(1, 3), draw.randint(1, 3)) for _ in range(3)], [0] * 4)
        if draw.random() < 0.7:
            (top, left) = sides[2], sides[0] = draw.randint(0, 3), draw.randint(0, 3)
            sides = [left, left, top, top]
        size = draw.randint(1, 9), draw.randint(1, 6)
        extents = [(kernel[i] - 1) * dilation[i] + 1 - sides[2 * (1 - i)] - sides[2 * (1 - i) + 1] for i in range(2)]
        if size[0] < extents[0] or size[1] < extents[1]:
            continue
        codes = torch.randint(0, 256, (2, inputs, *size), dtype=torch.uint8)
        weight = torch.randint(-64, 65, (outputs, inputs // groups, *kernel), dtype=torch.int8)
        check_codes(codes, weight, Window.of(stride, sides, dilation, groups), draw.choice((0, 7, 128, 255)))


@pytest.mark.parametrize(
    ("inputs", "outputs", "kernel", "padding", "stride", "groups", "size"),
    [
        (24, 320, (2, 1), (0, 0), (1, 1), 8, (8, 56)),
        (16, 640, (2, 7), (0, 1), (2, 3), 16, (8, 56)),
        (6, 192, (2, 3), (0, 0), (1, 2), 3, (8, 32)),
        (6, 128, (3, 3), (1, 1), (1, 1), 2, (32, 32)),
        (16, 128, (5, 1), (1, 0), (3, 2), 2, (32, 32)),
        (8, 40, (5, 1), (2, 0), (2, 1), 1, (8, 16)),
        (16, 16, (3, 1), (1, 0), (1, 1), 1, (32, 32)),
        (32, 4, (3, 2), (1, 0), (1, 1), 1, (5, 56)),
        (40, 40, (3, 3), (1, 1), (1, 1), 40, (28, 28)),  # depthwise, in which it is right
    ],
)
@pytest.mark.parametrize("zero", [0, 1, 128, 255])
def test_where_onednn_is_wrong(
    inputs: int, outputs: int, kernel: Any, padding: Any, stride: Any, groups: int, size: Any, zero: int
) -> None:
    """Its zero points are wrong with groups, where they read beyond its memory, and where it pads."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, (2, inputs, *size), generator=generator).to(torch.uint8)
    weight = torch.randint(-7, 8, (outputs, inputs // groups, *kernel), generator=generator).to(torch.int8)
    check_codes(
        codes, weight, Window.of(stride, (padding[1], padding[1], padding[0], padding[0]), (1, 1), groups), zero
    )


@pytest.mark.parametrize(("inputs", "outputs", "groups"), [(96, 192, 4), (120, 240, 5), (64, 64, 1)])
def test_signs_in_groups(inputs: int, outputs: int, groups: int) -> None:
    torch.manual_seed(0)
    layer = qconv.QConv2d(inputs, outputs, 5, padding=2, groups=groups, bias=False, scheme=schemes.bnn())
    x = torch.randn(8, inputs, 32, 32)
    sign, weight = torch.where(x < 0, -1.0, 1.0), torch.where(layer.weight < 0, -1.0, 1.0)
    assert torch.equal(layer(x), F.conv2d(sign, weight, padding=2, groups=groups))


def test_autocast_leaves_sums_alone() -> None:
    case = Case(SHAPES[4])
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(operators.binary_conv2d(*case.operands(case.input)), case.sums)
