"""Gradients through surrogates of the sign: the kernel against torch's operators, bit for bit."""

import pytest
import torch
from settings import each_instruction_set, threads
from torch import Tensor

from qconv.kernels import native, slopes
from qconv.quantizers import ApproxSign

ops = torch.ops.qconv
ODD = [0.0, -0.0, torch.nan, torch.inf, -torch.inf, 1e-45, 1.0, -1.0, 0.99609375, 3e38, -0.5, 1.5]
SHAPES = [(0,), (1,), (31,), (2, 3), (3, 65, 5), (2, 6, 0, 3), (2, 70, 9, 7), (2, 20, 3, 4, 5), (5, 64, 33, 31)]


def operands(shape: tuple[int, ...], last: bool = False, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """A gradient and an input with every pair of odd values that there is room for."""
    torch.manual_seed(0)
    grad, input = ((torch.randn(shape) * scale).to(dtype) for scale in (3.0, 0.8))
    pairs = torch.cartesian_prod(torch.tensor(ODD), torch.tensor(ODD)).to(dtype)[: input.numel()]
    grad.view(-1)[: len(pairs)], input.view(-1)[: len(pairs)] = pairs.T
    if last:
        grad, input = (x.movedim(1, -1).contiguous().movedim(-1, 1) for x in (grad, input))
    return grad, input


def product(grad: Tensor, input: Tensor) -> Tensor:
    return grad * (2 - 2 * input.abs()).clamp(min=0)


def same(found: Tensor, wanted: Tensor) -> bool:
    """Whether tensors are equal, bit for bit but for those of a NaN."""
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[wanted.element_size()]
    found, wanted = (x.masked_fill(x.isnan(), torch.nan).view(whole) for x in (found, wanted))
    return torch.equal(found, wanted) and found.stride() == wanted.stride()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_instruction_sets_give_what_torch_does(shape: tuple[int, ...], last: bool, dtype: torch.dtype) -> None:
    grad, input = operands(shape, last and len(shape) > 2, dtype)
    wanted = product(grad, input)
    for name in each_instruction_set():
        output = torch.empty_like(grad)
        assert slopes.by_kernel(grad, input, output) is (input.numel() > 0)
        assert same(output, wanted), name
    ops.approx_sign_backward_(grad, input)
    assert same(grad, wanted)


@pytest.mark.skipif(not native.instruction_sets(), reason="there is no compiled module")
def test_every_bfloat16_is_rounded_as_torch_does() -> None:
    input = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    torch.manual_seed(0)
    for grad in (torch.ones_like(input), torch.randn(len(input)).bfloat16(), input.flip(0)):
        for name in each_instruction_set():
            output = torch.empty_like(grad)
            slopes.by_kernel(grad, input, output)
            assert same(output, product(grad, input)), name


def test_threads_change_nothing() -> None:
    grad, input = operands((7, 48, 31, 30))
    with threads(3):
        found = grad.clone()
        ops.approx_sign_backward_(found, input)
    assert same(found, product(grad, input))


def test_what_the_kernel_leaves_to_the_definition() -> None:
    grad, input = operands((2, 6, 4, 5))
    strided = torch.empty(2, 4, 6, 5).transpose(1, 2)
    for first, second in (
        (grad.double(), input.double()),
        (grad.contiguous(memory_format=torch.channels_last), input),
        (strided.copy_(grad), strided.clone().copy_(input)),
    ):
        wanted = product(first, second)
        assert not slopes.by_kernel(first, second, first)
        ops.approx_sign_backward_(first, second)
        assert torch.equal(first.nan_to_num(7), wanted.nan_to_num(7))
    for other in (input.bfloat16(), input[:1]):
        with pytest.raises(ValueError, match=r"grad \(torch.float32, \(2, 6, 4, 5\)\) must be as input is: torch"):
            ops.approx_sign_backward_(grad, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_surrogate_has_the_numbers_of_the_formula(dtype: torch.dtype) -> None:
    grad, input = operands((2, 70, 3, 3), dtype=dtype)
    wanted = product(grad, input)
    assert same(ApproxSign().backward(grad.clone(), input), wanted)
    assert same(ApproxSign().backward(grad.float().clone(), input), product(grad.float(), input))
    channel = grad[:, :1]
    assert same(ApproxSign().backward(channel, input), product(channel, input))


def test_torch_finds_the_operator_well_made() -> None:
    grad, input = (x.nan_to_num(0) for x in operands((2, 70, 3, 3)))
    torch.library.opcheck(ops.approx_sign_backward_.default, (grad, input))
