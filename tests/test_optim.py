"""Parameter groups, Bop and DeepShift-PS's penalty, against slow formulas and torch's own Adam."""

import copy
import io
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm.optim
import torch
from conftest import same
from hydra.utils import instantiate
from omegaconf import OmegaConf
from settings import default_dtype
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import weight_norm

import qconv
from qconv import schemes
from qconv.optim import KINDS, Bop, ModelOptimizer, parameter_groups, shift_penalty, sine_penalty
from qconv.quantizers import Quantizer
from qconv.quantizers.mixed import Mixed
from qconv.scheme import Scheme

BINARY = {"binary_weights": {"binary": True, "lr": 0.01, "threshold": 1e-3}}


class Scale(Quantizer):
    """Multiplies by a learned number, which is named as a bias to see that it is none."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.ones(()))

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.bias,)

    def quantize(self, x: Tensor, *tensors: Tensor) -> Tensor:
        return x * tensors[0]

    def backward(self, grad: Tensor, x: Tensor, *tensors: Tensor) -> tuple[Tensor | None, ...]:
        return grad * tensors[0], (grad * x).sum()


def every_kind() -> nn.Module:
    model = nn.Sequential()
    model.stem = nn.Conv2d(3, 4, 3, bias=False)
    model.norm = nn.BatchNorm2d(4)
    model.binary = qconv.QConv2d(4, 4, 3, scheme=schemes.bnn())
    model.learned = qconv.QConv2d(4, 4, 3, scheme=Scheme("learned", Scale, Scale, Scale))
    model.shift = qconv.QConv2d(4, 4, 3, scheme=schemes.shift_q(), bias=False)
    model.alone = Scale()
    model.fc = qconv.QLinear(4, 2, scheme=schemes.identity())
    return model


def names_in(model: nn.Module, groups: list[dict[str, Any]]) -> list[list[str]]:
    names = {parameter: name for name, parameter in model.named_parameters()}
    return [[names[parameter] for parameter in group["params"]] for group in groups]


def binary_group(weight: nn.Parameter, **options: Any) -> list[dict[str, Any]]:
    return [{"params": [weight], "binary": True, **options}]


# Parameter groups


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("binary_weights", ["binary.weight"]),
        ("quantized_weights", ["binary.weight", "shift.weight"]),
        ("input_quantizers", ["learned.input_quantizer.bias"]),
        ("weight_quantizers", ["learned.weight_quantizer.bias"]),
        ("grad_quantizers", ["learned.grad_quantizer.bias"]),
        ("quantizers", [f"learned.{place}_quantizer.bias" for place in ("input", "weight", "grad")] + ["alone.bias"]),
        ("norms", ["norm.weight", "norm.bias"]),
        ("biases", ["norm.bias", "binary.bias", "learned.bias", "fc.bias"]),
    ],
)
def test_every_kind(kind: str, expected: list[str]) -> None:
    model = every_kind()
    groups = parameter_groups(model, {kind: {"lr": 0.5}})
    assert names_in(model, groups)[1] == expected
    assert groups[1]["lr"] == 0.5
    assert groups[0].keys() == {"params"}
    assert len(KINDS) == 8, "all are tested"


def test_every_trainable_parameter_is_in_one_group_and_the_first_rule_counts() -> None:
    model = every_kind()
    model.get_submodule("stem").requires_grad_(False)
    rules = {
        r"binary\..*": {"lr": 1.0},
        "input_quantizers": {"lr": 2.0, "weight_decay": 0.0},
        lambda name, parameter: parameter.ndim == 0: {"lr": 3.0},
        "biases": {},
    }
    groups = parameter_groups(model, rules)
    assert names_in(model, groups) == [
        ["norm.weight", "learned.weight", "shift.weight", "fc.weight"],
        ["binary.weight", "binary.bias"],
        ["learned.input_quantizer.bias"],
        ["learned.weight_quantizer.bias", "learned.grad_quantizer.bias", "alone.bias"],
        ["norm.bias", "learned.bias", "fc.bias"],
    ]
    given = [parameter for group in groups for parameter in group["params"]]
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert len(given) == len(set(given)) == len(trainable)
    assert set(given) == set(trainable)
    optimizer = torch.optim.SGD(groups, lr=0.1, weight_decay=1e-4)
    options = [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
    assert options == [(0.1, 1e-4), (1.0, 1e-4), (2.0, 0.0), (3.0, 1e-4), (0.1, 1e-4)]


def test_the_learned_tensors_that_replace_a_weight() -> None:
    model = nn.Sequential(qconv.Conv2dShift(3, 4, 3), nn.Linear(4, 2))
    groups = parameter_groups(model, {"weight_quantizers": {"weight_decay": 0.0}})
    assert names_in(model, groups) == [
        ["0.bias", "1.weight", "1.bias"],
        ["0.weight_quantizer.shift", "0.weight_quantizer.sign"],
    ]


def test_shared_parameters_have_all_names_and_kinds() -> None:
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": qconv.QLinear(4, 4, scheme=schemes.bnn())})
    model["b"].weight = model["a"].weight  # pyright: ignore[reportArgumentType]
    for rule in ("binary_weights", r"a\.weight", r"b\.weight"):
        groups = parameter_groups(model, {rule: {"lr": 1.0}})
        assert names_in(model, groups) == [["a.bias", "b.bias"], ["a.weight"]]


def test_a_parametrized_layer_and_no_rules() -> None:
    model = weight_norm(nn.Linear(3, 2))
    everything = [[name for name, _ in model.named_parameters()]]
    assert names_in(model, parameter_groups(model)) == everything
    assert names_in(model, parameter_groups(model, {".*": {}})) == everything  # no rest
    layer = qconv.QLinear(3, 2)
    torch.nn.utils.parametrize.register_parametrization(layer, "weight", nn.Identity())
    assert names_in(layer, parameter_groups(layer)) == [["bias", "parametrizations.weight.original"]]
    for rule in ("binary_weights", "quantized_weights"):
        groups = parameter_groups(layer, {rule: {"weight_decay": 0.0}})
        assert names_in(layer, groups) == [["bias"], ["parametrizations.weight.original"]]
    pruned = prune.l1_unstructured(qconv.QLinear(3, 2, scheme=schemes.lsq()), "weight", 0.5)
    groups = parameter_groups(pruned, {"quantized_weights": {"weight_decay": 0.0}})
    assert names_in(pruned, groups)[1] == ["weight_orig"]


def test_normalizations_of_other_packages() -> None:
    from timm.layers import FilterResponseNormTlu2d, RmsNorm, SimpleNorm  # pyright: ignore[reportPrivateImportUsage]

    model = nn.Sequential(nn.Conv2d(3, 8, 1), RmsNorm(8), SimpleNorm(8), FilterResponseNormTlu2d(8))
    rest, norms = parameter_groups(model, {"norms": {"weight_decay": 0.0}})
    assert [len(group["params"]) for group in (rest, norms)] == [2, len(list(model[1:].parameters()))]

    class NormalizedLinear(nn.Linear): ...

    class Normalized1x1(qconv.QConv2d): ...

    model = nn.Sequential(Normalized1x1(3, 8, 1, scheme=schemes.lsq(4, 4)), NormalizedLinear(8, 2), nn.LayerNorm(2))
    groups = parameter_groups(model, {"input_quantizers": {}, "norms": {}})
    assert [len(group["params"]) for group in groups] == [5, 1, 2]


def test_a_rate_that_follows_the_optimizers() -> None:
    model = nn.Sequential(qconv.QConv2d(3, 4, 3, scheme=schemes.lsq(2, 2)), nn.Linear(4, 2))
    rules: dict[Any, Any] = {"quantizers": {"lr_scale": 0.25, "weight_decay": 0.0}, r"1\..*": {"lr": 3.0}}
    before = copy.deepcopy(rules)
    groups = parameter_groups(model, rules, lr=0.5)
    assert [{key: value for key, value in group.items() if key != "params"} for group in groups] == [
        {},
        {"weight_decay": 0.0, "lr": 0.125},
        {"lr": 3.0},
    ]
    assert rules == before
    for lr in (0.5, 2):
        optimizer = ModelOptimizer(torch.optim.Adam, rules, lr=lr)(model)
        assert [group["lr"] for group in optimizer.param_groups] == [lr, lr / 4, 3.0]
    half: Any = np.float32(0.5)
    assert parameter_groups(model, rules, lr=half)[1]["lr"] == 0.125
    multiplies = r"lr_scale \(=0.25\) multiplies the optimizer's lr, which must be given"
    with pytest.raises(ValueError, match=multiplies):
        parameter_groups(model, rules)
    with pytest.raises(ValueError, match=multiplies):
        ModelOptimizer(torch.optim.Adam, rules)(model)
    wrong: tuple[Any, ...] = (0, -1.0, math.nan, "0.1", torch.tensor(0.1))
    for value in wrong:
        with pytest.raises(ValueError, match=r"lr \(=.*\) must be a positive number for lr_scale \(=0.25\)"):
            parameter_groups(model, rules, lr=value)
    for value in (*wrong[:4], math.inf, True, None):
        with pytest.raises(ValueError, match=r"rules\['quantizers'\]: lr_scale .* must be a positive number"):
            parameter_groups(model, {"quantizers": {"lr_scale": value}}, lr=0.5)


BINARY_SCALE = {"binary_weights": {"binary": True, "lr_scale": 0.1}}


@pytest.mark.parametrize(
    ("rules", "error", "message"),
    [
        ({"binary_weights": {}}, ValueError, r"rules\['binary_weights'\] matches no trainable parameter .* 'weight'"),
        ({"weigh": {}}, ValueError, "a rule is one of binary_weights, .* a function, or an expression for whole names"),
        ({lambda name, parameter: False: {}}, ValueError, "matches no trainable parameter"),
        ({"biases": {}, "bias": {}}, ValueError, r"rules\['bias'\] matches only .* earlier rules match"),
        ({"(": {}}, ValueError, r"rules: '\(' must be a regular expression: .*unterminated"),
        ({"bias": {"params": []}}, ValueError, r"rules\['bias'\] must not have the option 'params'"),
        ({"bias": 0.1}, TypeError, r"rules\['bias'\] \(=0.1\) must be a mapping of options"),
        ({3: {}}, TypeError, "rules: 3 must be a kind, a regular expression or a function"),
        ({"bias": {"lr_scale": 0.1, "lr": 1}}, ValueError, r"must have lr \(=1\) or lr_scale \(=0.1\), not both"),
        (BINARY_SCALE, ValueError, r"lr_scale \(=0.1\) must not be in a binary group"),
    ],
)
def test_rules_that_are_refused(rules: Any, error: type[Exception], message: str) -> None:
    model = qconv.BNNConv2d(3, 4, 3) if rules is BINARY_SCALE else nn.Linear(2, 2)
    with pytest.raises(error, match=message):
        parameter_groups(model, rules, lr=0.5)
    with pytest.raises(ValueError, match=r"model \(ReLU\) has no trainable parameter"):
        parameter_groups(nn.ReLU())


# Bop


def slow_bop(weight: list[float], grads: list[list[float]], gamma: float, threshold: float) -> list[list[float]]:
    """The weights after each step, one number at a time."""
    weight = [-1.0 if w < 0 else 1.0 for w in weight]
    m = [0.0] * len(weight)
    history: list[list[float]] = []
    for grad in grads:
        for i, g in enumerate(grad):
            m[i] = (1 - gamma) * m[i] + gamma * g
            if abs(m[i]) > threshold and (m[i] > 0) == (weight[i] > 0):
                weight[i] = -weight[i]
        history.append(list(weight))
    return history


def run_bop(weight: list[float], grads: list[list[float]], gamma: float, threshold: float) -> list[list[float]]:
    parameter = nn.Parameter(torch.tensor(weight, dtype=torch.float64))
    optimizer = Bop(binary_group(parameter, lr=gamma, threshold=threshold))
    history: list[list[float]] = []
    for grad in grads:
        parameter.grad = torch.tensor(grad, dtype=torch.float64)
        optimizer.step()
        history.append(parameter.tolist())
    return history


@pytest.mark.parametrize("gamma", [0.01, 0.3, 0.7, 1.0])
@pytest.mark.parametrize("threshold", [0.0, 0.05, 0.5])
def test_against_the_slow_formula(gamma: float, threshold: float) -> None:
    weight, grads = torch.randn(30).tolist(), torch.randn(40, 30).tolist()
    threshold *= gamma**0.5  # the size of m
    assert run_bop(weight, grads, gamma, threshold) == slow_bop(weight, grads, gamma, threshold)
    assert run_bop(weight, grads, gamma, threshold) != slow_bop(weight, grads, gamma, threshold + 0.1 * gamma**0.5)
    assert run_bop(weight, grads, gamma, threshold) != slow_bop(weight, grads, gamma * 0.7, threshold)


def test_ties_zeros_and_nan() -> None:
    weight = nn.Parameter(torch.tensor([0.0, -0.0, -3.0, 1.0, -1.0, 1.0]))
    optimizer = Bop(binary_group(weight, lr=1.0, threshold=0.25))
    assert weight.tolist() == [1, 1, -1, 1, -1, 1]
    weight.grad = torch.tensor([0.25, 0.2501, -0.25, math.nan, 1.0, 0.0])
    optimizer.step()
    assert weight.tolist() == [1, -1, -1, 1, -1, 1]  # at the threshold nothing flips
    weight.grad = torch.ones(6)
    optimizer.step()
    assert weight.tolist() == [-1, -1, -1, 1, -1, -1]  # where there was a NaN nothing ever does
    zero = nn.Parameter(torch.ones(1))
    optimizer = Bop(binary_group(zero, lr=1.0, threshold=0.0))
    zero.grad = torch.zeros(1)
    optimizer.step()
    assert zero.tolist() == [1.0]


def test_odd_shapes_and_no_gradient() -> None:
    weights = [nn.Parameter(torch.randn(shape)) for shape in ((0, 3), (), (2, 1, 3))]
    weights[2] = nn.Parameter(torch.randn(2, 4, 3, 3).to(memory_format=torch.channels_last))
    untouched = nn.Parameter(torch.randn(3))
    optimizer = Bop([{"params": [*weights, untouched], "binary": True}], gamma=1.0)

    before = [weight.detach().clone() for weight in weights]
    for weight in weights:
        weight.grad = weight.detach().contiguous()
    optimizer.step()
    assert all(weight.equal(-start) for weight, start in zip(weights, before, strict=True))
    assert untouched.abs().equal(torch.ones(3))
    assert untouched not in optimizer.state


def test_weights_loaded_later_become_their_signs() -> None:
    layer = qconv.BNNConv2d(3, 4, 3)
    optimizer = Bop(parameter_groups(layer, BINARY))
    loaded = {name: torch.randn_like(value) for name, value in layer.state_dict().items()}
    layer.load_state_dict(loaded)
    layer(torch.zeros(1, 3, 5, 5)).sum().mul(0.0).backward()
    optimizer.step()
    assert layer.weight.equal(qconv.quantizers.sign(loaded["weight"]))


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_the_rest_is_adam_bit_for_bit(weight_decay: float) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), qconv.BNNConv2d(4, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 2)
    )
    options = {"lr": 0.03, "betas": (0.8, 0.99), "eps": 1e-6, "weight_decay": weight_decay}
    bop = Bop(parameter_groups(model, {**BINARY, "norms": {"lr": 0.2}}), **options)
    twin = copy.deepcopy(model)
    groups = parameter_groups(twin, {"binary_weights": {}, "norms": {"lr": 0.2}})
    adam = torch.optim.Adam([groups[0], groups[2]], **options)
    for _ in range(5):
        input = torch.randn(8, 3, 8, 8)
        for each in (model, twin):
            each.zero_grad()
            each(input).square().sum().backward()
        bop.step()
        adam.step()
        with torch.no_grad():
            twin.get_parameter("1.weight").copy_(model.get_parameter("1.weight"))
        for (name, a), b in zip(model.named_parameters(), twin.parameters(), strict=True):
            assert a.equal(b), name
            if name != "1.weight":
                assert bop.state[a].keys() == adam.state[b].keys()
                assert all(bop.state[a][key].equal(adam.state[b][key]) for key in adam.state[b]), name


@pytest.mark.parametrize("in_file", [False, True])
def test_a_resumed_run_is_the_same_run(in_file: bool) -> None:
    model = nn.Sequential(qconv.BNNConv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(72, 2))
    batches = [torch.randn(4, 3, 5, 5) for _ in range(8)]

    def make(model: nn.Module) -> list[Any]:
        optimizer = Bop(parameter_groups(model, BINARY), lr=0.01)
        return [model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]

    def train(run: list[Any], batches: list[Tensor]) -> None:
        model, optimizer, scheduler = run
        for batch in batches:
            optimizer.zero_grad()
            model(batch).square().sum().backward()
            optimizer.step()
            scheduler.step()

    one = make(model)
    start = model.get_parameter("0.weight").detach().clone()
    train(one, batches[:4])
    other = make(copy.deepcopy(model))
    saved = [part.state_dict() for part in one]
    if in_file:
        file = io.BytesIO()
        torch.save(saved, file)
        file.seek(0)
        saved = torch.load(file, weights_only=True)
    for part, state in zip(other, copy.deepcopy(saved), strict=True):
        part.load_state_dict(state)
    for run in (one, other):
        train(run, batches[4:])
    assert same(model.state_dict(), other[0].state_dict())
    assert not model.get_parameter("0.weight").equal(start)
    assert [group["lr"] for group in other[1].param_groups] == pytest.approx([0.01 * 0.9**8] * 2)
    ours, theirs = (run[1].state_dict() for run in (one, other))
    assert ours["param_groups"] == theirs["param_groups"]
    assert ours["state"].keys() == theirs["state"].keys()
    assert all(same(state, theirs["state"][index]) for index, state in ours["state"].items())


def test_copies_keep_groups_and_defaults() -> None:
    weight = nn.Parameter(torch.randn(3))
    optimizer = copy.deepcopy(Bop(binary_group(weight), gamma=0.25))
    added = nn.Parameter(torch.tensor([-2.0]))
    optimizer.add_param_group({"params": [added], "binary": True})
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.25]
    assert added.tolist() == [-1.0]


@pytest.mark.parametrize("name", ["constant", "cosine", "one_cycle"])
def test_schedules_act_on_gamma(name: str) -> None:
    from qconv.training import schedules

    make: dict[str, Callable[..., Any]] = {
        "constant": schedules.constant,
        "cosine": schedules.cosine,
        "one_cycle": lambda optimizer, total_steps: torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=[0.1, 0.2], total_steps=total_steps
        ),
    }
    rest, weight = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = Bop([{"params": [rest]}, *binary_group(weight)], lr=0.1, gamma=0.2)
    scheduler = make[name](optimizer, total_steps=10)
    m = torch.zeros(2)
    for _ in range(9):
        rest.grad, weight.grad = torch.ones(2), torch.randn(2)
        gamma = optimizer.param_groups[1]["lr"]
        assert gamma == pytest.approx(2 * optimizer.param_groups[0]["lr"])
        m = m.lerp(weight.grad, gamma)
        optimizer.step()
        scheduler.step()
        assert optimizer.state[weight]["momentum"].equal(m)


def test_closure_and_gradient_scaler() -> None:
    weight = nn.Parameter(torch.tensor([1.0, -1.0]))
    optimizer = Bop(binary_group(weight, lr=1.0))

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = weight.sum() + 3
        loss.backward()
        return loss

    assert optimizer.step(closure) == 3.0
    assert weight.tolist() == [-1.0, -1.0]
    scaler = torch.amp.GradScaler("cpu")
    optimizer.zero_grad()
    scaler.scale(-weight.sum()).backward()
    scaler.step(optimizer)
    assert weight.tolist() == [1.0, 1.0]
    assert weight.grad is not None
    assert weight.grad.tolist() == [-1.0, -1.0]


PLAIN, HALF = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2, dtype=torch.float16))
COMPLEX = nn.Parameter(torch.ones(2, dtype=torch.complex64))
NO_BINARY = "params has no group with binary=True: use parameter_groups"


@pytest.mark.parametrize(
    ("group", "options", "message"),
    [
        ({}, {"lr": -1.0}, r"lr \(=-1.0\) must be 0 or more"),
        ({}, {"lr": math.nan}, r"lr \(=nan\) must be 0 or more"),
        ({}, {"gamma": 1.5}, r"gamma \(=1.5\) must be at most 1"),
        ({}, {"gamma": -0.5}, r"gamma \(=-0.5\) must be 0 or more"),
        ({}, {"threshold": -1e-8}, r"threshold \(=-1e-08\) must be 0 or more"),
        ({}, {"eps": -1.0}, r"eps \(=-1.0\) must be 0 or more"),
        ({}, {"weight_decay": -1.0}, r"weight_decay \(=-1.0\) must be 0 or more"),
        ({}, {"betas": (0.9, 1.0)}, r"betas \(=\(0.9, 1.0\)\) must be at least 0 and less than 1"),
        ({"lr": 1.5}, {}, r"lr \(=1.5\), the gamma of a binary group, must be at most 1"),
        ({"gamma": 0.1}, {}, r"gamma \(=0.1\) of a group must be given as lr"),
        ({"weight_decay": 0.1}, {}, r"weight_decay \(=0.1\) of a binary group must be 0"),
        ({"threshold": math.nan}, {}, r"threshold \(=nan\) must be 0 or more"),
        ({"binary": False}, {}, NO_BINARY),
        ({"params": [HALF]}, {}, "binary weights must be float32 or float64, not torch.float16"),
        ({"params": [HALF.bfloat16().detach()]}, {}, "binary weights must be float32 or float64, not torch.bfloat16"),
        ({"params": [COMPLEX]}, {}, "binary weights must be float32 or float64, not torch.complex64"),
    ],
)
def test_numbers_and_groups_that_are_refused(group: dict[str, Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        Bop([{"params": [PLAIN], "binary": True, **group}], **{"weight_decay": 0.5, **options})
    with pytest.raises(ValueError, match=NO_BINARY):
        Bop([PLAIN])
    with pytest.raises(TypeError, match=r"parameters must be real, not torch\.complex64"):
        Bop([{"params": [COMPLEX]}, *binary_group(PLAIN)])


@pytest.mark.parametrize("binary", [True, False])
def test_sparse_gradients_are_refused_before_anything_changes(binary: bool) -> None:
    weights = [nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(3, 2))]
    optimizer = Bop([{"params": [weights[0]], "binary": binary}, {"params": [weights[1]], "binary": not binary}])
    weights[0].grad, weights[1].grad = torch.ones(3, 2), torch.ones(3, 2).to_sparse()
    with pytest.raises(TypeError, match=r"gradient of a parameter of shape \(3, 2\) must be dense"):
        optimizer.step()
    assert not optimizer.state
    assert weights[0].equal(torch.ones(3, 2))


# As a configuration writes it


def test_the_config() -> None:
    config = OmegaConf.load(Path(__file__).parent.parent / "configs/optimizer/bop.yaml")
    model = nn.Sequential(nn.Conv2d(3, 4, 3), qconv.BNNConv2d(4, 4, 3), nn.BatchNorm2d(4))
    optimizer = instantiate(OmegaConf.merge(config, {"lr": 0.5}))(model)
    assert isinstance(optimizer, Bop)
    rest, binary = optimizer.param_groups
    assert names_in(model, [binary]) == [["1.weight"]]
    assert (rest["lr"], rest["binary"]) == (0.5, False)
    assert (binary["lr"], binary["threshold"], binary["binary"]) == (1e-4, 1e-8, True)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    assert torch.load(file, weights_only=True) == optimizer.state_dict()  # plain values, as checkpoints must hold


# DeepShift-PS's penalty


def test_shift_penalty_and_its_gradient() -> None:
    model = nn.Sequential(qconv.Conv2dShift(3, 4, 3), nn.ReLU(), qconv.QLinear(5, 2, scheme=schemes.shift_ps()))
    model.double()
    shifts = [parameter for name, parameter in model.named_parameters() if name.endswith("shift")]
    with torch.no_grad():
        for shift in shifts:
            shift.uniform_(-3, 0)
    values = [value for shift in shifts for value in shift.flatten().tolist()]
    with pytest.raises(ValueError, match=r"model \(ReLU\) must have a ShiftPS quantizer"):
        shift_penalty(model[1])
    with pytest.raises(ValueError, match="quantizer '0' has no shift yet"):
        shift_penalty(nn.Sequential(qconv.quantizers.ShiftPS()))
    penalty = shift_penalty(model)
    torch.testing.assert_close(penalty.item(), 0.5 * sum((2.0**v) ** 2 for v in values), rtol=1e-14, atol=0)
    penalty.backward()
    expected = [math.log(2) * 4.0**v for v in values]
    gradient = torch.cat([shift.grad.flatten() for shift in shifts if shift.grad is not None])
    torch.testing.assert_close(gradient, torch.tensor(expected, dtype=torch.float64), rtol=1e-14, atol=0)
    others = [parameter for parameter in model.parameters() if not any(parameter is shift for shift in shifts)]
    assert all(parameter.grad is None for parameter in others)


def test_shift_penalty_of_shared_and_16_bit_shifts() -> None:
    layer = qconv.Conv2dShift(16, 16, 3)
    shift = layer.weight_quantizer.tensors()[0]
    once = shift_penalty(layer).item()
    assert once == pytest.approx(0.5 * (4.0 ** shift.detach().double()).sum().item())
    assert shift_penalty(nn.ModuleList([layer, nn.Sequential(layer)])).item() == once
    wide = qconv.QLinear(512, 512, scheme=schemes.shift_ps())
    with torch.no_grad():
        wide.weight_quantizer.tensors()[0].zero_()
    assert shift_penalty(wide.half()).item() == 512 * 512 / 2  # beyond float16


def test_sine_penalty_and_its_gradient() -> None:
    first = qconv.QConv2d(3, 4, 3, scheme=schemes.biper(frequency=20, sine=True))
    second = qconv.QLinear(5, 2, scheme=schemes.staged([(0, schemes.biper(9.0, sine=True)), (0.5, schemes.biper(7.0))]))
    qconv.set_progress(second, 0.6)
    other = qconv.QLinear(5, 2, scheme=schemes.bnn())
    model = nn.Sequential(first, nn.ReLU(), second, other, nn.Sequential(first)).double()
    layers = ((first, 20.0), (second, 7.0))
    penalty = sine_penalty(model)
    values = [[math.sin(w * value) ** 2 for value in layer.weight.flatten().tolist()] for layer, w in layers]
    torch.testing.assert_close(penalty.item(), sum(sum(each) / len(each) for each in values), rtol=1e-14, atol=0)
    penalty.backward()
    for layer, w in layers:
        count = layer.weight.numel()
        expected = [w * math.sin(2 * w * value) / count for value in layer.weight.flatten().tolist()]
        assert layer.weight.grad is not None
        torch.testing.assert_close(layer.weight.grad.flatten().tolist(), expected, rtol=1e-12, atol=1e-15)
    assert other.weight.grad is None
    later = qconv.QLinear(5, 2, scheme=schemes.two_stage(schemes.biper()))
    assert sine_penalty(later).item() == 0  # its weight is float still
    qconv.set_progress(later, 1)
    assert sine_penalty(later).item() > 0
    mixed = qconv.QLinear(5, 2, scheme=qconv.Scheme("mixed", weight=lambda: Mixed(schemes.biper().weight, True)))
    expected = sine_penalty(mixed)
    mixed.set_scheme(schemes.biper())
    assert torch.equal(sine_penalty(mixed), expected)  # found inside another quantizer
    with pytest.raises(ValueError, match=r"model \(QLinear\) must have a trainable weight of BiPer"):
        sine_penalty(other)


class Around:
    """An optimizer that holds another, as SAM's users have it, and has no defaults itself."""

    def __init__(self, params: Any, **options: Any) -> None:
        self.optimizer = torch.optim.SGD(params, **options)


def test_mistyped_options_of_rules_are_refused() -> None:
    """torch keeps them in the group without a word, as it keeps what an optimizer reads without a default."""
    model = nn.Sequential(qconv.QConv2d(3, 4, 3, scheme=schemes.lsq()), nn.BatchNorm2d(4))
    mistyped, scale = {"norms": {"weight_deacy": 0.0}}, {"quantizers": {"lr_scal": 0.1}}
    for make, rules, message in (
        (torch.optim.SGD, mistyped, r"rules\['norms'\]: .* has no option 'weight_deacy'; did you mean 'weight_d"),
        (Around, mistyped, r"rules\['norms'\]: .* has no option 'weight_deacy'; did you mean 'weight_d"),
        (torch.optim.Adam, scale, r"rules\['quantizers'\]: Adam has no option 'lr_scal'; did you mean 'lr_scale'"),
    ):
        with pytest.raises(ValueError, match=message):
            ModelOptimizer(make, rules, lr=0.1)(model)  # pyright: ignore[reportArgumentType]
    made = ModelOptimizer(timm.optim.Muon, {"norms": {"use_fallback": True, "name": "norms"}}, lr=0.1)(model)  # pyright: ignore
    assert made.param_groups[1]["use_fallback"]


@pytest.mark.parametrize(
    "scheme",
    [
        *(schemes.siman(), schemes.bnn(), schemes.xnor(), schemes.recu(), schemes.biper(), schemes.bwn()),
        *(schemes.bwn(center=True), schemes.two_stage(schemes.bwn(center=True)), schemes.two_stage(schemes.bnn())),
    ],
    ids=str,
)
def test_binary_groups_take_what_follows_the_sign(scheme: Scheme) -> None:
    model = qconv.QConv2d(3, 4, 3, scheme=scheme)
    wrong = {"siman()": "its value does not follow", "bwn(center=True)": "its quantizer changes the weights after each"}
    wrong["two_stage(bwn(center=True), start=0.5)"] = wrong["bwn(center=True)"]
    if scheme.name in wrong:
        message = rf"weight with {re.escape(scheme.name)} can't be in a binary group: {wrong[scheme.name]}"
        with pytest.raises(ValueError, match=message):
            parameter_groups(model, BINARY)
    else:
        assert parameter_groups(model, BINARY)[-1]["binary"]


def test_a_schedule_of_some_groups() -> None:
    """Bop's gamma decays, and Adam's learning rate stays."""
    from qconv.training import schedules

    model = qconv.convert(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), schemes.bnn(), skip=())
    optimizer = Bop(
        [{"params": [model[0].weight], "binary": True, "lr": 1e-3}, {"params": model[1].parameters()}], lr=0.01
    )
    schedule = schedules.steps(optimizer, 10, at=[0.5], only={"binary": True})
    rates = []
    for _ in range(8):
        optimizer.step()
        schedule.step()
        rates.append([group["lr"] for group in optimizer.param_groups])
    assert rates == [pytest.approx([1e-3 if step < 4 else 1e-4, 0.01]) for step in range(8)]
    with pytest.raises(ValueError, match=r"only \(=\{'binary': 3\}\) must be options of a group"):
        schedules.steps(optimizer, 10, at=[0.5], only={"binary": 3})


def test_steps_are_counted_under_a_default_of_16_bits() -> None:
    found = []
    with default_dtype(torch.bfloat16):
        for make in (Bop, torch.optim.Adam):
            parameter = nn.Parameter(torch.ones(3, dtype=torch.float32))
            binary = binary_group(nn.Parameter(torch.ones(1, dtype=torch.float32))) if make is Bop else []
            optimizer = make([*binary, {"params": [parameter]}], lr=1e-3)
            for step in range(400):
                parameter.grad = torch.full_like(parameter, math.sin(step))
                optimizer.step()
            found.append((optimizer.state[parameter]["step"].item(), parameter.tolist()))
    assert found[0] == found[1]
