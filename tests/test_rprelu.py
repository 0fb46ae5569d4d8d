"""RPReLU and its backward: the kernel against autograd of torch's operators."""

import pytest
import torch
from settings import each_instruction_set, threads
from torch import Tensor

from qconv.kernels import rprelu
from qconv.models import activations

ops = torch.ops.qconv
SHAPES = [(1, 2, 3, 3), (2, 3, 5, 7), (4, 16, 9, 8), (3, 65, 4, 4), (5, 130, 1, 1), (300, 24), (2, 20, 3, 4, 5)]


def operands(shape: tuple[int, ...]) -> tuple[Tensor, ...]:
    """The gradient and the input, with the channels adjacent, then before, slope and after."""
    torch.manual_seed(0)
    last = [shape[0], *shape[2:], shape[1]]
    grad, input = (torch.randn(last).movedim(-1, 1) for _ in range(2))
    before, slope, after = torch.randn(3, shape[1])
    input.select(1, 0)[0] = -before[0]  # ties
    return grad, input, before, slope, after


def by_autograd(grad: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
    """The output and the four gradients."""
    leaves = [x.detach().clone().requires_grad_() for x in given]
    output = activations.rprelu(*leaves)
    return output.detach(), *torch.autograd.grad(output, leaves, grad)


@pytest.mark.parametrize("shape", [*SHAPES, (16, 64, 16, 16)])
def test_elements_are_those_of_torch_and_sums_are_not_less_precise(shape: tuple[int, ...]) -> None:
    given = operands(shape)
    exact, theirs = by_autograd(*(x.double() for x in given)), by_autograd(*given)
    ours = ops.rprelu(*given[1:]), *ops.rprelu_backward(*given[:4])
    assert torch.equal(ours[0], theirs[0])
    assert torch.equal(ours[1], theirs[1])
    assert ours[1].stride() == given[1].stride()
    errors = [
        [float((x - y).abs().max() / y.abs().max()) for x, y in zip(found, exact, strict=True)]
        for found in (ours, theirs)
    ]
    assert all(a <= max(b, 4 * torch.finfo(torch.float32).eps) for a, b in zip(*errors, strict=True)), errors


@pytest.mark.parametrize("shape", SHAPES)
def test_instruction_sets_and_threads_give_the_same_bits(shape: tuple[int, ...]) -> None:
    given = operands(shape)
    wanted = ops.rprelu(*given[1:]), *ops.rprelu_backward(*given[:4])
    for count in (1, 3):
        with threads(count):
            for name in each_instruction_set():
                output = rprelu.forward_by_kernel(*given[1:])
                grads = rprelu.backward_by_kernel(*given[:4])
                assert output is not None
                assert grads is not None
                assert all(torch.equal(a, b) for a, b in zip((output, *grads), wanted, strict=True)), name


def test_what_the_kernel_leaves_to_the_definition() -> None:
    given = operands((2, 6, 4, 5))
    for changed in ([x.double() for x in given], [x.contiguous() for x in given], [given[0].contiguous(), *given[1:]]):
        grad, input, before, slope, _ = changed
        assert rprelu.backward_by_kernel(grad, input, before, slope) is None
        found, wanted = (ops.rprelu(*changed[1:]), *ops.rprelu_backward(*changed[:4])), by_autograd(*changed)
        torch.testing.assert_close(found, wanted)


def test_nan_stays_in_its_channel() -> None:
    grad, input, *others = operands((2, 6, 4, 5))
    input[0, 3, 1, 1] = torch.nan
    assert ops.rprelu(input, *others).isnan().sum() == 1
    _, _, of_slope, _ = ops.rprelu_backward(grad, input, *others[:2])
    assert of_slope.isnan().tolist() == [False, False, False, True, False, False]


def test_torch_finds_the_operators_well_made() -> None:
    given = operands((2, 6, 4, 5))
    torch.library.opcheck(ops.rprelu.default, given[1:])
    torch.library.opcheck(ops.rprelu_backward.default, given[:4])
