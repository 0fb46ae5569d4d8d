"""Rules around optimizer steps: oscillations, frozen and dampened, and OvSW, against formulas written out in numpy."""

import copy
import io
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import same
from runs import config, last_state, terminate
from timm.optim.lookahead import Lookahead
from torch import Tensor, nn
from torch.nn.utils.prune import l1_unstructured

import qconv
from qconv import schemes
from qconv.ground.table import read_csv
from qconv.optim import Oscillations, OvSW, StepRule, dampening_penalty
from qconv.optim.step_rules import at, since
from qconv.training.run import train


def network(scheme: qconv.Scheme, seed: int = 0) -> nn.Sequential:
    """A convolution and a transposed one with groups, whose filters are not the rows of its weight."""
    torch.manual_seed(seed)
    layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.ConvTranspose2d(4, 6, 3, groups=2))
    return nn.Sequential(qconv.convert(layers, scheme, skip=()), nn.Flatten(), nn.Linear(6 * 36, 4))


def loss(model: nn.Module, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(8, 3, 6, 6, generator=generator)
    return nn.functional.cross_entropy(model(x), torch.arange(8) % 4)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int, first: int = 0) -> None:
    for index in range(first, first + count):
        optimizer.zero_grad()
        loss(model, index % 30).backward()
        optimizer.step()


def quantized(model: nn.Module) -> list[Any]:
    return [layer for layer in model.modules() if isinstance(layer, qconv.layers.QuantizedLayer)]


TWO_STAGES = schemes.two_stage(schemes.bnn())


class Follow(StepRule):
    """Keeps the codes after each step."""

    def __init__(self) -> None:
        self.codes: list[np.ndarray] = []

    def wants(self, layer: Any) -> bool:
        return isinstance(layer, qconv.QConvTranspose2d)

    def after_step(self, layer: Any, state: Any, progress: float) -> None:
        self.codes.append(layer.weight_codes().values.numpy().copy())


def optimizer_of(model: nn.Module, kind: str) -> torch.optim.Optimizer:
    made = OPTIMIZERS[kind](model.parameters())
    qconv.after_every_step(made, model)
    return made


OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.3),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.03),
}


@pytest.mark.parametrize("scheme", [schemes.lsq(2, 4), schemes.bnn(), schemes.twn()], ids=str)
def test_frequencies_follow_their_formula(scheme: qconv.Scheme) -> None:
    model = network(scheme)
    optimizer = optimizer_of(model, "adam")
    Oscillations(momentum=0.05).attach(model, optimizer)
    follow = Follow()
    follow.attach(model, optimizer)
    steps(model, optimizer, 40)
    frequency = np.zeros(follow.codes[0].shape)
    last = np.zeros(frequency.shape)  # direction of the last change
    for before, after in zip(follow.codes, follow.codes[1:], strict=False):
        for index in np.ndindex(frequency.shape):
            change = np.sign(float(after[index]) - float(before[index]))
            frequency[index] = 0.05 * (change * last[index] == -1) + 0.95 * frequency[index]
            last[index] = change or last[index]
    layer = quantized(model)[1]
    assert frequency.max() > 0.05
    np.testing.assert_allclose(optimizer.state[layer.weight]["oscillation_frequency"], frequency, atol=1e-6)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_frozen_weights_keep_their_code(optimizer: str) -> None:
    model = network(schemes.lsq(3, 4))
    made = optimizer_of(model, optimizer)
    Oscillations(freeze=0.015, momentum=0.01).attach(model, made)
    steps(model, made, 60)
    layer = quantized(model)[1]
    frozen = made.state[layer.weight]["oscillation_frozen"].bool()
    codes, scale = layer.weight_codes().values.clone(), layer.weight_codes().scale.clone()
    assert 0 < frozen.sum() < frozen.numel()
    steps(model, made, 20, 60)
    later = layer.weight_codes()
    assert torch.equal(later.values[frozen], codes[frozen])
    assert not torch.equal(later.values, codes)
    assert not torch.equal(later.scale, scale)  # the levels move, and the frozen weights with them
    assert torch.equal(layer.quantized_weight()[layer.from_filters(frozen)], layer.weight[layer.from_filters(frozen)])


def test_a_weight_freezes_at_the_nearest_code_to_its_average() -> None:
    model = nn.Sequential(qconv.convert(nn.Conv2d(1, 1, 1, bias=False), schemes.lsq(3, 8), skip=()))
    layer: Any = model[0]
    with torch.no_grad():
        layer.weight_quantizer.step.fill_(1.0)
        layer.weight.fill_(0.0)
    optimizer = torch.optim.SGD([layer.weight], lr=1.0)
    Oscillations(freeze=0.4, momentum=0.3).attach(model, optimizer)
    codes, average, last, frequency, direction, frozen = [], 0.0, 0.0, 0.0, 0.0, None
    for step, to in enumerate([2.0, 2.0, 3.0, 1.0, 3.0, -3.0, 0.0]):
        layer.weight.grad = layer.weight.detach() - to  # a step of 1 leads there
        optimizer.step()
        if step == 0:
            average, last = to, to
        else:
            change = np.sign(to - last) if frozen is None else 0.0
            frequency = 0.3 * (change * direction == -1) + 0.7 * frequency
            direction, last = change or direction, to
            if frozen is None and frequency > 0.4:
                frozen = round(average)
            average = 0.3 * to + 0.7 * average
        codes.append(int(layer.weight_codes().values))
        assert codes[-1] == (to if frozen is None else frozen)
    assert codes == [2, 2, 3, 1, 2, 2, 2]


def test_a_binary_weight_freezes_at_the_sign_that_it_has_had_more_often() -> None:
    model = nn.Sequential(qconv.convert(nn.Conv2d(1, 1, 1, bias=False), schemes.bnn(), skip=()))
    layer: Any = model[0]
    for often in (-1.0, 1.0):
        with torch.no_grad():
            layer.weight.fill_(often)
        optimizer = torch.optim.SGD([layer.weight], lr=1.0)
        Oscillations(freeze=0.3, momentum=0.1).attach(model, optimizer)
        for step in range(40):
            to = -often if step % 4 == 3 else often
            layer.weight.grad = layer.weight.detach() - to
            optimizer.step()
        assert float(optimizer.state[layer.weight]["oscillation_frozen"]) == 1
        assert layer.weight.item() == often


def test_ovsw_without_a_threshold_leaves_all_weights() -> None:
    layer = qconv.QConv2d(2, 3, 3, scheme=schemes.bnn())
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    OvSW(delta=0, decay=1.0, threshold=0).attach(layer, optimizer)
    before = layer.weight.detach().clone()
    layer.weight.grad = torch.zeros_like(before)
    optimizer.step()
    assert layer.weight.equal(before)


def test_ovsw_follows_its_formula() -> None:
    model = network(schemes.bnn())
    twin = copy.deepcopy(model)
    optimizers = [optimizer_of(each, "momentum") for each in (model, twin)]
    OvSW(delta=0.05, decay=0.01, momentum=0.8, threshold=0.03).attach(model, optimizers[0])
    flips: dict[int, Tensor] = {}
    signs: dict[int, Tensor] = {}
    for step in range(25):
        optimizers[0].zero_grad()
        loss(model, step % 3).backward()
        optimizers[0].step()
        optimizers[1].zero_grad()
        loss(twin, step % 3).backward()
        for number, layer in enumerate(quantized(twin)):
            weight, grad = layer.weight.detach(), layer.weight.grad
            silent = flips.get(number, torch.zeros_like(weight)) < 0.03
            of_filter = [weight[c] for c in range(4)] if number == 0 else [
                weight[2 * (c // 3) : 2 * (c // 3) + 2, c % 3] for c in range(6)
            ]  # fmt: skip
            of_grad = [grad[c] for c in range(4)] if number == 0 else [
                grad[2 * (c // 3) : 2 * (c // 3) + 2, c % 3] for c in range(6)
            ]  # fmt: skip
            for w, g in zip(of_filter, of_grad, strict=True):
                share = g.square().sum().sqrt().clamp(min=1e-6) / w.square().sum().sqrt().clamp(min=1e-3)
                if share < 0.05:
                    g.mul_(0.05 / share)
            grad.add_(0.01 * weight * silent)
        optimizers[1].step()
        for number, layer in enumerate(quantized(twin)):
            sign = layer.weight >= 0
            if number in signs:
                flips[number] = 0.8 * flips[number] + 0.2 * (sign != signs[number]).float()
            else:
                flips[number] = torch.zeros_like(layer.weight)
            signs[number] = sign
    assert max(float(each.max()) for each in flips.values()) > 0.1
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rule", [Oscillations(freeze=(0.04, 0.01)), OvSW(delta=0.05)], ids=str)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_resumed_optimizer_goes_on_bit_for_bit(rule: StepRule, optimizer: str) -> None:
    model = network(schemes.bnn())
    made = optimizer_of(model, optimizer)
    rule.attach(model, made, total_steps=40)
    steps(model, made, 20)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": made.state_dict()}, file)
    steps(model, made, 20, 20)
    file.seek(0)
    stored = torch.load(file, weights_only=True)
    again = network(schemes.bnn(), seed=1)
    remade = optimizer_of(again, optimizer)
    rule.attach(again, remade, total_steps=40)
    again.load_state_dict(stored["model"])
    remade.load_state_dict(stored["optimizer"])
    steps(again, remade, 20, 20)
    assert same(again.state_dict(), model.state_dict())


@pytest.mark.parametrize("rule", [Oscillations(freeze=0.015), OvSW(delta=0.5)], ids=str)
@pytest.mark.parametrize("as_keyword", [False, True])
def test_gradients_of_a_closure_are_changed_too(rule: StepRule, as_keyword: bool) -> None:
    models = [network(schemes.bnn()) for _ in range(2)]
    optimizers = [optimizer_of(model, "momentum") for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        rule.attach(model, optimizer)
    for step in range(20):

        def closure(step: int = step) -> Any:
            optimizers[0].zero_grad()
            value = loss(models[0], step)
            value.backward()
            return value

        value = optimizers[0].step(closure=closure) if as_keyword else optimizers[0].step(closure)
        assert isinstance(value, Tensor)
    steps(models[1], optimizers[1], 20)
    assert same(*(model.state_dict() for model in models))


def test_a_pair_of_thresholds_begins_later() -> None:
    model = network(schemes.lsq(3, 4))
    made = optimizer_of(model, "adam")
    Oscillations(freeze=(0.02, 0.01), momentum=0.01, start=0.5).attach(model, made, total_steps=80)
    steps(model, made, 39)
    assert "oscillation_frozen" not in made.state[quantized(model)[1].weight]
    steps(model, made, 41, 39)
    assert made.state[quantized(model)[1].weight]["oscillation_frozen"].sum() > 0


def test_a_removed_rule_does_nothing() -> None:
    models = [network(schemes.bnn()) for _ in range(2)]
    optimizers = [optimizer_of(model, "momentum") for model in models]
    OvSW(delta=0.5).attach(models[0], optimizers[0]).remove()
    for model, optimizer in zip(models, optimizers, strict=True):
        steps(model, optimizer, 3)
    assert same(*(model.state_dict() for model in models))
    assert not any("flip_frequency" in state for state in optimizers[0].state.values())


def test_pruned_weights_are_refused() -> None:
    model = nn.Sequential(*(qconv.QConv2d(3, 3, 3, scheme=schemes.lsq(2, 2)) for _ in range(2)))
    l1_unstructured(model[0], "weight", 0.3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match=r"Oscillations\(.*\) can't work on layer '0' \(QConv2d, .* weight is comp"):
        Oscillations(freeze=0.02).attach(model, optimizer)
    model[0].requires_grad_(False)
    Oscillations(freeze=0.02).attach(model, optimizer).remove()


def test_frozen_layers_are_left_alone() -> None:
    model = network(schemes.bnn())
    quantized(model)[0].weight.requires_grad_(False)
    before = quantized(model)[0].weight.clone()
    optimizer = optimizer_of(model, "adam")
    Oscillations(freeze=0.0).attach(model, optimizer)
    OvSW().attach(model, optimizer)
    steps(model, optimizer, 5)
    assert torch.equal(quantized(model)[0].weight, before)


def test_dampening_is_the_distance_to_the_levels() -> None:
    model = network(schemes.lsq(2, 4))
    steps(model, optimizer_of(model, "adam"), 5)
    expected, gradients = 0.0, []
    for layer in quantized(model):
        with torch.no_grad():
            layer.weight.flatten()[::5] *= 8  # beyond the levels
        scale = float(layer.weight_codes().scale.detach())
        weight = layer.weight.detach().double().numpy()
        inside = (weight >= -2 * scale) & (weight <= scale)
        distance = (weight - scale * np.clip(np.round(weight / scale), -2, 1)) * inside
        n = layer.filters()[0].numel()
        expected += (distance**2).sum() / n
        gradients.append(2 * distance / n)
        assert not inside.all()
    model.zero_grad()
    penalty = dampening_penalty(model)
    penalty.backward()
    np.testing.assert_allclose(float(penalty.detach()), expected, rtol=1e-5)
    for layer, gradient in zip(quantized(model), gradients, strict=True):
        np.testing.assert_allclose(layer.weight.grad.numpy(), gradient, atol=1e-6)
        assert layer.weight_quantizer.step.grad is None


@pytest.mark.parametrize(
    ("rule", "scheme", "error", "message"),
    [
        (Oscillations(), schemes.lsq(8, 8), ValueError, r"Oscillations\(.*\) finds no layer in model \(Sequential\)"),
        (OvSW(), schemes.lsq(2, 2), ValueError, r"finds no layer"),
        (Oscillations(freeze=(0.1, 0.2)), schemes.bnn(), ValueError, r"schedule, freeze: attach it with total_steps"),
        (Oscillations(freeze=0.1), schemes.adabin(), TypeError, r"can't freeze 0\.0\.weight .* levels follow the wei"),
        (Oscillations(freeze=0.1, max_bits=5), schemes.shift_q(), TypeError, r"its levels are not evenly spaced"),
        (OvSW(), TWO_STAGES, TypeError, r"0\.0\.weight with two_stage.* changes during"),
        (Oscillations(), TWO_STAGES, TypeError, r"train each stage in a separate run"),
        (None, schemes.adabin(), TypeError, r"0\.0\.weight .* can't be drawn to its levels: its levels follow the we"),
        (None, TWO_STAGES, TypeError, r"can't be drawn to its levels: its quantizer changes"),
        *(
            (None, schemes.ewgs(bits, bits), TypeError, r"with ewgs.* can't be .* to its levels: its levels move apart")
            for bits in (2, 3, 4)
        ),
        (None, schemes.lsq(8, 8), ValueError, "must have a trainable weight of at most 4 bits"),
    ],
    ids=str,
)
def test_what_cannot_work_is_said(rule: StepRule | None, scheme: Any, error: type[Exception], message: str) -> None:
    """Of rules, and without one of the penalty."""
    model = network(scheme)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(error, match=message):
        dampening_penalty(model) if rule is None else rule.attach(model, optimizer)


def test_weights_of_low_precision_are_refused() -> None:
    model = network(schemes.bnn()).bfloat16()
    with pytest.raises(TypeError, match=r"OvSW.* needs 0\.0\.weight in float32, it is torch.bfloat16: use autocast"):
        OvSW().attach(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_schedule_is_half_a_cosine() -> None:
    assert [at((0.04, 0.01), p) for p in (0.0, 0.5, 1.0, 2.0)] == pytest.approx([0.04, 0.025, 0.01, 0.01])
    assert at(0.3, 0.7) == 0.3
    assert [since(0.25, p) for p in (0.0, 0.25, 0.625, 1.0)] == pytest.approx([0.0, 0.0, 0.5, 1.0])


def test_gradients_that_the_optimizer_unscales_are_refused() -> None:
    def scaled() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        model = network(schemes.bnn())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
        qconv.after_every_step(optimizer, model)
        OvSW().attach(model, optimizer)
        scaler: Any = torch.amp.GradScaler("cpu", init_scale=1024.0)  # pyright: ignore[reportPrivateImportUsage]
        scaler.scale(loss(model, 0)).backward()
        return model, optimizer, scaler

    _, optimizer, scaler = scaled()
    with pytest.raises(RuntimeError, match=r"unscales later: call scaler.unscale_\(optimizer\) before the step"):
        scaler.step(optimizer)
    model, optimizer, scaler = scaled()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    twin = network(schemes.bnn())
    plain = torch.optim.SGD(twin.parameters(), lr=0.1)
    qconv.after_every_step(plain, twin)
    OvSW().attach(twin, plain)
    loss(twin, 0).backward()
    plain.step()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.nightly
def test_a_run_freezes_dampens_and_goes_on(tmp_path: Path) -> None:
    """An interrupted run ends as one that was not, with the rules' state and schedules."""
    words = [
        *("scheme=lsq", "scheme.weight_bits=3", "trainer=cpu", "report=false", "data.batch_size=200"),
        *("optimizer.rules={quantizers:{lr:1e-4}}", "trainer.max_epochs=3"),
        "step_rules=[{_target_: qconv.optim.Oscillations, freeze: [0.03, 0.01], momentum: 0.01}]",
    ]
    whole, parts, plain = (tmp_path / name for name in ("whole", "parts", "plain"))
    train(config(*words, "dampening=0.1", f"run_dir={whole}"))
    rows = read_csv(whole / "diagnostics.csv")
    assert max(float(row["weights_frozen"]) for row in rows) > 0
    assert max(float(row["weights_oscillating"]) for row in rows) > 0
    terminate(1, 3, parts, *words, "dampening=0.1")
    train(config(*words, "dampening=0.1", f"run_dir={parts}", "resume=auto"))
    assert same(last_state(whole), last_state(parts))
    train(config(*words, f"run_dir={plain}"))
    assert not same(last_state(whole), last_state(plain))


@pytest.mark.nightly
def test_a_run_pulls_bipers_sine_to_0(tmp_path: Path) -> None:
    words = ("scheme=biper", "trainer=cpu", "report=false", "data.batch_size=200", "trainer.max_epochs=1")
    means = []
    for factor in (0, 100):
        place = tmp_path / str(factor)
        train(config(*words, "model.width=4", f"sine_penalty={factor}", f"run_dir={place}"))
        means.append((20 * last_state(place)["model.blocks.1.conv.weight"]).sin().square().mean())
    assert means[1] < 0.5 * means[0]


def test_what_a_wrapped_optimizer_saves() -> None:
    model = network(schemes.lsq(3, 8))
    optimizer = Lookahead(torch.optim.SGD(model.parameters(), lr=0.1))
    qconv.after_every_step(optimizer, model)
    Oscillations(freeze=0.02).attach(model, optimizer)
    steps(model, optimizer, 2)
    saved = {name for state in optimizer.state_dict()["state"].values() for name in state}
    assert {"oscillation_frequency", "oscillation_frozen"} <= saved


def test_an_optimizer_that_saves_nothing_of_it() -> None:
    class ZeroRedundancyOptimizer(torch.optim.SGD):
        """As torch's, which needs a process group: the one inside has some of the parameters."""

        optim: torch.optim.Optimizer

    model = network(schemes.lsq(3, 8))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), lr=0.1)
    optimizer.optim = torch.optim.SGD(model[2].parameters(), lr=0.1)
    with pytest.warns(UserWarning, match=r"ZeroRedundancyOptimizer does not save what Oscillations\("):
        Oscillations(freeze=0.02).attach(model, optimizer)


class Inner(torch.optim.Adam):
    """Changes gradients, then steps as its parent: torch calls the hooks of both."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@pytest.mark.parametrize("with_closure", [False, True])
def test_a_step_within_a_step_is_one(with_closure: bool) -> None:
    states = []
    for make in (torch.optim.Adam, Inner):
        model = network(schemes.xnor())
        optimizer = make(model.parameters(), lr=0.01)
        qconv.after_every_step(optimizer, model)
        OvSW().attach(model, optimizer)
        if with_closure:
            for index in range(4):
                optimizer.zero_grad()

                def closure(index: int = index, model: nn.Module = model) -> Tensor:
                    value = loss(model, index)
                    value.backward()
                    return value

                optimizer.step(closure)  # pyright: ignore[reportArgumentType]
        else:
            steps(model, optimizer, 4)
        layer = quantized(model)[0]
        states.append((layer.weight.detach(), optimizer.state[layer.weight]))
    (weight, state), (inner_weight, inner_state) = states
    assert inner_state["OvSW_steps"] == state["OvSW_steps"] == 4
    assert torch.equal(inner_weight, weight)


# After the step: latent weights are clamped, in a hand-written loop as elsewhere


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


def plain() -> nn.Sequential:
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
    model = plain()
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
    model = qconv.convert(plain(), schemes.bnn())
    optimizer = SAM(model.parameters(), torch.optim.SGD, lr=10.0)
    qconv.after_every_step(optimizer, model)
    model(torch.rand(2, 3, 6, 6)).sum().backward()
    optimizer.move(1)
    optimizer.second_step()
    quantized: Any = model[3]
    assert quantized.weight.abs().max() == 1


def test_a_weight_that_two_layers_share_is_clamped_once() -> None:
    layers = [qconv.QConv2d(4, 4, 3, scheme=schemes.shift_q()) for _ in range(2)]
    layers[1].weight = layers[0].weight
    before = layers[0].weight.detach().clone()
    qconv.after_step(nn.Sequential(*layers))
    assert layers[0].weight.sign().equal(before.sign())
