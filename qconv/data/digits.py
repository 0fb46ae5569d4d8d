"""scikit-learn's handwritten digits: 1,797 real images of 8×8 pixels, shipped inside the package."""

import torch
from torch import Tensor

from ..ground.checks import check_at_least_one, check_not_negative
from ..images import Normalize
from .augment import RandomCrop
from .loader import SplitsDataModule, TensorLoader, epoch_order, split_of

Split = tuple[Tensor, Tensor]


class DigitsDataModule(SplitsDataModule):
    """1,197 images to train, 240 to validate, 360 to test, with the classes in equal shares.

    Images are normalised with the mean and standard deviation of the train split. Training shifts them by up to
    `shift` pixels only: a flip or a large rotation would turn some into other digits.

    Args:
        seed: order and augmentation of the training images; the split does not depend on it.
        batch_size: largest batch of one process.
        shift: largest shift in pixels; 0 trains on the images as they are.
        split_seed: chooses the images of each split. All published figures use the default.

    Raises:
        ValueError: if `batch_size` is less than 1 or `shift` is negative.
    """

    num_classes = 10
    in_channels = 1
    image_size = (8, 8)
    classes = tuple("0123456789")
    normalize: Normalize | None = None

    def __init__(self, *, seed: int = 0, batch_size: int = 64, shift: int = 1, split_seed: int = 0) -> None:
        super().__init__()
        check_at_least_one(batch_size=batch_size)
        check_not_negative(shift=shift)
        self.seed, self.batch_size, self.shift, self.split_seed = seed, batch_size, shift, split_seed
        self.splits: dict[str, Split] = {}
        self.background = 0.0

    def setup(self, stage: str) -> None:
        """Read, split and normalise the images, once."""
        del stage
        if not self.splits:
            splits = split_digits(self.split_seed)
            mean, std = splits["train"][0].mean(), splits["train"][0].std()
            if self.normalize is not None:
                mean, std = (torch.tensor(of[0] / 255) for of in (self.normalize.mean, self.normalize.std))
            self.splits = {name: ((images - mean) / std, labels) for name, (images, labels) in splits.items()}
            self.background = float(-mean / std)
            self.normalize = Normalize([255 * mean.item()], [255 * std.item()])  # for pixels from 0 to 255

    def loader(self, name: str, *, train: bool) -> TensorLoader:
        """The images of the split; those for training are shifted."""
        images, labels = split_of(self.splits, name)
        augment = (RandomCrop(self.shift, self.background),) if train else ()
        return TensorLoader(images, labels, epoch_order(self, len(labels), name, shuffle=train), augment)


def split_digits(split_seed: int) -> dict[str, Split]:
    """Return the raw images in [0, 1], `(N, 1, 8, 8)`, and their labels, split with equal shares of the classes."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    rest, test, rest_labels, test_labels = train_test_split(
        images, labels, test_size=360, stratify=labels, random_state=split_seed
    )
    train, val, train_labels, val_labels = train_test_split(
        rest, rest_labels, test_size=240, stratify=rest_labels, random_state=split_seed
    )

    def tensors(pixels, classes) -> Split:
        return torch.as_tensor(pixels).float().reshape(-1, 1, 8, 8) / 16, torch.as_tensor(classes).long()

    return {
        "train": tensors(train, train_labels),
        "val": tensors(val, val_labels),
        "test": tensors(test, test_labels),
    }
