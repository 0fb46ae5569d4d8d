"""The loggers that a config chooses, in addition to the run's own `metrics.csv`."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from pytorch_lightning.loggers import Logger, MLFlowLogger, WandbLogger

from ..ground.extras import MODULES, missing


@contextmanager
def started_loggers(cfg: DictConfig) -> Iterator[list[Logger]]:
    """Context manager: the loggers of `cfg.logger`, which know the whole config; an ImportError for a missing one."""
    loggers: list[Logger] = []
    status = 1
    try:
        for name, node in cfg.logger.items():
            try:
                loggers.append(instantiate(node))
            except InstantiationException as error:
                if isinstance(error.__cause__, ModuleNotFoundError) and name in MODULES:
                    raise ImportError(missing(f"logger={name}", str(name))) from error
                raise
            loggers[-1].log_hyperparams(_named(OmegaConf.to_container(cfg, resolve=True)))
        yield loggers
        status = 0
    finally:
        for logger in loggers:
            if isinstance(logger, WandbLogger):  # or the next run of a sweep would be part of this one
                logger.experiment.finish(exit_code=status)


def mlflow_logger(tracking_uri: str | None = None, **options: Any) -> MLFlowLogger:
    """Return Lightning's logger for MLflow.

    Args:
        tracking_uri: the server, or the file, that MLflow writes to; None is the one in MLFLOW_TRACKING_URI, which may
            have a password and so stays out of a run's config, or the file `mlflow.db` in the current folder.
        options: further arguments of `pytorch_lightning.loggers.MLFlowLogger`.

    Raises:
        ModuleNotFoundError: MLflow is not installed.
    """
    if tracking_uri is None:
        tracking_uri = os.environ.get("MLFLOW_TRACKING_URI") or "sqlite:///mlflow.db"
    return MLFlowLogger(tracking_uri=tracking_uri, **options)


def _named(value: Any) -> Any:
    """Replace nodes with regular expressions as keys, such as `overrides`, by text: MLflow allows few characters."""
    if not isinstance(value, dict):
        return value
    if all(re.fullmatch(r"[\w ./:-]*", str(key)) for key in value):
        return {key: _named(each) for key, each in value.items()}
    return str(value)
