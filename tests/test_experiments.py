"""Every recipe composes, and trains two steps on images made here; what a GPU is to measure runs on the CPU."""

import importlib.util
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from pictures import draw_tree, noise
from pytorch_lightning import Trainer
from runs import CONFIGS, config

import qconv
from qconv.cli.mistakes import FILE
from qconv.ground.table import read_csv
from qconv.loop.optimizer_step import final_from
from qconv.models import small_cnn
from qconv.training import make_trainer
from qconv.training.assemble import build, quantized_model

EXPERIMENTS = sorted(
    str(path.relative_to(CONFIGS / "experiment").with_suffix("")) for path in (CONFIGS / "experiment").rglob("*.yaml")
)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    draw = lambda seed, _: noise(seed, 32, 32)  # noqa: E731
    return draw_tree(tmp_path_factory.mktemp("pictures"), {"train": 4, "test": 4}, draw, ("0", "1", "2"))


def composed(name: str, pictures: Path | None = None) -> DictConfig:
    words = [f"experiment={name}", "run_dir=x"]
    if pictures is not None and not name.startswith("digits"):
        words += ["data=image_folder", f"data.root={pictures}", f"+data.cache={pictures / 'cache'}"]
        words += ["data.batch_size=4", "data.val_size=0.25", "compile=false", "init_from=null"]  # random weights
    return config(*words)


@pytest.mark.nightly
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_two_steps(name: str, pictures: Path, device: str, tmp_path: Path) -> None:
    cfg = composed(name, pictures)
    if "teacher" in cfg.loss:
        torch.save(instantiate(cfg.loss.teacher, in_channels=3, num_classes=3).state_dict(), tmp_path / "teacher.pt")
        cfg.loss.weights = str(tmp_path / "teacher.pt")
    data, classifier, _ = build(cfg)
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
    cfg = composed(name)
    assert OmegaConf.is_missing(cfg.data, "root")
    assert ("init_from=" in lines[1]) == (cfg.init_from == FILE)
    assert ("loss.weights=" in lines[1]) == (cfg.loss.get("weights") == FILE)


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


@pytest.mark.nightly
def test_each_setting_of_the_study_makes_a_network(loaded: Callable[[str], Any]) -> None:
    """One whose ramp ended too late was found by the run, two hours after its start."""
    study = loaded("cifar10_methods")
    data = SimpleNamespace(in_channels=3, num_classes=10, image_size=(32, 32))
    for name, (_, words) in study.METHODS.items():
        model, _ = quantized_model(config("experiment=cifar10_methods", *words, "data.root=x", "run_dir=x"), data)
        assert any(isinstance(each, qconv.QuantizedLayer) for each in model.modules()), name
        assert final_from(model) <= 1 - 1 / study.EPOCHS + 1e-9, name


@pytest.mark.nightly
def test_what_is_measured_on_a_gpu(
    loaded: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = loaded("gpu")
    sides = {side.removeprefix("lean ") for group in program.GROUPS for side in group.sides}
    assert sides == {"float", *program.SCHEMES}
    small = program.Group(lambda scheme: small_cnn(3, 1000, width=16), "eager", 2, ("float", "bnn", "lean lsq 4/4"))
    monkeypatch.setattr(torch, "compile", lambda model, **options: model)
    options = SimpleNamespace(device="cpu", size=16, rounds=2, sides=None, warm=False, out=tmp_path, commit="abc")
    for group in (small, small._replace(mode="default")):
        program.measure(options, group)
    rows = read_csv(tmp_path / "steps.csv")
    expected = [(mode, side) for mode in ("eager", "default") for side in small.sides]
    assert [(row["mode"], row["scheme"]) for row in rows] == expected
    assert all(float(row["ratio"]) == 1 for row in rows if row["scheme"] == "float")
