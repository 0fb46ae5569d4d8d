"""Every method, as the table has it: its arguments, its names and documents, and a layer that is trained with it."""

import copy
import inspect
import math
import pickle
import re
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import golden
import pytest
import torch
import yaml
from hydra.core.config_store import ConfigStore
from methods import (
    CALLABLES,
    FUNCTIONS,
    GOLDEN,
    MADE_OF_SCHEMES,
    METHODS,
    SCHEMES,
    SURROGATES,
    arguments,
    choices,
    may_be_none,
    owners,
    parameters,
    range_of,
    scheme_variants,
)
from omegaconf import OmegaConf
from settings import mostly_nightly
from torch import Tensor, nn

import qconv
from qconv import methods, schemes
from qconv.quantizers import (
    EDE,
    INQ,
    FixedPoint,
    HardClip,
    Identity,
    MinMaxInput,
    Quantizer,
    ReActNetInput,
    ScaledSign,
    Sign,
    Stages,
    Surrogate,
)

ROOT = Path(__file__).parents[1]
PAGES = "\n".join(page.read_text() for page in (ROOT / "docs" / "methods").glob("*.md"))
EACH_FUNCTION = pytest.mark.parametrize("name", FUNCTIONS)
PUBLISHED = [name for name in FUNCTIONS if name not in MADE_OF_SCHEMES and name != "identity"]

# Arguments


def make(name: str, **values: Any) -> Any:
    """What ``name`` makes; a scheme of schemes is given one."""
    return CALLABLES[name](*([schemes.bnn()] if name in ("two_stage", "layerwise") else []), **values)


def ids(rows: list[tuple[str, str]]) -> Iterator[str]:
    return map("-".join, rows)


BITS = arguments(lambda name, argument: argument.endswith("bits"))
FLAGS = arguments(lambda name, argument: isinstance(parameters(name)[argument].default, bool))
WORDS = arguments(choices)
NUMBERS = [row for row in arguments(range_of) if row not in BITS]
OTHERS = (
    *("surrogate", "weight_surrogate", "padding_value", "fixed_point", "portions", "stages", "scheme"),
    *("inputs", "weights", "ramp"),
)
"""Arguments that are no number, flag or word; their tests stand below."""
CHOSEN = {("lsq", "signed_input"), ("LSQInput", "signed")}
"""Flags that may be None, which leaves the choice to the data: `test_chosen_sign`."""


def test_every_argument_is_known() -> None:
    """A number without a range would be tested by nothing."""
    known = {*BITS, *FLAGS, *WORDS, *NUMBERS}
    assert all(range_of(*row) for row in BITS)
    assert [row for row in arguments(lambda *_: True) if row not in known | CHOSEN and row[1] not in OTHERS] == []
    stated = {(name, key) for name, entry in (GOLDEN | golden.SURROGATES).items() for key in entry.ranges}
    assert stated <= {*BITS, *NUMBERS}


@pytest.mark.parametrize(("name", "argument"), BITS, ids=ids(BITS))
def test_bits_are_whole_numbers_of_the_range(name: str, argument: str) -> None:
    limits = range_of(name, argument)
    assert limits is not None
    for bits in range(-1, 34):
        if limits.low <= bits <= limits.high:
            make(name, **{argument: bits})
        else:
            with pytest.raises(ValueError, match=rf"{argument}.* \(=-?\d+\) must .*(\d|negative)"):
                make(name, **{argument: bits})
    none = () if may_be_none(name, argument) else (None,)
    for bits in (2.5, 2.0, True, "4", math.nan, [4], torch.tensor(4), *none):
        with pytest.raises(ValueError, match=rf"{argument} \(=.*\) must be a whole number.*, not of type "):
            make(name, **{argument: bits})


@pytest.mark.parametrize(("name", "argument"), FLAGS, ids=ids(FLAGS))
def test_flags_are_true_or_false(name: str, argument: str) -> None:
    for value in ("false", 8, None):
        with pytest.raises(TypeError, match=rf"{argument} \(={value!r}\) must be True or False"):
            make(name, **{argument: value})


@pytest.mark.parametrize(("name", "argument"), NUMBERS, ids=ids(NUMBERS))
def test_numbers_are_finite_and_in_range(name: str, argument: str) -> None:
    limits = range_of(name, argument)
    assert limits is not None
    for value in ("0.5", True, [0.5]):
        message = rf"{argument} \(=.*\) must be a number, not of type {type(value).__name__}"
        with pytest.raises(TypeError, match=message):
            make(name, **{argument: value})
    wrong = {math.nan, -1.0}
    for limit, beyond, included in (
        (limits.low, -math.inf, limits.ends[0] == "["),
        (limits.high, math.inf, limits.ends[1] == "]"),
    ):
        inside, outside = math.nextafter(limit, -beyond), math.nextafter(limit, beyond)
        make(name, **{argument: limit if included else inside})
        wrong |= {math.inf if math.isinf(limit) else outside} if included else {limit}
    if limits.high == math.inf and limits.ends[1] == "]":
        wrong.remove(math.inf)  # to clip at inf is not to clip
    for value in wrong:
        with pytest.raises(ValueError, match=rf"{argument} \(={value}\)"):
            make(name, **{argument: value})


@pytest.mark.parametrize(("name", "argument"), WORDS, ids=ids(WORDS))
def test_words_are_of_those_there_are(name: str, argument: str) -> None:
    for word in choices(name, argument):
        make(name, **{argument: word})
    for value in ("nonsense", "", 3, True, *([] if None in choices(name, argument) else [None])):
        with pytest.raises(ValueError, match=rf"{argument} \(={value!r}\) must be "):
            make(name, **{argument: value})


def calling(function: Callable[..., object], *args: Any, **given: Any) -> Callable[[], object]:
    return lambda: function(*args, **given)


WRONG: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "one number": (calling(schemes.inq, portions=0.5), TypeError, r"portions \(=0.5\) must be a sequence of numbers"),
    "a word of portions": (calling(schemes.inq, portions="abc"), TypeError, r"portions \(='abc'\) must be a sequence"),
    "words": (calling(INQ, 5, ("a", 1)), TypeError, r"portions \(='a'\) must be a number"),
    "an end before 1": (
        calling(schemes.inq, portions=(0.5, 0.9)),
        ValueError,
        r"portions \(=\(0.5, 0.9\)\) must increase from above 0 to 1",
    ),
    "equal ones": (calling(schemes.inq, portions=(0.5, 0.5, 1)), ValueError, "must increase from above 0 to 1"),
    "zero": (calling(schemes.inq, portions=(0.0, 1)), ValueError, "must increase from above 0 to 1"),
    "none": (calling(schemes.inq, portions=()), ValueError, "must increase from above 0 to 1"),
    "NaN": (calling(schemes.inq, portions=(0.5, math.nan, 1)), ValueError, "must increase from above 0 to 1"),
    "a number": (calling(schemes.shift_q, fixed_point=16), ValueError, r"fixed_point \(=16\) must be \(integer_bits"),
    "three": (calling(schemes.shift_q, fixed_point=(1, 2, 3)), ValueError, r"fixed_point \(=\(1, 2, 3\)\) must be"),
    "digits": (calling(schemes.shift_ps, fixed_point="16"), ValueError, r"integer_bits \(='1'\) must be a whole"),
    "a half bit": (calling(schemes.shift_q, fixed_point=(4, 2.5)), ValueError, r"fraction_bits \(=2.5\) must be a"),
    "33 bits": (calling(FixedPoint, 20, 20), ValueError, r"integer_bits \+ fraction_bits \(=40\) must be at most 32"),
    "no order": (calling(Stages, [(0, Identity), (math.nan, Sign)]), ValueError, "one after another"),
    "a surrogate itself": (
        calling(schemes.bnn, surrogate=HardClip()),
        TypeError,
        r"surrogate \(=HardClip\(1.0\)\) must make a surrogate",
    ),
    "a surrogate's name": (
        calling(schemes.xnorpp, weight_surrogate="ede"),
        TypeError,
        r"weight_surrogate \(=ede\) must make a surrogate",
    ),
    "another class": (
        calling(schemes.bwn, surrogate=list),
        TypeError,
        r"surrogate \(=<class 'list'>\) must make a surrogate",
    ),
    "two gradients": (
        calling(schemes.bwn, True, paper_gradient=True),
        ValueError,
        r"detach_scale \(=True\) and paper_gradient \(=True\)",
    ),
    "float padding": (
        calling(schemes.irnet, padding_value=1, binary_input=False),
        ValueError,
        r"padding_value \(=1\) must be 0 with binary_input=False",
    ),
    "float surrogate": (
        calling(schemes.reste, surrogate=EDE, binary_input=False),
        ValueError,
        r"surrogate \(=.*EDE.*\) must be None with binary_input=False: use weight_surrogate",
    ),
    "unbuilt": (lambda: ReActNetInput()(torch.ones(2)), ValueError, r"bias \(=None\) .* call build"),
    "unbuilt range": (
        lambda: MinMaxInput(8, per_channel=True).initialize(torch.ones(2, 3)),
        ValueError,
        r"per_channel \(=True\) needs the number of channels: call build",
    ),
}


@pytest.mark.parametrize(("call", "error", "message"), WRONG.values(), ids=WRONG.keys())
def test_wrong_arguments(call: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if "padding_value" in parameters(name)])
def test_padding_is_zero_or_a_sign(name: str) -> None:
    assert [make(name, padding_value=value).padding_value for value in (0, 1, -1)] == [0, 1, -1]
    with pytest.raises(ValueError, match=r"padding_value \(=2\) must be 0, \+1 or -1"):
        make(name, padding_value=2)


# Defaults

OF_THEIR_OWN = {
    "adabin": {"t_min": "0.001 is that of the authors' code, 0.1 the estimator's own"},
    "pact": {"weight_bits": "the paper has as many bits for weights as for activations; DoReFa-Net binary weights"},
    "dorefa": {"grad_bits": "None leaves the gradient as it is"},
}
"""Defaults of a scheme that its quantizers do not have, and why."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_defaults_of_a_scheme_are_those_of_its_quantizers(name: str) -> None:
    for argument, parameter in parameters(name).items():
        if argument not in ("surrogate", "weight_surrogate"):
            for owner, key in owners(name, argument):
                same = parameters(owner)[key].default == parameter.default
                assert same != (argument in OF_THEIR_OWN.get(name, {})), (argument, owner)
    own = [type(part) for part in (schemes.bnn().weight(), Identity())]  # Sign serves many
    own += [ScaledSign] if name == "fda" else []  # that of BWN, with another derivative
    made = FUNCTIONS[name]()
    for quantizer in (made.weight(), made.input()):
        if type(quantizer) not in own and not OF_THEIR_OWN.get(name, {}).keys() & {"weight_bits"}:
            assert repr(quantizer) == repr(type(quantizer)())


# Documents


@EACH_FUNCTION
def test_every_scheme_has_its_documents(name: str) -> None:
    function = inspect.unwrap(FUNCTIONS[name])
    assert golden.SCHEMES.keys() | {*MADE_OF_SCHEMES} == FUNCTIONS.keys(), "tests/golden.py: SCHEMES has a row of each"
    row = re.search(rf"^\| `{name}\(.*", PAGES, re.MULTILINE)
    assert row, "docs/methods has no row of it"
    if name != "identity":
        assert Path(inspect.getsourcefile(function) or "").parent == ROOT / "qconv" / "methods"
        assert getattr(methods, name) is FUNCTIONS[name]
        papers = re.findall(r"arXiv:(\d{4}\.\d{5})", inspect.getdoc(function) or "")
        assert papers, "the docstring names no paper"
        assert any(f"[{paper}](https://arxiv.org/abs/{paper})" in row.group() for paper in papers)


def test_every_surrogate_has_a_row() -> None:
    assert [name for name in SURROGATES if f"\n| `{name}` |" not in PAGES] == [], "docs/methods/binary.md, last table"


WITHOUT_A_SCHEME = {"Int8Stochastic": "configs/grad_quantizer/int8.yaml"}
"""For gradients, beside any scheme."""


def test_every_quantizer_has_its_documents() -> None:
    found = {name: kind for name, kind in vars(methods).items() if isinstance(kind, type)}
    assert not found.keys() & SURROGATES.keys(), "a surrogate belongs into qconv/quantizers/surrogates.py"
    assert found.keys() <= GOLDEN.keys(), "tests/golden.py: QUANTIZERS has a row of each"
    assert GOLDEN.keys() - found.keys() == {"Identity"}
    for name, kind in found.items():
        module = inspect.getmodule(kind)
        assert module is not None
        assert Path(module.__file__ or "").parent == ROOT / "qconv" / "methods"
        assert re.search(r"arXiv:\d{4}\.\d{5}", (module.__doc__ or "") + (kind.__doc__ or ""))
        own = [each for each in FUNCTIONS if inspect.getmodule(inspect.unwrap(FUNCTIONS[each])) is module]
        assert own or (ROOT / WITHOUT_A_SCHEME[name]).exists()


@EACH_FUNCTION
def test_a_config_holds_every_argument_with_its_default(name: str) -> None:
    stored = ConfigStore.instance().repo["scheme"].get(f"{name}.yaml")
    path = ROOT / "configs" / "scheme" / f"{name}.yaml"
    assert (stored is None) == path.exists()
    node: Any = yaml.safe_load(path.read_text()) if stored is None else OmegaConf.to_container(stored.node)
    config: dict[str, Any] = {key: tuple(each) if isinstance(each, list) else each for key, each in node.items()}
    assert config.pop("_target_") == f"qconv.schemes.{name}"
    config.pop("_convert_", None)
    assert list(config) == list(parameters(name))
    defaults = {key: each.default for key, each in parameters(name).items() if each.default is not each.empty}
    assert {key: config[key] for key in defaults} == defaults
    if name not in MADE_OF_SCHEMES:
        assert FUNCTIONS[name](**config).name == FUNCTIONS[name]().name


# Names


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_scheme_is_written_as_it_was_called(name: str) -> None:
    bits = [key for key in parameters(name) if key in ("weight_bits", "input_bits", "format", "input_format")]
    shown = {key: parameters(name)[key].default for key in bits}
    assert FUNCTIONS[name]().name == f"{name}({', '.join(f'{key}={value}' for key, value in shown.items())})"
    for args in scheme_variants(name):
        every = {key: {**shown, **args}[key] for key in parameters(name) if key in {**shown, **args}}
        every = {key: each for key, each in every.items() if key in shown or each != parameters(name)[key].default}
        assert str(FUNCTIONS[name](**args)) == f"{name}({', '.join(f'{key}={each}' for key, each in every.items())})"


SURROGATE_OF_THE_WEIGHT = "bwn"
MAKES = [
    partial(kind, **golden.SURROGATES[name].rows[-1].args)
    for name, kind in SURROGATES.items()
    if name in golden.SURROGATES  # which a test says
]


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if "surrogate" in parameters(name)])
@pytest.mark.parametrize("surrogate", MAKES, ids=[repr(each()) for each in MAKES])
def test_every_binary_scheme_takes_every_surrogate(name: str, surrogate: Callable[[], Surrogate]) -> None:
    scheme, published = FUNCTIONS[name](surrogate=surrogate), FUNCTIONS[name]()
    assert str(scheme) == f"{name}(surrogate={surrogate()})"

    def of(made: qconv.Scheme) -> list[str]:
        return [repr(part.surrogate) for part in (made.input(), made.weight()) if hasattr(part, "surrogate")]  # pyright: ignore

    if name == SURROGATE_OF_THE_WEIGHT:  # its input is float
        assert of(scheme) == [repr(surrogate())]
    else:
        assert of(scheme) == [repr(surrogate()), of(published)[1]]
        assert of(FUNCTIONS[name](weight_surrogate=surrogate)) == [of(published)[0], repr(surrogate())]
    layer = qconv.QConv2d(4, 4, 3, scheme=scheme)
    layer.set_progress_(0.5)
    layer(torch.randn(2, 4, 5, 5)).sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.isfinite().all()


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if "input_bits" in parameters(name)])
def test_the_bits_are_those_asked_for(name: str) -> None:
    scheme = FUNCTIONS[name](weight_bits=3, input_bits=5)
    assert (scheme.weight().bits, scheme.input().bits) == (3, 5)
    assert FUNCTIONS[name](input_bits=None).input is Identity


# Layers

EVERY = METHODS | {
    (scheme := FUNCTIONS[name](**args)).name: scheme for name in PUBLISHED for args in scheme_variants(name)
}
EACH_METHOD = pytest.mark.parametrize("name", mostly_nightly(EVERY, METHODS))


def network(scheme: qconv.Scheme) -> nn.Module:
    layers = (
        qconv.QConv2d(4, 6, 3, padding=1, groups=2, scheme=scheme),
        nn.Flatten(),
        qconv.QLinear(150, 5, scheme=scheme),
    )
    return nn.Sequential(*layers)


def trained(scheme: qconv.Scheme, autocast: bool = False) -> tuple[nn.Module, Tensor]:
    """A network after a step in which every parameter changed, and inputs."""
    scheme = pickle.loads(pickle.dumps(scheme))
    model, x = network(scheme), torch.randn(2, 4, 5, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    handle = qconv.after_every_step(optimizer, model)
    qconv.set_progress(model, 0.3)
    input = x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        output = model(input)
    assert output.dtype == (torch.bfloat16 if autocast else torch.float32)
    output.float().square().mean().backward()
    before = {}
    for name, parameter in (("input", input), *model.named_parameters()):
        if parameter.requires_grad:
            assert parameter.grad is not None, name
            assert parameter.grad.isfinite().all(), name
            if parameter.grad.any():
                before[name] = parameter.detach().clone()
            else:
                assert "quantizer" in name, name  # which may have clipped nothing
    optimizer.step()
    handle.remove()
    for name, old in before.items():
        clamped = name.endswith("shift") and scheme.weight().bits == 2  # to 0 alone
        unmoved = name.endswith("beta") and scheme.input().bits == 16  # by a step below the spacing of float32
        assert name == "input" or clamped or unmoved or not old.equal(model.get_parameter(name)), name
    return model, x


@pytest.mark.parametrize(
    ("name", "autocast"),
    mostly_nightly(product(EVERY, (False, True)), [*product(METHODS, (False,)), *product(SCHEMES, (True,))]),
)
def test_a_training_step_and_its_state(name: str, autocast: bool) -> None:
    scheme = EVERY[name]
    model, x = trained(scheme, autocast)
    assert model(x).isfinite().all()
    assert all(module.calibrated for module in model.modules() if isinstance(module, Quantizer))
    other = network(scheme)
    other.load_state_dict(copy.deepcopy(model.state_dict()))
    assert all(module.calibrated for module in other.modules() if isinstance(module, Quantizer))
    for again in (other, pickle.loads(pickle.dumps(model))):
        assert again.eval()(x).equal(model.eval()(x))
    with torch.device("meta"):
        empty = network(scheme)  # nothing to look at there, not even what is wrong
    state = {key: tensor.to("meta") for key, tensor in model.state_dict().items() if "calibrated" not in key}
    empty.load_state_dict(state, strict=False, assign=True)


@EACH_METHOD
def test_linear_and_transposed_layers(name: str) -> None:
    scheme = EVERY[name]
    linear = qconv.QLinear(5, 3, scheme=scheme)
    linear(torch.randn(2, 7, 5)).sum().backward()
    layers: list[nn.Module] = [linear]
    if not scheme.scale_map:  # which is defined for convolutions
        layers.append(qconv.QConvTranspose1d(4, 2, 3, scheme=scheme))
        layers[1](torch.randn(2, 4, 6)).sum().backward()
    for layer in layers:
        assert layer.eval()(torch.randn(0, 4, 6) if layer is not linear else torch.randn(0, 5)).shape[0] == 0
        for parameter in layer.parameters():
            if parameter.requires_grad and not scheme.weight().replaces_weight:
                assert parameter.grad is not None
                assert parameter.grad.isfinite().all()


@EACH_METHOD
def test_a_float_checkpoint_starts_the_quantizer_of_the_weight(name: str) -> None:
    scheme = EVERY[name]
    float_layer = nn.Conv2d(3, 4, 3)
    layer = qconv.QConv2d(3, 4, 3, scheme=scheme)
    layer.load_state_dict(float_layer.state_dict())
    assert layer.weight.equal(float_layer.weight)
    alone = scheme.weight()
    alone.initialize(float_layer.weight.detach())
    torch.testing.assert_close([*layer.weight_quantizer.parameters()], [*alone.parameters()], rtol=0, atol=0)
    with torch.device("meta"):
        empty = qconv.QConv2d(3, 4, 3, scheme=scheme)
    empty.load_state_dict(float_layer.state_dict(), assign=True)
    torch.testing.assert_close([*empty.weight_quantizer.parameters()], [*alone.parameters()], rtol=0, atol=0)


@pytest.mark.parametrize("name", [name for name, scheme in METHODS.items() if not scheme.input().calibrated])
def test_calibrate_sets_what_starts_from_data(name: str) -> None:
    scheme = METHODS[name]
    model = nn.Sequential(qconv.QConv2d(3, 4, 3, scheme=scheme), qconv.QConv2d(4, 2, 3, scheme=scheme))
    x = torch.randn(6, 3, 7, 7)
    assert qconv.calibrate(model, [x[:4], x[4:]]) == ["0", "1"]
    expected = scheme.input()
    expected.build(3, 1)
    observer = expected.observer()
    observer.observe(x)
    expected.initialize_from(observer)
    first = model[0]
    assert isinstance(first, qconv.QConv2d)
    close = 1e-2 if name.startswith("percentile") else 1e-6
    torch.testing.assert_close(first.input_quantizer.tensors(), expected.tensors(), rtol=close, atol=0)
