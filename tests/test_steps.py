"""Latent weights are clamped after the optimizer step, in a hand-written loop as elsewhere."""

from typing import Any

import pytest
import torch
from torch import nn

import qconv
from qconv import schemes


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.RAdam])
def test_a_hand_written_loop(kind: Any) -> None:
    binary, plain = qconv.BNNConv2d(3, 4, 3), nn.Conv2d(4, 2, 3)
    model = nn.Sequential(binary, plain)
    optimizer: torch.optim.Optimizer = kind(model.parameters(), lr=50.0)
    handle = qconv.after_every_step(optimizer, model)
    input = torch.randn(2, 3, 8, 8)

    def step() -> tuple[float, float]:
        optimizer.zero_grad()
        model(input).square().mean().backward()
        optimizer.step()
        return binary.weight.abs().max().item(), plain.weight.abs().max().item()

    largest_binary, largest_plain = step()
    assert largest_binary == 1.0
    assert largest_plain > 1.0
    handle.remove()
    assert step()[0] > 1.0


def test_with_a_gradient_scaler() -> None:
    model = qconv.BNNConv2d(3, 4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=100.0)
    qconv.after_every_step(optimizer, model)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.randn(2, 3, 8, 8)).square().mean()).backward()
    scaler.step(optimizer)
    assert model.weight.abs().max() == 1.0


@pytest.mark.parametrize("groups", [1, 2])
def test_every_layer_kind(groups: int) -> None:
    layers = [
        qconv.QConv1d(4, 4, 3, groups=groups, scheme=schemes.bnn()),
        qconv.QConvTranspose2d(4, 4, 3, groups=groups, scheme=schemes.bnn()),
        qconv.QLinear(4, 4, scheme=schemes.bwn()),
    ]
    for layer in layers:
        with torch.no_grad():
            layer.weight.mul_(20)
            expected = layer.weight.clamp(-1, 1)
        qconv.after_step(nn.Sequential(layer))
        assert layer.weight.equal(expected)


def test_shift_parameters_stay_in_range() -> None:
    layer = qconv.Conv2dShift(3, 4, 3)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e6)
    qconv.after_every_step(optimizer, layer)
    layer(torch.randn(2, 3, 8, 8)).sum().backward()
    optimizer.step()
    shift = layer.weight_quantizer.tensors()[0]
    assert (shift.min().item(), shift.max().item()) == (-14.0, 0.0)
