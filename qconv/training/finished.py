"""What a run of `train.py` has left in its folder."""

import os
from pathlib import Path

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from pytorch_lightning import LightningDataModule
from torch import Tensor, nn

from ..files import DamagedFileError
from ..packed import load_packed, save_packed
from .checkpoint_io import load_checkpoint
from .run import float_model, quantized_model
from .shipping import FILE, network_call, pictures_of


class FinishedRun:
    """The folder of a run: the network with the weights of its best epoch, and its data.

    Args:
        folder: in which `train.py` has written ``config.yaml`` and ``checkpoints/best.ckpt``.

    Raises:
        DamagedFileError: the folder has none of these.
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
        self.data: LightningDataModule = instantiate(self.cfg.data)
        self.is_set_up = False

    def model(self) -> nn.Module:
        """The network as it was shipped; of the best checkpoint where no packed file is beside it."""
        if not (self.folder / FILE).is_file():
            return self.trained()
        return load_packed(self.folder / FILE, float_model(self.cfg, self.data))

    def trained(self) -> nn.Module:
        """The quantized network with the weights of the best checkpoint."""
        path = self.folder / "checkpoints/best.ckpt"
        model, _ = quantized_model(self.cfg, self.data)
        state: dict[str, Tensor] = load_checkpoint(path)["state_dict"]
        prefix = "model."
        model.load_state_dict({name.removeprefix(prefix): value for name, value in state.items()})
        return model.eval()

    def examples(self, count: int) -> Tensor:
        """As many training pictures as the network takes them."""
        self._set_up()
        taken: list[Tensor] = []
        for batch in self.data.train_dataloader():
            taken.append(self.data.on_after_batch_transfer(batch, 0)[0])
            if sum(map(len, taken)) >= count:
                break
        return torch.cat(taken)[:count]

    def pack(self, path: Path) -> None:
        """Write the packed file of the best checkpoint."""
        model = self.trained()
        self._set_up()
        classes = list(getattr(self.data, "classes", ())) or None
        call = network_call(self.cfg.model, self.data)
        save_packed(model, path, network=call, pictures=pictures_of(self.data), classes=classes)

    def _set_up(self) -> None:
        if not self.is_set_up:
            self.data.prepare_data()
            self.data.setup("fit")
            self.is_set_up = True
