"""`qconv compare`: which runs are one row, what differs, and what is left out."""

import csv
import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image

from qconv.cli import main
from qconv.runs.comparison_table import duration
from qconv.runs.read_runs import find_runs
from qconv.runs.run_groups import compare, short_value, telling


def write(folder: Path, accuracy: float | None = None, **changed: Any) -> Path:
    """Write what a run leaves; without an accuracy, of one that was stopped."""
    config: dict[str, Any] = {
        "seed": 1,
        "run_dir": str(folder),
        "data": {"_target_": "qconv.data.DigitsDataModule", "seed": changed.get("seed", 1), "batch_size": 64},
        "model": {"_target_": "qconv.models.small_cnn", "width": 8},
        "scheme": {"_target_": "qconv.schemes.bnn"},
        "optimizer": {"lr": 0.1},
        "trainer": {"max_epochs": 20, "devices": 1},
        "callbacks": {"history": {"folder": str(folder)}},
        **changed,
    }
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    if accuracy is not None:
        name = config["scheme"]["_target_"].rpartition(".")[2]
        result = {
            "test_accuracy": accuracy,
            "val_accuracy_best": accuracy + 0.01,
            "epochs": 20,
            "seconds": 75.0,
            "packed_bytes": 1234,
            "scheme": f"{name}()",
            "macs_by_bits": {"1x1": 90, "32x32": 10},
        }
        (folder / "result.json").write_text(json.dumps(result))
    return folder


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A sweep over two schemes and two seeds, and what else lies there."""
    bwn = {"_target_": "qconv.schemes.bwn"}
    write(tmp_path / "m/0", 0.90)
    write(tmp_path / "m/1", 0.94, seed=2)
    write(tmp_path / "m/2", 0.80, scheme=bwn)
    write(tmp_path / "m/10", 0.84, scheme=bwn, seed=2, trainer={"max_epochs": 20, "devices": 1, "timeout_s": 9})
    (write(tmp_path / "m/3") / "metrics.csv").write_text("epoch\n0\n1\n")
    (write(tmp_path / "m/4", 0.1) / "result.json").write_text('{"test_acc')
    (write(tmp_path / "m/5") / "config.yaml").write_text("a: [")
    write(tmp_path / "m/6")
    (tmp_path / "m/0/.hydra").mkdir()
    (tmp_path / "m/0/.hydra/config.yaml").write_text("data: 1\nmodel: 1\nscheme: 1\n")
    return tmp_path / "m"


@pytest.mark.drawn
def test_a_row_for_what_differs_by_more_than_the_seed(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [f"--{kind}={tmp_path / kind}" for kind in ("csv", "markdown", "plot")]
    assert main(["compare", str(runs), str(runs / "0"), str(tmp_path / "none"), *files]) == 0
    told = capsys.readouterr()
    title, _, head, bnn, bwn = told.out.splitlines()
    assert title == "small_cnn(width=8), on Digits(batch_size=64)"
    assert head.split() == ["scheme", "test", "%", "val.", "%", "seeds", "bits", "w/in", "bytes", "time", "epochs"]
    assert " ".join(bnn.split()) == "bnn 92.00 ± 2.83 93.00 ± 2.83 2 1/1 1,234 1:15 min 20"
    assert bwn.split()[:4] == ["bwn", "82.00", "±", "2.83"]
    for folder, reason in (
        (runs / "3", "not finished: 2 of 20 epochs"),
        (runs / "4", "result.json is damaged"),
        (runs / "5", "while parsing"),
        (runs / "6", "not finished: 0 of 20 epochs"),
        (tmp_path / "none", "no such folder"),
    ):
        assert f"{folder}: {reason}" in told.err
    assert told.err.count("\n") == 7
    first, _ = csv.DictReader((tmp_path / "csv").read_text().splitlines())
    assert (first["scheme"], first["seeds"], first["runs"]) == ("bnn", "1 2", f"{runs / '0'} {runs / '1'}")
    assert float(first["test_accuracy"]) == pytest.approx(0.92)
    assert float(first["test_accuracy_deviation"]) == pytest.approx(0.0282843, rel=1e-4)
    assert (tmp_path / "markdown").read_text().splitlines()[2].startswith("| bnn | 92.00 ± 2.83 | 93.00")
    with Image.open(tmp_path / "plot") as plot:
        assert plot.size[0] == 1200
    monkeypatch.setenv("COLUMNS", "74")
    assert main(["compare", str(runs)]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 74


TABLES = {
    "seeds, and what else is known": (
        'scheme,seed,test_accuracy,seconds\n"lsq(2, 4)",1,0.8,61\n"lsq(2, 4)",2,0.82,71\n"lsq(4, 4)",1,1,\n',
        ["lsq(2, 4) 81.00 ± 1.41 – 2 – – 1:06 min –", "lsq(4, 4) 100.00 – 1 – – – –"],
        [],
    ),
    "settings, a repeated seed, a faulty row": (
        "scheme,seed,lr,test_accuracy\nbnn,1,0.1,0.8\nbnn,1,0.2,0.7\nbnn,1,0.2,0.6\nbnn,2,0.2,60\nbnn,,0.1,0.8\n",
        ["bnn 0.1 80.00 – 1 – – – –", "bnn 0.2 60.00 – 1 – – – –"],
        [
            "line 3: replaced by",
            "line 5: test_accuracy (=60) must be a share",
            "line 6: no seed: a row needs scheme, seed,",
        ],
    ),
    "none": ("epoch\n", [], ["no run in it"]),
    "no table": ("\0\n\xff", [], ["no CSV file"]),
}


@pytest.mark.drawn
@pytest.mark.parametrize("kind", TABLES)
def test_the_runs_of_a_table(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, rows, told = TABLES[kind]
    (tmp_path / "table.csv").write_text(text, encoding="latin-1")
    files = [f"--{form}={tmp_path / form}" for form in ("csv", "markdown", "plot")]
    assert main(["compare", str(tmp_path / "table.csv"), *files]) == (not rows)
    shown = capsys.readouterr()
    assert [" ".join(line.split()) for line in shown.out.splitlines()[1:]] == rows
    assert all(each in shown.err for each in told)
    assert (tmp_path / "plot").is_file() == bool(rows)


def made_of(name: str, **own: Any) -> dict[str, Any]:
    return {"_target_": f"qconv.data.{name}DataModule", **own}


EMA = {"_target_": "qconv.training.MovingAverage", "decay": 0.999}
WIDE = {"_target_": "qconv.models.small_cnn", "width": 16}
FLOWERS = {"root": "/flowers/images", "cache": "there"}
GROUPS: dict[str, Any] = {
    # what each run changes, the runs of each row, the newer ones where the seed is the same, and a column
    "single values have columns": ([{}, {"optimizer": {"lr": 0.2}}], [[0], [1]], "optimizer.lr", ["0.1", "0.2"]),
    "models": ([{}, {"model": WIDE}], [[0], [1]], "model", ["small_cnn(width=8)", "small_cnn(width=16)"]),
    "callbacks that change the numbers": (
        [{}, {"callbacks": {"ema": EMA}}, {"callbacks": {"ema": {**EMA, "decay": 0.9}}}],
        *([[0], [1], [2]], "callbacks.ema.decay", ["–", "0.999", "0.9"]),
    ),
    "devices, with as large batches each": ([{}, {"trainer": {"max_epochs": 20, "devices": 2}}], [[0], [1]], "", []),
    "another folder, and who reads it": (
        [
            {"data": made_of("Prepared", **FLOWERS, workers=2)},
            {"data": made_of("Prepared", **{**FLOWERS, "cache": "here"}, workers=4), "seed": 2},
            {"data": made_of("Prepared", root="/birds/images", workers=2)},
        ],
        *([[0, 1], [2]], "data", ["Prepared(root=/flowers/images)", "Prepared(root=/birds/images)"]),
    ),
    "of a part only the arguments that differ": (
        [{"data": made_of("Digits", batch_size=64, shift=n)} for n in (1, 2)],
        *([[0], [1]], "data", ["Digits(shift=1)", "Digits(shift=2)"]),
    ),
    "the seed of the data alone": ([{"data": made_of("Digits", seed=seed)} for seed in (1, 2)], [[0], [1]], "", []),
    "of one split": ([{"data": made_of("Digits", seed=1), "seed": seed} for seed in (1, 2, 3)], [[0, 1, 2]], "", []),
    "keys that earlier versions lacked": (
        [
            {"data": made_of("Prepared", seed=1)},
            {"data": made_of("Prepared", seed=2, decode="cpu", augment=None), "seed": 2},
            {"data": made_of("Prepared", seed=3, decode="device", augment=None), "seed": 3},
        ],
        *([[0, 1, 2]], "", []),
    ),
}


@pytest.mark.parametrize("kind", GROUPS)
def test_what_is_another_row(kind: str, tmp_path: Path) -> None:
    changes, rows, column, values = GROUPS[kind]
    for index, changed in enumerate(changes):
        write(tmp_path / str(index), 0.9 - index / 10, **changed)
    groups, common, left_out = compare(find_runs([tmp_path])[0])
    assert [sorted(int(run.folder.name) for run in group.runs) for group in groups] == rows
    assert left_out == []
    if values:
        assert [group.differs[column] for group in groups] == values
    if kind == "single values have columns":
        assert telling(groups) == {"scheme": "scheme", "optimizer.lr": "lr"}
        assert groups[0].differs == {"scheme": "bnn", "optimizer.lr": "0.1"}
        assert common == {"data": "Digits(batch_size=64)", "model": "small_cnn(width=8)"}


def test_what_changes_no_number_is_left_out(tmp_path: Path) -> None:
    write(tmp_path / "0", 0.9)
    write(tmp_path / "1", 0.6, callbacks={"checkpoints": {"folder": "b", "every_steps": 9}, "diagnostics": {"x": 1}})
    groups, _, left_out = compare(find_runs([tmp_path])[0])
    assert (len(groups), len(left_out)) == (1, 1)


def test_runs_of_another_precision_are_another_row(tmp_path: Path) -> None:
    for name, precision in (("0", "32-true"), ("1", "bf16-mixed")):
        result = write(tmp_path / name, 0.9, trainer={"precision": "auto"}) / "result.json"
        result.write_text(json.dumps({**json.loads(result.read_text()), "precision": precision}))
    groups, _, left_out = compare(find_runs([tmp_path])[0])
    assert [group.differs["trainer.precision"] for group in groups] == ["32-true", "bf16-mixed"]
    assert left_out == []


def test_of_runs_with_the_same_seed_the_newest_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    older, newer = write(tmp_path / "b", 0.5), write(tmp_path / "a", 0.9)
    os.utime(older / "result.json", (1, 1))
    assert main(["compare", str(older), str(newer)]) == 0
    told = capsys.readouterr()
    assert told.out.splitlines()[-1].split()[:2] == ["bnn", "90.00"]
    assert f"{older}: replaced by a newer run with the same settings and seed" in told.err


def test_nothing_to_compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "a")
    assert main(["compare", str(tmp_path)]) == 1
    assert "no finished run to compare" in capsys.readouterr().err


def test_durations() -> None:
    shown = {7.25: "7.2 s", 59.99: "60.0 s", 60: "1:00 min", 75: "1:15 min", 3599: "59:59 min", 3600: "1:00 h"}
    assert {value: duration(value) for value in shown} == shown


def test_the_fewest_columns_that_tell_runs_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for index, lr in enumerate((0.1, 0.2, 0.3)):
        path = f"torch.optim.{'SGD' if index else 'Adam'}"
        optimizer = {"lr": lr, "weight_decay": lr / 100, "optimizer": {"path": path}, "nesterov": bool(index)}
        write(tmp_path / str(index), 0.9, optimizer=optimizer)
    groups = compare(find_runs([tmp_path])[0])[0]
    assert telling(groups) == {"scheme": "scheme", "optimizer.lr": "lr"}
    assert [group.name(telling(groups)) for group in groups] == [f"bnn 1/1, lr={lr}" for lr in (0.1, 0.2, 0.3)]
    assert short_value("optimizer.optimizer.path", "torch.optim.SGD") == "SGD"
    assert main(["compare", str(tmp_path)]) == 0
    assert "these differ, too (--csv writes them): optimizer.nesterov, optimizer.op" in capsys.readouterr().out
