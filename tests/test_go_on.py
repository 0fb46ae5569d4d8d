"""A run from its folder alone: `resume=RUN`, `qconv evaluate RUN`, and Ctrl-C, after which it is needed."""

import json
import os
import shlex
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
from test_train import ROOT, Send, config, place, send

from qconv import Scheme, convert, schemes
from qconv.cli import main as cli, train as program, train_as
from qconv.cli.configs import folder as configs
from qconv.models import small_cnn
from qconv.training import Classifier, load_checkpoint, schedules
from qconv.training.go_on import changes
from qconv.training.stored_config import stored_config

TWO = ("model.width=4", "trainer=cpu", "trainer.max_epochs=2", "scheduler=constant")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of two epochs."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    program.train(config(*TWO, f"run_dir={folder}"))
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


def same(one: Path, other: Path) -> bool:
    a, b = (load_checkpoint(path / "checkpoints/last.ckpt")["state_dict"] for path in (one, other))
    files = ("metrics.csv", "diagnostics.csv")
    return all(torch.equal(a[name], b[name]) for name in {*a, *b}) and all(
        (one / name).read_text() == (other / name).read_text() for name in files
    )


class InTest(Send):
    """Sends the signal in the test."""

    def on_test_batch_start(self, *_: Any, **__: Any) -> None:
        signal.raise_signal(self.number)


@pytest.mark.parametrize(
    ("where", "saved"),
    [((0, 3), (0, 4)), ((0, -1), (0, 19)), ("test", (1, 19))],
    ids=["first epoch", "validation", "test"],
)
def test_ctrl_c_saves_and_the_run_goes_on_bit_for_bit(
    where: tuple[int, int] | str, saved: tuple[int, int], whole: Path, told: Callable[..., str], tmp_path: Path
) -> None:
    sent = "+callbacks.send={_target_:test_go_on.InTest,number:2,epoch:-1,batch:0}"
    words = sent if isinstance(where, str) else send(signal.SIGINT, *where)
    said = told(*TWO, words, "run_dir=runs/cut")
    assert said.startswith("130\n")
    assert said.endswith("\nstopped by Ctrl-C; resume=runs/cut goes on from the last checkpoint\n")
    assert place(tmp_path / "runs/cut/checkpoints/last.ckpt") == saved
    has_epoch = where != (0, 3)
    assert (tmp_path / "runs/cut/curves.png").is_file() == has_epoch
    shutil.move("runs/cut", "moved")  # the folder is enough, wherever it is
    assert "resume=moved: going on from" in told("resume=moved", "~callbacks.send")
    assert same(whole, tmp_path / "moved")
    assert not (tmp_path / "runs/cut").exists()
    assert "~callbacks.sent: the run has no such key" in told("resume=moved", "~callbacks.sent")


def test_a_finished_run_says_so_and_can_have_more_epochs(
    one: Path, whole: Path, told: Callable[..., str], tmp_path: Path
) -> None:
    before = (one / "metrics.csv").read_text()
    assert "has finished, its 2 epochs are done" in told(f"resume={one}")
    assert told(f"resume={one}", "optimizer.lr=1").endswith("extends it; optimizer.lr=1 changed nothing")
    config_before = (one / "config.yaml").read_bytes()
    assert "trainer.max_epochs (=1) must be at least 2" in told(f"resume={one}", "trainer.max_epochs=1")
    assert "trainer.max_epochs (=None) must be a whole number" in told(f"resume={one}", "trainer.max_epochs=null")
    result = (one / "result.json").rename(one / "later")
    assert "trainer.max_epochs (=1) must be at least 2, the epochs" in told(f"resume={one}", "trainer.max_epochs=1")
    (one / "later").rename(result)
    assert "limit_val_batches" in told(f"resume={one}", "trainer.max_epochs=3", "+trainer.limit_val_batches=0")
    assert (one / "config.yaml").read_bytes() == config_before  # the run is where it was
    assert (one / "metrics.csv").read_text() == before
    said = told(f"resume={one}", "trainer.max_epochs=3")
    assert (
        "trainer.max_epochs: 2 → 3. No schedule depends on it: this is what 3 epochs from the start would be." in said
    )
    program.train(config(*TWO, "trainer.max_epochs=3", f"run_dir={tmp_path / 'three'}"))
    assert same(one, tmp_path / "three")
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
    words = f"has finished, EarlyStopping has ended it at {done} of 6 epochs (run/result.json); ~callbacks.stop goes on"
    assert words in told("resume=run")
    assert words in told("resume=run", "trainer.max_epochs=7")
    assert f"going on from epoch {done - 1}" in told("resume=run", "~callbacks.stop")
    assert "has finished, its 6 epochs are done" in told("resume=run")


def test_a_refusal_names_the_words_that_go_on_all_the_same(one: Path, told: Callable[..., str], tmp_path: Path) -> None:
    last, words = f"ckpt_path={one / 'checkpoints/last.ckpt'}", (*TWO[:2], "scheduler=constant", f"run_dir={one}")
    refused = told(*words, last, "trainer.max_epochs=3", "trainer.precision=bf16-mixed")
    assert ": add trainer.max_epochs=2 trainer.precision=32-true, or go on with this difference by " in refused
    said = told(*shlex.split(refused.partition(" difference by ")[2].splitlines()[0]))
    assert "trainer.precision: 32-true → bf16-mixed. Sums may be rounded otherwise" in said
    assert json.loads((one / "result.json").read_text())["epochs"] == 3
    for other in ("seed=2", "optimizer.lr=0.5", "trainer.max_epochs=2"):  # what resume= would not take
        assert "difference by" not in told(*words, last, "trainer.max_epochs=4", other)
    away = shutil.copy(one / "checkpoints/last.ckpt", tmp_path / "of no run.ckpt")
    assert "difference by" not in told(*words, f"ckpt_path='{away}'", "trainer.max_epochs=4")


def test_more_epochs_of_a_schedule_that_stores_its_length(told: Callable[..., str], tmp_path: Path) -> None:
    one_cycle = (
        *("scheduler._target_=torch.optim.lr_scheduler.OneCycleLR", "~scheduler.warmup", "~scheduler.final"),
        "+scheduler.max_lr=0.01",
    )
    program.train(config(*TWO[:2], *one_cycle, "trainer.max_epochs=1", f"run_dir={tmp_path / 'run'}"))
    said = told("resume=run", "trainer.max_epochs=2")
    assert "1 → 2. From here on the learning rate follows 2 epochs, so far 1: another run than 2 epochs from" in said


def test_a_schedule_keeps_the_rates_that_rules_ask_for(told: Callable[..., str]) -> None:
    one_cycle = "scheduler._target_=torch.optim.lr_scheduler.OneCycleLR", "~scheduler.warmup", "~scheduler.final"
    rules = "optimizer.rules={norms:{lr_scale:0.1}}"
    short = (*TWO[:2], "trainer.max_epochs=1", rules, *one_cycle)
    said = told(*short, "+scheduler.max_lr=0.01", "run_dir=one")
    assert "scheduler (OneCycleLR) gives all groups of parameters the learning rate 0.0004" in said
    assert "but the rules of the optimizer ask for 0.001, 0.01: give it a list" in said
    program.train(config(*short, "+scheduler.max_lr=[0.01,0.001]", "run_dir=two"))


@pytest.mark.parametrize(
    ("scheme", "schedule", "last", "says"),
    [
        (schemes.bnn(), schedules.constant, 5, "No schedule depends on it"),
        (schemes.bnn(), schedules.cosine, 0, "the learning rate follows 9 epochs, so far 6"),
        (schemes.irnet(), schedules.constant, 5, "the quantizers' schedules follow 9 epochs"),
        (schemes.irnet(), schedules.constant, 0, "No schedule depends on it"),  # all start at 0
        (schemes.irnet(), schedules.linear, 5, "the learning rate and the quantizers' schedules follow 9"),
    ],
)
def test_what_depends_on_the_number_of_epochs(scheme: Scheme, schedule: Any, last: int, says: str) -> None:
    config = {"trainer": {"max_epochs": 9, "devices": 1}}
    model = convert(small_cnn(1, 10, width=4), scheme)
    classifier = Classifier(model, torch.optim.SGD, schedule, config)
    stored = {"config": {"trainer": {"max_epochs": 6, "devices": 2}}, "epoch": last}
    epochs, devices = changes(stored, classifier)
    assert epochs.startswith("trainer.max_epochs: 6 → 9. ")
    assert says in epochs
    assert devices == "trainer.devices: 2 → 1. Optimizer steps are of other images from here on."


def test_what_batches_depend_on() -> None:
    def said(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
        configs = [
            {"trainer": {"max_epochs": 2, **other}, "data": {"batch_size": batch}}
            for other, batch in ((options, options.pop("batch")) for options in (before, now))
        ]
        classifier = Classifier(small_cnn(1, 10, width=4), torch.optim.SGD, None, configs[1])
        return list(changes({"config": configs[0], "epoch": 0}, classifier))

    rounded, others = "Sums may be rounded otherwise", "Optimizer steps are of other images"
    as_many = "Steps are of as many images, batch norm sees those of one process."
    assert said({"devices": 1, "batch": 256}, {"devices": 2, "batch": 128}) == [
        f"trainer.devices: 1 → 2. {as_many}",
        f"data.batch_size: 256 → 128. {as_many}",
    ]
    (one,) = said({"batch": 64}, {"batch": 32})
    assert one == f"data.batch_size: 64 → 32. {others} from here on."
    (one,) = said({"devices": "auto", "batch": 64}, {"devices": 1, "batch": 64})
    assert one == f"trainer.devices: auto → 1. {others} from here on."
    assert others in said({"batch": 8}, {"limit_train_batches": 0.5, "batch": 8})[0]
    one, other = said({"batch": 8}, {"accumulate_grad_batches": 2, "batch": 4})
    assert (others in one, others in other) == (True, True)
    assert rounded in said({"batch": 8, "precision": 32}, {"batch": 8, "precision": 16})[0]
    for key, value in (("gradient_clip_val", 1.0), ("sync_batchnorm", True), ("check_val_every_n_epoch", 2)):
        (one,) = said({"batch": 8}, {"batch": 8, key: value})
        assert one == f"trainer.{key}: None → {value}. The run is another one from here on."
    (one,) = said({"batch": 8, "timeout_s": 9}, {"batch": 8})
    assert one == "trainer.timeout_s: 9 → None. The numbers stay the same."
    defaults = {"sync_batchnorm": False, "accumulate_grad_batches": 1, "devices": 1, "num_nodes": 1}
    assert said({"batch": 8}, {"batch": 8, **defaults}) == []


def test_other_options_that_depend_on_the_number_of_epochs() -> None:
    rules = {"step_rules": [{"_target_": "qconv.optim.OvSW"}], "data": {"progressive_size": {"start": 0.5}}}
    stored = {"config": {"trainer": {"max_epochs": 6}}, "epoch": 5}
    for more, dampening, says in (
        ({}, 0.1, "the dampening follows 9 epochs"),
        (rules, 0.0, "the step rules and the image size follow 9 epochs"),
    ):
        classifier = Classifier(
            small_cnn(1, 10, width=4),
            torch.optim.SGD,
            schedules.constant,
            {"trainer": {"max_epochs": 9}, **more},
            dampening=dampening,
        )
        (line,) = changes(stored, classifier)
        assert says in line


def test_words_on_top(one: Path) -> None:
    loggers = stored_config(one, ["logger=[csv,tensorboard]"], configs()).logger
    assert {*loggers} == {"csv", "tensorboard"}
    cfg = stored_config(one, ["trainer=ddp", "data.batch_size=32", "+data.new=1", "callbacks=ema"], configs())
    assert (cfg.trainer.strategy, cfg.trainer.max_epochs) == ("ddp", 2)
    assert (cfg.data.batch_size, cfg.data.new, cfg.model.width) == (32, 1, 4)
    assert cfg.callbacks.checkpoints.folder == f"{one}/checkpoints"
    cfg = stored_config(one, ["run_dir=elsewhere"], configs())
    assert (cfg.run_dir, cfg.callbacks.history.folder) == ("elsewhere", "elsewhere")


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


def test_words_that_mean_nothing(one: Path, told: Callable[..., str], tmp_path: Path) -> None:
    resume = f"resume={one}"
    for words, error in (
        ((resume, "experiment=search_bits"), "composes a new run"),
        ((resume, "seed=1,2"), "is a sweep"),
        ((resume, "modle.width=3"), "modle"),
        ((resume, "ckpt_path=last"), "can't be given together"),
        ((resume, "optimizer.lr=1", "trainer.max_epochs=3"), "add optimizer.lr=0.01"),
        ((resume, "model.width=8", "trainer.max_epochs=3"), "add model.width=4"),
        ((resume, "-m"), "-m can't be given with resume=RUN"),
        ((resume, "resume=b"), "must name the folder of one run"),
        (("resume=nowhere",), "there is no folder nowhere: give the folder that the training has named"),
    ):
        assert error in told(*words), words
    with pytest.raises(ValueError, match=r"resume .* must be given on the command line"):
        program.train(config(*TWO, "resume=x", f"run_dir={tmp_path / 'new'}"))
    (one / "checkpoints/last.ckpt").unlink()
    (one / "result.json").unlink()
    assert "has no checkpoints/last.ckpt" in told(resume)


def test_evaluate(one: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = json.loads((one / "result.json").read_text())
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
    assert cli(["evaluate", str(one / "nothing")]) == 1
    assert "there is no folder" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_evaluating_a_run_of_a_gpu_without_one(one: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(["evaluate", str(one), "trainer.accelerator=gpu"]) == 1
    assert (
        "trainer=gpu needs a GPU, and torch finds none: leave it out, or write trainer=cpu" in capsys.readouterr().err
    )


@pytest.mark.nightly
def test_ctrl_c_on_two_processes(tmp_path: Path) -> None:
    """As a terminal does: to both."""
    words = ("trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2", send(signal.SIGINT, 1, 3), "run_dir=run")
    command = [sys.executable, str(ROOT / "train.py"), *TWO, *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests")}
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # what runs in the background is started deaf to it
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, preexec_fn=heard)
    assert run.returncode == 130, run.stderr
    assert run.stderr.count("stopped by Ctrl-C; resume=run goes on") == 1
    assert place(tmp_path / "run/checkpoints/last.ckpt") == (1, 4)
