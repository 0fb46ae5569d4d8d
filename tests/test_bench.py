"""The benchmark: it checks before it times, and writes what it prints."""

import csv
from pathlib import Path

import pytest

from qconv import schemes
from qconv.bench import train_step
from qconv.cli import main

QUICK = ["bench", "train-step", "--rounds", "2", "--warmup", "0", "--batch-size", "2"]


@pytest.mark.parametrize("options", [[], ["--autocast", "--channels-last"], ["--compile"]], ids=str)
def test_a_row_for_each_case_and_scheme(options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "results.csv"
    for _ in range(2):
        arguments = [*QUICK, "--case", "8@6", "--scheme", "identity", "bnn", "--csv", str(file), *options]
        assert main(arguments) == 0
    rows = list(csv.DictReader(file.read_text().splitlines()))
    assert [row["scheme"] for row in rows] == ["identity()", "bnn()"] * 2
    assert all(float(row["ratio"]) > 0 and row["machine"] and row["torch"] for row in rows)
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 6
    assert rows[0]["case"] in printed[1]


def test_a_wrong_gradient_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_step, "identity", schemes.bwn)
    case = train_step.Case("8@6")
    with pytest.raises(RuntimeError, match=r"case 8@6: the identity scheme differs from torch\.nn; nothing was timed"):
        train_step.measure(case, schemes.bnn(), train_step.Settings(batch_size=2, rounds=1))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*QUICK, "--case", "8x6"], r"case (=8x6) must be CHANNELS@SIZE, such as 128@16, or resnet18"),
        ([*QUICK, "--case", "8@6", "--rounds", "0"], "rounds (=0) must be at least 1"),
        ([*QUICK, "--case", "8@6", "--csv", "/dev/null/results.csv"], "Not a directory"),
    ],
)
def test_mistakes(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 1
    assert message in capsys.readouterr().err


def test_unknown_scheme(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*QUICK, "--scheme", "bnm"])
    assert "invalid choice: 'bnm'" in capsys.readouterr().err
