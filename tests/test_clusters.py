"""Runs of several processes and on clusters, as far as one process on a CPU can show what they do."""

from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning_fabric.plugins.environments.slurm import SLURMEnvironment
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.plugins.layer_sync import TorchSyncBatchNorm
from pytorch_lightning.strategies import DDPStrategy
from test_train import config
from torch import nn

import qconv
from qconv.cli import train as program
from qconv.models import small_cnn
from qconv.training import Checkpoints, make_trainer
from qconv.training.norm_estimates import batch_norms_kept

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


def synchronized(model: nn.Module) -> None:
    """What `sync_batchnorm` leaves of the batch norms, which need GPUs to be synchronized in between."""
    plugin = TorchSyncBatchNorm()
    plugin.revert(plugin.apply(model))


class Synchronized(Callback):
    """Does so when the training ends."""

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            synchronized(pl_module)


@pytest.mark.parametrize("is_lean", [False, True])
def test_synchronized_batch_norms_are_put_back(is_lean: bool) -> None:
    model = qconv.convert(small_cnn(1, 10, width=4), qconv.schemes.bnn())
    qconv.lean(model, is_lean)
    kinds = [type(module) for module in model.modules()]
    with batch_norms_kept(model):
        synchronized(model)
        trained = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
        for norm in trained:
            norm.running_mean = torch.rand(norm.num_features)  # elsewhere than before, as after a move to a GPU
    assert kinds == [type(module) for module in model.modules()]
    state = model.state_dict()
    means = [tensor for name, tensor in state.items() if name.endswith("running_mean")]
    assert len(means) == len(trained) > 0
    kept = [norm.running_mean for norm in trained]
    assert all(norm is not None and torch.equal(mean, norm) for mean, norm in zip(means, kept, strict=True))
    qconv.lean(model, False)
    assert all("Lean" not in type(module).__name__ for module in model.modules())


def test_a_run_with_synchronized_batch_norms_ships_its_network(tmp_path: Path) -> None:
    sent = "+callbacks.synchronized._target_=test_clusters.Synchronized"
    result = program.train(config(*ONE, sent, f"run_dir={tmp_path}"))
    assert result.about["packed_bytes"] == (tmp_path / "model.safetensors").stat().st_size


def test_every_process_reads_the_checkpoints_of_the_first(tmp_path: Path) -> None:
    """Under torchrun each of them names its folder by the second in which it starts."""
    checkpoints = Checkpoints(tmp_path / "12-00-01/checkpoints")
    of_first: Any = SimpleNamespace(strategy=SimpleNamespace(broadcast=lambda _: tmp_path / "12-00-00/checkpoints"))
    checkpoints.setup(of_first, LightningModule(), "fit")
    assert checkpoints.best == tmp_path / "12-00-00/checkpoints/best.ckpt"
    assert checkpoints.last == tmp_path / "12-00-00/checkpoints/last.ckpt"


@pytest.mark.parametrize(
    "options",
    [
        {"strategy": "ddp"},
        {"strategy": "ddp_find_unused_parameters_true"},
        {"strategy": "ddp_spawn", "devices": 2},
        {"devices": 2},  # for which Lightning chooses ddp
    ],
)
def test_processes_wait_as_long_as_they_are_told(options: dict[str, Any]) -> None:
    strategy: Any = make_trainer(accelerator="cpu", timeout_s=7, **options).strategy
    assert strategy._timeout == timedelta(seconds=7)


def test_a_strategy_without_a_timeout_is_refused() -> None:
    class Own(DDPStrategy):
        def __init__(self) -> None:
            super().__init__()
            del self._timeout

    with pytest.raises(ValueError, match=r"timeout_s \(=7\) must be null: Own has no timeout"):
        make_trainer(accelerator="cpu", timeout_s=7, strategy=Own())
