"""Layers that are not trained stay as they are, and what follows from the weight follows it until training starts."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import qconv
from qconv import Scheme, schemes

SCHEMES = [
    schemes.bnn(),
    schemes.xnor(center=True),
    schemes.xnorpp(),
    schemes.recu(),
    schemes.adabin(),
    schemes.ttq(),
    schemes.shift_q(),
    schemes.shift_ps(),
    schemes.inq(),
    schemes.apot(),
    schemes.pact(),
    schemes.lsq(),
    schemes.lsq_plus(),
    schemes.n2uq(),
    schemes.dsq(),
    schemes.two_stage(schemes.lsq()),
]
EACH = pytest.mark.parametrize("scheme", SCHEMES, ids=str)


def network() -> Any:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), nn.Hardtanh(), nn.Conv2d(4, 4, 3))
    with torch.no_grad():
        model[1].weight.mul_(20)  # beyond every range
    return model


def step(model: Any) -> None:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, weight_decay=0.1)
    qconv.after_every_step(optimizer, model)
    model(torch.randn(2, 3, 9, 9)).square().mean().backward()
    optimizer.step()


@EACH
def test_a_layer_that_was_frozen_before_conversion(scheme: Scheme) -> None:
    model = network()
    model[1].requires_grad_(False)
    layer = qconv.convert(model, scheme, skip=())[1]
    assert not any(parameter.requires_grad for parameter in layer.parameters())
    model(torch.randn(2, 3, 9, 9))  # calibrates
    before = copy.deepcopy(dict(layer.named_parameters()))
    qconv.set_progress(model, 0.7)
    started = copy.deepcopy(dict(layer.named_parameters()))  # a stage that begins sets its learned tensors
    assert started["weight"].equal(before["weight"])
    step(model)
    assert all(parameter.equal(started[name]) for name, parameter in layer.named_parameters())
    assert any(parameter.requires_grad for parameter in model[3].parameters())
    model.requires_grad_(True)
    step(model)
    assert not all(parameter.equal(started[name]) for name, parameter in layer.named_parameters())


@EACH
def test_a_layer_that_is_frozen_after_conversion(scheme: Scheme) -> None:
    model = qconv.convert(network(), scheme, skip=())
    layer = model[1].requires_grad_(False)
    model(torch.randn(2, 3, 9, 9))
    before = copy.deepcopy(dict(layer.named_parameters()))
    step(model)
    assert all(parameter.equal(before[name]) for name, parameter in layer.named_parameters())


@pytest.mark.parametrize("scheme", [schemes.xnor(center=True), schemes.lsq(), schemes.shift_q()], ids=str)
def test_a_weight_that_alone_is_frozen(scheme: Scheme) -> None:
    model = qconv.convert(network(), scheme, skip=())
    model[1].weight.requires_grad_(False)
    before = model[1].weight.clone()
    step(model)
    assert model[1].weight.equal(before)
    learned = model[1].weight_quantizer.parameters()
    assert all(parameter.requires_grad and parameter.grad.any() for parameter in learned)


@pytest.mark.parametrize("scheme", SCHEMES[:8], ids=str)
def test_another_scheme_for_a_frozen_layer(scheme: Scheme) -> None:
    layer: Any = qconv.QConv2d(3, 4, 3, scheme=schemes.lsq()).requires_grad_(False)
    layer.set_scheme(scheme)
    assert not any(parameter.requires_grad for parameter in layer.parameters())
    layer.reset_parameters()
    assert not any(parameter.requires_grad for parameter in layer.parameters())
