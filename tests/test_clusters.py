"""Runs of several processes and on clusters, as far as one process on a CPU can show what they do."""

from pathlib import Path
from typing import Any

import pytest
from pytorch_lightning.plugins.environments import SLURMEnvironment
from test_train import config

from qconv.cli import train as program
from qconv.training import make_trainer

ONE = ("model.width=4", "trainer=cpu", "trainer.max_epochs=1", "report=false")


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A job of one task in SLURM; returns its folder, where another job has left a checkpoint of Lightning's."""
    variables = {"NTASKS": 1, "NTASKS_PER_NODE": 1, "NNODES": 1, "PROCID": 0, "LOCALID": 0, "NODEID": 0, "JOB_ID": 7}
    for name, value in variables.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    for name in ("MASTER_ADDR", "MASTER_PORT", "SLURM_JOB_NAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hpc_ckpt_1.ckpt").write_bytes(b"of another job")
    return tmp_path


def test_what_lightning_left_of_another_job_is_not_taken(slurm: Path) -> None:
    program.train(config(*ONE, "run_dir=run"))
    assert program.evaluate(config(*ONE, "run_dir=figures", "evaluate=run/checkpoints/best.ckpt")).epoch == 0
    assert not (slurm / "lightning").exists()


def test_lightning_does_not_start_a_job_again(slurm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def environment(**options: Any) -> Any:
        trainer = make_trainer(accelerator="cpu", strategy="ddp", **options)
        return trainer._accelerator_connector.cluster_environment

    assert environment().auto_requeue is False
    assert make_trainer(accelerator="cpu", default_root_dir="own").default_root_dir == "own"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")  # torchrun's own variables count, also inside SLURM
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    assert not isinstance(environment(), SLURMEnvironment)
