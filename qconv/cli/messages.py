"""Messages for errors on the command line of ``qconv train``: the key, the rule, and the remedy."""

import difflib
import logging
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hydra.errors import InstantiationException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, ConfigTypeError, MissingMandatoryValue

from ..ground.extras import remedy
from .configs import folder, scheme_defaults

MUST_BE_GIVEN = {
    "ImageFolderDataModule.root": "FOLDER, which has a subfolder of images for each class",
    "CIFARDataModule.root": "FOLDER, which has the files of CIFAR; with data.download=true they are put there",
    "ImageNetDataModule.root": "FOLDER, which has train/<class>/* and val/<class>/*",
    "PreparedDataModule.root": "FOLDER, which qconv data prepare has written",
    "WebDatasetDataModule.train": "TAR_FILES, such as '\"/data/train-{0000..0146}.tar\"'",
    "Distillation.teacher": "'{_target_: qconv.models.resnet20}', or another network",
    "Distillation.weights": "FILE, the teacher's checkpoint or state dict",
    "init_from": "FILE, a checkpoint of the network that this recipe starts from, or null for random weights",
}
"""Descriptions of keys without a default, by the class that takes them."""
LAUNCHER = "lightning_fabric.strategies.launchers.subprocess_script"
"""The logger of what looks after the processes that Lightning has started, and ends all when one has ended."""


def message(error: BaseException) -> str:
    """Return the message for the user: without Hydra's wrapping, and with the file that the system refused."""
    # What reads the config of a run wraps these in an error that names its file.
    error = _behind(error, OverrideParseException | MissingConfigException | MissingMandatoryValue) or error
    if isinstance(error, InstantiationException) and error.__cause__ is not None:
        return str(error.__cause__)
    if isinstance(error, OverrideParseException) and "=" not in error.override and error.override[:1] != "~":
        return f"{error.override!r} is not KEY=VALUE (qconv train --help lists the keys)"
    if isinstance(error, OverrideParseException) and set("[]{}():,=") & set(error.override.partition("=")[2]):
        key, _, value = error.override.partition("=")
        quoted = "…" if {"'", '"'} & {*value} else value
        return (
            f"can't read {error.override!r}: a value with brackets, colons, commas or = needs quotes, "
            f"'{key}=\"{quoted}\"'"
        )
    if isinstance(error, OverrideParseException):
        return f"can't read {error.override!r} (qconv train --help lists the keys)"
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and "/" in error.missing_cfg_file:
        return _unknown_option(error.missing_cfg_file, [*(error.options or ())], str(error))
    if (twice := re.match(r"Multiple values for (\S+)\. .*: (\S+)'", str(error))) is not None:
        return f"{twice[1]} is there already: write {twice[1]}={twice[2]}, without +"
    if "Config group override must be a string" in str(error):
        return "a group of the config can't be null or a number: name one of its files, such as scheduler=constant"
    if isinstance(error, MissingMandatoryValue) and error.full_key is not None:
        return must_be_given(str(error.full_key), error.parent_node)
    if (of_key := _unknown_key(error)) is not None:
        return of_key
    if isinstance(error, OSError) and error.filename is not None:
        return f"cannot use {error.filename}: {error.strerror}"
    rest = ": a list must stay a list, and a mapping a mapping" if isinstance(error.__cause__, ConfigTypeError) else ""
    return f"{error}{rest}"


def quiet_lightning() -> None:
    """Show only Lightning's errors and requested output: a profiler's report, why a run ended early, a lost process."""
    for name in ("pytorch_lightning", "lightning_fabric", "lightning.pytorch"):
        logging.getLogger(name).setLevel(logging.ERROR)
    for name in ("pytorch_lightning.profilers", "pytorch_lightning.callbacks.early_stopping", LAUNCHER):
        logging.getLogger(name).setLevel(logging.INFO)


@contextmanager
def lightning_errors() -> Iterator[None]:
    """Turn Lightning's configuration errors into user errors."""
    from lightning_fabric.utilities.exceptions import MisconfigurationException

    try:
        yield
    except MisconfigurationException as error:
        if "No supported gpu backend" in str(error):
            raise ValueError(
                "trainer=gpu needs a GPU, and torch finds none: leave it out, or write trainer=cpu"
            ) from error
        raise ValueError(str(error)) from error


MEANT = {
    "ckpt_path": "resume=RUN continues a run, and resume=auto the one in run_dir if there is one",
    **dict.fromkeys(("epochs", "epoch"), "did you mean trainer.max_epochs?"),
    "batch": "did you mean data.batch_size?",
    "learning_rate": "did you mean optimizer.lr?",
    "device": "did you mean trainer=gpu or trainer=cpu?",
    "image_size": "did you mean data.image_size, which data=image_folder has?",
}
"""Keys that other programs have, and what to write instead."""


def must_be_given(key: str, parent: object) -> str:
    """Return the message for a key without its required value, which the node `parent` of the config has."""
    target = str(parent.get("_target_", "")) if isinstance(parent, DictConfig) else ""
    name = ".".join(filter(None, (target.rpartition(".")[2], key.rpartition(".")[2])))
    return f"{key} must be given: {key}={MUST_BE_GIVEN.get(name, '…')}"


def _unknown_option(wanted: str, options: list[str], otherwise: str) -> str:
    """Return the message for an unknown ``group=option``, with the nearest option, also in subfolders."""
    group, _, name = wanted.partition("/")
    if group == "hydra":
        more = "others are separate packages, such as hydra-joblib-launcher"
        return f"{otherwise.rstrip()}\n{remedy('hydra_plugins')} adds those of submitit and Optuna; {more}"
    here = folder() / group
    files = {str(path.relative_to(here).with_suffix("")) for path in here.rglob("*.yaml")}
    known = sorted(files if "/" in name else files.union(options))
    last, end = {each: each.rpartition("/")[2] for each in known}, name.rpartition("/")[2]
    inside = [each for each in known if end and each.startswith(f"{name}/")]
    if inside:
        return f"{group}={name} is a folder: it has {', '.join(f'{group}={each}' for each in inside[:3])} and others"
    near = [each for each in known if last[each] == end] or [each for each in known if end and end in last[each]]
    near = near or [each for each in known if last[each] in difflib.get_close_matches(end, last.values(), n=1)]
    if near:
        return f"there is no {group}={name}: did you mean {' or '.join(f'{group}={each}' for each in near[:3])}?"
    folders = Counter(each.partition("/")[0] for each in known if "/" in each)
    listed = [each for each in known if "/" not in each] + [f"{count} in {place}/" for place, count in folders.items()]
    rest = " (qconv train --help lists them)" if folders else ""
    return f"there is no {group}={name}" + (f"; there are {', '.join(listed)}{rest}" if listed else "")


def _behind(error: BaseException | None, kinds: Any) -> BaseException | None:
    """Return the error, or the first of its causes, that is of these kinds."""
    while error is not None and not isinstance(error, kinds):
        error = error.__cause__
    return error


def _unknown_key(error: BaseException) -> str | None:
    """Return the message for an override of an unknown key, with the nearest key. None for other errors."""
    cause: Any = _behind(error, ConfigAttributeError | ConfigKeyError)
    if cause is None or cause.full_key is None or not isinstance(cause.parent_node, DictConfig):
        return None
    key = str(cause.full_key)
    *parents, name = key.split(".")
    place, node = ".".join(parents), cause.parent_node
    if parents and not len(node):  # it was empty, null or ???
        return _is_empty(place, node._get_parent())
    whole = re.search(r"Could not override '([^']+)'", str(error))
    below = whole[1].removeprefix(key) if whole is not None and whole[1].startswith(f"{key}.") else ""
    known = [str(each) for each in node if each != "hydra" and not str(each).startswith("_")]
    near = _below(node, name) or difflib.get_close_matches(name, known, n=1)
    if not parents and name in MEANT:
        hint = MEANT[name]
    elif near:
        hint = f"did you mean {'.'.join([*parents, *near])}{below}?"
    elif others := [scheme for scheme, defaults in scheme_defaults() if place == "scheme" and name in defaults]:
        hint = f"these schemes have one: {', '.join(others)} (scheme={others[0]} {key}=…)"
    else:
        hint = f"there are {', '.join(known)}" if known else "there are none"
    rest = f"; +{key}=… adds a key" if parents and "these schemes" not in hint else ""
    target = f" ({node['_target_']})" if place == "scheme" and "_target_" in node else ""
    return f"{place or 'the config'}{target} has no {name}: {hint}{rest}"


def _is_empty(place: str, parent: object) -> str:
    """Return the message for an override below an empty node, from the node's full key and its parent."""
    given = must_be_given(place, parent)
    if not given.endswith("…"):
        return given
    options = sorted(path.stem for path in (folder() / place).glob("*.yaml") if path.stem != "none")
    if options:
        return f"{place} is empty: choose one of {', '.join(f'{place}={option}' for option in options)}"
    return f"{place} is empty: give it as a whole, {place}='{{…}}'"


def _below(node: DictConfig, name: str) -> list[str]:
    """The place of the name one level down, such as ``optimizer.lr`` for ``lr``."""
    nodes = [key for key in node if key != "hydra" and not OmegaConf.is_missing(node, key)]
    inner = [(key, node._get_node(key)) for key in nodes]
    return [f"{key}.{name}" for key, each in inner if isinstance(each, DictConfig) and each and name in each][:1]
