"""The order of an epoch, a function of (seed, epoch) alone, and loaders that follow it from any place."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from pytorch_lightning import LightningDataModule
from torch import Tensor

from ..ground.checks import check_at_least_one
from .augment import Augment, augmented

T = TypeVar("T")
R = TypeVar("R")


class EpochOrder:
    """The order of one epoch's samples, cut into this rank's batches.

    Each epoch's order is cut into one part per step; the parts differ in size by at most one. Rank r takes every
    `world_size`-th sample of a part, starting at r, as the streams of `qconv.quantizers.Stream` count them. So all
    ranks take the same number of steps, no sample is lost or repeated, and no batch is a small remainder with noisy
    batch-norm statistics.

    Args:
        size: number of samples.
        batch_size: the largest number of samples in one batch on one rank.
        shuffle: whether each epoch has a new order instead of the stored one.
        mixed: whether the order, if it is the same in each epoch, is not the stored one, in which the images of a
            class may follow each other: for epochs that end early.
        seed: together with the epoch determines the order.
        rank: number of this process.
        world_size: number of processes.

    Raises:
        ValueError: if `batch_size` is less than 1, or some process would have no sample in some step.
    """

    def __init__(
        self,
        size: int,
        batch_size: int,
        *,
        shuffle: bool,
        mixed: bool = False,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        check_at_least_one(batch_size=batch_size)
        if size < world_size:
            raise ValueError(f"size (={size}) must be at least world_size (={world_size}): each process needs a sample")
        self.size, self.shuffle, self.mixed, self.seed = size, shuffle, mixed, seed
        self.rank, self.world_size = rank, world_size
        self.steps = -(-size // (batch_size * world_size))
        if size // self.steps < world_size:  # the smallest batch of all processes
            raise ValueError(
                f"batch_size (={batch_size}) must be at least 2 for size (={size}) on world_size (={world_size}) "
                "processes, or one of them would have a step without a sample"
            )
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next order; Lightning calls it."""
        self.epoch = epoch

    def generator(self, stream: int) -> torch.Generator:
        """Random numbers of this seed, epoch and stream; stream 0 orders the samples, those from 1 on augment them."""
        # One multiplication per number keeps (seed, epoch) pairs apart: seed 1, epoch 2 is not seed 2, epoch 1.
        mixed = (self.seed * 1_000_003 + self.epoch) * 1_000_003 + stream
        return torch.Generator("cpu").manual_seed(mixed % 2**63)

    def __len__(self) -> int:
        return self.steps

    def numbers(self, count: int) -> Tensor:
        """Return the numbers below `count` in the order of this epoch."""
        if self.shuffle:
            return torch.randperm(count, generator=self.generator(0), device="cpu")
        if self.mixed:
            return torch.randperm(count, generator=torch.Generator("cpu").manual_seed(0), device="cpu")
        return torch.arange(count, device="cpu")

    def parts(self, start: int = 0) -> Iterator[Tensor]:
        """Yield this rank's samples for each step from `start` on."""
        parts = self.numbers(self.size).tensor_split(self.steps)
        yield from (part[self.rank :: self.world_size] for part in parts[start:])

    def __iter__(self) -> Iterator[Tensor]:
        return self.parts()


def epoch_order(data: Any, size: int, split: str, *, shuffle: bool) -> EpochOrder:
    """The order of the `size` samples of a split for the process of the data module `data`.

    Where the trainer limits validation or test (`limit_val_batches`), their images are mixed, so that some of all
    classes are taken; of shards, only the order of the files is. To overfit some batches (`overfit_batches`) is to have
    the same in each epoch.
    """
    trainer = data.trainer
    rank, world_size = (trainer.global_rank, trainer.world_size) if trainer else (0, 1)
    limit = getattr(trainer, f"limit_{split}_batches", 1.0)
    mixed = isinstance(limit, int) or limit < 1  # 1 is a batch, 1.0 is all
    if split == "train" and getattr(trainer, "overfit_batches", 0):
        shuffle, mixed = False, True
    return EpochOrder(
        size, data.batch_size, shuffle=shuffle, mixed=mixed, seed=data.seed, rank=rank, world_size=world_size
    )


def split_of(splits: Mapping[str, T], name: str) -> T:
    """Return the split of this name."""
    if not splits:
        raise RuntimeError(f"there are no {name} images yet: call setup('fit') first, as Lightning's Trainer does")
    return splits[name]


class EpochLoader(ABC):
    """Batches in an `EpochOrder`, continuing where an interrupted epoch stopped.

    It is a plain iterable that begins when its first batch is requested: by then Lightning has set the epoch through
    the attribute `sampler`. Lightning also expects `batch_sampler`, which is None as for a DataLoader with
    batch_size=None, and saves `state_dict` with each checkpoint.
    """

    batch_sampler = None

    def __init__(self, sampler: EpochOrder) -> None:
        self.sampler = sampler
        self.given = 0
        self.resumed: dict[str, int] | None = None

    @abstractmethod
    def batches(self, start: int) -> Iterator[Any]:
        """Yield the batches of the sampler's epoch from number `start` on."""

    def __len__(self) -> int:
        return len(self.sampler)

    def cut(self) -> dict[str, int]:
        """What decides which images a batch has, besides the order."""
        return {"batches": len(self), "pictures": self.sampler.size}

    def __iter__(self) -> Iterator[Any]:
        """Go through the epoch, or once through the rest of the one that was interrupted."""
        self.given = 0
        if (resumed := self.resumed) is not None and resumed["epoch"] == self.sampler.epoch:
            self.given, self.resumed = resumed["batch"], None
            now = self.cut()
            before = {name: resumed.get(name, value) for name, value in now.items()}
            if before != now and self.given >= before["batches"]:  # it had ended
                self.given = len(self)
            elif before != now and self.given > 0:
                name = next(name for name in now if before[name] != now[name])
                counted = "images" if name == "pictures" else name
                raise ValueError(
                    f"epoch {self.sampler.epoch} was interrupted after {self.given} of {before['batches']} batches, "
                    f"with {before[name]} {counted} in all, and has {now[name]} now: resume with the same "
                    "number (set by the data, or by data.batch_size times the number of processes)"
                )
        for batch in self.batches(self.given):
            self.given += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        """The epoch, the number of batches yielded so far, and how the epoch is cut; the same on all ranks."""
        return {"epoch": self.sampler.epoch, "batch": self.given, **self.cut()}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Resume that epoch after those batches."""
        self.resumed = dict(state_dict)


class SplitsDataModule(LightningDataModule):
    """The three loaders of a data module, by one method: only `test_dataloader` touches the test split."""

    def loader(self, name: str, *, train: bool) -> Any:
        """Return batches of the split; for training in a new order each epoch, and augmented."""
        raise NotImplementedError(f"{type(self).__name__} defines no loader()")

    def train_dataloader(self) -> Any:
        """Training images, shuffled and augmented by (seed, epoch)."""
        return self.loader("train", train=True)

    def val_dataloader(self) -> Any:
        """All validation images."""
        return self.loader("val", train=False)

    def test_dataloader(self) -> Any:
        """All test images."""
        return self.loader("test", train=False)


class TensorLoader(EpochLoader):
    """Batches `(images[i], labels[i])` in the order of `sampler`, augmented, normalized and resized batch by batch.

    `torch.utils.data.DataLoader` would collate sample by sample. The random numbers of a batch are a function of
    (seed, epoch, batch, rank). `resize` is called with the images and the epoch.
    """

    def __init__(
        self,
        images: Tensor,
        labels: Tensor,
        sampler: EpochOrder,
        augment: Sequence[Augment] = (),
        normalize: Callable[[Tensor], Tensor] | None = None,
        resize: Callable[[Tensor, int], Tensor] | None = None,
    ) -> None:
        super().__init__(sampler)
        self.images, self.labels = images, labels
        self.augment, self.normalize, self.resize = tuple(augment), normalize, resize

    def batches(self, start: int) -> Iterator[tuple[Tensor, Tensor]]:
        for number, indices in enumerate(self.sampler.parts(start), start):
            generator = self.sampler.generator(1 + number * self.sampler.world_size + self.sampler.rank)
            indices = indices.to(self.images.device)
            images = self.images[indices]
            images = augmented(images, self.augment, generator)
            if self.normalize is not None:
                images = self.normalize(images)
            if self.resize is not None:
                images = self.resize(images, self.sampler.epoch)
            yield images, self.labels[indices]


def ahead(pool: ThreadPoolExecutor, function: Callable[[T], R], items: Iterable[T], most: int) -> Iterator[R]:
    """Yield ``function(item)`` in order, at most ``most`` of them begun ahead, so that few have to be kept."""
    begun: deque[Future[R]] = deque()
    for item in items:
        begun.append(pool.submit(function, item))
        if len(begun) == most:
            yield begun.popleft().result()
    while begun:
        yield begun.popleft().result()
