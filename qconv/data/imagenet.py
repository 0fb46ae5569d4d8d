"""Large pictures from folders, decoded while the network trains."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ..images import DecodingError
from .image_folder import Tree, scan
from .large import Crop, LargePicturesDataModule, collate, one_thread
from .loader import EpochLoader, EpochOrder, epoch_order
from .pictures import share_out

Item = tuple[int, int]


class ImageNetDataModule(LargePicturesDataModule):
    """ImageNet, or any tree `train/<class>/*` and `val/<class>/*` of large pictures, decoded by worker processes.

    `val` is the test split if there is no `test`; then a fixed part of the training pictures validates.

    Args:
        root: the tree's folder.
        val_size: number or share of the training pictures that validate.
        split_seed: which pictures these are.
        options: those of `LargePicturesDataModule`.

    Raises:
        FileNotFoundError, ValueError: as of `ImageFolderDataModule`, or an argument out of range.
        BrokenPictureError: a file that cannot be decoded.
    """

    def __init__(self, root: str, *, val_size: float = 0.01, split_seed: int = 0, **options: Any) -> None:
        super().__init__(**options)
        self.tree: Tree = scan(Path(root).expanduser())
        self.classes, self.num_classes = self.tree.classes, len(self.tree.classes)
        self.val_size, self.split_seed = val_size, split_seed
        self.splits: dict[str, Sequence[tuple[Path, int]]] = {}

    def setup(self, stage: str) -> None:
        """Share out the files."""
        del stage
        self.splits = dict(self.tree.splits)
        if "val" not in self.splits:
            files = self.splits["train"]
            taken = share_out(torch.tensor([label for _, label in files]), self.val_size, self.split_seed)
            self.splits["train"] = [file for file, chosen in zip(files, taken.tolist(), strict=True) if not chosen]
            self.splits["val"] = [file for file, chosen in zip(files, taken.tolist(), strict=True) if chosen]

    def loader(self, name: str, *, train: bool) -> "DecodingLoader":
        """The files of the split."""
        files = self.splits[name]
        order = epoch_order(self, len(files), shuffle=train)
        return DecodingLoader(order, LargePictures(files, self.crop(train=train)), self.workers)


class LargePictures(Dataset[Any]):
    """Decoded and cropped pictures; an item is asked for as (epoch, index).

    Args:
        files: paths and labels.
        crop: what decodes and crops them.
    """

    def __init__(self, files: Sequence[tuple[Path, int]], crop: Crop) -> None:
        self.paths = [str(path) for path, _ in files]
        self.labels = [label for _, label in files]
        self.crop = crop

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, item: Item) -> tuple[Tensor, int] | str:
        """Picture and label, or what is wrong with the file."""
        epoch, index = item
        try:
            return self.crop(self.paths[index], epoch, index), self.labels[index]
        except DecodingError as error:
            return f"{self.paths[index]} cannot be decoded ({error})"


class DecodingLoader(EpochLoader):
    """Batches of `LargePictures`, decoded by `workers` processes (0: by this one)."""

    def __init__(self, sampler: EpochOrder, pictures: LargePictures, workers: int) -> None:
        super().__init__(sampler)
        self.order = EpochBatches(sampler)
        self.loader = DataLoader(
            pictures,
            batch_sampler=self.order,
            collate_fn=collate,
            num_workers=workers,
            pin_memory=torch.cuda.is_available(),
            persistent_workers=workers > 0,
            worker_init_fn=one_thread,
            generator=torch.Generator(),  # else it draws from the generator that dropout draws from
        )

    def batches(self, start: int) -> Iterator[Any]:
        self.order.start = start
        yield from self.loader


class EpochBatches:
    """The batches of an `EpochOrder`, from number `start` on, as items of `LargePictures`."""

    def __init__(self, order: EpochOrder) -> None:
        self.order, self.start = order, 0

    def __len__(self) -> int:
        return len(self.order) - self.start

    def __iter__(self) -> Iterator[list[Item]]:
        for indices in self.order.parts(self.start):
            yield [(self.order.epoch, index) for index in indices.tolist()]
