"""Convolutions of numbers with signs, and gradients of binary convolutions: definitions and kernels against torch."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gradient_cases import Case, cases
from settings import emulated, emulated_module, instruction_set, nbytes, threads
from torch.utils.flop_counter import FlopCounterMode

from qconv.kernels import flops as flops, look_up, native
from qconv.kernels.sign_conv import sign_conv2d
from qconv.kernels.sign_gradients import sign_grad_input, sign_grad_weight
from qconv.kernels.sizes import Sizes
from qconv.kernels.window import Window

ops = torch.ops.qconv
SETS = [name for name in native.instruction_sets() if name != "portable"]
PADDED = Window(padding=(1, 1, 1, 1))
PAYING = Sizes(8, (64, 64), (16, 16), (3, 3), PADDED)


ODD = Sizes(2, (6, 4), (5, 4), (3, 2), Window((2, 1), (0, 1, 2, 1), (1, 2), 2, -1))
Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""The forward, the gradient of the input and that of the weight."""


def by_look_up(case: Case, name: str) -> Results:
    with instruction_set(name):
        output = look_up.look_up_conv2d(*case.of_forward(), always=True)
        of_input = look_up.look_up_grad_input(*case.of_input(), always=True)
        of_weight = look_up.look_up_grad_weight(*case.of_weight(), always=True)
    assert output is not None
    assert of_input is not None
    assert of_weight is not None
    return output, of_input, of_weight


def by_operators(case: Case) -> Results:
    of_input = ops.sign_grad_input(*case.input_arguments())
    return ops.sign_conv2d(*case.forward_arguments()), of_input, ops.sign_grad_weight(*case.weight_arguments())


def by_definitions(case: Case) -> Results:
    return sign_conv2d(*case.of_forward()), sign_grad_input(*case.of_input()), sign_grad_weight(*case.of_weight())


def same(ones: Results, others: Results) -> bool:
    return all(map(torch.equal, ones, others))


@pytest.mark.parametrize("name", SETS)
def test_the_kernels_err_no_more_than_float32_does(name: str) -> None:
    for case in cases(250):
        assert max(case.errors(*by_look_up(case, name))) <= 1, case.sizes


@pytest.mark.parametrize("name", SETS)
def test_depthwise_and_strides_beyond_the_kernel(name: str) -> None:
    for window in (
        Window((1, 1), (1, 1, 1, 1), (1, 1), 40),
        Window((3, 4), (2, 0, 1, 3), (1, 1), 1),
        Window((1, 70), (0, 0, 0, 0), (1, 1), 1),  # more strips than a word has bits
        Window((2, 3), (2, 2, 2, 2), (3, 2), 4, 1),
    ):
        case = Case.of(Sizes(3, (40, 80), (9, 75), (2, 2), window), scaled=True, masked=True)
        assert max(case.errors(*by_look_up(case, name))) <= 1, window


def test_the_definitions() -> None:
    for case in cases(60, seed=1):
        assert max(case.errors(*by_definitions(case))) <= 1, case.sizes
        wanted = case.wanted(torch.float64)
        case.change(torch.Tensor.double)
        for got, exact in zip(by_definitions(case), wanted, strict=True):
            assert torch.allclose(got, exact, rtol=0, atol=1e-10)


@pytest.mark.parametrize("sizes", [PAYING, ODD])
def test_the_operators_are_either(sizes: Sizes) -> None:
    assert look_up.weight_pays(sizes) is look_up.input_pays(sizes) is (sizes is PAYING)
    case = Case.of(sizes, scaled=True, masked=True)
    output, of_input, of_weight = got = by_operators(case)
    assert max(case.errors(*got)) <= 1
    assert [each.shape for each in got] == [sizes.output, sizes.input, sizes.weight]
    assert output.is_contiguous(memory_format=torch.channels_last)
    assert of_input.is_contiguous(memory_format=torch.channels_last)
    assert of_weight.is_contiguous()


def test_a_wrong_sign_is_seen() -> None:
    case = Case.of(PAYING)
    case.filters[3, 5, 1, 1] *= -1
    case.signs[2, 7, 3, 4] *= -1
    got = by_operators(case)
    case.filters[3, 5, 1, 1] *= -1
    case.signs[2, 7, 3, 4] *= -1
    assert min(case.errors(*got)) > 100


@pytest.mark.parametrize("name", SETS)
def test_threads_change_no_bit(name: str) -> None:
    for case in cases(25, seed=2):
        alone = by_look_up(case, name)
        for count in (2, 3, 7):
            with threads(count):
                assert same(alone, by_look_up(case, name)), case.sizes


@pytest.mark.parametrize("name", SETS)
def test_dtypes_and_memory_formats(name: str) -> None:
    for case in cases(25, seed=3):
        wanted = by_look_up(case, name)
        case.change(torch.Tensor.contiguous)
        assert same(wanted, by_look_up(case, name))
        case.change(torch.Tensor.bfloat16)
        got = by_look_up(case, name)
        case.change(torch.Tensor.float)
        output, of_input, of_weight = by_look_up(case, name)
        assert same(got, (output.bfloat16(), of_input.bfloat16(), of_weight.bfloat16()))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_other_dtypes_by_the_operators(dtype: torch.dtype) -> None:
    case = Case.of(PAYING, scaled=True, masked=True)
    wanted = case.wanted(torch.float64)
    case.change(lambda x: x.to(dtype))
    for one, other in zip(by_operators(case), wanted, strict=True):
        assert one.dtype == dtype
        assert torch.allclose(one.double(), other, rtol=0, atol=8 * torch.finfo(dtype).eps * float(other.abs().max()))


@pytest.mark.parametrize("name", SETS)
def test_sums_of_whole_numbers_are_exact(name: str) -> None:
    for case in cases(25, seed=10):
        case.change(lambda x: torch.randint(-128, 128, x.shape).float())
        case.scale = None if case.scale is None else torch.randint(-7, 8, case.scale.shape) * 2.0**-3
        case.bias = None
        for got, wanted in zip(by_look_up(case, name), case.wanted(torch.float64), strict=True):
            assert torch.equal(got.double(), wanted), case.sizes


def test_an_empty_batch() -> None:
    for channels in ((64, 64), (3, 5)):
        case = Case.of(Sizes(0, channels, (8, 8), (3, 3), PADDED))
        for output, of_input, of_weight in (by_operators(case), *(by_look_up(case, name) for name in SETS)):
            assert (output.shape, of_input.shape) == (case.sizes.output, (0, channels[0], 8, 8))
            assert torch.equal(of_weight, torch.zeros(case.sizes.weight))


@pytest.mark.parametrize("name", SETS)
def test_what_is_not_finite_in_the_forward(name: str) -> None:
    """An inf becomes what its signs make of it, and with another inf or a NaN a NaN, as in torch's convolution."""
    for case in cases(50, seed=11):
        case.bias = None
        numbers = case.numbers.flatten()
        numbers[torch.randint(numbers.numel(), (4,))] = torch.tensor([torch.nan, torch.inf, -torch.inf, torch.inf])
        case.numbers = numbers.view(case.sizes.input)
        got, wanted = by_look_up(case, name)[0].double(), case.output(torch.float64)
        assert torch.equal(got.isnan(), wanted.isnan())
        assert torch.equal(got[got.isinf()], wanted[wanted.isinf()])


@pytest.mark.parametrize("name", SETS)
def test_what_is_not_finite_in_the_gradients(name: str) -> None:
    for case in cases(25, seed=4):
        case.passing = None
        grad = case.grad_output.permute(0, 2, 3, 1).flatten()
        grad[torch.randint(grad.numel(), (2,))] = torch.tensor([torch.nan, torch.inf])
        case.grad_output = grad.view(case.grad_output.permute(0, 2, 3, 1).shape).permute(0, 3, 1, 2)
        got = by_look_up(case, name)[1:]
        case.grad_output, case.scale = (~case.grad_output.isfinite()).float(), None
        for one, reached in zip(got, case.expected(torch.float64, magnitudes=True), strict=True):
            assert torch.equal(~one.isfinite(), reached > 0.5)
    case = Case.of(PAYING)
    case.grad_output[0, 0, 0, 0] = torch.nan
    _, of_input, of_weight = by_look_up(case, name)
    assert torch.equal(of_input.isnan().any(1).nonzero(), torch.tensor([[0, 0, 0], [0, 0, 1], [0, 1, 0], [0, 1, 1]]))
    assert torch.equal(of_weight.isnan().any(1).any(-1).any(-1).nonzero(), torch.tensor([[0]]))


def test_torch_finds_the_operators_well_made() -> None:
    for case in (Case.of(PAYING), Case.of(PAYING, scaled=True, masked=True), Case.of(ODD, scaled=True)):
        torch.library.opcheck(ops.sign_conv2d.default, case.forward_arguments())
        torch.library.opcheck(ops.sign_grad_input.default, case.input_arguments())
        torch.library.opcheck(ops.sign_grad_weight.default, case.weight_arguments())


def test_flops_are_those_of_the_convolution() -> None:
    case = Case.of(Sizes(4, (16, 32), (9, 8), (3, 3), Window((2, 1), (1, 1, 1, 1))))
    geometry = (2, 1), (1, 1), (1, 1), False, (0, 0), 1
    backward = partial(torch.ops.aten.convolution_backward, case.grad_output, case.signs, case.filters, None, *geometry)
    for call, by_torch in (
        (
            lambda: ops.sign_conv2d(*case.forward_arguments()),
            lambda: F.conv2d(case.numbers, case.filters, None, (2, 1), 1),
        ),
        (lambda: ops.sign_grad_input(*case.input_arguments()), lambda: backward([True, False, False])),
        (lambda: ops.sign_grad_weight(*case.weight_arguments()), lambda: backward([False, True, False])),
    ):
        with FlopCounterMode(display=False) as ours:
            call()
        with FlopCounterMode(display=False) as plain:
            by_torch()
        assert ours.get_total_flops() == plain.get_total_flops() > 0


def test_without_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "kernels", lambda: None)
    case = Case.of(PAYING, scaled=True)
    assert same(by_operators(case), by_definitions(case))
    assert look_up.look_up_conv2d(*case.of_forward(), always=True) is None
    assert look_up.look_up_grad_input(*case.of_input(), always=True) is None


CASE = Case.of(Sizes(2, (8, 6), (5, 4), (3, 3), PADDED), scaled=True, masked=True)
GIVEN: dict[str, dict[str, Any]] = {
    name: dict(zip(words.split(), arguments, strict=True))
    for name, words, arguments in (
        (
            "sign_conv2d",
            "input weight scale bias out_channels stride padding dilation padding_value",
            CASE.forward_arguments(),
        ),
        (
            "sign_grad_input",
            "grad_output weight scale in_channels input_size stride padding dilation passes",
            CASE.input_arguments(),
        ),
        (
            "sign_grad_weight",
            "grad_output input channels kernel stride padding dilation groups padding_value",
            CASE.weight_arguments(),
        ),
    )
}
PACKED, PASSES = GIVEN["sign_grad_weight"]["input"], GIVEN["sign_grad_input"]["passes"]
WRONG: dict[str, list[tuple[dict[str, Any], str]]] = {
    "sign_conv2d": [
        ({"input": CASE.numbers[0]}, r"input \(of shape \(8, 5, 4\)\) must be \(N, C, H, W\)"),
        ({"input": torch.zeros(2, 70, 5, 4)}, r"weight .* must be torch.int64, \(1, 1, 3, 3, 2, 8\)"),
        ({"input": torch.zeros(2, 8, 0, 0)}, r"kernel_size .* must not exceed the padded input"),
        ({"out_channels": 9}, r"weight .* must be torch.int64, \(1, 2, 3, 3, 1, 8\)"),
        ({"scale": torch.ones(5)}, r"scale \(torch.float32, \(5,\) on cpu\) must be torch.float32, \(6,\) on cpu"),
        ({"bias": torch.ones(6).double()}, r"bias \(torch.float64"),
        ({"stride": (0, 1)}, "stride and dilation of at least 1"),
        ({"padding": (-1, 1, 1, 1)}, "padding of at least 0"),
        ({"padding_value": 2}, r"padding_value \(=2\) must be -1, 0 or 1"),
        ({"input": CASE.numbers.long()}, r"input \(of dtype torch.int64\) must be floating point"),
    ],
    "sign_grad_input": [
        ({"grad_output": CASE.grad_output[0]}, r"grad_output \(of shape \(6, 5, 4\)\) must be \(N, C_out, H, W\)"),
        ({"grad_output": CASE.grad_output[..., :3]}, r"grad_output .* must be torch.float32, \(2, 6, 5, 4\)"),
        ({"in_channels": 65}, r"weight .* must be torch.int64, \(1, 1, 3, 3, 2, 8\)"),
        ({"in_channels": 0}, r"in_channels \(=0\) must be a positive multiple of groups \(=1\)"),
        ({"input_size": (2, 4)}, r"grad_output .* must be torch.float32, \(2, 6, 2, 4\)"),
        ({"input_size": (0, 0)}, r"kernel_size .* must not exceed the padded input"),
        ({"scale": torch.ones(6).double()}, r"scale \(torch.float64"),
        ({"passes": PASSES[:1]}, r"passes .* must be torch.int64, \(2, 5, 4, 1\)"),
        ({"stride": (0, 1)}, "stride and dilation of at least 1"),
        ({"grad_output": CASE.grad_output.long()}, r"grad_output \(of dtype torch.int64\) must be floating point"),
    ],
    "sign_grad_weight": [
        ({"input": PACKED[0]}, r"input \(of shape \(5, 4, 1\)\) what pack_signs makes"),
        ({"input": PACKED[:1]}, r"grad_output .* must be torch.float32, \(1, 6, 5, 4\)"),
        ({"input": PACKED.int()}, r"input \(torch.int32"),
        ({"channels": 70}, r"input .* must be torch.int64, \(2, 5, 4, 2\)"),
        ({"groups": 4}, r"out_channels \(=6\) must be a positive multiple of groups \(=4\)"),
        ({"groups": 0}, r"must be a positive multiple of groups \(=0\)"),
        ({"padding_value": 2}, r"padding_value \(=2\) must be -1, 0 or 1"),
    ],
}


@pytest.mark.parametrize("name", WRONG)
def test_bad_arguments(name: str) -> None:
    for changed, message in WRONG[name]:
        with pytest.raises(TypeError if "dtype" in message else ValueError, match=message):
            getattr(ops, name)(*(GIVEN[name] | changed).values())


@pytest.fixture(scope="module")
def neon(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The kernels built for another processor, and the emulator that runs them."""
    return emulated("emulated.c", ["binary.c", "look_up.c"], tmp_path_factory.mktemp("emulated"), "-O3")


def test_neon(neon: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernels get the operands of a call through a pipe; those of the forward, too."""
    sizes: list[int] = []

    def of(case: Case) -> list[torch.Tensor]:
        grad, _, weight, scale, passes = case.of_input()
        dtype, (padded, _) = grad.dtype, case.sizes.padded_but_zeros(case.numbers)
        sizes[:] = nbytes(grad, weight, scale, None, passes, case.signs.to(dtype))
        of_input = look_up.look_up_grad_input(*case.of_input(), always=True)
        sizes[:] = nbytes(grad, case.of_weight()[2], None, None, None, case.filters.to(dtype))
        of_weight = look_up.look_up_grad_weight(*case.of_weight(), always=True)
        sizes[:] = nbytes(padded, weight, scale, case.bias, None, grad)
        results = look_up.look_up_conv2d(*case.of_forward(), always=True), of_input, of_weight
        return [result for result in results if result is not None]

    module = emulated_module(neon, sizes)
    monkeypatch.setattr(native, "kernels", lambda: module)
    monkeypatch.setattr(look_up, "best", lambda: native.INSTRUCTION_SETS.index("neon"))
    for number, case in enumerate(cases(40, seed=5)):
        halves = None
        if number % 4 == 0:
            case.change(torch.Tensor.bfloat16)
            halves = of(case)
            case.change(torch.Tensor.float)
        results = of(case)
        assert max(case.errors(*results)) <= 1, case.sizes
        if halves is not None:
            assert all(torch.equal(a, b.bfloat16()) for a, b in zip(halves, results, strict=True)), case.sizes
