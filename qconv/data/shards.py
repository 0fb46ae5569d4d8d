"""Large pictures from tar files, read in a stream from disks or over HTTP, for sets that do not fit one disk."""

import contextlib
import hashlib
import itertools
import json
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from ..files import atomic_file
from .image_folder import cache_folder, cores
from .large import Crop, DecodingError, LargePicturesDataModule, collate, one_thread
from .loader import EpochLoader, EpochOrder

LANES = 24
"""Parts that a process's share of an epoch is read in side by side. So many, and not as many as there are workers, that
the order of the pictures does not depend on the workers; and a number that many numbers of workers divide."""


class Shard(NamedTuple):
    """A tar file, its number of pictures, the largest label in it, and `state` when they were counted."""

    url: str
    samples: int
    largest: int
    state: str


class ShardError(ValueError):
    """A tar file that is missing, cut off, or not what the index says."""


class WebDatasetDataModule(LargePicturesDataModule):
    """Pictures in tar files of the WebDataset format: `<key>.jpg` (or png, webp) beside `<key>.cls`, a class's number.

    The files are read in a stream with the package `webdataset`: paths and `http(s):` addresses (those by `curl`), with
    braces for many, as in ``/data/train-{0000..0146}.tar``. An epoch reads the shards in an order by (seed, epoch), and
    each process its own part of the pictures, none twice; they pass through a buffer that mixes them. Without `val`,
    `test` validates; without `test`, `val` is tested.

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
        **options: Any,
    ) -> None:
        super().__init__(**options)
        if val is None and test is None:
            raise ValueError("val and test (=None) must not both be missing: name the shards to evaluate with")
        if buffer < 0:
            raise ValueError(f"buffer (={buffer}) must be at least 0")
        addresses = {"train": expand(train), "val": expand(val or test or ()), "test": expand(test or val or ())}
        known = read_index([url for urls in addresses.values() for url in urls], index)
        self.splits = {name: [known[url] for url in urls] for name, urls in addresses.items()}
        self.buffer = buffer
        self.num_classes = 1 + max(shard.largest for shard in known.values())
        self.classes = [str(label) for label in range(self.num_classes)]

    def train_dataloader(self) -> "ShardLoader":
        """Mixed and augmented by (seed, epoch)."""
        return self._loader("train", train=True)

    def val_dataloader(self) -> "ShardLoader":
        """All validation pictures, cropped at the centre."""
        return self._loader("val", train=False)

    def test_dataloader(self) -> "ShardLoader":
        """All test pictures, cropped at the centre."""
        return self._loader("test", train=False)

    def _loader(self, name: str, *, train: bool) -> "ShardLoader":
        rank, world_size = (self.trainer.global_rank, self.trainer.world_size) if self.trainer else (0, 1)
        shards = self.splits[name]
        size = sum(shard.samples for shard in shards)
        order = EpochOrder(size, self.batch_size, shuffle=train, seed=self.seed, rank=rank, world_size=world_size)
        crop = Crop(self.image_size[0], self.resize, self.seed if train else None)
        return ShardLoader(order, ShardStream(shards, order, crop, self.buffer if train else 0), self.workers)


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


def read_shard(url: str) -> Iterator[dict[str, Any]]:
    """The samples of a tar file that have a picture, as bytes by their suffixes."""
    from webdataset.gopen import gopen
    from webdataset.tariterators import group_by_keys, tar_file_expander

    try:
        with contextlib.closing(gopen(url)) as stream:
            for sample in group_by_keys(tar_file_expander([{"url": url, "stream": stream}])):
                if picture(sample) is not None:
                    yield sample
    except Exception as error:  # the package passes on whatever tarfile, the disk or curl said
        reason = error.strerror if isinstance(error, OSError) else None
        reason = reason or (str(error.args[0]) if error.args else type(error).__name__)
        raise ShardError(f"shard {url} cannot be read: {reason}") from error


def picture(sample: dict[str, Any]) -> bytes | None:
    """The encoded picture of a sample."""
    return next((sample[suffix] for suffix in ("jpg", "jpeg", "png", "webp") if suffix in sample), None)


def label(sample: dict[str, Any]) -> int:
    """The class's number."""
    text = sample.get("cls", b"").decode(errors="replace").strip()
    if not re.fullmatch("[0-9]+", text):
        raise ShardError(f"shard {sample['__url__']}: {sample['__key__']}.cls (={text!r}) must be a class's number")
    return int(text)


def expand(urls: str | Iterable[str]) -> list[str]:
    """The addresses that braces stand for; `~` is the home folder."""
    try:
        from webdataset.shardlists import expand_urls
    except ImportError:
        raise ImportError("data=webdataset needs the package webdataset: pip install 'qconv[shards]'") from None
    found = [url for part in ([urls] if isinstance(urls, str) else urls) for url in expand_urls(part)]
    if not all(found):
        raise ValueError(f"train, val and test (={urls!r}) must be addresses of shards, none of them empty")
    return [str(Path(url).expanduser()) if url.startswith("~") else url for url in found]


def read_index(urls: Sequence[str], path: str | None) -> dict[str, Shard]:
    """What is in the shards: from the index file, or counted, and then written there."""
    urls = list(dict.fromkeys(urls))
    key = hashlib.sha256("\n".join(urls).encode()).hexdigest()[:16]
    file = Path(path).expanduser() if path is not None else cache_folder() / f"shards-{key}.json"
    known: dict[str, Shard] = {}
    if file.is_dir():
        raise ShardError(f"index {file}: must be a file, not a folder")
    if file.is_file():
        try:
            known = {url: Shard(url, int(n), int(largest), str(then)) for url, (n, largest, then) in read_json(file)}
        except (ValueError, TypeError, AttributeError) as error:
            raise ShardError(f"index {file}: not written by qconv, or damaged: remove it") from error
    missing = [url for url in urls if url not in known or known[url].state != state(url)]
    if missing:
        known.update(count(missing))
        file.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(file) as out:
            out.write(json.dumps({url: shard[1:] for url, shard in known.items()}, indent=0).encode())
    return {url: known[url] for url in urls}


def read_json(file: Path) -> Iterable[tuple[str, Any]]:
    """The entries of an index file."""
    return json.loads(file.read_text()).items()


def state(url: str) -> str:
    """Size and time of a file here; nothing of another one."""
    if not Path(url).is_file():
        return ""
    stat = Path(url).stat()
    return f"{stat.st_size} bytes at {stat.st_mtime_ns}"


def count(urls: Sequence[str]) -> dict[str, Shard]:
    """Read every shard once."""

    def one(url: str) -> Shard:
        then = state(url)  # before it is read: what changes meanwhile is counted anew the next time
        labels = [label(sample) for sample in read_shard(url)]
        if not labels:
            raise ShardError(f"shard {url}: no pictures (<key>.jpg beside <key>.cls)")
        return Shard(url, len(labels), max(labels), then)

    with Progress(console=Console(stderr=True), transient=True) as bar, ThreadPoolExecutor(cores()) as pool:
        task = bar.add_task(f"counting the pictures of {len(urls)} shards", total=len(urls))
        found = {}
        for shard in pool.map(one, urls):
            found[shard.url] = shard
            bar.advance(task)
    return found
