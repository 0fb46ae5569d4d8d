"""The folder of a run: it holds one run, one process writes there, and nothing is taken from another one."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from omegaconf import open_dict
from test_train import CONFIGS, QUICK, config

from qconv.cli import train as program
from qconv.runs.run_files import LOCK
from qconv.training.run_folder import RunFolderError, claimed, find_last, is_named

ONE = (*QUICK[:2], "trainer.max_epochs=1", "report=false")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of one epoch, below `outputs`."""
    folder = tmp_path_factory.mktemp("runs") / "outputs" / "day" / "a"
    program.train(config(*ONE, f"run_dir={folder}"))
    return folder


def content(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_named_folder_is_the_only_place_where_last_is_sought(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run.parents[2])
    assert find_last(config(*ONE, "run_dir=runs/b", "ckpt_path=last")) is None
    assert find_last(config(*ONE, f"run_dir={run}", "ckpt_path=last")) == str(run / "checkpoints/last.ckpt")


BY_TIME = "outputs/2026-01-31/12-00-00"


@pytest.mark.parametrize(
    ("words", "folder", "named"),
    [
        ([], BY_TIME, False),
        (["run_dir=runs/a"], BY_TIME, True),
        (["hydra.run.dir=a/b"], "a/b", True),
        (["++hydra.run.dir=a/b"], "a/b", True),
        (["hydra.run={dir:a/b}"], "a/b", True),
        ([], "a/b", True),  # by a config of the user's own
        ([f"hydra.run.dir={BY_TIME}"], BY_TIME, True),  # that of an earlier run
        ([f"++hydra.run.dir={BY_TIME}"], BY_TIME, True),
        (["hydra.sweep.dir=a"], "a/0", True),
        ([], "multirun/2026-01-31/12-00-00/1", False),
        # as Lightning starts the other processes of a run
        ([f"hydra.run.dir={BY_TIME}", "hydra.job.name=train_ddp_process_1"], BY_TIME, False),
        ([*[f"hydra.run.dir={BY_TIME}"] * 2, "hydra.job.name=train_ddp_process_1"], BY_TIME, True),
        (["hydra.run.dir=a/b", "hydra.job.name=train_ddp_process_1"], "a/b", True),
    ],
)
def test_which_folders_are_named(words: list[str], folder: str, named: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        cfg = compose("config", words, return_hydra_config=True)
    with open_dict(cfg):
        cfg.hydra.runtime.output_dir = folder
    monkeypatch.setattr(HydraConfig.instance(), "cfg", cfg)
    assert is_named(cfg) == named


def test_without_hydra_a_folder_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HydraConfig.instance(), "cfg", None)
    assert is_named(config("run_dir=x"))


def test_a_second_run_in_a_folder_is_refused(run: Path) -> None:
    before = content(run)
    for more, hint in (
        ((), r"holds a run already \(checkpoints/last.ckpt\): go on with it by ckpt_path=last, or name another folder"),
        (("seed=2",), "holds a run already"),
        ((f"ckpt_path={run.parent / 'b/checkpoints/last.ckpt'}",), "holds a run already"),
    ):
        with pytest.raises(RunFolderError, match=hint):
            program.train(config(*ONE, f"run_dir={run}", *more))
    with pytest.raises(ValueError, match=r"add data.seed=1"):
        program.train(config(*ONE, f"run_dir={run}", "ckpt_path=last", "seed=2"))
    with pytest.raises(RunFolderError, match=r"of another checkpoint than elsewhere/best.ckpt"):
        program.evaluate(config(*ONE, f"run_dir={run}", "evaluate=elsewhere/best.ckpt"))
    assert content(run) == before


def test_hydra_leaves_a_run_that_is_there_as_it_is(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
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
    for more in ([], [f"ckpt_path={run / 'checkpoints/last.ckpt'}"]):
        monkeypatch.setattr(sys, "argv", ["train.py", *words, *more])
        with pytest.raises(SystemExit, match=r"error: run_dir .* holds a run already|error: .*seed"):
            program.run_main("train.py", sys.argv[1:])
        assert content(folder) == before
    monkeypatch.setattr(sys, "argv", ["train.py", words[0], *ONE, "ckpt_path=last"])
    program.run_main("train.py", sys.argv[1:])  # which goes on, and says so
    assert "ckpt_path=last" in (folder / ".hydra" / "overrides.yaml").read_text()


def test_the_line_of_a_requeued_job_starts_and_goes_on(tmp_path: Path) -> None:
    line = (*ONE, f"run_dir={tmp_path}", "ckpt_path=last")
    assert program.train(config(*line)).about["resumed_from"] is None
    last = tmp_path / "checkpoints/last.ckpt"
    result = (tmp_path / "result.json").read_text()
    again = program.train(config(*line))
    assert again.about["resumed_from"] == str(last)
    assert again.test_loss == json.loads(result)["test_loss"]
    last.unlink()
    with pytest.raises(RunFolderError, match=r"holds a run already \(checkpoints/best.ckpt\): name another folder"):
        program.train(config(*line))
    for name in ("result.json", "model.safetensors"):  # as after a kill between the first two checkpoints
        (tmp_path / name).unlink()
    with pytest.raises(RunFolderError, match="holds a run already"):
        program.train(config(*line, "seed=2"))
    assert program.train(config(*line)).about["resumed_from"] is None


def test_an_evaluation_leaves_the_run_as_it_is(run: Path, tmp_path: Path) -> None:
    best = run / "checkpoints/best.ckpt"
    before = content(run)
    program.evaluate(config(*ONE, f"run_dir={run}", f"evaluate={best}"))
    assert {**content(run), **before} == content(run)
    assert content(run).keys() - before.keys() == {str(run / "evaluation.json")}
    other = (*ONE, f"run_dir={tmp_path}")
    for _ in range(2):
        program.evaluate(config(*other, f"evaluate={best}"))
    with pytest.raises(RunFolderError, match=r"has evaluation.json of another checkpoint"):
        program.evaluate(config(*other, f"evaluate={run / 'checkpoints/last.ckpt'}"))
    with pytest.raises(RunFolderError, match=r"holds a run already \(evaluation.json\): name another"):
        program.train(config(*other))
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
            program.train(config(*ONE, f"run_dir={tmp_path}"))
        assert [path.name for path in tmp_path.iterdir()] == [LOCK]
        other.kill()
    with claimed(config(*ONE, f"run_dir={tmp_path}")):  # at once: the lock has ended with its process
        assert (tmp_path / "config.yaml").is_file()
    assert not (tmp_path / LOCK).exists()
