"""`logger=`: what each leaves behind, several at once, and what is said of a missing package."""

import json
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from omegaconf import OmegaConf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from qconv.cli.configs import folder
from qconv.training.loggers import started_loggers

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
    with initialize_config_dir(str(folder()), version_base="1.3"):
        cfg = compose("config", [f"logger={name}", f"run_dir={tmp_path}"])
    message = rf'logger={name} needs {name}: pip install "qconv\[{name}\]"'
    with pytest.raises(ImportError, match=message), started_loggers(cfg):
        pass


def test_the_address_of_mlflow_stays_out_of_the_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    address = f"sqlite:///{tmp_path}/secret.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    with initialize_config_dir(str(folder()), version_base="1.3"):
        cfg = compose("config", ["logger=mlflow", f"run_dir={tmp_path}"])
    assert "secret" not in OmegaConf.to_yaml(cfg, resolve=True)
    addresses: list[str] = []
    monkeypatch.setattr(
        "pytorch_lightning.loggers.MLFlowLogger.__init__", lambda self, **given: addresses.append(given["tracking_uri"])
    )
    for given in (None, "sqlite:///mine.db"):
        instantiate({**cfg.logger.mlflow, "tracking_uri": given})
    assert addresses == [address, "sqlite:///mine.db"]
