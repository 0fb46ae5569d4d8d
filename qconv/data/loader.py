"""Batches of a data set that lies in memory: indexed as whole tensors, ordered by (seed, epoch) alone."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from .augment import Augment


class EpochOrder:
    """The order of one epoch's samples, cut into this rank's batches.

    Each epoch's order is cut into one part a step, which differ in size by at most one, and rank r takes every
    `world_size`-th sample of a part from r on, as the streams of `qconv.quantizers.Stream` count them. So all ranks
    take the same number of steps, no sample is lost or repeated, and no batch is a small remainder, whose batch-norm
    statistics would be noise.

    Args:
        size: number of samples.
        batch_size: the largest number of samples of one batch on one rank.
        shuffle: a new order each epoch; otherwise the stored order.
        seed: with the epoch, all that the order depends on.
        rank: this process.
        world_size: number of processes.

    Raises:
        ValueError: if `batch_size` is less than 1 or there are fewer samples than processes.
    """

    def __init__(
        self, size: int, batch_size: int, *, shuffle: bool, seed: int = 0, rank: int = 0, world_size: int = 1
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size (={batch_size}) must be at least 1")
        if size < world_size:
            raise ValueError(f"size (={size}) must be at least world_size (={world_size}): each process needs a sample")
        self.size, self.shuffle, self.seed = size, shuffle, seed
        self.rank, self.world_size = rank, world_size
        self.steps = -(-size // (batch_size * world_size))
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order comes next; Lightning calls it."""
        self.epoch = epoch

    def generator(self, stream: int) -> torch.Generator:
        """Random numbers of this seed, epoch and stream; 0 orders the samples, 1 + rank augments them."""
        # One multiplication per number keeps (seed, epoch) pairs apart: seed 1, epoch 2 is not seed 2, epoch 1.
        mixed = (self.seed * 1_000_003 + self.epoch) * 1_000_003 + stream
        return torch.Generator().manual_seed(mixed % 2**63)

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[Tensor]:
        order = torch.randperm(self.size, generator=self.generator(0)) if self.shuffle else torch.arange(self.size)
        yield from (part[self.rank :: self.world_size] for part in order.tensor_split(self.steps))


class TensorLoader:
    """Batches `(images[i], labels[i])` in the order of `sampler`, augmented and then normalized batch by batch.

    It is a plain iterable: `torch.utils.data.DataLoader` would collate sample by sample. Lightning finds `set_epoch`
    through the attribute `sampler`, and wants `batch_sampler` beside it, None as of a DataLoader with batch_size=None.
    """

    batch_sampler = None

    def __init__(
        self,
        images: Tensor,
        labels: Tensor,
        sampler: EpochOrder,
        augment: Sequence[Augment] = (),
        normalize: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.images, self.labels, self.sampler = images, labels, sampler
        self.augment, self.normalize = tuple(augment), normalize

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        generator = self.sampler.generator(1 + self.sampler.rank)
        for indices in self.sampler:
            indices = indices.to(self.images.device)
            images = self.images[indices]
            for augment in self.augment:
                images = augment(images, generator)
            yield images if self.normalize is None else self.normalize(images), self.labels[indices]
