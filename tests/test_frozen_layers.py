"""Layers that are not trained stay as they are, and what follows from the weight follows it until training starts."""

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from conftest import METHODS
from pytorch_lightning.core.optimizer import LightningOptimizer
from settings import mostly_nightly
from torch import nn

import qconv
from qconv import Scheme, quantizers, schemes
from qconv.check import watch
from qconv.loop.optimizer_step import is_final

SCHEMES = [
    schemes.xnor(center=True),
    schemes.adabin(),
    schemes.shift_ps(),
    schemes.inq(),
    schemes.pact(),
    schemes.n2uq(),
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
    qconv.calibrate(model, [torch.randn(2, 3, 9, 9)])
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
    qconv.calibrate(model, [torch.randn(2, 3, 9, 9)])
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


# Weights that are set anew

FROM_WEIGHT = [
    schemes.shift_ps(),
    schemes.dsq(),
    schemes.lsq(),
    schemes.lsq_plus(),
    schemes.recu(),
    schemes.staged([(0, schemes.lsq(4, 4)), (0.5, schemes.lsq(2, 2))]),
]
# Weights are looked at here: inputs need no range.
pytestmark = pytest.mark.filterwarnings("ignore:.*is evaluated before:UserWarning")
EACH_FROM_WEIGHT = pytest.mark.parametrize("scheme", FROM_WEIGHT, ids=str)
INITIALIZED: dict[str, Any] = {
    "nn.init": lambda layer: nn.init.kaiming_normal_(layer.weight),
    "apply": lambda layer: layer.apply(lambda part: nn.init.normal_(part.weight) if hasattr(part, "weight") else None),
    "data": lambda layer: layer.weight.data.normal_(0, 0.3),
    "copy_": lambda layer: layer.weight.detach().copy_(torch.randn(4, 3, 3, 3)),
    "another parameter": lambda layer: setattr(layer, "weight", nn.Parameter(torch.randn(4, 3, 3, 3))),
}


def built_with(weight: torch.Tensor, scheme: Scheme) -> Any:
    """A layer that was converted with these weights."""
    layer = nn.Conv2d(3, 4, 3, bias=False)
    layer.weight = nn.Parameter(weight.detach().clone())
    return qconv.convert(layer, scheme, skip=())


@pytest.mark.parametrize("again", INITIALIZED.values(), ids=INITIALIZED)
@EACH_FROM_WEIGHT
def test_learned_tensors_follow_a_weight_that_is_set_anew(scheme: Scheme, again: Any) -> None:
    layer: Any = qconv.QConv2d(3, 4, 3, bias=False, scheme=scheme)
    again(layer)
    expected, input = built_with(layer.weight, scheme), torch.rand(2, 3, 5, 5)
    assert layer.state_dict()["weight"].equal(expected.weight)  # also if learned tensors replace it
    expected(input)
    for one in (layer, copy.deepcopy(layer)):  # a copy of what has not been used yet
        one(input)
        assert one.state_dict().keys() == expected.state_dict().keys()
        for name, tensor in one.state_dict().items():
            assert tensor.equal(expected.state_dict()[name]) or name.endswith("key"), name
    again(layer)
    assert layer(input).equal(built_with(layer.weight, scheme)(input))
    again(layer)
    expected = built_with(layer.weight, scheme)
    qconv.calibrate(layer, [input])
    qconv.calibrate(expected, [input])
    assert layer.quantized_weight().equal(expected.quantized_weight())


@EACH_FROM_WEIGHT
def test_from_the_first_training_step_on_they_do_not(scheme: Scheme) -> None:
    layer: Any = qconv.QConv2d(3, 4, 3, bias=False, scheme=scheme)
    layer.double()
    layer(torch.rand(2, 3, 5, 5, dtype=torch.float64)).sum().backward()
    learned = [parameter.detach().clone() for parameter in layer.weight_quantizer.parameters()]
    nn.init.normal_(layer.weight)
    layer.eval()(torch.rand(2, 3, 5, 5, dtype=torch.float64))
    assert all(map(torch.equal, layer.weight_quantizer.parameters(), learned))


@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "no optimizer has them"])
@pytest.mark.parametrize("way", mostly_nightly(["training", "evaluation", "compiled"], ["training", "evaluation"]))
@pytest.mark.filterwarnings("ignore:an optimizer's step did not end")
def test_nor_when_the_weight_alone_is_trained(way: str, frozen: bool) -> None:
    """Evaluation mode is usual where norms are frozen; in compiled code nothing sees a training begin."""
    torch._dynamo.reset()
    model = qconv.convert(network(), schemes.lsq(2, 8), skip=())
    qconv.calibrate(model, [x := torch.randn(2, 3, 9, 9)])
    model.train(way != "evaluation")
    quantizer: Any = model[1].weight_quantizer
    quantizer.requires_grad_(not frozen)
    before = quantizer.step.clone()
    called = torch.compile(model, backend="aot_eager") if way == "compiled" else model
    optimizer = torch.optim.Adam([layer.weight for layer in model if isinstance(layer, nn.Conv2d)], lr=0.1)
    for _ in range(3):
        called(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()(x)
    assert quantizer.step.equal(before)


@pytest.mark.parametrize("to_none", [None, True, False])
def test_gradients_of_something_else_are_no_training(to_none: bool | None) -> None:
    model = network()
    model(torch.randn(2, 3, 9, 9)).sum().backward()  # of the float network
    layer = qconv.convert(model, schemes.lsq(2, 8), skip=())[1]
    if to_none is not None:
        model.zero_grad(set_to_none=to_none)
    nn.init.normal_(layer.weight)
    model(torch.randn(2, 3, 9, 9))
    assert layer.weight_quantizer.step.equal(built_with(layer.weight, schemes.lsq(2, 8)).weight_quantizer.step)


@EACH_FROM_WEIGHT
def test_nor_do_those_that_were_loaded_or_averaged(scheme: Scheme) -> None:
    source: Any = qconv.QConv2d(3, 4, 3, scheme=scheme)
    with torch.no_grad():
        for parameter in source.weight_quantizer.parameters():
            parameter.mul_(0.75)
    layer: Any = qconv.QConv2d(3, 4, 3, scheme=scheme)
    nn.init.normal_(layer.weight)
    layer.load_state_dict(source.state_dict())
    average: Any = torch.optim.swa_utils.AveragedModel(source)
    average.update_parameters(source)
    for one in (layer, average.module):
        one.eval()(torch.rand(2, 3, 5, 5))
        pairs = zip(one.weight_quantizer.parameters(), source.weight_quantizer.parameters(), strict=True)
        assert all(mine.equal(theirs) for mine, theirs in pairs)


def test_they_follow_after_a_cast_and_a_float_checkpoint() -> None:
    layer: Any = qconv.QConv2d(3, 4, 3, bias=False, scheme=schemes.dsq()).double()
    layer.load_state_dict({"weight": torch.randn(4, 3, 3, 3)})
    nn.init.normal_(layer.weight)
    layer(torch.rand(2, 3, 5, 5, dtype=torch.float64))
    assert layer.weight_quantizer.upper == layer.weight.max()


# Copies of an optimizer


def stepped(layer: Any, optimizer: torch.optim.Optimizer) -> float:
    """The largest weight after a step."""
    optimizer.zero_grad()
    layer(torch.randn(2, 3, 6, 6)).square().mean().backward()
    optimizer.step()
    return next(layer.parameters()).abs().max().item()


class KeepsHooks(torch.optim.SGD):
    """Copies, unlike torch's own, keep their hooks."""

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "step"}


def test_a_hook_that_is_copied_clamps_the_copy() -> None:
    layer = qconv.BNNConv2d(3, 4, 3)
    optimizer = KeepsHooks(layer.parameters(), lr=50.0)
    qconv.after_every_step(optimizer, layer)
    both: Any = (layer, optimizer)
    for copied in (copy.deepcopy(both), pickle.loads(pickle.dumps(both))):
        with torch.no_grad():
            layer.weight.fill_(7)
        assert stepped(*copied) == 1
        assert stepped(*copied) == 1
        assert layer.weight.eq(7).all()


MISSED = {
    "keeps latent weights in their range": schemes.bnn(),
    "keeps learned steps and ranges positive": schemes.staged([(0, schemes.lsq(4, 4)), (0.5, schemes.pact(4, 4))]),
    "draws new random numbers": schemes.minmax().with_grad(qconv.quantizers.Int8Stochastic),
}


@pytest.mark.parametrize("what", MISSED)
def test_steps_without_what_follows_them_are_told_once(what: str) -> None:
    scheme = MISSED[what]
    model = nn.Sequential(*(qconv.QConv2d(3, 3, 3, padding=1, scheme=scheme) for _ in range(2)))
    watch(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(5):
            stepped(model, optimizer)
    (message,) = (str(warning.message) for warning in told)
    assert (
        f"an optimizer's step did not end with qconv.after_step, which {what} with {scheme}: call qconv.aft" in message
    )


@pytest.mark.parametrize("scheme", [schemes.minmax(), schemes.identity(), schemes.dorefa(2, 2)], ids=str)
def test_schemes_without_anything_after_a_step(scheme: Scheme) -> None:
    layer = qconv.QConv2d(3, 3, 3, padding=1, scheme=scheme)
    watch(layer)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-3)
    for _ in range(5):
        stepped(layer, optimizer)


@pytest.mark.parametrize("name", mostly_nightly(METHODS, ("bnn()", "apot(weight_bits=4, input_bits=4)")))
def test_no_scheme_needs_the_hook_to_go_on(name: str) -> None:
    layer = qconv.QConv2d(3, 3, 3, padding=1, scheme=METHODS[name])
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-4)
    for _ in range(22):
        stepped(layer, optimizer)


def test_what_no_optimizer_changes_is_not_told() -> None:
    layer = qconv.QConv2d(3, 3, 3, padding=1, scheme=schemes.bnn())
    watch(layer)
    for _ in range(5):
        others = {name: tensor.detach().clone().requires_grad_() for name, tensor in layer.named_parameters()}
        torch.func.functional_call(layer, others, (torch.randn(2, 3, 6, 6),)).sum().backward()


def test_a_late_hook_is_in_time() -> None:
    layer = qconv.BNNConv2d(3, 3, 3, padding=1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-3)
    watch(layer)
    stepped(layer, optimizer)
    qconv.after_every_step(optimizer, layer)
    for _ in range(4):
        stepped(layer, optimizer)


def test_quantizers_outside_of_layers_live_as_those_inside() -> None:
    ede, pact = quantizers.Sign(surrogate=quantizers.EDE), quantizers.PACT(4)
    model = nn.Sequential(qconv.BNNConv2d(3, 3, 3), pact, ede)
    before = [tensor.clone() for tensor in ede.surrogate.buffers()]
    qconv.set_progress(model, 0.7)
    assert any(not old.equal(new) for old, new in zip(before, ede.surrogate.buffers(), strict=True))
    assert is_final(nn.Sequential(quantizers.Stages([(0, quantizers.Identity), (0.5, quantizers.Sign)]))) is False
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    qconv.after_every_step(optimizer, model)
    with torch.no_grad():
        pact.alpha.fill_(-3.0)
    optimizer.step()
    assert pact.alpha > 0


class Wrapping(torch.optim.Optimizer):
    """As Accelerate does it: an optimizer by class, which never ran the base's constructor."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


def test_an_optimizer_in_a_wrapper() -> None:
    layer = qconv.BNNConv2d(3, 4, 3)
    optimizer = Wrapping(Wrapping(torch.optim.SGD(layer.parameters(), lr=50.0)))
    handle = qconv.after_every_step(optimizer, layer)
    assert stepped(layer, optimizer) == 1
    optimizer.step(lambda: layer(torch.randn(2, 3, 6, 6)).sum())
    handle.remove()
    assert stepped(layer, optimizer) > 1
    lightning = LightningOptimizer(torch.optim.SGD(layer.parameters(), lr=50.0))
    qconv.after_every_step(lightning, layer)  # pyright: ignore[reportArgumentType]
    assert stepped(layer, lightning.optimizer) == 1
    with pytest.raises(TypeError, match=r"optimizer \(=Linear.*\) must be a torch.optim.Optimizer, or wrap one"):
        qconv.after_every_step(nn.Linear(1, 1), layer)  # pyright: ignore[reportArgumentType]


def test_a_float_layer_again_has_nothing_of_it() -> None:
    model = qconv.to_float(qconv.convert(network(), schemes.lsq(2, 8), skip=()))
    model(torch.randn(2, 3, 9, 9)).sum().backward()
    assert vars(model[1]).keys() == vars(network()[1]).keys()


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch 2.11 looks at it
def test_a_weight_that_is_unfrozen_later() -> None:
    torch._dynamo.reset()
    model = qconv.convert(network().requires_grad_(False), schemes.lsq(2, 8), skip=())
    qconv.calibrate(model, [x := torch.randn(2, 3, 9, 9)])
    layer = model.train()[1]
    layer.weight.requires_grad_()
    before = layer.weight_quantizer.step.clone()
    optimizer = torch.optim.SGD([layer.weight], lr=1.0)
    torch.compile(model.train(), backend="aot_eager")(x).square().mean().backward()
    optimizer.step()
    model.eval()
    assert layer.weight_quantizer.step.equal(before)
