"""Large images that are prepared once: what is stored, what is read, and what is said of damage."""

import itertools
import math
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from pictures import draw_tree, smooth
from PIL import Image
from runs import config
from torch import Tensor
from torchvision import io
from torchvision.transforms import v2
from torchvision.transforms.v2.functional import resize

from qconv.cli import main
from qconv.data import (
    BrokenPictureError,
    ImageNetDataModule,
    PreparedDataModule,
    ShardError,
    WebDatasetDataModule,
    prepare,
    prepare_pictures,
)
from qconv.data.large import random_box
from qconv.data.on_device import decode_on
from qconv.data.prepared import Encoded, PreparedPictures
from qconv.data.prepared_files import INDEX, Form, Stored, read_index
from qconv.ground.files import DamagedFileError
from qconv.images import DecodingError, ReadingError, decode
from qconv.training.report.result import Result
from qconv.training.run import train

SIZE = 20
SMALL: dict[str, Any] = {"image_size": 16, "resize": SIZE, "val_size": 4, "batch_size": 5, "workers": 0}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Twenty images to train with and six to test, in five sizes, the smallest smaller than `SIZE`."""
    sizes = ((40, 50), (50, 40), (20, 60), (25, 21), (12, 30))
    draw = lambda seed, index: smooth(seed, *sizes[index % 5])  # noqa: E731
    return draw_tree(tmp_path / "tree", {"train": 10, "val": 3}, draw, ("n01", "n02"), "JPEG", quality=95)


@pytest.fixture
def folder(tree: Path, tmp_path: Path) -> Path:
    """The same images, prepared, seven in a file."""
    prepare_pictures(tree, tmp_path / "prepared", size=SIZE, pictures_per_file=7)
    return tmp_path / "prepared"


def made(folder: Path, **options: Any) -> PreparedDataModule:
    data = PreparedDataModule(str(folder), **{**SMALL, **options})
    data.setup("fit")
    return data


def pictures_of(data: PreparedDataModule) -> PreparedPictures:
    return cast(Any, data.train_dataloader()).make.__self__


def stored_picture(folder: Path, stored: Stored, index: int) -> Tensor:
    begin, length = int(stored.offset[index]), int(stored.length[index])
    content = (folder / stored.files[int(stored.file[index])]).read_bytes()[begin : begin + length]
    height, width = stored.shape[index].tolist()
    if not height:
        return decode(content)
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).view(height, width, 3).permute(2, 0, 1)


def raw(loader: Any, epoch: int = 0) -> list[tuple[Tensor, Tensor]]:
    loader.sampler.set_epoch(epoch)
    batches = [(images, labels) for images, labels, problems in loader if not problems]
    assert len(batches) == len(loader)
    return batches


def shrunk(path: Path) -> Tensor:
    """The image as it should be stored."""
    image = decode(path)
    return image if min(image.shape[1:]) <= SIZE else v2.Resize(SIZE, antialias=True)(image)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_every_picture_is_stored_with_its_class(tree: Path, folder: Path) -> None:
    prepared = read_index(folder)
    assert prepared.classes == ["n01", "n02"]
    assert {name: len(stored.files) for name, stored in prepared.splits.items()} == {"train": 3, "test": 1}
    for name, split in (("train", "train"), ("test", "val")):
        expected = [(shrunk(path), label) for label in (0, 1) for path in sorted(tree.glob(f"{split}/n0{label + 1}/*"))]
        stored = prepared.splits[name]
        found = [(stored_picture(folder, stored, index), int(label)) for index, label in enumerate(stored.labels)]
        assert len(found) == len(expected)
        if name == "train":  # mixed: find each, once
            left = list(expected)
            for image, label in found:
                left.pop(next(at for at, item in enumerate(left) if item[1] == label and item[0].equal(image)))
            assert not left
            assert [label for _, label in found] != sorted(label for _, label in found)
        else:
            assert all(one.equal(other) and a == b for (one, a), (other, b) in zip(found, expected, strict=True))


def test_test_pictures_are_those_of_the_tree(tree: Path, folder: Path) -> None:
    large = ImageNetDataModule(str(tree), **SMALL)
    large.setup("fit")
    theirs = torch.cat([images for images, _, _ in large.test_dataloader()])
    found = torch.cat([images for images, _ in raw(made(folder).test_dataloader())])
    assert found.equal(theirs)  # resized once, by the same function


@pytest.mark.parametrize("form", ["raw", "jpeg"])
def test_crops_are_those_of_the_whole_pictures(form: Form, tree: Path, tmp_path: Path) -> None:
    prepare_pictures(tree, tmp_path / form, size=SIZE, form=form)
    data = made(tmp_path / form, seed=3)
    pictures, numbers = pictures_of(data), torch.tensor([7, 0, 15, 3])
    images, labels, problems = pictures.batch(2, numbers)
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert problems == []
    for image, label, number in zip(images, labels, numbers.tolist(), strict=True):
        index = int(pictures.chosen[number])
        whole = stored_picture(tmp_path / form, pictures.stored, index)
        _, height, width = whole.shape
        box = random_box(height, width, torch.Generator().manual_seed((3 * 1_000_003 + 2) * 1_000_003 + number))
        part = whole[:, box.top : box.top + box.height, box.left : box.left + box.width]
        expected = resize(part, [16, 16], antialias=True)
        expected = expected.flip(2) if box.is_mirrored else expected
        torch.testing.assert_close(image, expected, rtol=0, atol=1)  # torchvision rounds later on some processors
        assert label == pictures.stored.labels[index]
    nothing, _, _ = pictures.batch(2, numbers[:0])
    assert nothing.shape == (0, 3, 16, 16)


def test_other_threads_keep_their_number_of_threads(folder: Path) -> None:
    before = torch.get_num_threads()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(torch.get_num_threads).result()
    loader = made(folder, workers=2, batch_size=2).train_dataloader()
    next(iter(loader))  # and is left
    list(loader)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(torch.get_num_threads).result() == first
    assert torch.get_num_threads() == before


def test_the_order_and_the_crops_are_those_of_any_number_of_processes(folder: Path) -> None:
    alone = raw(made(folder, batch_size=4).train_dataloader(), 3)
    assert not alone[0][0].equal(raw(made(folder, batch_size=4).train_dataloader(), 4)[0][0])
    with_workers = raw(made(folder, batch_size=4, workers=2).train_dataloader(), 3)
    assert all(one[0].equal(other[0]) for one, other in zip(alone, with_workers, strict=True))
    for rank in range(2):
        batches = raw(of_rank(made(folder, batch_size=2), rank, len(alone)), 3)
        for (images, labels), (mine, of_mine) in zip(alone, batches, strict=True):
            assert mine.equal(images[rank::2])
            assert of_mine.equal(labels[rank::2])


def of_rank(data: PreparedDataModule, rank: int, steps: int) -> Any:
    """The loader of one of two processes."""
    loader: Any = data.train_dataloader()
    loader.sampler.rank, loader.sampler.world_size, loader.sampler.steps = rank, 2, steps
    return loader


def test_an_interrupted_epoch_goes_on_with_other_processes_or_says_why_not(folder: Path) -> None:
    alone = made(folder, batch_size=4).train_dataloader()
    expected = raw(alone, 3)
    batches = iter(alone)
    for _ in range(2):
        next(batches)
    state = alone.state_dict()
    assert state == {"epoch": 3, "batch": 2, "batches": 4, "pictures": 16}
    for rank in range(2):
        loader = of_rank(made(folder, batch_size=2), rank, 4)
        loader.load_state_dict(state)
        loader.sampler.set_epoch(3)
        rest = [images for images, _, _ in loader]
        assert all(one.equal(images[rank::2]) for one, (images, _) in zip(rest, expected[2:], strict=True))
    other = made(folder, batch_size=2).train_dataloader()
    other.load_state_dict(state)
    other.sampler.set_epoch(3)
    with pytest.raises(ValueError, match=r"epoch 3 was interrupted after 2 of 4 batches, with 4 .*and has 8 now: "):
        next(iter(other))
    fewer = made(folder, batch_size=3, val_size=8).train_dataloader()
    fewer.load_state_dict(state)
    fewer.sampler.set_epoch(3)
    assert len(fewer) == 4
    with pytest.raises(ValueError, match=r"with 16 images in all, and has 12 now: resume with the same number"):
        next(iter(fewer))
    fewer.load_state_dict({**state, "batch": 4})  # it had ended
    assert not list(fewer)
    other.sampler.set_epoch(4)  # from the next epoch on everything may change
    assert sum(len(images) for images, _, _ in other) == 16


def test_jpeg_files_are_copied_if_small_and_smaller_if_not(tree: Path, tmp_path: Path) -> None:
    folder = tmp_path / "jpeg"
    prepared = prepare_pictures(tree, folder, size=SIZE, form="jpeg", quality=95)
    data = made(folder)
    whole = (folder / "test-00000.tar").read_bytes()
    paths = sorted(tree.glob("val/*/*"))
    for index, path in enumerate(paths):
        stored = prepared.splits["test"]
        begin, length = int(stored.offset[index]), int(stored.length[index])
        small = min(decode(path).shape[1:]) <= SIZE
        assert (whole[begin : begin + length] == path.read_bytes()) == small
        error = (stored_picture(folder, stored, index).float() - shrunk(path).float()).abs()
        assert error.mean() < (1e-6 if small else 8)
    assert any(min(decode(path).shape[1:]) <= SIZE for path in paths)
    with pytest.raises(FileExistsError, match="was prepared with quality=95, not 90"):
        prepare_pictures(tree, folder, size=SIZE, form="jpeg")
    assert len(torch.cat([images for images, _ in raw(data.train_dataloader())])) == 16


@pytest.mark.parametrize("form", ["raw", "jpeg"])
def test_webdataset_reads_the_files(form: Any, tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "prepared"
    prepare_pictures(tree, folder, size=SIZE, form=form, pictures_per_file=10)
    options: dict[str, Any] = {**SMALL, "val_size": 1}
    streamed = WebDatasetDataModule(f"{folder}/train-{{00000..00001}}.tar", test=f"{folder}/test-00000.tar", **options)
    streamed.setup("fit")
    theirs = [(images, labels) for images, labels, _ in streamed.test_dataloader()]
    ours = raw(made(folder).test_dataloader())
    assert torch.cat([images for images, _ in ours]).equal(torch.cat([images for images, _ in theirs]))
    assert torch.cat([labels for _, labels in ours]).equal(torch.cat([labels for _, labels in theirs]))


def test_it_goes_on_after_an_interruption(
    tree: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other"
    encode, numbers, calls = prepare.picture_file, itertools.count(1), []

    def interrupted(path: Path, **options: Any) -> bytes:
        calls.append(path)
        if next(numbers) == 12:  # in one thread alone
            raise KeyboardInterrupt
        return encode(path, **options)

    monkeypatch.setattr(prepare, "picture_file", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prepare_pictures(tree, other, size=SIZE, pictures_per_file=7)
    assert sorted(path.name for path in other.iterdir()) == ["settings.json", "train-00000.tar"]
    with pytest.raises(FileNotFoundError, match=r"other\): it is not finished: run the command again"):
        made(other)
    calls.clear()
    prepare_pictures(tree, other, size=SIZE, pictures_per_file=7)
    assert len(calls) == 26 - 7
    assert content(other) == content(folder)
    prepare_pictures(str(tree), str(other), size=SIZE, pictures_per_file=7, quality=50)  # once more: nothing to do
    assert len(calls) == 26 - 7


def test_a_folder_of_other_files_is_refused(tree: Path, tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/a.txt").write_text("mine")
    with pytest.raises(FileExistsError, match=r"notes holds other files \(a.txt\): name a new folder"):
        prepare_pictures(tree, tmp_path / "notes", size=SIZE)
    assert [path.name for path in (tmp_path / "notes").iterdir()] == ["a.txt"]
    (tmp_path / "notes/a.txt").rename(tmp_path / "notes/settings.json")
    with pytest.raises(FileExistsError, match=r"settings.json is damaged"):
        prepare_pictures(tree, tmp_path / "notes", size=SIZE)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 0}, r"size \(=0\) must be at least 1"),
        ({"pictures_per_file": 0}, r"pictures_per_file \(=0\) must be at least 1"),
        ({"quality": 0}, r"quality \(=0\) must be from 1 to 100"),
        ({"form": "png"}, r"form \(='png'\) must be 'raw' or 'jpeg'"),
        ({"broken": "hide"}, r"broken \(='hide'\) must be 'fatal' or 'skip'"),
        ({"below": "nowhere"}, r"source \(=.*nowhere\): there is no such folder"),
        ({"below": "train"}, r"source \(=.*train\) must hold train/<class>/\*"),
    ],
)
def test_arguments_out_of_range(options: dict[str, Any], message: str, tree: Path, tmp_path: Path) -> None:
    source = tree / options.pop("below", "")
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        prepare_pictures(source, tmp_path / "new", **options)
    assert not (tmp_path / "new").exists()


def test_other_pictures_or_settings_are_refused(tree: Path, folder: Path) -> None:
    for options, message in (
        ({"size": 24}, r"was prepared with size=20, not 24: remove it, or name a new folder"),
        ({"form": "jpeg"}, r"was prepared with form=raw, not jpeg"),
        ({}, r"was prepared from other images, or they have changed since"),
    ):
        if not options:
            smooth(9, 30, 30).save(tree / "train/n01/new.JPEG")
        with pytest.raises(FileExistsError, match=message):
            prepare_pictures(tree, folder, **{"size": SIZE, "pictures_per_file": 7, **options})


def test_a_picture_that_cannot_be_read_now_is_not_left_out(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(path: Path, **options: Any) -> bytes:
        raise ReadingError("Too many open files; the file may be intact: try again")

    monkeypatch.setattr(prepare, "picture_file", failing)
    with pytest.raises(BrokenPictureError, match=r"\.JPEG can't be read \(Too many open files; .* try again\)"):
        prepare_pictures(tree, tmp_path / "a", size=SIZE, broken="skip")


def test_a_picture_too_long_for_jpeg_is_named(tree: Path, tmp_path: Path) -> None:
    long = tree / "train/n01/long.png"
    Image.new("RGB", (70_000, 20)).save(long)
    assert len(prepare_pictures(tree, tmp_path / "raw", size=SIZE).splits["train"].labels) == 21
    with pytest.raises(BrokenPictureError, match=rf"{long} is damaged or not an image \(JPEG has no"):
        prepare_pictures(tree, tmp_path / "jpeg", size=SIZE, form="jpeg")


def test_broken_pictures_are_named_or_left_out(tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = tree / "train/n01/3.JPEG"
    bad.write_bytes(bad.read_bytes()[:-50])
    with pytest.raises(
        BrokenPictureError, match=rf"{bad} is damaged or not an image \(.+\); repair or remove it, or leave"
    ):
        prepare_pictures(tree, tmp_path / "a", size=SIZE)
    prepared = prepare_pictures(tree, tmp_path / "a", size=SIZE, broken="skip")
    assert len(prepared.splits["train"].labels) == 19
    told = capsys.readouterr().err.replace("\n", "")
    assert f"left out: {bad} (" in told
    assert sum(len(images) for images, _ in raw(made(tmp_path / "a").train_dataloader())) == 15
    message = r"a was prepared with broken=skip, and lacks 1 of 26 images: remove it.*\(--broken skip\)"
    with pytest.raises(FileExistsError, match=message):
        prepare_pictures(tree, tmp_path / "a", size=SIZE)
    (tmp_path / "a" / INDEX).unlink()  # as if it had been interrupted
    with pytest.raises(FileExistsError, match=message):
        prepare_pictures(tree, tmp_path / "a", size=SIZE)
    assert not (tmp_path / "a" / INDEX).exists()
    assert len(prepare_pictures(tree, tmp_path / "a", size=SIZE, broken="skip").splits["train"].labels) == 19
    for path in tree.glob("train/n02/*"):
        path.write_text("no image")
    with pytest.raises(BrokenPictureError, match="class 'n02' has no readable training image"):
        prepare_pictures(tree, tmp_path / "c", size=SIZE, broken="skip")


def test_a_file_that_is_cut_off_meanwhile_is_named(folder: Path) -> None:
    data = made(folder)
    path = folder / "test-00000.tar"
    path.write_bytes(path.read_bytes()[:3000])
    with pytest.raises(BrokenPictureError, match=r"test-00000.tar: the image at byte \d+ is damaged \(.* cut off\)"):
        data.on_before_batch_transfer(next(iter(data.test_dataloader())), 0)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("damage", "name", "options", "error", "message"),
    [
        (Path.unlink, "train-00001.tar", {}, ShardError, r"train-00001.tar is missing: remove index.pt and it"),
        (cut, "train-00001.tar", {}, ShardError, r"train-00001.tar has [\d,]+ bytes instead of [\d,]+"),
        (cut, INDEX, {}, DamagedFileError, r"index .*index.pt: cut off"),
        (Path.unlink, INDEX, {}, FileNotFoundError, r"is not finished: run the command again \(qconv data pr"),
        (
            lambda path: [each.unlink() for each in path.glob("*.*")],
            "",
            {},
            FileNotFoundError,
            "not prepared .* NEW_FOLDER",
        ),
        (lambda path: torch.save([1], path), INDEX, {}, DamagedFileError, r"not written by this version of qconv"),
        (shutil.rmtree, "", {}, FileNotFoundError, r"data.root \(=.*prepared\): there is no such folder"),
        (None, "", {"resize": 21}, ValueError, r"resize \(=21\) must be at most 20, the shorter side of the images"),
        (None, "", {"decode": "gpu"}, ValueError, r"decode \(='gpu'\) must be 'cpu' or 'device'"),
        (None, "", {"decode": "device"}, ValueError, r"decode \(='device'\) is for JPEG files .* need no decoding"),
    ],
)
def test_damage_and_wrong_options_are_named(
    damage: Any, name: str, options: dict[str, Any], error: type[Exception], message: str, folder: Path
) -> None:
    if damage is not None:
        damage(folder / name)
    with pytest.raises(error, match=message):
        made(folder, **options)


def test_a_damaged_file_is_written_again(tree: Path, folder: Path) -> None:
    before = content(folder)
    (folder / "train-00001.tar").unlink()
    (folder / INDEX).unlink()
    prepare_pictures(tree, folder, size=SIZE, pictures_per_file=7)
    assert content(folder) == before
    cut(folder / "test-00000.tar")
    shutil.copy(folder / "test-00000.tar", folder / "train-00000.tar")
    (folder / "train-00000.tar").write_bytes((folder / "train-00000.tar").read_bytes()[:700])
    (folder / INDEX).unlink()
    with pytest.raises(ShardError, match=r"train-00000.tar: damaged \(.+\): remove it and prepare the images again"):
        prepare_pictures(tree, folder, size=SIZE, pictures_per_file=7)


def test_the_program_prepares_and_a_run_trains(tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "prepared"
    assert main(["data", "prepare", str(tree), str(folder), "--size", str(SIZE)]) == 0
    told = capsys.readouterr()
    assert "20 train, 6 test images of 2 classes in 2 files, " in told.out
    assert f"qconv train data=prepared data.root={folder}" in told.out
    assert not told.err
    assert main(["data", "prepare", str(tree), str(folder), "--size", "21"]) == 1
    assert "was prepared with size=20, not 21" in capsys.readouterr().err
    assert trained(folder, tmp_path / "run").epochs == 1
    forms: tuple[dict[str, Any], ...] = ({}, {"form": "jpeg"})
    for form in forms:  # the other options are those of the function
        by_program, by_function = (tmp_path / f"{kind}{form}" for kind in ("program", "function"))
        words = [f"--{name}={value}" for name, value in form.items()]
        assert main(["data", "prepare", str(tree), str(by_program), *words]) == 0
        prepare_pictures(tree, by_function, **form)
        assert content(by_program) == content(by_function)


def trained(folder: Path, run: Path, *words: str) -> Result:
    """The result of a run of one epoch, on the CPU if no word says otherwise."""
    small = [f"data.{name}={value}" for name, value in SMALL.items()]
    network = ["model=resnet20", "report=false", "trainer=cpu", "trainer.max_epochs=1"]
    return train(config(*network, "data=prepared", f"data.root={folder}", *small, f"run_dir={run}", *words))


@pytest.mark.nightly
def test_a_run_whose_device_decodes(tree: Path, tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU it does; the CPU, for want of one, is taken for it, and learns what it does when its threads decode."""
    where: list[torch.device] = []

    def counted(on: torch.device, files: Sequence[bytes]) -> list[Tensor | DecodingError]:
        """Pixels of the CPU, to which those of a GPU are near: nvjpeg interpolates colors otherwise."""
        where.extend([on] * len(files))
        pixels = decode_on(torch.device("cpu"), files)
        for one, other in zip(decode_on(on, files), pixels, strict=True):
            assert isinstance(one, Tensor)
            assert isinstance(other, Tensor)
            assert (one.cpu().float() - other.float()).abs().mean() < 24
        return [each.to(on) for each in pixels if isinstance(each, Tensor)]

    prepare_pictures(tree, tmp_path / "jpeg", size=SIZE, form="jpeg")
    monkeypatch.setattr("qconv.data.prepared.decode_on", counted)
    accelerator = f"trainer.accelerator={device}"
    by_threads = trained(tmp_path / "jpeg", tmp_path / "threads", accelerator)
    assert not where
    monkeypatch.setattr("qconv.data.prepared.decodes", lambda found: found.type == device)
    by_device = trained(tmp_path / "jpeg", tmp_path / "device", accelerator, "data.decode=device")
    # 16 images are trained with; 4 validated, once more with the best epoch; 6 tested.
    assert len(where) >= 16 + 4 + 6
    assert {found.type for found in where} == {device}
    if device == "cpu":  # a GPU resizes and adds up in another order, which four steps magnify
        assert by_device.test_loss == by_threads.test_loss
    assert math.isfinite(by_device.test_loss)


def decoding_later(folder: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Any:
    """A data module whose trainer has a device that decodes: the CPU, for want of a GPU."""
    monkeypatch.setattr("qconv.data.prepared.decodes", lambda device: True)
    data: Any = made(folder, decode="device", **options)
    strategy = SimpleNamespace(root_device=torch.device("cpu"))
    data.trainer = SimpleNamespace(strategy=strategy, global_rank=0, world_size=1)
    return data


def test_the_device_decodes_what_the_cpu_does(tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files of the tree are larger than `SIZE` or not, so some are copied as they are: gray, turned, no JPEG."""
    with Image.open(tree / "train/n01/4.JPEG") as picture:
        turned = picture.convert("L")
    exif = Image.Exif()
    exif[0x0112] = 6
    turned.save(tree / "train/n01/4.JPEG", exif=exif)
    prepare_pictures(tree, tmp_path / "jpeg", size=SIZE, form="jpeg")
    folder = tmp_path / "jpeg"
    cpu, without, device = made(folder), made(folder, decode="device"), decoding_later(folder, monkeypatch)
    for split in "train", "val", "test":
        loaders = [getattr(data, f"{split}_dataloader")() for data in (cpu, without, device)]
        for one, same_one, other in zip(*loaders, strict=True):
            images, labels = cpu.on_before_batch_transfer(one, 0)
            assert same_one[0].equal(images)  # without a trainer the threads decode
            assert isinstance(other, Encoded)
            decoded, same = device.on_before_batch_transfer(other, 0)
            assert decoded.equal(images)
            assert same.equal(labels)
            assert decoded.is_contiguous(memory_format=torch.channels_last)


def test_the_device_names_damaged_files_or_leaves_them_out(
    tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "jpeg"
    stored = prepare_pictures(tree, folder, size=SIZE, form="jpeg").splits["train"]
    path, offset = folder / stored.files[0], int(stored.offset[3])
    content = bytearray(path.read_bytes())
    content[offset : offset + 20] = bytes(20)
    path.write_bytes(content)
    data = decoding_later(folder, monkeypatch, broken="skip")
    found = [data.on_before_batch_transfer(batch, 0) for batch in data.train_dataloader()]
    assert sum(len(images) for images, _ in found) == sum(len(labels) for _, labels in found) == 15
    assert f"{path}: the image at byte {offset} is damaged (it is no" in capsys.readouterr().err.replace("\n", "")
    fatal = decoding_later(folder, monkeypatch)
    with pytest.raises(BrokenPictureError, match=rf"{path}: the image at byte {offset} is damaged"):
        [fatal.on_before_batch_transfer(batch, 0) for batch in fatal.train_dataloader()]


def test_a_gpu_gets_the_plain_files_and_the_cpu_the_others(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """nvjpeg is stood in for by a decoder that is told apart by its pixels, and refuses damaged files."""
    given: list[int] = []

    def decoder(contents: Any, mode: Any, device: Any = "cpu", **options: Any) -> Any:
        assert mode == io.ImageReadMode.RGB
        if any(len(each) == len(damaged) for each in contents):
            given.append(len(contents))
            raise RuntimeError("damaged")
        if device == "cpu":
            return by_cpu(contents, mode, **options)
        assert device == gpu
        given.append(len(contents))
        return [torch.full_like(by_cpu(each, mode), 7) for each in contents]

    def without_nvjpeg(contents: Any, mode: Any, device: Any = "cpu") -> Any:
        if device != "cpu":
            raise RuntimeError("not compiled with nvJPEG support")
        return by_cpu(contents, mode)

    by_cpu: Any = io.decode_jpeg
    gpu = torch.device("cuda", 0)
    plain = (tree / "train/n01/0.JPEG").read_bytes()
    damaged = plain[:-200] + plain[-2:]
    cmyk, png = tmp_path / "cmyk.jpg", tmp_path / "a.png"
    with Image.open(tree / "train/n01/0.JPEG") as picture:
        picture.convert("CMYK").save(cmyk)
        picture.save(png)
    files = [plain, cmyk.read_bytes(), plain, png.read_bytes(), b"no image"]
    monkeypatch.setattr(io, "decode_jpeg", decoder)
    monkeypatch.setattr(Tensor, "to", lambda tensor, *_, **__: tensor)  # there is no GPU
    found = decode_on(gpu, files)
    assert given == [2]
    assert [isinstance(each, Tensor) and bool((each == 7).all()) for each in found] == [True, False, True, False, False]
    assert isinstance(found[4], DecodingError)
    whole, cut = decode_on(gpu, [plain, plain[:-200]])  # which nvjpeg takes for a whole one
    assert given == [2, 1]
    assert isinstance(whole, Tensor)
    assert (whole == 7).all()
    assert isinstance(cut, DecodingError)
    whole, wrong = decode_on(gpu, [plain, damaged])  # all are decoded again, one after another
    assert given == [2, 1, 2, 1]
    assert isinstance(whole, Tensor)
    assert whole.equal(decode(plain))
    assert isinstance(wrong, DecodingError)
    monkeypatch.setattr(io, "decode_jpeg", without_nvjpeg)
    with pytest.warns(UserWarning, match=r"cuda:0 could not decode JPEG files, so the CPU .*: not compiled with"):
        (whole,) = decode_on(gpu, [plain])
    assert isinstance(whole, Tensor)
