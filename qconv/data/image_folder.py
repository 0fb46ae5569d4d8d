"""Any folder of images with a folder for each class, decoded once and cached in a file."""

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from statistics import median
from tempfile import TemporaryFile
from typing import Any, Literal

import torch
from pytorch_lightning.utilities import rank_zero_only

from ..ground.checks import check_choice, check_pixel_range
from ..ground.files import DamagedFileError, atomic_file, load_tensors
from ..ground.progress import shown, terminal
from ..images import DecodingError, ReadingError, read_picture
from .pictures import Pictures, PicturesDataModule
from .tree import Files, SplitBy, common_size, fingerprint, scan

SMALL = 1 << 13  # bytes of a file: an image of 32×32 has about 1,000, one of 256×256 about 30,000
FORMAT = 4  # of the cache file; each number has its own file
Broken = Literal["fatal", "skip"]


class BrokenPictureError(ValueError):
    """Images that cannot be decoded."""


Decoded = tuple[dict[str, Pictures], list[str]]
"""What the cache file holds: the images of each split, and lines about those that were left out."""


class ImageFolderDataModule(PicturesDataModule):
    """Images from folders `<class>/*`, or from `train/<class>/*` with `test/<class>/*`, `val/<class>/*` or both.

    Of folders without splits a part of each class is the test split, the same for every seed, chosen by hashes of the
    files' names: another image leaves the others where they are, or moves a single one. With only `test`, or
    without splits, a part of the training images is used for validation; with only `val`, that is the test split.
    What was split, resized and left out is said on stderr at each run, and the number of images. Tiny-ImageNet is read
    as it is published: images in `train/<class>/images`, classes of the others in `val/val_annotations.txt`.

    The images are decoded once, in parallel, into a file of uint8 tensors in `cache`, named after these settings and
    paths, sizes and times of the files; it is rewritten when one of them changes or when it is damaged. Grey, palette,
    CMYK and 16-bit images become `channels` channels of 8 bits, and of an animation or of pages the first image counts;
    images are turned as their EXIF orientation says, and transparency is ignored.

    Args:
        root: the folder.
        image_size: side, or (height, width); images are resized to cover it and cropped at the centre. None takes
            their size if they have one, and a side of at most 64 pixels if they have several.
        channels: 3, or 1 for grey.
        pixel_range: the values of grey images of more than 8 bits that become 0 and 255, such as (0, 4095) of 12 bits
            in 16; those beyond them do, too. None takes what their format states; images are broken if it states
            nothing, as of signed and floating-point numbers, or if less than 32 grey levels would be left of many.
        broken: what to do with files that cannot be decoded completely: ``"fatal"`` names them in an error, ``"skip"``
            reports them and leaves them out. Those that can't be read for another reason, such as an error of the disk,
            are an error in any case.
        test_size: the share of the images for testing, of folders without splits.
        split_by: ``"name"``, or ``"number"``: a permutation of the sorted files, which is
            another one for one file more.
        cache: folder of the cached files; None means `qconv` in the user's cache folder.
        options: those of `PicturesDataModule`; `split_seed` also chooses the test images.

    Raises:
        FileNotFoundError: `root` is missing or holds no such folders, or a split holds no image.
        ValueError: fewer than two classes, classes without training images, or an argument out of range.
        BrokenPictureError: files that are no images, or are cut off; a split or a class without whole images.
    """

    def __init__(
        self,
        root: str,
        *,
        image_size: int | Sequence[int] | None = None,
        channels: int = 3,
        pixel_range: Sequence[float] | None = None,
        broken: Broken = "fatal",
        test_size: float = 0.2,
        split_by: SplitBy = "name",
        cache: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        if channels not in (1, 3):
            raise ValueError(f"channels (={channels}) must be 1 or 3")
        check_choice("broken", broken, "fatal", "skip")
        if not isinstance(test_size, float) or not 0 < test_size < 1:
            raise ValueError(f"test_size (={test_size!r}) must be a share, above 0 and below 1")
        check_choice("split_by", split_by, "name", "number")
        self.split_by, self.pixel_range = split_by, check_pixel_range(pixel_range)
        self.root, self.in_channels, self.broken = Path(root).expanduser(), channels, broken
        self.tree = scan(self.root, test_size, self.split_seed, split_by)
        self.classes, self.num_classes = self.tree.classes, len(self.tree.classes)
        self.image_size, told = (_size(image_size), "") if image_size is not None else self._common_size()
        for line in filter(None, (*self.tree.told, told)):
            _tell(line)
        self.cached: Decoded | None = None
        settings = f"{FORMAT} {self.image_size} {channels} {self.pixel_range} {broken}"
        digest = fingerprint(self.root, self.tree, settings)  # it changes with any file's path, size or time
        folder = Path(cache).expanduser() if cache else cache_folder()
        self.cache = folder / f"{self.root.resolve().name}-{digest}.pt"

    def prepare_data(self) -> None:
        """Decode the images into the cache, in one process per machine."""
        if not self.splits:  # the test after a training needs no more
            self.cached = self._decoded()

    def read(self) -> dict[str, Pictures]:
        splits, _ = self.cached or self._decoded()  # another process of this machine may have prepared it
        self.cached = None
        return splits

    def _decoded(self) -> Decoded:
        """Return what the cache holds, or fill it; say what is left out."""
        if (cached := read_cache(self.cache)) is not None:
            for line in cached[1]:
                _tell(line)
            return cached
        try:
            self.cache.parent.mkdir(parents=True, exist_ok=True)
            TemporaryFile(dir=self.cache.parent).close()  # fails before all are decoded where nothing can be written
        except OSError as error:
            raise OSError(f"cache (={self.cache.parent}) cannot be written: {error.strerror}") from error
        left_out: list[str] = []
        splits = {name: self._decode(name, left_out) for name in self.tree.splits}
        with atomic_file(self.cache) as file:
            torch.save({"splits": {name: tuple(each) for name, each in splits.items()}, "left_out": left_out}, file)
        return splits, left_out

    def setup(self, stage: str) -> None:
        is_new = not self.splits
        super().setup(stage)
        if is_new:
            counts = " / ".join(f"{len(self.splits[name].labels):,}" for name in ("train", "val", "test"))
            _tell(f"{self.num_classes} classes: {counts} images (training / validation / test)")

    def _common_size(self) -> tuple[tuple[int, int], str]:
        found = common_size(self.tree.splits["train"])
        if found is None:
            raise BrokenPictureError(f"data.root (={self.root}): none of the files in train is an image")
        return found

    def _decode(self, name: str, left_out: list[str]) -> Pictures:
        files = self.tree.splits[name]
        images = torch.empty(len(files), self.in_channels, *self.image_size, dtype=torch.uint8)
        problems: dict[int, DecodingError] = {}

        def decode(index: int) -> None:
            try:
                images[index] = read_picture(files[index][0], self.image_size, self.in_channels, self.pixel_range)
            except DecodingError as error:
                problems[index] = error

        workers = threads_for([path for path, _ in files])
        with ThreadPoolExecutor(workers) as pool:
            for _ in shown(pool.map(decode, range(len(files))), f"decoding {name}", len(files)):
                pass
        if passing := {index: error for index, error in problems.items() if isinstance(error, ReadingError)}:
            raise BrokenPictureError(_told(passing, files, "can't be read"))
        if problems:
            told = _told(problems, files, "are damaged or are not images")
            if self.broken == "fatal":
                raise BrokenPictureError(f"{told}; repair or remove them, or leave them out by data.broken=skip")
            left_out.append(f"left out: {told}")
            _tell(left_out[-1])
        kept = torch.tensor([index for index in range(len(files)) if index not in problems], dtype=torch.long)
        labels = torch.tensor([label for _, label in files])
        left = Counter(labels[kept].tolist())
        if name == "train" and (empty := [c for i, c in enumerate(self.classes) if not left[i]]):
            raise BrokenPictureError(f"class {empty[0]!r} has no readable training image")
        if not left:
            raise BrokenPictureError(f"data.root (={self.root}): {name} has no readable image")
        return Pictures(images[kept] if problems else images, labels[kept])


def cache_folder() -> Path:
    """The folder of this user's cached files."""
    return (Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "qconv").expanduser()


def read_cache(path: Path) -> Decoded | None:
    """Return what the cache file holds, or None if it is missing or damaged.

    It is read, not mapped: replacing a mapped file kills the process.
    """
    if not path.is_file():
        return None
    try:
        content = load_tensors(path, "cache")
        splits = {name: Pictures(*pictures) for name, pictures in content["splits"].items()}
        return splits, content["left_out"]
    except (DamagedFileError, AttributeError, LookupError, TypeError) as error:  # the last three: it holds other data
        terminal().print(f"{error}: the images are decoded again")
        return None


def threads_for(files: Sequence[str | os.PathLike[str]]) -> int:
    """The number of threads that decode files: of small ones few, as most of the time is Python's, which runs in one.

    16 threads on 16 cores decoded 1,630 images of CIFAR-10 a second, 2 threads 3,040; large images gain by all cores.
    """
    sizes = []
    for file in files[:: max(1, len(files) // 100)]:
        with suppress(OSError):  # whoever reads it says so
            sizes.append(Path(file).stat().st_size)
    return min(cores(), 2) if sizes and median(sizes) < SMALL else cores()


def cores() -> int:
    """The number of threads or processes that this machine can run at once."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _size(size: int | Sequence[int]) -> tuple[int, int]:
    pair = (size, size) if isinstance(size, int) else tuple(size)
    if len(pair) != 2 or min(pair) < 1:
        raise ValueError(f"image_size (={size}) must be a positive side, or (height, width)")
    return pair


def _told(problems: Mapping[int, DecodingError], files: Files, what: str, most: int = 5) -> str:
    shown: Iterable[int] = sorted(problems)[:most]
    listed = "; ".join(f"{files[index][0]} ({problems[index]})" for index in shown)
    more = f"; and {len(problems) - most} more" if len(problems) > most else ""
    return f"{len(problems)} of {len(files)} files {what}: {listed}{more}"


@rank_zero_only
def _tell(line: str) -> None:
    terminal().print(f"data: {line}", soft_wrap=True)
