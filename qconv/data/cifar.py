"""CIFAR-10 and CIFAR-100, in torchvision's files."""

from pathlib import Path
from typing import Any

import torch

from .pictures import Pictures, PicturesDataModule


class CIFARDataModule(PicturesDataModule):
    """CIFAR-10 or CIFAR-100: 45,000 images to train, 5,000 to validate, 10,000 to test, 32×32 in colour.

    Args:
        root: the folder with torchvision's files, `cifar-10-batches-py` or `cifar-100-python`.
        num_classes: 10 or 100.
        download: whether to fetch missing files.
        val_size: number of training images used for validation.
        options: those of `PicturesDataModule`.

    Raises:
        ValueError: `num_classes` is neither 10 nor 100.
        FileNotFoundError: `root` has no complete data set and `download` is false.
    """

    in_channels = 3
    image_size = (32, 32)

    def __init__(
        self, root: str, *, num_classes: int = 10, download: bool = False, val_size: float = 5000, **options: Any
    ) -> None:
        super().__init__(val_size=val_size, **options)
        if num_classes not in (10, 100):
            raise ValueError(f"num_classes (={num_classes}) must be 10 or 100")
        self.root, self.num_classes, self.download = Path(root).expanduser(), num_classes, download

    def prepare_data(self) -> None:
        """Download the files, in one process."""
        if self.download:
            for train in (True, False):
                self._dataset(train, download=True)

    def read(self) -> dict[str, Pictures]:
        splits = {"train": self._dataset(True), "test": self._dataset(False)}
        self.classes = splits["train"].classes
        return {
            name: Pictures(torch.from_numpy(data.data).permute(0, 3, 1, 2).contiguous(), torch.tensor(data.targets))
            for name, data in splits.items()
        }

    def _dataset(self, train: bool, download: bool = False) -> Any:
        from torchvision.datasets import CIFAR10, CIFAR100

        dataset = CIFAR10 if self.num_classes == 10 else CIFAR100
        try:
            return dataset(str(self.root), train, download=download)
        except RuntimeError as error:
            if download:
                raise
            raise FileNotFoundError(
                f"data.root (={self.root}) lacks {dataset.base_folder}, or some of its files: give the folder that "
                "contains it, or add data.download=true"
            ) from error
