"""EWGS's δ from the Hessian, against differences of a gradient that is written out here."""

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from conftest import same
from pytorch_lightning import LightningModule, Trainer
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

import qconv
import qconv.after_training.ewgs_deltas
from qconv import schemes
from qconv.data import DigitsDataModule
from qconv.models import small_cnn
from qconv.training import Checkpoints, Classifier, EWGSDelta, Progress, RandomState, load_checkpoint, make_trainer
from qconv.training.initial_weights import describe_quantizers, load_weights

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

    monkeypatch.setattr(qconv.after_training.ewgs_deltas, "probe", trace)


@pytest.mark.usefixtures("exact")
def test_deltas() -> None:
    model = network(delta=0.6).double()  # which does not matter
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
    assert found == pytest.approx(expected, rel=1e-7, abs=1e-9)
    assert sum(value > 0 for value in found.values()) >= 4
    for place, value in found.items():
        assert model.get_submodule(place).delta == value


def test_nothing_else_changes() -> None:
    model = network().train()
    images, _ = batch()
    qconv.calibrate(model, [images])
    model(images).sum().backward()
    qconv.lean(model)
    before, grads = copy.deepcopy(model.state_dict()), [copy.deepcopy(each.grad) for each in model.parameters()]
    random = torch.get_rng_state()
    found = qconv.set_ewgs_deltas(model, [batch(), batch(6)], probes=4)
    assert torch.get_rng_state().equal(random)
    assert model.training
    assert all(layer.lean for layer in model if isinstance(layer, qconv.QuantizedLayer))
    for name, value in model.state_dict().items():
        assert value.equal(before[name]) or name.removesuffix(".delta") in found
    for parameter, grad in zip(model.parameters(), grads, strict=True):
        assert parameter.requires_grad
        assert (parameter.grad is None) == (grad is None)
        assert grad is None or torch.equal(cast(Tensor, parameter.grad), grad)
    assert qconv.set_ewgs_deltas(model, [batch(), batch(6)], probes=4) == found
    assert qconv.set_ewgs_deltas(model, [batch(), batch(6)], probes=4, seed=1) != found
    model.compile()
    assert qconv.set_ewgs_deltas(model, [batch(), batch(6)], probes=4) == found


SHAPES: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "grouped": (nn.Conv2d(4, 4, 3, groups=2, stride=2, padding=1), (2, 4, 6, 6)),
    "transposed": (nn.ConvTranspose2d(4, 3, 3, stride=2), (2, 4, 6, 6)),
    "1d": (nn.Conv1d(4, 3, 3, padding="same", padding_mode="circular"), (2, 4, 6)),
    "linear": (nn.Linear(4, 3), (2, 5, 4)),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_it_computes_what_the_network_does(shape: str, dtype: torch.dtype) -> None:
    layer, size = SHAPES[shape]
    model = nn.Sequential(copy.deepcopy(layer))
    qconv.convert(model, schemes.ewgs(4, 8), skip=(), before_sign="keep").to(dtype)
    images = torch.randn(size).to(dtype)
    qconv.calibrate(model, [images])
    outputs = []

    def loss(output: Tensor, labels: Tensor) -> Tensor:
        outputs.append(output.detach())
        return (output * labels).square().mean()

    with torch.no_grad():
        expected = model.eval()(images)
    qconv.set_ewgs_deltas(model, [(images, torch.ones(()))], probes=1, loss=loss)
    error = 1e-6 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(outputs[0], expected, rtol=error, atol=error * expected.abs().max().item())


def test_delta_ends_where_gradients_would_change_their_sign() -> None:
    model = network()
    names = list(qconv.after_training.ewgs_deltas.ewgs_quantizers(model))
    found = qconv.after_training.ewgs_deltas.write_deltas(model, [dict.fromkeys(names, 99.0)])
    assert set(found.values()) == {2.0 * N}
    quantizer: Any = model.get_submodule(names[0])
    quantizer.calibrated = True
    x = torch.linspace(-0.999, 0.999, 101, requires_grad=True)
    quantizer(x).sum().backward()
    assert x.grad is not None
    assert (x.grad >= -1e-6).all()
    assert x.grad.min() < 0.05 * x.grad.max()


def test_leanness_and_forwards_stay_those_of_each_layer() -> None:
    model = network()
    qconv.calibrate(model, [batch()[0]])
    qconv.lean(model[0])
    own = model[3].forward
    model[3].forward = lambda x: own(x)
    mine = model[3].forward
    qconv.set_ewgs_deltas(model, [batch()], probes=1)
    assert [bool(model[index].lean) for index in (0, 3, 6)] == [True, False, False]
    assert model[3].forward is mine
    assert "forward" not in model[0].__dict__


def test_a_layer_that_evaluation_does_not_call_keeps_its_delta() -> None:
    class Two(nn.Sequential):
        def forward(self, input: Tensor) -> Tensor:
            return self[0](input) if not self.training else self[0](input) + self[1](input)

    model = Two(*(qconv.QLinear(3, 2, scheme=schemes.ewgs(2, 2, 0.25)) for _ in range(2)))
    model(torch.rand(4, 3))
    found = qconv.set_ewgs_deltas(model, [(torch.rand(4, 3), torch.tensor([0, 1, 1, 0]))], probes=2)
    assert list(found) == ["0.input_quantizer", "0.weight_quantizer"]
    other: Any = model[1]
    assert other.input_quantizer.delta == other.weight_quantizer.delta == 0.25


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


def test_what_is_for_the_gradient_alone_is_not_shipped(tmp_path: Path) -> None:
    model = network(delta=0.25)
    qconv.calibrate(model, [batch()[0]])
    file = tmp_path / "model.safetensors"
    qconv.set_ewgs_deltas(model, [batch()], probes=2)
    qconv.save_packed(model, file)
    assert not any("delta" in name for name in load_file(file))
    loaded = qconv.load_packed(file, qconv.to_float(network()))
    assert loaded.state_dict()["0.input_quantizer.delta"] == 0.25
    model.eval()
    assert loaded.eval()(batch()[0]).equal(model(batch()[0]))


def test_a_network_that_starts_from_another_has_its_own_delta(tmp_path: Path) -> None:
    model, file = network(delta=0.25), tmp_path / "weights.pt"
    qconv.calibrate(model, [batch()[0]])
    torch.save({"state_dict": model.state_dict(), "quantizers": describe_quantizers(model)}, file)
    other = network(delta=0.5)
    load_weights(other, str(file))
    now = other.state_dict()
    for name, value in model.state_dict().items():
        assert now[name].equal(torch.tensor(0.5) if name.endswith("delta") else value)
    other.load_state_dict(model.state_dict())  # whose state it is part of
    assert other.state_dict()["0.input_quantizer.delta"] == 0.25


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (partial(network, schemes.lsq(2, 2)), "model has no EWGS quantizer"),
        (
            lambda: nn.Sequential(*(qconv.QConv2d(2, 2, 1, scheme=s) for s in (schemes.ewgs(), schemes.lsq()))),
            "quantizes its input by LSQInput, which has no second derivative",
        ),
        (network, "is not calibrated: call qconv.calibrate"),
        (lambda: nn.Sequential(weight_norm(qconv.QConv2d(2, 3, 5, scheme=schemes.ewgs()))), "remove_parametrizations"),
        (
            lambda: nn.Sequential(qconv.QDeformConv2d(2, 3, 3, scheme=schemes.ewgs())),
            "has no second derivative, which the Hessian",
        ),
    ],
)
def test_what_it_refuses(model: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        qconv.set_ewgs_deltas(model(), [batch()])


def test_what_batches_are() -> None:
    model = network()
    qconv.calibrate(model, [batch()[0]])
    for wrong in (batch(), batch()[0], [batch()[0]], [[*batch(), 3]]):
        with pytest.raises(TypeError, match="must be pairs of inputs and labels"):
            qconv.set_ewgs_deltas(model, wrong)  # pyright: ignore
    with pytest.raises(ValueError, match="at least one batch"):
        qconv.set_ewgs_deltas(model, [])
    with pytest.raises(TypeError, match=r"input has dtype torch.float64 and weight torch.float32"):
        qconv.set_ewgs_deltas(model, [(batch()[0].double(), batch()[1])])
    with torch.no_grad():
        model[0].weight.mul_(2)  # pyright: ignore
    qconv.set_ewgs_deltas(model, [batch()], probes=1)  # the ranges follow
    diverged = model.state_dict() | {"1.weight": torch.full((3,), torch.inf)}
    model.load_state_dict(diverged)
    with pytest.raises(FloatingPointError, match="the network has diverged"):
        qconv.set_ewgs_deltas(model, [batch()], probes=1)


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


class Logged(Recorded):
    """Counts the updates."""

    updates = 0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        before = len(self.found)
        EWGSDelta.on_train_batch_start(self, trainer, pl_module, batch, batch_idx)
        self.updates += before > 0 and not self.found


def run(folder: Path, callback: EWGSDelta, ckpt_path: Path | None = None, scheme: qconv.Scheme | None = None) -> None:
    torch.manual_seed(0)
    model = qconv.convert(small_cnn(1, 10, width=4), scheme or schemes.ewgs(2, 2, 0.01))
    optimizer = partial(torch.optim.SGD, lr=0.01)
    callbacks = [Progress(), RandomState(), callback, Checkpoints(folder, every_steps=1)]
    trainer = make_trainer(accelerator="cpu", max_epochs=3, callbacks=callbacks)
    data = DigitsDataModule(batch_size=512)
    trainer.fit(Classifier(model, optimizer), datamodule=data, ckpt_path=ckpt_path, weights_only=True)


@pytest.mark.nightly
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
    assert same(*states)


@pytest.mark.parametrize(
    ("scheme", "updates"),
    [
        # layers wait for their first batch
        (schemes.layerwise(schemes.ewgs(2, 2), inputs=(0.0, 0.3), weights=(0.3, 0.6)), 2),
        (schemes.staged([(0, schemes.ewgs(4, 4)), (0.5, schemes.ewgs(2, 2))]), 2),
    ],
)
def test_stages(tmp_path: Path, scheme: qconv.Scheme, updates: int) -> None:
    logged = Logged(every_epochs=1, batches=2, probes=1)
    run(tmp_path, logged, scheme=scheme)
    assert logged.updates == updates


def test_the_last_stage_decides(tmp_path: Path) -> None:
    for scheme in (schemes.lsq(2, 2), schemes.staged([(0, schemes.ewgs(4, 4)), (0.5, schemes.lsq(2, 2))])):
        with pytest.raises(ValueError, match="model has no EWGS quantizer"):
            run(tmp_path, EWGSDelta(), scheme=scheme)
    with pytest.warns(UserWarning, match=r"every_epochs \(=3\) is not below the 3 epochs of the run"):
        run(tmp_path, EWGSDelta(every_epochs=3))


def test_the_callback_takes_all_batches_of_a_short_epoch(tmp_path: Path) -> None:
    short = Recorded(every_epochs=1, batches=99, probes=1)
    run(tmp_path, short)
    assert len(set(short.deltas)) == 3
    assert short.found == []


def test_probes_stop_when_their_mean_settles(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: dict[int, int] = {}
    drawn = [1.0, 1.5, 1.1, 1.2001, 1.2]  # the means are 1, 1.25, 1.2 and 1.200025: less than a thousandth more

    def probe(gradient: Tensor, value: Tensor, generator: torch.Generator) -> float:
        del gradient, generator
        counts[id(value)] = counts.get(id(value), 0) + 1
        return drawn[counts[id(value)] - 1]

    monkeypatch.setattr(qconv.after_training.ewgs_deltas, "probe", probe)
    model = network()
    qconv.calibrate(model, [batch()[0]])
    qconv.set_ewgs_deltas(model, [batch()], probes=5)
    assert set(counts.values()) == {4}


def test_stages_within_stages() -> None:
    inner = schemes.staged([(0, schemes.ewgs(4, 4)), (0.5, schemes.ewgs(2, 2))])
    model = network(schemes.layerwise(inner, inputs=(0.1, 0.2), weights=(0.1, 0.2))).train()
    assert not qconv.after_training.ewgs_deltas.obstacle(model, at_last=True)
    qconv.set_progress(model, 0.9)
    model(batch()[0])
    assert len(qconv.set_ewgs_deltas(model, [batch()])) == 6
    never = network(schemes.staged([(0, schemes.lsq()), (1, schemes.ewgs())]))
    assert "no EWGS" in qconv.after_training.ewgs_deltas.obstacle(never, at_last=True)
