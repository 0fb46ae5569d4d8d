"""The words of ``qconv train`` against its config: keys that do not exist, values of another type, other functions."""

import difflib
import inspect
import typing
from collections.abc import Sequence
from types import NoneType
from typing import Any, Literal

from hydra._internal.utils import _locate
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.types import RunMode
from hydra.utils import get_object
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException


def unknown_key(error: BaseException) -> str | None:
    """What to say of an override of a key that the config lacks: with the nearest that it has; None of other errors."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ConfigAttributeError | ConfigKeyError):
        cause = cause.__cause__
    if cause is None or cause.full_key is None or not isinstance(cause.parent_node, DictConfig):
        return None
    *parents, name = str(cause.full_key).split(".")
    known = [str(key) for key in cause.parent_node if key != "hydra" and not str(key).startswith("_")]
    near = difflib.get_close_matches(name, known, n=1) or _below(cause.parent_node, name)
    place = ".".join(parents)
    hint = f"did you mean {'.'.join([*parents, *near])}?" if near else f"there are {', '.join(known)}"
    rest = f"; +{cause.full_key}=… adds a key" if parents else ""
    return f"{place or 'the config'} has no {name}: {hint}{rest}"


def _below(node: DictConfig, name: str) -> list[str]:
    """The place of the name one level down, as ``optimizer.lr`` for ``lr``."""
    nodes = [key for key in node if key != "hydra" and not OmegaConf.is_missing(node, key)]
    inner = [(key, node._get_node(key)) for key in nodes]
    return [f"{key}.{name}" for key, each in inner if isinstance(each, DictConfig) and name in each][:1]


def check_types(cfg: DictConfig, overrides: Sequence[str]) -> None:
    """Raise a ValueError for an override that puts a word where the config has a number, a switch or a list.

    What a key may be is what its default is, or what the function says that ``_target_`` names. Overrides by ``+``,
    nulls and defaults that are words or nulls are left to that function.

    Args:
        cfg: the composed config.
        overrides: those of the command line.
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
        rule = _rule(default, value)
        if rule is not None and type(value) not in _types_of(cfg, key):
            raise ValueError(f"{key} (={_shown(value)}) must be {rule}, as its default {_shown(default)}")


def _chooses(key: str, loader: ConfigLoader) -> bool:
    """Whether an override of the key selects configs."""
    if "." in key:  # a value inside one, or where configs are found
        return key == "hydra.searchpath"
    return bool(loader.get_group_options(key))


def leave_out(cfg: DictConfig, overrides: Sequence[str]) -> list[str]:
    """Take out of `cfg` what the command line has left without a reader by putting another function in a ``_target_``.

    ``scheme._target_=my_methods.coarse`` keeps the arguments of the scheme that was there before; those that the new
    function does not take are left out, unless the command line names them.

    Args:
        cfg: the composed config, which is changed.
        overrides: those of the command line.

    Returns:
        A line for each function, which says what is left out.
    """
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    named = {each.key_or_group for each in parsed}
    told = []
    for key in sorted(key for key in named if key.endswith("._target_")):
        node, place = OmegaConf.select(cfg, key.removesuffix("._target_")), key.removesuffix("._target_")
        taken = _arguments(node["_target_"]) if isinstance(node, DictConfig) else None
        if taken is None:
            continue
        others = [str(name) for name in node if not str(name).startswith("_") and name not in taken]
        others = [name for name in others if not any(f"{each}.".startswith(f"{place}.{name}.") for each in named)]
        with open_dict(node):
            for name in others:
                del node[name]
        if others:
            told.append(f"{place}: {node['_target_']} does not take {', '.join(others)} of the default: left out")
    return told


def _arguments(target: str) -> set[str] | None:
    """The names that a function takes; None if it takes any, or can't be asked."""
    try:
        parameters = inspect.signature(_locate(target)).parameters.values()
    except (HydraException, ValueError, TypeError, ImportError):  # which is said where it is called
        return None
    return None if any(each.kind == each.VAR_KEYWORD for each in parameters) else {each.name for each in parameters}


def _rule(default: Any, value: Any) -> str | None:
    """What the value must be, if it is not."""
    if isinstance(default, ListConfig) and not isinstance(value, ListConfig | NoneType):
        return "a list"
    if isinstance(default, bool):
        return None if isinstance(value, bool | NoneType) else "true or false"
    if isinstance(default, int | float) and isinstance(value, bool | str):
        return "a number"
    return None


def _shown(value: Any) -> str:
    """The value as a command line has it."""
    if isinstance(value, ListConfig):
        return f"[{', '.join(map(_shown, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _types_of(cfg: DictConfig, key: str) -> set[type]:
    """The types that the function behind a key takes, as far as it says so."""
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


def _members(hint: Any) -> set[type]:
    if typing.get_origin(hint) is Literal:
        return {type(value) for value in typing.get_args(hint)}
    parts = typing.get_args(hint)
    if isinstance(hint, type) and not parts:
        return {hint}
    return set().union(*(_members(part) for part in parts)) if parts else set()
