"""Data sets in memory, one uint8 tensor per split, on the device that trains."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..ground.checks import check_at_least_one
from ..images import Normalize
from .augment import Augment, RandomCrop, RandomFlip, check_augment, mean_and_std
from .loader import SplitsDataModule, TensorLoader, epoch_order, split_of
from .progressive import ProgressiveSize


class Pictures(NamedTuple):
    """Images `(N, C, H, W)` as uint8, and their classes `(N,)` as int64."""

    images: Tensor
    labels: Tensor


class PicturesDataModule(SplitsDataModule):
    """Images in memory, augmented in batches on the device, normalized with mean and deviation of the train split.

    A subclass sets `num_classes`, `in_channels`, `image_size` and `classes` in its constructor and writes `read`. A
    batch larger than a split is the whole split. If `normalize` is set before `setup`, as for a network that was
    trained on other images, it stays.

    Args:
        seed: seed of the order and augmentation of the training images; the split does not depend on it.
        batch_size: largest batch of one process.
        augment: augmentations of training images, applied in turn; None means `RandomCrop(4)` and `RandomFlip()`.
        val_size: number or share of training images used for validation if the data have no validation split; the
            same for every seed, with the classes in proportion.
        split_seed: chooses these images.
        progressive_size: the size of training images epoch by epoch; None means their full size.

    Raises:
        ValueError: `batch_size` is less than 1, or `val_size` is negative, 0 or not below the number of images.
        TypeError: `augment` is no list of functions, or has a transform of torchvision outside `PerImage`.
    """

    num_classes: int
    in_channels: int
    image_size: tuple[int, int]
    classes: Sequence[str]
    normalize: Normalize | None = None

    def __init__(
        self,
        *,
        seed: int = 0,
        batch_size: int = 128,
        augment: Sequence[Augment] | None = None,
        val_size: float = 0.1,
        split_seed: int = 0,
        progressive_size: ProgressiveSize | None = None,
    ) -> None:
        super().__init__()
        check_at_least_one(batch_size=batch_size)
        check_val_size(val_size)
        self.seed, self.batch_size = seed, batch_size
        self.augment = (RandomCrop(4), RandomFlip()) if augment is None else check_augment(augment)
        self.val_size, self.split_seed, self.progressive_size = val_size, split_seed, progressive_size
        self.splits: dict[str, Pictures] = {}

    def read(self) -> dict[str, Pictures]:
        """Return the splits "train" and "test", and "val" if the data have one."""
        raise NotImplementedError(f"{type(self).__name__} defines no read()")

    def setup(self, stage: str) -> None:
        """Read and split the images, once, and move them to the trainer's device."""
        del stage
        if self.splits:
            return
        splits = self.read()
        if "val" not in splits:
            images, labels = splits["train"]
            chosen = share_out(labels, self.val_size, self.split_seed)
            splits["train"] = Pictures(images[~chosen], labels[~chosen])  # in their stored order, as those
            splits["val"] = Pictures(images[chosen], labels[chosen])
        if self.normalize is None:
            self.normalize = Normalize(*mean_and_std(splits["train"].images))
        device = self.trainer.strategy.root_device if self.trainer else torch.device("cpu")
        self.splits = {
            name: Pictures(images.to(device), labels.to(device)) for name, (images, labels) in splits.items()
        }

    def loader(self, name: str, *, train: bool) -> TensorLoader:
        """The images of the split; those for training are augmented, in the size of the epoch."""
        images, labels = split_of(self.splits, name)
        order = epoch_order(self, len(labels), name, shuffle=train)
        augment, resize = (self.augment, self._resized) if train else ((), None)
        return TensorLoader(images, labels, order, augment, self.normalize, resize)

    def _resized(self, images: Tensor, epoch: int) -> Tensor:
        size = self.progressive_size
        if size is None or self.trainer is None or not self.trainer.training:  # such as for batch norms taken anew
            return images
        epochs = self.trainer.max_epochs
        if epochs is None or epochs < 1 or epoch >= epochs - 1:  # without an end there is no progress towards it
            return images
        return size(images, epoch / epochs)


def check_val_size(val_size: float) -> None:
    """Raise a ValueError unless it is a positive number, or a share of the training data."""
    if val_size <= 0 or (isinstance(val_size, float) and val_size >= 1):
        raise ValueError(f"val_size (={val_size}) must be a positive number, or a share below 1")


def share_out(labels: Tensor, size: float, seed: int) -> Tensor:
    """A mask that is True for the ``size`` images used for validation (a share if it is a float), class by class.

    Each class keeps an image for training.
    """
    count = len(labels)
    taken = round(size * count) if isinstance(size, float) else size
    if not 0 < taken < count:
        raise ValueError(
            f"val_size (={size}) must take at least one of the {count} training images, and leave at least one"
        )
    order = torch.randperm(count, generator=torch.Generator("cpu").manual_seed(seed), device="cpu")
    order = order[labels[order].argsort(stable=True)]  # class by class, each shuffled
    steps = torch.arange(count + 1, device="cpu") * taken // count
    chosen = torch.zeros(count, dtype=torch.bool, device="cpu")
    chosen[order[steps[1:] > steps[:-1]]] = True  # every (count / taken)-th
    if not _leave_one_of_each(chosen, labels, order):
        raise ValueError(
            f"val_size (={size}) must leave an image of each class for training: it takes {taken} of {count}"
        )
    return chosen


def _leave_one_of_each(chosen: Tensor, labels: Tensor, order: Tensor) -> bool:
    """Exchange an image of each class chosen whole for one of a class with more left; return whether enough are."""
    _, places, counts = labels[order].unique(return_inverse=True, return_counts=True)
    firsts = order[counts.cumsum(0) - counts]  # of each class
    left = torch.zeros_like(counts).scatter_add_(0, places, (~chosen[order]).long())
    whole = firsts[left == 0]
    rest = (~chosen[order]).nonzero().flatten()
    spare = rest[places[rest].diff(prepend=places.new_tensor([-1])) == 0]  # all but the first of each class
    if len(spare) < len(whole):
        return False
    chosen[whole] = False
    chosen[order[spare[: len(whole)]]] = True
    return True
