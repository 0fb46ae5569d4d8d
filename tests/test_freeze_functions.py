"""Frozen models of networks that call functions and methods where others call modules."""

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from test_freeze import trained as converted_and_trained
from timm.layers.norm_act import BatchNormAct2d
from torch import Tensor, nn

from qconv import schemes
from qconv.inference import freeze, verify
from qconv.inference.frozen_layers import BinaryConv2d, IntegerConv2d
from qconv.inference.functional import Clamp
from qconv.models import resnet20
from qconv.scheme import Scheme


class Net(nn.Module):
    """Convolution, batch norm, what is asked for, convolution; with float layers around them."""

    def __init__(self, between: Callable[[Tensor], Tensor], norm: Callable[[int], nn.Module] = nn.BatchNorm2d) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.conv1, self.bn1 = nn.Conv2d(16, 16, 3, padding=1, bias=False), norm(16)
        self.conv2, self.bn2 = nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.head = nn.Linear(16, 10)
        self.between = between

    def forward(self, input: Tensor) -> Tensor:
        output = self.bn2(self.conv2(self.between(self.bn1(self.conv1(self.stem(input))))))
        return self.head(output.mean((2, 3)))


trained: Callable[..., Any] = partial(converted_and_trained, before_sign="keep")


def as_modules(model: Any, *modules: nn.Module) -> Any:
    """The same model, with modules in the place of the function."""
    twin = copy.deepcopy(model)
    twin.between = nn.Sequential(*modules)
    return twin.eval()


def dropped(input: Tensor) -> Tensor:
    return F.relu(F.dropout(input, 0.3, training=False), inplace=True)


RISING: dict[str, tuple[Callable[[Tensor], Tensor], nn.Module]] = {
    "F.relu": (F.relu, nn.ReLU()),
    "F.relu inplace": (lambda x: F.relu(x, inplace=True), nn.ReLU()),
    "F.relu input=": (lambda x: F.relu(input=x), nn.ReLU()),
    "F.relu_": (F.relu_, nn.ReLU()),
    "torch.relu": (torch.relu, nn.ReLU()),
    ".relu": (lambda x: x.relu(), nn.ReLU()),
    ".relu_": (lambda x: x.relu_(), nn.ReLU()),
    "F.relu6": (F.relu6, nn.ReLU6()),
    "F.hardtanh": (F.hardtanh, nn.Hardtanh()),
    "F.hardtanh bounds": (lambda x: F.hardtanh(x, -0.5, 1.5), nn.Hardtanh(-0.5, 1.5)),
    "F.hardtanh_": (lambda x: F.hardtanh_(x, -0.5, 1.5), nn.Hardtanh(-0.5, 1.5)),
    "torch.clamp": (lambda x: torch.clamp(x, -1, 1), nn.Hardtanh()),
    "torch.clamp min=": (lambda x: torch.clamp(x, min=0), nn.ReLU()),
    ".clamp": (lambda x: x.clamp(-1, max=1), nn.Hardtanh()),
    ".clamp max=": (lambda x: x.clamp(max=0.25), Clamp(max=0.25)),
    ".clamp_": (lambda x: x.clamp_(0, 6), nn.ReLU6()),
    ".clamp_min": (lambda x: x.clamp_min(0), nn.ReLU()),
    "torch.clamp_max_": (lambda x: torch.clamp_max_(x, 0.25), Clamp(max=0.25)),
    "torch.clip": (lambda x: torch.clip(x, min=-1, max=1), nn.Hardtanh()),
    ".clip_": (lambda x: x.clip_(-1, 1), nn.Hardtanh()),
    "F.leaky_relu": (lambda x: F.leaky_relu(x, 0.1), nn.LeakyReLU(0.1)),
    "F.hardsigmoid": (F.hardsigmoid, nn.Hardsigmoid()),
    "torch.sigmoid": (torch.sigmoid, nn.Sigmoid()),
    ".sigmoid": (lambda x: x.sigmoid(), nn.Sigmoid()),
    "torch.tanh": (torch.tanh, nn.Tanh()),
    "F.softplus": (lambda x: F.softplus(x, beta=2), nn.Softplus(beta=2)),
    "F.dropout": (dropped, nn.Sequential(nn.Dropout(0.3), nn.ReLU())),
}


@pytest.mark.parametrize("name", RISING)
@pytest.mark.parametrize("scheme", [schemes.bnn(), schemes.lsq(4, 4)], ids=str)
def test_a_function_is_handed_through_as_its_module(name: str, scheme: Scheme) -> None:
    input = torch.randn(4, 3, 12, 12)
    function, module = RISING[name]
    model = trained(Net(function), scheme, input)
    twin = as_modules(model, *(module if isinstance(module, nn.Sequential) else [module]))
    assert torch.equal(model(input), twin(input))
    frozen, of_modules = freeze(model), freeze(twin)
    told, wanted = frozen.layers[0], of_modules.layers[0]
    assert (told.arithmetic, told.gives, told.reader) == (wanted.arithmetic, wanted.gives, wanted.reader)
    assert len(told.folded) == len(wanted.folded)
    if scheme.name.startswith("bnn"):
        assert told.gives == "bits"
    elif module.__class__ in (nn.ReLU, nn.Sequential):
        assert told.gives == "codes"  # behind other bends no straight line may have the codes
    assert torch.equal(frozen(input), of_modules(input))
    found = verify(model, frozen, input)
    assert found.equal, f"\n{found}"


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("pool", [lambda x: F.max_pool2d(x, 2), lambda x: torch.max_pool2d(x, 2, 2)])
def test_pooling_is_handed_through(pool: Callable[[Tensor], Tensor], first: bool) -> None:
    input = torch.randn(4, 3, 12, 12)
    model = trained(
        Net((lambda x: F.hardtanh(pool(x))) if first else lambda x: pool(F.hardtanh(x))), schemes.bnn(), input
    )
    frozen = freeze(model)
    assert frozen.layers[0].gives == "distances", frozen.layers[0]
    found = verify(model, frozen, input)
    assert found.equal, f"\n{found}"


def test_a_norm_of_timm_that_holds_its_activation() -> None:
    input = torch.randn(4, 3, 12, 12)
    for scheme, activation, gives in ((schemes.bnn(), nn.Hardtanh, "bits"), (schemes.lsq(4, 4), nn.ReLU, "codes")):
        norm = partial(BatchNormAct2d, act_layer=activation, drop_layer=nn.Dropout)
        model = trained(Net(nn.Identity(), norm), scheme, input)
        frozen = freeze(model)
        told = frozen.layers[0]
        assert (told.gives, told.folded) == (gives, ("bn1.norm", "bn1.drop", "bn1.act", "between"))
        found = verify(model, frozen, input)
        assert found.equal, f"\n{found}"
        model.bn1.bias.data += 0.5  # the norm is compared with that of the trained model
        assert not verify(model, frozen, input).layers[0].equal


def test_a_norm_of_timm_is_folded_before_what_does_not_rise() -> None:
    input = torch.randn(4, 3, 12, 12)
    model = trained(Net(nn.Identity(), lambda n: BatchNormAct2d(n, act_layer=nn.SiLU)), schemes.bnn(), input)
    frozen = freeze(model)
    told = frozen.layers[0]
    assert (told.gives, told.folded, told.reason) == ("floats", ("bn1.norm",), "SiLU follows it")
    assert verify(model, frozen, input).equal
    torch.testing.assert_close(frozen(input), model(input))


def test_a_norm_of_timm_that_is_called_twice_stays_whole() -> None:
    class Twice(Net):
        def forward(self, input: Tensor) -> Tensor:
            return self.head(self.bn1(self.conv2(self.bn1(self.conv1(self.stem(input))))).mean((2, 3)))

    input = torch.randn(4, 3, 12, 12)
    model = trained(Twice(nn.Identity(), BatchNormAct2d), schemes.bnn(), input)
    frozen = freeze(model)
    assert [each.folded for each in frozen.layers] == [(), ()]
    assert verify(model, frozen, input).equal


def read_again(input: Tensor) -> Tensor:
    return F.relu(input, inplace=True) + input


def read_before(input: Tensor) -> Tensor:
    output = 2 * input
    input.relu_()
    return output + input


def result_unused(input: Tensor) -> Tensor:
    input.clamp_(-0.5, 0.5)
    return input


@pytest.mark.parametrize("function", [read_again, read_before, result_unused])
@pytest.mark.parametrize("scheme", [schemes.bnn(), schemes.lsq(4, 4)], ids=str)
def test_what_changes_a_value_that_others_read(function: Callable[[Tensor], Tensor], scheme: Scheme) -> None:
    input = torch.randn(4, 3, 12, 12)
    model = trained(Net(function), scheme, input)
    frozen = freeze(model)
    assert frozen.layers[0].gives == "floats"
    found = verify(model, frozen, input)
    assert found.equal, f"\n{found}"


LEFT: dict[str, Callable[[Tensor], Tensor]] = {
    "tensor": lambda x: x.clamp(torch.tensor(-1.0), torch.tensor(1.0)),
    "node": lambda x: x.clamp(max=x.mean()),
    "input twice": lambda x: torch.clamp(x, x),
    "falls": lambda x: F.leaky_relu(x, -0.5),
    "no rise": F.silu,
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_no_rising_function_stays(name: str) -> None:
    input = torch.randn(4, 3, 12, 12)
    model = trained(Net(LEFT[name]), schemes.bnn(), input)
    frozen = freeze(model)
    told = frozen.layers[0]
    assert (told.gives, told.folded) == ("floats", ("bn1",))
    assert told.reason
    assert verify(model, frozen, input).equal
    torch.testing.assert_close(frozen(input), model(input))


def test_functions_have_names_that_no_module_has() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.relu = nn.Conv2d(3, 3, 1)
            self.first, self.second = Net(F.relu), Net(F.relu)

        def forward(self, input: Tensor) -> Tensor:
            return self.first(self.relu(input)) + self.second(input)

    class Branching(Two):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) if len(input.shape) == 4 else input

    input = torch.randn(4, 3, 12, 12)
    for kind, names in ((Two, ("relu_1", "relu_2")), (Branching, ("first.relu", "second.relu"))):
        model = trained(kind(), schemes.lsq(4, 4), input)
        frozen = freeze(model)
        assert [each.folded[-1] for each in frozen.layers if each.folded[1:]] == list(names)
        assert isinstance(frozen.find("relu"), nn.Conv2d)
        assert verify(model, frozen, input).equal


@pytest.mark.parametrize(
    ("scheme", "function"),
    [(schemes.bnn(), lambda x: x.clamp(-1.5, -0.2)), (schemes.dorefa(2, 2), F.hardsigmoid)],
    ids=["bits", "codes"],
)
def test_a_function_that_was_lost_is_found(scheme: Scheme, function: Callable[[Tensor], Tensor]) -> None:
    input = torch.randn(4, 3, 12, 12)
    model = trained(Net(function), scheme, input)
    lost = as_modules(model, nn.Identity())
    frozen, without = freeze(model), freeze(lost)
    assert verify(model, frozen, input).equal
    assert without.layers[0].gives == frozen.layers[0].gives != "floats"
    frozen = copy.deepcopy(frozen)
    planted: Any = frozen.find("conv1")
    other: Any = without.find("conv1")
    if isinstance(planted, BinaryConv2d):
        assert not torch.equal(cast(Tensor, planted.threshold), other.threshold)
        planted.threshold, planted.weight, planted.tap_sums = other.threshold, other.weight, other.tap_sums
    else:
        assert isinstance(planted, IntegerConv2d)
        planted.scale, planted.bias = other.scale, other.bias
    found = verify(model, frozen, input)
    assert next((each.name, each.handed > 0) for each in found.layers if not each.equal) == ("conv1", True)
    # The run on its own codes follows the forward of the trained model, whatever the frozen one says of itself.
    frozen.functions |= {name: nn.Identity() for name in frozen.functions}
    found = verify(model, frozen, input)
    assert any(each.unexplained for each in found.layers)


def test_a_frozen_model_with_functions_is_copied_and_printed() -> None:
    input = torch.randn(4, 3, 12, 12)
    model = trained(Net(lambda x: x.clamp(0, 1)), schemes.bnn(), input)
    frozen = freeze(model)
    assert frozen.layers[0].folded == ("bn1", "clamp")
    assert "folded=('bn1', 'clamp')" in repr(frozen.layers[0])
    twins: list[Any] = [copy.deepcopy(frozen), pickle.loads(pickle.dumps(frozen))]
    for twin in twins:
        assert twin.layers == frozen.layers
        assert torch.equal(twin(input), frozen(input))
        assert verify(model, twin, input).equal


@pytest.mark.parametrize("scheme", [schemes.bnn(), schemes.lsq(4, 4), schemes.bwn()], ids=str)
def test_a_sample_that_is_no_batch_is_refused(scheme: Scheme) -> None:
    model = trained(resnet20(), scheme, torch.randn(2, 3, 32, 32))
    message = r"input has shape \(3, 32, 32\); a frozen model takes batches, of 4 dimensions: call it with .*unsqueeze"
    with pytest.raises(ValueError, match=message):
        freeze(model)(torch.randn(3, 32, 32))


# Tensors that a forward makes and then changes


class Changes(nn.Module):
    """Makes a tensor in its forward and writes to it."""

    def __init__(self, change: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 1)
        self.first, self.norm, self.second = nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3)
        self.register_buffer("start", torch.ones(8))
        self.change = change

    def forward(self, input: Tensor) -> Tensor:
        return self.head(self.change(self, self.second(self.norm(self.first(self.stem(input))))))


def _sum(model: nn.Module, x: Tensor) -> Tensor:
    total = torch.zeros(8)
    total += x.abs().amax((0, 2, 3))
    return x + total.view(1, -1, 1, 1)


def _product(model: nn.Module, x: Tensor) -> Tensor:
    return x * torch.ones(1).mul_(3).add_(x.mean())


def _buffer(model: nn.Module, x: Tensor) -> Tensor:
    total = model.get_buffer("start").clone()
    total += x.mean((0, 2, 3))
    return x + total.view(1, -1, 1, 1)


def _place(model: nn.Module, x: Tensor) -> Tensor:
    mask = torch.ones(1, 1, *SIZE)
    mask[..., 0, 0] += x.mean()
    return x * mask


def _out(model: nn.Module, x: Tensor) -> Tensor:
    return x + torch.mean(x.detach(), (0, 2, 3), out=torch.zeros(8)).view(1, -1, 1, 1)


SIZE = 5, 5


@pytest.mark.parametrize("change", [_sum, _product, _buffer, _place, _out])
def test_what_a_forward_makes_is_new_in_each_call(change: Any) -> None:
    model = trained(Changes(change), schemes.bnn(), x := torch.randn(4, 3, 9, 9))
    frozen = freeze(model)
    assert frozen.untraced
    for _ in range(3):
        torch.testing.assert_close(frozen(x), model(x))


def test_values_that_are_changed_in_place_stay_in_the_graph() -> None:
    def change(model: nn.Module, x: Tensor) -> Tensor:
        x = x + model.get_buffer("start").view(1, -1, 1, 1)
        x += 1
        return x.relu_()

    model = trained(Changes(change), schemes.bnn(), x := torch.randn(4, 3, 9, 9))
    frozen = freeze(model)
    assert not frozen.untraced
    for _ in range(2):
        torch.testing.assert_close(frozen(x), model(x))
