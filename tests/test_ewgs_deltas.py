"""EWGS's δ from the Hessian, against differences of a gradient that is written out here."""

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional as F

import qconv
import qconv.ewgs_deltas
from qconv import schemes
from qconv.data import DigitsDataModule
from qconv.models import small_cnn
from qconv.training import Checkpoints, Classifier, EWGSDelta, RandomState, load_checkpoint, make_trainer

N = 3  # levels above 0, of 2 bits
STEP = 1e-5


def network(scheme: qconv.Scheme | None = None, delta: float = 0.0) -> nn.Sequential:
    """Two quantized convolutions with a batch norm between, and a quantized classifier."""
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1),
        nn.BatchNorm2d(3),
        nn.ReLU(),
        nn.Conv2d(3, 2, 3),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(2, 3),
    )
    qconv.convert(model, scheme or schemes.ewgs(2, 2, delta), skip=(), before_sign="keep")
    return model


def batch(seed: int = 5) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(4, 2, 5, 5, generator=generator), torch.randint(3, (4,), generator=generator)


def gradient_by(model: nn.Sequential, place: str) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Return the positions of a quantizer, and their gradient as a function of them.

    Other roundings add what they add at these positions, so that the function is smooth.
    """
    images, labels = (each.double() if each.is_floating_point() else each for each in batch())
    offsets: dict[str, Tensor] = {}

    def forward(given: Tensor | None) -> tuple[Tensor, Tensor]:
        x, found = images, None
        for name, layer in model.named_children():
            if not isinstance(layer, qconv.QuantizedLayer):
                x = layer(x)
                continue
            operands = {"input": x, "weight": layer.weight.detach()}
            values = {}
            for role, operand in operands.items():
                quantizer: Any = getattr(layer, f"{role}_quantizer")
                lower, upper, factor = (tensor.detach() for tensor in quantizer.tensors()[:3])
                p = ((operand - lower) / (upper - lower)).clamp(0, 1)
                key = f"{name}.{role}_quantizer"
                if key not in offsets:
                    offsets[key] = ((p * N).round() / N - p).detach()
                q = p + offsets[key]
                if key == place:
                    q = found = q.detach().requires_grad_() if given is None else given
                values[role] = factor * q if role == "input" else factor * (2 * q - 1)
            if isinstance(layer, nn.Linear):
                x = F.linear(values["input"], values["weight"], layer.bias)
            else:
                x = F.conv2d(values["input"], values["weight"], layer.bias, padding=layer.padding)  # pyright: ignore
        assert found is not None
        return F.cross_entropy(x, labels), found

    def gradient(q: Tensor) -> Tensor:
        q = q.detach().requires_grad_()
        return torch.autograd.grad(forward(q)[0], q)[0]

    return forward(None)[1].detach(), gradient


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traces by unit vectors in place of random ones."""

    def trace(gradient: Tensor, value: Tensor, generator: torch.Generator) -> float:
        del generator
        total = 0.0
        for index in range(value.numel()):
            unit = torch.zeros(value.numel(), dtype=value.dtype)
            unit[index] = 1
            (row,) = torch.autograd.grad(gradient, value, unit.view_as(value), retain_graph=True)
            total += row.flatten()[index].item()
        return total

    monkeypatch.setattr(qconv.ewgs_deltas, "probe", trace)


@pytest.mark.parametrize("delta", [0.0, 0.6])  # the present one does not matter
@pytest.mark.usefixtures("exact")
def test_deltas(delta: float) -> None:
    model = network(delta=delta).double()
    images, labels = batch()
    qconv.calibrate(model, [images.double()])
    expected = {}
    for place in (f"{layer}.{role}_quantizer" for layer in (0, 3, 6) for role in ("input", "weight")):
        q, gradient = gradient_by(model, place)
        trace = 0.0
        for index in range(q.numel()):
            ahead, behind = q.clone(), q.clone()
            ahead.view(-1)[index] += STEP
            behind.view(-1)[index] -= STEP
            trace += ((gradient(ahead) - gradient(behind)) / (2 * STEP)).view(-1)[index].item()
        expected[place] = max(0.0, trace / q.numel() / (3 * gradient(q).std().item()))
    found = qconv.set_ewgs_deltas(model, [(images.double(), labels)])
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-7)
    assert sum(value > 0 for value in found.values()) >= 4
    for place, value in found.items():
        assert model.get_submodule(place).delta == value


def test_nothing_else_changes() -> None:
    model = network().train()
    images, _ = batch()
    qconv.calibrate(model, [images])
    model(images).sum().backward()
    qconv.lean(model)
    before, grads = copy.deepcopy(model.state_dict()), [parameter.grad for parameter in model.parameters()]
    random = torch.get_rng_state()
    found = qconv.set_ewgs_deltas(model, [batch(), batch(6)], probes=4)
    assert torch.get_rng_state().equal(random)
    assert model.training
    assert all(layer.lean for layer in model if isinstance(layer, qconv.QuantizedLayer))
    for name, value in model.state_dict().items():
        assert value.equal(before[name]) or name.removesuffix(".delta") in found
    for parameter, grad in zip(model.parameters(), grads, strict=True):
        assert parameter.requires_grad
        assert parameter.grad is grad
    assert qconv.set_ewgs_deltas(model, [batch(), batch(6)], probes=4) == found
    assert qconv.set_ewgs_deltas(model, [batch(), batch(6)], probes=4, seed=1) != found
    model.compile()
    assert qconv.set_ewgs_deltas(model, [batch(), batch(6)], probes=4) == found


def test_a_backward_has_the_delta_of_its_forward() -> None:
    quantizer = qconv.quantizers.EWGSInput(2, delta=0.5)
    quantizer.initialize(torch.rand(64))
    x = torch.rand(64, requires_grad=True)
    grads = []
    for later in (0.5, 0.0):
        quantizer.delta.fill_(0.5)
        y = quantizer(x)
        quantizer.delta.fill_(later)
        grads.append(torch.autograd.grad(y.sum(), x)[0])
    assert grads[0].equal(grads[1])


def test_it_is_part_of_the_state() -> None:
    model, other = network(delta=0.25), network(delta=0.5)
    other.load_state_dict(model.state_dict())
    assert other.state_dict()["0.input_quantizer.delta"] == 0.25
    other = network(delta=0.5)
    other.load_state_dict({name: value for name, value in model.state_dict().items() if not name.endswith("delta")})
    assert other.state_dict()["0.input_quantizer.delta"] == 0.5
    wrong = model.state_dict() | {"0.input_quantizer.delta": torch.tensor(-1.0)}
    with pytest.raises(ValueError, match=r"delta \(=-1.0\) in the checkpoint must be at least 0 and finite"):
        other.load_state_dict(wrong)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: network(schemes.lsq(2, 2)), "model has no EWGS quantizer"),
        (
            lambda: nn.Sequential(
                qconv.QConv2d(2, 2, 1, scheme=schemes.ewgs()), qconv.QConv2d(2, 2, 1, scheme=schemes.lsq())
            ),
            r"quantizes its input by LSQInput, which has no second derivative",
        ),
        (network, "is not calibrated: call qconv.calibrate"),
    ],
)
def test_what_it_refuses(model: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        qconv.set_ewgs_deltas(model(), [batch()])


def test_a_shared_layer_and_one_without_effect() -> None:
    layer = qconv.QConv2d(2, 2, 3, padding=1, bias=False, scheme=schemes.ewgs(2, 2))
    model = nn.Sequential(layer, nn.ReLU(), layer, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    images = torch.rand(3, 2, 4, 4)
    qconv.calibrate(model, [images])
    found = qconv.set_ewgs_deltas(model, [(images, torch.tensor([0, 1, 0]))], probes=3)
    assert list(found) == ["0.input_quantizer", "0.weight_quantizer"]
    flat = qconv.set_ewgs_deltas(
        model, [(images, torch.tensor([0, 1, 0]))], loss=lambda outputs, labels: 0 * outputs.sum() + 0 * labels.sum()
    )
    assert set(flat.values()) == {0.0}


class StoppedError(Exception):
    """Ends a run in the middle of an epoch."""


class Recorded(EWGSDelta):
    """Notes the δ that each step has."""

    def __init__(self, stops_at: int | None = None, **options: int) -> None:
        super().__init__(**options)
        self.deltas: list[float] = []
        self.stops_at = stops_at

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.stops_at:
            raise StoppedError
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        model: Any = pl_module.model
        self.deltas.append(model.blocks[1].conv.weight_quantizer.delta.item())


def run(folder: Path, callback: EWGSDelta, ckpt_path: Path | None = None, scheme: qconv.Scheme | None = None) -> None:
    torch.manual_seed(0)
    model = qconv.convert(small_cnn(1, 10, width=4), scheme or schemes.ewgs(2, 2, 0.01))
    optimizer = partial(torch.optim.SGD, lr=0.01)
    callbacks = [RandomState(), callback, Checkpoints(folder, every_steps=1)]
    trainer = make_trainer(accelerator="cpu", max_epochs=3, callbacks=callbacks)
    data = DigitsDataModule(batch_size=512)
    trainer.fit(Classifier(model, optimizer), datamodule=data, ckpt_path=ckpt_path, weights_only=True)


def test_in_the_course_of_a_training(tmp_path: Path) -> None:
    whole = Recorded(every_epochs=2, batches=2, probes=2)
    run(tmp_path / "whole", whole)
    steps = len(whole.deltas) // 3
    assert steps == 3
    first, then = whole.deltas[: 2 * steps + 1], whole.deltas[2 * steps + 1 :]
    assert first == pytest.approx([0.01] * (2 * steps + 1))  # the mean of two batches, from the second on
    assert len(set(then)) == 1
    assert then[0] != first[0]
    with pytest.raises(StoppedError):
        run(tmp_path / "half", Recorded(stops_at=2 * steps + 1, every_epochs=2, batches=2, probes=2))
    rest = Recorded(every_epochs=2, batches=2, probes=2)
    run(tmp_path / "rest", rest, tmp_path / "half/last.ckpt")
    assert rest.deltas == then
    states = [load_checkpoint(tmp_path / name / "last.ckpt")["state_dict"] for name in ("whole", "rest")]
    assert all(value.equal(states[1][name]) for name, value in states[0].items())


def test_the_callback_takes_all_batches_of_a_short_epoch(tmp_path: Path) -> None:
    short = Recorded(every_epochs=1, batches=99, probes=1)
    run(tmp_path, short)
    assert len(set(short.deltas)) == 3
    assert short.found == []


def test_the_callback_refuses_early(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="model has no EWGS quantizer"):
        run(tmp_path, EWGSDelta(), scheme=schemes.lsq(2, 2))
    with pytest.raises(ValueError, match=r"batches \(=0\) must be at least 1"):
        EWGSDelta(batches=0)
