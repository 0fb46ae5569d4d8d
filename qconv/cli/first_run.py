"""The folder that Hydra names for a run or sweep: it gets one of its own, and an existing run stays as it is."""

from itertools import count
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, read_write

from ..runs.run_files import KEPT
from .train import is_first_process


class KeepsFirstRun(Callback):
    """Hydra callback: numbers folders of the same second, and suppresses Hydra's files (`.hydra`) beside a run.

    Hydra writes before the program can check the folder. In a sweep it announces the folders of the runs too late.
    """

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Claim the run's folder; one that the command line names may hold a run, which may refuse the new words."""
        folder = claim(config, "run")
        if any((folder / name).is_file() for name in KEPT):
            with read_write(config.hydra):
                config.hydra.output_subdir = None

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Claim the folder of the sweep."""
        claim(config, "sweep")


def claim(config: DictConfig, what: str) -> Path:
    """Return Hydra's folder for a `run` or `sweep`; unless the command line names it, make a new one.

    Another may have started in the same second: then it is the first free one of ``12-00-00-2``, ``12-00-00-3`` ….
    """
    hydra = HydraConfig.instance()
    before = hydra.cfg
    hydra.set_config(config)  # as Hydra does before it reads the folder, whose name may use it
    try:
        folder = Path(config.hydra[what].dir)
    finally:
        hydra.cfg = before
    if any(f"hydra.{what}.dir=" in word for word in config.hydra.overrides.hydra) or not is_first_process():
        return folder
    for number in count(2):
        try:
            folder.mkdir(parents=True)
            break
        except FileExistsError:
            folder = folder.with_name(f"{folder.name if number == 2 else folder.name.rpartition('-')[0]}-{number}")
    with read_write(config.hydra):
        config.hydra[what].dir = str(folder)
    return folder
