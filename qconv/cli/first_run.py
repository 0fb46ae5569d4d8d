"""Keeps Hydra from writing into the folder of an existing run."""

from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, read_write

from ..runs.run_files import KEPT


class KeepsFirstRun(Callback):
    """Hydra callback that suppresses Hydra's files (`.hydra`) in the folder of a run: it may refuse the new words.

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
        if any((folder / name).is_file() for name in KEPT):
            with read_write(config.hydra):
                config.hydra.output_subdir = None
