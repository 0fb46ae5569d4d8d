"""Large pictures from tar files, read in a stream from disks or over HTTP, for sets that do not fit one disk."""

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from ..images import DecodingError
from .large import Crop, LargePicturesDataModule, collate, one_thread
from .loader import EpochLoader, EpochOrder, epoch_order
from .pictures import check_val_size
from .shard_index import Shard, ShardError, expand, label, picture, read_index, read_shard

LANES = 24
"""Parts that a process's share of an epoch is read in side by side. So many, and not as many as there are workers, that
the order of the pictures does not depend on the workers; and a number that many numbers of workers divide."""


class WebDatasetDataModule(LargePicturesDataModule):
    """Pictures in tar files of the WebDataset format: `<key>.jpg` (or png, webp) beside `<key>.cls`, a class's number.

    The files are read in a stream with the package `webdataset`: paths and `http(s):` addresses (those by `curl`), with
    braces for many, as in ``/data/train-{0000..0146}.tar``. An epoch reads the shards in an order by (seed, epoch), and
    each process its own part of the pictures, none twice; they pass through a buffer that mixes them. With `val` alone,
    that is the test split; without a split of their own, some of the training shards validate.

    How many pictures a shard has must be known beforehand: they are counted once, which reads every file, and kept in
    the user's cache folder, or in `index`. A file here whose size or time has changed is counted anew; one that is read
    over HTTP, when the index is removed.

    Args:
        train: addresses of the training shards.
        val: of the validation shards.
        test: of the test shards.
        index: JSON file of what is in the shards, written where something is missing in it; None keeps it in the cache
            folder.
        buffer: how many pictures, still encoded, each process mixes.
        val_size: number or share of the training shards that validate where `val` or `test` is missing, at least one.
        split_seed: which shards these are.
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
        **options: Any,
    ) -> None:
        super().__init__(**options)
        if val is None and test is None:
            raise ValueError("val and test (=None) must not both be missing: name the shards to evaluate with")
        if buffer < 0:
            raise ValueError(f"buffer (={buffer}) must be at least 0")
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
        """Mixed, if it trains, through the buffer."""
        shards = self.splits[name]
        order = epoch_order(self, sum(shard.samples for shard in shards), shuffle=train)
        stream = ShardStream(shards, order, self.crop(train=train), self.buffer if train else 0)
        return ShardLoader(order, stream, self.workers)


def set_aside(urls: list[str], val_size: float, seed: int) -> tuple[list[str], list[str]]:
    """The shards that train, and those that validate."""
    check_val_size(val_size)
    taken = max(1, round(val_size * len(urls))) if isinstance(val_size, float) else val_size
    if taken >= len(urls):
        raise ValueError(
            f"val_size (={val_size}) must leave some of the {len(urls)} training shards: or name val shards"
        )
    order = torch.randperm(len(urls), generator=torch.Generator().manual_seed(seed)).tolist()
    chosen = set(order[:taken])
    train, val = ([url for i, url in enumerate(urls) if (i in chosen) == wanted] for wanted in (False, True))
    return train, val


class ShardLoader(EpochLoader):
    """Batches of a `ShardStream`, decoded by up to `workers` processes (0: by this one)."""

    def __init__(self, sampler: EpochOrder, stream: "ShardStream", workers: int) -> None:
        super().__init__(sampler)
        self.stream = stream
        self.workers = max((n for n in range(1, workers + 1) if LANES % n == 0), default=0)

    def batches(self, start: int) -> Iterator[Any]:
        self.stream.start = start
        pin = torch.cuda.is_available()
        loader = DataLoader(
            self.stream,
            batch_size=None,
            num_workers=self.workers,
            pin_memory=pin,
            worker_init_fn=one_thread,
            generator=torch.Generator(),  # else it draws from the generator that dropout draws from
        )
        try:
            yield from loader
        except ShardError as error:  # from a worker it comes with the worker's traceback
            raise ShardError(str(error).rpartition("ShardError: ")[2].strip()) from None


class ShardStream(IterableDataset[Any]):
    """The batches of one process in an epoch, from number `start` on.

    The epoch's sequence is that of all pictures of all shards, in a new order of the shards. Rank r reads the r-th of
    `world_size` parts of it. Batch s comes from lane s modulo `LANES`, which reads a part of that part, through a
    buffer that mixes.

    Args:
        shards: what is read.
        order: of the epoch: seed, epoch, rank and number of steps.
        crop: what decodes and crops a picture.
        buffer: pictures in the buffers of all lanes.
    """

    def __init__(self, shards: Sequence[Shard], order: EpochOrder, crop: Crop, buffer: int) -> None:
        self.shards, self.order, self.crop, self.buffer = shards, order, crop, buffer
        self.start = 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, list[str]]]:
        worker = get_worker_info()
        number, count = (0, 1) if worker is None else (worker.id, worker.num_workers)
        lanes: dict[int, Iterator[tuple[int, dict[str, Any]]]] = {}
        sizes, first = self._parts()
        for step in range(self.start + number, len(sizes), count):
            lane = step % LANES
            if lane not in lanes:
                lanes[lane] = self._lane(lane, first[lane], sum(sizes[lane::LANES]))
                given = sum(sizes[lane:step:LANES])  # before the place where an interrupted epoch goes on
                next(itertools.islice(lanes[lane], given, given), None)
            yield collate([self._item(*sample) for sample in itertools.islice(lanes[lane], sizes[step])])

    def _parts(self) -> tuple[list[int], list[int]]:
        """The size of each step's batch, and where in the epoch's sequence each lane begins."""
        order = self.order
        begin, end = (order.size * rank // order.world_size for rank in (order.rank, order.rank + 1))
        small, larger = divmod(end - begin, order.steps)
        sizes = [small + (step < larger) for step in range(order.steps)]
        return sizes, list(itertools.accumulate((sum(sizes[lane::LANES]) for lane in range(LANES)), initial=begin))

    def _lane(self, lane: int, first: int, count: int) -> Iterator[tuple[int, dict[str, Any]]]:
        """The samples of a lane with their numbers in the stored order, mixed."""
        from webdataset.filters import shuffle

        samples = itertools.islice(self._from(first), count)
        size = self.buffer // LANES
        if size < 2:
            return samples
        # Python's generator, as the package wants it; seeded by text, which keeps the numbers apart.
        mixing = random.Random(f"{self.order.seed} {self.order.epoch} {self.order.rank} {lane}")
        return iter(shuffle(size, initial=size, rng=mixing)(samples))

    def _from(self, first: int) -> Iterator[tuple[int, dict[str, Any]]]:
        """The epoch's sequence from its sample `first` on."""
        numbers = torch.arange(len(self.shards))
        if self.order.shuffle:
            numbers = torch.randperm(len(self.shards), generator=self.order.generator(0))
        begins = list(itertools.accumulate((shard.samples for shard in self.shards), initial=0))
        for number in numbers.tolist():
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
                    f"shard {shard.url}: {given} pictures, and {shard.samples} when they were counted: remove the index"
                )
            first = 0

    def _item(self, number: int, sample: dict[str, Any]) -> tuple[Tensor, int] | str:
        name = f"{sample['__url__']}: {sample['__key__']}"
        try:
            return self.crop(picture(sample) or b"", self.order.epoch, number), label(sample)
        except DecodingError as error:
            return f"{name} cannot be decoded ({error})"
