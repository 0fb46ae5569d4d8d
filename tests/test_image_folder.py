"""Trees of images: what is decoded, cached and refused."""

import errno
import os
import pickle
import shutil
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pictures import draw_tree, noise
from PIL import Image
from runs import config

from qconv.data import BrokenPictureError, CIFARDataModule, ImageFolderDataModule, RandomCrop, RandomFlip, image_folder
from qconv.data.pictures import share_out
from qconv.data.tree import scan
from qconv.images import SUFFIXES, DecodingError, opened, read_picture, reads_heif
from qconv.training import assemble


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Two classes with six images to train and two to test each."""
    return draw_tree(tmp_path / "tree", {"train": 6, "test": 2})


def made(tree: Path, **options: Any) -> ImageFolderDataModule:
    usual = {"cache": str(tree.parent / "cache"), "val_size": 2, "batch_size": 4}
    data = ImageFolderDataModule(str(tree), **{**usual, **options})
    data.prepare_data()
    data.setup("fit")
    return data


def test_what_is_read(tree: Path) -> None:
    (tree / "train/cat/notes.txt").write_text("no image")
    (tree / "train/cat/.hidden.png").write_text("no image")
    data = made(tree)
    assert (data.classes, data.num_classes, data.image_size, data.in_channels) == (["cat", "dog"], 2, (8, 8), 3)
    assert {name: len(labels) for name, (_, labels) in data.splits.items()} == {"train": 10, "val": 2, "test": 4}
    assert data.splits["val"].labels.tolist() == [0, 1]
    assert data.splits["test"].labels.tolist() == [0, 0, 1, 1]
    expected = torch.from_numpy(np.asarray(noise(11)).copy()).permute(2, 0, 1)
    assert data.splits["test"].images[1].equal(expected)
    images, labels = next(iter(data.test_dataloader()))
    assert (images.dtype, labels.dtype, len(labels)) == (torch.float32, torch.int64, 4)
    train = torch.cat([images for images, _ in made(tree, augment=()).train_dataloader()])
    assert train.mean().abs() < 1e-5
    assert (train.std((0, 2, 3), unbiased=False) - 1).abs().max() < 1e-5


def test_augmentations_of_the_command_line(tree: Path) -> None:
    words = ["data=image_folder", f"data.root='{tree}'", "data.augment=[{_target_: qconv.data.RandomFlip, p: 1.0}]"]
    asked, plain = (assemble.made(config(*some).data) for some in (words, words[:2]))
    assert asked.augment == (RandomFlip(1.0),)
    assert plain.augment == (RandomCrop(4), RandomFlip())


def test_every_training_picture_is_in_one_split(tree: Path) -> None:
    splits = made(tree).splits
    found = sorted(bytes(image.numpy()) for name in ("train", "val") for image in splits[name].images)
    read = [np.asarray(noise(100 * label + 10 * index)) for label in range(2) for index in range(6)]
    assert found == sorted(bytes(np.ascontiguousarray(pixels.transpose(2, 0, 1))) for pixels in read)


def test_val_is_the_test_split_or_its_own(tree: Path) -> None:
    (tree / "test").rename(tree / "val")
    assert {name: len(p.labels) for name, p in made(tree).splits.items()} == {"train": 10, "val": 2, "test": 4}
    (tree / "test/dog").mkdir(parents=True)
    noise(5).save(tree / "test/dog/0.png")
    assert {name: len(p.labels) for name, p in made(tree).splits.items()} == {"train": 12, "val": 4, "test": 1}


def test_the_cache_is_used_until_a_file_changes(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = made(tree)
    stamp = first.cache.stat().st_mtime_ns
    assert made(tree).cache == first.cache
    assert first.cache.stat().st_mtime_ns == stamp
    assert made(tree, channels=1).cache != first.cache
    noise(999).save(tree / "test/dog/1.png")
    os.utime(tree / "test/dog/1.png", ns=(1, 1))
    other = made(tree)
    assert other.cache != first.cache
    assert not other.splits["test"].images[3].equal(first.splits["test"].images[3])
    assert not list(first.cache.parent.glob(".*"))  # no temporary file is left
    capsys.readouterr()
    for damage in (b"", b"nonsense", other.cache.read_bytes()[:-200]):
        other.cache.write_bytes(damage)
        again = made(tree)
        assert again.splits["test"].images.equal(other.splits["test"].images)
        assert "decoded again" in capsys.readouterr().err.replace("\n", " ")


def test_a_cache_that_can_not_be_written_is_named(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tree / "file").touch()
    monkeypatch.delattr(ImageFolderDataModule, "_decode")  # which may take minutes
    for folder in (str(tree / "file" / "cache"), "/proc"):
        data = ImageFolderDataModule(str(tree), cache=folder)
        with pytest.raises(OSError, match=rf"cache \(={folder}\) cannot be written: "):
            data.prepare_data()


def test_trees_that_differ_in_pixels_alone(tree: Path) -> None:
    """As of archives that keep no times, and images without compression."""
    for path in tree.rglob("*.png"):
        Image.new("RGB", (8, 8), 0).save(path.with_suffix(".bmp"))
        path.unlink()
    other = Path(shutil.copytree(tree, tree.parent / "other" / tree.name))
    for path in other.rglob("*.bmp"):
        Image.new("RGB", (8, 8), (255, 255, 255)).save(path)
    for path in (*tree.rglob("*.bmp"), *other.rglob("*.bmp")):
        os.utime(path, ns=(1, 1))
    one, two = made(tree), made(other, cache=str(tree.parent / "cache"))
    assert one.splits["test"].images.eq(0).all()
    assert two.splits["test"].images.eq(255).all()


def test_names_that_are_no_utf8(tree: Path) -> None:
    try:
        noise(5).save(os.fsencode(tree / "train/cat") + b"/caf\xe9.png", format="png")
    except OSError:
        pytest.skip("this file system takes UTF-8 alone")
    assert len(made(tree).splits["train"].labels) == 11


def test_each_class_keeps_a_picture_for_training(tree: Path) -> None:
    for label in range(9):
        for split in ("train", "test"):
            (tree / split / f"rare{label}").mkdir()
            noise(label).save(tree / split / f"rare{label}" / "0.png")
    for seed in range(4):
        data = made(tree, val_size=6, seed=seed)
        assert data.splits["train"].labels.unique().tolist() == list(range(11))
        assert len(data.splits["val"].labels) == 6
    with pytest.raises(ValueError, match=r"val_size \(=11\) must leave an image of each class for training: it"):
        share_out(torch.arange(11).repeat(2)[:21], 11, 0)


@pytest.mark.parametrize("mode", ["L", "1", "P", "LA", "RGBA", "CMYK"])
@pytest.mark.parametrize("channels", [1, 3])
def test_other_modes(mode: str, channels: int, tmp_path: Path) -> None:
    path = tmp_path / ("p.tif" if mode == "CMYK" else "p.png")
    noise(1).convert(mode).save(path)
    found = read_picture(path, (8, 8), channels)
    with Image.open(path) as opened:
        expected = np.asarray(opened.convert("L" if channels == 1 else "RGB")).reshape(8, 8, channels)
    assert found.equal(torch.from_numpy(expected.copy()).permute(2, 0, 1))


def test_pictures_are_resized_to_cover(tree: Path) -> None:
    noise(3, 20, 10).save(tree / "train/cat/0.png")
    data = made(tree, image_size=(4, 6))
    assert data.splits["train"].images.shape[1:] == (3, 4, 6)
    flat = Image.new("RGB", (30, 12), (10, 200, 30))
    flat.save(tree / "flat.png")
    assert (read_picture(tree / "flat.png", (5, 5), 3) == torch.tensor([10, 200, 30]).view(3, 1, 1)).all()


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:100])


BROKEN: dict[str, Callable[[Path], Any]] = {
    "truncated": truncated,
    "empty": lambda path: path.write_bytes(b""),
    "text": lambda path: path.write_text("this is no image"),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "HEIC": lambda path: path.write_bytes(b"\0\0\0\x18ftypheic" + bytes(40)),
    "a link to nowhere": lambda path: (path.unlink(), path.symlink_to(path.parent / "nowhere.png")),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_files_are_named(kind: str, tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tree / "train/dog/3.png"
    BROKEN[kind](path)
    with pytest.raises(
        BrokenPictureError, match=r"1 of 12 files are damaged or are not images: .*dog/3.png .*data.broken=skip"
    ):
        made(tree)
    assert not list((tree.parent / "cache").glob("*"))
    for _ in range(2):  # at each run, though the second finds a cache
        data = made(tree, broken="skip")
        assert {name: len(labels) for name, (_, labels) in data.splits.items()} == {"train": 9, "val": 2, "test": 4}
        (told,) = (line for line in said(capsys) if line.startswith("left out: 1 of 12 files"))
        assert "dog/3.png" in told


@pytest.mark.parametrize(
    "error", [MemoryError(), OSError(errno.EMFILE, "Too many open files"), OSError(errno.EIO, "Input/output error")]
)
def test_an_error_that_may_pass_leaves_out_nothing(
    error: Exception, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Image.open

    def failing(file: Path) -> Image.Image:
        if file.name == "3.png" and file.parent.name == "dog":
            raise error
        return whole(file)

    monkeypatch.setattr(Image, "open", failing)
    for broken in ("fatal", "skip"):
        with pytest.raises(BrokenPictureError, match=r"1 of 12 files can't be read: .*dog/3.png .*try again"):
            made(tree, broken=broken, image_size=8)
    with pytest.raises(DecodingError, match=r"dog/3.png: .*; the file may be intact: try again"):
        made(tree)
    assert not list((tree.parent / "cache").glob("*"))
    monkeypatch.undo()
    assert len(made(tree, broken="skip", image_size=8).splits["train"].labels) == 10


def test_the_test_after_a_training_reads_nothing_again(tree: Path) -> None:
    data = made(tree)
    data.cache.unlink()
    data.prepare_data()
    assert data.cached is None
    assert not data.cache.exists()


def test_a_split_without_whole_pictures_is_named_before_the_training(tree: Path) -> None:
    for path in (tree / "test").glob("*/*"):
        truncated(path)
    with pytest.raises(BrokenPictureError, match=r"data.root \(=.*tree\): test has no readable image"):
        made(tree, broken="skip")


def said(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line.removeprefix("data: ") for line in capsys.readouterr().err.splitlines() if line.startswith("data: ")]


def test_folders_without_splits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a phone leaves them: no splits, other sizes, other files."""
    monkeypatch.setattr("qconv.data.class_folders.readable_suffixes", lambda: SUFFIXES)  # as without pillow-heif
    root = tmp_path / "photos"
    for label, (name, count) in enumerate({"cat": 20, "dog": 10, "one": 1, "none": 0}.items()):
        (root / name).mkdir(parents=True)
        for index in range(count):
            noise(100 * label + index, 20 + index % 3, 30).save(root / name / f"{index}.png")
    for name in ("Thumbs.db", ".hidden.png", "notes.txt", "IMG_1.HEIC"):
        (root / "cat" / name).write_bytes(b"no image")
    data = made(root, test_size=0.2)
    told = said(capsys)
    assert told[0].startswith(f"{root} has no folders train and test: 20% of each class are the test images")
    assert "(split_seed=0); not of one, with a single image; no images in none, which is no class" in told[0]
    assert told[1] == 'left out: 1 .heic (pip install "qconv[heic]" to read them), 1 .txt'
    assert told[2:] == [
        "images of 20×30 to 22×30 pixels become 16×16 (data.image_size= for another size)",
        "3 classes: 23 / 2 / 6 images (training / validation / test)",
    ]
    assert data.splits["test"].labels.bincount().tolist() == [4, 2]
    assert (data.classes, data.image_size) == (["cat", "dog", "one"], (16, 16))
    again, other = made(root, seed=7), made(root, split_seed=1)
    assert again.tree == data.tree
    assert {path for path, _ in other.tree.splits["test"]} != {path for path, _ in data.tree.splits["test"]}
    assert len({data.cache, again.cache, other.cache, made(root, image_size=8).cache}) == 3


def test_pictures_of_an_iphone(tree: Path) -> None:
    before = made(tree).splits["train"][0]
    for file in (tree / "train/dog").glob("*.png"):
        with Image.open(file) as png:
            assert reads_heif()
            png.save(file.with_suffix(".HEIC"), quality=-1, chroma="444", matrix_coefficients=0)  # without loss
        file.unlink()
    after = made(tree).splits["train"][0]
    assert torch.equal(before, after)
    whole = (tree / "train/dog/1.HEIC").read_bytes()
    for damaged in (whole[:100], whole[: len(whole) // 2], whole[:200] + bytes(len(whole) - 200)):
        with pytest.raises(DecodingError), opened(damaged) as picture:
            picture.load()


def test_a_picture_of_another_size_is_resized(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flat = Image.new("RGB", (31, 17), (10, 200, 30))
    flat.save(tree / "train/dog/3.png")
    data = made(tree)
    assert data.image_size == (8, 8)
    assert "images of 8×8 to 17×31 pixels become 8×8 (data.image_size= for another size)" in said(capsys)
    images = torch.cat([pictures.images for pictures in data.splits.values()])
    assert (images == torch.tensor([10, 200, 30]).view(3, 1, 1)).flatten(1).all(1).sum() == 1


def remove(*folders: Path) -> None:
    for folder in folders:
        shutil.rmtree(folder)


def deeper(tree: Path, name: str) -> None:
    """Moves all of the folder into a new one in it."""
    tree.rename(tree.parent / "x")
    tree.mkdir()
    (tree.parent / "x").rename(tree / name)


TREES: dict[str, tuple[Callable[[Path], Any], type[Exception], str]] = {
    "nothing": (remove, FileNotFoundError, "there is no such folder"),
    "no train": (
        lambda tree: (tree / "train").rename(tree / "training"),
        *(FileNotFoundError, r"must hold train/<class>/\* and test/<class>/\* \(or val\); it has test, training$"),
    ),
    "classes without images": (
        lambda tree: [remove(path) for path in tree.iterdir()],
        *(FileNotFoundError, r"must hold <class>/\*, or train/<class>/\* and test/<class>/\* \(.*\); it has nothing"),
    ),
    "no test": (lambda tree: (tree / "test").rename(tree / "exam"), FileNotFoundError, r"must hold train/<class>/\*"),
    "one class": (
        lambda tree: remove(tree / "train/dog", tree / "test/dog"),
        *(ValueError, "train has 1 class with images; it must have at least 2"),
    ),
    "one class without splits": (
        lambda tree: ((tree / "train/cat").rename(tree / "cat"), remove(tree / "train", tree / "test")),
        *(ValueError, r"data.root \(=.*tree\) has 1 class with images \(cat\); it must have at least 2"),
    ),
    "one folder too high": (
        lambda tree: deeper(tree, "data"),
        *(FileNotFoundError, r"it has data; images lie deeper, in .*tree/data/test/cat: give data.root=.*tree/data$"),
    ),
    "one folder too high, without splits": (
        lambda tree: (remove(tree / "test"), (tree / "train").rename(tree / "data")),
        *(FileNotFoundError, r"it has data; images lie deeper, in .*tree/data/cat: give data.root=.*tree/data$"),
    ),
    "classes one folder deeper": (
        lambda tree: [deeper(tree / f"train/{name}", "2024") for name in ("cat", "dog")],
        *(ValueError, r"train has 0 class with images; it must have .* deeper, in .*tree/train/cat/2024$"),
    ),
    "class in test only": (
        lambda tree: (tree / "test/dog").rename(tree / "test/fox"),
        *(ValueError, "class 'fox' is in test, but has no training images"),
    ),
    "empty test": (
        lambda tree: remove(tree / "test/cat", tree / "test/dog"),
        *(FileNotFoundError, "test has no images"),
    ),
}


@pytest.mark.parametrize("kind", TREES)
def test_trees_that_are_none(kind: str, tree: Path) -> None:
    change, error, message = TREES[kind]
    change(tree)
    with pytest.raises(error, match=message):
        made(tree)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"channels": 4}, r"channels \(=4\) must be 1 or 3"),
        ({"test_size": 1.0}, r"test_size \(=1.0\) must be a share, above 0 and below 1"),
        ({"broken": "ignore"}, r"broken \(='ignore'\) must be 'fatal' or 'skip'"),
        ({"image_size": 0}, r"image_size \(=0\) must be a positive side"),
        ({"image_size": (3, 3, 3)}, r"image_size \(=\(3, 3, 3\)\) must be a positive side"),
        *(({"val_size": size}, r"val_size \(=.*\) must") for size in (0, -1, 1.0, 12, 0.01)),
    ],
)
def test_arguments_out_of_range(options: dict[str, Any], message: str, tree: Path) -> None:
    with pytest.raises(ValueError, match=message):
        made(tree, **options)


def test_cifar_of_torchvision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for classes, name in ((10, "cifar-10-batches-py"), (100, "cifar-100-python")):
        with pytest.raises(FileNotFoundError, match=f"lacks {name}, or some of its files: give the folder"):
            CIFARDataModule(str(tmp_path), num_classes=classes).setup("fit")
    with pytest.raises(ValueError, match=r"num_classes \(=20\) must be 10 or 100"):
        CIFARDataModule(str(tmp_path), num_classes=20)
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (6, 20, 3 * 32 * 32), dtype=np.uint8)
    for index, name in enumerate([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]):
        (folder / name).write_bytes(pickle.dumps({"data": pixels[index], "labels": [i % 10 for i in range(20)]}))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": list("abcdefghij")}))
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda *_: True)
    data = CIFARDataModule(str(tmp_path), val_size=30, batch_size=7)
    data.prepare_data()
    data.setup("fit")
    assert {name: len(labels) for name, (_, labels) in data.splits.items()} == {"train": 70, "val": 30, "test": 20}
    assert data.splits["val"].labels.bincount().tolist() == [3] * 10
    assert data.splits["test"].images[3].flatten().equal(torch.from_numpy(pixels[5, 3]))
    assert data.classes[9] == "j"


def test_class_folders_without_pictures_are_named(tmp_path: Path) -> None:
    """And nested folders, which are read as by torchvision's ImageFolder, and images beside the classes."""
    draw_tree(tmp_path, {"train": 1, "test": 1}, names=("cat", "dog", "fox/red"))
    (tmp_path / "train/hen/more").mkdir(parents=True)
    noise(1).save(tmp_path / "train/loose.png")
    for hidden in ("train/.ipynb_checkpoints", "train/.thumbnails", ".git", "valid"):
        (tmp_path / hidden).mkdir()
        noise(1).save(tmp_path / hidden / "cat-checkpoint.png")
    found = scan(tmp_path)
    assert found.classes == ["cat", "dog", "fox"]
    assert [path.relative_to(tmp_path).as_posix() for path, label in found.splits["train"] if label == 2] == [
        "train/fox/red/0.png"
    ]
    assert found.told == (
        "left out: valid; splits are train, val, test",
        "no images in train/hen, which is no class",
        f"images in nested folders are read, too: {tmp_path}/test/fox/red, {tmp_path}/train/fox/red",
        f"left out: {tmp_path}/train/loose.png, beside the folders of classes",
    )


def many(folder: Path, count: int = 3) -> None:
    folder.mkdir(parents=True)
    for index in range(count):
        noise(index).save(folder / f"{folder.parent.name}_{index}.png")


def test_tiny_imagenet_as_it_is_published(tmp_path: Path) -> None:
    """Images a folder deeper, a list for validation, and a test without classes."""
    for name in ("n01", "n02"):
        many(tmp_path / "train" / name / "images")
        (tmp_path / "train" / name / f"{name}_boxes.txt").write_text("n01_0.JPEG\t0\t0\t7\t7\n")
    many(tmp_path / "val/images")
    many(tmp_path / "test/images")
    (tmp_path / "wnids.txt").write_text("n01\nn02\n")
    lines = tmp_path / "val/val_annotations.txt"
    lines.write_text("val_0.png\tn02\t0\t0\t7\t7\nval_1.png\tn01\t0\t0\t7\t7\nval_2.png\tn02\t0\t0\t7\t7\n\n")
    found = scan(tmp_path)
    assert found.classes == ["n01", "n02"]
    assert [(path.name, label) for path, label in found.splits["train"]][2:4] == [("n01_2.png", 0), ("n02_0.png", 1)]
    tested = [(path.name, label) for path, label in found.splits["test"]]
    assert tested == [("val_1.png", 0), ("val_0.png", 1), ("val_2.png", 1)]
    without = "images lie deeper, in test/images, and neither folders nor test/test_annotations.txt name their classes"
    assert found.told == (f"left out: {without}",)
    assert made(tmp_path, image_size=8).splits["test"].labels.tolist() == [0, 1, 1]
    for written, says in (
        ("val_0.png\tn02\nval_1.png\tn01\n", r"names no class of val_2.png, one of 1 such images in .*images"),
        ("val_0.png\tn02\nval_0.png\tn01\n", "names val_0.png more than once"),
    ):
        lines.write_text(written)
        with pytest.raises(ValueError, match=says):
            scan(tmp_path)
    whole = "val_0.png\tn02\nval_1.png\tn02\nval_2.png\tn02\n"
    lines.write_text(whole + "val_7.png\tn01\n")
    with pytest.raises(
        BrokenPictureError, match=r"1 of 4 files are damaged or are not images: .*val_7.png \(No such file"
    ):
        made(tmp_path, image_size=8)
    lines.write_text(whole.replace("n02", "n03"))
    with pytest.raises(ValueError, match="class 'n03' is in val, but has no training images"):
        scan(tmp_path)
    lines.unlink()
    with pytest.raises(FileNotFoundError, match=r"deeper, in val/images, test/images, and neither .* name their cl"):
        scan(tmp_path)
    for name in ("n01", "n02"):  # as many rearrange it
        many(tmp_path / "val" / name)
    shutil.rmtree(tmp_path / "val/images")
    assert len(scan(tmp_path).splits["test"]) == 6


def test_names_of_classes_are_composed(tmp_path: Path) -> None:
    """A Mac's é has two characters: the name of a class is the same in all splits, and so is its number."""
    names = "café", "cafz", "b"
    for name in names:
        many(tmp_path / "train" / unicodedata.normalize("NFD", name))
        many(tmp_path / "test" / unicodedata.normalize("NFC", name))
    many(tmp_path / "train" / unicodedata.normalize("NFC", "café"), 2)
    found = scan(tmp_path)
    assert found.classes == ["b", "cafz", "café"]
    assert [label for _, label in found.splits["train"]] == [0] * 3 + [1] * 3 + [2] * 5
    assert [label for _, label in found.splits["test"]] == [0] * 3 + [1] * 3 + [2] * 3


def test_small_files_are_decoded_by_few_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Most of them decide, and what can't be asked says nothing."""
    monkeypatch.setattr(image_folder, "cores", lambda: 16)
    small, large = tmp_path / "small", tmp_path / "large"
    small.write_bytes(bytes(1000))
    large.write_bytes(bytes(30_000))
    for files, wanted in (([small] * 3 + [large], 2), ([large] * 3 + [small], 16), ([tmp_path / "no"], 16), ([], 16)):
        assert image_folder.threads_for(files) == wanted
    monkeypatch.setattr(image_folder, "cores", lambda: 1)
    assert image_folder.threads_for([small]) == 1
