"""`train.py` as its user meets it: the default run, what it leaves behind, resuming, evaluating, mistakes."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf, read_write
from PIL import Image
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.utilities.exceptions import SIGTERMException
from runs import CONFIGS, QUICK, Send, command, config, place, rows_of, run_until, same_files, send, stop, terminate
from settings import mostly_nightly
from torch import nn
from torch._dynamo.utils import counters

import qconv
from qconv.cli import main as cli, train as program, train_as
from qconv.cli.first_run import claim
from qconv.cli.sweep import SweepTable, read_runs
from qconv.data import DigitsDataModule
from qconv.data.digits import split_digits
from qconv.models import small_cnn
from qconv.onnx import OnnxModel, compare_onnx
from qconv.packed import read_header
from qconv.training import load_checkpoint
from qconv.training.report.result import check_objective, objective
from qconv.training.run import evaluate, train
from qconv.training.shipping import ship

SCHEMES = sorted(name for name in qconv.schemes.__all__ if name != "Scheme")
ONE = (*QUICK, "trainer.max_epochs=1")
SMALL = ("trainer=cpu", "trainer.max_epochs=1", "data.batch_size=256")


@pytest.fixture
def line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Runs the command line in this process: importing Lightning takes another one 7 s."""

    def run(*arguments: str) -> None:
        monkeypatch.setenv("GOMP_SPINCOUNT", "10000")
        monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
        monkeypatch.chdir(tmp_path)
        program.run_main("train.py", sys.argv[1:])

    return run


@pytest.fixture
def fails(line: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs the command line in this process and returns the error that it ends with."""

    def run(*arguments: str) -> str:
        with pytest.raises(SystemExit) as exit:
            line(f"hydra.run.dir={tmp_path / 'run'}", *arguments)
        assert "Traceback" not in capsys.readouterr().err
        assert isinstance(exit.value.code, str)  # printed to stderr, exit status 1
        assert exit.value.code.startswith("error: ")
        return exit.value.code

    return run


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A run of four epochs that was never stopped: its folder and result."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, train(config(*QUICK, f"run_dir={folder}"))


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """The images to test with, and their labels."""
    data = DigitsDataModule()
    data.setup("test")
    images, labels = data.splits["test"]
    return images, labels


@pytest.mark.nightly
def test_the_default_run(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run = subprocess.run(command(f"hydra.run.dir={folder}"), cwd=tmp_path, capture_output=True, text=True, check=True)
    assert run.stderr == ""
    for shown in ("blocks.1.conv", "bnn()", "1,327,104", "test accuracy", "float size", "packed size", "590,856 bytes"):
        assert shown in run.stdout
    for chatter in ("Warning", "Tip", "GPU available", "max_epochs"):
        assert chatter not in run.stdout
    assert f"report: {folder / 'report.html'}" in run.stdout
    result = json.loads((folder / "result.json").read_text())
    assert result["test_accuracy"] >= 0.97
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_what_a_run_leaves_behind(whole: tuple[Path, Any]) -> None:
    folder, result = whole
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    assert names == [
        *("checkpoints/best.ckpt", "checkpoints/last.ckpt", "config.yaml", "curves.png", "diagnostics.csv"),
        *("diagnostics.png", "metrics.csv", "model.safetensors", "result.json"),
    ]
    stored = json.loads((folder / "result.json").read_text())
    assert {"seconds", "seed", "commit", "versions", "machine"} <= stored.keys()
    scores = [float(row["val_accuracy"]) for row in rows_of(folder / "metrics.csv")]
    best = scores.index(max(scores))
    expected = {"precision": "32-true", "epochs": 4, "scheme": "bnn()", "model": "qconv.models.small_cnn(width=4)"}
    expected |= {"test_accuracy": result.test_accuracy, "best_epoch": best}
    expected |= {"val_accuracy_best": scores[best], "val_accuracy_final": scores[3]}
    assert {name: stored[name] for name in expected} == expected
    assert load_checkpoint(folder / "checkpoints/best.ckpt")["epoch"] == best
    assert "_target_: qconv.schemes.bnn" in (folder / "config.yaml").read_text()


def test_what_a_run_exports(whole: tuple[Path, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, _ = whole
    packed, written = folder / "model.safetensors", tmp_path / "model"
    assert cli(["export", str(folder), "--to", "packed", "--out", str(written)]) == 0
    assert capsys.readouterr().out == f"{written}: {written.stat().st_size:,} bytes\n"
    assert written.read_bytes() == packed.read_bytes()
    unpacked = tmp_path / "run"
    shutil.copytree(folder, unpacked, ignore=shutil.ignore_patterns("*.safetensors"))
    pictures, _ = digits()
    for run, words in ((folder, ()), (unpacked, ("--opset", "21"))):
        file = tmp_path / "model.onnx"
        assert cli(["export", str(run), "--to", "onnx", "--out", str(file), *words]) == 0
        found = compare_onnx(qconv.load_packed(packed), file, pictures)
        assert (found.decisions, found.close) == (0, len(pictures))
        assert OnnxModel(file).session.get_inputs()[0].shape[2:] == ["height", "width"]


def test_what_a_run_ships_is_verified(
    whole: tuple[Path, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = whole
    assert cli(["verify", str(folder)]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[-1].startswith("equal; outputs differ from the trained ones by up to ")
    assert told[-1].endswith("; 0 of 64 predicted classes differ")
    assert cli(["summary", str(folder)]) == 0
    other = tmp_path / "run"
    shutil.copytree(folder, other)
    checkpoint = load_checkpoint(other / "checkpoints/best.ckpt")
    checkpoint["state_dict"]["model.fc.bias"][0] += 1
    torch.save(checkpoint, other / "checkpoints/best.ckpt")
    assert cli(["verify", str(other)]) == 1
    told_of_it = capsys.readouterr().out
    assert "times what rounding explains; outputs differ from the trained ones by up to " in told_of_it
    config = other / "config.yaml"
    for text, words in (
        (config.read_text().replace("qconv.data.Digits", "qconv.data.No"), "NoDataModule"),
        ("model: [", "is damaged"),
        ("model: 3", "is not the configuration of a run"),
    ):
        config.write_text(text)
        assert cli(["verify", str(other)]) == 1
        told_of_it = capsys.readouterr().err
        assert told_of_it.startswith(f"qconv: error: {config}")
        assert words in told_of_it


def test_the_packed_model_is_the_one_that_was_tested(whole: tuple[Path, Any]) -> None:
    folder, result = whole
    path = folder / "model.safetensors"
    model = qconv.load_packed(path)
    pictures, labels = digits()
    assert (model(pictures).argmax(1) == labels).float().mean().item() == pytest.approx(result.test_accuracy)
    assert path.stat().st_size == result.about["packed_bytes"]
    assert 0 < path.stat().st_size - qconv.summarize(model, (1, 8, 8)).packed_bytes < 500  # network, images, classes
    found = read_header(path)
    assert found.classes == list("0123456789")
    assert found.pictures is not None
    raw = split_digits(0)["test"][0]
    normal = (255 * raw - torch.tensor(found.pictures.mean)) / torch.tensor(found.pictures.std)
    torch.testing.assert_close(normal, pictures)


def test_what_is_not_final_is_not_shipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = DigitsDataModule()
    data.setup("test")
    model = qconv.convert(small_cnn(1, 10, width=4), qconv.schemes.inq())
    ship(config(*QUICK, f"run_dir={tmp_path}"), model, data, {})
    assert "no packed model is written: layer 'blocks.1.conv' (QConv2d, inq(weight_bits=5" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
    ship(config(*QUICK, f"run_dir={tmp_path / 'none'}"), small_cnn(1, 10, width=4), data, {})
    assert "no packed model is written: [Errno 2]" in capsys.readouterr().out


def test_the_test_split_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[str] = []
    loader = DigitsDataModule.loader

    def spy(self: DigitsDataModule, split: str, **arguments: Any):
        reads.append(split)
        return loader(self, split, **arguments)

    monkeypatch.setattr(DigitsDataModule, "loader", spy)
    train(config(*QUICK, "trainer.max_epochs=2", f"run_dir={tmp_path}"))
    assert reads.count("test") == 1
    assert reads[-1] == "test"


def test_a_stopped_run_resumes_bit_for_bit(whole: tuple[Path, Any], tmp_path: Path) -> None:
    folder, result = whole
    half, rest = tmp_path / "half", tmp_path / "rest"
    train(config(*QUICK, f"run_dir={half}", stop(1)))
    assert load_checkpoint(half / "checkpoints/last.ckpt")["epoch"] == 1
    torch.rand(5)
    resumed = train(config(*QUICK, f"run_dir={rest}", f"resume={half}"))
    assert same_files(folder, rest)
    for name in ("test_accuracy", "test_loss", "val_accuracy_best", "val_accuracy_final", "best_epoch", "epochs"):
        assert getattr(resumed, name) == getattr(result, name)
    assert load_checkpoint(rest / "checkpoints/best.ckpt")["epoch"] == result.best_epoch


@pytest.mark.parametrize(
    ("words", "stopped", "saved"),
    [
        (("+trainer.accumulate_grad_batches=3",), (0, 4), (0, 6)),  # gradients that add up are not cut
        # levels of float weights are those at the start of the epoch
        pytest.param(("scheme=identity",), (1, 5), (1, 6), marks=pytest.mark.nightly),
        pytest.param(("trainer.precision=bf16-true", "scheme=dorefa"), (1, 4), (1, 5), marks=pytest.mark.nightly),
        pytest.param(("callbacks=ema", "scheme=lsq"), (1, 6), (1, 7), marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_a_terminated_run_goes_on_bit_for_bit(
    words: tuple[str, ...], stopped: tuple[int, int], saved: tuple[int, int], tmp_path: Path
) -> None:
    words = (*QUICK, "trainer.max_epochs=2", *words)
    one, cut = tmp_path / "whole", tmp_path / "cut"
    result = train(config(*words, f"run_dir={one}"))
    terminate(*stopped, cut, *words)
    assert place(cut / "checkpoints/last.ckpt") == saved
    train(config(*words, f"run_dir={cut}", "resume=auto"))
    assert same_files(one, cut)
    flips = [float(row["flip_rate"]) > 0.9 for row in rows_of(cut / "diagnostics.csv")]
    assert all(flips) == ("scheme=identity" in words)
    best = one / "checkpoints/best.ckpt"
    again = evaluate(config(*words, f"evaluate={best}", f"run_dir={tmp_path / 'again'}"))
    assert again.test_loss == result.test_loss


@pytest.mark.nightly
def test_a_killed_run_resumes_bit_for_bit(whole: tuple[Path, Any], tmp_path: Path) -> None:
    folder, _ = whole
    killed = tmp_path / "killed"
    run_until(signal.SIGKILL, 2, 7, killed, "callbacks.checkpoints.every_steps=3")
    assert place(killed / "checkpoints/last.ckpt") == (2, 7)
    assert not (killed / "result.json").exists()
    train(config(*QUICK, f"run_dir={killed}", "resume=auto"))
    assert same_files(folder, killed)


def test_sigterm_ends_the_program_with_its_code(
    line: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With which clusters put a job into the queue again."""
    run = tmp_path / "run"
    with pytest.raises(SystemExit) as exit:
        line(*ONE, send(signal.SIGTERM, 0, 3), f"run_dir={run}")
    assert exit.value.code == 128 + signal.SIGTERM
    assert capsys.readouterr().err == f"stopped by SIGTERM; resume={run} continues from the last checkpoint\n"


def test_a_run_in_another_precision_ships_float32(tmp_path: Path) -> None:
    words = (*ONE, "trainer.precision=bf16-true", f"run_dir={tmp_path}")
    result = train(config(*words, "loss.label_smoothing=0.1", "reestimate_bn=true"))
    assert 0 < result.test_accuracy < 1
    weights = load_checkpoint(tmp_path / "checkpoints/last.ckpt")["state_dict"]
    assert weights["model.fc.weight"].dtype == torch.bfloat16
    assert qconv.load_packed(tmp_path / "model.safetensors").fc.weight.dtype == torch.float32  # pyright: ignore
    assert cli(["verify", str(tmp_path)]) == 0


class LogsMore(Callback):
    """Logs a figure of its own."""

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        pl_module.log("test_more", 0.25)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        pl_module.log("val_more", 0.5)


def test_figures_of_a_callback_of_ones_own(tmp_path: Path) -> None:
    words = (*ONE, "+callbacks.more={_target_:test_train.LogsMore}")
    train(config(*words, f"run_dir={tmp_path / 'run'}"))
    best = tmp_path / "run/checkpoints/best.ckpt"
    evaluate(config(*words, f"evaluate={best}", f"run_dir={tmp_path / 'again'}"))
    results = [json.loads((tmp_path / name).read_text()) for name in ("run/result.json", "again/evaluation.json")]
    assert [each["test_more"] for each in results] == [0.25, 0.25]
    assert results[1]["val_more"] == 0.5
    assert [each["precision"] for each in results] == ["32-true", "32-true"]


def test_a_run_that_is_ended_between_two_validations(tmp_path: Path) -> None:
    every = ("+trainer.check_val_every_n_epoch=2", stop(2))
    result = train(config(*QUICK, *every, f"run_dir={tmp_path / 'run'}"))
    rows = rows_of(tmp_path / "run/metrics.csv")
    assert [bool(row["val_accuracy"]) for row in rows] == [False, True, True]
    assert float(rows[2]["val_accuracy"]) == pytest.approx(result.val_accuracy_final)
    last = tmp_path / "run/checkpoints/last.ckpt"
    again = evaluate(config(*QUICK, f"evaluate={last}", f"run_dir={tmp_path / 'again'}"))
    assert again.val_accuracy == result.val_accuracy_final


def test_a_training_in_16_bits_that_diverges_names_the_layer(tmp_path: Path) -> None:
    """A lean layer that computes its input again does not speak before: codes keep no NaN."""
    words = (*QUICK, "trainer.precision=16-true", "lean=true", f"run_dir={tmp_path}")
    with pytest.raises(FloatingPointError, match=r"epoch 0, step \d+: NaN or inf in .* of layer 'blocks"):
        train(config(*words))


@pytest.mark.nightly
def test_a_profiler_reports(line: Callable[..., None], capfd: pytest.CaptureFixture[str]) -> None:
    line(*SMALL, "model.width=4", "+trainer.profiler=simple")
    assert "run_training_batch" in "".join(capfd.readouterr())


def test_the_checkpoint_has_the_batch_norms_of_the_test(tmp_path: Path) -> None:
    run = tmp_path / "run"
    result = train(config(*ONE, "reestimate_bn=true", f"run_dir={run}"))
    last, checkpoint = (load_checkpoint(run / f"checkpoints/{name}.ckpt") for name in ("last", "best"))
    state = checkpoint["state_dict"]
    differ = {name.rpartition(".")[2] for name, tensor in last["state_dict"].items() if not tensor.equal(state[name])}
    assert differ >= {"running_mean", "running_var"}
    assert "weight" not in differ
    assert cli(["evaluate", str(run)]) == 0
    evaluation = json.loads((run / "evaluation.json").read_text())
    assert evaluation["test_loss"] == pytest.approx(result.test_loss)
    assert evaluation["val_accuracy"] == pytest.approx(result.val_accuracy_best)
    assert cli(["verify", str(run)]) == 0


def test_an_epoch_without_validation_is_not_the_best(tmp_path: Path) -> None:
    """Lightning keeps the figures of the epoch before: here of the float network, of the first stage."""
    every = ("scheme=two_stage", "+trainer.check_val_every_n_epoch=2")
    result = train(config(*QUICK, *every, f"run_dir={tmp_path}"))
    assert (result.best_epoch, result.quantized) == (3, True)
    assert result.val_accuracy_best == result.val_accuracy_final


@pytest.mark.parametrize("hook", mostly_nightly(["on_train_end", "on_test_batch_start"], {"on_train_end"}))
def test_sigterm_after_training(hook: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Send, hook, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(SIGTERMException):
        train(config(*ONE, f"run_dir={tmp_path}", send(signal.SIGTERM, -1, 0)))
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert not (tmp_path / "result.json").exists()


def test_the_learning_rate_of_an_epoch_is_the_mean_of_its_steps(tmp_path: Path) -> None:
    sums = ("trainer.max_epochs=2", "data.batch_size=100", "+trainer.accumulate_grad_batches=5", "report=false")
    train(config(*sums, "trainer=cpu", "model.width=4", f"run_dir={tmp_path}"))
    found = [float(row["lr"]) for row in rows_of(tmp_path / "metrics.csv")]
    steps = [0.01 * (1 + math.cos(math.pi * max(step - 1, 0) / 4)) / 2 for step in range(6)]  # one warms up
    assert found == pytest.approx([sum(steps[:3]) / 3, sum(steps[3:]) / 3], rel=1e-6)


def test_the_checkpoint_of_a_run_in_stages_is_quantized(tmp_path: Path) -> None:
    words = (*QUICK, "scheme=two_stage")
    result = train(config(*words, "trainer.max_epochs=3", "scheme.start=0.6", f"run_dir={tmp_path}"))
    assert (result.best_epoch, result.quantized) == (2, True)
    early = train(config(*words, "trainer.max_epochs=1", "scheme.start=1", f"run_dir={tmp_path / 'first'}"))
    assert early.quantized  # a first stage that is a run of its own: its weights are said to be float


@pytest.mark.nightly
def test_a_compiled_run_learns_the_same(tmp_path: Path) -> None:
    words = (*QUICK, "trainer.max_epochs=3", "scheme=bwn", "lean=true", "data.batch_size=1000")  # of two sizes
    losses = []
    counters.clear()
    for compiled in (False, True):
        folder = tmp_path / str(compiled)
        train(config(*words, f"compile={compiled}", f"run_dir={folder}"))
        rows = rows_of(folder / "metrics.csv")
        losses.append([float(row[name]) for row in rows for name in ("train_loss", "val_loss")])
        assert (counters["frames"]["ok"] > 0) == compiled
    assert len(losses[0]) == 6
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)
    names = [load_checkpoint(path)["state_dict"].keys() for path in sorted(tmp_path.glob("*/checkpoints/last.ckpt"))]
    assert names[0] == names[1]


@pytest.mark.nightly
def test_a_compiled_run_that_calibrates_itself_stays_in_one_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counters.clear()
    whole = nn.Module.compile  # Dynamo decides on the pieces; the compiler behind it would take a minute
    monkeypatch.setattr(nn.Module, "compile", lambda model, mode: whole(model, backend="eager"))
    train(config(*ONE, "scheme=lsq", "compile=true", f"run_dir={tmp_path}"))
    assert counters["frames"]["ok"] > 0
    assert not counters["graph_break"]


def test_evaluate(whole: tuple[Path, Any], tmp_path: Path) -> None:
    folder, result = whole
    best = folder / "checkpoints/best.ckpt"
    before = best.read_bytes()
    teacher = ("loss=distillation", "loss.teacher={_target_:qconv.models.small_cnn}", "loss.weights=none.pt")
    for words in ((), teacher):  # which is not needed
        evaluation = evaluate(config(*QUICK, *words, f"run_dir={tmp_path}", f"evaluate={best}"))
        assert (evaluation.val_accuracy, evaluation.epoch) == (result.val_accuracy_best, result.best_epoch)
        assert (evaluation.test_accuracy, evaluation.test_loss) == (result.test_accuracy, result.test_loss)
    figures = json.loads((tmp_path / "evaluation.json").read_text())
    assert figures["test_accuracy"] == result.test_accuracy
    assert figures["packed_bytes"] == result.about["packed_bytes"] == (folder / "model.safetensors").stat().st_size
    assert figures["compression"] == result.about["compression"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.yaml", "evaluation.json"]
    assert best.read_bytes() == before


FAST = ("inq", "layerwise", "shift_ps")  # the other methods are alike in what a run does


@pytest.mark.parametrize("scheme", mostly_nightly(SCHEMES, FAST))
def test_every_scheme_trains(scheme: str, tmp_path: Path) -> None:
    epochs = {"inq": 4, "two_stage": 2, "staged": 2, "layerwise": 5}.get(scheme, 1)
    arguments = (*SMALL, "model.width=16", "report=false", f"scheme={scheme}", f"trainer.max_epochs={epochs}")
    result = train(config(*arguments, f"run_dir={tmp_path}"))
    assert result.quantized
    assert result.about["scheme"].startswith(f"{scheme}(")
    assert (result.about["packed_bytes"] < result.about["float_bytes"]) == (scheme != "identity")


@pytest.mark.nightly
@pytest.mark.parametrize(
    "overrides",
    [
        ("optimizer=sgd", "scheduler=constant", "model.width=4", "logger=csv"),
        ("model=resnet20", "skip=[first,last,stages.0.*]", "overrides={stages.2.*:{_target_:qconv.schemes.bwn}}"),
        ("optimizer=bop", "scheduler=constant", "model.width=4"),
        ("scheme=lsq", "first_last=w8a8", "grad_quantizer=int8", "model.width=4"),
        ("first_last={_target_:qconv.schemes.minmax}", "model.width=4"),
        (
            *("loss=distillation", "loss.teacher={_target_:qconv.models.small_cnn,width:4}", "model.width=4"),
            *("scheduler=steps", "optimizer=sgd", "optimizer.rules={norms:{weight_decay:0}}", "reestimate_bn=true"),
        ),
    ],
    ids=["groups", "skip", "bop", "bits", "first_last", "recipe"],
)
def test_other_choices_train(overrides: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if "loss=distillation" in overrides:
        torch.save(small_cnn(1, 10, width=4).state_dict(), tmp_path / "teacher.pt")
        overrides = (*overrides, f"loss.weights={tmp_path / 'teacher.pt'}")
    result = train(config(*overrides, *SMALL, f"run_dir={tmp_path / 'run'}"))
    assert result.epochs == 1
    if "model=resnet20" in overrides:
        shown = capsys.readouterr().out.splitlines()
        for stage, scheme in enumerate(("float", "bnn", "bwn")):  # layers that repeat share a row
            rows = [line.split() for line in shown if line.startswith(f"stages.{stage}.")]
            assert rows
            assert all({"float", "bnn", "bwn"} & {*row} == {scheme} for row in rows), rows


def test_every_option_composes() -> None:
    options = {folder.name: [path.stem for path in folder.glob("*.yaml")] for folder in CONFIGS.iterdir()}
    for experiment in options.pop("experiment"):
        assert config(f"experiment={experiment}", "run_dir=x").seed == 1
    for number in range(max(map(len, options.values()))):  # one of each group at a time
        chosen = [f"{group}={names[number]}" for group, names in options.items() if number < len(names)]
        assert config(*chosen, "run_dir=x").seed == 1


def test_help_shows_the_groups(line: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train_as("train.py", ["--help"]) == 0
    shown = capsys.readouterr().out
    words = " ".join(shown.split())
    for group in CONFIGS.iterdir():
        if group.is_dir():
            options = SCHEMES if group.name == "scheme" else sorted(path.stem for path in group.glob("*.yaml"))
            assert f"{group.name} {', '.join(options)}" in words
    assert "usage: train.py [KEY=VALUE ...]" in words
    assert "scheme=bwn another quantization scheme" in words
    assert f"first_last={config().first_last}" in words
    assert max(len(line) for line in shown.splitlines() if line != str(CONFIGS / "config.yaml")) <= 80
    assert list(tmp_path.iterdir()) == []


BETWEEN = "validations must be at the end of epochs"
FROM_LIGHTNING = "+callbacks.more={_target_:pytorch_lightning.callbacks."


EARLY = [  # before the run has a folder
    ("scheme=shift_q scheme.weight_bits=1", "weight_bits (=1)"),
    ("model.width=0", "width (=0) must be at least 1"),
    ("model.widht=3", "widht"),
    ("model._target_=torchvision.models.resnet18", "is called with in_channels, num_classes: "),
    ("model=torchvision_model model.name=resnet19", "name (='resnet19') must be a network of torchvision (nearest: "),
    ("skip=[first,nonsense]", "nonsense"),
    ("evaluate=none.ckpt", "checkpoint none.ckpt: there is no such file"),
    ("init_from=3", "weights file 3: there is no such file"),
    ("evaluate=3", "checkpoint 3: there is no such file"),
    ("resume=auto evaluate=b.ckpt", "evaluate (=b.ckpt) and resume (=auto) exclude each other"),
    ("optimizer._target_=torch.optim.RMSprop", "write optimizer.optimizer.path=torch.optim.RMSprop"),
    ("seed=-1", "seed (=-1) must be a whole number from 0 to 4294967295"),
    ("overrides=bwn", "overrides (='bwn') must be a dictionary of patterns and schemes"),
    ("overrides={fc:bwn}", "overrides['fc'] (='bwn') must be a qconv.Scheme, such as qconv.schemes.bwn()"),
    ("run_dir=", "run_dir (='') must be a folder"),
]
LATE = [
    ("trainer.max_epochs=0", "trainer.max_epochs (=0) must be a whole number of at least 1"),
    ("scheme=inq trainer.max_epochs=3", "max_epochs (=3) must be at least 4: the last stage begins at"),
    ("+trainer.check_val_every_n_epoch=9", "check_val_every_n_epoch (=9) must divide trainer.max_epochs (=1)"),
    ("trainer.max_epochs=3 +trainer.check_val_every_n_epoch=2", "check_val_every_n_epoch (=2) must divide"),
    ("+trainer.val_check_interval=0.5", f"trainer.val_check_interval (=0.5): {BETWEEN}"),
    ("+trainer.callbacks=[]", "trainer.callbacks must not be given: callbacks.NAME._target_= adds"),
    ("+trainer.logger=false", "trainer.logger must not be given: logger= adds to those of the run"),
    ("+trainer.max_steps=3", "max_steps (=3) must not be given: quantizers' schedules count epochs"),
    ("+trainer.max_time=00:00:01:00", "max_time must not be given: training would end before the quantizers"),
    ("+trainer.limit_train_batches=0", "trainer.limit_train_batches (=0) must be above 0"),
    ("+trainer.limit_val_batches=0", "trainer.limit_val_batches (=0) must be above 0"),
    ("+trainer.limit_test_batches=0", "trainer.limit_test_batches (=0) must be above 0"),
    ("+trainer.accumulate_grad_batches=0", "accumulate_grad_batches (=0) must be a whole number of at least 1"),
    ("step_rules=[qconv.optim.OvSW]", "'qconv.optim.OvSW' must be a qconv.optim.StepRule, such as {_target_:"),
    ("optimizer.rules=[1]", "rules (=[1]) must be a mapping of rules to options"),
    (FROM_LIGHTNING + "GradientAccumulationScheduler,scheduling:{0:2}}", "changes the number of steps"),
    ("+callbacks.more=ema", "callbacks: 'ema' must be a callback of Lightning"),
    ("+callbacks.more={a:3}", "callbacks: {'a': 3} must be a callback of Lightning"),
    (FROM_LIGHTNING + "LearningRateFinder}", "try several rates, such as -m optimizer.lr="),
    (FROM_LIGHTNING + "BatchSizeFinder}", "give data.batch_size=N"),
    ("trainer=gpu", "trainer=gpu needs a GPU, and torch finds none"),
]


@pytest.mark.parametrize(("words", "said"), mostly_nightly([*EARLY, *LATE], [*EARLY[:4], *LATE[:4]]))
def test_values_that_make_no_run(words: str, said: str, fails: Callable[..., str], tmp_path: Path) -> None:
    if words == "trainer=gpu" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert said in fails(*SMALL, *words.split())
    assert (words, said) in LATE or not written(tmp_path)


def written(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and ".hydra" not in path.parts]


def test_folders_of_the_same_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def claimed(words: list[str]) -> str:
        with initialize_config_dir(str(CONFIGS), version_base="1.3"):
            cfg = compose("config", return_hydra_config=True)
        with read_write(cfg.hydra):
            cfg.hydra.run.dir, cfg.hydra.overrides.hydra = f"{tmp_path}/12-00-00", words
        return claim(cfg, "run").name

    assert [claimed([]) for _ in range(3)] == ["12-00-00", "12-00-00-2", "12-00-00-3"]
    assert claimed([f"hydra.run.dir={tmp_path}/12-00-00"]) == "12-00-00"
    monkeypatch.setenv("RANK", "1")  # a process beside that one
    assert claimed([]) == "12-00-00"


def test_the_whole_traceback_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "scheme=nonsense"])
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(Exception, match="Could not find 'scheme/nonsense'"):
        program.run_main("train.py", sys.argv[1:])
    assert os.environ["HYDRA_FULL_ERROR"] == "1"


def test_the_environment_stays_the_callers(fails: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Or programs that this process starts later end errors with a traceback."""
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    assert f"there is no scheme=nonsense; there are {', '.join(SCHEMES)}" in fails("scheme=nonsense")
    assert "HYDRA_FULL_ERROR" not in os.environ


@pytest.mark.parametrize("key", mostly_nightly(["hydra.run.dir", "run_dir"], {"run_dir"}))
def test_a_folder_that_cannot_be_written(key: str, fails: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "run"
    error = fails(f"{key}={folder}", *QUICK)
    assert str(folder) in error
    assert "Not a directory" in error
    assert (tmp_path / "file").read_text() == ""


@pytest.mark.nightly
def test_checkpoints_of_other_runs(whole: tuple[Path, Any], fails: Callable[..., str], tmp_path: Path) -> None:
    last = whole[0] / "checkpoints/last.ckpt"
    before = last.read_bytes()
    error = fails(*QUICK, "scheme=bwn", f"evaluate={last}")
    assert f"checkpoint {last} was trained with scheme qconv.schemes.bnn(padding_value=0, stochastic=False)" in error
    asked = "qconv.schemes.bwn(detach_scale=False, center=False, paper_gradient=False, numel_gradient=False)"
    assert f"but this run has {asked}: qconv train resume={whole[0]} continues with the config of its run" in error
    for word in ("model.width=8", "optimizer.lr=0.5", f"init_from={last}"):
        group = word.partition("=")[0].partition(".")[0]
        assert f"was trained with {group} " in fails(*QUICK, word, "resume=auto", f"run_dir={whole[0]}")
    for words in (("model=resnet20",), (*QUICK, "grad_quantizer=fp8"), (*QUICK, "first_last=w8")):
        assert f"was trained with {words[-1].partition('=')[0]} " in fails(*words, f"evaluate={last}")
    error = fails(*QUICK, "callbacks=ema", "resume=auto", f"run_dir={whole[0]}")
    assert "was trained with callbacks [Checkpoints(" in error
    assert "MovingAverage(decay=0.999)]: " in error
    cut = tmp_path / "cut.ckpt"
    cut.write_bytes(before[:-100])
    assert f"checkpoint {cut}: cut off or no checkpoint" in fails(*QUICK, f"evaluate={cut}")
    assert last.read_bytes() == before
    assert not written(tmp_path / "run")


def test_more_classes_in_the_checkpoint_than_in_the_data(
    whole: tuple[Path, Any], fails: Callable[..., str], tmp_path: Path
) -> None:
    for split in ("train", "test"):
        for label in ("cat", "dog"):
            folder = tmp_path / "tree" / split / label
            folder.mkdir(parents=True)
            for index in range(4):
                Image.new("L", (8, 8), 60 * index).save(folder / f"{index}.png")
    tree = ("data=image_folder", f"data.root={tmp_path / 'tree'}", "data.channels=1", f"+data.cache={tmp_path}")
    last = whole[0] / "checkpoints/last.ckpt"
    error = fails(*QUICK, *tree, "data.val_size=2", f"evaluate={last}")
    assert f"checkpoint {last} was trained on 10 classes (0, 1, 2 and 7 more), but the data have 2 (" in error


@pytest.mark.nightly
def test_a_sweep_ends_with_a_table(
    line: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, sweep = tmp_path / "sweep/sweep.csv", (*SMALL, "model.width=4", f"hydra.sweep.dir={tmp_path / 'sweep'}")
    line("-m", "scheme=identity,bnn", "seed=1,2", *sweep)
    rows = file.read_text().splitlines()
    assert len(rows) == 5
    assert rows[0] == "overrides,seed,test_accuracy,val_accuracy_best,val_accuracy_final"
    table = [row for row in capsys.readouterr().out.splitlines() if "1, 2" in row]
    assert len(table) == 2
    assert all(row.count("±") == 3 for row in table)
    file.write_text("of a job beside that lacked the others")
    SweepTable().on_multirun_end(OmegaConf.create({"hydra": {"sweep": {"dir": str(tmp_path / "sweep")}}}))
    assert file.read_text().splitlines() == rows
    assert "scheme=identity" in table[0]
    with pytest.raises(SystemExit, match=r"holds a run already"):  # of what was before, there are no figures of this
        line("-m", "scheme=lsq", *sweep)
    assert "scheme=lsq" not in file.read_text()


@pytest.mark.nightly
def test_a_sweep_of_jobs(tmp_path: Path) -> None:
    quick = ("model.width=4", "trainer=cpu", "trainer.max_epochs=1", f"hydra.sweep.dir={tmp_path / 'sweep'}")
    local = ("-m", "hydra/launcher=submitit_local", "hydra.launcher.timeout_min=5", "seed=1")  # as on a cluster
    run = subprocess.run(command(*local, *quick), cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "│ 1" in run.stdout
    assert (tmp_path / "sweep/0/result.json").is_file()


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")  # Optuna and SQLAlchemy of old names
def test_a_search_finds_accuracy_and_size_at_once(line: Callable[..., None], tmp_path: Path) -> None:
    quick = ("model.width=4", "trainer=cpu", "trainer.max_epochs=1", f"hydra.sweep.dir={tmp_path / 'sweep'}")
    search = ("-m", "experiment=search_bits", "hydra.sweeper.n_trials=3")
    line(*search, *quick)
    found = OmegaConf.load(tmp_path / "sweep/optimization_results.yaml")
    results = [json.loads(path.read_text()) for path in tmp_path.glob("sweep/*/result.json")]
    figures = [[result["val_accuracy_best"], result["packed_bytes"]] for result in results]
    assert len(figures) == 3
    for solution in found.solutions:
        assert list(solution["values"]) in figures
        assert list(solution["params"]) == ["bits.one", "bits.two", "bits.three"]
    with pytest.raises(SystemExit, match=r"objective \(=val_accuracy_best\) would be minimized"):
        line(*search, *quick, "hydra.sweeper.direction=[minimize,minimize]")


def test_the_objective_is_a_figure(whole: tuple[Path, Any]) -> None:
    _, result = whole
    assert objective(result, "val_accuracy_best") == result.val_accuracy_best
    assert objective(result, ["test_loss", "bops"]) == (result.test_loss, result.about["bops"])
    check_objective(["test_loss", "bops"], result.about)
    for names in ("size", "quantized", "tested", None, [], ["test_loss", "size"]):
        message = r"objective \(=.*\) must be one or several of these figures: test_accuracy, .*packed_bytes"
        with pytest.raises(ValueError, match=message):
            check_objective(names, result.about)  # pyright: ignore[reportArgumentType]


def test_a_sweep_in_folders_of_folders(tmp_path: Path) -> None:
    figures = {"seed": 1, "test_accuracy": 0.5, "val_accuracy_best": 0.5, "val_accuracy_final": 0.5}
    for name in ("scheme=bnn/10", "scheme=bnn/2", "plain", "older/0"):
        (tmp_path / name / ".hydra").mkdir(parents=True)
        (tmp_path / name / ".hydra/overrides.yaml").write_text(f"[{name}]")
        (tmp_path / name / ".hydra/hydra.yaml").write_text(f"hydra: {{job: {{chdir: null, num: '{name}'}}}}")
        (tmp_path / name / ".hydra/config.yaml").write_text(f"run_dir: {tmp_path}/${{hydra:job.num}}")
        (tmp_path / name / "result.json").write_text(json.dumps(figures))
    (tmp_path / "plain/.hydra/hydra.yaml").write_text("hydra: {job: {chdir: true}}")
    (tmp_path / "plain/.hydra/config.yaml").write_text("run_dir: .")
    for sweep in (".", "older"):
        (tmp_path / sweep / "multirun.yaml").touch()
    assert [row["overrides"] for row in read_runs(tmp_path)] == ["plain", "scheme=bnn/2", "scheme=bnn/10"]


@pytest.mark.nightly
def test_a_failed_run_keeps_the_rows_of_the_others(
    line: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = "-m", "scheme.padding_value=0,2,1", *SMALL, "model.width=4", f"hydra.sweep.dir={tmp_path / 'a sweep'}"
    with pytest.raises(SystemExit, match=r"padding_value \(=2\) must be 0, \+1 or -1"):
        line(*arguments)
    shown = capsys.readouterr().err
    others = f"qconv compare '{tmp_path / 'a sweep'}' shows the others once they have ended"
    assert f"must be 0, +1 or -1\n({others})" in shown
    rows = (tmp_path / "a sweep/sweep.csv").read_text().splitlines()
    assert len(rows) == 3
    assert "scheme.padding_value=0" in rows[1]
    assert "scheme.padding_value=1" in rows[2]
