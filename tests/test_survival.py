"""Runs of two processes, on one machine and on two; one that is lost, or hangs; and a full disk."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
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
from runs import QUICK, command, config, place, run_until
from torch import nn
from torch.distributed.distributed_c10d import _set_pg_timeout

import qconv
from qconv.data import DigitsDataModule
from qconv.data.digits import split_digits
from qconv.models import small_cnn
from qconv.runs.run_files import PAGE, PREDICTIONS
from qconv.training import Checkpoints, load_checkpoint, make_trainer
from qconv.training.norm_estimates import batch_norms_kept
from qconv.training.report.predictions import Predictions
from qconv.training.run import evaluate, train

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}


class Odd(DigitsDataModule):
    """239 and 359 images to validate and test, which two processes can't share evenly."""

    def setup(self, stage: str) -> None:
        super().setup(stage)
        for split in ("val", "test"):
            images, labels = self.splits[split]
            if len(labels) % 2 == 0:
                self.splits[split] = images[1:], labels[1:]


PICTURES = ("data._target_=test_survival.Odd", "data.batch_size=50")
TWO = ("scheme=lsq", "model.width=4", "trainer.max_epochs=2", *PICTURES, "trainer=ddp")
ON_CPU = ("trainer.accelerator=cpu", "trainer.devices=2")


def train_two(folder: Path, *more: str) -> str:
    """Trains in two processes; returns what they printed."""
    program = str(Path(sys.executable).with_name("qconv"))  # the command as installed, which Lightning calls again
    arguments = [program, "train", *TWO, *ON_CPU, f"run_dir={folder}", *more]
    run = subprocess.run(arguments, cwd=folder.parent, env=ENVIRONMENT, capture_output=True, text=True, check=True)
    return run.stdout


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder and the words of a run of two processes."""
    folder = tmp_path_factory.mktemp("two") / "run"
    return folder, train_two(folder)


@pytest.mark.nightly
def test_two_processes(two: tuple[Path, str], tmp_path: Path) -> None:
    folder, printed = two
    assert printed.count("compression  ") == 1  # the table once, not once a process
    result = json.loads((folder / "result.json").read_text())
    assert len((folder / "metrics.csv").read_text().splitlines()) == 3
    best = folder / "checkpoints/best.ckpt"
    alone = evaluate(config(*TWO[:-1], "trainer=cpu", f"evaluate={best}", f"run_dir={tmp_path}"))
    # 179 and 180 images on the processes and 359 on one: every one is counted once.
    assert alone.test_accuracy == pytest.approx(result["test_accuracy"], abs=1e-6)
    assert alone.val_accuracy == pytest.approx(result["val_accuracy_best"], abs=1e-6)
    decisions = Predictions.load(folder / PREDICTIONS)
    assert decisions.labels.bincount().equal(split_digits(0)["test"][1][1:].bincount())
    assert decisions.accuracy == pytest.approx(result["test_accuracy"], abs=1e-6)
    assert (folder / PAGE).is_file()


@pytest.mark.nightly
def test_two_processes_stop_together_and_resume_bit_for_bit(two: tuple[Path, str], tmp_path: Path) -> None:
    cut = tmp_path / "cut"
    run_until(signal.SIGTERM, 1, 4, cut, *TWO, *ON_CPU)
    assert place(cut / "checkpoints/last.ckpt") == (1, 5)
    train_two(cut, "resume=auto", "lean=exact")
    for name in ("metrics.csv", "diagnostics.csv"):
        assert (cut / name).read_text() == (two[0] / name).read_text()


class Strike(Callback):
    """Sends the last process a signal in epoch 1."""

    def __init__(self, number: int) -> None:
        self.number = number

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if (trainer.current_epoch, batch_idx) == (1, 2):
            if trainer.global_rank == trainer.world_size - 1:
                os.kill(os.getpid(), self.number)
            # Now, and not from the start: they wait as long for each other to start, which takes its time.
            _set_pg_timeout(timedelta(seconds=2), None)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("number", "reasons"),
    [
        (signal.SIGKILL, ("reset by peer", "closed by peer")),
        (signal.SIGSTOP, ("Timed out waiting 2000ms", "timeout caused pair closure")),
    ],
    ids=["lost", "hung"],
)
def test_a_process_that_does_not_answer(number: signal.Signals, reasons: tuple[str, ...], tmp_path: Path) -> None:
    strike = f"+callbacks.strike={{_target_:test_survival.Strike,number:{number.value}}}"
    arguments = command(*TWO, *ON_CPU, f"run_dir={tmp_path / 'run'}", strike)
    run = subprocess.run(arguments, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True)
    assert load_checkpoint(tmp_path / "run/checkpoints/last.ckpt")["epoch"] == 0
    if run.returncode == -signal.SIGKILL:  # Lightning has noticed first
        assert "terminated with code -9. Forcefully terminating all other processes" in run.stderr
        return
    assert run.returncode == 1
    message = run.stderr.partition("error: ")[2].splitlines()[0]
    assert message.startswith("process 0 of 2: another one was lost, or did not answer within trainer.timeout_s (")
    assert message.endswith(f"; resume={tmp_path / 'run'} continues from the last checkpoint")
    assert any(reason in message for reason in reasons), message


def test_a_timeout_out_of_range(tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"timeout_s \(=0\) must be positive"):
        train(config(*TWO, "trainer.accelerator=cpu", "trainer.timeout_s=0", f"run_dir={tmp_path}"))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 400 kB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ("mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(folder))
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("this machine lets nobody mount a file system")
    yield folder
    subprocess.run(("umount", "--lazy", str(folder)), check=True)


@pytest.mark.parametrize("free_kb", [20, pytest.param(0, marks=pytest.mark.nightly)])
def test_a_full_disk(free_kb: int, small_disk: Path) -> None:
    words = (*QUICK, "model.width=8", f"run_dir={small_disk / 'run'}")
    train(config(*words, "+callbacks.stop={_target_:runs.StopAfter,epoch:0}"))
    last = small_disk / "run/checkpoints/last.ckpt"
    room = shutil.disk_usage(small_disk).free - free_kb * 1000
    (small_disk / "filler").write_bytes(b"x" * max(room, 0))
    with pytest.raises(OSError, match=r"is the disk full|No space left"):
        train(config(*words, "resume=auto"))
    assert load_checkpoint(last)["epoch"] == 0
    assert [path.name for path in last.parent.iterdir() if path.suffix == ".tmp"] == []


@pytest.fixture
def two_machines() -> Iterator[tuple[str, str]]:
    """Two network namespaces with a cable between them: 10.77.0.1 and 10.77.0.2."""
    names = f"qconv{os.getpid()}a", f"qconv{os.getpid()}b"
    pair = f"qa{os.getpid()}", f"qb{os.getpid()}"

    def ip(*words: str) -> bool:
        return subprocess.run(("ip", *words), capture_output=True).returncode == 0

    try:
        if not shutil.which("ip") or not all(ip("netns", "add", name) for name in names):
            pytest.skip("this machine lets nobody make network namespaces")
        ip("link", "add", pair[0], "netns", names[0], "type", "veth", "peer", "name", pair[1], "netns", names[1])
        for number, (name, link) in enumerate(zip(names, pair, strict=True), 1):
            ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", link)
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", link, "up")
        yield names
    finally:
        for name in names:
            ip("netns", "del", name)


@pytest.mark.nightly
def test_two_machines_compute_what_two_processes_do(
    two_machines: tuple[str, str], two: tuple[Path, str], tmp_path: Path
) -> None:
    torchrun = ("torch.distributed.run", "--nnodes=2", "--nproc_per_node=1", "--master_addr=10.77.0.1")
    nodes = ("trainer=slurm", "trainer.num_nodes=2", "trainer.devices=1", f"run_dir={tmp_path / 'machines'}")
    running = []
    for rank, name in enumerate(two_machines):
        python, *program_and_words = command(*TWO, "trainer.accelerator=cpu", *nodes)
        start = ("ip", "netns", "exec", name, python, "-m", *torchrun, "--master_port=29511", f"--node_rank={rank}")
        link = f"q{'ab'[rank]}{os.getpid()}"
        environment = {**ENVIRONMENT, "GLOO_SOCKET_IFNAME": link}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        running.append(subprocess.Popen((*start, *program_and_words), cwd=tmp_path, env=environment, **pipes))
    for process in running:
        printed, _ = process.communicate(timeout=120)
        assert process.returncode == 0, printed
    for name in ("metrics.csv", "diagnostics.csv"):
        assert (tmp_path / "machines" / name).read_text() == (two[0] / name).read_text()
    weights = [load_checkpoint(run / "checkpoints/last.ckpt")["state_dict"] for run in (tmp_path / "machines", two[0])]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


# Clusters, as far as one process on a CPU can show them


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
    train(config(*ONE, "run_dir=run"))
    assert evaluate(config(*ONE, "run_dir=figures", "evaluate=run/checkpoints/best.ckpt")).epoch == 0
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
    sent = "+callbacks.synchronized._target_=test_survival.Synchronized"
    result = train(config(*ONE, sent, f"run_dir={tmp_path}"))
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
