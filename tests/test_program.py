"""The program `qconv train`: how it is called, and what people add from their own folder."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import OmegaConf

from qconv.cli import main, train_as
from qconv.cli.relaunch import command_line, forgotten
from qconv.cli.train import flags_last

MINE = {
    "conf/scheme/mine.yaml": "_target_: my_methods.coarse\nweight_bits: 3\n",
    "conf/model/wide.yaml": "defaults: [small_cnn, _self_]\nwidth: 64\n",
    "conf/data/large_batch.yaml": "defaults: [digits, _self_]\nbatch_size: 128\n",
    "my_methods.py": "from qconv import schemes\n\ndef coarse(weight_bits):\n    return schemes.lsq(weight_bits, 2)\n",
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of somebody's own, in which the program runs."""
    for name, text in MINE.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GOMP_SPINCOUNT", "10000")
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    HydraConfig.instance().cfg = None


@pytest.mark.parametrize("entry", [lambda words: main(["train", *words]), lambda words: train_as("train.py", words)])
def test_both_entries_compose_the_same(
    entry: Callable[[list[str]], int], here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sys.argv
    words = ["--config-dir", "conf", "scheme=mine", "model=wide", "data=large_batch", "seed=7", "--cfg", "job"]
    assert entry(words) == 0
    cfg: Any = OmegaConf.create(capsys.readouterr().out)
    assert cfg.scheme == {"_target_": "my_methods.coarse", "weight_bits": 3}
    assert (cfg.model._target_, cfg.model.width) == ("qconv.models.small_cnn", 64)
    assert (cfg.data._target_, cfg.data.batch_size, cfg.data.seed) == ("qconv.data.DigitsDataModule", 128, 7)
    assert sys.argv is before


@pytest.mark.parametrize("before", [[], ["scheme=identity"]])
def test_a_scheme_of_the_current_folder(before: list[str], here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*before, "scheme._target_=my_methods.coarse", "+scheme.weight_bits=4"]
    small = ["model.width=4", "optimizer.lr=1e-3", "trainer=cpu", "trainer.max_epochs=1", "run_dir=run"]
    assert main(["train", *words, *small]) == 0
    shown = capsys.readouterr()
    assert "lsq(weight_bits=4, input_bits=2)" in shown.out
    names = "padding_value, stochastic, surrogate, weight_surrogate"
    note = f"scheme: ignored {names} of the default, which my_methods.coarse does not take"
    assert (note in shown.err) == (not before)
    assert (here / "run/result.json").is_file()


def test_help_names_the_program_as_called(here: Path) -> None:
    for command in ([str(Path(sys.executable).with_name("qconv")), "train"], [sys.executable, "-m", "qconv", "train"]):
        run = subprocess.run([*command, "--help"], capture_output=True, text=True, check=True)
        assert "usage: qconv train [" in run.stdout
        assert run.stderr == ""


def test_a_reader_that_stops_reading(here: Path) -> None:
    qconv = Path(sys.executable).with_name("qconv")
    for words in ("train --help", "train --cfg job"):
        ended = subprocess.run(
            ["bash", "-c", f"'{qconv}' {words} | true; exit ${{PIPESTATUS[0]}}"], capture_output=True
        )
        assert (ended.returncode, ended.stderr) == (1, b""), words


def test_another_pipe_that_breaks_is_told(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    def broken(*given: object) -> None:
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr("qconv.cli.train.run_main", broken)
    assert train_as("qconv train", []) == 1
    assert capfd.readouterr().err == "qconv train: error: [Errno 32] Broken pipe\n"


def test_flags_may_stand_anywhere() -> None:
    words = ["seed=1,2", "-m", "model.width=4", "--config-dir", "conf", "scheme=bwn", "--cfg=job"]
    assert flags_last(words) == [*words[:1], *words[2:3], "scheme=bwn", "-m", "--config-dir", "conf", "--cfg=job"]
    assert flags_last(["--config-dir"]) == ["--config-dir"]
    assert flags_last(["--config-di", "conf", "a=1"]) == ["a=1", "--config-di", "conf"]
    assert flags_last(["--info", "searchpath", "a=1"]) == ["a=1", "--info", "searchpath"]
    assert flags_last(["--info", "a=1"]) == ["a=1", "--info"]


def test_the_other_processes_of_a_run_are_called_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    job = SimpleNamespace(mode=RunMode.RUN, overrides=SimpleNamespace(task=["seed=2", "trainer=ddp"]))
    monkeypatch.setattr(HydraConfig, "get", lambda: job)
    words = ["-m", "--config-dir", "conf", "seed=1,2", "trainer=ddp"]
    cfg = OmegaConf.create({"run_dir": 'runs/a "b"'})
    assert command_line(["/bin/qconv", "train", *words], words, cfg) == ["/bin/qconv", "train", *words]
    job.mode = RunMode.MULTIRUN  # the sweep is not to start in each of them
    alone = ["--config-dir", "conf", "seed=2", "trainer=ddp", r'run_dir="runs/a \"b\""']
    assert command_line(["/bin/qconv", "train", *words], words, cfg) == ["/bin/qconv", "train", *alone]
    assert command_line(["train.py", *words], words, cfg) == ["train.py", *alone]


def test_the_next_run_of_a_sweep_starts_its_own_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "a")  # by the user
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with forgotten():
        os.environ["LOCAL_RANK"] = "0"  # by Lightning
    assert "LOCAL_RANK" not in os.environ
    assert os.environ["MASTER_ADDR"] == "a"
