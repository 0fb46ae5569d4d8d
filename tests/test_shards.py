"""Images from tar files: each once, in an order by (seed, epoch), over HTTP, and what is said of bad files."""

import http.server
import io
import itertools
import json
import tarfile
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from runs import config
from torch import Tensor

from qconv.data import BrokenPictureError, ShardError, WebDatasetDataModule
from qconv.data.large import Crop
from qconv.data.loader import EpochOrder
from qconv.data.shards import LANES, ShardLoader, ShardStream
from qconv.images import ReadingError
from qconv.training.run import train

COUNTS = (7, 1, 30, 12)


def png(value: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.full((24, 20, 3), value, np.uint8)).save(file, "png")
    return file.getvalue()


def write(path: Path, samples: list[dict[str, bytes]]) -> None:
    with tarfile.open(path, "w") as tar:
        for number, sample in enumerate(samples):
            for suffix, data in sample.items():
                member = tarfile.TarInfo(f"{number:04}.{suffix}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Fifty images, each of a grey of its own, in four shards, and ten to test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    number = 0
    for shard, count in enumerate(COUNTS):
        write(tmp_path / f"train-{shard}.tar", [{"png": png(number + i), "cls": b"%d" % (i % 3)} for i in range(count)])
        number += count
    write(tmp_path / "test.tar", [{"png": png(100 + i), "cls": b"2\n"} for i in range(10)])
    return tmp_path


def made(folder: Path, **options: Any) -> WebDatasetDataModule:
    test = f"{folder}/test.tar"
    usual: dict[str, Any] = {"val": test, "test": test, "image_size": 16, "resize": 20, "batch_size": 4, "workers": 0}
    data = WebDatasetDataModule(f"{folder}/train-{{0..3}}.tar", **{**usual, **options})
    data.setup("fit")
    return data


def greys(loader: Any, epoch: int = 0) -> list[int]:
    """Which images came, by their greys."""
    loader.sampler.set_epoch(epoch)
    return [int(image[0, 0, 0]) for images, _, _ in loader for image in images]


def test_every_picture_once_in_a_new_order_each_epoch(folder: Path) -> None:
    loader = made(folder).train_dataloader()
    assert len(loader) == 13
    epochs = [greys(loader, epoch) for epoch in range(3)]
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != list(range(50))
    assert epochs[1] == greys(made(folder).train_dataloader(), 1)
    assert epochs[1] != greys(made(folder, seed=1).train_dataloader(), 1)
    data = made(folder)
    assert greys(data.test_dataloader()) == greys(data.val_dataloader()) == list(range(100, 110))
    assert data.num_classes == 3


def test_pictures_are_mixed(folder: Path) -> None:
    def neighbours(buffer: int) -> int:
        order = greys(made(folder, buffer=buffer, batch_size=25).train_dataloader())
        assert sorted(order) == list(range(50))
        return sum(after == before + 1 for before, after in itertools.pairwise(order))

    assert neighbours(0) >= 44  # but for the bounds of the shards and of the batches, as they are stored
    assert neighbours(24 * 5) < 30
    assert neighbours(5000) < 10


@pytest.mark.parametrize("given", ["val", "test"])
def test_without_a_split_of_their_own_training_shards_validate(given: str, folder: Path) -> None:
    test = {"val": None, "test": None, given: f"{folder}/test.tar"}
    data = made(folder, **test)
    assert greys(data.test_dataloader()) == list(range(100, 110))
    train, val = greys(data.train_dataloader()), greys(data.val_dataloader())
    assert len(val) in COUNTS
    assert sorted(train + val) == list(range(50))
    assert val == greys(made(folder, **test, seed=1).val_dataloader())
    assert len({tuple(greys(made(folder, **test, split_seed=seed).val_dataloader())) for seed in range(9)}) > 1
    assert [shard.samples for shard in made(folder, **test, val_size=3).splits["train"]] in [[n] for n in COUNTS]
    with pytest.raises(ValueError, match=r"val_size \(=4\) must leave some of the 4 training shards; .* val and test"):
        made(folder, **test, val_size=4)
    with pytest.raises(ValueError, match=r"val_size \(=0\) must be a positive number"):
        made(folder, **test, val_size=0)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("start", [0, 5, 13])
def test_workers_and_resuming_change_nothing(workers: int, start: int, folder: Path) -> None:
    def epoch(workers: int, start: int) -> list[Tensor]:
        loader = made(folder, workers=workers).train_dataloader()
        loader.load_state_dict({"epoch": 2, "batch": start})
        loader.sampler.set_epoch(2)
        return [images for images, _, _ in loader]

    whole, part = epoch(0, 0), epoch(workers, start)
    assert len(part) == len(whole) - start
    assert all(torch.equal(one, other) for one, other in zip(part, whole[start:], strict=True))


def test_no_number_is_taken_from_dropout(folder: Path) -> None:
    state = torch.get_rng_state()
    list(made(folder, workers=1).train_dataloader())
    assert torch.get_rng_state().equal(state)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("split", ["train", "test"])
def test_processes_share_the_pictures(world_size: int, split: str, folder: Path) -> None:
    data = made(folder)
    seen, steps = [], set()
    for rank in range(world_size):
        loader = data.train_dataloader() if split == "train" else data.test_dataloader()
        assert isinstance(loader, ShardLoader)
        order = loader.sampler
        shared: Any = {"shuffle": order.shuffle, "rank": rank, "world_size": world_size}
        loader.sampler = loader.stream.order = EpochOrder(order.size, 4, **shared)
        batches = [images for images, _, _ in loader]
        assert all(0 < len(images) <= 4 for images in batches)
        steps.add(len(batches))
        seen += [int(image[0, 0, 0]) for images in batches for image in images]
    assert sorted(seen) == (list(range(50)) if split == "train" else list(range(100, 110)))
    assert len(steps) == 1


def test_more_steps_than_lanes(folder: Path) -> None:
    loader = made(folder, batch_size=1).train_dataloader()
    assert len(loader) == 50 > LANES
    assert sorted(greys(loader, 1)) == list(range(50))


@pytest.fixture
def server(folder: Path) -> Iterator[tuple[str, list[str]]]:
    asked: list[str] = []

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            asked.append(self.path)

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_address[1]}", asked
        running.shutdown()


def test_over_http(server: tuple[str, list[str]], folder: Path) -> None:
    address, asked = server
    options: dict[str, Any] = {"image_size": 16, "resize": 20, "batch_size": 4, "workers": 0}
    test = f"{address}/test.tar"
    where: dict[str, Any] = {"val": test, "test": test, "index": str(folder / "index.json")}
    data = WebDatasetDataModule(f"{address}/train-{{0..3}}.tar", **where, **options)
    assert greys(data.train_dataloader(), 1) == greys(made(folder).train_dataloader(), 1)
    assert json.loads((folder / "index.json").read_text())[f"{address}/train-2.tar"] == [30, 2, ""]
    asked.clear()
    WebDatasetDataModule(f"{address}/train-{{0..3}}.tar", **where, **options)
    assert asked == []  # what is in them is known
    with pytest.raises(ShardError, match=rf"shard {address}/none.tar cannot be read: "):
        WebDatasetDataModule(f"{address}/none.tar", **where, **options)


@pytest.mark.nightly
def test_a_run(folder: Path) -> None:
    small = ("data.image_size=16", "data.resize=20", "data.batch_size=10", "trainer=cpu", "trainer.max_epochs=2")
    where = (f"data.train='{folder}/train-{{0..3}}.tar'", f"data.test={folder}/test.tar", "model=resnet20")
    assert train(config("data=webdataset", *small, *where, f"run_dir={folder / 'run'}")).epochs == 2


def test_broken_pictures_are_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(folder / "train-1.tar", [{"png": b"none", "cls": b"0"}])
    data = made(folder, broken="skip", batch_size=50)
    batches = [data.on_before_batch_transfer(batch, 0) for batch in data.train_dataloader()]
    assert sum(len(labels) for _, labels in batches) == 49
    assert "left out (1 so far)" in capsys.readouterr().err
    data = made(folder)
    with pytest.raises(BrokenPictureError, match=r"train-1.tar: 0000 cannot be decoded"):
        [data.on_before_batch_transfer(batch, 0) for batch in data.train_dataloader()]


def test_what_may_be_read_another_time_is_not_left_out(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(data: bytes, pixel_range: None) -> Tensor:
        raise ReadingError("[Errno 24] Too many open files; the file may be intact: try again")

    monkeypatch.setattr("qconv.data.shards.decode", fails)
    data = made(folder, broken="skip")
    with pytest.raises(BrokenPictureError, match=r"\d{4} cannot be decoded \(.*try again\)$"):
        [data.on_before_batch_transfer(batch, 0) for batch in data.train_dataloader()]


@pytest.mark.nightly
@pytest.mark.parametrize("workers", [0, 2])
def test_shards_that_changed(workers: int, folder: Path) -> None:
    data = made(folder, workers=workers)
    write(folder / "train-2.tar", [{"png": png(1), "cls": b"0"}])
    with pytest.raises(
        ShardError, match=r"^shard .*train-2.tar: 1 images, and 30 when they were counted: remove the index$"
    ):
        list(data.train_dataloader())
    write(folder / "train-2.tar", [{"png": png(1), "cls": b"0"}] * 31)
    at_once = ShardStream(data.splits["train"], EpochOrder(50, 50, shuffle=True), Crop(16, 20, 0), 0)
    with pytest.raises(ShardError, match=r"31 images, and 30 when they were counted"):
        [list(at_once) for at_once.order.epoch in range(5)]  # in some it is not the last one
    (folder / "train-2.tar").write_bytes(b"x" * 2000)
    with pytest.raises(ShardError, match=r"^shard .*train-2.tar cannot be read: [^\n]*$"):
        list(data.train_dataloader())


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([], "no images"),
        ([{"txt": b"a", "cls": b"0"}], "no images"),
        ([{"png": png(0)}], r"0000.cls \(=''\) must be a class's number"),
        ([{"png": png(0), "cls": b"cat"}], r"0000.cls \(='cat'\) must be a class's number"),
    ],
)
def test_shards_that_are_none(samples: list[dict[str, bytes]], message: str, folder: Path) -> None:
    write(folder / "train-3.tar", samples)
    with pytest.raises(ShardError, match=rf"shard .*train-3.tar: {message}"):
        made(folder)


def test_what_has_changed_is_counted_anew(folder: Path) -> None:
    assert made(folder).num_classes == 3
    assert len([*(folder / "cache/qconv").iterdir()]) == 1
    write(folder / "train-2.tar", [{"png": png(1), "cls": b"6"}] * 40)
    data = made(folder)
    assert data.num_classes == 7
    assert len(greys(data.train_dataloader())) == 60


def test_bad_arguments(folder: Path) -> None:
    (folder / "index.json").write_text("[1]")
    train, test = f"{folder}/train-0.tar", f"{folder}/test.tar"
    none = f"{folder}/none-{{0..1}}.tar"
    for options, error, message in (
        ({"index": f"{folder}/index.json"}, ShardError, r"index .*index.json: not written by qconv"),
        ({"index": str(folder)}, ShardError, r"index .* must be a file, not a folder"),
        ({"train": "", "test": test}, ValueError, r"train, val and test \(=''\) must be addresses"),
        ({"buffer": -1}, ValueError, r"buffer \(=-1\) must be at least 0"),
        ({"val": None, "test": None}, ValueError, r"val and test \(=None\) must not both be missing"),
        ({"train": none}, ShardError, r"shard .*none-[01].tar cannot be read: No such file or directory"),
    ):
        with pytest.raises(error, match=message):
            WebDatasetDataModule(**{"train": train, "val": test, "test": test, **options})  # pyright: ignore[reportArgumentType]
