"""A run from its folder alone: `resume=RUN`, `qconv evaluate RUN`, and Ctrl-C, after which it is needed."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from pytorch_lightning import Callback, Trainer
from runs import QUICK, Send, command, config, place, same_files, send
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

from qconv.cli import main as cli, train as program, train_as
from qconv.cli.configs import folder as configs
from qconv.models import small_cnn
from qconv.runs.run_files import LOCK
from qconv.training import Classifier, load_checkpoint, make_trainer, schedules
from qconv.training.go_on import changes
from qconv.training.run import evaluate, train
from qconv.training.run_folder import RunFolderError, claimed
from qconv.training.step_counts import schedule_of
from qconv.training.stored_config import stored_config

TWO = ("model.width=4", "trainer=cpu", "trainer.max_epochs=2", "scheduler=constant", "report=false")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of two epochs."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    train(config(*TWO, f"run_dir={folder}"))
    return folder


@pytest.fixture
def one(whole: Path, tmp_path: Path) -> Path:
    """A copy of it, which has moved."""
    return Path(shutil.copytree(whole, tmp_path / "moved"))


@pytest.fixture
def told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., str]]:
    """Runs the command line in this process, and returns what it said, or the error that it ended with."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    monkeypatch.setenv("GOMP_SPINCOUNT", "10000")
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> str:
        try:
            train_as("train.py", words)
        except SystemExit as error:
            return f"{error.code}\n{capsys.readouterr().err}"
        return " ".join(capsys.readouterr().out.split())

    yield run
    assert signal.getsignal(signal.SIGINT) == signal.default_int_handler
    signal.signal(signal.SIGINT, before)


class InTest(Send):
    """Sends the signal in the test."""

    def on_test_batch_start(self, *_: Any, **__: Any) -> None:
        signal.raise_signal(self.number)


@pytest.mark.parametrize(
    ("where", "saved"),
    [
        pytest.param((0, 3), (0, 4), id="first epoch"),
        pytest.param((0, -1), (0, 19), id="validation", marks=pytest.mark.nightly),
        pytest.param("test", (1, 19), id="test", marks=pytest.mark.nightly),
    ],
)
def test_ctrl_c_saves_and_the_run_goes_on_bit_for_bit(
    where: tuple[int, int] | str, saved: tuple[int, int], whole: Path, told: Callable[..., str], tmp_path: Path
) -> None:
    sent = "+callbacks.send={_target_:test_go_on.InTest,number:2,epoch:-1,batch:0}"
    words = sent if isinstance(where, str) else send(signal.SIGINT, *where)
    said = told(*TWO, words, "run_dir=runs/a cut")
    assert said.startswith("130\n")
    assert said.endswith("\nstopped by Ctrl-C; 'resume=runs/a cut' continues from the last checkpoint\n")
    assert place(tmp_path / "runs/a cut/checkpoints/last.ckpt") == saved
    has_epoch = where != (0, 3)
    assert (tmp_path / "runs/a cut/curves.png").is_file() == has_epoch
    shutil.move("runs/a cut", "moved")  # the folder is enough, wherever it is
    assert "resume=moved: going on from" in told("resume=moved", "~callbacks.send")
    assert same_files(whole, tmp_path / "moved")
    assert not (tmp_path / "runs/cut").exists()
    assert "~callbacks.sent: the run has no such key" in told("resume=moved", "~callbacks.sent")


def test_a_finished_run_says_so_and_can_have_more_epochs(
    one: Path, whole: Path, told: Callable[..., str], tmp_path: Path
) -> None:
    before = (one / "metrics.csv").read_text()
    assert "has finished its 2 epochs" in told(f"resume={one}")
    assert told(f"resume={one}", "optimizer.lr=1").endswith("above 2; optimizer.lr=1 changed nothing")
    config_before = (one / "config.yaml").read_bytes()
    assert "trainer.max_epochs (=1) must be at least 2" in told(f"resume={one}", "trainer.max_epochs=1")
    result = (one / "result.json").rename(one / "later")
    assert "trainer.max_epochs (=1) must be at least 2, the epochs" in told(f"resume={one}", "trainer.max_epochs=1")
    (one / "later").rename(result)
    assert "limit_val_batches" in told(f"resume={one}", "trainer.max_epochs=3", "+trainer.limit_val_batches=0")
    assert (one / "config.yaml").read_bytes() == config_before  # the run is where it was
    assert (one / "metrics.csv").read_text() == before
    said = told(f"resume={one}", "trainer.max_epochs=3")
    assert "trainer.max_epochs: 2 → 3. From here on, schedules follow 3 epochs." in said
    train(config(*TWO, "trainer.max_epochs=3", f"run_dir={tmp_path / 'three'}"))
    assert same_files(one, tmp_path / "three")
    assert json.loads((one / "result.json").read_text())["epochs"] == 3


@pytest.mark.nightly
def test_a_run_that_was_ended_early_has_finished(told: Callable[..., str]) -> None:
    stop = "{_target_:pytorch_lightning.callbacks.EarlyStopping,monitor:val_accuracy,mode:max,patience:PATIENCE}"
    never = f"+callbacks.stop={stop.replace('PATIENCE', '9')}"
    told(*TWO[:2], "trainer.max_epochs=1", never, "report=false", "run_dir=other")
    assert "going on from epoch 0" in told("resume=other", "trainer.max_epochs=2")
    at_once = f"+callbacks.stop={stop.replace('PATIENCE', '0').replace('mode:max', 'mode:min')}"
    told(*TWO[:2], "trainer.max_epochs=6", at_once, "optimizer.lr=0.01", "report=false", "run_dir=run")
    done = json.loads(Path("run/result.json").read_text())["epochs"]
    assert 1 < done < 6
    ended = f"EarlyStopping ended it at {done} of 6 epochs (run/result.json)"
    words = f"has finished, {ended}; to continue, add ~callbacks.stop"
    assert words in told("resume=run")
    assert words in told("resume=run", "trainer.max_epochs=7")
    assert f"going on from epoch {done - 1}" in told("resume=run", "~callbacks.stop")
    assert "has finished its 6 epochs" in told("resume=run")


def test_a_schedule_keeps_the_rates_that_rules_ask_for(told: Callable[..., str]) -> None:
    one_cycle = "scheduler._target_=torch.optim.lr_scheduler.OneCycleLR", "~scheduler.warmup", "~scheduler.final"
    rules = "optimizer.rules={norms:{lr_scale:0.1}}"
    short = (*TWO[:2], "trainer.max_epochs=1", "report=false", rules, *one_cycle)
    said = told(*short, "+scheduler.max_lr=0.01", "run_dir=one")
    assert "scheduler (OneCycleLR) sets the learning rate of all groups of parameters to 0.0004" in said
    assert "but the rules of the optimizer ask for 0.001, 0.01: pass a list" in said
    train(config(*short, "+scheduler.max_lr=[0.01,0.001]", "run_dir=two"))


def described(batch: int = 8, **options: Any) -> dict[str, Any]:
    return {"trainer": {"max_epochs": 2, **options}, "data": {"batch_size": batch}}


def test_what_batches_depend_on() -> None:
    others = "From here on, optimizer steps use other images."
    as_many = "Steps use as many images as before; batch norm sees the images of one process."
    rounded = "From here on, floating-point rounding may differ."
    another = "From here on, the run differs."
    defaults = {"sync_batchnorm": False, "accumulate_grad_batches": 1, "devices": 1, "num_nodes": 1}
    rows: list[tuple[dict[str, Any], dict[str, Any], list[str]]] = [
        ({"devices": 1, "batch": 256}, {"devices": 2, "batch": 128}, [f"trainer.devices: 1 → 2. {as_many}",
         f"data.batch_size: 256 → 128. {as_many}"]),
        ({"batch": 64}, {"batch": 32}, [f"data.batch_size: 64 → 32. {others}"]),
        ({"devices": "auto"}, {"devices": 1}, [f"trainer.devices: auto → 1. {others}"]),
        ({}, {"limit_train_batches": 0.5}, [f"trainer.limit_train_batches: None → 0.5. {others}"]),
        ({}, {"accumulate_grad_batches": 2, "batch": 4}, [f"trainer.accumulate_grad_batches: None → 2. {others}",
         f"data.batch_size: 8 → 4. {others}"]),
        ({"precision": 32}, {"precision": 16}, [f"trainer.precision: 32 → 16. {rounded}"]),
        ({}, {"gradient_clip_val": 1.0}, [f"trainer.gradient_clip_val: None → 1.0. {another}"]),
        ({}, {"sync_batchnorm": True}, [f"trainer.sync_batchnorm: None → True. {another}"]),
        ({}, {"check_val_every_n_epoch": 2}, [f"trainer.check_val_every_n_epoch: None → 2. {another}"]),
        ({"timeout_s": 9}, {}, ["trainer.timeout_s: 9 → None. The results stay the same."]),
        ({}, defaults, []),
    ]  # fmt: skip
    for before, now, said in rows:
        stored, config = described(**before), described(**now)
        classifier = Classifier(small_cnn(1, 10, width=4), torch.optim.SGD, None, config)
        assert list(changes({"config": stored, "epoch": 0}, classifier)) == said, (before, now)


def test_words_on_top(one: Path) -> None:
    loggers = stored_config(one, ["logger=[csv,tensorboard]"], configs()).logger
    assert {*loggers} == {"csv", "tensorboard"}
    cfg = stored_config(one, ["trainer=ddp", "data.batch_size=32", "+data.new=1", "callbacks=ema"], configs())
    assert (cfg.trainer.strategy, cfg.trainer.max_epochs) == ("ddp", 2)
    assert (cfg.data.batch_size, cfg.data.new, cfg.model.width) == (32, 1, 4)
    assert cfg.callbacks.checkpoints.folder == f"{one}/checkpoints"
    cfg = stored_config(one, ["run_dir=elsewhere"], configs())
    assert (cfg.run_dir, cfg.callbacks.history.folder) == ("elsewhere", "elsewhere")
    old = OmegaConf.load(one / "config.yaml")
    del old.lean, old.report  # of before these keys were there  # pyright: ignore[reportAttributeAccessIssue]
    OmegaConf.save(old, one / "config.yaml")
    cfg = stored_config(one, ["report=false"], configs())
    assert (cfg.lean, cfg.report) == ("auto", False)


def test_another_machine_leaves_how_a_run_trains(one: Path) -> None:
    trains = {"max_epochs": 2, "accumulate_grad_batches": 2, "gradient_clip_val": 1.0, "limit_train_batches": 5}
    words = [f"++trainer.{key}={value}" for key, value in trains.items()]
    before = stored_config(one, [*words, "trainer=ddp", "trainer.devices=4"], configs())
    assert {"strategy", "timeout_s"} <= {*before.trainer}
    OmegaConf.save(before, one / "config.yaml")
    cfg = stored_config(
        one, ["trainer.precision=64-true", "trainer=cpu"], configs()
    )  # the word wins, wherever it stands
    machine = {"accelerator": "cpu", "devices": 1, "precision": "64-true"}
    assert cfg.trainer == {"_target_": "qconv.training.make_trainer", "_partial_": True, **trains, **machine}


def test_the_same_words_may_come_again(one: Path) -> None:
    """As those of a job that is requeued, or of another process."""
    words = ["+trainer.gradient_clip_val=1.0", "+data.new={a:1}", "~scheduler.warmup"]
    for _ in range(2):
        cfg = stored_config(one, words, configs())
        assert (cfg.trainer.gradient_clip_val, cfg.data.new.a, "warmup" in cfg.scheduler) == (1.0, 1, False)
        OmegaConf.save(cfg, one / "config.yaml")


def test_words_that_mean_nothing(one: Path, told: Callable[..., str]) -> None:
    resume = f"resume={one}"
    for words, error in (
        ((resume, "experiment=search_bits"), "is for a new run"),
        ((resume, "seed=1,2"), "is a sweep"),
        ((resume, "modle.width=3"), "modle"),
        ((resume, "evaluate=a.ckpt"), "can't be given together"),
        ((resume, "optimizer.lr=1", "trainer.max_epochs=3"), "was trained with optimizer "),
        ((resume, "model.width=8", "trainer.max_epochs=3"), "was trained with model qconv.models.small_cnn(width=4"),
        ((resume, "-m"), "-m can't be given with resume=RUN"),
        ((resume, "resume=b"), "must name the folder of one run"),
        ((resume, "resume=auto"), "must name the folder of one run"),
        (("resume=nowhere",), "there is no folder nowhere: name the folder of a run"),
    ):
        assert error in told(*words), words
    (one / "checkpoints/last.ckpt").unlink()
    (one / "result.json").unlink()
    assert "has no checkpoints/last.ckpt" in told(resume)


def test_evaluate(one: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = json.loads((one / "result.json").read_text())
    for name in ("checkpoints/best.ckpt", "model.safetensors"):
        os.utime(one / name, (1, 1))  # as a clock of whole seconds may show them
    assert cli(["evaluate", str(one)]) == 0
    assert capsys.readouterr().out.endswith(f"{one}/evaluation.json\n")
    best = json.loads((one / "evaluation.json").read_text())
    assert best["test_loss"] == result["test_loss"]
    assert best["packed_bytes"] == result["packed_bytes"] == (one / "model.safetensors").stat().st_size
    assert cli(["evaluate", str(one), "--last", "data.batch_size=50", f"run_dir={one}/other"]) == 0
    last = json.loads((one / "other/evaluation.json").read_text())
    assert (last["epoch"], last["checkpoint"]) == (1, f"{one}/checkpoints/last.ckpt")
    assert "batch_size=50" in last["data"]
    assert json.loads((one / "evaluation.json").read_text()) == best
    assert last["packed_bytes"] < best["packed_bytes"]  # without the description, for the file is of another one
    os.utime(one / "model.safetensors", (0, 0))  # as if the run had gone on and been interrupted
    assert cli(["evaluate", str(one), f"run_dir={one}/newer"]) == 0
    assert json.loads((one / "newer/evaluation.json").read_text())["packed_bytes"] == last["packed_bytes"]
    assert cli(["evaluate", str(one), "data.shift=oh"]) == 1
    assert cli(["evaluate", str(one), "data.batch_sise=4"]) == cli(["evaluate", str(one), "data=cifar10"]) == 1
    assert cli(["evaluate", str(one), "data=nosuch"]) == cli(["evaluate", str(one), "data.batch_size=[1"]) == 1
    told = capsys.readouterr().err
    assert "did you mean data.batch_size?" in told
    assert "there is no data=nosuch; there are " in told
    assert "can't read 'data.batch_size=[1'" in told
    assert "data.root must be given: data.root=FOLDER" in told
    assert cli(["evaluate", str(one / "nothing")]) == 1
    assert "there is no folder" in capsys.readouterr().err


@pytest.mark.nightly
def test_ctrl_c_on_two_processes(tmp_path: Path) -> None:
    """As a terminal does: to both."""
    words = ("trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2", send(signal.SIGINT, 1, 3), "run_dir=run")
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # what runs in the background is started deaf to it
    run = subprocess.run(
        command(*TWO, *words), cwd=tmp_path, env=environment, capture_output=True, text=True, preexec_fn=heard
    )
    assert run.returncode == 130, run.stderr
    assert run.stderr.count("stopped by Ctrl-C; resume=run continues") == 1
    assert place(tmp_path / "run/checkpoints/last.ckpt") == (1, 4)


# To another end, or with another number of optimizer steps in an epoch


pytestmark = pytest.mark.filterwarnings("ignore::lightning_fabric.utilities.warnings.PossibleUserWarning")  # of workers
EPOCHS, BATCHES = 4, 7
SCHEDULES = {
    "linear": schedules.linear,
    "one cycle": lambda optimizer, total_steps: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=total_steps),
    "several steps": lambda optimizer, total_steps: lr_scheduler.MultiStepLR(
        optimizer, [total_steps // 2 + 3, total_steps - 2]
    ),
    "cosine": lambda optimizer, total_steps: lr_scheduler.CosineAnnealingLR(optimizer, total_steps),
    "a step": lambda optimizer, total_steps: lr_scheduler.StepLR(optimizer, total_steps * 3 // 4),
    "one after another": lambda optimizer, total_steps: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.1, 1, 2), lr_scheduler.CosineAnnealingLR(optimizer, total_steps - 2)],
        [2],
    ),
    "two at once": lambda optimizer, total_steps: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(optimizer, 0.1, 1, total_steps // 4), lr_scheduler.ExponentialLR(optimizer, 0.99)]
    ),
    "without a length": lambda optimizer, total_steps: lr_scheduler.ExponentialLR(optimizer, 0.9),
}


@pytest.mark.parametrize("make", [partial(lr_scheduler.StepLR, step_size=1), lr_scheduler.CosineAnnealingLR])
def test_a_schedule_that_counts_epochs(make: Any) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(()))])
    with pytest.raises(ValueError, match=r"scheduler \((Step|CosineAnnealing)LR\) must take total_steps: schedules ch"):
        schedule_of(make, optimizer, 9)
    with pytest.raises(TypeError, match="max_lr"):
        schedule_of(lr_scheduler.OneCycleLR, optimizer, 9)


class Rates(Callback):
    """Keeps the learning rate of each batch, and a checkpoint after one of them."""

    def __init__(self, place: tuple[int, int] | None = None, path: Path | None = None) -> None:
        self.rates: dict[tuple[int, int], float] = {}
        self.place, self.path = place, path

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        self.rates[trainer.current_epoch, batch_idx] = rate

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (trainer.current_epoch, batch_idx) == self.place:
            trainer.save_checkpoint(self.path or "")


def fitted(rates: Rates, schedule: Any, **options: Any) -> None:
    resumed, path = options.pop("ckpt_path", None), options.pop("path", None)
    trainer = make_trainer(accelerator="cpu", callbacks=[rates], **{"max_epochs": EPOCHS, **options})
    pictures = TensorDataset(torch.rand(BATCHES, 1, 2, 2), torch.zeros(BATCHES, dtype=torch.long))
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
    classifier = Classifier(model, partial(torch.optim.SGD, lr=0.1), schedule)
    trainer.fit(classifier, DataLoader(pictures), DataLoader(pictures), ckpt_path=resumed, weights_only=True)
    if path is not None:
        trainer.save_checkpoint(path)


@pytest.mark.parametrize("place", [(1, 3), (EPOCHS - 1, BATCHES - 1)], ids=str)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_more_epochs_follow_the_longer_schedule(schedule: str, place: tuple[int, int], tmp_path: Path) -> None:
    """From the first step on, although the rate was 0 at the end of the shorter one."""
    first, expected, found = Rates(place, tmp_path / "a.ckpt"), Rates(), Rates()
    fitted(first, SCHEDULES[schedule])
    fitted(expected, SCHEDULES[schedule], max_epochs=2 * EPOCHS)
    fitted(found, SCHEDULES[schedule], max_epochs=2 * EPOCHS, ckpt_path=tmp_path / "a.ckpt")
    assert len(found.rates) == 2 * EPOCHS * BATCHES - (place[0] * BATCHES + place[1] + 1)
    assert found.rates == pytest.approx({at: expected.rates[at] for at in found.rates}, rel=1e-6, abs=1e-9)


def test_another_number_of_steps_in_an_epoch_is_refused(tmp_path: Path) -> None:
    rates = Rates((1, 3), tmp_path / "a.ckpt")
    fitted(rates, schedules.constant)
    with pytest.raises(ValueError, match=r"an epoch has 4 optimizer steps now, and 7 so far: resume with as many"):
        fitted(rates, schedules.constant, ckpt_path=tmp_path / "a.ckpt", accumulate_grad_batches=2)
    fitted(rates, schedules.constant, ckpt_path=tmp_path / "a.ckpt")


def test_steps_that_epochs_do_not_decide(tmp_path: Path) -> None:
    """`max_steps` ends a training of one's own."""
    rates = Rates((1, 3), tmp_path / "a.ckpt")
    fitted(rates, schedules.linear, max_epochs=-1, max_steps=20)
    assert "steps_per_epoch" not in load_checkpoint(tmp_path / "a.ckpt")
    again = Rates()
    fitted(again, schedules.linear, max_epochs=-1, max_steps=20, ckpt_path=tmp_path / "a.ckpt")
    assert again.rates == pytest.approx({at: rate for at, rate in rates.rates.items() if at > (1, 3)})


# The folder of a run: it holds one run, one process writes there


ONE = (*QUICK[:2], "trainer.max_epochs=1", "report=false")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of one epoch, below `outputs`."""
    folder = tmp_path_factory.mktemp("runs") / "outputs" / "day" / "a"
    train(config(*ONE, f"run_dir={folder}"))
    return folder


def content(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_second_run_in_a_folder_is_refused(run: Path) -> None:
    before = content(run)
    for more, hint in (
        ((), r"holds a run already \(checkpoints/last.ckpt\): continue it by resume=.*/a, or name another folder"),
        (("seed=2",), "holds a run already"),
        ((f"resume={run.parent / 'b'}",), "holds a run already"),
    ):
        with pytest.raises(RunFolderError, match=hint):
            train(config(*ONE, f"run_dir={run}", *more))
    with pytest.raises(ValueError, match=r"was trained with data .*seed=1.* this run has .*seed=2"):
        train(config(*ONE, f"run_dir={run}", "resume=auto", "seed=2"))
    with pytest.raises(RunFolderError, match=r"resume=auto needs the folder of the run: add run_dir=FOLDER"):
        train(config(*ONE, "run_dir=outputs/2026-01-31/12-00-00", "resume=auto"))
    with pytest.raises(ValueError, match=r"checkpoints.folder \(=.*elsewhere\) must be .*new/checkpoints, from which"):
        train(config(*ONE, f"run_dir={run.parent / 'new'}", "callbacks.checkpoints.folder=elsewhere"))
    with pytest.raises(RunFolderError, match=r"of another checkpoint than elsewhere/best.ckpt"):
        evaluate(config(*ONE, f"run_dir={run}", "evaluate=elsewhere/best.ckpt"))
    assert content(run) == before


def test_hydra_leaves_a_run_that_is_there_as_it_is(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hydra writes its own files before the program can look at the folder."""
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    for name in ("config.yaml", "hydra.yaml", "overrides.yaml"):
        (folder / ".hydra").mkdir(exist_ok=True)
        (folder / ".hydra" / name).write_text("of the first run")
    before = content(folder)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GOMP_SPINCOUNT", "10000")
    words = [f"hydra.run.dir={folder}", *ONE, "seed=2"]
    for more in ([], ["resume=auto"]):
        monkeypatch.setattr(sys, "argv", ["train.py", *words, *more])
        with pytest.raises(SystemExit, match=r"error: run_dir .* holds a run already|error: .*seed"):
            program.run_main("train.py", sys.argv[1:])
        assert content(folder) == before
    monkeypatch.setattr(sys, "argv", ["train.py", words[0], *ONE, "resume=auto"])
    program.run_main("train.py", sys.argv[1:])  # which goes on
    assert (folder / ".hydra" / "overrides.yaml").read_text() == "of the first run"


def test_the_line_of_a_requeued_job_starts_and_goes_on(tmp_path: Path) -> None:
    line = (*ONE, f"run_dir={tmp_path}", "resume=auto")
    assert train(config(*line)).about["resumed_from"] is None
    last = tmp_path / "checkpoints/last.ckpt"
    result = (tmp_path / "result.json").read_text()
    again = train(config(*line))
    assert again.about["resumed_from"] == str(tmp_path)
    assert again.test_loss == json.loads(result)["test_loss"]
    last.unlink()
    with pytest.raises(RunFolderError, match=r"holds a run already \(checkpoints/best.ckpt\): name another folder"):
        train(config(*line))
    for name in ("result.json", "model.safetensors"):  # as after a kill between the first two checkpoints
        (tmp_path / name).unlink()
    with pytest.raises(RunFolderError, match="holds a run already"):
        train(config(*line, "seed=2"))
    assert train(config(*line)).about["resumed_from"] is None


def test_an_evaluation_leaves_the_run_as_it_is(run: Path, tmp_path: Path) -> None:
    best = run / "checkpoints/best.ckpt"
    before = content(run)
    evaluate(config(*ONE, f"run_dir={run}", f"evaluate={best}"))
    assert {**content(run), **before} == content(run)
    assert content(run).keys() - before.keys() == {str(run / "evaluation.json")}
    other = (*ONE, f"run_dir={tmp_path}")
    for _ in range(2):
        evaluate(config(*other, f"evaluate={best}"))
    with pytest.raises(RunFolderError, match=r"has evaluation.json of another checkpoint"):
        evaluate(config(*other, f"evaluate={run / 'checkpoints/last.ckpt'}"))
    with pytest.raises(RunFolderError, match=r"holds a run already \(evaluation.json\): name another"):
        train(config(*other))
    (run / "evaluation.json").unlink()


HOLD = """
import fcntl, sys
with open(sys.argv[1], "a") as file:
    fcntl.lockf(file, fcntl.LOCK_EX)
    print("held", flush=True)
    sys.stdin.read()
"""


def test_one_process_at_a_time(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path / LOCK)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(RunFolderError, match=r"another process is writing into run_dir .*: name another folder"):
            train(config(*ONE, f"run_dir={tmp_path}"))
        assert [path.name for path in tmp_path.iterdir()] == [LOCK]
        other.kill()
    with claimed(config(*ONE, f"run_dir={tmp_path}")):  # at once: the lock has ended with its process
        assert (tmp_path / "config.yaml").is_file()
    assert not (tmp_path / LOCK).exists()
