"""The results of a run of `qconv train` in its folder."""

import os
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from pytorch_lightning import LightningDataModule
from torch import Tensor, nn

from ..data.loader import EpochOrder
from ..packed import load_packed, read_header, save_packed
from ..runs.run_files import BEST, CONFIG, PACKED
from .assemble import float_model, made_data, quantized_model
from .checkpoint_io import load_checkpoint
from .shipping import description
from .stored_config import config_errors, read_config

Split = Literal["train", "val", "test"]


class FinishedRun:
    """The folder of a run: the network with the weights of its best epoch, and its data.

    Args:
        folder: where `qconv train` has written ``config.yaml`` and ``checkpoints/best.ckpt``.

    Raises:
        DamagedFileError: the folder has no ``config.yaml``.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.cfg = read_config(self.folder)

    @cached_property
    def data(self) -> LightningDataModule:
        """The images of the run, as inputs of its network; a CheckpointError if their classes have other names now."""
        with config_errors(self.folder / CONFIG):
            best = self.folder / BEST
            data = made_data(self.cfg, load_checkpoint(best) if best.is_file() else None, f"checkpoint {best}")
            data.prepare_data()
            data.setup("fit")
        return data

    def model(self) -> nn.Module:
        """The network of the packed file; without one, of the best checkpoint."""
        if not (self.folder / PACKED).is_file():
            return self.trained()
        return load_packed(self.folder / PACKED, self.network())

    def network(self) -> nn.Module:
        """The float network, by the config; its images need not be there if the packed file describes them."""
        header = read_header(self.folder / PACKED)
        with config_errors(self.folder / CONFIG):
            if header.pictures is None or header.classes is None:
                data: Any = self.data
                return float_model(self.cfg, data.in_channels, data.num_classes)
            return float_model(self.cfg, header.pictures.size[0], len(header.classes))

    def trained(self) -> nn.Module:
        """Return the quantized network with the weights of the best checkpoint; a CheckpointError if there are none."""
        best = self.folder / BEST
        checkpoint = load_checkpoint(best)
        model = self.untrained()
        weights = checkpoint["state_dict"]
        model.load_state_dict({name.removeprefix("model."): tensor for name, tensor in weights.items()})
        return model.eval()

    def untrained(self) -> nn.Module:
        """Return the quantized network as at the start of the run, for a run without a checkpoint."""
        with config_errors(self.folder / CONFIG):
            return quantized_model(self.cfg, self.data)[0]

    def labelled(self, count: int, split: Split) -> tuple[Tensor, Tensor]:
        """Return `count` images of a split as network inputs, and their classes; all if there are fewer.

        They come from all classes, even if the files are sorted by class. From shards, and from loaders other than
        qconv's, they are the first images.
        """
        images: list[Tensor] = []
        labels: list[Tensor] = []
        for batch in self.batches(split, mixed=True):
            images.append(batch[0])
            labels.append(batch[1])
            if sum(map(len, labels)) >= count:
                break
        return torch.cat(images)[:count], torch.cat(labels)[:count]

    def batches(self, split: Split, *, mixed: bool = False) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the batches of a split, through the hooks that Lightning would call; `mixed` as of `EpochOrder`."""
        data: Any = self.data
        if split == "test":
            data.setup("test")
        loader = getattr(data, f"{split}_dataloader")()
        order = getattr(loader, "sampler", None)
        was = isinstance(order, EpochOrder) and order.mixed
        if isinstance(order, EpochOrder):
            order.mixed |= mixed
        try:
            for batch in loader:
                yield data.on_after_batch_transfer(data.on_before_batch_transfer(batch, 0), 0)
        finally:  # a data module may keep its loader
            if isinstance(order, EpochOrder):
                order.mixed = was

    def pack(self, path: Path) -> None:
        """Write the packed file of the best checkpoint."""
        save_packed(self.trained(), path, **description(self.cfg.model, self.data))
