"""Large images from folders, decoded while the network trains."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from ..ground.checks import check_pixel_range
from ..images import DecodingError, PixelRange, decode
from .large import Crop, CroppingLoader, Item, LargePicturesDataModule
from .loader import epoch_order, split_of
from .pictures import share_out
from .tree import Tree, scan


class ImageNetDataModule(LargePicturesDataModule):
    """ImageNet, or any tree `train/<class>/*` and `val/<class>/*` of large images, decoded by worker processes.

    If there is no `test`, `val` is the test split and a fixed part of the training images is used for validation.

    Args:
        root: the folder of the tree.
        val_size: number or share of the training images used for validation.
        split_seed: chooses these images.
        pixel_range: as for `ImageFolderDataModule`.
        options: those of `LargePicturesDataModule`.

    Raises:
        FileNotFoundError, ValueError: as for `ImageFolderDataModule`, or an argument out of range.
        BrokenPictureError: a file that cannot be decoded.
    """

    def __init__(
        self,
        root: str,
        *,
        val_size: float = 0.01,
        split_seed: int = 0,
        pixel_range: Sequence[float] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.pixel_range = check_pixel_range(pixel_range)
        self.root = Path(root).expanduser()
        self.tree: Tree = scan(self.root)
        self.classes, self.num_classes = self.tree.classes, len(self.tree.classes)
        self.val_size, self.split_seed = val_size, split_seed
        self.splits: dict[str, Sequence[tuple[Path, int]]] = {}

    def setup(self, stage: str) -> None:
        """Assign the files to the splits."""
        del stage
        self.splits = dict(self.tree.splits)
        if "val" not in self.splits:
            files = self.splits["train"]
            taken = share_out(torch.tensor([label for _, label in files]), self.val_size, self.split_seed)
            self.splits["train"] = [file for file, chosen in zip(files, taken.tolist(), strict=True) if not chosen]
            self.splits["val"] = [file for file, chosen in zip(files, taken.tolist(), strict=True) if chosen]

    def loader(self, name: str, *, train: bool) -> "CroppingLoader":
        """The files of the split."""
        files = split_of(self.splits, name)
        order = epoch_order(self, len(files), name, shuffle=train)
        return CroppingLoader(order, LargePictures(files, self.crop(train=train), self.pixel_range), self.workers)


class LargePictures(Dataset[Any]):
    """Decoded and cropped images; items are requested as (epoch, index)."""

    def __init__(self, files: Sequence[tuple[Path, int]], crop: Crop, pixel_range: PixelRange | None = None) -> None:
        self.paths = [str(path) for path, _ in files]
        self.labels = [label for _, label in files]
        self.crop, self.pixel_range = crop, pixel_range

    def __getitem__(self, item: Item) -> tuple[Tensor, int] | DecodingError:
        """Return image and label, or the problem with the file."""
        epoch, index = item
        try:
            image = decode(self.paths[index], pixel_range=self.pixel_range)
            return self.crop(image, epoch, index), self.labels[index]
        except DecodingError as error:
            return type(error)(f"{self.paths[index]} cannot be decoded ({error})")
