"""The backward belongs to the forward that ran: mode, stage and schedules may change in between."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from conftest import METHODS
from settings import Recomputed
from torch import Tensor, nn

import qconv
from qconv import Scheme, schemes
from qconv.layers import QDeformConv2dPack
from qconv.quantizers import DoReFaGradient, Identity, Quantizer, Sign, Stages


def disturbances(layer: Any) -> list[Callable[[], object]]:
    """What may happen to a layer between its forward and its backward; weights are left to optimizers."""

    @torch.no_grad()
    def after_step() -> None:
        for quantizer in layer.modules():
            if hasattr(quantizer, "stream") and quantizer.stream is not None:
                quantizer.stream.after_step_()

    return [layer.eval, after_step, lambda: layer.set_progress_(0.7)]


def gradients(layer: Any, input: Tensor, disturb: Callable[[], object] | None) -> list[Tensor | None]:
    """Of the input and of every parameter; ``disturb`` is called before the backward."""
    input = input.clone().requires_grad_()
    output = layer(input)
    if disturb is not None:
        disturb()
    output.backward(torch.randn(output.shape, generator=torch.Generator().manual_seed(1)))
    return [input.grad, *(parameter.grad for parameter in layer.parameters())]


def same(found: list[Tensor | None], expected: list[Tensor | None]) -> bool:
    pairs = zip(found, expected, strict=True)
    return all(a is b is None or (a is not None and b is not None and a.equal(b)) for a, b in pairs)


def prepared(layer: Any, input: Tensor) -> Any:
    with torch.no_grad():
        layer(input)  # calibrates
    layer.set_progress_(0.2)
    return layer


def convolution(scheme: Scheme) -> qconv.QConv2d:
    return qconv.QConv2d(4, 6, 3, padding=1, scheme=scheme)


LAYERS: dict[str, Callable[[], Any]] = {
    **{name: partial(convolution, scheme) for name, scheme in METHODS.items()},
    "QLinear": lambda: qconv.QLinear(4, 6, scheme=schemes.recu()),
    "QConvTranspose2d": lambda: qconv.QConvTranspose2d(4, 6, 3, groups=2, scheme=schemes.irnet()),
    "QDeformConv2dPack": lambda: QDeformConv2dPack(4, 6, 3, scheme=schemes.bnn(stochastic=True)),
}


@pytest.mark.parametrize("number", range(3), ids=["eval", "after a step", "progress"])
@pytest.mark.parametrize("name", LAYERS)
def test_the_backward_is_that_of_the_forward(name: str, number: int) -> None:
    if number == 2 and name.startswith("inq"):
        pytest.skip("its progress writes into the weight, which autograd refuses")
    input = torch.randn(2, 4) if name == "QLinear" else torch.randn(2, 4, 5, 5)
    layer = prepared(LAYERS[name](), input)
    undisturbed = gradients(copy.deepcopy(layer), input, None)
    other = copy.deepcopy(layer)
    assert same(gradients(other, input, disturbances(other)[number]), undisturbed)


class Noisy(Quantizer):
    """A user's: it reads its mode and an attribute, in children too, and a buffer that a schedule writes."""

    roles = ("input", "weight")
    width: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("width", torch.tensor(1.0))
        self.factor = 1.0
        self.inner = nn.ModuleList([nn.Dropout(0.5)])

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.width,)

    def quantize(self, x: Tensor, *tensors: Tensor) -> Tensor:
        return x.sign() * tensors[0] * self.factor * (1.0 if self.inner[0].training else 0.5)

    def backward(self, grad: Tensor, x: Tensor, *tensors: Tensor) -> tuple[Tensor | None, ...]:
        return grad * self.quantize(x, *tensors) * (3.0 if self.training else 5.0), None

    def set_progress_(self, progress: float, x: Tensor | None) -> None:
        self.width.fill_(progress)
        self.factor = 1 + progress


@pytest.mark.parametrize("form", ["layer", "alone", "in stages"])
def test_of_quantizers_that_users_write(form: str) -> None:
    input = torch.randn(2, 4, 5, 5)
    if form == "alone":
        layer: Any = Noisy()
        layer.set_progress_(0.2, None)
        changes: list[Callable[[Any], object]] = [lambda q: q.eval(), lambda q: q.set_progress_(0.7, None)]
    else:
        make: Any = Noisy if form == "layer" else lambda: Stages([(0, Noisy), (0.5, Identity)])
        layer = prepared(qconv.QConv2d(4, 6, 3, scheme=Scheme("noisy", make, make)), input)
        changes = [lambda q: q.eval(), lambda q: q.set_progress_(0.7)]
    undisturbed = gradients(copy.deepcopy(layer), input, None)
    assert undisturbed[0] is not None
    assert undisturbed[0].abs().sum() > 0
    for change in changes:
        other = copy.deepcopy(layer)
        assert same(gradients(other, input, lambda change=change, other=other: change(other)), undisturbed)


def test_the_test_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Quantizer, "snapshot", lambda self: self)
    input = torch.randn(2, 4, 5, 5)
    for scheme, number in ((Scheme("noisy", Noisy, Noisy), 0), (schemes.two_stage(schemes.bnn()), 2)):
        layer = prepared(convolution(scheme), input)
        undisturbed = gradients(copy.deepcopy(layer), input, None)
        assert not same(gradients(layer, input, disturbances(layer)[number]), undisturbed)


def test_no_method_asks_for_its_mode(method: Scheme, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Quantizer, "snapshot", lambda self: self)
    input = torch.randn(2, 4, 5, 5)
    layer = prepared(convolution(method), input)
    undisturbed = gradients(copy.deepcopy(layer), input, None)
    assert same(gradients(layer, input, layer.eval), undisturbed)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_with_checkpointing(use_reentrant: bool) -> None:
    for scheme in (schemes.bnn(stochastic=True), schemes.irnet(), schemes.two_stage(schemes.reactnet())):
        input = torch.randn(2, 4, 5, 5)
        layer = prepared(convolution(scheme), input)
        undisturbed = gradients(copy.deepcopy(layer), input, None)
        again = copy.deepcopy(layer).requires_grad_()
        assert same(gradients(Recomputed(again, use_reentrant), input, None), undisturbed)


def test_a_snapshot_shares_tensors_and_nothing_else() -> None:
    stages = Stages([(0, Sign), (0.5, Identity)])
    taken = stages.snapshot()
    assert type(taken) is Stages
    assert (taken.training, taken.stage) == (True, 0)
    stages.eval()
    stages.set_progress_(0.7, None)
    assert (taken.training, taken.stage, taken.current.training) == (True, 0, True)
    assert (stages.training, stages.stage, stages.current.training) == (False, 1, False)
    grad = DoReFaGradient()
    assert grad.snapshot().stream.key is grad.stream.key


def test_compiled_in_one_graph() -> None:
    layer = prepared(qconv.QConv2d(4, 6, 3, scheme=schemes.irnet().with_grad(DoReFaGradient)), torch.randn(2, 4, 5, 5))
    input = torch.randn(2, 4, 5, 5)
    expected = gradients(copy.deepcopy(layer), input, None)
    compiled = torch.compile(copy.deepcopy(layer), fullgraph=True, backend="aot_eager")
    for found, wanted in zip(gradients(compiled, input, None), expected, strict=True):
        torch.testing.assert_close(found, wanted)
