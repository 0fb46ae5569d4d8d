"""What stands before a sign: found, replaced, put back, and told where it can't be."""

import abc
import copy
import itertools
import pickle
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast, get_args

import pytest
import torch
import torch.nn.functional as F
import torchvision
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig
from safetensors.torch import load_file, save_file
from settings import mostly_nightly
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import qconv
from qconv import models as qconv_models, schemes
from qconv.check import watch
from qconv.convert.one_signed import find
from qconv.convert.replacements import CHOICES, BeforeSign, replaced
from qconv.layers.sign_note import ACTIVATIONS, note_of
from qconv.quantizers import Codes, Quantizer
from qconv.quantizers.levels import Levels
from qconv.training.assemble import quantized_model
from qconv.training.initial_weights import load_weights

CONFIGS = Path(__file__).parent.parent / "configs"
SIGNS: dict[str, qconv.Scheme] = {
    scheme.name: scheme
    for scheme in (
        *(schemes.bnn(), schemes.bnn(stochastic=True), schemes.xnor(), schemes.xnorpp(), schemes.bireal()),
        *(schemes.reactnet(), schemes.irnet(), schemes.recu(), schemes.adabin(), schemes.reste()),
        *(schemes.lsq(1, 1, signed_input=True), schemes.two_stage(schemes.bnn())),
        schemes.staged([(0, schemes.lsq(4, 4)), (0.5, schemes.lsq(1, 1, signed_input=True))]),
    )
}
UNSIGNED: dict[str, qconv.Scheme] = {
    scheme.name: scheme
    for scheme in (
        *(schemes.identity(), schemes.bwn(), schemes.dorefa(1, 1), schemes.pact(2, 2), schemes.lsq(4, 4)),
        *(schemes.lsq(1, 1), schemes.lsq(2, 2, signed_input=True), schemes.minmax(), schemes.fp8(), schemes.n2uq()),
    )
}


def conv() -> nn.Conv2d:
    return nn.Conv2d(8, 8, 3, padding=1)


def chain(*between: nn.Module) -> nn.Sequential:
    """A float convolution, what is given, a convolution to convert, and a float one."""
    return nn.Sequential(nn.Conv2d(3, 8, 3), *between, conv(), nn.Conv2d(8, 2, 3))


class Calls(nn.Module):
    """Functions between the layers, one of them the same module called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third, self.last = nn.Conv2d(3, 8, 3), conv(), conv(), nn.Conv2d(8, 2, 3)


class WithF(Calls):
    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(F.relu(self.first(x), inplace=True), training=self.training)
        return self.last(F.relu6(self.third(F.relu(self.second(x)))))


class WithTorch(Calls):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.third(torch.relu(self.second(torch.nn.functional.relu(self.first(x))))))


FACTOR = 1.0


class WithGlobals(Calls):
    """A global name beside the functions, and a function in the method."""

    def forward(self, x: Tensor) -> Tensor:
        act = lambda x: FACTOR * F.relu(x)  # noqa: E731  # the name of the ReLU's module is in its code alone
        return self.last(self.third(act(self.second(act(self.first(x))))))


class WithTwoMeanings(Calls):
    """``F`` is a global and an attribute."""

    F: Any = None

    def forward(self, x: Tensor) -> Tensor:
        assert self.F is None
        return self.last(self.third(F.relu(self.second(x))))


class WithMethod(Calls):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.third(F.relu(self.second(self.first(x).relu()))))


class Branches(Calls):
    """Its forward depends on values, so that `torch.fx` can't trace it."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.ReLU()
        self.second = nn.Sequential(nn.ReLU(), nn.MaxPool2d(2), conv())

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(x))
        return self.last(self.third(x) if x.mean() > 0 else x)


def signs(model: nn.Module) -> list[nn.Module]:
    return [layer for layer in model.modules() if isinstance(layer, qconv.QuantizedLayer)]


@pytest.mark.parametrize("name", [*SIGNS, *UNSIGNED])
def test_schemes_that_take_the_sign(name: str) -> None:
    model = qconv.convert(chain(nn.ReLU()), (SIGNS | UNSIGNED)[name])
    assert type(model[1]) is (nn.Identity if name in SIGNS else nn.ReLU)


class OwnSign(Quantizer):
    """Two levels on both sides of 0, stated as codes 0 and 1."""

    bits = 1

    def codes(self, x: Tensor, *tensors: Tensor) -> Codes:
        return Codes((x > 0).to(torch.int8), torch.tensor(2.0), offset=torch.tensor(-1.0))

    def quantize(self, x: Tensor, *tensors: Tensor) -> Tensor:
        return self.codes(x).dequantize().to(x.dtype)

    def levels(self, *tensors: Tensor) -> Levels:
        return Levels(0, 1, torch.tensor(2.0), offset=torch.tensor(-1.0))


class OwnBit(OwnSign):
    """Levels 0 and 2."""

    def levels(self, *tensors: Tensor) -> Levels:
        return Levels(0, 1, torch.tensor(2.0))


@pytest.mark.parametrize(("own", "kind"), [(OwnSign, nn.Identity), (OwnBit, nn.ReLU)])
def test_two_stated_levels_on_both_sides_of_zero_are_a_sign(own: Any, kind: type[nn.Module]) -> None:
    scheme = qconv.Scheme("own", input=own)
    assert ("→ Identity" in str(qconv.plan(chain(nn.ReLU()), scheme))) is (own is OwnSign)
    assert type(qconv.convert(chain(nn.ReLU()), scheme)[1]) is kind


@pytest.mark.parametrize(
    ("between", "changed"),
    [
        ((nn.ReLU(inplace=True),), [0]),
        ((nn.ReLU6(), nn.MaxPool2d(2), nn.Dropout(), nn.Identity()), [0]),
        ((nn.Hardtanh(0, 1), nn.AvgPool2d(2), nn.Flatten(), nn.Unflatten(1, (8, 3, 3))), [0]),
        ((nn.ReLU(), nn.Upsample(scale_factor=2, mode="bilinear"), nn.ReflectionPad2d(1)), [0]),
        ((nn.ReLU(), nn.Upsample(scale_factor=2, mode="bicubic")), []),
        ((nn.ReLU(), nn.BatchNorm2d(8)), []),
        *(((each,), []) for each in (nn.GELU(), nn.SiLU(), nn.Hardswish(), nn.LeakyReLU(), nn.PReLU(), nn.Hardtanh())),
    ],
    ids=lambda value: "-".join(type(each).__name__ for each in value) if isinstance(value, tuple) else "",
)
def test_activations_before_a_sign(between: tuple[nn.Module, ...], changed: list[int]) -> None:
    model = chain(*between)
    kinds = [type(each) for each in model]
    qconv.convert(model, schemes.bnn(), before_sign="hardtanh")
    for index, each in enumerate(between):
        assert type(each) is (nn.Hardtanh if index in changed else kinds[index + 1])
        if index in changed:
            assert (each.min_val, each.max_val) == (-1, 1)


def test_a_shared_activation_changes_everywhere(capsys: pytest.CaptureFixture[str]) -> None:
    model = torchvision.models.resnet18(num_classes=10)
    relus = {name: each for name, each in model.named_modules() if isinstance(each, nn.ReLU)}
    qconv.plan(model, schemes.bnn(), before_sign="hardtanh")
    lines = capsys.readouterr().out.splitlines()
    assert "layer1.0.relu          ReLU → Hardtanh (before the sign of layer1.0.conv2, layer1.1.conv1)" in lines
    assert all(type(each) is nn.ReLU for each in relus.values())
    qconv.convert(model, schemes.bnn(), before_sign="hardtanh")
    for name, each in relus.items():
        assert model.get_submodule(name) is each
        assert type(each) is (nn.LeakyReLU if name == "layer4.1.relu" else nn.Hardtanh)  # its second call: pooling
        assert each.inplace
    assert not find(model, signs(model)).inputs


@pytest.mark.parametrize("choice", ["identity", "hardtanh", "prelu"])
@pytest.mark.parametrize("function", [False, True])
def test_calls_before_float_layers_keep_their_values(function: bool, choice: BeforeSign) -> None:
    class OneForAll(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.act = nn.ModuleList(nn.Linear(8, 8) for _ in range(4)), nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:
            for layer in list(self.layers)[:-1]:
                x = F.relu(layer(x)) if function else self.act(layer(x))
            return self.layers[-1](x)

    model: Any = OneForAll()
    skip = ["layers.[013]"]  # before the second and the last layer values count
    (step,) = qconv.plan(model, schemes.bnn(), skip=skip, before_sign=choice).activations
    assert "LeakyReLU, which keeps the sign, because it is also called where no sign follows (before" in str(step)
    seen: list[Tensor] = []
    model.layers[1].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    input = torch.randn(5, 8)
    model(input)
    qconv.convert(model, schemes.bnn(), skip=skip, before_sign=choice)(input)
    torch.testing.assert_close(seen[1], seen[0], rtol=0, atol=0.01)
    assert (seen[1] < 0).any()
    if not function or choice != "prelu":
        every = qconv.plan(OneForAll(), schemes.bnn(), skip=["first"], before_sign=choice).activations
        assert [each.becomes for each in every] == [choice]


@pytest.mark.parametrize(("kind", "left"), [(WithF, 0), (WithTorch, 0), (WithGlobals, 0), (WithMethod, 1)])
@pytest.mark.parametrize("choice", ["hardtanh", "leaky", "identity"])
def test_functions_before_a_sign(kind: type[Calls], left: int, choice: BeforeSign) -> None:
    model = kind()
    expected = copy.deepcopy(model)
    input = torch.randn(2, 3, 9, 9)
    if left:
        with pytest.warns(
            UserWarning,
            match=r"1 activation lets one sign (?s:.*): convert can't replace \.relu\(\) here: .* of second is one",
        ):
            qconv.convert(model, schemes.bnn(), before_sign=choice)
    else:
        qconv.convert(model, schemes.bnn(), before_sign=choice)
    assert isinstance(model, kind)
    assert type(model).__name__ == kind.__name__
    assert len(find(model, signs(model)).inputs) == left
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.manual_seed(1)
        first = other(input)
        torch.manual_seed(1)
        assert first.equal(model(input))
        qconv.to_float(other)
        assert type(other) is kind
        assert other.eval()(input).equal(expected.eval()(input))
        assert vars(other).keys() == vars(expected).keys()
        expected.train()


def test_replaced_functions_see_what_becomes_of_globals(monkeypatch: pytest.MonkeyPatch) -> None:
    model, other = qconv.convert(WithGlobals(), schemes.bnn()), WithGlobals()
    input = torch.randn(2, 3, 9, 9)
    before = [each(input) for each in (model, other)]
    monkeypatch.setitem(globals(), "FACTOR", 0.0)
    assert not any(each(input).equal(was) for each, was in zip((model, other), before, strict=True))


def test_a_name_of_two_meanings_is_told() -> None:
    model = WithTwoMeanings()
    with pytest.warns(UserWarning, match="convert can't replace relu here"):
        qconv.convert(model, schemes.bnn(), skip=("first", "second", "last"))
    assert type(model) is WithTwoMeanings


@pytest.mark.parametrize(
    ("inside", "kind"),
    mostly_nightly(itertools.product([False, True], [WithTorch, WithGlobals]), ((True, WithGlobals),)),
)
def test_it_compiles_in_one_graph_traces_and_freezes(inside: bool, kind: type[Calls]) -> None:
    torch.compiler.reset()
    made = kind()
    model = qconv.convert(nn.Sequential(made) if inside else made, schemes.bnn(), before_sign="hardtanh")
    input = torch.randn(2, 3, 9, 9)
    compiled: Any = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert compiled(input).equal(model(input))
    assert torch.fx.symbolic_trace(model)(input).equal(model(input))
    with ThreadPoolExecutor(2) as pool:
        assert all(each.equal(model(input)) for each in pool.map(model, [input] * 4))
    frozen = qconv.freeze(model.eval())
    torch.testing.assert_close(frozen(input), model(input))


@pytest.mark.parametrize("choice", [choice for choice in CHOICES if choice != "keep"])
def test_to_float_puts_back_what_was_there(choice: BeforeSign) -> None:
    model = torchvision.models.mobilenet_v2(num_classes=10).eval()
    input, state = torch.randn(2, 3, 32, 32), list(model.state_dict())
    expected = model(input).detach()
    said = repr(model)
    qconv.convert(model, schemes.bnn(), before_sign=choice)
    assert list(qconv.float_state_dict(model)) == state
    assert not find(model, signs(model)).inputs
    assert not model(input).equal(expected)
    other = qconv.to_float(copy.deepcopy(model))
    model = qconv.to_float(model)
    for each in (other, model):
        assert each(input).equal(expected)
        assert list(each.state_dict()) == state
        assert repr(each) == said


@pytest.mark.parametrize("name", ["resnet20", "resnet18", "vgg_small", "vgg7", "quicknet", "birealnet18", "reactnet18"])
def test_our_networks_follow_the_scheme(name: str) -> None:
    with torch.device("meta"):
        binary, unsigned = (
            qconv.convert(getattr(qconv_models, name)(activation=nn.ReLU), scheme)
            for scheme in (schemes.bnn(), schemes.lsq(4, 4))
        )
    assert not find(binary, signs(binary)).inputs
    assert not any(replaced(each) for each in unsigned.modules())


def test_a_second_conversion_changes_no_more() -> None:
    model = torchvision.models.resnet18(num_classes=10)
    relus = [each for each in model.modules() if isinstance(each, nn.ReLU)]
    qconv.convert(model, schemes.bnn(), skip=("first", "last", "layer[34].*"), before_sign="prelu")
    slopes = [each.weight for each in relus if isinstance(each, nn.PReLU)]
    assert len(slopes) == 4  # the fifth, layer2.1.relu, is also called before layer3, which is float
    qconv.convert(model, schemes.xnor(), before_sign="hardtanh")
    assert [each.weight for each in relus if isinstance(each, nn.PReLU)] == slopes
    assert sum(type(each) is nn.Hardtanh for each in relus) == 3
    assert all(type(each) is nn.ReLU for each in qconv.to_float(model).modules() if each in relus)


def test_a_model_that_cannot_be_traced_is_looked_at_in_parts() -> None:
    model = qconv.convert(Branches(), schemes.bnn())
    assert type(model.second[0]) is nn.Identity  # in a part that can be traced
    assert type(model.act) is nn.ReLU  # never called, and not registered before a layer


class Untraceable(nn.Module):
    """Registers its activation before the layer that it calls before it."""

    def __init__(self) -> None:
        super().__init__()
        self.act, self.conv = nn.ReLU(), conv()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.conv(x)) if x.mean() < 1e9 else x


def test_the_order_of_registration_is_not_that_of_calls() -> None:
    model = chain(Untraceable())
    qconv.convert(model, schemes.bnn())
    assert type(model[1].act) is nn.LeakyReLU  # whose values are nearly those of a ReLU
    assert model[1](torch.randn(2, 8, 5, 5)).min() > -1


class Remembering(nn.Module):
    """Keeps what its first forward computed, as torchvision's `MultiScaleRoIAlign` does."""

    def __init__(self) -> None:
        super().__init__()
        self.act, self.conv = nn.ReLU(), conv()
        self.scale: Any = None
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        cast(Tensor, self.calls).add_(1)
        if self.scale is None:
            self.scale = x.shape[-1] / 8
        return self.conv(self.act(x)) * self.scale


def test_a_trace_leaves_nothing_in_the_model() -> None:
    model = chain(Remembering())
    qconv.convert(model, schemes.bnn())
    assert model[1].scale is None
    assert model[1].calls == 0
    with torch.device("meta"):
        model = chain(Remembering())
    qconv.convert(model, schemes.bnn())
    assert model[1].calls.is_meta


def helped(x: Tensor) -> Tensor:
    return F.relu(x)


class Helped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.unused = conv(), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(helped(x))


def test_a_function_out_of_reach_is_told() -> None:
    with pytest.warns(UserWarning, match=r"convert can't replace relu here: use nn.ReLU"):
        qconv.convert(chain(Helped()), schemes.bnn())
    graph = torch.fx.symbolic_trace(WithF())
    with pytest.warns(UserWarning, match=r"convert can't replace relu here: use nn.ReLU"):
        qconv.convert(graph, schemes.bnn(), skip=())
    input = torch.randn(2, 3, 9, 9)
    assert torch.equal(copy.deepcopy(graph)(input), graph(input))


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = conv(), conv()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        F.relu_(x)
        return self.second(x)


@pytest.mark.parametrize("choice", ["identity", "hardtanh", "leaky"])
def test_a_function_that_changes_its_input(choice: BeforeSign) -> None:
    block = InPlace()
    model = chain(block)
    qconv.convert(model, schemes.bnn(), before_sign=choice)
    seen = []
    block.second.register_forward_pre_hook(lambda _, args: seen.append(args[0].min().item()))
    model(5 * torch.randn(2, 3, 9, 9))
    assert {"identity": seen[0] < -1, "hardtanh": seen[0] == -1, "leaky": -1 < seen[0] < 0}[choice]


class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.act, self.head = nn.ReLU(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.act(x).flatten(2).mean(2))


@pytest.mark.parametrize("choice", ["leaky", "identity"])
@pytest.mark.parametrize(
    ("tail", "head"),
    [((nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 8)), "5"), ((Pooled(),), "2.head")],
    ids=["module", "method"],
)
def test_an_average_after_a_slope_keeps_its_sign(tail: tuple[nn.Module, ...], head: str, choice: BeforeSign) -> None:
    """Its few values below 0 don't change the sign of what lies above."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), conv(), *copy.deepcopy(tail), nn.Linear(8, 2))
    qconv.convert(model, schemes.bnn(), before_sign=choice)
    lowest = lowest_inputs(model, torch.randn(4, 3, 9, 9))
    assert (lowest[head] < 0) == (choice == "identity")


REGISTRY: dict[str, type[nn.Module]] = {}


class Registered(nn.Module):
    """Keeps account of its subclasses, which have an argument."""

    def __init_subclass__(cls, *, key: str, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        REGISTRY[key] = cls


class RegisteredBlock(Registered, key="block"):
    def __init__(self) -> None:
        super().__init__()
        self.conv = conv()

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.relu(x))


class RegisteredConv(nn.Conv2d, Registered, key="conv"):
    pass


def test_registries_of_classes_stay_as_they_are() -> None:
    model = chain(RegisteredBlock(), RegisteredConv(8, 8, 3))
    kinds: Any = {RegisteredConv: qconv.QConv2d}
    qconv.convert(model, schemes.bnn(), subclasses=kinds)
    assert type(model[1]) is not RegisteredBlock
    assert type(model[1]).__bases__ == (RegisteredBlock,)
    nn.utils.parametrize.register_parametrization(model[2], "bias", nn.Identity())
    model = qconv.to_float(pickle.loads(pickle.dumps(copy.deepcopy(model[:2]))).append(model[2]))
    assert type(model[1]) is RegisteredBlock
    assert isinstance(model[2], RegisteredConv)
    assert {"block": RegisteredBlock, "conv": RegisteredConv} == REGISTRY


class AbstractBlock(abc.ABC, nn.Module):
    """A class whose first base lays out its instances without a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = conv()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(F.relu(x))


def test_blocks_that_begin_with_an_abstract_class() -> None:
    model = chain(AbstractBlock())
    kind = type(model[1])
    assert lowest_inputs(qconv.convert(model, schemes.bnn(), skip=()), torch.randn(2, 3, 9, 9))["1.inner"] < -0.1
    assert type(qconv.to_float(model)[1]) is kind


class BeforeEncoder(nn.Module):
    """A network whose encoder can't be traced, and a part that is a script."""

    def __init__(self, scripted: bool) -> None:
        super().__init__()
        self.a, self.b = conv(), conv()
        self.first = torch.jit.script(nn.Identity()) if scripted else nn.Identity()
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(self.b(F.relu(self.a(self.first(x)))).flatten(2).mT)


@pytest.mark.filterwarnings("ignore:`torch.jit.script")
@pytest.mark.parametrize("scripted", [False, True])
def test_a_graph_ends_at_an_encoder_alone(scripted: bool) -> None:
    model = BeforeEncoder(scripted)
    plan = qconv.plan(model, schemes.bnn(), skip=())
    assert any("Identity" in str(line) and "before the sign of b" in str(line) for line in plan.activations)
    assert any("TransformerEncoderLayer" in str(line) and "stays" in str(line) for line in plan.activations)


def test_what_fails_after_the_layers_changes_nothing() -> None:
    """Such as a warning that is an error."""
    model = chain(nn.TransformerEncoderLayer(8, 2, 16), nn.ReLU(), WithF(), Helped()).eval()
    model[5].requires_grad_(False)
    said, state = repr(model), copy.deepcopy(model.state_dict())
    notes = [dict(vars(module)) for module in model.modules()]
    trained = [parameter.requires_grad for parameter in model.parameters()]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for choice in ("identity", "hardtanh"):
            with pytest.raises(UserWarning, match="let one sign through"):
                qconv.convert(model, schemes.reactnet(), before_sign=choice)
    assert repr(model) == said
    assert all(value.equal(state[key]) for key, value in model.state_dict().items())
    assert len(model.state_dict()) == len(state)
    assert trained == [parameter.requires_grad for parameter in model.parameters()]
    assert type(model[3]) is WithF
    assert [vars(module).keys() for module in model.modules()] == [before.keys() for before in notes]


def test_choices_that_cannot_be_made() -> None:
    with pytest.raises(ValueError, match=r"before_sign \(='tanh'\) must be 'identity' or 'hardtanh' or"):
        qconv.convert(chain(nn.ReLU()), schemes.bnn(), before_sign="tanh")  # pyright: ignore[reportArgumentType]
    with pytest.warns(UserWarning, match="relu in WithTorch stays: a function has no parameter: use nn.ReLU"):
        qconv.convert(WithTorch(), schemes.bnn(), before_sign="prelu")
    model = qconv.convert(chain(nn.ReLU()), schemes.bnn(), before_sign="keep")
    assert type(model[1]) is nn.ReLU


@pytest.mark.parametrize(("model", "name"), [(chain(nn.ReLU()), "1"), (WithF(), "")], ids=["module", "calls"])
def test_an_activation_whose_forward_is_replaced_stays(model: Any, name: str) -> None:
    """What would stand there instead would not be called."""
    module = model.get_submodule(name)
    kind, forward = type(module), module.forward
    module.forward = lambda x: forward(x) - 1
    with pytest.warns(UserWarning, match="stays: its forward is replaced on the module itself: del module.forward"):
        qconv.convert(model, schemes.bnn())
    assert type(module) is kind


@pytest.mark.parametrize("choice", [choice for choice in CHOICES if choice != "keep"])
@pytest.mark.parametrize("make", [lambda: chain(nn.ReLU()), lambda: WithF()], ids=["module", "function"])
def test_packed_files_hold_the_activations(make: Callable[[], nn.Module], choice: BeforeSign, tmp_path: Path) -> None:
    model, blank = make(), make()
    if isinstance(model, WithF) and choice == "prelu":
        return
    qconv.convert(model, schemes.bnn(), before_sign=choice)
    for parameter in model.parameters():
        parameter.data.mul_(1.25)
    input = torch.randn(2, 3, 9, 9)
    qconv.save_packed(model.eval(), tmp_path / "model.safetensors")
    assert qconv.load_packed(tmp_path / "model.safetensors", blank)(input).equal(model(input))
    if not isinstance(model, WithF):
        with pytest.raises(
            qconv.PackedFileError, match=rf"activation '1' \({choice}\) of the file can't be restored: Tanh"
        ):
            qconv.load_packed(tmp_path / "model.safetensors", chain(nn.Tanh()))


def note_keys(model: nn.Module) -> list[str]:
    return [key for key in model.state_dict() if key.endswith(".before_sign")]


@pytest.mark.parametrize("way", ["torch.save", "safetensors", "plain dictionary", "distributed", "average"])
@pytest.mark.parametrize("choice", CHOICES)
def test_a_state_dict_of_another_choice_is_refused(choice: BeforeSign, way: str, tmp_path: Path) -> None:
    """None of these activations but PReLU has a tensor by which it could be told."""
    model = qconv.convert(chain(nn.ReLU()), schemes.bnn(), before_sign=choice)
    state: Any = model.state_dict()
    if way == "torch.save":
        torch.save(state, tmp_path / "model.pt")
        state = torch.load(tmp_path / "model.pt", weights_only=True)
    elif way == "safetensors":
        save_file(state, tmp_path / "model.safetensors")
        state = load_file(tmp_path / "model.safetensors")
    elif way == "plain dictionary":
        state = {key: value.clone() for key, value in state.items()}
    elif way == "distributed":
        state = get_model_state_dict(model)
    else:
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
        for _ in range(3):
            average.update_parameters(model)
        state = average.module.state_dict()
    qconv.convert(chain(nn.ReLU()), schemes.bnn(), before_sign=choice).load_state_dict(state)
    every: tuple[BeforeSign, ...] = get_args(BeforeSign)
    for other in set(every) - {choice}:
        with pytest.raises(
            RuntimeError,
            match=rf"2: the activations before its signs became '{choice}' in the checkpoint's model and '{other}' "
            rf"in this one: convert the model with before_sign='{choice}'",
        ):
            qconv.convert(chain(nn.ReLU()), schemes.bnn(), before_sign=other).load_state_dict(state, strict=False)


def test_what_says_nothing_of_activations_is_loaded() -> None:
    """Float checkpoints, those of earlier versions, and those of networks that never had an activation there."""
    model = qconv.convert(chain(nn.ReLU()), schemes.bnn())
    assert note_keys(model) == ["2.input_quantizer.before_sign"]
    for state in (chain(nn.ReLU()).state_dict(), qconv.float_state_dict(model)):
        assert not any(model.load_state_dict(state))
        assert not any(chain(nn.ReLU()).load_state_dict(state))
    without = qconv.convert(chain(nn.Identity()), schemes.bnn())
    assert not note_keys(without)
    assert not any(without.load_state_dict(model.state_dict()))
    assert not any(model.load_state_dict(without.state_dict()))
    with pytest.raises(RuntimeError, match=r"2: before_sign \(=\[nan, 1.0\]\) in the checkpoint must be two numbers"):
        model.load_state_dict(model.state_dict() | {"2.input_quantizer.before_sign": torch.tensor([torch.nan, 1.0])})


def test_a_note_that_is_refused_leaves_the_layer_as_it_was() -> None:
    model, other = (
        qconv.convert(chain(nn.ReLU()), schemes.reactnet(), before_sign=each) for each in ("keep", "identity")
    )
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1.0)
    layer, stored = cast(Any, model)[2], cast(Any, other)[2].state_dict()
    before = {key: value.clone() for key, value in layer.state_dict().items()}
    with pytest.raises(RuntimeError, match=r"\n\tQConv2d: the activations before its signs became [^\n]*$"):
        layer.load_state_dict(stored)
    with pytest.raises(RuntimeError, match=r"\n\t2: the activations before its signs became [^\n]*$"):
        model.load_state_dict(other.state_dict())
    assert all(torch.equal(value, before[key]) for key, value in layer.state_dict().items())
    assert stored.keys() == before.keys()


def test_the_note_stays_with_the_layer() -> None:
    model = qconv.convert(chain(nn.ReLU()), schemes.bnn())
    cast(qconv.QConv2d, model[2]).set_scheme(schemes.xnor())
    model = pickle.loads(pickle.dumps(copy.deepcopy(model.half())))
    assert len(note_keys(model)) == 1
    assert not note_keys(qconv.to_float(model))
    former: Any = qconv.convert(chain(nn.ReLU()), schemes.bnn())
    former[2].before_sign = note_of("identity", {"keep"})  # it could not be replaced then
    with pytest.raises(RuntimeError, match="both were converted with before_sign='identity', so the networks or the v"):
        qconv.convert(chain(nn.ReLU()), schemes.bnn()).load_state_dict(former.state_dict())


def test_notes_are_in_no_way_of_weights_from_elsewhere(tmp_path: Path) -> None:
    """A run may start from weights that were trained with another choice."""
    model, other = (qconv.convert(chain(nn.ReLU()), schemes.bnn(), before_sign=each) for each in ("keep", "identity"))
    torch.save(model.state_dict(), tmp_path / "keep.pt")
    load_weights(other, str(tmp_path / "keep.pt"))
    assert other.get_parameter("2.weight").equal(model.get_parameter("2.weight"))


def test_the_names_in_files_are_those_of_the_choices() -> None:
    assert ACTIVATIONS == CHOICES


WARN: dict[str, tuple[qconv.QuantizedLayer, Callable[[], Tensor], str]] = {
    "sign behind ReLU": (
        qconv.QConv2d(4, 4, 3, scheme=schemes.bnn()),
        lambda: torch.rand(4, 4, 8, 8),
        r"QConv2d\(4, 4.*100.0% of the inputs.* became 1 in Sign: .*leave out a ReLU before it, as .* nn.PReLU in",
    ),
    "signed lsq(1, 1) behind ReLU": (
        qconv.QLinear(40, 4, scheme=schemes.lsq(1, 1, signed_input=True)),
        lambda: torch.randn(16, 40).relu(),
        r"QLinear\(in_features=40.*in LSQInput: .*put nn.Hardtanh or nn.PReLU",
    ),
    "pact with a wide range": (
        qconv.QConv2d(4, 4, 3, scheme=schemes.pact(2, 2, alpha=8.0)),
        lambda: torch.rand(4, 4, 8, 8),
        "became 0 in PACT: .*range is too wide",
    ),
    "dorefa below 0": (
        qconv.QConv2d(4, 4, 3, scheme=schemes.dorefa(2, 2)),
        lambda: -torch.rand(4, 4, 8, 8),
        "became 0 in DoReFaInput: .*levels begin at 0: use a scheme with signed inputs",
    ),
    "dorefa above 1": (
        qconv.QConv2d(4, 4, 3, scheme=schemes.dorefa(2, 2)),
        lambda: 5 + torch.rand(4, 4, 8, 8),
        "became 1 in DoReFaInput: .*range does not fit",
    ),
}


@pytest.mark.parametrize(("layer", "input", "message"), WARN.values(), ids=list(WARN))
def test_inputs_in_one_level_are_told_once(
    layer: Any, input: Callable[[], Tensor], message: str, recwarn: pytest.WarningsRecorder
) -> None:
    watch(layer)
    layer.eval()(input())
    layer.train()(input())
    with torch.no_grad():
        layer(input())  # of no training
    layer(input())
    assert not [each for each in recwarn if "training batches" in str(each.message)]
    with pytest.warns(UserWarning, match=f"(?s){message}"):
        layer(input())
    assert not layer._forward_hooks


def test_inputs_that_are_spread_are_not_told(method: qconv.Scheme) -> None:
    layer = qconv.QConv2d(4, 4, 3, scheme=method)
    bound = layer.input_quantizer
    watch(layer)
    for _ in range(4):
        x = torch.randn(4, 4, 8, 8)
        layer(x if bound.splits_at_zero else x.relu())


@pytest.mark.parametrize("told", [False, True])
def test_zeros_that_stay_zeros_do_not_count(told: bool, recwarn: pytest.WarningsRecorder) -> None:
    """One-hot inputs go through; what a ReLU lets through and the range is too wide for does not."""
    layer = qconv.QLinear(2000, 4, scheme=schemes.pact(2, 2, alpha=1000.0) if told else schemes.lsq(4, 4))
    watch(layer)
    for _ in range(4):
        layer(torch.randn(8, 2000).relu() if told else F.one_hot(torch.randint(2000, (64,)), 2000).float())
    assert ["became 0 in PACT" in str(each.message) for each in recwarn] == [True] * told


def test_a_batch_that_is_spread_is_enough() -> None:
    layer = qconv.QConv2d(4, 4, 3, scheme=schemes.bnn())
    watch(layer)
    layer(torch.randn(4, 4, 8, 8))
    for _ in range(5):
        layer(torch.rand(4, 4, 8, 8))


def test_the_command_line_chooses() -> None:
    def composed(*overrides: str) -> DictConfig:
        relu = ("model=vgg_small", "model.activation._target_=torch.nn.ReLU", "model.image_size=8")
        with initialize_config_dir(str(CONFIGS), version_base="1.3"):
            return compose("config", [*relu, "run_dir=x", *overrides])

    data = SimpleNamespace(in_channels=1, num_classes=10)
    kinds = {}
    for choice in CHOICES:
        made: Any = quantized_model(composed(f"before_sign={choice}"), data)[0]
        kinds[choice] = type(made.blocks[0].act)
    assert kinds == dict(hardtanh=nn.Hardtanh, prelu=nn.PReLU, leaky=nn.LeakyReLU, identity=nn.Identity, keep=nn.ReLU)


def test_an_activation_in_a_block_that_cannot_be_traced() -> None:
    """It may be called more than once, where no sign follows, so negative values must not pass as they are."""

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.relu, self.second = conv(), nn.ReLU(), conv()

        def forward(self, x: Tensor) -> Tensor:
            out = self.second(self.relu(self.first(x)))
            if float(out.detach().sum()) == 1e9:  # what torch.fx can't follow
                return x
            return self.relu(out + x)

    model = nn.Sequential(nn.Conv2d(3, 8, 3), Residual(), nn.Conv2d(8, 2, 3))
    qconv.convert(model, schemes.bnn())
    inside: Any = model[1]
    assert isinstance(inside.relu, nn.LeakyReLU)
    x = torch.randn(2, 3, 9, 9)
    assert model[:2](x).max() > 10 * -model[:2](x).min()


class Checked(nn.Module):
    """A residual block that `torch.fx` can't trace, as its forward checks its input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = conv(), nn.BatchNorm2d(8), conv()

    def forward(self, x: Tensor) -> Tensor:
        assert x.shape[1] == 8
        return F.relu(x + self.second(F.relu(self.norm(self.first(x)))))


class CheckedMethod(Checked):
    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(x, Tensor)
        return (x + self.second(self.norm(self.first(x)).relu())).relu()


class Listed(Checked):
    """A list hides its convolution, so that `torch.fx` finds no name for it."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = [conv()]

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.second(F.relu(self.norm(self.first(self.hidden[0](x))))))


class Act(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x)


class CheckedAct(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        assert x.shape[1] == 8
        return F.relu(x)


class ConvAct(nn.Module):
    """What ends with a function that only the next part reads."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = conv(), nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.conv(x)))


def lowest_inputs(model: nn.Module, *inputs: Tensor) -> dict[str, float]:
    """The smallest input of each layer that takes signs."""
    seen: dict[str, float] = {}

    def note(name: str, layer: nn.Module, args: tuple[Tensor, ...]) -> None:
        seen[name] = args[0].min().item()

    for name, layer in model.named_modules():
        if isinstance(layer, qconv.QuantizedLayer):
            layer.register_forward_pre_hook(partial(note, name))
    model(*inputs)
    return seen


@pytest.mark.parametrize("choice", ["identity", "prelu"])
@pytest.mark.parametrize(
    "parts",
    [(Checked, Checked), (Listed,), (Act, conv, Checked), (CheckedAct, conv, Checked), (ConvAct, ConvAct, Checked)],
    ids=lambda parts: "-".join(part.__name__ for part in parts),
)
def test_a_function_in_a_forward_that_cannot_be_traced(parts: tuple[Any, ...], choice: BeforeSign) -> None:
    """It keeps the sign, and for other readers nearly its values."""
    model = chain(*(part() for part in parts)).eval()
    expected, input = copy.deepcopy(model), torch.randn(4, 3, 9, 9)
    steps = qconv.plan(model, schemes.bnn(), before_sign=choice).activations
    assert {(step.becomes, step.reason.startswith("torch.fx can't trace")) for step in steps} == {
        ("leaky", part in (Checked, CheckedAct, Listed)) if part is not Act else ("leaky", False)
        for part in parts
        if part is not conv
    }
    lowest = lowest_inputs(qconv.convert(model, schemes.bnn(), before_sign=choice), input)
    assert all(low < 0 for low in lowest.values())
    assert "perhaps before the sign of" in str(steps[-1])
    assert qconv.to_float(model)(input).equal(expected(input))


def test_a_method_in_such_a_forward_is_told() -> None:
    said = r"1 activation lets .* may stand .*\n1  \.relu\(\) in CheckedMethod stays: conv"
    with pytest.warns(UserWarning, match=said):
        model = qconv.convert(chain(CheckedMethod()), schemes.bnn())
    assert type(model[1]) is CheckedMethod


@pytest.mark.parametrize("kind", ["encoder", "encoders", "decoder"])
def test_activations_inside_a_layer_of_torch(kind: str) -> None:
    """torch's own attention and its fast paths are no obstacle; a function in its attribute is out of reach."""
    single = nn.TransformerDecoderLayer if kind == "decoder" else nn.TransformerEncoderLayer
    inputs = (torch.randn(2, 5, 8),) * (2 if kind == "decoder" else 1)

    def made(activation: Any) -> nn.Module:
        layer = single(8, 2, 16, batch_first=True, activation=activation)
        return nn.TransformerEncoder(cast(nn.TransformerEncoderLayer, layer), 2) if kind == "encoders" else layer

    for scheme, choice in ((schemes.bnn(), "identity"), (schemes.xnor(), "hardtanh")):
        model = qconv.convert(made(nn.ReLU()), scheme, skip=(), before_sign=cast(BeforeSign, choice))
        assert all(low < -0.1 for low in lowest_inputs(model, *inputs).values())
    with pytest.warns(
        UserWarning, match=rf"relu in {single.__name__} stays: .*; the input of .*linear2.* is one-signed"
    ):
        qconv.convert(made(F.relu), schemes.bnn(), skip=())
    assert torch.backends.mha.get_fastpath_enabled()


def add_itself(y: Tensor, v: Tensor) -> Tensor:
    y += y
    return y


@pytest.mark.parametrize(
    ("between", "is_one_signed"),
    [
        *((lambda y, v: (y.add_(v), y)[1], False), (lambda y, v: (y.neg_(), y)[1], False)),
        *((lambda y, v: (y.copy_(v), y)[1], False), (lambda y, v: torch.add(y, other=v), False)),
        *((lambda y, v: torch.add(y, y + 1, alpha=-1), False), (lambda y, v: torch.stack([y, v])[1], False)),
        *((lambda y, v: torch.cat([y, v], 1).flatten(2).split(4, 1)[1].unflatten(2, (8, 8)), False),),
        *((lambda y, v: torch.add(y, other=y), True), (lambda y, v: torch.cat([y, y], 1)[:, 4:], True)),
        *((add_itself, True), (lambda y, v: torch.maximum(y, v)[:, :4], True)),
    ],
)
def test_what_happens_to_values_after_an_activation(between: Callable[..., Tensor], is_one_signed: bool) -> None:
    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.other = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(3, 4, 3, padding=1)
            self.relu, self.last = nn.ReLU(), nn.Conv2d(4, 4, 3)

        def forward(self, input: Tensor) -> Tensor:
            return self.last(between(self.relu(self.first(input)), self.other(input)))

    model, least = Network(), []
    handle = model.last.register_forward_pre_hook(lambda layer, args: least.append(args[0].min()))
    model(torch.randn(2, 3, 8, 8))
    handle.remove()
    assert (least[0] >= 0) == is_one_signed
    assert bool(find(model, [model.last]).inputs) == is_one_signed
