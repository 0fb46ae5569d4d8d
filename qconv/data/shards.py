"""Large images from tar files, streamed from disks or over HTTP, for sets that do not fit on one disk."""

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from ..ground.checks import check_not_negative, check_pixel_range
from ..images import DecodingError, PixelRange, decode
from .large import Batch, Crop, LargePicturesDataModule, collate, one_thread
from .loader import EpochLoader, EpochOrder, epoch_order
from .pictures import check_val_size
from .shard_index import Shard, ShardError, expand, label, picture, read_index, read_shard

LANES = 24
"""Parts in which a process reads its share of an epoch side by side. It does not depend on the number of workers, so
neither does the order of the images; and many numbers of workers divide it."""


class WebDatasetDataModule(LargePicturesDataModule):
    """Images in tar files of the WebDataset format: `<key>.jpg` (png, webp, ppm) beside `<key>.cls`, a class number.

    The package `webdataset` streams the files: paths and `http(s):` addresses (the latter by `curl`), with braces for
    many, as in ``/data/train-{0000..0146}.tar``. An epoch reads the shards in an order given by (seed, epoch), and each
    process reads its own part of the images, none twice; a buffer mixes them. With only `val`, that is the test
    split; without a validation split, some of the training shards are used for validation.

    The number of images in each shard must be known beforehand. They are counted once, which reads every file, and
    the result is kept in the user's cache folder, or in `index`. A local file is counted again if its size or time has
    changed; one read over HTTP, if the index is removed.

    Args:
        train: addresses of the training shards.
        val: addresses of the validation shards.
        test: addresses of the test shards.
        index: JSON file with the contents of the shards, updated when entries are missing; None keeps it in the cache
            folder.
        buffer: number of images, still encoded, that each process mixes.
        val_size: number (at least one) or share of the training shards used for validation if `val` or `test` is
            missing.
        split_seed: chooses these shards.
        pixel_range: as for `ImageFolderDataModule`.
        options: those of `LargePicturesDataModule`.

    Raises:
        ImportError: the package `webdataset` is not installed.
        ShardError: a shard that cannot be read.
        ValueError: no shards to train or test with, or an argument out of range.
    """

    classes: Sequence[str]

    def __init__(
        self,
        train: str | Sequence[str],
        *,
        val: str | Sequence[str] | None = None,
        test: str | Sequence[str] | None = None,
        index: str | None = None,
        buffer: int = 2000,
        val_size: float = 0.01,
        split_seed: int = 0,
        pixel_range: Sequence[float] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.pixel_range = check_pixel_range(pixel_range)
        if val is None and test is None:
            raise ValueError("val and test (=None) must not both be missing: name the shards to evaluate with")
        check_not_negative(buffer=buffer)
        addresses = {"train": expand(train), "val": expand(val or ()), "test": expand(test or ())}
        if not addresses["test"]:
            addresses["val"], addresses["test"] = [], addresses["val"]
        if not addresses["val"]:
            addresses["train"], addresses["val"] = set_aside(addresses["train"], val_size, split_seed)
        known = read_index([url for urls in addresses.values() for url in urls], index)
        self.splits = {name: [known[url] for url in urls] for name, urls in addresses.items()}
        self.buffer = buffer
        self.num_classes = 1 + max(shard.largest for shard in known.values())
        self.classes = [str(label) for label in range(self.num_classes)]

    def loader(self, name: str, *, train: bool) -> "ShardLoader":
        """Return batches of the split; for training mixed by the buffer."""
        shards = self.splits[name]
        order = epoch_order(self, sum(shard.samples for shard in shards), name, shuffle=train)
        stream = ShardStream(shards, order, self.crop(train=train), self.buffer if train else 0, self.pixel_range)
        return ShardLoader(order, stream, self.workers)


def set_aside(urls: list[str], val_size: float, seed: int) -> tuple[list[str], list[str]]:
    """Split the shards into those for training and those for validation."""
    check_val_size(val_size)
    taken = max(1, round(val_size * len(urls))) if isinstance(val_size, float) else val_size
    if taken >= len(urls):
        raise ValueError(
            f"val_size (={val_size}) must leave some of the {len(urls)} training shards; or name val and test shards"
        )
    order = torch.randperm(len(urls), generator=torch.Generator().manual_seed(seed)).tolist()
    chosen = set(order[:taken])
    train, val = ([url for i, url in enumerate(urls) if (i in chosen) == wanted] for wanted in (False, True))
    return train, val


class ShardLoader(EpochLoader):
    """Batches of a `ShardStream`, decoded by up to `workers` processes (0: by this process)."""

    def __init__(self, sampler: EpochOrder, stream: "ShardStream", workers: int) -> None:
        super().__init__(sampler)
        self.stream = stream
        self.workers = max((n for n in range(1, workers + 1) if LANES % n == 0), default=0)

    def cut(self) -> dict[str, int]:
        """As for all loaders; and each process reads a part of its own."""
        return {**super().cut(), "processes": self.sampler.world_size}

    def batches(self, start: int) -> Iterator[Any]:
        self.stream.start = start
        pin = torch.cuda.is_available()
        loader = DataLoader(
            self.stream,
            batch_size=None,
            num_workers=self.workers,
            pin_memory=pin,
            worker_init_fn=one_thread,
            generator=torch.Generator(),  # otherwise it would use dropout's generator
        )
        try:
            yield from loader
        except ShardError as error:  # a worker's error carries the worker's traceback
            raise ShardError(str(error).rpartition("ShardError: ")[2].strip()) from None


class ShardStream(IterableDataset[Any]):
    """The batches of one process in an epoch, starting at number `start`.

    The epoch's sequence is that of all images of all shards, in a new order of the shards. Rank r reads the r-th of
    its `world_size` parts. Batch s comes from lane s modulo `LANES`, which reads a part of that part through a mixing
    buffer; the buffers of all lanes have `buffer` images.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        order: EpochOrder,
        crop: Crop,
        buffer: int,
        pixel_range: PixelRange | None = None,
    ) -> None:
        self.shards, self.order, self.crop, self.buffer = shards, order, crop, buffer
        self.pixel_range = pixel_range
        self.start = 0

    def __iter__(self) -> Iterator[Batch]:
        worker = get_worker_info()
        number, count = (0, 1) if worker is None else (worker.id, worker.num_workers)
        lanes: dict[int, Iterator[tuple[int, dict[str, Any]]]] = {}
        sizes, first = self._parts()
        for step in range(self.start + number, len(sizes), count):
            lane = step % LANES
            if lane not in lanes:
                lanes[lane] = self._lane(lane, first[lane], sum(sizes[lane::LANES]))
                given = sum(sizes[lane:step:LANES])  # before the place where an interrupted epoch continues
                next(itertools.islice(lanes[lane], given, given), None)
            yield collate([self._item(*sample) for sample in itertools.islice(lanes[lane], sizes[step])])

    def _parts(self) -> tuple[list[int], list[int]]:
        """The batch size of each step, and the start of each lane in the epoch's sequence."""
        order = self.order
        begin, end = (order.size * rank // order.world_size for rank in (order.rank, order.rank + 1))
        small, larger = divmod(end - begin, order.steps)
        sizes = [small + (step < larger) for step in range(order.steps)]
        return sizes, list(itertools.accumulate((sum(sizes[lane::LANES]) for lane in range(LANES)), initial=begin))

    def _lane(self, lane: int, first: int, count: int) -> Iterator[tuple[int, dict[str, Any]]]:
        """The samples of a lane, mixed, with their numbers in the stored order."""
        from webdataset.filters import shuffle

        samples = itertools.islice(self._from(first), count)
        size = self.buffer // LANES
        if size < 2:
            return samples
        # Python's generator, as the package requires; the text seed keeps the numbers apart.
        mixing = random.Random(f"{self.order.seed} {self.order.epoch} {self.order.rank} {lane}")
        return iter(shuffle(size, initial=size, rng=mixing)(samples))

    def _from(self, first: int) -> Iterator[tuple[int, dict[str, Any]]]:
        """The epoch's sequence, starting at sample `first`."""
        begins = list(itertools.accumulate((shard.samples for shard in self.shards), initial=0))
        for number in self.order.numbers(len(self.shards)).tolist():
            shard = self.shards[number]
            if first >= shard.samples:
                first -= shard.samples
                continue
            given = 0
            for sample in read_shard(shard.url):
                if given >= first and given < shard.samples:
                    yield begins[number] + given, sample
                given += 1
            if given != shard.samples:
                raise ShardError(
                    f"shard {shard.url}: {given} images, and {shard.samples} when they were counted: remove the index"
                )
            first = 0

    def _item(self, number: int, sample: dict[str, Any]) -> tuple[Tensor, int] | DecodingError:
        name = f"{sample['__url__']}: {sample['__key__']}"
        try:
            image = decode(picture(sample) or b"", pixel_range=self.pixel_range)
            return self.crop(image, self.order.epoch, number), label(sample)
        except DecodingError as error:
            return type(error)(f"{name} cannot be decoded ({error})")
