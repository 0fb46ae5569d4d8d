"""The files of a folder of images: their classes, their splits, and what is left out."""

import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from ..ground.checks import some
from ..images import DecodingError, ReadingError, opened, size_of
from .class_folders import WITHIN, by_class, deeper, is_seen, left_out, no_class, no_names

SPLITS = ("train", "val", "test")
SAMPLED = 1000
"""The number of images whose size is read before all are decoded."""
COMPARED = 64
"""The number of images of a split whose first 64 KiB tell two trees apart."""
LARGEST_SIDE = 64
"""The largest side that is chosen for images of several sizes; other sizes must be asked for."""

Files = list[tuple[Path, int]]
SplitBy = Literal["name", "number"]


class Tree(NamedTuple):
    """A folder of images."""

    classes: list[str]
    splits: dict[str, Files]
    told: tuple[str, ...] = ()


def scan(
    root: Path,
    test_size: float | None = None,
    seed: int = 0,
    split_by: SplitBy = "name",
    called: str = "data.root",
) -> Tree:
    """Return the tree below ``root``, without hidden files and files without an image's suffix.

    As in Tiny-ImageNet, the images of a class may be in ``<class>/images``, and ``val/val_annotations.txt`` may name
    the classes of those in ``val/images``. Names of classes are composed (NFC): a Mac may write é as two characters.

    Args:
        root: a folder with ``train/<class>/*`` and ``test/<class>/*``, ``val/<class>/*`` or both; or ``<class>/*``.
        test_size: the share of a folder without splits that is the test split; None refuses such a folder.
        seed: chooses these images.
        split_by: what else does, their names or their numbers in the folder.
        called: the name of ``root`` in messages.
    """
    if not root.is_dir():
        raise FileNotFoundError(f"{called} (={root}): there is no such folder")
    names = [name for name in SPLITS if (root / name).is_dir()]
    folders = [path for path in sorted(root.iterdir()) if is_seen(path)]
    if test_size is not None and not names:
        files, places = by_class(root)
        classes = [name for name, pictures in files.items() if pictures]
        if len(classes) > 1:
            return _without_splits(root, files, places, test_size, seed, split_by)
        if classes:
            only_one = f"{called} (={root}) has 1 class with images ({classes[0]}); it must have at least 2"
            raise ValueError(only_one + deeper(root, called))
    read = {name: by_class(root / name) for name in names}
    files = {name: pictures for name, (pictures, _) in read.items()}
    classes = [name for name, pictures in files.get("train", {}).items() if pictures]
    unnamed = [name for name in names if [*files[name]] == [WITHIN] != classes]
    names = [name for name in names if name not in unnamed]
    if "train" not in names or len(names) < 2:
        needed = "train/<class>/* and test/<class>/* (or val)"
        if test_size is not None and not names:
            needed = f"<class>/*, or {needed}"
        raise FileNotFoundError(
            f"{called} (={root}) must hold {needed}; it has "
            + (", ".join(sorted(path.name for path in root.iterdir())[:5]) or "nothing")
            + (f"; {no_names(unnamed)}" if unnamed else "" if read else deeper(root, called))
        )
    if len(classes) < 2:
        too_few = f"{called} (={root}): train has {len(classes)} class with images; it must have at least 2"
        raise ValueError(too_few + deeper(root / "train", called))
    for name in names:
        only = [other for other, pictures in files[name].items() if pictures and other not in classes]
        if only:
            raise ValueError(f"{called} (={root}): class {only[0]!r} is in {name}, but has no training images")
    listed = {
        name: [(path, index) for index, label in enumerate(classes) for path in files[name].get(label, ())]
        for name in names
    }
    for name, paths in listed.items():
        if not paths:
            raise FileNotFoundError(f"{called} (={root}): {name} has no images")
    if "test" not in listed:
        listed["test"] = listed.pop("val")
    others = [folder.name for folder in folders if folder.name not in SPLITS]
    told = () if not others else (f"left out: {some(others)}; splits are {', '.join(SPLITS)}",)
    told += (f"left out: {no_names(unnamed)}",) if unnamed else ()
    told += no_class([f"train/{name}" for name in files["train"] if name not in classes])
    places = [place for name in names for place in read[name][1]]
    return Tree(classes, listed, (*told, *left_out(places, [root, *(root / name for name in names)])))


def _without_splits(
    root: Path,
    files: dict[str, list[Path]],
    class_folders: Sequence[Path],
    test_size: float,
    seed: int,
    split_by: SplitBy,
) -> Tree:
    """Split the images of each class, which keeps at least one for training."""
    classes = [name for name, pictures in files.items() if pictures]
    generator = torch.Generator().manual_seed(seed)
    splits: dict[str, Files] = {"train": [], "test": []}
    for label, name in enumerate(classes):
        if split_by == "name":
            # By hashes of the names, so that no place depends on the other files.
            keys = [_bytes(f"{seed} {name}/{path.name}") for path in files[name]]
            places = [hashlib.blake2b(key, digest_size=16).digest() for key in keys]
            order = sorted(range(len(places)), key=places.__getitem__)
        else:
            order = torch.randperm(len(files[name]), generator=generator).tolist()
        count = min(max(round(test_size * len(order)), 1), len(order) - 1)
        test = set(order[:count])
        for index, path in enumerate(files[name]):
            splits["test" if index in test else "train"].append((path, label))
    if not splits["test"]:
        raise ValueError(f"data.root (={root}): no class has two images, so none can be tested")
    told = (
        f"{root} has no folders train and test: {test_size:.0%} of each class are the test images (split_seed={seed})"
    )
    alone = [name for name in classes if len(files[name]) == 1]
    if alone:
        told += f"; not of {some(alone)}, with a single image"
    for words in no_class([name for name in files if name not in classes]):
        told += f"; {words}"
    return Tree(classes, splits, (told, *left_out(class_folders, [root])))


def _bytes(text: str) -> bytes:
    """The text as bytes, also if it has the name of a file that is no UTF-8."""
    return text.encode(errors="backslashreplace")


def fingerprint(root: Path, tree: Tree, settings: str) -> str:
    """Return 32 digits that change with the settings, the classes, and any file's path, size or time.

    Unpacked archives may have one time for all files, and images without compression one size: some are read, too.
    """
    digest = hashlib.blake2b(_bytes(f"{settings} {tree.classes}"), digest_size=16)
    for name, files in tree.splits.items():
        for path, _ in files:
            digest.update(_bytes(f"{name} {path.relative_to(root)} {_size_and_time(path)}\n"))
        for path, _ in _sample(files, COMPARED):
            with suppress(OSError), path.open("rb") as file:  # one that can't be read is named when it is decoded
                digest.update(file.read(2**16))
    return digest.hexdigest()


def _size_and_time(path: Path) -> str:
    try:
        stat = path.stat()
    except OSError as error:  # such as of a link to nowhere: it is named when it is decoded
        return type(error).__name__
    return f"{stat.st_size} {stat.st_mtime_ns}"


def _sample(files: Files, most: int) -> Files:
    """Return at most so many of the files, evenly spaced."""
    return files[:: max(-(-len(files) // most), 1)]


def common_size(files: Files) -> tuple[tuple[int, int], str] | None:
    """Return the size of the images, or the one to resize them to if they differ, and a line about it then.

    It is that of the first `SAMPLED` of them, evenly spaced; None if none can be read. Images of several sizes become
    squares of the median of their shorter sides, in multiples of 8 from 8 to `LARGEST_SIDE`.
    """

    def read(path: Path) -> tuple[int, int] | None:
        try:
            with opened(path) as picture:
                return size_of(picture)
        except ReadingError as error:  # without it the size could be another one
            raise ReadingError(f"{path}: {error}") from error
        except DecodingError:  # reported with all others when they are decoded
            return None

    with ThreadPoolExecutor() as pool:
        sizes = [size for size in pool.map(read, (path for path, _ in _sample(files, SAMPLED))) if size is not None]
    if not sizes:
        return None
    if len(set(sizes)) == 1:
        return sizes[0], ""
    shorter = sorted(min(size) for size in sizes)[len(sizes) // 2]
    side = min(max(shorter // 8 * 8, 8), LARGEST_SIDE)
    small, large = (f"{height}×{width}" for height, width in (min(sizes, key=_area), max(sizes, key=_area)))
    return (
        side,
        side,
    ), f"images of {small} to {large} pixels become {side}×{side} (data.image_size= for another size)"


def _area(size: tuple[int, int]) -> int:
    return size[0] * size[1]
