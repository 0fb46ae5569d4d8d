"""The backward of batch normalization: the kernel against torch's own in float64."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from settings import each_instruction_set, threads
from torch import Tensor

from qconv.kernels import norm

ops = torch.ops.qconv
SHAPES = [
    (1, 2, 3, 3),
    (2, 3, 5, 7),
    (4, 16, 9, 8),
    (3, 65, 4, 4),
    (5, 130, 1, 1),
    (300, 24),
    (2, 20, 3, 4, 5),
    (3, 7, 33),
]


def operands(shape: tuple[int, ...], mean: float = 0.3) -> tuple[Tensor, ...]:
    """The gradient, the input, with the channels adjacent, weight, mean and invstd."""
    torch.manual_seed(0)
    last = [shape[0], *shape[2:], shape[1]]
    grad, input = torch.randn(last).movedim(-1, 1), (torch.randn(last) + mean).movedim(-1, 1)
    places = [place for place in range(len(shape)) if place != 1]
    variance, average = torch.var_mean(input, places, correction=0)
    return grad, input, torch.randn(shape[1]), average, (variance + 1e-5).rsqrt()


def gradients(function: Callable[..., Any], grad: Tensor, input: Tensor, *others: Tensor | None) -> tuple[Tensor, ...]:
    """Those of input, weight and bias."""
    over = input.clone()
    return over, *function(grad, over, *others)


def by_autograd(grad: Tensor, input: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """Those of torch's own batch norm in float64."""
    input, weight = input.double().requires_grad_(), weight.double().requires_grad_()
    bias = torch.zeros_like(weight, requires_grad=True)
    output = torch.nn.functional.batch_norm(input, None, None, weight, bias, True, eps=1e-5)
    return torch.autograd.grad(output, (input, weight, bias), grad.double())


def error(found: tuple[Tensor, ...], exact: tuple[Tensor, ...]) -> list[float]:
    return [float((a.double() - b).abs().max() / b.abs().max()) for a, b in zip(found, exact, strict=True)]


@pytest.mark.parametrize("shape", [*SHAPES, (64, 64, 16, 16), (16, 3, 64, 64)])
def test_the_error_is_not_above_that_of_torch(shape: tuple[int, ...]) -> None:
    given = operands(shape, 2.0)
    exact = by_autograd(*given[:3])
    floor = 4 * torch.finfo(torch.float32).eps
    functions = ops.norm_backward_, norm.norm_backward_
    ours, theirs = (error(gradients(function, *given), exact) for function in functions)
    assert all(a <= max(b, floor) for a, b in zip(ours, theirs, strict=True)), (ours, theirs)


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_instruction_sets_and_places_give_the_same_bits(shape: tuple[int, ...], weighted: bool) -> None:
    grad, input, weight, mean, invstd = operands(shape)
    given = grad, input, weight if weighted else None, mean, invstd
    found = gradients(ops.norm_backward_, *given)
    torch.testing.assert_close(found, gradients(norm.norm_backward_, *given))
    for name in each_instruction_set():
        others = gradients(norm.by_kernel, *given)
        assert all(torch.equal(a, b) for a, b in zip(others, found, strict=True)), name


def test_threads_change_nothing() -> None:
    given = operands((7, 48, 31, 30))
    alone = gradients(ops.norm_backward_, *given)
    with threads(3):
        found = gradients(ops.norm_backward_, *given)
        assert all(torch.equal(a, b) for a, b in zip(found, alone, strict=True))


def test_what_the_kernel_leaves_to_the_definition() -> None:
    given = operands((2, 6, 4, 5))
    for changed in ([x.double() for x in given], [given[0].contiguous(), *given[1:]], [x.contiguous() for x in given]):
        grad, input, weight, mean, invstd = changed
        assert norm.by_kernel(grad, input, weight, mean, invstd) is None
        found, wanted = (gradients(function, *changed) for function in (ops.norm_backward_, norm.norm_backward_))
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def test_numbers_that_are_not_finite_stay_in_their_channel() -> None:
    grad, *others = operands((2, 6, 4, 5))
    grad[0, 3, 1, 1] = torch.nan
    for found in gradients(ops.norm_backward_, grad, *others):
        whole = found.movedim(1, 0) if found.dim() > 1 else found
        assert whole[3].isnan().all()
        assert whole[[0, 1, 2, 4, 5]].isfinite().all()


def test_torch_finds_the_operator_well_made() -> None:
    torch.library.opcheck(ops.norm_backward_.default, operands((2, 6, 4, 5)))
