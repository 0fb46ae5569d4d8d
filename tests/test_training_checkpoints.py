"""Checkpoint files: whole or absent, read with care, compared with the run that reads them."""

from pathlib import Path

import pytest
import torch

from qconv.training import AtomicCheckpointIO, CheckpointError, load_checkpoint
from qconv.training.compare import check_config, check_tensors

CHECKPOINT = {"state_dict": {"weight": torch.arange(6.0)}, "epoch": 3, "config": {"seed": 1}}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "deep" / "last.ckpt"
    AtomicCheckpointIO().save_checkpoint(CHECKPOINT, path)
    return path


def test_round_trip(saved: Path) -> None:
    loaded = AtomicCheckpointIO().load_checkpoint(saved)
    assert torch.equal(loaded["state_dict"]["weight"], CHECKPOINT["state_dict"]["weight"])
    assert loaded["epoch"] == 3
    assert [file.name for file in saved.parent.iterdir()] == ["last.ckpt"]


def test_a_failing_save_leaves_the_old_file_and_nothing_else(saved: Path) -> None:
    before = saved.read_bytes()
    with pytest.raises(Exception, match="pickle"):
        AtomicCheckpointIO().save_checkpoint({"state_dict": {}, "half": torch.ones(1000), "bad": lambda: None}, saved)
    assert saved.read_bytes() == before
    assert [file.name for file in saved.parent.iterdir()] == ["last.ckpt"]


def test_the_new_name_is_taken_only_when_the_file_is_complete(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    replace = Path.replace

    def spy(self: Path, target: Path) -> Path:
        seen.append((load_checkpoint(self)["epoch"], load_checkpoint(target)["epoch"]))
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", spy)
    AtomicCheckpointIO().save_checkpoint({**CHECKPOINT, "epoch": 4}, saved)
    assert seen == [(4, 3)]
    assert load_checkpoint(saved)["epoch"] == 4


def test_remove(saved: Path) -> None:
    AtomicCheckpointIO().remove_checkpoint(saved)
    AtomicCheckpointIO().remove_checkpoint(saved)
    assert not saved.exists()


@pytest.mark.parametrize("keep", [0, 1, 100, -1, -200])
def test_a_truncated_file_is_named(saved: Path, keep: int) -> None:
    saved.write_bytes(saved.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=rf"checkpoint {saved}: cut off or no checkpoint"):
        load_checkpoint(saved)


def test_foreign_and_missing_files_are_named(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"none.ckpt: there is no such file"):
        load_checkpoint(tmp_path / "none.ckpt")
    with pytest.raises(CheckpointError, match="there is no such file"):
        load_checkpoint(tmp_path)
    text = tmp_path / "text.ckpt"
    text.write_text("hello " * 100)
    with pytest.raises(CheckpointError, match=r"text.ckpt: cut off or no checkpoint \(600 bytes"):
        load_checkpoint(text)
    torch.save(torch.nn.Linear(2, 2), saved)
    with pytest.raises(CheckpointError, match="holds more than tensors and plain values"):
        load_checkpoint(saved)
    torch.save({"weights": 1}, saved)
    with pytest.raises(CheckpointError, match=r"not written by train\.py"):
        load_checkpoint(saved)
    assert issubclass(CheckpointError, ValueError)


def test_a_damaged_archive_is_named(saved: Path) -> None:
    data = bytearray(saved.read_bytes())
    start = data.index(b"PK\x01\x02")
    data[start : start + 40] = b"\0" * 40
    saved.write_bytes(data)
    with pytest.raises(CheckpointError, match=rf"checkpoint {saved}: "):
        load_checkpoint(saved)


BWN = {"_target_": "qconv.schemes.bwn"}
SHIFT = {"_target_": "qconv.schemes.shift_q", "weight_bits": 5}


@pytest.mark.parametrize(
    ("group", "found", "asked", "message"),
    [
        (
            "scheme",
            BWN,
            {"_target_": "qconv.schemes.bnn"},
            "was trained with scheme qconv.schemes.bwn(), this run asks for qconv.schemes.bnn(): add scheme=bwn",
        ),
        ("scheme", {**SHIFT, "weight_bits": 4}, SHIFT, "add scheme.weight_bits=4"),
        ("scheme", {**SHIFT, "weight_bits": 4}, BWN, "add scheme=shift_q scheme.weight_bits=4"),
        ("skip", ["first"], ["first", "last"], "this run asks for ['first', 'last']: add 'skip=[first]'"),
        ("overrides", {"fc": BWN}, {}, "add 'overrides={fc:{_target_:qconv.schemes.bwn}}'"),
        ("seed", 2, 1, "was trained with seed 2, this run asks for 1: add seed=2"),
        ("model", {"_target_": "m.net"}, {"_target_": "m.net", "width": 3}, "add '~model.width'"),
    ],
)
def test_another_config_is_told_with_what_to_add(group: str, found: object, asked: object, message: str) -> None:
    checkpoint = {"state_dict": {}, "config": {group: found, "other": 1}}
    check_config("a.ckpt", checkpoint, {group: found, "other": 2}, (group,))
    with pytest.raises(CheckpointError) as error:
        check_config("a.ckpt", checkpoint, {group: asked}, (group,))
    assert str(error.value).startswith("checkpoint a.ckpt was trained with ")
    assert message in str(error.value)


def test_other_tensors_are_told() -> None:
    checkpoint = {"state_dict": {"a": torch.zeros(2), "b": torch.zeros(3)}}
    check_tensors("a.ckpt", checkpoint, {"a": torch.ones(2), "b": torch.ones(3)})
    with pytest.raises(CheckpointError, match=r"'b' is \(3,\) in it, \(4,\) in this run"):
        check_tensors("a.ckpt", checkpoint, {"a": torch.ones(2), "b": torch.ones(4)})
    with pytest.raises(CheckpointError, match=r"'b' is \(3,\) in it, absent in this run"):
        check_tensors("a.ckpt", checkpoint, {"a": torch.ones(2)})
    with pytest.raises(CheckpointError, match=r"not written by train\.py"):
        check_config("a.ckpt", checkpoint, {}, ())
