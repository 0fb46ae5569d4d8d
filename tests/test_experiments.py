"""Every recipe composes, and trains two steps on images made here; what a GPU is to measure runs on the CPU."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from PIL import Image
from pytorch_lightning import Trainer
from torch import nn

import qconv
from qconv.cli.mistakes import FILE
from qconv.lifecycle.steps import final_from
from qconv.models import small_cnn
from qconv.table import read_csv
from qconv.training import make_trainer
from qconv.training.assemble import build, quantized_model

CONFIGS = Path(__file__).parent.parent / "configs"
EXPERIMENTS = sorted(
    str(path.relative_to(CONFIGS / "experiment").with_suffix("")) for path in (CONFIGS / "experiment").rglob("*.yaml")
)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pictures")
    random = np.random.default_rng(0)
    for split in ("train", "test"):
        for label in range(3):
            folder = root / split / str(label)
            folder.mkdir(parents=True)
            for index in range(4):
                Image.fromarray(random.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(folder / f"{index}.png")
    return root


def composed(name: str, pictures: Path | None = None) -> DictConfig:
    overrides = [f"experiment={name}", "run_dir=x"]
    if pictures is not None and not name.startswith("digits"):
        overrides += ["data=image_folder", f"data.root={pictures}", f"+data.cache={pictures / 'cache'}"]
        overrides += ["data.batch_size=4", "data.val_size=0.25", "compile=false"]
        overrides += ["init_from=null"]  # random weights
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return compose("config", overrides)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_two_steps(name: str, pictures: Path, device: str, tmp_path: Path) -> None:
    config = composed(name, pictures)
    if "teacher" in config.loss:
        torch.save(instantiate(config.loss.teacher, in_channels=3, num_classes=3).state_dict(), tmp_path / "teacher.pt")
        config.loss.weights = str(tmp_path / "teacher.pt")
    data, classifier, _ = build(config)
    trainer: Trainer = make_trainer(accelerator=device, fast_dev_run=2, enable_progress_bar=False)
    trainer.fit(classifier, datamodule=data)
    assert trainer.global_step == 2
    assert all(parameter.isfinite().all() for parameter in classifier.parameters())


@pytest.mark.parametrize("name", [name for name in EXPERIMENTS if "/" in name])
def test_it_says_what_it_is(name: str) -> None:
    lines = (CONFIGS / "experiment" / f"{name}.yaml").read_text().splitlines()
    assert lines[1].startswith(f"# uv run train.py experiment={name} data.root=/data")
    head = "".join(line for line in lines if line.startswith("#"))
    assert "arXiv:" in head
    # A published number with its evidence tag; or, where the authors have none, what to reach, or what a run here did.
    assert re.search(r"Target: .*\([VSM]|Goal: |Reached: \d", head)
    config = composed(name)
    assert OmegaConf.is_missing(config.data, "root")
    assert ("init_from=" in lines[1]) == (config.init_from == FILE)
    assert ("loss.weights=" in lines[1]) == (config.loss.get("weights") == FILE)


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Loads the program of an experiment."""

    def load(name: str) -> Any:
        monkeypatch.setattr(sys, "path", [*sys.path])  # the program adds to it
        spec = importlib.util.spec_from_file_location(f"{name}_run", CONFIGS.parent / f"experiments/{name}/run.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture
def on_gpu(loaded: Callable[[str], Any]) -> Any:
    """The program of experiments/gpu, with a network that is made at once."""
    module = loaded("gpu")
    assert set(module.NETWORKS) < set(module.networks().NETWORKS)
    assert {method for method, _ in module.STUDY.values()} < set(loaded("cifar10_methods").METHODS)

    def build(network: str, kind: str) -> nn.Module:
        model = small_cnn(3, 10, width=16)
        return model if kind == "float" else qconv.lean(qconv.convert(model, qconv.schemes.bnn()), kind == "lean")

    module.networks = lambda: SimpleNamespace(build=build)
    return module


def test_an_evaluation_of_the_best_checkpoint_is_not_that_of_the_last(
    loaded: Callable[[str], Any], tmp_path: Path
) -> None:
    recipes, called = loaded("cifar10_recipes"), list[list[str]]()
    recipes.RUNS, recipes.RESULTS, recipes.CURVES = tmp_path, tmp_path / "results.csv", tmp_path / "curves"
    recipes.train, recipes.call = lambda *_: None, called.append
    recipes.figures, recipes.read_csv = lambda _: {"seed": 1, "test_accuracy": 0.5}, lambda _: [{"epoch": 0}]
    place = recipes.folder("float", 1)
    place.mkdir()
    for checkpoint, again in (("best.ckpt", True), ("last.ckpt", False)):
        evaluation = {"checkpoint": f"/elsewhere/checkpoints/{checkpoint}", "test_accuracy": 0.25}
        (place / "evaluation.json").write_text(json.dumps(evaluation))
        called.clear()
        recipes.run("float", 1, "pictures")
        assert called == ([["evaluate", str(place), "--last"]] if again else [])
        assert [row["test_accuracy_final"] for row in recipes.rows()] == ([] if again else [0.25])


def test_each_setting_of_the_study_makes_a_network(loaded: Callable[[str], Any]) -> None:
    """One whose ramp ended too late was found by the run, two hours after its start."""
    study = loaded("cifar10_methods")
    data = SimpleNamespace(in_channels=3, num_classes=10, image_size=(32, 32))
    for name, (_, words) in study.METHODS.items():
        with initialize_config_dir(str(CONFIGS), version_base="1.3"):
            config = compose("config", ["experiment=cifar10_methods", *words, "data.root=x", "run_dir=x"])
        model, _ = quantized_model(config, data)
        assert any(isinstance(each, qconv.QuantizedLayer) for each in model.modules()), name
        assert final_from(model) <= 1 - 1 / study.EPOCHS + 1e-9, name


def options_of(on_gpu: Any, out: Path, monkeypatch: pytest.MonkeyPatch, *more: str) -> Any:
    words = ["--device=cpu", "--size=16", "--batch=2", "--rounds=2", "--memory-gib=0.0003", "--pictures=200"]
    monkeypatch.setattr(sys, "argv", ["run.py", *words, f"--out={out}", *more])
    return on_gpu.parsed()


def test_what_is_measured_on_a_gpu(on_gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = options_of(on_gpu, tmp_path, monkeypatch)
    network = on_gpu.NETWORKS[0]
    on_gpu.steps(options, network, "eager", *on_gpu.KINDS)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    on_gpu.steps(options, network, "compiled", "float", "lean")
    rows = read_csv(tmp_path / "steps.csv")
    assert [(row["mode"], row["kind"]) for row in rows] == [
        *(("eager", kind) for kind in ("float", "today", "lean")),
        *(("compiled", kind) for kind in ("float", "lean")),
    ]
    assert float(rows[0]["ratio"]) == 1
    assert float(rows[0]["kept_mib"]) > 4 * float(rows[2]["kept_mib"]) > 0
    on_gpu.batches(options, network)
    largest = {row["kind"]: int(row["batch"]) for row in read_csv(tmp_path / "batches.csv")}
    assert 0 < 2 * largest["float"] < largest["lean"]


def test_an_epoch_of_the_study_on_a_gpu(on_gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = options_of(on_gpu, tmp_path, monkeypatch)

    def trained(command: list[str], **_: Any) -> None:
        with initialize_config_dir(str(CONFIGS), version_base="1.3"):
            config = compose("config", command[2:])
        assert (config.lean, config.trainer.max_epochs, config.compile) == (True, 1, False)
        assert len(list(Path(config.data.root).rglob("*.png"))) == 200
        assert {path.name for path in Path(config.data.root).iterdir()} == {"train", "test"}
        Path(config.run_dir).mkdir()
        (Path(config.run_dir) / "result.json").write_text('{"seconds": 1.5, "test_accuracy": 0.25}')

    on_gpu.subprocess = SimpleNamespace(run=trained)
    on_gpu.epoch(options, "lean")
    (row,) = read_csv(tmp_path / "epochs.csv")
    assert (row["method"], row["seconds"], row["data"]) == ("Bi-Real", "1.5", "200 made images")


def test_pieces_that_fail_or_take_too_long_cost_no_other(
    on_gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\ncase "$3" in tests) exit 0 ;; steps*) exit 3 ;; *) sleep 60 ;; esac\n')
    python.chmod(0o755)
    options_of(on_gpu, tmp_path, monkeypatch, "--pieces", "steps, Bi-Real-18, bireal", "tests")
    monkeypatch.setattr(on_gpu, "sys", SimpleNamespace(executable=python, argv=sys.argv))
    for _ in range(2):
        on_gpu.main()
    failed, done, again, known = capsys.readouterr().out.splitlines()
    assert done.startswith("tests: done, ")
    assert known == "tests: done before"
    assert all(
        line.startswith("steps, Bi-Real-18, bireal: failed with 3: log.txt says why") for line in (failed, again)
    )
    assert on_gpu.in_time("epoch, lean", 0.01, tmp_path / "log.txt") == "stopped after 0 s"
    assert "=== epoch, lean" in (tmp_path / "log.txt").read_text()
    sys.argv[1:] = [f"--out={tmp_path}", "--device=cpu", "--minutes=0"]
    on_gpu.main()
    assert set(capsys.readouterr().out.splitlines()) == {f"{piece}: no time left" for piece in on_gpu.PIECES}


def test_tests_are_counted(on_gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match="0"):
        on_gpu.tests(options_of(on_gpu, tmp_path, monkeypatch, "--tests=tests/test_table.py"))
    (row,) = read_csv(tmp_path / "tests.csv")
    assert int(row["tests"]) > 0
    assert (row["failures"], row["errors"], row["skipped"]) == ("0", "0", "0")


def test_the_gpu_command_starts_the_program() -> None:
    script, given = CONFIGS.parent / "experiments/gpu/run.sh", ("--device", "cpu")
    words = subprocess.run(
        [script, *given], env={**os.environ, "PYTHON": "echo"}, capture_output=True, check=True
    ).stdout
    assert words.decode().split() == ["experiments/gpu/run.py", *given]
