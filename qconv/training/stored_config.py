"""The config in the folder of a run, as the base of further commands."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException, InstantiationException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from ..ground.files import DamagedFileError
from ..runs.run_files import CONFIG, why_no_run
from .report.screen import show_note
from .resume import first_defaults

CHOICES = {"evaluate": None, "resume": None}
MACHINE = ("accelerator", "devices", "num_nodes", "strategy", "precision", "sync_batchnorm", "timeout_s")
"""The keys that ``trainer=OPTION`` sets for an existing run: where it runs, not how it trains."""


def read_config(folder: str | os.PathLike[str]) -> DictConfig:
    """Return the config in the folder of a run; settings that it lacks have their defaults.

    Raises:
        DamagedFileError: the folder has none, or the file is damaged.
    """
    path = Path(folder) / CONFIG
    if not path.is_file():
        if not Path(folder).exists():
            raise DamagedFileError(f"there is no folder {folder}: name the folder of a run")
        raise DamagedFileError(why_no_run(Path(folder)))
    try:
        loaded = OmegaConf.load(path)
    except (YAMLError, UnicodeDecodeError) as error:
        raise DamagedFileError(f"{path} is damaged: {str(error).splitlines()[0]}") from error
    if not isinstance(loaded, DictConfig) or not {"data", "model", "scheme", "trainer"} <= set(loaded):
        raise DamagedFileError(f"{path} is not the configuration of a run")
    return OmegaConf.create({**first_defaults(), **_container(loaded)})


def stored_config(folder: str | os.PathLike[str], words: Sequence[str], configs: Path) -> DictConfig:
    """Return the config of the run in `folder`, changed by words of a command line, as if it had always been there.

    The same words may come again, for example from a requeued job: the run has kept what they asked for. They are
    ``key=value``, ``+key=value``, ``~key`` or ``group=option``, which comes first wherever it stands.

    Raises:
        DamagedFileError: as `read_config`.
        ValueError: a word has none of these forms, or does not fit the config.
    """
    stored = read_config(folder)
    cfg = OmegaConf.create({**_container(stored), **CHOICES})
    former, cfg.run_dir = str(stored.get("run_dir", folder)), str(folder)
    for group in ("callbacks", "logger"):
        cfg[group] = _moved(_container(cfg.get(group, {})), former)
    OmegaConf.set_struct(cfg, True)
    with config_errors(Path(folder) / CONFIG):
        overrides = OverridesParser.create().parse_overrides(list(words))
        for override in sorted(overrides, key=lambda each: not _chooses(each, configs)):
            _check(override, cfg, configs)
            if _chooses(override, configs):
                cfg[override.key_or_group] = _option(override, cfg, configs)
            else:
                _apply(override, cfg)
    return cfg


@contextmanager
def config_errors(path: Path | str) -> Iterator[None]:
    """Turn Hydra's errors into ones that name the file of the config, and what else it is of."""
    try:
        yield
    except (HydraException, OmegaConfBaseException, OSError) as error:
        reason = error.__cause__ if isinstance(error, InstantiationException) and error.__cause__ else error
        raise ValueError(f"{path}: {reason}") from error


def _container(node: Any) -> Any:
    return OmegaConf.to_container(node) if OmegaConf.is_config(node) else node


def _moved(node: Any, former: str) -> Any:
    """Return the node with paths below `former` below the run's folder."""
    if isinstance(node, dict):
        return {key: _moved(value, former) for key, value in node.items()}
    if isinstance(node, list):
        return [_moved(value, former) for value in node]
    is_below = isinstance(node, str) and (node == former or node.startswith(f"{former}/"))
    return "${run_dir}" + node.removeprefix(former) if is_below else node


def _check(override: Override, cfg: DictConfig, configs: Path) -> None:
    """Raise a ValueError for a word that has no meaning for an existing run."""
    key, word = override.key_or_group, override.input_line
    if override.is_sweep_override():
        raise ValueError(f"{word} is a sweep, but an existing run takes single values")
    if key.startswith("hydra") or ((configs / key).is_dir() and key not in cfg):
        raise ValueError(f"{word} is for a new run; an existing run takes keys of its {CONFIG}")
    if key in CHOICES:
        raise ValueError(f"{word} can't be given together with the folder of a run ({cfg.run_dir})")


def _chooses(override: Override, configs: Path) -> bool:
    return (configs / override.key_or_group).is_dir() and isinstance(override.value(), str | list)


def _apply(override: Override, cfg: DictConfig) -> None:
    """Set, add or remove a key. A key may be there, or be gone, because the same word came before."""
    if override.is_delete() and OmegaConf.select(cfg, override.key_or_group, default=cfg) is cfg:
        show_note(f"~{override.key_or_group}: the run has no such key (any more)")
        return
    if override.is_add():
        override.type = OverrideType.FORCE_ADD
    ConfigLoaderImpl._apply_overrides_to_config([override], cfg)


def _option(override: Override, cfg: DictConfig, configs: Path) -> Any:
    """Return the node that an option names; for a trainer, the run's own node with the keys of the machine replaced."""
    group = override.key_or_group
    with initialize_config_dir(str(configs), version_base="1.3"):
        chosen: Any = OmegaConf.to_container(compose("config", [override.input_line or ""])[group])
    if group != "trainer":
        return chosen
    own = {key: value for key, value in _container(cfg[group]).items() if key not in MACHINE}
    return {**chosen, **own}
