"""Images per second: qconv's loaders against torchvision's data sets with PIL transforms."""

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ..data import ImageFolderDataModule, ImageNetDataModule, PreparedDataModule
from ..data.large import LargePicturesDataModule
from ..ground.checks import check_at_least_one
from ..ground.table import Column
from .rows import Row, quartiles

_SMALL, _LARGE = 2000, 200  # images a round


@dataclass(frozen=True)
class Result(Row):
    """Medians over the rounds; `ratio` is the median of the ratios within a round, `low` and `high` its quartiles."""

    columns = (
        Column("images", width=15),
        *(Column(head, is_right=True, width=10) for head in ("ours/s", "PIL/s")),
        Column("ratio", is_right=True, width=22),
    )

    pictures: str
    batch_size: int
    count: int
    ours: float
    pil: float
    ratio: float
    low: float
    high: float

    def cells(self) -> tuple[str, ...]:
        spread = f"{self.ratio:.2f} [{self.low:.2f}, {self.high:.2f}]"
        return self.pictures, f"{self.ours:,.0f}", f"{self.pil:,.0f}", spread


class PILPictures(Dataset[Any]):
    """Small images as in torchvision's CIFAR10: an array in memory, PIL transforms image by image."""

    def __init__(self, images: Tensor, labels: Tensor, mean: list[float], std: list[float], augment: bool) -> None:
        from torchvision import transforms as T

        self.arrays, self.labels = images.permute(0, 2, 3, 1).numpy(), labels.tolist()
        random = [T.RandomCrop(images.shape[2:], 4), T.RandomHorizontalFlip()] if augment else []
        normalize = T.Normalize([m / 255 for m in mean], [s / 255 for s in std])
        self.transform: Any = T.Compose([*random, T.ToTensor(), normalize])

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        from PIL import Image

        return self.transform(Image.fromarray(self.arrays[index])), self.labels[index]


def measure_small(root: str, batch_size: int, rounds: int) -> Result:
    """Crop, flip and normalize small images, in this process on both sides.

    Raises:
        RuntimeError: without augmentation the two sides give different images; nothing is timed then.
    """
    data = ImageFolderDataModule(root, batch_size=batch_size)
    data.prepare_data()
    data.setup("fit")
    images, labels = data.splits["train"]
    normalize: Any = data.normalize  # which `setup` has set
    statistics_of = list(normalize.mean), list(normalize.std)
    plain = PILPictures(images[:64], labels[:64], *statistics_of, augment=False)
    expected = torch.stack([plain[index][0] for index in range(len(plain))])
    if not torch.allclose(normalize(images[:64]), expected, atol=1e-4):
        raise RuntimeError("the two sides normalize differently; nothing was timed")
    theirs = DataLoader(PILPictures(images, labels, *statistics_of, augment=True), batch_size, shuffle=True)
    ours = data.train_dataloader()
    return _measure("small", batch_size, _SMALL, rounds, lambda: ours, lambda: theirs)


def measure_large(root: str, batch_size: int, rounds: int) -> Result:
    """Decode, crop, resize, flip and normalize large images, with one worker process on both sides."""
    data = ImageNetDataModule(root, batch_size=batch_size, workers=1, val_size=0.05)
    return _measure("large", batch_size, _LARGE, rounds, _loader(data), pil_folder(root, data, batch_size))


def measure_prepared(root: str, prepared: str, batch_size: int, rounds: int, *, normalized: bool) -> Result:
    """Crop, resize and flip prepared images with one thread; the other side as for large ones.

    Our side reads ten times as many images a round, in several epochs if need be, since it is so much faster. Bytes
    are what goes to a GPU, which normalizes them itself; floats are normalized by this process, theirs by the worker.
    """
    data = PreparedDataModule(prepared, batch_size=batch_size, workers=1, val_size=0.05)
    one, theirs = _loader(data, normalized), pil_folder(root, data, batch_size, normalized)

    def ours() -> Iterable[Any]:
        return chain.from_iterable(one() for _ in repeat(None))

    name = "prepared" if normalized else "prepared, bytes"
    return _measure(name, batch_size, _LARGE, rounds, ours, theirs, 10 * _LARGE)


def _loader(data: LargePicturesDataModule, normalized: bool = True) -> Callable[[], Iterable[Any]]:
    """Return a function that yields an epoch of batches."""
    data.setup("fit")
    loader = data.train_dataloader()

    def epoch() -> Iterable[Any]:
        batches = (data.on_before_batch_transfer(batch, 0) for batch in loader)
        return (data.on_after_batch_transfer(batch, 0) for batch in batches) if normalized else batches

    return epoch


def pil_folder(
    root: str, data: LargePicturesDataModule, batch_size: int, normalized: bool = True
) -> Callable[[], Iterable[Any]]:
    """Torchvision's ImageFolder with the usual transforms, read by one worker process."""
    from torchvision import transforms as T
    from torchvision.datasets import ImageFolder

    floats = [T.ToTensor(), T.Normalize((0.5,) * 3, (0.2,) * 3)]
    transform = T.Compose(
        [
            T.RandomResizedCrop(data.image_size[0]),
            T.RandomHorizontalFlip(),
            *(floats if normalized else [T.PILToTensor()]),
        ]
    )
    pictures = ImageFolder(str(Path(root) / "train"), transform)
    loader = DataLoader(pictures, batch_size, shuffle=True, num_workers=1, persistent_workers=True)
    return lambda: loader


def _measure(
    name: str,
    batch_size: int,
    count: int,
    rounds: int,
    ours: Callable[[], Iterable[Any]],
    theirs: Callable[[], Iterable[Any]],
    our_count: int | None = None,
) -> Result:
    """Time both sides in turn, ``count`` images or an epoch per round, after a warm-up round."""
    check_at_least_one(rounds=rounds)
    pairs = [
        (_rate(ours(), batch_size, our_count or count), _rate(theirs(), batch_size, count)) for _ in range(rounds + 1)
    ][1:]
    ratios = [mine / other for mine, other in pairs]
    low, ratio, high = quartiles(ratios)
    mine, other = (statistics.median(side) for side in zip(*pairs, strict=True))
    return Result(name, batch_size, our_count or count, mine, other, ratio, low, high)


def _rate(loader: Iterable[Any], batch_size: int, count: int) -> float:
    """Images per second."""
    start, seen = time.perf_counter(), 0
    for images, _ in islice(loader, -(-count // batch_size)):
        seen += len(images)
    return seen / (time.perf_counter() - start)
