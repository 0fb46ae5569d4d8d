"""``resume=RUN``: continues a run from its folder."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from inspect import signature
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from pytorch_lightning import Trainer
from pytorch_lightning.callbacks import EarlyStopping

from ..runs.run_files import LAST, RESULT
from .checkpoint_io import load_checkpoint
from .classifier import Classifier
from .run_folder import RunFolderError
from .stored_config import stored_config
from .trained_on import class_of
from .trainer import make_trainer

FACTORS = ("devices", "num_nodes")
OF_STEPS = ("accumulate_grad_batches", "limit_train_batches")
"""The trainer's keys that decide which images an optimizer step sees, with batch size and number of processes."""
OTHER_STEPS = "From here on, optimizer steps use other images."
OF_ROUNDING = ("accelerator", "precision", "strategy", "benchmark", "deterministic")
OF_NO_NUMBER = ("timeout_s", "enable_progress_bar", "log_every_n_steps", "profiler", "default_root_dir")
WHAT = {
    **dict.fromkeys(OF_STEPS, OTHER_STEPS),
    **dict.fromkeys(OF_ROUNDING, "From here on, floating-point rounding may differ."),
    **dict.fromkeys(OF_NO_NUMBER, "The results stay the same."),
}
"""The effect of a changed key of the trainer; any other key is assumed to change the run."""


def config_to_go_on(folder: str, words: Sequence[str], configs: Path) -> DictConfig:
    """Return the config of the run in `folder` that goes on from its `last.ckpt`, with the words on top."""
    cfg = stored_config(folder, words, configs)
    last = Path(folder) / LAST
    if not last.is_file():
        raise RunFolderError(
            f"resume (={folder}): it has no {LAST}, because the run stopped before its first one: start it again"
        )
    cfg.resume = folder
    return cfg


def finished(cfg: DictConfig) -> str | None:
    """Return what to say of a run that has no epoch left; None if there is one."""
    path = Path(cfg.resume) / RESULT
    if not path.is_file():
        return None
    done, asked = json.loads(path.read_text())["epochs"], cfg.trainer.max_epochs
    if type(asked) is not int:
        raise ValueError(f"trainer.max_epochs (={asked}) must be a whole number")
    if asked < done:
        raise ValueError(
            f"trainer.max_epochs (={asked}) must be at least {done}, the epochs that {cfg.resume} has done"
        )
    if asked > done:
        return _ended_early(cfg, done, path)
    return f"{cfg.resume} has finished its {done} epochs ({path}); to extend it, set trainer.max_epochs= above {done}"


def _ended_early(cfg: DictConfig, done: int, path: Path) -> str | None:
    """Return a message if the run's EarlyStopping has ended it; else None."""
    kinds = {key: class_of(node) for key, node in cfg.callbacks.items() if node is not None}
    keys = [key for key, kind in kinds.items() if kind is not None and issubclass(kind, EarlyStopping)]
    if not keys:
        return None
    last = load_checkpoint(Path(cfg.resume) / LAST)
    planned = last["config"]["trainer"]["max_epochs"]
    if last["epoch"] + 1 != done or planned <= done:  # it has gone on since, or had all its epochs
        return None
    if all(state.get("stopped_epoch") != last["epoch"] for state in last["callbacks"].values()):
        return None
    ended = f"EarlyStopping ended it at {done} of {planned} epochs"
    return f"{cfg.resume} has finished, {ended} ({path}); to continue, add ~callbacks.{keys[0]}"


def changes(checkpoint: dict[str, Any], classifier: Classifier) -> Iterator[str]:
    """Yield what differs from the run so far, a line each, and what follows from it."""
    before, now = checkpoint["config"], classifier.config or {}
    stored, asked = before["trainer"], now["trainer"]
    sizes = pictures_in_step(before), pictures_in_step(now)
    same_steps = sizes[0] == sizes[1] and None not in sizes and all(same(key, stored, asked) for key in OF_STEPS)
    of_steps = (
        "Steps use as many images as before; batch norm sees the images of one process." if same_steps else OTHER_STEPS
    )
    epochs = stored["max_epochs"], asked["max_epochs"]
    if epochs[0] != epochs[1]:
        yield f"trainer.max_epochs: {epochs[0]} → {epochs[1]}. From here on, schedules follow {epochs[1]} epochs."
    for key in sorted({*stored, *asked} - {"max_epochs"}):
        if not same(key, stored, asked):
            what = of_steps if key in FACTORS else WHAT.get(key, "From here on, the run differs.")
            yield f"trainer.{key}: {stored.get(key)} → {asked.get(key)}. {what}"
    batches = [(config.get("data") or {}).get("batch_size") for config in (before, now)]
    if batches[0] != batches[1]:
        yield f"data.batch_size: {batches[0]} → {batches[1]}. {of_steps}"


def same(key: str, stored: Mapping[str, Any], asked: Mapping[str, Any]) -> bool:
    """Whether the nodes of two trainers agree in a key; a missing key has its default."""
    default = {**signature(Trainer).parameters, **signature(make_trainer).parameters}.get(key)
    absent = None if default is None else default.default
    return stored.get(key, absent) == asked.get(key, absent)


def pictures_in_step(config: Mapping[str, Any]) -> int | None:
    """Return the number of images in a backward; None if the config leaves it open, for example by ``devices=auto``."""
    trainer, batch = config["trainer"], (config.get("data") or {}).get("batch_size")
    factors = [batch, *(trainer.get(key, 1) for key in FACTORS)]
    return math.prod(factors) if all(isinstance(factor, int) for factor in factors) else None
