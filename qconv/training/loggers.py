"""The loggers that a config chooses, beside the run's own `metrics.csv`."""

from collections.abc import Iterator
from contextlib import contextmanager

from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from pytorch_lightning.loggers import Logger, WandbLogger

from ..extras import missing


@contextmanager
def started_loggers(cfg: DictConfig) -> Iterator[list[Logger]]:
    """Context manager: the loggers of `cfg.logger`, which know the whole config.

    Raises:
        ImportError: the package of one is missing; the message names the extra that installs it.
    """
    loggers: list[Logger] = []
    try:
        for name, node in cfg.logger.items():
            loggers.append(_started(str(name), node))
            loggers[-1].log_hyperparams(OmegaConf.to_container(cfg, resolve=True))  # pyright: ignore[reportArgumentType]
        yield loggers
    finally:
        for logger in loggers:
            if isinstance(logger, WandbLogger):  # or the next run of a sweep would be part of this one
                logger.experiment.finish()


def _started(name: str, node: DictConfig) -> Logger:
    try:
        return instantiate(node)
    except InstantiationException as error:
        if isinstance(error.__cause__, ModuleNotFoundError):
            raise ImportError(missing(f"logger={name}", name)) from error
        raise
