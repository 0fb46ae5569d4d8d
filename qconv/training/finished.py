"""The results of a run of `train.py` in its folder."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from hydra.errors import HydraException, InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pytorch_lightning import LightningDataModule
from torch import Tensor, nn
from yaml import YAMLError

from ..files import DamagedFileError
from ..packed import FILE, load_packed, save_packed
from .assemble import float_model, quantized_model
from .initial_weights import read_weights
from .run_folder import BEST, CONFIG
from .shipping import description

Split = Literal["train", "val", "test"]


class FinishedRun:
    """The folder of a run: the network with the weights of its best epoch, and its data.

    Args:
        folder: where `train.py` has written ``config.yaml`` and ``checkpoints/best.ckpt``.

    Raises:
        DamagedFileError: the folder has no ``config.yaml``.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        config = self.folder / CONFIG
        if not config.is_file():
            raise DamagedFileError(f"{self.folder} is no folder of a run: there is no {config.name}")
        try:
            loaded = OmegaConf.load(config)
        except (YAMLError, UnicodeDecodeError) as error:
            raise DamagedFileError(f"{config} is damaged: {str(error).splitlines()[0]}") from error
        if not isinstance(loaded, DictConfig) or not {"data", "model", "scheme", "reestimate_bn"} <= set(loaded):
            raise DamagedFileError(f"{config} is no configuration of a run")
        self.cfg = loaded

    @cached_property
    def data(self) -> LightningDataModule:
        """The pictures of the run."""
        with self._config_named():
            data: LightningDataModule = instantiate(self.cfg.data)
            data.prepare_data()
            data.setup("fit")
        return data

    def model(self) -> nn.Module:
        """The network as shipped, or that of the best checkpoint if there is no packed file."""
        if not (self.folder / FILE).is_file():
            return self.trained()
        with self._config_named():
            network = float_model(self.cfg, self.data)
        return load_packed(self.folder / FILE, network)

    def trained(self) -> nn.Module:
        """Return the quantized network with the weights of the best checkpoint.

        Raises:
            CheckpointError: the checkpoint is missing or damaged.
            ValueError: the test used other batch norms than the checkpoint.
        """
        if self.cfg.reestimate_bn:
            raise ValueError(
                f"{self.folder}: its batch norms were taken anew behind the checkpoint (reestimate_bn=true), only the "
                f"packed model has them: give {self.folder / FILE}"
            )
        weights, _ = read_weights(str(self.folder / BEST))
        with self._config_named():
            model, _ = quantized_model(self.cfg, self.data)
        model.load_state_dict(weights)
        return model.eval()

    def untrained(self) -> nn.Module:
        """Return the quantized network as a run begins with it: of one that has no checkpoint yet."""
        with self._config_named():
            return quantized_model(self.cfg, self.data)[0]

    def examples(self, count: int, split: Split) -> Tensor:
        """Return `count` pictures of a split as network inputs; all if there are fewer."""
        return self.labelled(count, split)[0]

    def labelled(self, count: int, split: Split) -> tuple[Tensor, Tensor]:
        """Return `count` pictures of a split as network inputs, and their classes; all if there are fewer."""
        images: list[Tensor] = []
        labels: list[Tensor] = []
        for batch in self.batches(split):
            images.append(batch[0])
            labels.append(batch[1])
            if sum(map(len, labels)) >= count:
                break
        return torch.cat(images)[:count], torch.cat(labels)[:count]

    def batches(self, split: Split) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the batches of a split, through the hooks that Lightning would call."""
        data: Any = self.data
        if split == "test":
            data.setup("test")
        for batch in getattr(data, f"{split}_dataloader")():
            yield data.on_after_batch_transfer(data.on_before_batch_transfer(batch, 0), 0)

    def pack(self, path: Path) -> None:
        """Write the packed file of the best checkpoint."""
        save_packed(self.trained(), path, **description(self.cfg.model, self.data))

    @contextmanager
    def _config_named(self) -> Iterator[None]:
        """Name the file in which Hydra found an error."""
        try:
            yield
        except (HydraException, OmegaConfBaseException, OSError) as error:
            reason = error.__cause__ if isinstance(error, InstantiationException) and error.__cause__ else error
            raise ValueError(f"{self.folder / CONFIG}: {reason}") from error
