"""What a backward computes again is held for the next Function that needs it, and no longer."""

import copy
from typing import Any

import pytest
import torch
from test_lean import assert_same
from torch import Tensor, nn

import qconv
from qconv import schemes
from qconv.function import held, quantized_op, sign_weight
from qconv.function.held import Held

DEPTH = 4


class Stream(nn.Module):
    """A residual stream through ReLUs, which can't be walked backwards."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3, padding=1)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv2d(32, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32)) for _ in range(DEPTH)
        )
        self.relu, self.head = nn.ReLU(), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = self.relu(layer(x) + x)
        return self.head(x.mean((2, 3)))


def models() -> tuple[nn.Module, nn.Module, Tensor]:
    """A network, the same one made lean, and a batch."""
    torch.manual_seed(0)
    model, x = qconv.convert(Stream(), schemes.lsq(4, 4), skip=("first", "last")), torch.randn(4, 3, 16, 16)
    model(x)
    return model, qconv.lean(copy.deepcopy(model), exact=True), x


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    model(x).square().mean().backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def count_convolutions(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The convolutions that are computed again."""
    again, computed = quantized_op.output_again, []

    def counted(*arguments: object) -> Tensor:
        computed.append(1)
        return again(*arguments)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(quantized_op, "output_again", counted)
    return computed


def test_a_chain_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, lean, x = models()
    wanted = gradients(model, x)
    computed = count_convolutions(monkeypatch)
    assert_same(gradients(lean, x), wanted)
    assert len(computed) <= DEPTH + 2  # not more than `_MOST` are held
    computed.clear()
    monkeypatch.setattr(held, "_MOST", 0)
    assert_same(gradients(lean, x), wanted)
    assert len(computed) > 2 * DEPTH


def test_nothing_is_held_behind_a_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    _, lean, x = models()
    most, hold = [0], Held._hold

    def watched(self: Held, value: Tensor) -> None:
        hold(self, value)
        most.append(len(held._memory.held))

    monkeypatch.setattr(Held, "_hold", watched)
    gradients(lean, x)
    assert 2 <= max(most) <= held._MOST
    assert held._memory.__dict__ == {}


def test_what_an_error_left_is_forgotten() -> None:
    model, lean, x = models()
    wanted = gradients(model, x)

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    handle = lean.get_parameter("layers.2.1.weight").register_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        gradients(lean, x)
    assert held._memory.held
    handle.remove()
    assert_same(gradients(lean, x), wanted)
    assert held._memory.__dict__ == {}


def test_two_backwards_of_one_graph() -> None:
    model, lean, x = models()
    found = []
    for each in (model, lean):
        each.zero_grad()
        loss = each(x).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        found.append([parameter.grad for parameter in each.parameters()])
    assert_same(found[1], found[0])


def test_who_may_write_to_it_gets_it_alone() -> None:
    values: list[Tensor] = []

    class Reads(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Tensor, made: Held, owns: bool) -> Tensor:
            made.users += 1
            ctx.made, ctx.owns = made, owns
            return x.clone()

        @staticmethod
        def backward(ctx, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
            value = ctx.made.taken(ctx.owns)
            values.append(value)
            if ctx.owns:
                value.zero_()
            return grad_outputs[0], None, None

    made, x = Held(lambda: torch.ones(3)), torch.ones(3, requires_grad=True)
    for owns in (False, True, False, False):
        x = Reads.apply(x, made, owns)
    x.sum().backward()
    assert values[0] is values[1] is values[2]  # the third of four took it, and wrote to it
    assert values[3] is not values[2]
    assert values[3].tolist() == [1, 1, 1]
    assert not made.is_held


class Signs(Stream):
    """A residual stream that is walked backwards, and computed again from its start for each layer."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x.mean((2, 3)))


@pytest.mark.parametrize("most", [held._BYTES_OF_FORMS, 0])
def test_a_weight_is_packed_once_in_a_backward(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    torch.manual_seed(0)
    plain, x = qconv.convert(Signs(), schemes.bireal(), skip=("first", "last")), torch.randn(4, 3, 16, 16)
    wanted = gradients(plain, x)
    model, computed, filters = qconv.lean(plain, exact=True), [], sign_weight._filters
    loss = model(x).square().mean()

    def counted(weight: Tensor, *others: Any) -> Any:
        computed.append(weight)
        return filters(weight, *others)

    monkeypatch.setattr(held, "_BYTES_OF_FORMS", most)
    monkeypatch.setattr(sign_weight, "_filters", counted)
    model.zero_grad()
    loss.backward()
    assert_same([p.grad for p in model.parameters() if p.grad is not None], wanted)
    assert len(computed) >= DEPTH
    assert (len(computed) == DEPTH) == bool(most)
