"""The state of quantizers is tensors: averages, copies and broadcasts of a model carry all of it."""

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from methods import METHODS
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn, get_swa_multi_avg_fn, update_bn

import qconv
from qconv import Scheme, schemes
from qconv.loop.optimizer_step import is_final
from qconv.quantizers import Identity, LSQInput, Stages
from qconv.quantizers.flags import Mark

STARTS_FROM_DATA = [schemes.lsq(), schemes.lsq_plus(), schemes.minmax(4, 4), schemes.dsq(), schemes.percentile(4, 4)]


class StateDictAverage(nn.Module):
    """What timm's ModelEmaV2 does: every tensor of the state dict moves, whole numbers are cut off."""

    def __init__(self, model: nn.Module, decay: float = 0.9) -> None:
        super().__init__()
        self.module = copy.deepcopy(model)
        self.decay = decay

    def forward(self, input: Tensor) -> Tensor:
        return self.module(input)

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        for average, value in zip(self.module.state_dict().values(), model.state_dict().values(), strict=True):
            average.copy_(self.decay * average + (1 - self.decay) * value)


AVERAGES: dict[str, Callable[[nn.Module], Any]] = {
    "swa": lambda model: AveragedModel(model),
    "swa with buffers": lambda model: AveragedModel(model, multi_avg_fn=get_swa_multi_avg_fn(), use_buffers=True),
    "ema with buffers": lambda model: AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True),
    "single ema with buffers": lambda model: AveragedModel(model, avg_fn=get_ema_avg_fn(0.9), use_buffers=True),
    "state dict": StateDictAverage,
}
EACH_AVERAGE = pytest.mark.parametrize("average", AVERAGES.values(), ids=AVERAGES)


def network(scheme: Scheme) -> Any:
    torch.manual_seed(0)
    return nn.Sequential(qconv.QConv2d(2, 4, 3, scheme=scheme), nn.Hardtanh(), qconv.QConv2d(4, 3, 3, scheme=scheme))


def train(model: nn.Module, average: Any, steps: int = 3) -> None:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=0.05)
    qconv.after_every_step(optimizer, model)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.rand(4, 2, 7, 7)).square().mean().backward()
        optimizer.step()
        average.update_parameters(model)


@EACH_AVERAGE
@pytest.mark.parametrize("scheme", STARTS_FROM_DATA, ids=str)
def test_an_average_is_calibrated(scheme: Scheme, average: Callable[[nn.Module], Any]) -> None:
    model = network(scheme)
    averaged = average(model)
    model[0](torch.rand(4, 2, 7, 7))  # one of the two has had its data before the first update
    train(model, averaged)
    before = {name: tensor.clone() for name, tensor in averaged.state_dict().items()}
    assert all(layer.input_quantizer.calibrated for layer in (averaged.module[0], averaged.module[2]))
    update_bn([torch.rand(4, 2, 7, 7) * 9], nn.Sequential(averaged, nn.BatchNorm2d(3)))  # runs it in training mode
    assert all(tensor.equal(before[name]) for name, tensor in averaged.state_dict().items())


def test_a_flag_that_was_set_is_not_read_again() -> None:
    quantizer = qconv.QConv2d(2, 3, 3, scheme=schemes.lsq()).input_quantizer
    quantizer.calibrated = True
    quantizer.to("meta")  # where reading it would raise
    assert quantizer.calibrated


def test_a_flag_that_was_saved_as_a_bool() -> None:
    layer, other = (qconv.QConv2d(2, 3, 3, scheme=schemes.lsq()) for _ in range(2))
    layer(torch.rand(2, 2, 5, 5))
    state = {**layer.state_dict(), "input_quantizer.calibrated": torch.tensor(True)}
    for assign in (False, True):
        other.input_quantizer.calibrated = False
        other.load_state_dict(state, assign=assign)
        assert other.input_quantizer.calibrated
        assert other.state_dict()["input_quantizer.calibrated"].is_floating_point()


@pytest.mark.nightly
def test_a_compiled_average_is_not_calibrated_anew() -> None:
    layer, input = qconv.QConv2d(2, 3, 3, scheme=schemes.lsq()), torch.rand(2, 2, 5, 5)
    with torch.no_grad():
        layer.state_dict()["input_quantizer.calibrated"].fill_(0.1)  # as an average does it
    output = torch.compile(layer, backend="aot_eager")(input)
    assert output.equal(layer(input))
    assert layer.input_quantizer.step == 1


STAGED = schemes.staged([(0, schemes.identity()), (0.3, schemes.lsq(4, 4)), (0.6, schemes.bnn())])


@EACH_AVERAGE
def test_an_average_is_in_the_last_stage_that_went_into_it(average: Callable[[nn.Module], Any]) -> None:
    model = network(STAGED)
    averaged = average(model)
    for progress, stage in ((0.0, 0), (0.3, 1), (0.6, 2)):
        qconv.set_progress(model, progress)
        train(model, averaged, steps=1)
        layer = averaged.module[0]
        assert (layer.input_quantizer.stage, layer.weight_quantizer.stage) == (stage, stage)
        assert is_final(averaged) == (stage == 2)
    assert averaged.module[0].quantized_weight().unique().tolist() == [-1, 1]


def test_the_stage_is_read_again_when_it_was_written_and_a_compiled_average_is_in_it() -> None:
    layer, input = qconv.QConv2d(2, 3, 3, scheme=schemes.two_stage(schemes.bnn())), torch.randn(2, 2, 5, 5)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    assert layer.weight_quantizer.stage == 0
    compiled(input)
    with torch.no_grad():
        for name, tensor in layer.state_dict().items():
            if name.endswith("begun"):
                tensor[1].lerp_(torch.ones(()), 0.001)
    layer.eval()
    binary = qconv.QConv2d(2, 3, 3, scheme=schemes.bnn())
    binary.load_state_dict(qconv.float_state_dict(layer))
    assert compiled(input).equal(binary(input))
    assert layer(input).equal(binary(input))


@pytest.mark.parametrize("assign", [False, True])
def test_a_stage_is_loaded(assign: bool) -> None:
    layer, other = (qconv.QConv2d(2, 3, 3, scheme=STAGED) for _ in range(2))
    qconv.set_progress(layer, 0.4)
    other.load_state_dict(layer.state_dict(), assign=assign)
    assert (other.input_quantizer.stage, other.weight_quantizer.stage) == (1, 1)
    assert other.quantized_weight().equal(layer.quantized_weight())
    begun = "weight_quantizer.begun"
    with pytest.raises(ValueError, match=r"weight_quantizer.begun \(=nan\) must be from 0 to 1"):
        other.load_state_dict(layer.state_dict() | {begun: torch.tensor([1, torch.nan, 0])})


@EACH_AVERAGE
def test_in_an_average_frozen_weights_have_their_level(average: Callable[[nn.Module], Any]) -> None:
    model = network(schemes.inq())
    averaged = average(model)
    for progress in (0.0, 0.25, 0.5):
        qconv.set_progress(model, progress)
        train(model, averaged)
    for layer, other in ((model[0], averaged.module[0]), (model[2], averaged.module[2])):
        frozen = layer.weight_quantizer.frozen > 0
        assert 0 < frozen.sum() < frozen.numel()
        assert (other.weight_quantizer.frozen > 0).equal(frozen)
        assert other.quantized_weight()[frozen].equal(layer.weight[frozen])
        assert not other.quantized_weight()[~frozen].equal(layer.weight[~frozen])
    qconv.set_progress(averaged, 1.0)  # goes on from there
    assert averaged.module[0].weight_codes().dequantize().float().equal(averaged.module[0].quantized_weight())


def test_frozen_weights_that_were_saved_as_integers() -> None:
    layer, other = (qconv.QConv2d(2, 3, 3, scheme=schemes.inq()) for _ in range(2))
    qconv.set_progress(layer, 0.5)
    dtypes = {"frozen": torch.bool, "code": torch.int8, "top": torch.long}
    state = {name: tensor.to(dtypes.get(name.split(".")[-1])) for name, tensor in layer.state_dict().items()}
    other.load_state_dict(state)
    assert other.quantized_weight().equal(layer.quantized_weight())
    assert other.state_dict()["weight_quantizer.frozen"].is_floating_point()


@pytest.mark.parametrize("how", ["average", "copied", "vector"])
@pytest.mark.parametrize(
    "scheme", [schemes.lsq(2, 4), schemes.apot(3, 3), schemes.shift_ps(), schemes.adabin()], ids=str
)
def test_what_is_written_through_data_is_kept(scheme: Scheme, how: str) -> None:
    """Averages and copies that write `.data`, which does not count as a change of a tensor."""
    torch.manual_seed(0)
    model = qconv.convert(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), nn.Conv2d(4, 2, 3)), scheme)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    if how == "vector":
        nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(model.parameters()), other.parameters())
    else:
        for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
            mine.data.copy_(mine.data.lerp(theirs.data, 0.5) if how == "average" else theirs.data)
    expected = {name: parameter.detach().clone() for name, parameter in other.named_parameters()}
    other.eval()
    assert all(torch.equal(parameter, expected[name]) for name, parameter in other.named_parameters())
    assert {*other.state_dict()} == {*model.state_dict()}
    assert all(torch.equal(parameter, expected[name]) for name, parameter in other.named_parameters())


@pytest.mark.parametrize(
    ("make", "learned"),
    [
        (
            schemes.lsq,
            ["LSQ of 2 bits loads values learned with 4 bits", "LSQInput of 2 bits loads values learned with 4 bits"],
        ),
        (schemes.lsq_plus, ["of 2 bits loads values learned with 4 bits"]),
        (schemes.apot, []),  # ranges fit any number of bits
        (schemes.pact, []),
        (schemes.minmax, []),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_steps_of_other_bits_are_not_loaded_in_silence(make: Any, learned: list[str]) -> None:
    """The file holds them as torch.save writes it, and a loader that knows no qconv reads it."""
    four, again, two = (network(make(bits, bits)) for bits in (4, 4, 2))
    four(torch.rand(4, 2, 7, 7))
    file = io.BytesIO()
    torch.save(four.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    again.load_state_dict(state)  # without a warning, which would be an error
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        two.load_state_dict(state)
    texts = {str(warning.message) for warning in caught}
    assert bool(texts) == bool(learned)
    for text in learned:
        assert any(text in each for each in texts), texts


def test_what_the_warning_of_other_bits_recommends() -> None:
    four, two = network(schemes.lsq(4, 4)), network(schemes.lsq(2, 2))
    four(torch.rand(4, 2, 7, 7))
    with torch.no_grad():
        four[0].weight.mul_(3)
    state = {name: tensor for name, tensor in four.state_dict().items() if "_quantizer." not in name}
    two.load_state_dict(state, strict=False)
    fresh = qconv.quantizers.LSQ(2)
    fresh.initialize(four[0].weight.detach())
    two.eval()
    assert torch.equal(two[0].weight_quantizer.step, fresh.step)
    assert not two[0].input_quantizer.calibrated


BY_SCHEDULE = [
    schemes.irnet(),
    schemes.recu(),
    schemes.reste(),
    schemes.adabin(),
    STAGED,
    schemes.two_stage(schemes.lsq()),
]


@pytest.mark.parametrize(
    "scheme", [schemes.pact(), schemes.dorefa(), schemes.ewgs(), *STARTS_FROM_DATA, *BY_SCHEDULE], ids=str
)
@pytest.mark.parametrize("garbage", [1e20, float("nan")])
def test_layers_from_the_meta_device_start_anew(scheme: Scheme, garbage: float) -> None:
    """What torch does with large models: no memory at first, then `to_empty` and `reset_parameters`."""
    with torch.device("meta"):
        layer: Any = qconv.QConv2d(2, 4, 3, scheme=scheme)
    layer.to_empty(device="cpu")
    for part in layer.modules():
        for tensor in (*part.parameters(recurse=False), *part.buffers(recurse=False)):
            tensor.data.fill_(garbage)
    torch.manual_seed(3)
    layer.reset_parameters()
    torch.manual_seed(3)
    like: Any = qconv.QConv2d(2, 4, 3, scheme=scheme)
    for place, quantizer in like.quantizers().items():
        own = getattr(layer, place)
        waiting = [f"quantizers.{index}." for index in range(1, 3)] if isinstance(quantizer, Stages) else []
        for name, tensor in quantizer.state_dict().items():
            if place == "input_quantizer" or not name.startswith(tuple(waiting)):  # set when its stage begins
                torch.testing.assert_close(own.state_dict()[name], tensor, msg=f"{place}.{name}")
    x = torch.rand(4, 2, 7, 7)
    assert layer(x).abs().max() < 100
    qconv.set_progress(layer, 1.0)
    assert layer(x).abs().max() < 100


@pytest.mark.parametrize("scheme", [*STARTS_FROM_DATA, *BY_SCHEDULE, schemes.pact(), schemes.adabin()], ids=str)
@pytest.mark.parametrize("assign", [False, True])
def test_a_float_checkpoint_fills_layers_from_the_meta_device(scheme: Scheme, assign: bool) -> None:
    """Quantizers, which it does not contain, would keep what the memory held: here NaN."""

    def net() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3))

    expected = qconv.convert(net(), scheme, skip=())
    with torch.device("meta"):
        found = qconv.convert(net(), scheme, skip=())
    if not assign:
        before = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(True)  # which fills empty tensors with NaN
        found.to_empty(device="cpu")
        torch.use_deterministic_algorithms(before)
    found.load_state_dict(net().state_dict(), assign=assign)
    input = torch.rand(2, 3, 9, 9) - 0.3
    for model in (expected, found):
        torch.manual_seed(1)
        model(input).square().mean().backward()
    pairs = zip(expected.named_parameters(), found.named_parameters(), strict=True)
    for (name, one), (_, other) in pairs:
        torch.testing.assert_close(other.grad, one.grad, msg=name)
    for name, tensor in expected.state_dict().items():
        if isinstance(tensor, Tensor):
            torch.testing.assert_close(found.state_dict()[name], tensor, msg=name)


def test_quantizers_of_another_kind_stay_as_they_are() -> None:
    layer: Any = qconv.QConv2d(2, 4, 3, scheme=schemes.lsq(4, 4))
    layer.input_quantizer = Identity()
    layer.reset_parameters()
    assert type(layer.input_quantizer) is Identity
    layer.input_quantizer = LSQInput(8)
    layer(torch.rand(4, 2, 7, 7))
    layer.reset_parameters()
    assert not layer.input_quantizer.calibrated


LATER = [schemes.two_stage(schemes.bnn()), schemes.lsq(2, 2)]
"""A scheme whose stage is a flag, and one whose sign is."""


def in_its_last_state(scheme: Scheme, device: str = "cpu") -> Any:
    """A network in its last stage, for inputs on both sides of 0."""
    model = network(scheme).to(device)
    qconv.set_progress(model, 0.6)
    model(torch.randn(4, 2, 7, 7).to(device)).sum().backward()
    return model.eval()


@pytest.mark.parametrize("scheme", LATER, ids=str)
def test_a_flag_is_read_however_it_came(scheme: Scheme, device: str) -> None:
    model, input = in_its_last_state(scheme, device), torch.randn(2, 2, 7, 7).to(device)
    wanted, state = model(input), {name: tensor.clone() for name, tensor in model.state_dict().items()}

    @torch.inference_mode()
    def served() -> Tensor:
        other = network(scheme).to(device)
        other.load_state_dict(state)
        return other.eval()(input)

    assert served().equal(wanted)
    average = network(scheme).to(device)
    average(torch.rand(4, 2, 7, 7).to(device))
    average.eval()(input)
    for own, value in zip(average.state_dict().values(), state.values(), strict=True):
        (own.data if device == "cpu" else own).copy_(value)
    assert average(input).equal(wanted)
    assert copy.deepcopy(average)(input).equal(wanted)


@pytest.mark.nightly
@pytest.mark.parametrize("scheme", LATER, ids=str)
def test_compiled_models_load_their_flags(scheme: Scheme) -> None:
    model, input = in_its_last_state(scheme), torch.randn(2, 2, 7, 7)
    wanted, first = model(input), network(scheme)
    first(torch.rand(4, 2, 7, 7)).sum().backward()
    for training in (False, True):
        other = network(scheme)
        other.load_state_dict(first.state_dict())
        compiled = torch.compile(other.train(training), backend="eager")
        compiled(input)
        other.load_state_dict(model.state_dict())
        torch.testing.assert_close(compiled(input), wanted)


@pytest.mark.parametrize("scheme", LATER, ids=str)
@pytest.mark.parametrize("training", [False, True])
def test_states_of_functional_call_take_their_turns(scheme: Scheme, training: bool, device: str) -> None:
    """Their tensors come and go, and a new one may lie where another was."""
    early = network(scheme).to(device)
    early(torch.rand(4, 2, 7, 7).to(device)).sum().backward()
    models, input = [early, in_its_last_state(scheme, device)], torch.randn(2, 2, 7, 7).to(device)
    wanted = [model.train(training)(input) for model in models]
    base = copy.deepcopy(early)
    for turn in torch.randint(2, (60,)).tolist():
        state = {name: tensor.clone() for name, tensor in models[turn].state_dict().items()}
        assert torch.func.functional_call(base, state, (input,)).equal(wanted[turn])


def test_marks_tell_tensors_apart() -> None:
    """As on a GPU, where flags are read again only if their mark has changed."""
    flag = torch.zeros(())
    seen = Mark(flag)
    assert seen.is_of(flag)
    assert not seen.is_of(flag.clone())
    assert copy.deepcopy(seen) is pickle.loads(pickle.dumps(seen)) is None
    flag.fill_(1)
    assert not seen.is_of(flag)
    with torch.inference_mode():
        flag = torch.zeros(())
        assert Mark(flag).is_of(flag)


def test_real_flags_among_fake_tensors() -> None:
    model = in_its_last_state(schemes.lsq(2, 2))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert model(mode.from_tensor(torch.randn(2, 2, 7, 7))).shape == (2, 3, 3, 3)


SOUPS = [
    schemes.bnn(stochastic=True),
    schemes.dorefa(2, 2, grad_bits=4),
    schemes.lsq().with_grad(qconv.quantizers.Int8Stochastic),
    schemes.inq(),
]


@pytest.mark.parametrize("scheme", SOUPS, ids=str)
def test_the_mean_of_two_models_loads(scheme: Scheme) -> None:
    """A model soup: of whole numbers, too, it is made of floats."""
    first, second, soup = (network(scheme) for _ in range(3))
    others = second.state_dict()
    mean = {name: (tensor + others[name]) / 2 for name, tensor in first.state_dict().items()}
    soup.load_state_dict(mean)
    for name, tensor in soup.state_dict().items():
        assert tensor.equal(mean[name].to(tensor.dtype)), name


@pytest.mark.filterwarnings("ignore:.*of the inputs, which lie")
@pytest.mark.parametrize("name", METHODS)
def test_a_dry_run_decides_nothing(name: str) -> None:
    """A forward for shapes, then weights are set: all that is learned is that of a model that had no such forward."""
    tried, plain = network(METHODS[name]), network(METHODS[name])
    tried(torch.rand(4, 2, 7, 7))
    for model in (tried, plain):
        torch.manual_seed(1)
        for layer in (model[0], model[2]):
            nn.init.normal_(layer.weight, std=0.5)
        model(torch.randn(4, 2, 7, 7)).square().mean().backward()
    torch.testing.assert_close(tried.state_dict(), plain.state_dict(), rtol=0, atol=0)
    for layer in (tried[0], tried[2]):
        assert not layer.weight_quantizer.is_fresh
        assert not layer.input_quantizer.is_fresh
