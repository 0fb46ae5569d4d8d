"""Latent weights are clamped after the optimizer step, in a hand-written loop as elsewhere."""

import warnings
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


@pytest.mark.parametrize("scheme", [schemes.apot(), schemes.lsq(), schemes.ttq(), schemes.shift_ps()], ids=str)
@pytest.mark.parametrize("by_hand", [True, False])
def test_a_range_that_becomes_nan_is_named(scheme: qconv.Scheme, by_hand: bool) -> None:
    model = nn.Sequential(qconv.QConv2d(3, 4, 3, scheme=scheme), nn.ReLU(), qconv.QConv2d(4, 4, 3, scheme=scheme))
    model(torch.rand(2, 3, 8, 8)).sum().backward()
    name, tensor = [*model[2].named_parameters()][-1]
    optimizer = torch.optim.SGD([tensor], lr=1e-3)
    if not by_hand:
        qconv.after_every_step(optimizer, model)

    def step() -> None:
        optimizer.step()
        if by_hand:
            qconv.after_step(model)

    step()
    assert tensor.grad is not None
    tensor.grad.fill_(torch.nan)
    with pytest.raises(FloatingPointError, match=rf"NaN or inf in 2\.{name}: .*smaller learning rate"):
        step()
    tensor.requires_grad_(False)  # no optimizer's concern
    qconv.after_step(model)


def test_finite_ranges_whose_sum_float16_can_not_hold() -> None:
    layer = qconv.QConv2d(32, 64, 3, scheme=schemes.shift_ps()).half()
    shift = layer.weight_quantizer.tensors()[0]
    assert torch.linalg.vector_norm(shift, 1).isinf()
    qconv.after_step(layer)
    assert shift.isfinite().all()


def test_what_is_learned_may_be_made_a_buffer() -> None:
    layer = qconv.QConv2d(3, 4, 3, scheme=schemes.lsq())
    quantizer = layer.weight_quantizer
    step = torch.zeros_like(quantizer.tensors()[0])
    del quantizer.step
    quantizer.register_buffer("step", step.clone())
    qconv.after_step(layer)
    assert torch.equal(quantizer.tensors()[0], step)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(4)
    nn.init.constant_(norm.weight, 8)  # beyond PACT's bound
    return nn.Sequential(nn.Conv2d(3, 4, 3), norm, nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(16, 2))


@pytest.mark.parametrize(
    ("scheme", "left_out"),
    [
        (schemes.lsq(4, 4), ["3.input_quantizer.step", "3.weight_quantizer.step"]),
        (schemes.pact(4, 4), ["3.input_quantizer.alpha"]),
        (schemes.shift_ps(), ["3.weight_quantizer.shift", "3.weight_quantizer.sign"]),
        (schemes.bwn(), []),
    ],
    ids=str,
)
def test_an_optimizer_from_before_the_conversion(scheme: qconv.Scheme, left_out: list[str]) -> None:
    model = network()
    early = torch.optim.SGD(model.parameters(), lr=1e-4)
    model = qconv.convert(model, scheme)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        qconv.after_every_step(early, model)
    assert len(told) == bool(left_out)
    if left_out:
        named = left_out[0] + " and 1 other parameter" * (len(left_out) - 1)
        said = f"the optimizer lacks parameters that the schemes of its weights learn: {named}. Create it after"
        assert str(told[0].message).startswith(said)
        assert told[0].filename == __file__
    parameters = dict(model.named_parameters())
    qconv.after_every_step(torch.optim.SGD(model.parameters(), lr=1e-4), model)
    for name in left_out:
        parameters[name].requires_grad_(False)
    qconv.after_every_step(early, model)
    for name in left_out:
        parameters[name].requires_grad_(True)
        early.add_param_group({"params": [parameters[name]]})
    qconv.after_every_step(early, model)


class SAM(torch.optim.Optimizer):
    """As its users have it: two steps, of which the second is that of an optimizer inside."""

    def __init__(self, params: Any, base: Any, **options: Any) -> None:
        super().__init__(params, dict(options))
        self.base_optimizer = base(self.param_groups, **options)

    @torch.no_grad()
    def move(self, sign: float) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(parameter.grad, alpha=sign * 0.01)

    def second_step(self) -> None:
        self.move(-1)
        self.base_optimizer.step()


def test_sharpness_aware_steps() -> None:
    model = qconv.convert(network(), schemes.bnn())
    optimizer = SAM(model.parameters(), torch.optim.SGD, lr=10.0)
    qconv.after_every_step(optimizer, model)
    model(torch.rand(2, 3, 6, 6)).sum().backward()
    optimizer.move(1)
    optimizer.second_step()
    quantized: Any = model[3]
    assert quantized.weight.abs().max() == 1
