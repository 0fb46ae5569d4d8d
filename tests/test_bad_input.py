"""What wrong or odd input gives, for every scheme and every quantizer: a clear error or the stated value."""

import copy
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from itertools import cycle
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from conftest import METHODS as ALL_METHODS
from methods import CONSTANTS, FUNCTIONS, MADE_OF_SCHEMES, QUANTIZERS, Make, ready
from settings import mostly_nightly
from torch import Tensor, nn
from torch.optim import SGD, Adam
from torchvision.ops import DeformConv2d
from torchvision.transforms import v2

import qconv
from qconv import Scheme, quantizers, schemes
from qconv.data import Cutout, DigitsDataModule, EpochOrder, ProgressiveSize, RandomCrop, RandomFlip
from qconv.data.augment import check_augment
from qconv.distillation import attention_matching_loss, distribution_loss
from qconv.models import small_cnn
from qconv.optim import (
    ModelOptimizer,
    Oscillations,
    OvSW,
    dampening_penalty,
    parameter_groups,
    shift_penalty,
    sine_penalty,
)
from qconv.quantizers import (
    FP8,
    LSQ,
    PACT,
    AdaBinInput,
    DoReFaGradient,
    Identity,
    Int8Stochastic,
    LSQInput,
    LSQPlusInput,
    Mixed,
    Quantizer,
    ReActNetInput,
    ReCUWeight,
    ShiftPS,
    Sign,
    SiManWeight,
    Stages,
    XNORppWeight,
)
from qconv.training import Checkpoints, Classifier, EWGSDelta, MovingAverage, make_trainer
from qconv.training.leanness import check_lean
from qconv.training.losses import CrossEntropy, Distillation
from qconv.training.schedules import cosine, linear, steps

# What learns in stages keeps a quantizer for each of them: tests/test_staged.py and test_calibrate.py.
METHODS = {name: scheme for name, scheme in ALL_METHODS.items() if "stage" not in name}


# Checkpoints

Part = tuple[str, str]
"""A method, and the name of a tensor in the state of its layer."""


def layer_of(name: str) -> qconv.QConv2d:
    torch.manual_seed(0)
    return qconv.QConv2d(4, 6, 3, scheme=METHODS[name])


def parts() -> Iterator[Part]:
    """Every tensor of a quantizer, once for each class that has it."""
    seen = set()
    for name in METHODS:
        for key in layer_of(name).state_dict():
            child, _, rest = key.partition(".")
            if rest and not rest.endswith("calibrated"):
                kind = getattr(layer_of(name), child)
                row = type(kind), child, rest, getattr(kind, "per_channel", None)
                if row not in seen:
                    seen.add(row)
                    yield name, key


PARTS = list(parts())
EACH_PART = pytest.mark.parametrize(("name", "key"), PARTS, ids=map("-".join, PARTS))
SOME = ("bnn(stochastic=True)", "inq(weight_bits=5)", "lsq_plus(weight_bits=4, input_bits=4)", "irnet()")
SOME_PARTS = pytest.mark.parametrize(("name", "key"), [part for part in PARTS if part[0] in SOME])
"""Of a random stream, of codes, of learned numbers and of a surrogate: the rules of loading do not depend on more."""
SIGNED = ("bias", "gamma", "beta", "shift", "sign", "start", "lower", "upper", "code", "top")
"""Those of which 0 and negative values are as good as others; so are the alphas of ReCU, SiMaN and BiPer: factors."""
CAST = ("frozen", "code", "top", "stream.key", "stream.step")
"""Those that may be saved as bools and integers."""


def may_be_zero(name: str, key: str) -> bool:
    return key.endswith((*SIGNED, "is_random", "is_signed")) or (
        key.endswith("weight_quantizer.alpha") and name.startswith(("recu", "siman", "biper"))
    )


def refused(name: str, key: str, value: Any, error: type[Exception], message: str) -> None:
    """Loading ``value`` for ``key`` raises, strict or not, and leaves the quantizer as it was."""
    state = {f"net.{other}": tensor for other, tensor in trained(name).items()} | {f"net.{key}": value}
    for strict in (True, False):
        model = nn.Sequential()
        model.net = layer_of(name)
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(error, match=message):
            model.load_state_dict(state, strict=strict)
        owner = f"net.{key.rpartition('.')[0]}."
        for other, tensor in model.state_dict().items():
            if other.startswith(owner) and other.count(".") == owner.count("."):
                assert tensor.equal(before[other])
        assert model(torch.randn(2, 4, 5, 5)).isfinite().all()


@cache
def trained(name: str) -> Mapping[str, Tensor]:
    """The state of a layer after its first batch."""
    layer = layer_of(name)
    layer(torch.rand(2, 4, 5, 5) + 0.1)
    return MappingProxyType(layer.state_dict())


@EACH_PART
def test_values_in_a_checkpoint(name: str, key: str) -> None:
    tensor = trained(name)[key]
    if not tensor.is_floating_point():
        return
    for value in (math.nan, math.inf, -math.inf, *(() if may_be_zero(name, key) or key.endswith("high") else (-1.0,))):
        if not (key.endswith("low") and value == -1):
            wrong = tensor.clone()
            wrong.view(-1)[-1] = value
            refused(name, key, wrong, ValueError, rf"net\.{key} \(={value}.*\) .*must be ")
    if key.endswith(("low", "high", "frozen")):
        return  # the range of zeros; no weight is frozen
    wrong = torch.zeros_like(tensor)
    if key.endswith("upper"):
        refused(name, key, wrong - 9, ValueError, r"lower \(=.*\) must be at most upper \(=-9.0\)")
    elif may_be_zero(name, key) or key.endswith(("percent", "delta")):
        layer_of(name).load_state_dict({**trained(name), key: wrong})
    else:
        refused(name, key, wrong, ValueError, rf"net\.{key} \(=.*0.0.*\) .*must be ")


@SOME_PARTS
def test_dtypes_in_a_checkpoint(name: str, key: str) -> None:
    tensor = trained(name)[key]
    wrong = tensor.long() if tensor.is_floating_point() else tensor.float()
    if key.endswith(CAST):
        layer_of(name).load_state_dict({**trained(name), key: wrong})
    else:
        message = rf"net\.{key} has dtype {wrong.dtype} in the .*; the module has {tensor.dtype}"
        refused(name, key, wrong, TypeError, message)
    if tensor.is_floating_point():
        complex_one = tensor.to(torch.complex64)
        refused(name, key, complex_one, TypeError, rf"net\.{key} has dtype torch.complex64 in the checkpoint")


@SOME_PARTS
def test_shapes_in_a_checkpoint(name: str, key: str) -> None:
    tensor = trained(name)[key]
    wrong = torch.stack([tensor, tensor])
    for strict in (True, False):
        layer = layer_of(name)
        waits = not layer.input_quantizer.calibrated
        shape = re.escape(str([*wrong.shape]))
        with pytest.raises(RuntimeError, match=rf"size mismatch for {key}: .*{shape}.* from checkpoint"):
            layer.load_state_dict({**trained(name), key: wrong}, strict=strict)
        if key.startswith("input"):
            assert layer.input_quantizer.calibrated != waits  # what was not loaded is still to be set from data
        assert layer(torch.randn(2, 4, 5, 5)).isfinite().all()


@SOME_PARTS
def test_missing_and_additional_tensors_in_a_checkpoint(name: str, key: str) -> None:
    state = dict(trained(name))
    child = key.partition(".")[0]
    more = f"{child}.nonsense"
    with pytest.raises(RuntimeError, match=rf'Unexpected key\(s\) in state_dict: "{more}"'):
        layer_of(name).load_state_dict({**state, more: torch.ones(())})
    _, found = layer_of(name).load_state_dict({**state, more: torch.ones(())}, strict=False)
    assert found == [more]

    del state[key]
    owner = key.rpartition(".")[0] + "."
    if not any(other.startswith(owner) for other in state):
        layer_of(name).load_state_dict(state)  # absent as a whole, as in a float checkpoint: it stays as it was made
        return
    with pytest.raises(RuntimeError, match=rf'Missing key\(s\) in state_dict: "{key}"'):
        layer_of(name).load_state_dict(state)
    layer = layer_of(name)
    waits = not layer.input_quantizer.calibrated
    missing, _ = layer.load_state_dict(state, strict=False)
    assert missing == [key]
    if child == "input_quantizer":
        assert layer.input_quantizer.calibrated != waits


WITH_DATA = [name for name in METHODS if not layer_of(name).input_quantizer.calibrated]
EACH_WITH_DATA = pytest.mark.parametrize("name", WITH_DATA)


@EACH_WITH_DATA
def test_whether_a_checkpoint_is_calibrated(name: str) -> None:
    key = "input_quantizer.calibrated"
    for wrong in (torch.tensor([True, False]), torch.tensor(math.nan), torch.tensor(1), "yes", None):
        with pytest.raises(ValueError, match=rf"{key} \(=.*\) in the checkpoint must be True or False"):
            layer_of(name).load_state_dict({**trained(name), key: wrong})  # pyright: ignore[reportArgumentType]
    state = dict(trained(name))
    del state[key]
    with pytest.raises(RuntimeError, match=rf'Missing key\(s\) in state_dict: "{key}"'):
        layer_of(name).load_state_dict(state)
    layer = layer_of(name)
    assert layer.load_state_dict(state, strict=False).missing_keys == [key]
    assert not layer.input_quantizer.calibrated


def test_a_checkpoint_that_calibrates_what_needs_no_data() -> None:
    layer = layer_of("pact(weight_bits=4, input_bits=4)")
    key = "input_quantizer.calibrated"
    state = {**layer.state_dict(), key: torch.tensor(False)}
    with pytest.raises(RuntimeError, match=rf'Unexpected key\(s\) in state_dict: "{key}"'):
        layer.load_state_dict(state)
    layer.load_state_dict(state, strict=False)
    assert layer.input_quantizer.calibrated


def test_a_checkpoint_for_another_number_of_bits() -> None:
    with pytest.raises(RuntimeError, match=r"size mismatch for input_quantizer\.widths: .*\[7\].*\[3\]"):
        qconv.QConv2d(4, 6, 3, scheme=schemes.n2uq(2, 2)).load_state_dict(
            qconv.QConv2d(4, 6, 3, scheme=schemes.n2uq(2, 3)).state_dict()
        )
    for bits, others in ((5, (4, 6)), (2, (3,))):
        layer = qconv.QConv2d(4, 6, 3, scheme=schemes.inq(bits))
        qconv.set_progress(layer, 0.0)  # freezes a half
        for other in others:
            with pytest.raises(
                ValueError, match=rf"code in the checkpoint reaches {2 ** (bits - 2)}; .*\(={other}\) it"
            ):
                qconv.QConv2d(4, 6, 3, scheme=schemes.inq(other)).load_state_dict(layer.state_dict())
        again = qconv.QConv2d(4, 6, 3, scheme=schemes.inq(bits))
        again.load_state_dict(layer.state_dict())
        assert again.quantized_weight().equal(layer.quantized_weight())


def test_a_step_that_this_dtype_does_not_have() -> None:
    layer = qconv.QConv2d(4, 6, 3, scheme=schemes.lsq())
    state = layer.state_dict() | {"weight_quantizer.step": torch.tensor([1e-9])}
    layer.load_state_dict(state)
    with pytest.raises(ValueError, match=r"weight_quantizer.step \(=9.99.*e-10\) must be positive"):
        layer.half().load_state_dict(state)


# Weights

LAYERS: dict[str, Callable[[Scheme], qconv.QConv2d]] = {
    "full": lambda scheme: qconv.QConv2d(4, 6, 3, scheme=scheme),
    "depthwise": lambda scheme: qconv.QConv2d(4, 4, 3, groups=4, scheme=scheme),
    "single": lambda scheme: qconv.QConv2d(1, 2, 1, scheme=scheme),
    "single depthwise": lambda scheme: qconv.QConv2d(4, 4, 1, groups=4, scheme=scheme),
}
EACH_LAYER = pytest.mark.parametrize("kind", LAYERS)


def with_weight(scheme: Scheme, kind: str, value: float) -> qconv.QConv2d:
    """A layer whose float weight is ``value`` everywhere, loaded as from a float checkpoint."""
    layer = LAYERS[kind](scheme)
    state = qconv.float_state_dict(layer)
    layer.load_state_dict(state | {"weight": torch.full_like(state["weight"], value)})
    return layer


def trained_once(layer: nn.Module, input: Tensor) -> Tensor:
    """The output, after forward and backward of which nothing may be NaN or inf."""
    input = input.clone().requires_grad_()
    output = layer(input)
    output.square().sum().backward()
    assert output.isfinite().all()
    for name, tensor in (("input", input), *layer.named_parameters()):
        if tensor.requires_grad:
            assert tensor.grad is not None, name
            assert tensor.grad.isfinite().all(), name
    return output.detach()


def test_every_scheme_says_what_constant_filters_give() -> None:
    assert {name.partition("(")[0] for name in CONSTANTS} | {*MADE_OF_SCHEMES} == FUNCTIONS.keys()


@EACH_LAYER
@pytest.mark.parametrize("name", CONSTANTS)
def test_zero_constant_and_single_element_filters(name: str, kind: str) -> None:
    scheme, (zero, constant) = CONSTANTS[name]
    for value, expected in ((0.0, zero), (0.7, constant)):
        layer = with_weight(scheme, kind, value)
        weight_q = layer.quantized_weight()
        if isinstance(layer.weight_quantizer, SiManWeight):  # half of equal weights are positive: test_papers
            weight_q = weight_q.abs()
        torch.testing.assert_close(weight_q, torch.full_like(weight_q, expected), rtol=1e-5, atol=0)
        trained_once(layer, torch.rand(2, layer.in_channels, 5, 5))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", [name for name in CONSTANTS if name != "identity()"])
def test_nan_and_infinity_in_a_filter(name: str, value: float) -> None:
    layer = LAYERS["full"](CONSTANTS[name][0])
    weight = layer.weight.detach().clone()
    weight[1, 0, 0, 0] = value
    layer.load_state_dict(qconv.float_state_dict(layer) | {"weight": weight})
    weight_q = layer.quantized_weight()
    quantizer = layer.weight_quantizer
    if isinstance(quantizer, Sign | XNORppWeight):
        assert weight_q.isfinite().all()  # a sign of its own for each weight
    elif name in ("shift_q(weight_bits=5)", "shift_ps(weight_bits=5)"):
        expected = value if math.isnan(value) else math.copysign(1, value)
        assert weight_q[1, 0, 0, 0].isclose(torch.tensor(expected), equal_nan=True)
        assert weight_q.isfinite().sum() >= weight_q.numel() - 1
    elif name.startswith("percentile") or (name.startswith("dorefa(weight_bits=2") and math.isinf(value)):
        assert weight_q.isfinite().sum() >= weight_q.numel() - weight_q[1].numel()
    elif isinstance(quantizer, ReCUWeight):
        assert weight_q[0].isfinite().all()
    elif name.startswith("pact") and math.isinf(value):
        assert weight_q[1, 0, 0, 0] == math.copysign(1, value)  # of DoReFa's weights
    else:
        assert not weight_q[1, 0, 0, 0].isfinite()  # not hidden


# Batches

INPUTS: dict[str, tuple[Callable[[Scheme], nn.Module], tuple[int, ...]]] = {
    "QConv2d": (lambda scheme: qconv.QConv2d(4, 6, 3, scheme=scheme), (4, 5, 5)),
    "QLinear": (lambda scheme: qconv.QLinear(4, 6, scheme=scheme), (4,)),
}
EACH_INPUT = pytest.mark.parametrize("kind", INPUTS)


@EACH_INPUT
def test_empty_batches_are_waited_through(method: Scheme, kind: str) -> None:
    make, shape = INPUTS[kind]
    layer = make(method)
    fresh = copy.deepcopy(layer.state_dict())
    assert trained_once(layer, torch.empty(0, *shape)).shape[0] == 0
    assert all(tensor.equal(fresh[name]) for name, tensor in layer.state_dict().items())
    layer.zero_grad()
    trained_once(layer, torch.rand(3, *shape))
    calibrated = copy.deepcopy(layer.state_dict())
    assert calibrated.get("input_quantizer.calibrated", torch.tensor(True))
    layer.zero_grad()
    trained_once(layer, torch.empty(0, *shape))
    assert all(tensor.equal(calibrated[name]) for name, tensor in layer.state_dict().items())
    assert all(parameter.grad is None or not parameter.grad.any() for parameter in layer.parameters())


@EACH_WITH_DATA
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_calibrate_nothing(name: str, value: float) -> None:
    model: Any = nn.Sequential(layer_of(name))
    before = copy.deepcopy(model[0].input_quantizer.state_dict())
    input = torch.rand(3, 4, 5, 5)
    input[1, 2, 3, 4] = value
    with pytest.raises(ValueError, match=r"input of QConv2d\(.*\) has NaN or inf: it can't be calibrated with it"):
        model(input)
    with pytest.raises(ValueError, match=r"the input of layer '0' \(Q\w+, .*\) has NaN or inf: it can't be"):
        qconv.calibrate(model, [torch.rand(3, 4, 5, 5), input])
    assert all(tensor.equal(before[key]) for key, tensor in model[0].input_quantizer.state_dict().items())
    trained_once(model, torch.rand(3, 4, 5, 5))
    assert model.state_dict()["0.input_quantizer.calibrated"]


@EACH_WITH_DATA
def test_calibration_with_empty_batches(name: str) -> None:
    model: Any = nn.Sequential(layer_of(name))
    input, empty = torch.rand(3, 4, 5, 5), torch.empty(0, 4, 5, 5)
    before = copy.deepcopy(model[0].input_quantizer.state_dict())
    with pytest.raises(ValueError, match="batches must hold at least one sample: all 2 are empty"):
        qconv.calibrate(model, [empty, empty])
    assert all(tensor.equal(before[key]) for key, tensor in model[0].input_quantizer.state_dict().items())
    assert qconv.calibrate(model, [empty, input, empty]) == ["0"]
    alone = nn.Sequential(layer_of(name))
    qconv.calibrate(alone, [input])
    assert all(tensor.equal(alone.state_dict()[key]) for key, tensor in model.state_dict().items())


def classifier() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Conv2d(3, 3, 1), nn.Flatten(), nn.Linear(27, 3)).eval()


IMAGES, CLASSES = torch.rand(6, 2, 5, 5, generator=torch.Generator().manual_seed(4)), torch.arange(6) % 3
CHOICES = [schemes.lsq(2, 4), schemes.lsq(8, 8)]
AFTER_TRAINING: dict[str, Callable[..., Any]] = {
    "sensitivity": partial(qconv.sensitivity, scheme=CHOICES[0]),
    "assign_bits": partial(qconv.assign_bits, choices=CHOICES, max_bytes=10**6, skip=(), probes=1),
    "correct_bias": lambda model, *data, **options: qconv.correct_bias(
        qconv.convert(model, schemes.minmax(3, 8), skip=()), classifier(), *data, **options
    ),
    "reconstruct": lambda model, *data, **options: qconv.reconstruct(
        qconv.convert(model, schemes.minmax(3, 8), skip=()), *data, iterations=2, **options
    ),
}


@pytest.mark.parametrize("name", AFTER_TRAINING)
@pytest.mark.parametrize(
    ("images", "options", "error", "message"),
    [
        (IMAGES, {"max_samples": -1}, ValueError, r"max_samples \(=-1\) must be at least 1"),
        (IMAGES, {"max_samples": 2.5}, ValueError, r"max_samples \(=2.5\) must be a whole number, not of type float"),
        (IMAGES[:0], {}, ValueError, "images must hold at least one sample"),
        ([], {}, ValueError, "images must hold at least one sample"),
        (IMAGES[0, 0, 0, 0], {}, TypeError, r"that begins with one, not a tensor of shape \(\)"),
        (None, {}, TypeError, r"images \(NoneType\) must be a tensor of samples, or batches one after another"),
        ({"input": IMAGES}, {}, TypeError, r"images \(dict\) must be a tensor of samples, or batches"),
        ([{"input": IMAGES}], {}, TypeError, "images: a batch must be a tensor of samples, .* not dict"),
        ([()], {}, TypeError, "images: a batch must be a tensor of samples, .* not tuple"),
        (IMAGES.numpy(), {}, TypeError, "images: a batch must be a tensor of samples, .* not ndarray"),
    ],
)
def test_wrong_samples_are_refused_alike(
    name: str, images: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        AFTER_TRAINING[name](classifier(), images, **options)


@pytest.mark.parametrize("call", [qconv.sensitivity, AFTER_TRAINING["assign_bits"], qconv.reconstruct])
def test_what_is_no_module_and_batches_of_none_are_refused(call: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match=r"batch_size \(=0\) must be at least 1"):
        call(classifier(), IMAGES, batch_size=0)
    with pytest.raises(TypeError, match=r"model \(='resnet20'\) must be a torch.nn.Module"):
        call("resnet20", IMAGES)
    for models in (("resnet20", classifier()), (classifier(), "resnet20")):
        with pytest.raises(TypeError, match=r"model \(='resnet20'\) must be a torch.nn.Module"):
            qconv.correct_bias(*models, IMAGES)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("measure", ["sensitivity", "hessian", "measured"])
def test_labels_and_outputs_of_other_types(measure: str) -> None:
    named = {} if measure == "sensitivity" else {"measure": measure}
    call = partial(AFTER_TRAINING["assign_bits" if named else measure], **named)
    model = classifier()
    for kind in (torch.int32, torch.uint8):
        assert call(model, IMAGES, CLASSES.to(kind)).rows == call(model, IMAGES, CLASSES).rows
    for labels in (CLASSES.numpy(), CLASSES.tolist()):
        with pytest.raises(TypeError, match=rf"labels \({type(labels).__name__}\) must be a tensor"):
            call(model, IMAGES, labels)
    with pytest.raises(TypeError, match=r"labels \(ndarray\) must be a tensor"):
        call(model, [(IMAGES, CLASSES.numpy())])
    for data in ((IMAGES, CLASSES[:2]), ([(IMAGES, CLASSES[:2])],), (IMAGES, CLASSES[0])):
        with pytest.raises(ValueError, match=r"labels \(of shape \(2?,?\)\) must be one for each of the images"):
            call(model, *data)


class Pair(NamedTuple):
    aux: Tensor
    out: Tensor


@dataclass
class Outputs:
    aux: Tensor
    out: Tensor


class Several(nn.Module):
    """Returns its logits beside others."""

    def __init__(self, join: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.net, self.join = classifier(), join

    def forward(self, x: Tensor) -> Any:
        return self.join(3 * (logits := self.net(x)), logits)


SEVERAL: dict[str, tuple[Callable[[Tensor, Tensor], Any], tuple[Any, ...], str]] = {
    "tuple": (lambda aux, out: (aux, out), (1, -1, lambda given: given[1]), "tuple of 2"),
    "list": (lambda aux, out: [aux, out], (1,), "list of 2"),
    "dict": (lambda aux, out: {"aux": aux, "out": out}, ("out", lambda given: given["out"]), "dict of 'aux', 'out'"),
    "numbered": (lambda aux, out: {0: aux, 1: out}, (1,), "dict of 0, 1"),
    "named tuple": (Pair, ("out", 1), "Pair of 'aux', 'out'"),
    "dataclass": (Outputs, ("out", lambda given: given.out), "Outputs of 'aux', 'out'"),
    "nested": (lambda aux, out: {"one": {"aux": aux, "out": out}}, (lambda given: given["one"]["out"],), "of 'one'"),
}


OF_SEVERAL = [*zip(cycle(["sensitivity", "hessian", "measured"]), SEVERAL, strict=False)]


@pytest.mark.parametrize(("measure", "kind"), mostly_nightly(OF_SEVERAL, OF_SEVERAL[:1]))
def test_one_of_several_outputs(measure: str, kind: str) -> None:
    named = {} if measure == "sensitivity" else {"measure": measure}
    call = partial(AFTER_TRAINING["assign_bits" if named else measure], **named)
    join, choices, told = SEVERAL[kind]

    def rows(model: nn.Module, **options: Any) -> list[tuple[str, str, float]]:
        found = call(model, IMAGES, CLASSES, **options).rows
        return [(row.layer.removeprefix("net."), row.scheme, row.cost) for row in found]

    torch.manual_seed(0)
    model = Several(join)
    wanted = rows(model.net)
    for choice in choices:
        assert rows(model, output=choice) == wanted
    if measure == "hessian":
        with pytest.raises(
            TypeError, match=rf"model \(Several\) must return one tensor .*{told}.* choose one by output="
        ):
            call(Several(join), IMAGES)
    else:
        assert {row[:2] for row in rows(model)} == {row[:2] for row in wanted}  # of all outputs
    if kind in ("tuple", "list", "named tuple"):
        assert rows(model, output=0) != wanted
    for wrong in (7, "logits", "count"):
        with pytest.raises(ValueError, match=rf"output \(={wrong!r}\) must be an output of model \(Several\), which"):
            call(Several(join), IMAGES, output=wrong)
    with pytest.raises(ValueError, match=r"output \(=0\) must .* model \(Sequential\), which returns one tensor,"):
        call(classifier(), IMAGES, output=0)
    with pytest.raises(TypeError, match=r"output \(=.*\) must choose a tensor of outputs for each sample, not a"):
        call(Several(join), IMAGES, output=lambda given: torch.ones(()))


PICTURES = torch.rand(3, 4, 5, 5, generator=torch.Generator().manual_seed(3))


@EACH_WITH_DATA
@pytest.mark.parametrize("value", [0.0, 0.7, -0.7])
def test_a_first_batch_of_one_value_is_waited_through(name: str, value: float) -> None:
    layer, alone = layer_of(name), layer_of(name)
    fresh = copy.deepcopy(layer.input_quantizer.state_dict())
    trained_once(layer, torch.full((2, 4, 5, 5), value))  # a blank image
    assert all(tensor.equal(fresh[key]) for key, tensor in layer.input_quantizer.state_dict().items())
    for each in (layer, alone):
        each.calibrate_(PICTURES)
    assert layer.input_quantizer.calibrated
    expected = alone.input_quantizer.state_dict()
    assert all(tensor.equal(expected[key]) for key, tensor in layer.input_quantizer.state_dict().items())


@EACH_WITH_DATA
def test_blank_batches_calibrate_nothing(name: str) -> None:
    model, alone = (nn.Sequential(layer_of(name)) for _ in range(2))
    blank = torch.zeros(2, 4, 5, 5)
    with pytest.warns(UserWarning, match="layer '0' could not be calibrated: the inputs have no range"):
        assert qconv.calibrate(model, [blank, blank]) == []
    assert not model.state_dict()["0.input_quantizer.calibrated"]
    assert qconv.calibrate(alone, [PICTURES]) == ["0"]
    before = copy.deepcopy(alone.state_dict())
    with pytest.warns(UserWarning, match="such as equal values only. Pass other or more batches"):
        assert qconv.calibrate(alone, [blank]) == []
    assert all(tensor.equal(before[key]) for key, tensor in alone.state_dict().items())  # still what it was


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("value", [0.0, -0.7, 1e-30, 1e12], ids=str)
def test_batches_of_one_value_train(name: str, value: float) -> None:
    trained_once(layer_of(name), torch.full((2, 4, 5, 5), value))


# Magnitudes

MAGNITUDES: dict[str, Callable[[Tensor, torch.dtype], Tensor]] = {
    "1e-30": lambda x, dtype: x * 1e-30,
    "subnormal": lambda x, dtype: x.sign() * torch.finfo(dtype).smallest_normal / 8,
    "1e30": lambda x, dtype: x * min(1e30, torch.finfo(dtype).max / 8),
    "both": lambda x, dtype: torch.where(x > 0, x * min(1e30, torch.finfo(dtype).max / 8), x * 1e-30),
    "negative": lambda x, dtype: -x.abs(),
    "zeros": lambda x, dtype: torch.zeros_like(x),
}


@pytest.mark.parametrize(("make", "levels"), QUANTIZERS.values(), ids=QUANTIZERS.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_magnitudes(make: Make, levels: float, dtype: torch.dtype) -> None:
    for scaled in MAGNITUDES.values():
        x = scaled(torch.randn(3, 4, 2, 2, dtype=torch.float64), dtype).to(dtype)
        quantizer, tensors = ready(make, x)
        assert all(tensor.isfinite().all() for tensor in tensors)
        assert quantizer.quantize(x, *tensors).isfinite().all()
        for grad in quantizer.backward(torch.ones_like(x), x, *tensors):
            # A gradient of 1e5 is none of float16: a gradient scaler sees the inf.
            assert grad is None or not grad.isnan().any()
            assert grad is None or dtype == torch.float16 or grad.isfinite().all()


@pytest.mark.parametrize(
    "make", [LSQ, partial(LSQ, 1), partial(LSQ, 3, True), quantizers.LSQPlus, LSQInput, LSQPlusInput]
)
def test_the_first_step_is_a_number_of_its_dtype(make: Callable[[], Quantizer]) -> None:
    x = torch.full((2, 3), 65504.0)
    x[0, 0] = -65504.0
    quantizer, tensors = ready(make, x.half())
    assert all(tensor.isfinite().all() for tensor in tensors)
    assert not quantizer.quantize(x.half(), *tensors).isnan().any()


# Combinations

Row = tuple[Callable[[], object], type[Exception] | tuple[type[Exception], ...], str]
"""A call, the error that it raises, and words of its message: the argument, its value, the rule."""


def making(*places: Any, **options: Any) -> Callable[[], object]:
    return partial(Scheme, "s", *places, **options)


COMBINATIONS: list[Row] = [
    (making(grad=LSQ), ValueError, r"grad \(=LSQ\(.*\) must make a quantizer for grad, not one for weight"),
    (lambda: schemes.bnn().with_grad(PACT), ValueError, r"grad_quantizer \(=PACT\(bits=4, alpha=None\)\) must make"),
    (making(input=ShiftPS), ValueError, r"input \(=ShiftPS\(.*\) must make a quantizer for input, not one for weight"),
    (making(weight=ReActNetInput), ValueError, r"weight \(=ReActNetInput\("),
    # at random in evaluation, or by each process
    (making(weight=DoReFaGradient), ValueError, r"weight \(=DoReFaGradient\(bits=6\)\) must .* not one for grad"),
    (making(Int8Stochastic), ValueError, r"input \(=Int8Stochastic\("),
    (making(weight=partial(Sign, stochastic=True)), ValueError, r"weight \(=Sign\(.*\) must .* not one for input or g"),
    (making(weight=ShiftPS, backward_weight="float"), ValueError, r"backward_weight \(='float'\) must be 'quantized'"),
    (making(padding_value=1), ValueError, r"padding_value \(=1\) must be 0: Identity\(\) doesn't make the input ±1"),
    (making(AdaBinInput, padding_value=1), ValueError, r"padding_value \(=1\)"),
    (making(scale_map=True), ValueError, r"scale_map \(=True\) needs an input that is only signs: Identity\(\)"),
    (making(Sign, scale_map="no"), TypeError, r"scale_map \(='no'\) must be True or False"),
    (lambda: qconv.QConvTranspose2d(4, 4, 3, scheme=schemes.xnor(scale_map=True)), ValueError, r"scale_map \(=True\)"),
    (making(weight=nn.ReLU), TypeError, r"weight \(=.*ReLU.*\) must make a quantizer, not ReLU"),
    (making("sign"), TypeError, r"input \(='sign'\) must make a quantizer, not str"),
    (making(weight=partial(LSQ, 9)), ValueError, r"bits \(=9\)"),
    (partial(Stages, [(0, LSQ), (0.5, LSQInput)]), ValueError, "can't be combined, .*: LSQ for weight, LSQInput for i"),
    (lambda: Stages([(0, Identity), (0.5, wrong(nn.ReLU))]), TypeError, "must hold what makes a quantizer, not ReLU"),
    (making(input=partial(Stages, [(0, Identity), (0.5, LSQ)])), ValueError, r"input \(=Stages\(.*\) must make a quan"),
    (lambda: schemes.staged(wrong(schemes.bnn())), TypeError, r"^stages \(=.*bnn.*must be a sequence"),
    (lambda: schemes.staged([wrong(schemes.bnn())]), TypeError, r"^stages must hold pairs .*bnn"),
    (lambda: schemes.staged([(wrong("0"), schemes.bnn())]), TypeError, r"^progress \(='0'\) must be a number"),
]


IMAGE = torch.randn(2, 3, 8, 8)
LOGITS = torch.randn(6, 4), torch.arange(6) % 4, torch.randn(6, 8)


def small() -> nn.Sequential:
    return qconv.convert(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)), schemes.lsq(), skip=())


def conv(**arguments: Any) -> nn.Module:
    return qconv.QConv2d(**{"in_channels": 3, "out_channels": 4, "kernel_size": 3, **arguments})


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.ones(()))])


def wrong(argument: object) -> Any:
    """An argument of a type that the function does not take."""
    return argument


FLOAT = nn.Sequential(nn.Conv2d(3, 4, 3))
MISTAKES: list[Row] = [
    (partial(conv, stride=0), ValueError, r"^stride \(=0\) must be at least 1"),
    (partial(conv, padding=(1,)), ValueError, r"^padding \(=\(1,\)\) must be an int or 2 ints"),
    (partial(conv, kernel_size=1.5), ValueError, r"^kernel_size \(=1.5\) must be"),
    (partial(conv, in_channels="3"), ValueError, r"^in_channels \(='3'\) must be a whole number, no"),
    (partial(conv, out_channels=3.0), ValueError, r"^out_channels \(=3.0\) must be a whole number"),
    (lambda: qconv.QConvTranspose1d(3, 4, 3, output_padding=(1, 1)), ValueError, r"^output_padding \(=\(1, 1\)\) must"),
    (lambda: conv()(wrong(IMAGE.numpy())), TypeError, r"^input \(ndarray\) must be a tensor"),
    (lambda: qconv.QLinear(3, 4)(wrong([1.0, 2.0, 3.0])), TypeError, r"^input \(list\) must be a tensor"),
    (lambda: conv()(IMAGE[0, :2]), ValueError, r"^input has shape \(2, 8, 8\); its dimension 0 must be in_channels"),
    (lambda: qconv.convert(wrong(schemes.bnn()), wrong(small())), TypeError, r"^model \(=.*must be a torch.nn.Module"),
    (lambda: qconv.calibrate(wrong([IMAGE]), wrong(small())), TypeError, r"^model \(=\['Tensor of .*must be a"),
    (lambda: qconv.calibrate(small(), wrong(None)), TypeError, r"^batches \(NoneType\) must be batches"),
    (lambda: qconv.calibrate(small(), [3]), TypeError, r"^batches: 3 must be an input of the model"),
    (lambda: qconv.calibrate(small(), [[]]), TypeError, r"^batches: \[\] must be an input of the mo"),
    *(
        (partial(qconv.calibrate, small(), [IMAGE], max_samples=wrong(number)), ValueError, "must be a whole number, n")
        for number in ("5", True)
    ),
    (lambda: qconv.calibrate(small(), []), ValueError, "^batches must hold at least one batch"),
    *(
        (
            partial(qconv.calibrate, small(), wrong(each)),
            TypeError,
            r"^batches \((Tensor|dict)\) must be batches one after",
        )
        for each in (IMAGE, {"images": IMAGE})
    ),
    (lambda: qconv.calibrate(small(), [IMAGE], max_samples=0), ValueError, r"^max_samples \(=0\) must be at least 1"),
    *(
        (partial(qconv.set_progress, small(), each), ValueError, r"^progress \(=.*\) must be from 0")
        for each in (-0.1, 1.1, math.nan)
    ),
    (lambda: qconv.after_step(wrong(optimizer())), TypeError, r"^model \(=SGD.*must be a torch.nn.Module"),
    (lambda: qconv.after_every_step(wrong(small()), wrong(optimizer())), TypeError, r"^optimizer \(=Sequential.*must"),
    (lambda: qconv.after_every_step(optimizer(), wrong(optimizer())), TypeError, r"^model \(=SGD.*must be a torch.nn."),
    (lambda: qconv.set_progress(wrong(0.5), wrong(small())), TypeError, r"^model \(=0.5\) must be"),
    (lambda: qconv.set_progress(small(), wrong("0.5")), TypeError, r"^progress \(='0.5'\) must be a number"),
    (lambda: qconv.to_float(wrong(schemes.bnn())), TypeError, r"^model \(=.*must be a torch.nn.Module"),
    (lambda: qconv.lean(wrong([small()])), TypeError, r"^model \(=\[.*must be a torch.nn.Module"),
    (lambda: qconv.convert(FLOAT, schemes.bnn(), skip=wrong((0,))), TypeError, r"^skip has 0: it must hold names of l"),
    (
        lambda: qconv.convert(FLOAT, schemes.bnn(), skip=(), overrides=wrong({nn.Linear: None})),
        *(TypeError, r"^overrides has <class 'torch.nn.modules.linear.Linear'>: it must hold names"),
    ),
    (
        lambda: qconv.convert(nn.Sequential(nn.Conv2d(3, 4, 3, dtype=torch.complex64)), schemes.bnn(), skip=()),
        *(ValueError, "stays: its weight is complex"),
    ),
]
CNN = small_cnn(1, 10, width=4)
LAZY = nn.Sequential(nn.LazyLinear(3))
FROZEN = qconv.freeze(qconv.convert(nn.Sequential(nn.Conv2d(3, 4, 3)), schemes.bwn(), skip=()).eval())
SUMMARIES: list[Row] = [
    *(
        (partial(qconv.summarize, CNN, size), ValueError, rf"input_size \(={re.escape(str(size))}\) must be {rule}")
        for size, rule in (
            *(((1, 0, 8), "one sample's shape"), ((1, -8, 8), "one sample's shape"), ((), "one sample's shape")),
            *(((3, 8, 8), "what the model takes"), ((8,), "what the model takes")),
        )
    ),
    *(
        (partial(qconv.summarize, CNN, wrong(size)), TypeError, r"input_size \(=.*\) must be a sequence of whole numbe")
        for size in (8, (1, 8.0, 8), "188", None)
    ),
    (lambda: qconv.summarize(CNN, wrong({"x": IMAGE})), TypeError, r"input_size \(=\{'x': 'Tensor of .*'\}\) must"),
    (lambda: qconv.summarize(conv(), (4, 5, 5)), ValueError, r"\(=\(4, 5, 5\)\) must be what the model takes: input h"),
    (lambda: qconv.summarize(DeformConv2d(4, 6, 3), (4, 5, 5)), ValueError, r"must be what the model takes: .*'offset"),
    *(
        (partial(qconv.summarize, model, (3, 4, 4)), ValueError, "has no parameters, buffers or layers")
        for model in (nn.Sequential(), nn.Identity(), nn.Sequential(nn.ReLU(), nn.Flatten()))
    ),
    (lambda: qconv.summarize(wrong(3), (3, 4, 4)), TypeError, r"model \(=3\) must be a torch.nn.Module"),
    (partial(qconv.summarize, LAZY, (4,)), ValueError, r"model \(Sequential\) has no shape for '0.weight' yet: call i"),
    (partial(qconv.summarize, FROZEN, (3, 8, 8)), TypeError, r"model: it \(FrozenModel\) is frozen: summarize the tra"),
    (lambda: qconv.summarize(nn.Sequential(FROZEN), (3, 8, 8)), TypeError, r"'0' \(FrozenModel\) is frozen"),
]
TRAINING: list[Row] = [
    (lambda: Distillation(wrong("resnet20")), TypeError, r"^teacher \(='resnet20'\) must be a torch.nn.Module"),
    (lambda: Distillation(nn.Linear(8, 5))(*LOGITS), ValueError, r"teacher_logits has shape \(6, 5\)"),
    (lambda: CrossEntropy(2), ValueError, r"label_smoothing \(=2\) must be from 0 to 1"),
    (lambda: Checkpoints("x", every_steps=0), ValueError, r"every_steps \(=0\) must be at least 1"),
    (lambda: Checkpoints("x", monitor="val_loss"), ValueError, r"monitor \(=val_loss\) must be a figure where high"),
    (lambda: MovingAverage(1.0), ValueError, r"decay \(=1.0\) must be at least 0 and below 1"),
    (lambda: EWGSDelta(batches=0), ValueError, r"batches \(=0\) must be at least 1"),
    (partial(Classifier, FLOAT, SGD, dampening=-1), ValueError, r"dampening \(=-1\) must be at least 0 and finite"),
    (partial(Classifier, FLOAT, SGD, sine_penalty=math.inf), ValueError, r"sine_penalty \(=inf\) must be at least 0 a"),
    *(
        (partial(check_lean, value), ValueError, r"lean \(=.*\) must be true, false, exact or auto")
        for value in ("true", 1, None)
    ),
]
DATA: list[Row] = [
    (lambda: DigitsDataModule(batch_size=0), ValueError, r"batch_size \(=0\) must be at least 1"),
    (lambda: DigitsDataModule(shift=-1), ValueError, r"shift \(=-1\) must be at least 0"),
    (lambda: DigitsDataModule().train_dataloader(), RuntimeError, r"there are no train images yet: call setup\('fit'"),
    (partial(EpochOrder, 2, 1, shuffle=False, world_size=3), ValueError, r"size \(=2\) must be at least world_size"),
    (partial(EpochOrder, 199, 1, shuffle=False, world_size=2), ValueError, r"batch_size \(=1\) must be at least 2 for"),
    (lambda: RandomCrop(-1), ValueError, r"padding \(=-1\) must be at least 0"),
    (lambda: RandomCrop(4, fill=wrong((1, 2, 3))), TypeError, r"fill \(=\(1, 2, 3\)\) must be a number"),
    (lambda: RandomFlip(1.5), ValueError, r"p \(=1.5\) must be from 0 to 1"),
    (lambda: Cutout(0), ValueError, r"size \(=0\) must be at least 1"),
    (lambda: check_augment(RandomFlip()), TypeError, r"augment \(=RandomFlip\(p=0.5\)\) must be a list"),
    (lambda: check_augment("flip"), TypeError, r"augment \(='flip'\) must be a list"),
    (lambda: check_augment([RandomFlip(), v2.RandAugment()]), TypeError, "RandAugment would draw once for a whole bat"),
    (lambda: check_augment([v2.Compose([v2.RandomHorizontalFlip()])]), TypeError, "Compose would draw once"),
    (lambda: check_augment([RandomFlip(), 3]), TypeError, "augment: 3 must be a function of images"),
    (lambda: ProgressiveSize(start=0.0), ValueError, r"start \(=0.0\) must be a share"),
    (lambda: ProgressiveSize(start=math.nan), ValueError, r"start \(=nan\)"),
    (lambda: ProgressiveSize(start=wrong("a")), TypeError, r"start \(='a'\) must be a number"),
    (lambda: ProgressiveSize(grow_from=0.9), ValueError, r"grow_from \(=0.9\) and full_from \(=0.8\) must be"),
    (lambda: ProgressiveSize(full_from=1.1), ValueError, "full_from"),
    (lambda: ProgressiveSize(multiple=0), ValueError, r"multiple \(=0\) must be at least 1"),
    (lambda: ProgressiveSize(multiple=wrong(2.5)), ValueError, r"multiple \(=2.5\) must be a whole number"),
]
OPTIM: list[Row] = [
    (lambda: Oscillations(freeze=2.0), ValueError, r"freeze \(=2.0\) must be from 0 to 1"),
    (lambda: Oscillations(freeze=wrong((0.1, 0.2, 0.3))), ValueError, "must be a number, a pair of numbers or None"),
    (lambda: Oscillations(freeze=wrong("0.1")), TypeError, r"freeze \(='0.1'\) must be a number"),
    (lambda: Oscillations(momentum=0.0), ValueError, r"momentum \(=0.0\)"),
    (lambda: Oscillations(start=1.0), ValueError, r"start \(=1.0\) must be at least 0 and below 1"),
    (lambda: Oscillations(max_bits=0), ValueError, r"max_bits \(=0\) must be"),
    (lambda: OvSW(delta=-1), ValueError, r"delta \(=-1\) must be at least 0"),
    (lambda: OvSW(threshold=wrong(None)), ValueError, r"threshold \(=None\) must be at least 0 and finite"),
    (lambda: OvSW(momentum=1.0), ValueError, r"momentum \(=1.0\)"),
    (lambda: OvSW().attach(small(), wrong(object())), TypeError, "must be a torch"),
    (
        lambda: ModelOptimizer(Adam, betas=[0.9]),
        ValueError,
        r"betas \(=\[0.9\]\) must be 2 numbers, such as",
    ),
    (lambda: ModelOptimizer(Adam, lr=wrong(None)), ValueError, r"lr \(=None\) must be a number, such as 0.001"),
    (lambda: make_trainer(gradient_clip_val=-1), ValueError, r"gradient_clip_val \(=-1\) must be at least 0"),
    (lambda: ModelOptimizer(SGD, lr=-1), ValueError, r"lr \(=-1\) must be at least 0 and finite"),
    (lambda: ModelOptimizer(SGD, lr=0.1)(wrong(iter(()))), TypeError, "must be the module itself, not its parameters"),
    *(
        (partial(call, (each for each in ())), TypeError, r"model \(=<generator .*must be a torch.nn.Module")
        for call in (
            *(parameter_groups, dampening_penalty, shift_penalty, sine_penalty),
            lambda parameters: OvSW().attach(parameters, optimizer()),
        )
    ),
]


ROWS, MAPS = torch.ones(2, 3), torch.ones(2, 3, 4)
DISTILLATION: list[Row] = [
    *(
        (partial(distribution_loss, student, wrong(teacher), temperature), error, words)
        for student, teacher, temperature, error, words in (
            (ROWS, torch.ones(2, 4), 1, ValueError, r"teacher_logits has shape \(2, 4\); .* \(2, 3\)"),
            (ROWS, torch.ones(1, 3), 1, ValueError, r"teacher_logits has shape \(1, 3\)"),
            (ROWS[0], ROWS[0], 1, ValueError, r"student_logits has shape \(3,\); it must be \(N, classes\)"),
            (ROWS[:0], ROWS[:0], 1, ValueError, r"student_logits has shape \(0, 3\)"),
            (ROWS, ROWS, 0, ValueError, r"temperature \(=0\) must be positive and finite"),
            (ROWS, ROWS, math.nan, ValueError, r"temperature \(=nan\)"),
            (ROWS, ROWS, math.inf, ValueError, r"temperature \(=inf\)"),
            (ROWS.long(), ROWS, 1, TypeError, r"student_logits \(torch.int64\) must be a floating"),
            (ROWS, torch.tensor([0, 1]), 1, TypeError, r"teacher_logits \(torch.int64\)"),
            (ROWS, [0.0], 1, TypeError, r"teacher_logits \(list\) must be a floating tensor"),
        )
    ),
    *(
        (partial(attention_matching_loss, wrong(student), teacher, wrong(form)), error, words)
        for student, teacher, form, error, words in (
            ([MAPS], [], "norm", ValueError, r"student_features \(1\) and teacher_features \(0\) must have"),
            ([], [], "norm", ValueError, "must have the same length, at least 1"),
            ([MAPS], [torch.ones(3, 3, 4)], "norm", ValueError, r"teacher_features\[0\] has shape \(3, 3, 4\)"),
            (torch.ones(2, 3, 4, 4), torch.ones(2, 3, 4, 5), "norm", ValueError, "all but the channels"),
            (torch.ones(2, 3, 4, 1), MAPS, "norm", ValueError, "all but the channels"),
            (ROWS, ROWS, "norm", ValueError, r"student_features\[0\] has shape \(2, 3\); it must be"),
            (MAPS[:0], MAPS[:0], "norm", ValueError, r"student_features\[0\] has shape \(0, 3, 4\)"),
            (MAPS, MAPS[:, :0], "norm", ValueError, r"teacher_features\[0\] has shape \(2, 0, 4\)"),
            (MAPS, MAPS, "l1", ValueError, r"form \(='l1'\) must be 'norm' or 'mean_square'"),
            (MAPS.int(), MAPS, "norm", TypeError, r"student_features\[0\] \(torch.int32\)"),
            ({"a": MAPS}, MAPS, "norm", TypeError, r"student_features\[0\] \(str\) must be"),
        )
    ),
]
SCHEDULES: list[Row] = [
    (partial(make, optimizer(), 4, **options), ValueError, words)
    for make, options, words in (
        (steps, {"at": [0.5, 0.5]}, r"at \(=\[0.5, 0.5\]\) must be increasing shares"),
        (steps, {"at": [1.5]}, r"at \(=\[1.5\]\) must be increasing shares"),
        (steps, {"at": [0.5], "warmup": 1}, r"warmup \(=1\) must be a share"),
        (linear, {"warmup": -0.1}, r"warmup \(=-0.1\) must be a share"),
        (cosine, {"warmup": 1}, r"warmup \(=1\) must be a share of the steps"),
        (cosine, {"final": -0.1}, r"final \(=-0.1\) must be at least 0 and finite"),
        (linear, {"final": float("nan")}, r"final \(=nan\) must be at least 0 and finite"),
        (steps, {"at": [0.5], "factor": -1}, r"factor \(=-1\) must be at least 0 and finite"),
    )
]
COMPARED: dict[str, Any] = {"float_model": nn.Flatten(), "quantized": nn.Flatten(), "images": torch.zeros(8, 1, 8, 8)}
COMPARISONS: list[Row] = [
    (partial(qconv.compare_models, **{**COMPARED, **change}), (TypeError, ValueError), words)
    for change, words in (
        ({"images": torch.zeros(2, 1, 8, 8, dtype=torch.uint8)}, r"images \(torch.uint8\) must be a float tensor"),
        ({"images": torch.zeros(0, 1, 8, 8)}, "images must hold at least one image"),
        ({"labels": torch.zeros(3)}, r"labels \(of shape \(3,\)\) must be one for each of the 8 images"),
        ({"labels": [0] * 8}, r"labels \(list\) must be a tensor"),
        ({"batch_sizes": (1, 0)}, r"batch_sizes\[1\] \(=0\) must be at least 1"),
        ({"batch_sizes": (1.5,)}, r"batch_sizes\[0\] \(=1.5\) must be a whole number"),
        ({"batch_sizes": 4}, r"batch_sizes \(=4\) must be a sequence of whole numbers"),
        ({"batch_sizes": ()}, r"batch_sizes \(=\(\)\) must hold at least one number"),
        ({"seconds": -1}, r"seconds \(=-1\) must be at least 0"),
        ({"quantized": None}, r"quantized \(=None\) must be a torch.nn.Module"),
    )
]
OF_LAYERS: list[Row] = [
    *(
        (partial(layer, input), error, words)
        for layer in (conv(), qconv.QConvTranspose2d(3, 4, 3), qconv.QLinear(5, 4))
        for input, error, words in (
            (torch.ones(2, 3, 5, 5).long(), TypeError, r"input has dtype torch.int64; it must be a floating"),
            (torch.ones(2, 3, 5, 5).double(), TypeError, r"input has dtype torch.float64 and weight torch.float32"),
            (torch.ones(2, 3, 5, 5, device="meta"), ValueError, r"input is on meta and weight on cpu"),
        )
    ),
    (lambda: conv()(torch.ones(2, 2, 5, 5)), ValueError, r"\(2, 2, 5, 5\); its dimension 1 must be in_channels \(=3\)"),
    (lambda: conv()(torch.ones(5, 5)), ValueError, r"shape \(5, 5\); it must have 4 dimensions, or 3 unbatched"),
    (lambda: qconv.QLinear(5, 4)(torch.ones(2, 6)), ValueError, r"its last dimension must be in_features \(=5\)"),
    (lambda: qconv.QConv2d(64, 128, 3, groups=3), ValueError, r"groups \(=3\) must divide in_channels \(=64\)"),
    (lambda: qconv.QConv1d(6, 4, 3, groups=3), ValueError, r"groups \(=3\) must divide out_channels \(=4\)"),
    (lambda: qconv.QConv3d(6, 4, 3, groups=0), ValueError, r"groups \(=0\) must be positive"),
    (lambda: qconv.QConvTranspose2d(5, 4, 3, groups=2), ValueError, r"groups \(=2\) must divide in_channels \(=5\)"),
    (lambda: qconv.QConv2d(4, 4, 3, padding_value=2), ValueError, r"padding_value \(=2\) must be 0, \+1 or -1"),
    (
        lambda: qconv.QConv2d(4, 4, 3, padding_mode="reflect", padding_value=1, scheme=schemes.bnn()),
        ValueError,
        r"padding_value \(=1\) needs padding_mode='zeros', not 'reflect'",
    ),
    (lambda: qconv.QConvTranspose2d(4, 4, 3, padding_value=1), ValueError, r"padding_value \(=1\) must be 0"),
    (lambda: qconv.QConv2d(4, 4, 3, scheme="bnn"), TypeError, r"scheme \(='bnn'\) must be a qconv"),  # pyright: ignore
    (lambda: Scheme("mine", backward_weight="full"), ValueError, r"backward_weight \(='full'\) mus"),  # pyright: ignore
]
OF_STAGES: list[Row] = [
    *((partial(Stages, made), ValueError, "must begin with one at 0") for made in ([], [(0.1, Identity)])),
    *(
        (partial(Stages, [(0, Identity), *more]), ValueError, "one after another")
        for more in ([(0.5, Sign), (0.5, Sign)], [(1.5, Sign)])
    ),
    (partial(Stages, [(0, ShiftPS)]), ValueError, "ShiftPS"),
    (partial(Stages, [(0, wrong(Identity()))]), TypeError, "classes or partials"),
    (lambda: schemes.layerwise("bnn"), TypeError, r"scheme \(='bnn'\) must be a qconv.Scheme"),  # pyright: ignore
    (lambda: schemes.layerwise(schemes.bnn(), inputs=(0.5, 0.4)), ValueError, r"inputs \(=\(0.5, 0.4\)\) must be"),
    (lambda: schemes.layerwise(schemes.bnn(), weights=(0, math.nan)), ValueError, r"weights"),
    (lambda: schemes.layerwise(schemes.bnn(), weights=(0.4, 1)), ValueError, "at least 0 and below 1"),
    (lambda: schemes.layerwise(schemes.bnn(), weights=0.5), TypeError, "must be a pair"),  # pyright: ignore
    (lambda: schemes.layerwise(schemes.shift_ps()), ValueError, "learned tensors replace the weight"),
    (lambda: schemes.two_stage(schemes.layerwise(schemes.bnn())), ValueError, "must not be layerwise: its layers"),
    (
        lambda: schemes.staged([(0, schemes.bnn()), (0.5, schemes.layerwise(schemes.bnn()))]),
        ValueError,
        "must not be layerwise: its layers",
    ),
    (lambda: schemes.layerwise(schemes.layerwise(schemes.bnn())), ValueError, "must not be layerwise: its layers"),
    (lambda: schemes.layerwise(schemes.bnn(), ramp=0.2), ValueError, r"ramp \(=0.2\) must be 0, or .* end before 1"),
    (lambda: schemes.layerwise(schemes.bnn(), ramp=-0.1), ValueError, r"ramp \(=-0.1\) must be 0, or at least"),
    (lambda: schemes.layerwise(schemes.bnn(), ramp=1e-20), ValueError, r"ramp \(=1e-20\) must be 0, or at least"),
    (lambda: schemes.layerwise(schemes.bnn(), ramp=math.nan), ValueError, r"ramp \(=nan\) must be 0, or at least"),
    (lambda: schemes.layerwise(schemes.bnn(), ramp="a"), TypeError, r"ramp \(='a'\)"),  # pyright: ignore
    (lambda: Mixed(schemes.shift_ps().weight, True), ValueError, "replace the weight"),
    (lambda: Mixed(schemes.lsq().weight, False), ValueError, "must be one for an input"),
    (lambda: schemes.layerwise(schemes.bnn()).at_depth(1.5), ValueError, r"depth \(=1.5\) must be from 0"),
    (lambda: schemes.two_stage(schemes.bnn(), 0), ValueError, r"start \(=0\) must be above 0 and at most 1"),
    (lambda: schemes.two_stage(schemes.bnn(), math.nan), ValueError, r"start \(=nan\) must be above 0"),
    (lambda: schemes.two_stage("bnn"), TypeError, r"scheme \(='bnn'\) must be a qconv.Scheme"),  # pyright: ignore
    (lambda: schemes.two_stage(schemes.shift_ps()), ValueError, "learned tensors replace the weight"),
    (lambda: schemes.staged([]), ValueError, r"stages \(=\[\]\) must hold at least one pair"),
    (lambda: schemes.staged([(0.1, schemes.bnn())]), ValueError, "stages must begin with one at 0"),
    (lambda: schemes.staged([(0, "bnn")]), TypeError, r"pairs .*, not \(0, 'bnn'\)"),  # pyright: ignore
    (
        lambda: schemes.staged([(0, schemes.bnn()), (0.5, schemes.bnn(padding_value=1))]),
        ValueError,
        r"padding_value \(=0\) of bnn\(\) must equal that of bnn\(padding_value=1\) \(=1\) in stages",
    ),
]


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        *(*COMBINATIONS, *MISTAKES, *SUMMARIES, *TRAINING, *DATA, *OPTIM, *OF_LAYERS, *OF_STAGES),
        *(*DISTILLATION, *SCHEDULES, *COMPARISONS),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_mistakes_are_named(call: Callable[[], object], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call()


def test_numbers_of_other_kinds_are_numbers() -> None:
    model = qconv.convert(nn.Sequential(nn.Conv2d(3, 4, 3)), schemes.reste(), skip=())
    states = []
    for progress in (0.5, np.float32(0.5), torch.tensor(0.5), 1):
        qconv.set_progress(model, wrong(progress))
        states.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
    assert all(
        states[0][name].equal(states[1][name]) and tensor.equal(states[2][name]) for name, tensor in states[0].items()
    )
    assert qconv.QConv2d(np.int64(3), 4, [3, 3], torch.Size((1, 1))).kernel_size == (3, 3)  # pyright: ignore


def test_what_can_be_combined() -> None:
    staged = partial(Stages, [(0, Identity), (0.5, Sign)])
    for scheme in (
        Scheme("signs at last", staged, padding_value=1, scale_map=True),
        Scheme("shared signs", weight=partial(Sign, stochastic=True, sharded=False)),
        Scheme("gradients", weight=LSQ, grad=partial(Stages, [(0, Identity), (0.5, DoReFaGradient)])),
        Scheme("float", Sign, FP8, FP8, backward_weight="float"),
    ):
        trained_once(qconv.QConv2d(4, 6, 3, padding=1, scheme=scheme), torch.randn(2, 4, 5, 5))


def test_a_scheme_uses_up_no_random_numbers() -> None:
    before = torch.get_rng_state()
    Scheme("random", partial(Sign, stochastic=True), LSQ, DoReFaGradient).with_grad(Int8Stochastic)
    assert torch.get_rng_state().equal(before)
