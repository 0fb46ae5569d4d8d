"""Checks of the words of ``qconv train`` against its config: flags, types, missing values, other functions."""

import inspect
import typing
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from hydra._internal.utils import _locate, get_args_parser
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.types import RunMode
from hydra.utils import get_object
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from .messages import must_be_given

FILE = "FILE"


def check_types(cfg: DictConfig, overrides: Sequence[str]) -> None:
    """Raise a ValueError for an override that puts a word where the config has a number, a switch or a list.

    A value must be of the kind of its default, or of one that the function of ``_target_`` annotates. Overrides by
    ``+``, and keys with a word or null as default, are left to the function. So are null, and fractions of whole
    numbers, unless it annotates the argument; not for ``trainer.max_epochs``, nor for keys outside of all groups.
    """
    loader = GlobalHydra.instance().config_loader()
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    groups = [each for each in parsed if _chooses(each.key_or_group, loader)]
    values = [each for each in parsed if each not in groups and not each.is_delete() and not each.is_add()]
    if not values:
        return
    try:
        defaults = loader.load_configuration("config", [str(each.input_line) for each in groups], RunMode.RUN)
    except (HydraException, OmegaConfBaseException):  # a group that another override chooses
        return
    for key in dict.fromkeys(each.key_or_group for each in values):
        default, value = OmegaConf.select(defaults, key), OmegaConf.select(cfg, key)
        kind = type(default)
        is_part = kind is not bool and OmegaConf.is_config(value)
        fits = type(value) is kind or (kind is float and type(value) is int) or is_part
        if fits or kind not in _KINDS or key == "compile":  # which may be a word
            continue  # without the import of the function, which takes seconds
        types = _types_of(cfg, key)
        is_open = value is None or (kind is int and isinstance(value, float))
        is_strict = types & _KNOWN or key == "trainer.max_epochs" or "." not in key
        if type(value) not in types and (is_strict or not is_open):
            raise ValueError(f"{key} (={_shown(value)}) must be {_KINDS[kind]}, as its default {_shown(default)}")


def check_given(cfg: DictConfig) -> None:
    """Raise a ValueError if the command line lacks a value that has no default.

    An evaluation needs neither the weights that the run starts from nor a teacher.
    """
    for key, parent in _without_value(cfg):
        if cfg.evaluate is None or not key.startswith(("init_from", "loss.")):
            raise ValueError(must_be_given(key, parent))


def check_direction(objective: Any, sweeper: Any) -> None:
    """Raise a ValueError if a search would minimize accuracy, as Optuna does by default."""
    if objective is None:  # which the run refuses
        return
    names, given = [objective] if isinstance(objective, str) else objective, sweeper.get("direction")
    directions = given if isinstance(given, list | ListConfig) else [given]
    for name, direction in zip(names, directions, strict=False):
        if "accuracy" in name and getattr(direction, "name", direction) == "minimize":
            words = ["maximize" if "accuracy" in each else "minimize" for each in names]
            word = words[0] if len(words) == 1 else f"[{','.join(words)}]"
            raise ValueError(f"objective (={name}) would be minimized: write hydra.sweeper.direction={word}")


def _without_value(node: DictConfig, place: str = "") -> Iterator[tuple[str, DictConfig]]:
    """Yield the keys without a value, with their nodes; interpolations are not resolved.

    A recipe has ``FILE`` where the default is null: in a merge of configs ``???`` would leave the null.
    """
    for name in node:
        inner: Any = node._get_node(name)
        if OmegaConf.is_missing(node, name) or inner == FILE:
            yield f"{place}{name}", node
        elif isinstance(inner, DictConfig) and not inner._is_interpolation() and not inner._is_none():
            yield from _without_value(inner, f"{place}{name}.")


def check_flags(words: Sequence[str]) -> None:
    """Raise a ValueError for a flag that Hydra does not have, instead of argparse's message."""
    known = get_args_parser()._option_string_actions
    for word in words:
        flag = word.partition("=")[0]
        if flag.startswith("--") and flag != "--" and not any(name.startswith(flag) for name in known):
            name = flag.removeprefix("--")
            raise ValueError(f"there is no flag {flag}: settings are KEY=VALUE, such as {name}=… (--help lists them)")


def _chooses(key: str, loader: ConfigLoader) -> bool:
    """Whether an override of the key selects configs."""
    if "." in key:  # a value inside one, or where configs are found
        return key == "hydra.searchpath"
    return bool(loader.get_group_options(key))


def leave_out(cfg: DictConfig, overrides: Sequence[str]) -> list[str]:
    """Remove arguments that are left of another function than the one that is called; return a line for each function.

    ``scheme._target_=my_methods.coarse`` keeps the arguments of the former scheme, and ``model=small_cnn`` those of an
    experiment's network. Arguments that the function does not take are removed, unless the command line names them. If
    a network's function takes any, those of the former one are removed, too.

    Raises:
        ValueError: an optimizer instead of a factory that makes one for the network.
    """
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    named = {each.key_or_group for each in parsed}
    told = []
    for place in sorted({key.removesuffix("._target_") for key in named}):
        node = OmegaConf.select(cfg, place)
        if not isinstance(node, DictConfig) or "_target_" not in node:
            continue
        is_new, target = f"{place}._target_" in named, node["_target_"]
        taken, takes_any = _arguments(target)
        if is_new and place == "optimizer" and "params" in taken:
            raise ValueError(
                f"{place}._target_ (={target}) is an optimizer, which needs the network's parameters: write "
                f"optimizer.optimizer.path={target}"
            )
        if takes_any and not (is_new and place == "model"):
            continue
        others = [str(name) for name in node if not str(name).startswith("_") and name not in taken]
        others = [name for name in others if not any(f"{each}.".startswith(f"{place}.{name}.") for each in named)]
        with open_dict(node):
            for name in others:
                del node[name]
        if others:
            told.append(f"{place}: ignored {', '.join(others)}, which {target} does not take")
    return told


def _arguments(target: str) -> tuple[set[str], bool]:
    """Return the names of a function's arguments, and whether it takes any others, or has no signature."""
    try:
        parameters = inspect.signature(_locate(target)).parameters.values()
    except (HydraException, ValueError, TypeError, ImportError):  # which is said where it is called
        return set(), True
    return {each.name for each in parameters}, any(each.kind == each.VAR_KEYWORD for each in parameters)


def _shown(value: Any) -> str:
    """Return the value in the command line's notation."""
    if isinstance(value, ListConfig):
        return f"[{', '.join(map(_shown, value))}]"
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _types_of(cfg: DictConfig, key: str) -> set[type]:
    """Return the types of the arguments of a key's function, if annotated."""
    place, _, name = key.rpartition(".")
    node = OmegaConf.select(cfg, place) if place else None
    if not isinstance(node, DictConfig) or "_target_" not in node:
        return set()
    try:
        function = get_object(node["_target_"])
        hints = typing.get_type_hints(function.__init__ if inspect.isclass(function) else function)
    except (HydraException, ValueError, TypeError, NameError, ImportError):
        return set()
    return _members(hints[name]) if name in hints else set()


_KINDS = {bool: "true or false", int: "a whole number", float: "a number", ListConfig: "a list"}
_KNOWN = {bool, int, float, str, type(None), list, tuple, dict}


def _members(hint: Any) -> set[type]:
    if typing.get_origin(hint) is Literal:
        return {type(value) for value in typing.get_args(hint)}
    parts = typing.get_args(hint)
    if isinstance(hint, type) and not parts:
        return {hint}
    return set().union(*(_members(part) for part in parts)) if parts else set()
