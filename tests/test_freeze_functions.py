"""Frozen models of networks that call functions and methods where others call modules."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from settings import mostly_nightly
from test_freeze import trained as converted_and_trained
from torch import Tensor, nn

from qconv import schemes
from qconv.inference import verify
from qconv.inference.build import build
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


def dropped(input: Tensor) -> Tensor:
    return F.relu(F.dropout(input, 0.3, training=False), inplace=True)


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "F.relu": F.relu,
    "F.relu inplace": lambda x: F.relu(x, inplace=True),
    "F.relu input=": lambda x: F.relu(input=x),
    "F.relu_": F.relu_,
    "torch.relu": torch.relu,
    ".relu": lambda x: x.relu(),
    ".relu_": lambda x: x.relu_(),
    "F.relu6": F.relu6,
    "F.hardtanh": F.hardtanh,
    "F.hardtanh bounds": lambda x: F.hardtanh(x, -0.5, 1.5),
    "F.hardtanh_": lambda x: F.hardtanh_(x, -0.5, 1.5),
    "torch.clamp": lambda x: torch.clamp(x, -1, 1),
    "torch.clamp min=": lambda x: torch.clamp(x, min=0),
    ".clamp": lambda x: x.clamp(-1, max=1),
    ".clamp max=": lambda x: x.clamp(max=0.25),
    ".clamp_": lambda x: x.clamp_(0, 6),
    ".clamp_min": lambda x: x.clamp_min(0),
    "torch.clamp_max_": lambda x: torch.clamp_max_(x, 0.25),
    "torch.clip": lambda x: torch.clip(x, min=-1, max=1),
    ".clip_": lambda x: x.clip_(-1, 1),
    "F.leaky_relu": lambda x: F.leaky_relu(x, 0.1),
    "F.hardsigmoid": F.hardsigmoid,
    "torch.sigmoid": torch.sigmoid,
    ".sigmoid": lambda x: x.sigmoid(),
    "torch.tanh": torch.tanh,
    "F.softplus": lambda x: F.softplus(x, beta=2),
    "F.dropout": dropped,
}


FAST = "F.relu inplace", ".relu_", "F.hardtanh bounds", "torch.clamp min=", ".clamp max=", "F.leaky_relu", "F.softplus"


@pytest.mark.parametrize("name", mostly_nightly(FUNCTIONS, FAST))
def test_functions_between_layers(name: str) -> None:
    input = torch.randn(4, 3, 12, 12)
    model = trained(Net(FUNCTIONS[name]), schemes.lsq(4, 4), input)
    checked = verify(model, build(model, input), input)
    assert checked.equal, f"\n{checked}"


def read_again(input: Tensor) -> Tensor:
    return F.relu(input, inplace=True) + input


def read_before(input: Tensor) -> Tensor:
    output = 2 * input
    input.relu_()
    return output + input


def result_unused(input: Tensor) -> Tensor:
    input.clamp_(-0.5, 0.5)
    return input


@pytest.mark.parametrize(
    ("function", "scheme"),
    [(read_again, schemes.bnn()), (read_before, schemes.lsq(4, 4)), (result_unused, schemes.bnn())],
)
def test_what_changes_a_value_that_others_read(function: Callable[[Tensor], Tensor], scheme: Scheme) -> None:
    input = torch.randn(4, 3, 12, 12)
    model = trained(Net(function), scheme, input)
    found = verify(model, build(model, input), input)
    assert found.equal, f"\n{found}"


def by_size(x: Tensor) -> Tensor:
    """Channels in the order of the first sample's means."""
    return x.index_select(1, x.mean((2, 3))[0].argsort())


def turned(x: Tensor) -> Tensor:
    """Pairs of channels as complex numbers, turned by a right angle."""
    pairs = torch.view_as_complex(x.unflatten(1, (-1, 2)).movedim(2, -1).contiguous()) * 1j
    return torch.view_as_real(pairs).movedim(-1, 2).flatten(1, 2)


@pytest.mark.parametrize("between", [by_size, turned])
def test_views_and_moves_that_are_no_selection_of_channels(between: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(3, 3, 8, 8)
    model = trained(Net(between), schemes.lsq(4, 4), x)
    frozen = build(model, x)
    assert torch.allclose(frozen(x), model(x), atol=1e-5)
    assert not frozen.untraced


def windows(x: Tensor) -> Tensor:
    """Overlapping rows, by strides."""
    n, c, h, w = x.shape
    rows = torch.as_strided(x.contiguous(), (n, c, h - 1, w), (c * h * w, h * w, w, 1))
    return x.softmax(1) + F.pad(rows, (0, 0, 0, 1))


def of_columns(x: Tensor) -> Tensor:
    """Pairs of columns as complex numbers."""
    x = x.softmax(1).transpose(2, 3).contiguous()
    return torch.view_as_real(torch.view_as_complex(x.unflatten(3, (-1, 2))) * 1j).flatten(3)


def exponents(x: Tensor) -> Tensor:
    """The last bit of the exponents of whole numbers."""
    return x.softmax(1) + ((x.round().view(torch.int32) >> 23) & 1).float()


@pytest.mark.parametrize("between", [windows, of_columns, exponents])
def test_functions_that_depend_on_strides(between: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(3, 3, 8, 8)
    model = trained(Net(between), schemes.lsq(4, 4), x)
    frozen = build(model, x)
    for given in (x, x.contiguous(memory_format=torch.channels_last)):
        assert torch.allclose(frozen(given), model(given), atol=1e-5)
    assert not frozen.untraced


def test_group_norms_are_exact_where_means_are_large() -> None:
    """As of contiguous images: of channels_last ones, which parts in C give, torch (2.15) loses digits."""
    model = trained(Net(lambda x: F.group_norm(x + 100, 16)), schemes.lsq(4, 4), x := torch.randn(2, 3, 8, 8))
    frozen = build(model, x)
    assert torch.allclose(frozen(x), model(x), atol=1e-4)
    assert frozen.unplanned.endswith("C has no group_norm")


def test_outputs_behind_functions_are_contiguous() -> None:
    """As a plan's, so that `view` takes them; without codes no NaN is looked for, which would copy them."""
    net = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3), nn.Softmax(1), nn.Conv2d(8, 8, 1))
    model = trained(net, schemes.bwn(), x := torch.randn(2, 3, 8, 8))
    frozen = build(model, x)
    assert "softmax" in frozen.unplanned
    assert frozen(x).is_contiguous()
    assert torch.allclose(frozen(x), model(x), atol=1e-5)


def test_an_instance_norm_is_one_function() -> None:
    model = trained(Net(nn.InstanceNorm2d(16)), schemes.lsq(4, 4), x := torch.randn(2, 3, 8, 8))
    frozen = build(model, x)
    assert verify(model, frozen, x).equal
    assert frozen.unplanned == "'between': C has no InstanceNorm2d"
    assert frozen(x[:0]).shape == model(x[:0]).shape


SAMPLES: dict[str, Callable[[Tensor], Tensor]] = {
    "the first two": lambda x: x[:2],
    "the first of each chunk of four": lambda x: x.split(4)[0],
    "two further": lambda x: x.roll(2, 0),
    "those behind them": lambda x: x.permute(1, 0, 2, 3)[:, -2:].transpose(0, 1),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_samples_that_are_moved_stay_so(name: str) -> None:
    """A program is recorded for two samples, with which these functions do nothing."""
    x = torch.randn(7, 3, 8, 8)
    model = trained(Net(SAMPLES[name]), schemes.lsq(4, 4), x)
    frozen = build(model, x)
    for count in (7, 5, 2):
        assert torch.allclose(frozen(x[:count]), model(x[:count]), atol=1e-5)
    assert not frozen.untraced


@pytest.mark.parametrize("times", [40, 41])
def test_pixels_are_repeated_as_torch_does(times: int) -> None:
    x = torch.randn(2, 3, 8, 8)
    model = trained(Net(lambda x: F.interpolate(F.avg_pool2d(x, 4), scale_factor=times)), schemes.lsq(4, 4), x)
    frozen = build(model, x)
    assert torch.allclose(frozen(x), model(x), atol=1e-5)
    assert bool(frozen.unplanned) == (times == 41)


def test_a_sample_that_is_no_batch_is_refused() -> None:
    model = trained(Net(F.relu), schemes.bnn(), input := torch.randn(2, 3, 12, 12))
    message = r"input has shape \(3, 12, 12\); a frozen model takes batches, of 4 dimensions: call it with .*unsqueeze"
    with pytest.raises(ValueError, match=message):
        build(model, input)(input[0])


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
    frozen = build(model, x)
    for _ in range(3):
        torch.testing.assert_close(frozen(x), model(x))


def test_values_that_are_changed_in_place_stay_in_the_graph() -> None:
    def change(model: nn.Module, x: Tensor) -> Tensor:
        x = x + model.get_buffer("start").view(1, -1, 1, 1)
        x += 1
        return x.relu_()

    model = trained(Changes(change), schemes.bnn(), x := torch.randn(4, 3, 9, 9))
    frozen = build(model, x)
    for _ in range(2):
        torch.testing.assert_close(frozen(x), model(x))
