"""Keeps Hydra from writing into the folder of an existing run."""

from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, read_write

from ..runs.run_files import KEPT, holds


class KeepsFirstRun(Callback):
    """Hydra callback that suppresses Hydra's files (`.hydra`) if `training.run_folder.check_free` will refuse the run.

    Hydra writes before the program can check the folder. In a sweep it announces the folders of the runs too late.
    """

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Check the run's folder, which Hydra or `run_dir=` names."""
        del kwargs
        hydra = HydraConfig.instance()
        before = hydra.cfg
        hydra.set_config(config)  # as Hydra does before it reads the folder, whose name may use it
        try:
            folder = Path(config.hydra.run.dir)
        finally:
            hydra.cfg = before
        checkpoint = config.get("ckpt_path")
        goes_on = checkpoint is not None and (checkpoint == "last" or holds(folder, Path(checkpoint)))
        if config.get("evaluate") is None and not goes_on and any((folder / name).is_file() for name in KEPT):
            with read_write(config.hydra):
                config.hydra.output_subdir = None
