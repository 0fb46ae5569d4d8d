"""Schemes that change in the course of training."""

import copy
import pickle
from functools import partial
from typing import Any, cast

import pytest
import torch
from conftest import METHODS
from timm.optim.adamp import AdamP
from timm.optim.lookahead import Lookahead
from timm.optim.rmsprop_tf import RMSpropTF
from torch import nn

import qconv
from qconv import schemes
from qconv.loop.optimizer_step import final_from, is_final
from qconv.quantizers import Mixed, Sign
from qconv.quantizers.part import has_begun


def trained_at(model: nn.Module, progress: float) -> nn.Module:
    """The model after one training step at ``progress``."""
    qconv.set_progress(model, progress)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    qconv.after_every_step(optimizer, model)
    model(torch.randn(2, 4, 6, 6)).square().mean().backward()
    assert all(parameter.grad is None or parameter.grad.isfinite().all() for parameter in model.parameters())
    optimizer.step()
    return model


OPTIMIZERS = {
    "Adam": partial(torch.optim.Adam, amsgrad=True),
    "AdamW": torch.optim.AdamW,
    "Adamax": torch.optim.Adamax,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "RMSprop": torch.optim.RMSprop,
    "centered RMSprop": partial(torch.optim.RMSprop, centered=True, weight_decay=1e-4),
    "Adadelta": partial(torch.optim.Adadelta, weight_decay=0.1),
    "Adagrad": partial(torch.optim.Adagrad, initial_accumulator_value=0.1, weight_decay=0.1),
    "SGD": partial(torch.optim.SGD, momentum=0.9, weight_decay=0.1),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_the_tensors_of_a_stage_train_as_new_ones(make: Any) -> None:
    layer = qconv.QConv2d(4, 8, 3)
    optimizer = make(layer.parameters(), lr=1e-3)
    qconv.after_every_step(optimizer, layer)
    layer.set_scheme(schemes.staged([(0, schemes.bwn()), (0.5, schemes.lsq(4, 4))]))
    step = cast(Any, layer.weight_quantizer).quantizers[1].step
    optimizer.add_param_group({"params": list(layer.weight_quantizer.parameters())})

    def train(steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            layer(torch.randn(2, 4, 6, 6)).square().mean().backward()
            optimizer.step()

    def count() -> float:
        return float(optimizer.state[step].get("step", 0))

    train(5)
    assert optimizer.state[step]  # as what saves the states of all tensors expects
    assert count() == 0
    qconv.set_progress(layer, 0.5)
    before = step.detach().clone()
    new = copy.deepcopy(step)
    train(1)
    new.grad = step.grad
    make([new], lr=1e-3).step()
    assert not step.equal(before)
    assert step.equal(new)
    train(1)
    assert count() == 2 * ("step" in optimizer.state[step])


def test_moments_of_adams_kin_are_set_back() -> None:
    layer = qconv.QConv2d(4, 8, 3, scheme=schemes.staged([(0, schemes.bwn()), (0.5, schemes.lsq(4, 4))]))
    optimizer = AdamP(layer.parameters(), lr=1e-3)
    qconv.after_every_step(optimizer, layer)
    for _ in range(3):
        layer(torch.randn(2, 4, 6, 6)).square().mean().backward()
        optimizer.step()
    assert optimizer.state[cast(Any, layer.weight_quantizer).quantizers[1].step]["step"] == 0


def test_optimizers_that_start_elsewhere_are_left_alone() -> None:
    steps = []
    for every in (True, False):
        torch.manual_seed(0)
        layer = qconv.QConv2d(4, 8, 3, scheme=schemes.staged([(0, schemes.bwn()), (0.5, schemes.lsq(4, 4))]))
        optimizer = RMSpropTF(layer.parameters(), lr=1e-3)  # whose squares start at 1
        if every:
            qconv.after_every_step(optimizer, layer)
        for number in range(6):
            qconv.set_progress(layer, number / 6)
            optimizer.zero_grad()
            layer(torch.randn(2, 4, 6, 6)).square().mean().backward()
            optimizer.step()
            if not every:
                qconv.after_step(layer)
        steps.append(cast(Any, layer.weight_quantizer).quantizers[1].step.detach())
    assert steps[0].equal(steps[1])


def test_optimizers_that_keep_other_things() -> None:
    layer = qconv.QConv2d(4, 8, 3, scheme=schemes.staged([(0, schemes.bwn()), (0.5, schemes.lsq(4, 4))]))
    waiting = [*cast(Any, layer.weight_quantizer).quantizers[1].parameters()]
    kept = torch.optim.LBFGS(
        [*waiting, layer.weight, *layer.input_quantizer.parameters()], max_iter=2
    )  # all of it is with the first tensor
    made = torch.optim.Adagrad(layer.parameters(), initial_accumulator_value=0.5)  # before the first step

    def closure() -> Any:
        kept.zero_grad()
        loss = layer(torch.ones(2, 4, 6, 6)).square().mean()
        loss.backward()
        return loss

    for optimizer in (kept, made):
        qconv.after_every_step(optimizer, layer)
        for _ in range(3):
            optimizer.step(closure)
    assert kept.state[waiting[0]]["n_iter"] >= 3
    assert made.state[waiting[0]]["sum"].item() == 0.5


def test_a_stage_of_the_same_class_goes_on_and_another_starts_anew() -> None:
    layers = {
        "same": qconv.QConv2d(4, 8, 3, scheme=schemes.staged([(0, schemes.pact(4, 4)), (0.5, schemes.pact(2, 2))])),
        "other": qconv.QConv2d(4, 8, 3, scheme=schemes.staged([(0, schemes.apot(4, 4)), (0.5, schemes.pact(2, 2))])),
    }
    for name, layer in layers.items():
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, weight_decay=0.5)
        qconv.after_every_step(optimizer, layer)
        qconv.set_progress(layer, 0.0)
        for _ in range(5):
            optimizer.zero_grad()
            layer(torch.randn(2, 4, 6, 6)).square().mean().backward()
            optimizer.step()
        first, second = cast(Any, layer.input_quantizer.quantizers)
        before = first.alpha.detach().clone()
        start = qconv.quantizers.PACT(2).alpha
        assert second.alpha < start  # decayed while it waited
        qconv.set_progress(layer, 0.5)
        assert second.alpha == (before if name == "same" else start)


def test_a_stage_that_is_written_over_is_left() -> None:
    """As by weights of an earlier epoch that are restored one by one."""
    layer = qconv.QConv2d(3, 4, 3, scheme=schemes.staged([(0, schemes.lsq(8, None)), (0.5, schemes.bwn())]))
    input = torch.randn(2, 3, 5, 5)
    expected, before = layer(input), [tensor.clone() for tensor in layer.state_dict().values()]
    qconv.set_progress(layer, 0.6)
    assert not torch.equal(layer(input), expected)
    for tensor, value in zip(layer.state_dict().values(), before, strict=True):
        tensor.copy_(value)
    assert torch.equal(layer(input), expected)


def test_schedules_run_within_their_stage() -> None:
    layer = qconv.QConv2d(4, 8, 3, scheme=schemes.two_stage(schemes.irnet(), 0.5))
    surrogate = layer.weight_quantizer.quantizers[1].surrogate  # pyright: ignore
    alone = qconv.QConv2d(4, 8, 3, scheme=schemes.irnet())
    for progress, within in ((0.5, 0.0), (0.75, 0.5), (1.0, 1.0)):
        qconv.set_progress(layer, progress)
        qconv.set_progress(alone, within)
        assert surrogate.t == alone.weight_quantizer.surrogate.t  # pyright: ignore
    inq = qconv.QConv2d(4, 8, 3, scheme=schemes.two_stage(schemes.inq(), 0.5))
    assert inq.weight_quantizer.final_from == 0.5 + 0.5 * 0.75
    for progress, share, final in ((0.5, 0.5, False), (0.875, 1.0, True)):
        qconv.set_progress(inq, progress)
        assert inq.weight_quantizer.quantizers[1].frozen.float().mean() == share  # pyright: ignore
        assert inq.weight_quantizer.is_final == final


def test_what_is_final() -> None:
    assert qconv.QConv2d(4, 8, 3, scheme=schemes.bnn()).weight_quantizer.is_final
    layer = qconv.QConv2d(4, 8, 3, scheme=schemes.two_stage(schemes.bnn(), 0.5))
    assert (layer.weight_quantizer.is_final, layer.weight_quantizer.final_from) == (False, 0.5)
    qconv.set_progress(layer, 0.5)
    assert layer.weight_quantizer.is_final
    first = qconv.QConv2d(4, 8, 3, scheme=schemes.two_stage(schemes.bnn(), 1))
    assert (first.weight_quantizer.is_final, first.weight_quantizer.bits) == (True, 32)


def test_convert_takes_them() -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3), nn.Conv2d(4, 2, 1))
    qconv.convert(model, schemes.two_stage(schemes.bnn()), first_last="w8", grad_quantizer=qconv.quantizers.FP8)
    trained_at(trained_at(model, 0.0), 0.9)
    layer = model[1]
    assert isinstance(layer, qconv.QConv2d)
    assert layer.quantized_weight().abs().eq(1).all()


def test_layer_after_layer() -> None:
    model = nn.Sequential(*(nn.Conv2d(4, 4, 1) for _ in range(5)))
    scheme = schemes.layerwise(schemes.bnn(), inputs=(0, 0.4), weights=(0.5, 0.9))
    assert scheme.name == "layerwise(bnn(), inputs=(0.0, 0.4), weights=(0.5, 0.9))"
    qconv.convert(model, scheme, skip=("first",), overrides={"3": schemes.bwn()}, grad_quantizer=qconv.quantizers.FP8)
    inner, after, last = cast(Any, (model[1], model[2], model[4]))
    assert last.scheme.name == "bnn() + inputs from 0.4 + weights from 0.9 + grad FP8(format='e4m3', scale='dynamic')"
    assert not is_final(model)
    assert final_from(model) == 0.9
    counts = {0.0: (1, 0), 0.19: (1, 0), 0.2: (2, 0), 0.4: (3, 0), 0.5: (3, 1), 0.7: (3, 2), 0.9: (3, 3)}
    for progress, expected in counts.items():
        trained_at(model, progress)
        signs = [layer.input_quantizer(torch.tensor([0.3])).item() == 1 for layer in (inner, after, last)]
        binary = [layer.quantized_weight().abs().eq(1).all().item() for layer in (inner, after, last)]
        assert (sum(signs), sum(binary)) == expected, progress
        assert sorted(signs, reverse=True) == signs  # from the input to the output
    assert is_final(model)


@pytest.mark.parametrize(
    ("scheme", "epochs"),
    [
        (schemes.layerwise(schemes.bnn(), inputs=(0, 0.3), weights=(0.3, 0.9)), 10),  # 0.3 + 0.6 is above 0.9
        (schemes.layerwise(schemes.bnn(), weights=(0.4, 0.9), ramp=0.05), 20),
        (schemes.two_stage(schemes.inq(), 0.8), 20),
        (schemes.two_stage(schemes.inq(portions=(0.2, 0.4, 0.6, 0.8, 1)), 0.75), 20),
    ],
    ids=str,
)
def test_sums_of_progress_that_are_not_quite_theirs(scheme: qconv.Scheme, epochs: int) -> None:
    model = qconv.convert(nn.Sequential(*(nn.Conv2d(4, 4, 3) for _ in range(3))), scheme, skip=())
    assert has_begun(final_from(model), (epochs - 1) / epochs)  # so `Progress` takes this number of epochs
    for epoch in range(epochs):
        qconv.set_progress(model, epoch / epochs)
    assert is_final(model)


def test_names_of_schemes_of_schemes() -> None:
    assert schemes.two_stage(schemes.reactnet(), 0.25).name == "two_stage(reactnet(), start=0.25)"
    assert schemes.staged([(0, schemes.bnn()), (0.5, schemes.xnor())]).name == "staged([(0, bnn()), (0.5, xnor())])"
    grad = qconv.quantizers.DoReFaGradient
    scheme = schemes.layerwise(schemes.bnn().with_grad(grad))
    name = "layerwise(bnn(), inputs=(0.0, 0.4), weights=(0.4, 0.8))"
    assert scheme.name == scheme.with_grad(grad).name == f"{name} + grad DoReFaGradient(bits=6)"
    assert scheme.with_grad(None).name == name
    assert scheme.at_depth(0).name == "bnn() + inputs from 0 + weights from 0.4 + grad DoReFaGradient(bits=6)"
    signed = schemes.layerwise(schemes.lsq(4, 4)).with_signed_input(True).with_grad(grad).at_depth(0.5)
    inner = "lsq(weight_bits=4, input_bits=4) + signed inputs + inputs from 0.2 + weights from 0.6"
    assert signed.name == f"{inner} + grad DoReFaGradient(bits=6)"
    staged = schemes.staged([(0, schemes.bnn().with_grad(grad)), (0.5, schemes.bnn())])
    assert staged.with_grad(grad).name == f"{staged.name} + grad DoReFaGradient(bits=6)"


def test_one_layer_has_no_depth() -> None:
    scheme = schemes.layerwise(schemes.bnn())
    with pytest.raises(ValueError, match=r"begins at a different time in each layer: .* use scheme.at_depth\(depth\)"):
        qconv.QConv2d(4, 8, 3, scheme=scheme)
    layer = qconv.QConv2d(4, 8, 3, scheme=scheme.at_depth(0.5))
    assert (layer.input_quantizer.final_from, layer.weight_quantizer.final_from) == (0.2, 0.6000000000000001)
    alone = nn.Sequential(nn.Conv2d(4, 8, 3))
    assert cast(Any, qconv.convert(alone, scheme, skip=()))[0].weight_quantizer.final_from == 0.4
    bnn = schemes.bnn()
    assert bnn.at_depth(0.5) is bnn


def test_the_scales_of_a_sine_go_on_as_those_of_its_sign() -> None:
    scheme = schemes.staged([(0, schemes.biper(sine=True)), (0.5, schemes.biper())])
    layer = qconv.QConv2d(4, 8, 3, scheme=scheme)
    trained_at(layer, 0.0)
    first, second = cast(Any, layer.weight_quantizer.quantizers)
    learned = first.alpha.detach().clone()
    weight = layer.weight.detach()
    torch.testing.assert_close(layer.quantized_weight(), learned.view(-1, 1, 1, 1) * (20 * weight).sin())
    qconv.set_progress(layer, 0.5)
    assert second.alpha.equal(learned)
    assert layer.quantized_weight().abs().equal(learned.abs().view(-1, 1, 1, 1).expand_as(weight))


def test_ranges_of_ewgs_go_on_with_fewer_bits() -> None:
    layer = qconv.QConv2d(4, 8, 3, scheme=schemes.staged([(0, schemes.ewgs(4, 4)), (0.5, schemes.ewgs(2, 2))]))
    trained_at(layer, 0.0)
    before = {
        role: [tensor.detach().clone() for tensor in quantizer.quantizers[0].tensors()]  # pyright: ignore
        for role, quantizer in layer.quantizers().items()
    }
    qconv.set_progress(layer, 0.5)
    layer(torch.randn(2, 4, 6, 6) * 9)
    for role, quantizer in layer.quantizers().items():
        torch.testing.assert_close([*quantizer.quantizers[1].tensors()], before[role], rtol=0, atol=0)  # pyright: ignore


def test_a_ramp_quantizes_more_and_more_elements_of_a_weight() -> None:
    scheme = schemes.layerwise(schemes.bnn(), inputs=(0, 0), weights=(0.4, 0.4), ramp=0.4)
    assert scheme.name == "layerwise(bnn(), inputs=(0.0, 0.0), weights=(0.4, 0.4), ramp=0.4)"
    layer = qconv.QConv2d(8, 16, 3, scheme=scheme.at_depth(0))
    with torch.no_grad():
        layer.weight.mul_(20)  # some are beyond ±1, where they are clipped
    trained_before = torch.zeros_like(layer.weight, dtype=torch.bool)
    for progress, share in ((0.2, 0.0), (0.4, 0.0), (0.5, 0.25), (0.6, 0.5), (0.79, 0.975), (0.8, 1.0)):
        qconv.set_progress(layer, progress)
        weight = layer.weight.detach()
        found = layer.weight_quantizer(weight)  # as in training; quantized_weight() is that of evaluation
        signs = torch.where(weight < 0, -1.0, 1.0)
        rest = weight if progress < 0.4 else weight.clamp(-1, 1)
        is_sign = (found == signs) & (rest != signs)
        assert ((found == signs) | (found == rest)).all()
        unsure = rest == signs  # the two can't be told apart
        assert is_sign[~unsure].float().mean().item() == pytest.approx(share, abs=0.06)
        assert not (trained_before & ~is_sign & ~unsure).any()  # what was quantized once stays so
        trained_before |= is_sign
        layer.eval()
        assert progress < 0.4 or layer.quantized_weight().equal(signs)
        assert is_final(layer) == (progress >= 0.8)
        layer.train()
    assert final_from(layer) == pytest.approx(0.8)


@pytest.mark.parametrize("is_weight", [True, False])
def test_gradients_of_a_mixture(is_weight: bool) -> None:
    mixed = Mixed(Sign, is_weight)
    mixed.set_progress_(0.5, None)
    masks = []
    for _ in range(2):
        x = (torch.randn(40, 50, dtype=torch.double) * 1.5).requires_grad_()
        key, step = mixed.stream.tensors()
        quantized = mixed.stream.uniform(x, key, step) < 0.5
        grad = torch.randn(40, 50, dtype=torch.double)
        found = mixed(x)
        signs = torch.where(x < 0, -1.0, 1.0).double()
        assert found.equal(torch.where(quantized, signs, x.clamp(-1, 1)))
        found.backward(grad)
        assert x.grad is not None
        assert x.grad.equal(grad * (x.abs() <= 1))  # the hard clip's, and the clamp's
        assert quantized.float().mean().item() == pytest.approx(0.5, abs=0.05)
        masks.append(quantized)
        mixed.after_step_(None)
    assert masks[0].equal(masks[1]) == is_weight


def test_learned_tensors_of_a_mixture_go_on_with_all_elements() -> None:
    scheme = schemes.layerwise(schemes.siman(), inputs=(0, 0), weights=(0.2, 0.2), ramp=0.2)
    layer = qconv.QConv2d(4, 8, 3, scheme=scheme.at_depth(0))
    for progress in (0.0, 0.2, 0.3):
        trained_at(layer, progress)
    mixed = cast(Any, layer.weight_quantizer).quantizers[1].quantizer
    learned = mixed.alpha.detach().clone()
    assert not learned.equal(layer.weight.detach().abs().mean((1, 2, 3)))
    qconv.set_progress(layer, 0.4)
    assert cast(Any, layer.weight_quantizer).quantizers[2].alpha.equal(learned)
    assert layer.quantized_weight().abs().equal(learned.abs().view(-1, 1, 1, 1).expand_as(layer.weight))


@pytest.mark.nightly
def test_a_mixture_is_saved_copied_and_compiled() -> None:
    scheme = schemes.layerwise(schemes.reactnet(), inputs=(0, 0), weights=(0.2, 0.2), ramp=0.3).at_depth(0)
    layer = trained_at(qconv.QConv2d(4, 8, 3, scheme=scheme), 0.25)
    input = torch.randn(2, 4, 6, 6)
    expected = layer(input)
    again = qconv.QConv2d(4, 8, 3, scheme=scheme)
    again.load_state_dict(layer.state_dict())
    assert again(input).equal(expected)
    for copied in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert copied(input).equal(expected)
    torch.testing.assert_close(torch.compile(layer, backend="aot_eager")(input), expected)
    qconv.lean(layer)
    torch.testing.assert_close(layer(input), expected)
    wrong = layer.state_dict() | {"input_quantizer.quantizers.0.share": torch.tensor(2.0)}
    with pytest.raises(ValueError, match=r"share \(=2.0\) must be from 0 to 1"):
        again.load_state_dict(wrong)


STAGED = ("shift_ps", "staged", "two_stage")  # the first can't be in a stage


@pytest.mark.parametrize("name", [name for name in METHODS if not name.startswith(STAGED)])
@pytest.mark.parametrize("ramp", [None, 0.0, 0.2])
def test_a_stage_behind_float_weights_begins_as_a_new_layer_would(ramp: float | None, name: str) -> None:
    scheme = METHODS[name]
    staged = schemes.two_stage(scheme) if ramp is None else schemes.layerwise(scheme, weights=(0.4, 0.7), ramp=ramp)
    model = qconv.convert(nn.Sequential(nn.Conv2d(4, 8, 3)), staged, skip=())
    layer: Any = model[0]
    qconv.set_progress(model, 0.0)
    new = qconv.QConv2d(4, 8, 3, scheme=scheme)
    with torch.no_grad():
        new.weight.copy_(layer.weight.mul_(3).add_(0.01))
    new.weight_quantizer.initialize(new.filters())
    qconv.set_progress(model, 0.5)
    begun = layer.weight_quantizer.current
    assert isinstance(begun, Mixed) == bool(ramp)
    begun = begun.quantizer if isinstance(begun, Mixed) else begun
    found = {key: getattr(begun, key) for key in (*dict(begun.named_parameters()), *begun.kept)}
    assert found.keys() >= dict(new.weight_quantizer.named_parameters()).keys()
    for key, value in found.items():
        torch.testing.assert_close(value, getattr(new.weight_quantizer, key), msg=f"{key} is {value}")


@pytest.mark.parametrize("lean", [False, True])
@pytest.mark.parametrize("ramp", [0.0, 0.2])
@pytest.mark.parametrize("scheme", [schemes.xnor(scale_map=True, padding_value=1), schemes.bnn(-1)], ids=str)
def test_a_float_stage_is_the_float_layer(scheme: qconv.Scheme, ramp: float, lean: bool) -> None:
    """Neither multiplied by the map of input magnitudes, nor padded with ±1, until the inputs are signs."""
    layers: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
        "convolution": (nn.Conv2d(4, 6, 3, padding=1), (2, 4, 5, 5)),
        "linear": (nn.Linear(4, 6), (3, 4)),
    }
    staged = schemes.layerwise(scheme, inputs=(0.5, 0.5), weights=(0.6, 0.6), ramp=ramp)
    for layer, shape in layers.values():
        model = qconv.convert(nn.Sequential(copy.deepcopy(layer)), staged, skip=())
        model = qconv.lean(model) if lean else model
        plain = qconv.convert(nn.Sequential(copy.deepcopy(layer)), scheme, skip=())
        input = torch.randn(shape).clamp(-1, 1)
        for progress in (0.0, 0.4):
            qconv.set_progress(model, progress)
            for mode in (True, False):
                torch.testing.assert_close(model.train(mode)(input), layer(input))
        if ramp:  # no element is quantized yet
            qconv.set_progress(model, 0.5)
            torch.testing.assert_close(model.train()(input), layer(input))
        qconv.set_progress(model, 0.9)
        torch.testing.assert_close(model.train()(input), plain(input))
        torch.testing.assert_close(model.eval()(input), plain.eval()(input))


def test_a_slow_weight_starts_where_its_stage_does() -> None:
    """Lookahead averages each weight with one of some steps ago, which knows nothing of the first batch of a stage."""
    layer = qconv.QConv2d(4, 8, 3, scheme=schemes.staged([(0, schemes.bnn()), (0.5, schemes.lsq(4, 4))]))
    optimizer = Lookahead(torch.optim.SGD(layer.parameters(), lr=0.0), k=3)
    qconv.after_every_step(optimizer, layer)
    step = cast(Any, layer.input_quantizer).quantizers[1].step
    first = torch.ones(())
    for index in range(14):
        qconv.set_progress(layer, index / 14)
        optimizer.zero_grad()
        layer(torch.randn(2, 4, 6, 6)).square().mean().backward()
        optimizer.step()
        if index == 7:
            first = step.detach().clone()
            assert first != 1
    torch.testing.assert_close(step, first)


@pytest.mark.parametrize(
    "scheme",
    [schemes.staged([(0, schemes.bnn()), (0.5, schemes.siman())]), schemes.layerwise(schemes.siman())],
    ids=str,
)
def test_a_stage_that_quantizes_samples_as_wholes_ships(scheme: qconv.Scheme) -> None:
    """SiMaN's inputs are signs of what is left without the sample's mean: no threshold stands for them."""
    blocks = ((nn.Conv2d(32, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32)) for _ in range(2))
    model = qconv.convert(nn.Sequential(*(module for block in blocks for module in block)), scheme, skip=())
    input = torch.randn(4, 32, 8, 8) + torch.linspace(-1, 1, 4).view(-1, 1, 1, 1)
    qconv.set_progress(model, 1.0)
    model(input)
    model.eval()
    torch.testing.assert_close(qconv.freeze(model)(input), model(input), rtol=1e-4, atol=1e-4)


def test_a_schedule_inside_a_stage_moves_between_forward_and_backward() -> None:
    layer = qconv.QConv2d(3, 4, 3, scheme=schemes.staged([(0, schemes.bnn()), (0.25, schemes.irnet())]))
    input, grads = torch.randn(2, 3, 8, 8), []
    for later in (0.5, 0.9):
        layer.zero_grad()
        qconv.set_progress(layer, 0.5)
        loss = layer(input).square().sum()
        qconv.set_progress(layer, later)
        loss.backward()
        assert layer.weight.grad is not None
        grads.append(layer.weight.grad.clone())
    assert grads[0].equal(grads[1])
