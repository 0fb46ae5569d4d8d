"""The other processes of a run: the command line that Lightning starts them with, and their clean-up."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig


def command_line(called: Sequence[str], arguments: Sequence[str], cfg: DictConfig) -> list[str]:
    """Return the program's own command line, `called`; for a run of a sweep, the command line of only this run."""
    hydra = HydraConfig.get()
    if hydra.mode != RunMode.MULTIRUN:
        return list(called)
    program = called[: len(called) - len(arguments)]
    folder = str(cfg.run_dir).replace("\\", "\\\\").replace('"', '\\"')
    return [*program, *_sources(arguments), *hydra.overrides.task, f'run_dir="{folder}"']


@contextmanager
def forgotten() -> Iterator[None]:
    """Forget the other processes when a run ends, so that the next run of a sweep starts its own."""
    before = dict(os.environ)
    try:
        yield
    finally:
        from torch import distributed

        if distributed.is_available() and distributed.is_initialized():
            distributed.destroy_process_group()
        for name in ("LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            if name not in before:
                os.environ.pop(name, None)


def _sources(arguments: Sequence[str]) -> list[str]:
    """Return Hydra's options with the places of the configs."""
    options = get_args_parser().parse_intermixed_args(arguments)
    places = {name: getattr(options, name) for name in ("config_dir", "config_path", "config_name")}
    return [word for name, value in places.items() if value for word in (f"--{name.replace('_', '-')}", value)]
