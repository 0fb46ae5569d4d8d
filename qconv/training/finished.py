"""What a run of `train.py` has left in its folder."""

import os
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from pytorch_lightning import LightningDataModule
from torch import Tensor, nn

from ..files import DamagedFileError
from ..packed import FILE, load_packed, save_packed
from .checkpoint_io import load_checkpoint
from .run import float_model, quantized_model
from .shipping import description

_NETWORK = "model."  # before its tensors in the state dict of a `Classifier`


class FinishedRun:
    """The folder of a run: the network with the weights of its best epoch, and its data.

    Args:
        folder: in which `train.py` has written ``config.yaml`` and ``checkpoints/best.ckpt``.

    Raises:
        DamagedFileError: the folder has no ``config.yaml``.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        config = self.folder / "config.yaml"
        if not config.is_file():
            raise DamagedFileError(f"{self.folder} is no folder of a run: there is no {config.name}")
        loaded = OmegaConf.load(config)
        if not isinstance(loaded, DictConfig):
            raise DamagedFileError(f"{config} is no configuration of a run")
        self.cfg = loaded

    @cached_property
    def data(self) -> LightningDataModule:
        """Its pictures."""
        data: LightningDataModule = instantiate(self.cfg.data)
        data.prepare_data()
        data.setup("fit")
        return data

    def model(self) -> nn.Module:
        """The network as it was shipped; of the best checkpoint where no packed file is beside it."""
        if not (self.folder / FILE).is_file():
            return self.trained()
        return load_packed(self.folder / FILE, float_model(self.cfg, self.data))

    def trained(self) -> nn.Module:
        """The quantized network with the weights of the best checkpoint.

        Raises:
            CheckpointError: the checkpoint is missing or damaged.
            ValueError: what was tested had other batch norms than the checkpoint.
        """
        if self.cfg.reestimate_bn:
            raise ValueError(
                f"{self.folder}: its batch norms were taken anew behind the checkpoint (reestimate_bn=true): only "
                f"{FILE} has them"
            )
        state: dict[str, Any] = load_checkpoint(self.folder / "checkpoints/best.ckpt")["state_dict"]
        model, _ = quantized_model(self.cfg, self.data)
        model.load_state_dict(
            {name.removeprefix(_NETWORK): value for name, value in state.items() if name.startswith(_NETWORK)}
        )
        return model.eval()

    def examples(self, count: int) -> Tensor:
        """As many training pictures as the network takes them."""
        data: Any = self.data
        taken: list[Tensor] = []
        for batch in data.train_dataloader():
            taken.append(data.on_after_batch_transfer(batch, 0)[0])
            if sum(map(len, taken)) >= count:
                break
        return torch.cat(taken)[:count]

    def pack(self, path: Path) -> None:
        """Write the packed file of the best checkpoint."""
        save_packed(self.trained(), path, **description(self.cfg.model, self.data))
