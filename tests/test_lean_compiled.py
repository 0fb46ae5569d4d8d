"""Compiled lean models: with a memory budget sums are computed again from the bits that layers keep."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._functorch.config as functorch
from test_lean import gradients, kept
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import qconv
from qconv import schemes
from qconv.kernels import flops as flops

ops = torch.ops.qconv


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def network() -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Conv2d(3, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32)]
    for _ in range(2):
        conv = qconv.QConv2d(32, 32, 3, padding=1, bias=False, scheme=schemes.bnn())
        layers += [nn.Hardtanh(), conv, nn.BatchNorm2d(32)]
    return nn.Sequential(*layers)


def trained(model: nn.Module, input: Tensor, budget: float) -> tuple[int, tuple[Tensor, list[Tensor | None]]]:
    """The bytes that the compiled model keeps, and its output and gradients."""
    torch._dynamo.reset()
    with functorch.patch(activation_memory_budget=budget):
        compiled: Any = torch.compile(copy.deepcopy(model), backend="aot_eager_decomp_partition", fullgraph=True)
        found = gradients(compiled, input)
        return kept(compiled, input.clone().requires_grad_()), found


@pytest.mark.nightly
def test_a_budget() -> None:
    model, input = network(), torch.randn(8, 3, 16, 16)
    expected = gradients(model, input)
    eager = kept(qconv.lean(model), input)
    sizes = []
    for budget in (1.0, 0.2):
        size, found = trained(model, input, budget)
        sizes.append(size)
        for one, other in zip((found[0], *found[1]), (expected[0], *expected[1]), strict=True):
            assert other is not None
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4 * float(other.abs().max()))
    assert sizes[1] * 4 < sizes[0]
    if torch.__version__ >= "2.12":  # before, the compiler keeps the input in floats
        assert sizes[1] < eager + input.nbytes  # that of a first layer that keeps its images in a format of its own


def test_operations_of_signs() -> None:
    """64 signs are multiplied at once."""
    signs, filters = torch.randn(2, 64, 9, 8).sign().to(torch.int8), torch.randn(16, 32, 3, 3).sign().to(torch.int8)
    geometry = (2, 1), (1, 1, 1, 1), (1, 1)
    weight, sums = ops.pack_weight(filters, 2)
    with FlopCounterMode(display=False) as plain:
        torch.conv2d(signs.float(), filters.float(), None, geometry[0], 1, 1, 2)
    arguments = ops.pack_signs(signs, 2), weight, sums, 64, 16, *geometry, 0
    with FlopCounterMode(display=False) as of_bits:
        ops.binary_conv2d(*arguments)
    assert of_bits.get_total_flops() == plain.get_total_flops() // 64 > 0
