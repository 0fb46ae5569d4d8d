"""Losses, initial weights, schedules and batch norm statistics: the options of a recipe."""

import copy
import json
import shlex
import sqlite3
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from conftest import same
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import OmegaConf
from runs import config
from safetensors.torch import save_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn

import qconv
from qconv import schemes
from qconv.training import CheckpointError, make_trainer
from qconv.training.assemble import build_loss, made_data
from qconv.training.classifier import WeightedMean
from qconv.training.initial_weights import describe_quantizers, load_weights
from qconv.training.loggers import started_loggers
from qconv.training.losses import CrossEntropy, Distillation
from qconv.training.schedules import constant, cosine, linear, steps


def rates(make: Any, total: int, lr: float = 1.0, **options: Any) -> list[float]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=lr)
    scheduler = make(optimizer, total_steps=total, **options)
    found = []
    for _ in range(total):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def test_schedules_step_by_step() -> None:
    assert rates(linear, 5) == [1.0, 0.75, 0.5, 0.25, 0.0]
    assert rates(linear, 6, warmup=1 / 3, final=0.5) == pytest.approx([0.5, 1.0, 1.0, 5 / 6, 4 / 6, 0.5])
    assert rates(steps, 8, at=[0.5, 0.75]) == pytest.approx([1, 1, 1, 1, 0.1, 0.1, 0.01, 0.01])
    assert rates(steps, 4, at=[0.5], factor=0.5, warmup=0.5) == [0.5, 1.0, 0.5, 0.5]
    assert rates(cosine, 5, warmup=0.4) == pytest.approx([0.5, 1.0, 1.0, 0.5, 0.0], abs=1e-12)
    assert rates(cosine, 3, lr=2.0, warmup=0.0, final=0.5) == pytest.approx([2.0, 1.5, 1.0])
    assert rates(cosine, 1, lr=2.0, warmup=0.0) == [2.0]
    assert rates(constant, 3) == [1.0, 1.0, 1.0]


def batch() -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(6, 4), torch.randint(0, 4, (6,)), torch.randn(6, 8)


def test_label_smoothing() -> None:
    logits, labels, images = batch()
    targets = 0.9 * F.one_hot(labels, 4) + 0.1 / 4
    expected = -(targets * logits.log_softmax(1)).sum(1).mean()
    torch.testing.assert_close(CrossEntropy(0.1)(logits, labels, images), expected)


@pytest.mark.parametrize(("share", "temperature"), [(1.0, 1.0), (0.3, 4.0), (0.0, 1.0)])
def test_distillation_against_its_formula(share: float, temperature: float) -> None:
    teacher = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))
    before = copy.deepcopy(teacher.state_dict())
    loss = Distillation(teacher, share=share, temperature=temperature)
    logits, labels, images = batch()
    logits.requires_grad_()
    found = loss.train()(logits, labels, images)
    target = (teacher(images) / temperature).softmax(1)
    imitation = -(target * (logits / temperature).log_softmax(1)).sum(1).mean()
    expected = share * temperature**2 * imitation + (1 - share) * F.cross_entropy(logits, labels)
    torch.testing.assert_close(found, expected)
    found.backward()
    assert logits.grad is not None
    assert all(parameter.grad is None for parameter in teacher.parameters())
    assert all(value.equal(before[name]) for name, value in teacher.state_dict().items())  # evaluated, not trained
    assert not loss.state_dict()
    assert not list(loss.parameters())
    assert next(loss.to(torch.float64).teacher.parameters()).dtype == torch.float64


PICTURES = SimpleNamespace(in_channels=1, num_classes=3, classes=["a", "b", "c"])
FLOAT = {"_target_": "qconv.schemes.identity"}
RESNET = {
    "_target_": "qconv.models.resnet20",
    "shortcut": "per_conv",
    "activation": {"_target_": "torch.nn.Hardtanh", "_partial_": True},
}


def loss_of(teacher: dict[str, Any], content: Any, path: Path) -> Any:
    torch.save(content, path)
    node = {"_target_": "qconv.training.losses.Distillation", "teacher": teacher, "weights": str(path)}
    return build_loss(OmegaConf.create(node), PICTURES)


@pytest.mark.parametrize("part", ["activation", "shortcut"])
def test_a_teacher_of_another_function_is_refused(part: str, tmp_path: Path) -> None:
    """Its tensors have the same names and shapes."""
    made = instantiate(RESNET, in_channels=1, num_classes=3)
    file = {"state_dict": made.state_dict(), "config": {"model": RESNET, "scheme": FLOAT}}
    other = {key: value for key, value in RESNET.items() if key != part}
    with pytest.raises(ValueError, match=r"were trained in qconv\.models\.resnet20\(shortcut=") as error:
        loss_of(other, file, tmp_path / "a.ckpt")
    (word,) = shlex.split(str(error.value).rpartition(": add ")[2])
    (override,) = OverridesParser.create().parse_overrides([word])
    assert override.key_or_group == "loss.teacher"
    images = torch.randn(2, 1, 16, 16)
    loss = loss_of(cast(dict[str, Any], override.value()), file, tmp_path / "a.ckpt")
    assert torch.equal(loss.teacher(images), made.eval()(images))


def test_teachers_that_are_refused(tmp_path: Path) -> None:
    path, quantized = tmp_path / "a.ckpt", {"model": RESNET, "scheme": {"_target_": "qconv.schemes.bnn"}}
    three, five = (instantiate(RESNET, in_channels=1, num_classes=classes).state_dict() for classes in (3, 5))
    mixed = {"classes": ["a", "c", "b"], "pictures": None}
    for file, error, message in (
        (five, InstantiationException, r"loss\.weights \(=.*a\.ckpt\) do not fit the teacher: 'fc' has 5"),
        ({"state_dict": three, "config": {}, "trained_on": mixed}, ValueError, r"'c' as class 1, which is 'b' in the"),
        ({"state_dict": three, "config": quantized}, ValueError, r"were trained with scheme qconv\.schemes\.bnn\(\)"),
    ):
        with pytest.raises(error, match=message):
            loss_of(RESNET, file, path)
    node = {"_target_": "qconv.training.losses.Distillation", "teacher": RESNET, "weights": None}
    with pytest.raises(
        ValueError, match=r"loss.weights must name the teacher's file, because qconv.models.resnet20 has random"
    ):
        build_loss(OmegaConf.create(node), PICTURES)


def test_a_teacher_sees_images_normalized_as_it_was_trained(tmp_path: Path) -> None:
    file = {"state_dict": {}, "config": {"model": RESNET}}
    file["trained_on"] = {"classes": None, "pictures": {"size": [1, 8, 8], "resize": None, "mean": [9.0], "std": [3.0]}}
    torch.save(file, tmp_path / "a.ckpt")
    words = ("loss.teacher={_target_:qconv.models.resnet20}", f"loss.weights={tmp_path / 'a.ckpt'}", "run_dir=x")
    data = made_data(config("loss=distillation", *words), None, "")
    data.setup("fit")
    assert (*data.normalize.mean, *data.normalize.std) == pytest.approx((9.0, 3.0))
    images = next(iter(data.val_dataloader()))[0]
    assert images.min().item() == pytest.approx(-3)  # of 0, and nothing is below


@pytest.mark.parametrize("config", [None, {}, {"model": {"_target_": "mine.network"}, "scheme": FLOAT}])
def test_teachers_from_elsewhere_are_taken(config: Any, tmp_path: Path) -> None:
    state = instantiate(RESNET, in_channels=1, num_classes=3).state_dict()
    loss = loss_of(RESNET, state if config is None else {"state_dict": state, "config": config}, tmp_path / "a.ckpt")
    assert same(loss.teacher.state_dict(), state)


def network(scheme: qconv.Scheme | None) -> nn.Module:
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 3, 3))
    return model if scheme is None else qconv.convert(model, scheme, skip=())


@pytest.mark.parametrize("scheme", [schemes.bnn(), schemes.lsq(2, 2), schemes.shift_ps(), schemes.ttq()], ids=str)
def test_weights_of_a_float_network(scheme: qconv.Scheme, tmp_path: Path) -> None:
    source, model = network(None), network(scheme)
    torch.save(source.state_dict(), tmp_path / "float.pt")
    load_weights(model, str(tmp_path / "float.pt"))
    expected = qconv.convert(source, scheme, skip=())
    assert model[2].quantized_weight().equal(expected[2].quantized_weight())  # pyright: ignore


def saved(model: nn.Module, path: Path) -> str:
    """As a checkpoint of `train.py` has it."""
    state = {f"model.{name}": value for name, value in model.state_dict().items()}
    torch.save({"state_dict": state, "quantizers": describe_quantizers(model)}, path)
    return str(path)


def trained(scheme: qconv.Scheme) -> nn.Module:
    """With learned tensors that no new network has."""
    model = network(scheme)
    qconv.calibrate(model, [torch.randn(2, 2, 8, 8)])
    with torch.no_grad():
        for quantizer in model.modules():
            if isinstance(quantizer, qconv.Quantizer):
                for parameter in quantizer.parameters():
                    parameter.mul_(1.25)
    return model


def test_weights_of_other_quantizers(tmp_path: Path) -> None:
    """All of the same; a range of other bits; of a step of other bits, or what another quantizer has, nothing."""

    def loaded(before: qconv.Scheme, now: qconv.Scheme) -> tuple[Any, Any]:
        source, model = trained(before), network(now)
        load_weights(model, saved(source, tmp_path / "a.ckpt"))
        return source, model

    source, model = loaded(schemes.lsq(4, 4), schemes.lsq(4, 4))
    assert same(model.state_dict(), source.state_dict())
    assert model[2].input_quantizer.calibrated
    source, model = loaded(schemes.lsq(4, 4), schemes.lsq(2, 2))
    expected = qconv.QConv2d(2, 4, 3, scheme=schemes.lsq(2, 2))
    expected.load_state_dict({"weight": source[0].weight, "bias": source[0].bias})
    assert model[0].weight_quantizer.step.equal(expected.weight_quantizer.step)
    assert not model[0].input_quantizer.calibrated
    source, model = loaded(schemes.apot(4, 4), schemes.apot(3, 3))
    for place in ("input_quantizer", "weight_quantizer"):
        assert getattr(model[0], place).alpha.equal(getattr(source[0], place).alpha)
    source, model = loaded(schemes.pact(4, 4), schemes.apot(4, 4))
    assert model[0].input_quantizer.alpha == 8
    torch.save(source.state_dict(), tmp_path / "plain.pt")  # which doesn't say what its quantizers are
    other: Any = network(schemes.pact(4, 4))
    load_weights(other, str(tmp_path / "plain.pt"))
    assert other[0].input_quantizer.alpha == 8
    assert other[0].weight.equal(source[0].weight)


def test_weights_that_do_not_fit(tmp_path: Path) -> None:
    model, path = network(schemes.bnn()), tmp_path / "weights.pt"

    def fails(state: Any) -> str:
        torch.save(state, path)
        with pytest.raises(CheckpointError) as error:
            load_weights(model, str(path))
        return str(error.value)

    state = network(None).state_dict()
    wrong = fails(state | {"2.weight": torch.zeros(3, 5, 3, 3)})
    assert "'2.weight' is (3, 5, 3, 3) in it, (3, 4, 3, 3) in this network (8 of its 9 tensors fit)" in wrong
    assert "'0.weight' is (5, 2, 3, 3) in it, (4, 2" in fails(state | {"0.weight": torch.zeros(5, 2, 3, 3)})
    assert "it has 'fc.weight', which this network has not" in fails(state | {"fc.weight": torch.zeros(1)})
    renamed = {name.replace("0.weight", "00.weight"): value for name, value in state.items()}
    assert "it has '00.weight', which this network has not; nearest: '0.weight' and " in fails(renamed)
    assert "'0.bias' is missing" in fails({name: value for name, value in state.items() if name != "0.bias"})
    assert "not a checkpoint of qconv train or a state dict" in fails([1, 2])
    with pytest.raises(CheckpointError, match="there is no such file"):
        load_weights(model, str(tmp_path / "none.pt"))
    path.write_bytes(b"nonsense")
    with pytest.raises(CheckpointError, match="cut off or no weights file"):
        load_weights(model, str(path))


@pytest.mark.parametrize("kind", ["another head", "no head"])
@pytest.mark.parametrize("scheme", [None, schemes.lsq(4, 4)], ids=str)
def test_another_head_starts_anew(scheme: qconv.Scheme | None, kind: str, tmp_path: Path) -> None:
    source, model = network(None), network(scheme)
    state = source.state_dict()
    state |= {"2.weight": torch.randn(7, 4, 3, 3), "2.bias": torch.randn(7)}
    if kind == "no head":
        state = {name: value for name, value in state.items() if not name.startswith("2.")}
    torch.save(state, tmp_path / "w.pth")
    head: Any = model.get_submodule("2")
    before = {name: value.clone() for name, value in head.state_dict().items()}
    told = load_weights(model, str(tmp_path / "w.pth"))
    ending = {"another head": "'2' has 7 outputs in it and 3 here, and is initialized"}
    assert told.endswith(ending.get(kind, "it has no last layer '2', which is initialized"))
    assert all(value.equal(before[name]) for name, value in head.state_dict().items())
    assert model[0].weight.equal(source[0].weight)  # pyright: ignore


def test_files_of_other_programs(tmp_path: Path) -> None:
    source = network(None)
    source[1].running_mean.fill_(3)  # pyright: ignore
    state = source.state_dict()
    older = {name: value for name, value in state.items() if "num_batches" not in name}
    parallel = {f"module.{name}": value for name, value in state.items()}
    files = {"plain": state, "older": older, "parallel": {"state_dict": parallel, "epoch": 3}, "timm": {"model": state}}
    for name, content in files.items():
        torch.save(content, tmp_path / name, _use_new_zipfile_serialization=name != "older")
        model = network(schemes.bwn())
        assert load_weights(model, str(tmp_path / name)) == ""
        assert all(value.equal(state[key]) for key, value in qconv.float_state_dict(model).items() if key in content)
        assert model[1].running_mean.equal(source[1].running_mean)  # pyright: ignore
    average = torch.optim.swa_utils.AveragedModel(source)
    average.update_parameters(source)
    raw = network(None).state_dict() | {"0.weight": torch.zeros_like(state["0.weight"])}
    for content, told in (
        (average.state_dict(), "the weights are the average of 1 models"),
        ({"model": raw, "model_ema": average.state_dict()}, "the weights are the average of 1 models"),
        ({"state_dict": raw, "state_dict_ema": state, "epoch": 3}, "using the averaged weights, 'state_dict_ema'"),
    ):
        torch.save(content, tmp_path / "average")
        assert load_weights(model := network(None), str(tmp_path / "average")) == told
        assert same(model.state_dict(), state)
    torch.save({"model": state, "swa_model": average.state_dict()}, tmp_path / "two")
    told = load_weights(network(None), str(tmp_path / "two"))
    assert told == "using the weights of 'model', not those of 'swa_model'"
    save_file(state, tmp_path / "w.safetensors")
    load_weights(model := network(None), str(tmp_path / "w.safetensors"))
    assert model[2].weight.equal(source[2].weight)  # pyright: ignore
    old = (tmp_path / "older").read_bytes()
    (tmp_path / "older").write_bytes(old[:-50])
    with pytest.raises(CheckpointError, match="the file is damaged"):
        load_weights(model, str(tmp_path / "older"))


def test_the_sign_of_inputs_is_that_of_the_file(tmp_path: Path) -> None:
    source = trained(schemes.lsq(4, 4))
    assert source[0].input_quantizer.signed  # pyright: ignore
    for asked in (None, True, False):
        model = network(schemes.lsq(4, 4, signed_input=asked))
        load_weights(model, saved(source, tmp_path / "four.ckpt"))
        quantizer: Any = model.get_submodule("0.input_quantizer")
        assert quantizer.signed is (asked is not False)
        assert quantizer.calibrated is (asked is not False)


@pytest.mark.parametrize(("known", "native"), [({"avx512_bf16": True}, True), ({"bf16": False}, False), ({}, False)])
@pytest.mark.parametrize("asked", ["bf16-if-native", "bf16-mixed", "32-true", "auto"])
def test_bfloat16_on_processors(
    known: dict[str, bool], native: bool, asked: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: known)
    wanted = {"bf16-if-native": "bf16-mixed" if native else "32-true", "auto": "32-true"}
    assert make_trainer(accelerator="cpu", precision=asked).precision == wanted.get(asked, asked)
    said = [text for text in caplog.messages if "no instructions for bfloat16" in text]
    assert len(said) == (asked == "bf16-mixed" and not native)
    assert all("trainer.precision=bf16-mixed" in text and "trainer.precision=32-true" in text for text in said)
    assert make_trainer(accelerator="cpu", precision="16-mixed").precision == "bf16-mixed"
    assert "using bf16-mixed, because mixed precision on a CPU is bfloat16" in caplog.text


def test_figures_of_a_training_in_16_bits_are_summed_in_32() -> None:
    mean = WeightedMean().to(torch.bfloat16)
    for _ in range(352):
        mean.update(torch.tensor(0.45, dtype=torch.bfloat16), 128)
    assert mean.compute().item() == pytest.approx(0.45, rel=1e-2)
    mean.reset()
    assert mean.sums.dtype == torch.float32
    mean.update(torch.tensor(0.45, dtype=torch.bfloat16), 99)
    assert mean.compute().item() == torch.tensor(0.45, dtype=torch.bfloat16).item()
    assert mean.double().to(torch.float64).sums.dtype == torch.float64


# Loggers


OVERRIDES = "overrides={blocks.1.*:{_target_:qconv.schemes.bwn}}"  # no name of a parameter for MLflow
SMALL = "trainer=cpu", "trainer.max_epochs=1", "model.width=4", "report=false"


@pytest.mark.nightly
def test_several_loggers_in_a_sweep(tmp_path: Path) -> None:
    """Each of the two runs has its own: Weights & Biases goes on with an open run unless it is ended."""
    words = ["logger=[csv,tensorboard,wandb,mlflow]", *SMALL, OVERRIDES, "-m", "seed=1,2", "run_dir='runs/${seed}'"]
    command = [sys.executable, "-m", "qconv", "train", *words]
    shown = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True).stdout
    assert shown.count("runs/1: loading PyTorch and Lightning") == shown.count(": loading ") == 1
    assert "│ 1, 2  │" in shown  # the table of the sweep, whose runs are elsewhere
    with sqlite3.connect(tmp_path / "mlflow.db") as database:
        found = "select run_uuid from params where key = 'seed' and value = ?"
        runs = [database.execute(found, (str(seed),)).fetchall() for seed in (1, 2)]
        logged = "select value from metrics where key = 'test_accuracy' and run_uuid = ?"
        by_mlflow = [database.execute(logged, one).fetchall() for (one,) in runs]
    for seed, figures in zip((1, 2), by_mlflow, strict=True):
        run = tmp_path / "runs" / str(seed)
        accuracy = json.loads((run / "result.json").read_text())["test_accuracy"]
        assert figures == [(pytest.approx(accuracy),)]
        events = EventAccumulator(str(run / "tensorboard")).Reload()
        assert [event.value for event in events.Scalars("test_accuracy")] == [pytest.approx(accuracy)]
        assert "test_accuracy" in (run / "csv/metrics.csv").read_text().splitlines()[0]
        assert f"seed: {seed}" in (run / "csv/hparams.yaml").read_text()
        (offline,) = (run / "wandb").glob("offline-run-*")  # of no other run
        assert b"test_accuracy" in next(offline.glob("*.wandb")).read_bytes()


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow"])
def test_a_missing_logger_names_its_extra(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = {"tensorboard": "TensorBoardLogger", "wandb": "WandbLogger", "mlflow": "MLFlowLogger"}[name]

    def refuse(self: object, **settings: object) -> None:  # as Lightning does
        raise ModuleNotFoundError(f"Requirement {name} not met. {settings}")

    monkeypatch.setattr(f"pytorch_lightning.loggers.{target}.__init__", refuse)
    cfg = config(f"logger={name}", f"run_dir={tmp_path}")
    message = rf'logger={name} needs {name}: pip install "qconv\[{name}\]"'
    with pytest.raises(ImportError, match=message), started_loggers(cfg):
        pass


def test_the_address_of_mlflow_stays_out_of_the_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    address = f"sqlite:///{tmp_path}/secret.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    cfg = config("logger=mlflow", f"run_dir={tmp_path}")
    assert "secret" not in OmegaConf.to_yaml(cfg, resolve=True)
    addresses: list[str] = []
    monkeypatch.setattr(
        "pytorch_lightning.loggers.MLFlowLogger.__init__", lambda self, **given: addresses.append(given["tracking_uri"])
    )
    for given in (None, "sqlite:///mine.db"):
        instantiate({**cfg.logger.mlflow, "tracking_uri": given})
    assert addresses == [address, "sqlite:///mine.db"]
