"""Convolutions of numbers with signs: the definition and the kernels against torch's convolution."""

import pytest
import torch
from gradient_cases import Case, cases
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from qconv.kernels import flops as flops, look_up, native
from qconv.kernels.sign_conv import sign_conv2d
from qconv.kernels.sizes import Sizes
from qconv.kernels.window import Window

ops = torch.ops.qconv
SETS = [name for name in native.instruction_sets() if name != "portable"]
PADDED = Window(padding=(1, 1, 1, 1))
PAYING = Sizes(8, (64, 64), (16, 16), (3, 3), PADDED)
ODD = Sizes(2, (6, 4), (5, 4), (3, 2), Window((2, 1), (0, 1, 2, 1), (1, 2), 2, -1))


def by_look_up(case: Case, name: str) -> Tensor:
    output = look_up.look_up_conv2d(*case.of_forward(), instruction_set=name)
    assert output is not None
    return output


@pytest.mark.parametrize("name", SETS)
def test_the_kernels_err_no_more_than_float32_does(name: str) -> None:
    for case in cases(250, seed=6):
        assert case.error(by_look_up(case, name)) <= 1, case.sizes


@pytest.mark.parametrize("name", SETS)
def test_depthwise_and_strides_beyond_the_kernel(name: str) -> None:
    for window in (
        Window((1, 1), (1, 1, 1, 1), (1, 1), 40),
        Window((3, 4), (2, 0, 1, 3), (1, 1), 1),
        Window((1, 70), (0, 0, 0, 0), (1, 1), 1),  # more strips than a word has bits
        Window((2, 3), (2, 2, 2, 2), (3, 2), 4, 1),
    ):
        case = Case.of(Sizes(3, (40, 80), (9, 75), (2, 2), window), scaled=True, masked=True)
        assert case.error(by_look_up(case, name)) <= 1, window


def test_the_definition() -> None:
    for case in cases(60, seed=7):
        assert case.error(sign_conv2d(*case.of_forward())) <= 1, case.sizes
        double = sign_conv2d(case.numbers.double(), *case.of_forward()[1:])
        assert torch.allclose(double, case.output(torch.float64), rtol=0, atol=1e-10)


@pytest.mark.parametrize("sizes", [PAYING, ODD])
def test_the_operator_is_either(sizes: Sizes) -> None:
    assert look_up.weight_pays(sizes) is (sizes is PAYING)
    case = Case.of(sizes, scaled=True, masked=True)
    output = ops.sign_conv2d(*case.forward_arguments())
    assert case.error(output) <= 1
    assert output.shape == sizes.output
    assert output.is_contiguous(memory_format=torch.channels_last)


def test_a_wrong_sign_is_seen() -> None:
    case = Case.of(PAYING)
    case.filters[3, 5, 1, 1] *= -1
    output = ops.sign_conv2d(*case.forward_arguments())
    case.filters[3, 5, 1, 1] *= -1
    assert case.error(output) > 100


@pytest.mark.parametrize("name", SETS)
def test_threads_change_no_bit(name: str) -> None:
    before = torch.get_num_threads()
    try:
        for case in cases(25, seed=8):
            torch.set_num_threads(1)
            alone = by_look_up(case, name)
            for threads in (2, 3, 7):
                torch.set_num_threads(threads)
                assert torch.equal(alone, by_look_up(case, name)), case.sizes
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("name", SETS)
def test_dtypes_and_memory_formats(name: str) -> None:
    for case in cases(25, seed=9):
        wanted = by_look_up(case, name)
        case.numbers = case.numbers.contiguous()
        assert torch.equal(wanted, by_look_up(case, name))
        case.numbers = case.numbers.bfloat16()
        got = by_look_up(case, name)
        case.numbers = case.numbers.float()
        assert torch.equal(got, by_look_up(case, name).bfloat16())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_other_dtypes_by_the_operator(dtype: torch.dtype) -> None:
    case = Case.of(PAYING, scaled=True, masked=True)
    wanted = case.output(torch.float64)
    case.numbers = case.numbers.to(dtype)
    output = ops.sign_conv2d(*case.forward_arguments())
    assert output.dtype == dtype
    assert torch.allclose(output.double(), wanted, rtol=0, atol=8 * torch.finfo(dtype).eps * float(wanted.abs().max()))


@pytest.mark.parametrize("name", SETS)
def test_sums_of_whole_numbers_are_exact(name: str) -> None:
    for case in cases(25, seed=10):
        case.numbers = torch.randint(-128, 128, case.sizes.input).float()
        case.scale = None if case.scale is None else torch.randint(-7, 8, case.scale.shape) * 2.0**-3
        case.bias = None
        assert torch.equal(by_look_up(case, name).double(), case.output(torch.float64)), case.sizes


def test_an_empty_batch() -> None:
    for channels in ((64, 64), (3, 5)):
        case = Case.of(Sizes(0, channels, (8, 8), (3, 3), PADDED))
        assert ops.sign_conv2d(*case.forward_arguments()).shape == case.sizes.output
        for name in SETS:
            assert by_look_up(case, name).shape == case.sizes.output


@pytest.mark.parametrize("name", SETS)
def test_what_is_not_finite(name: str) -> None:
    """An inf becomes what its signs make of it, and with another inf or a NaN a NaN, as in torch's convolution."""
    for case in cases(50, seed=11):
        case.bias = None
        numbers = case.numbers.flatten()
        numbers[torch.randint(numbers.numel(), (4,))] = torch.tensor([torch.nan, torch.inf, -torch.inf, torch.inf])
        case.numbers = numbers.view(case.sizes.input)
        got, wanted = by_look_up(case, name).double(), case.output(torch.float64)
        assert torch.equal(got.isnan(), wanted.isnan())
        assert torch.equal(got[got.isinf()], wanted[wanted.isinf()])


def test_torch_finds_the_operator_well_made() -> None:
    for case in (Case.of(PAYING), Case.of(PAYING, scaled=True, masked=True), Case.of(ODD, scaled=True)):
        torch.library.opcheck(ops.sign_conv2d.default, case.forward_arguments())


def test_flops_are_those_of_the_convolution() -> None:
    case = Case.of(Sizes(4, (16, 32), (9, 8), (3, 3), Window((2, 1), (1, 1, 1, 1))))
    with FlopCounterMode(display=False) as ours:
        ops.sign_conv2d(*case.forward_arguments())
    with FlopCounterMode(display=False) as plain:
        torch.nn.functional.conv2d(case.numbers, case.filters, None, (2, 1), 1)
    assert ours.get_total_flops() == plain.get_total_flops() > 0


def test_without_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "kernels", lambda: None)
    case = Case.of(PAYING, scaled=True)
    assert torch.equal(ops.sign_conv2d(*case.forward_arguments()), sign_conv2d(*case.of_forward()))
    assert look_up.look_up_conv2d(*case.of_forward(), instruction_set="avx2") is None


def test_bad_arguments() -> None:
    case = Case.of(Sizes(2, (8, 6), (5, 4), (3, 3), PADDED), scaled=True, masked=True)
    names = "input", "weight", "scale", "bias", "out_channels", "stride", "padding", "dilation", "padding_value"
    given = dict(zip(names, case.forward_arguments(), strict=True))
    for changed, message in (
        ({"input": case.numbers[0]}, r"input \(of shape \(8, 5, 4\)\) must be \(N, C, H, W\)"),
        ({"input": torch.zeros(2, 70, 5, 4)}, r"weight .* must be torch.int64, \(1, 1, 3, 3, 2, 8\)"),
        ({"input": torch.zeros(2, 8, 0, 0)}, r"kernel_size .* must not exceed the padded input"),
        ({"out_channels": 9}, r"weight .* must be torch.int64, \(1, 2, 3, 3, 1, 8\)"),
        ({"scale": torch.ones(5)}, r"scale \(torch.float32, \(5,\) on cpu\) must be torch.float32, \(6,\) on cpu"),
        ({"bias": torch.ones(6).double()}, r"bias \(torch.float64"),
        ({"stride": (0, 1)}, "stride and dilation of at least 1"),
        ({"padding": (-1, 1, 1, 1)}, "padding of at least 0"),
        ({"padding_value": 2}, r"padding_value \(=2\) must be -1, 0 or 1"),
    ):
        with pytest.raises(ValueError, match=message):
            ops.sign_conv2d(*(given | changed).values())
    with pytest.raises(TypeError, match=r"input \(of dtype torch.int64\) must be floating point"):
        ops.sign_conv2d(*(given | {"input": case.numbers.long()}).values())
