"""The Triton kernels against the definitions, on a GPU or in Triton's interpreter: a function for each test.

They run in a process whose environment says which (`test_triton`).
"""

import random
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import test_bits
import test_inference_operators
import test_norm
import test_rounding
import test_rprelu
import test_slopes
import torch
from torch import Tensor

from qconv.kernels import bits, gpu, level_rounding, norm, operators, pointwise, rprelu, sign_gradients as _registered  # noqa: F401
from qconv.kernels.gpu import (
    bits as gpu_bits,
    codes as gpu_codes,
    convolution,
    level_rounding as gpu_levels,
    passes,
    pointwise as gpu_pointwise,
    rprelu as gpu_rprelu,
)
from qconv.kernels.window import Window

binary_conv2d: Any = convolution.binary_conv2d
norm_gradients: Any = test_norm.gradients
KERNELS: dict[str, Any] = {
    **dict.fromkeys(("pack_codes", "unpack_codes"), gpu_codes),
    **dict.fromkeys(("pack_signs", "pack_passes", "pack_signs_and_passes", "clamp_and_pack"), gpu_bits),
    **dict.fromkeys(("unpack_signs", "where_passes"), gpu_bits),
}


def shape_of(rng: random.Random) -> tuple[int, ...]:
    """Few elements, about words and blocks of rows."""
    channels = rng.choice([1, 2, 3, 7, 16, 63, 64, 65, 72, 130])
    return rng.randint(1, 3), channels, *rng.choice([(), (1,), (5,), (33,), (1, 1), (3, 3), (4, 9), (2, 3, 5)])


def check_bits(seed: int, device: str) -> None:
    for operator, arguments in test_bits.calls(random.Random(seed), shape_of, device):
        is_half = seed % 2 and arguments[0].dtype == torch.bfloat16
        given = (arguments[0].half(), *arguments[1:]) if is_half else arguments
        results = [getattr(module, operator)(*given) for module in (KERNELS[operator], bits)]
        if operator == "clamp_and_pack":  # zeros have either sign
            results = [(clamped + 0.0, *others) for clamped, *others in results]
        assert test_bits.same(*results), (operator, given[1:])


def check_no_kernel(device: str) -> None:
    """What is left to the definition."""
    x = torch.randn(2, 6, 4, 5, device=device)
    strided = torch.randn(2, 4, 6, 5, device=device).transpose(1, 2)
    words = bits.pack_signs(x)
    assert gpu_bits.pack_signs(x.double()) is None
    assert gpu_bits.pack_signs(x[:0]) is None
    assert gpu_bits.pack_signs(x, 4) is None
    assert gpu_bits.pack_passes(x, float("nan"), None) is None
    assert gpu_bits.clamp_and_pack(strided, 0.0, 1.0) is None
    assert gpu_bits.where_passes(x, words[:1]) is None
    assert gpu_bits.where_passes(strided, bits.pack_signs(strided)) is None
    assert gpu_bits.unpack_signs(words, 70) is None
    assert gpu_codes.pack_codes(x, 3) is None
    assert gpu_codes.pack_codes(x[:, :0], 4) is None
    assert gpu_codes.unpack_codes(bits.pack_codes(x.abs(), 4), 90, 4) is None
    assert passes.approx_sign_backward_(x, x.to(memory_format=torch.channels_last)) is None
    assert passes.norm_backward_(x.double(), x.double(), None, x[0, :, 0, 0], x[0, :, 0, 0]) is None
    one, channels = torch.ones((), device=device), torch.ones(6, device=device)
    for given, divisor in ((x.double(), one), (x[:0], one), (strided, one), (x, one.double()), (x, x.abs())):
        assert gpu_levels.round_codes(given, divisor, 0.0, 3.0, 1.0, 0) is None
        assert gpu_levels.step_backward(given, given, divisor, 0, 3, False, 1.0, 1e-6) is None
        assert gpu_levels.round_values(given, divisor, 0.0, 3.0, 1.0, 0.0) is None
    assert gpu_levels.round_values(strided, None, 0.0, 3.0, 1.0, 0.0) is None
    assert gpu_levels.round_range(x.double(), -one, one, 8) is None
    assert gpu_levels.round_range(x, -one, one.double(), 8) is None
    assert gpu_levels.step_backward(x[:1], x, one, 0, 3, False, 1.0, 1e-6) is None
    assert gpu_levels.step_backward(x.double(), x, one, 0, 3, False, 1.0, 1e-6) is None
    assert gpu_levels.step_backward(x, x, one, 0, 2**21, False, 1.0, 1e-6) is None
    for given in (x.double(), x[:0], strided):
        assert gpu_pointwise.sign(given) is None
        assert gpu_pointwise.round_power_of_two(given, -15, 0) is None
        assert gpu_pointwise.pass_between(given, given, one, one) is None
    assert gpu_pointwise.round_power_of_two(x, -128, 0) is None
    assert gpu_pointwise.pass_between(x[:1], x, one, one) is None
    assert gpu_pointwise.pass_between(x, x, one, one.double()) is None
    for given in (x.double(), x[:0], x[:, :5], strided):
        assert gpu_rprelu.rprelu(given, channels, channels, channels) is None
        assert gpu_rprelu.rprelu_backward(given, given, channels, channels) is None
    assert gpu_rprelu.rprelu_backward(x.half(), x, channels, channels) is None
    assert convolution.pack_weight(x[:0]) is None
    assert convolution.pack_weight(x.double()) is None
    for found, wanted in (
        (gpu_bits.pack_signs(strided), bits.pack_signs(strided)),
        (gpu_codes.pack_codes(strided.abs(), 4), bits.pack_codes(strided.abs(), 4)),
    ):
        assert found is not None
        assert torch.equal(found, wanted)


def check_convolution(seed: int, device: str) -> None:
    """Floats and bits, each in another mode, against torch's float64 convolution."""
    rng = random.Random(seed)
    groups, kernel = rng.choice([1, 1, 1, 2, 3]), (rng.randint(1, 4), rng.randint(1, 3))
    channels, outputs = groups * rng.choice([1, 3, 33, 64, 65, 130]), groups * rng.choice([1, 5, 16, 17, 40, 70])
    stride, dilation = (rng.randint(1, 3), rng.randint(1, 2)), (rng.randint(1, 2), rng.randint(1, 3))
    padding = tuple(rng.randint(0, 3) for _ in range(4))
    spans = [(size - 1) * step + 1 for size, step in zip(kernel, dilation, strict=True)]
    height, width = (rng.randint(max(1, span - 1), span + 5) for span in spans)
    padded = height + padding[2] + padding[3], width + padding[0] + padding[1]
    if padded[0] < spans[0] or padded[1] < spans[1]:
        padding = 1, 1, 1, 1
    value, batch = rng.choice([-1, 0, 1]), rng.choice([0, 1, 2, 2])
    case = test_inference_operators.Case(
        (channels, outputs, groups, kernel, stride, padding, dilation, value, height, width, batch)
    )

    def there(x: Any) -> Any:
        return x.to(device) if isinstance(x, Tensor) else x

    for input, (asked, wanted) in zip(case.inputs(), rng.sample(list(case.results()), 3), strict=True):
        scaled = test_inference_operators.scaled_of(asked)
        given = *map(there, case.operands(input)), None if scaled is None else tuple(map(there, scaled))
        found = binary_conv2d(*given)
        assert found is not None
        assert found.dtype == wanted.dtype
        assert torch.equal(found.cpu(), wanted), (case.window, case.channels, input.dtype, len(asked))
        if wanted.numel():
            assert found.is_contiguous(memory_format=torch.channels_last)


def check_operands(device: str) -> None:
    """Operands that do not belong together are refused, as by the kernel in C."""
    weight, sums = operators.pack_weight(torch.ones(9, 64, 3, 3, device=device))
    input, window = torch.ones(1, 64, 8, 8, device=device), Window()
    good = input, weight, sums, (64, 9), window
    assert binary_conv2d(*good) is not None
    for changed in (
        (input[:, :3], *good[1:]),
        (input[0], *good[1:]),
        (bits.pack_signs(input).repeat(1, 1, 1, 2), *good[1:]),
        (input, weight[:, :1], *good[2:]),
        (*good[:3], (64, 20), window),
        (*good, (torch.ones(9, dtype=torch.float64, device=device), torch.ones(9, device=device))),
        (*good[:4], Window(padding=(-1, 0, 0, 0))),
        (input[:, :, :1], *good[1:]),
    ):
        with pytest.raises(ValueError, match="must"):
            binary_conv2d(*changed)


def check_weight(seed: int, device: str) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    groups, channels = rng.choice([1, 1, 2, 3]), rng.choice([1, 3, 16, 63, 64, 65, 130])
    weight = torch.randn(groups * rng.randint(1, 20), channels, rng.randint(1, 4), rng.randint(1, 4), device=device)
    weight[weight.abs() < 0.1], weight[weight > 2] = -0.0, torch.nan
    wanted = operators.pack_weight(weight, groups)
    last = weight.to(memory_format=torch.channels_last)
    for signs in (
        weight,
        last,
        weight.bfloat16(),
        torch.where(weight < 0, -1, 1).to(torch.int8),
        weight.mT.contiguous().mT,
    ):
        found = convolution.pack_weight(signs, groups)
        assert found is not None
        assert all(map(torch.equal, found, wanted))


def check_slopes(seed: int, device: str) -> None:
    """Bit for bit, but in the interpreter for bfloat16, to which that does not round."""
    shape = random.Random(seed).choice([(1,), (31,), (2, 3), (3, 65, 5), (2, 70, 9, 7), (2, 20, 3, 4, 5)])
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for last in (False, len(shape) > 2):
            grad, input = (x.to(device) for x in test_slopes.operands(shape, last, dtype))
            wanted = test_slopes.product(grad, input)
            assert passes.approx_sign_backward_(grad, input)
            if dtype == torch.bfloat16 and device == "cpu":
                grad, wanted = (x.float().where(x.isfinite(), 0) for x in (grad, wanted))
                torch.testing.assert_close(grad, wanted, rtol=2**-6, atol=1e-30)
            else:
                assert test_slopes.same(grad, wanted)


def check_pointwise(seed: int, device: str) -> None:
    """Bit for bit, with thresholds of powers of two and their neighbours, denormals, zeros, NaN and inf."""
    rng = random.Random(seed)
    shape = rng.choice([(1,), (31,), (2, 3), (3, 65, 5), (2, 70, 9, 7), (2, 20, 3, 4, 5)])
    roots = torch.tensor([2.0 ** (exponent / 2) for exponent in range(-290, 255)])
    edges = torch.cat([roots, roots.nextafter(torch.tensor(torch.inf)), roots.nextafter(torch.tensor(0.0))])
    special = torch.cat([edges, torch.tensor([0.0, -0.0, torch.inf, torch.nan, 2.0**-149, 2.0**-130, 1.0, 3.0])])
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for last in (False, len(shape) > 3):
            input = torch.randn(shape) * 10.0 ** rng.randint(-4, 2)
            some = torch.rand(shape) < 0.7
            input[some] = special[torch.randint(len(special), (int(some.sum()),))]
            input = (input * torch.where(torch.rand(shape) < 0.5, -1, 1)).to(dtype)
            if last:
                input = input.to(memory_format=torch.channels_last if len(shape) == 4 else torch.channels_last_3d)
            of_channels = (1, *shape[1:2], *[1] * (len(shape) - 2))
            end = torch.rand(rng.choice([(), of_channels if len(shape) > 1 else ()])) * 2
            input, grad, end = input.to(device), torch.randn_like(input).to(device), end.to(device)
            low = rng.choice([-15, -127, 0, -3])
            half = dtype == torch.bfloat16 and device == "cpu"  # to which the interpreter does not round
            if half:  # and of which it reads denormals as 0
                input[input.abs() < 2.0**-126] = 0
            for name, asked in (
                ("sign", (input.nan_to_num(1.0),)),
                ("pass_between", (rng.choice([grad, grad.contiguous().float()]), input, -end, end)),
                ("round_power_of_two", (input, low, rng.choice([0, max(low, -1), 5]))),
            ):
                wanted, found = (getattr(module, name)(*asked) for module in (pointwise, gpu_pointwise))
                assert found is not None
                assert (found.dtype, found.stride()) == (wanted.dtype, input.stride()), name
                if half and name == "pass_between":
                    torch.testing.assert_close(found, wanted, rtol=2**-6, atol=1e-30, equal_nan=True)
                else:
                    assert test_slopes.same(found.contiguous(), wanted.contiguous()), (name, dtype, asked[1:])


def check_levels(seed: int, device: str) -> None:
    """Bit for bit, with every divisor that there is a kernel for, and NaN anywhere."""
    rng, same = random.Random(seed), test_slopes.same
    shape = rng.choice([*test_rounding.SHAPES[:-1], (1, 1), (3, 1, 4, 2), (1, 1030), (4, 7, 1, 1)])
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for last in (False, len(shape) > 2):
            input = test_rounding.numbers(shape, last).to(dtype)
            grad, whole = torch.randn_like(input), torch.randn(shape)  # whole is contiguous, and float32
            with_nan, somewhere = input.clone(), tuple(rng.randrange(size) for size in shape)
            with_nan[somewhere], grad[somewhere] = torch.nan, rng.choice([torch.nan, torch.inf, -0.0])
            divisors = test_rounding.divisors(input)
            if input.ndim > 1:
                divisors.append(torch.rand(1, shape[1], *[1] * (input.ndim - 2)) + 0.1)
            input, with_nan, grad, whole = (x.to(device) for x in (input, with_nan, grad, whole))
            for divisor in (x.to(device) for x in divisors):
                for given in (input, with_nan):
                    ends = rng.choice(test_rounding.ENDS)
                    wanted = level_rounding.round_codes(given, divisor, *ends)
                    found = gpu_levels.round_codes(given, divisor, *ends)
                    assert found is not None
                    assert all(map(torch.equal, found, wanted)), (dtype, ends)
                    assert found[0].stride() == given.stride()
                    strict, (low, high) = rng.random() < 0.5, rng.choice([(-3, 4), (0, 15), (0, 0), (-128, 127)])
                    for g in (grad, whole):
                        asked = g, given, divisor, low, high, strict, rng.choice([1.0, 0.3]), rng.choice([1e-6, 0.3])
                        found = gpu_levels.step_backward(*asked)
                        assert found is not None
                        (found, of_step), (wanted, sums) = found, level_rounding.step_backward(*asked)
                        assert same(found.contiguous(), wanted.contiguous()), (dtype, low, high, strict)
                        assert of_step.shape == sums.shape
                        finite = g.double().abs().nan_to_num(0, 0).sum()  # sums in another order
                        close = 1e-6 * float(finite) * max(map(abs, (low, high, 1)))
                        torch.testing.assert_close(of_step, sums, rtol=1e-6, atol=close, equal_nan=True)
                    half = dtype == torch.bfloat16 and device == "cpu"  # to which the interpreter does not round
                    unit, ends = rng.choice([divisor, None, 0 * divisor, -divisor]), (float(low), float(high))
                    values = given, unit, *ends, rng.choice([1.0, 3.0]), rng.choice([0.0, 0.3])
                    levels = (
                        given,
                        rng.choice([-1, 0]) * divisor,
                        rng.choice([0, 1, 3]) * divisor,
                        rng.choice([2, 8, 16]),
                    )
                    for name, asked in (("round_values", values), ("round_range", levels)):
                        wanted, found = (getattr(module, name)(*asked) for module in (level_rounding, gpu_levels))
                        assert found is not None
                        assert found.stride() == given.stride()
                        if half:
                            torch.testing.assert_close(found, wanted, rtol=2**-6, atol=1e-30, equal_nan=True)
                        else:
                            assert same(found + 0.0, wanted + 0.0), (dtype, low, high)  # zeros have either sign


def check_halves(device: str) -> None:
    """They go to even numbers, and 0 / 0 is NaN."""
    halves, one = torch.arange(-20.5, 21, device=device), torch.ones((), device=device)
    codes, is_nan = gpu_levels.round_codes(halves, one, -100.0, 100.0, 1.0, 0) or (halves, one)
    assert codes.view(torch.int8).tolist() == [2 * round(each / 2) for each in halves.tolist()]
    assert is_nan.item() is False
    found = gpu_levels.round_codes(torch.zeros(3, device=device), 0 * one, 0.0, 3.0, 1.0, 0)
    assert found is not None
    assert found[1].item() is True


def rprelu_of(module: Any, grad: Tensor, input: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    """The output and the four gradients."""
    return module.rprelu(input, *others), *module.rprelu_backward(grad, input, *others[:2])


def check_errors(
    found: tuple[Tensor, ...], wanted: tuple[Tensor, ...], exact: tuple[Tensor, ...], floor: float
) -> None:
    """Not above twice those of the definition."""
    for one, other in zip(test_norm.error(found, exact), test_norm.error(wanted, exact), strict=True):
        assert one <= max(2 * other, floor)


def check_rprelu(seed: int, device: str) -> None:
    """Elements as those of torch's operators; the sums' error against float64 is not above theirs."""
    shape = random.Random(seed).choice([*test_rprelu.SHAPES, (3, 70, 20, 18)])
    given = [x.to(device) for x in test_rprelu.operands(shape)]
    for changed in (given, [given[0].contiguous(), *given[1:]], [x.contiguous() for x in given]):
        exact = rprelu_of(rprelu, *(x.double() for x in changed))
        found, wanted = (rprelu_of(module, *changed) for module in (gpu_rprelu, rprelu))
        assert test_slopes.same(found[0], wanted[0])
        assert torch.equal(found[1], wanted[1])
        assert found[1].stride() == changed[1].stride()
        check_errors(found[2:], wanted[2:], exact[2:], 4 * torch.finfo(torch.float32).eps)
    for dtype in (torch.bfloat16, torch.float16):
        half = [x.to(dtype) for x in given]
        exact = rprelu_of(rprelu, *(x.double() for x in half))
        found, wanted = (rprelu_of(module, *half) for module in (gpu_rprelu, rprelu))
        assert all(x.dtype == dtype for x in found)
        if dtype == torch.bfloat16 and device == "cpu":  # to which the interpreter does not round
            assert max(test_norm.error(found[:2], exact[:2])) < 2**-5
        else:
            assert all(map(torch.equal, found[:2], wanted[:2]))
        check_errors(found[2:], wanted[2:], exact[2:], 2 * torch.finfo(dtype).eps)


def check_nan_stays_in_its_channel(device: str) -> None:
    grad, input, *others = (x.to(device) for x in test_rprelu.operands((2, 6, 4, 5)))
    input[0, 3, 1, 1] = torch.nan
    output, grads = gpu_rprelu.rprelu(input, *others), gpu_rprelu.rprelu_backward(grad, input, *others[:2])
    assert output is not None
    assert output.isnan().sum() == 1
    assert grads is not None
    assert grads[2].isnan().tolist() == [False, False, False, True, False, False]


def check_norm(seed: int, device: str) -> None:
    """The error against float64 is not above torch's, or it is that of a few roundings."""
    shape = random.Random(seed).choice(test_norm.SHAPES)
    grad, input, weight, mean, invstd = (x.to(device) for x in test_norm.operands(shape, 2.0))
    for given in (
        (grad, input, weight, mean, invstd),
        (grad.contiguous(), input, None, mean, invstd),
        (grad.contiguous(), input.contiguous(), weight, mean, invstd),
    ):
        exact = norm_gradients(norm.norm_backward_, *(None if x is None else x.double() for x in given))
        ours, theirs = (norm_gradients(each, *given) for each in (passes.norm_backward_, norm.norm_backward_))
        check_errors(ours, theirs, exact, 4 * torch.finfo(torch.float32).eps)
    half = grad.half(), input.half(), weight, mean, invstd
    exact = norm_gradients(norm.norm_backward_, *(x.double() for x in half))
    assert max(test_norm.error(norm_gradients(passes.norm_backward_, *half), exact)) < 2e-3


def check_a_wrong_bit_is_seen(device: str) -> None:
    case = test_inference_operators.Case(test_inference_operators.SHAPES[0])
    case.weight[0, 0, 1, 1, 0, 3] ^= 1 << 2
    found = binary_conv2d(*(x.to(device) if isinstance(x, Tensor) else x for x in case.operands(case.input)))
    assert found is not None
    assert not torch.equal(found.cpu(), case.sums)


def check_dispatch(device: str) -> None:
    """`by_triton` calls a kernel where there is one that takes the operands, else the definition."""
    seen: list[str] = []

    def definition(*arguments: Any) -> str:
        seen.append("definition")
        return "made by the definition"

    run = gpu.by_triton("bits.pack_signs", definition)
    x = torch.randn(2, 5, device=device)
    with ExitStack() as stack:
        if device == "cpu":
            stack.enter_context(patch.multiple(gpu, _has_triton=lambda: True, _is_supported=lambda index: True))
            stack.enter_context(patch.object(torch.cuda, "device", nullcontext))
        assert torch.equal(run(x, 1), bits.pack_signs(x))
        assert not seen
        assert run(x.double(), 1) == "made by the definition"
        with patch.object(gpu, "_has_triton", lambda: False):
            assert run(x, 1) == "made by the definition"


def check_it_compiles(capability: int) -> None:
    """Every kernel for a processor, without one: products of codes by tensor cores, no fused or flushed floats."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver as drivers
    from triton.runtime.jit import JITFunction

    target = GPUTarget("cuda", capability, 32)
    driver: Any = drivers
    driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: target,
            get_current_device=lambda: capability,  # by which Triton remembers what it has compiled
            get_current_stream=lambda device: 0,
        )
    )
    made: dict[str, str] = {}
    run = JITFunction.run

    def compiled(self: Any, *arguments: Any, grid: Any, warmup: bool, **constants: Any) -> Any:
        kernel: Any = run(self, *arguments, grid=grid, warmup=True, **constants)
        assert kernel.asm["cubin"]
        made[f"{self.fn.__module__}.{self.fn.__name__}"] = kernel.asm["ptx"]
        assert "ftz" not in kernel.asm["ptx"]
        assert "fma.rn" not in kernel.asm["ptx"]
        return kernel

    with patch.object(JITFunction, "run", compiled):
        _compile_all(torch.float32 if capability < 90 else torch.bfloat16)
    assert len(made) == 19, [*made]
    multiplied = "mma.sync" if capability < 90 else "wgmma.mma_async"
    assert multiplied in made["qconv.kernels.gpu.convolution._convolve"]
    assert "cvt.rn.bf16" in made["qconv.kernels.gpu.passes._slope"]
    for name in ("_round", "_step", "_values"):
        ptx = made[f"qconv.kernels.gpu.level_rounding.{name}"]
        assert "div.rn.f32" in ptx
        assert "div.full" not in ptx
        assert "0f4B400000" in ptx.upper().replace("0F", "0f")  # 1.5 · 2^23, which nothing has folded


def _compile_all(dtype: torch.dtype) -> None:
    x, words = torch.zeros(2, 128, 9, 9, dtype=dtype), torch.zeros(2, 9, 9, 2, dtype=torch.int64)
    x = x.to(memory_format=torch.channels_last) if dtype == torch.float32 else x
    gpu_bits.pack_signs_and_passes(x, -1.0, 1.0)
    gpu_bits.clamp_and_pack(x, 0.0, None)
    gpu_bits.where_passes(x, words)
    gpu_bits.unpack_signs(words, 128, 1, dtype, True)
    gpu_codes.pack_codes(x, 4)
    gpu_codes.unpack_codes(torch.zeros(2, 9, 9, 64, dtype=torch.uint8), 128, 4, dtype, True)
    passes.norm_backward_(x, x.clone(), None, torch.zeros(128), torch.ones(128))
    passes.approx_sign_backward_(x.bfloat16(), x.bfloat16())
    gpu_levels.round_codes(x, torch.ones(2, 1, 1, 1), 0.0, 15.0, 1.0, 0)
    gpu_levels.step_backward(x, x, torch.ones(()), 0, 15, False, 1.0, 1e-6)
    gpu_levels.round_values(x, torch.ones(()), 0.0, 15.0, 1.0, 0.0)
    gpu_pointwise.sign(x)
    gpu_pointwise.pass_between(x, x, torch.zeros(()), torch.ones(()))
    gpu_pointwise.round_power_of_two(x, -15, 0)
    gpu_levels.round_range(x, torch.zeros(()), torch.ones(()), 8)
    gpu_rprelu.rprelu(x, *torch.zeros(3, 128))
    gpu_rprelu.rprelu_backward(x, x, *torch.zeros(2, 128))
    convolution.pack_weight(torch.zeros(64, 128, 3, 3))
    weight, sums = operators.pack_weight(torch.zeros(64, 128, 3, 3))
    binary_conv2d(*(words, weight, sums, (128, 64), Window(padding=(1, 1, 1, 1)), (torch.ones(64), torch.zeros(64))))


SEEDED: dict[str, tuple[Callable[[int, str], None], int]] = {
    "bits": (check_bits, 8),
    "convolution": (check_convolution, 8),
    "weight": (check_weight, 3),
    "slopes": (check_slopes, 3),
    "levels": (check_levels, 6),
    "pointwise": (check_pointwise, 4),
    "rprelu": (check_rprelu, 4),
    "norm": (check_norm, 4),
}
ALONE = (
    *(check_no_kernel, check_operands, check_a_wrong_bit_is_seen, check_dispatch),
    *(check_halves, check_nan_stays_in_its_channel),
)
