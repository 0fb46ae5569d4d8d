"""The checkpoint that a run continues or evaluates: does it belong to this run?

The stored config is compared with the requested one, and then the tensors.
"""

import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from torch import Tensor

from ..runs.run_files import LAST
from .checkpoint_io import CheckpointError
from .classifier import Classifier

ABSENT = "(nothing)"
# Where the images lie, who reads them, and how many at once; a run goes on with other values.
PLACES = ("root", "cache", "workers", "decode", "download", "train", "val", "test", "index", "batch_size")


def check_checkpoint(path: str, checkpoint: dict[str, Any], classifier: Classifier, groups: tuple[str, ...]) -> None:
    """Raise a CheckpointError unless it is one of this network and its config agrees in `groups`."""
    check_config(path, checkpoint, classifier.config or {}, groups)
    check_tensors(path, checkpoint, classifier.state_dict())


def check_config(path: str, checkpoint: dict[str, Any], config: dict[str, Any], groups: tuple[str, ...]) -> None:
    """Raise unless the config of the checkpoint's run agrees with `config` in `groups`.

    With `resume=`, the images may lie elsewhere: the user has said so.

    Raises:
        CheckpointError: the message has both configs, the words to add, and the words that accept the difference.
    """
    stored = checkpoint.get("config")
    if not isinstance(stored, dict):
        raise CheckpointError(f"checkpoint {path}: not written by qconv train (it has no 'config')")
    goes_on = config.get("resume") is not None
    differing = {
        group: (stored.get(group), config.get(group))
        for group in groups
        if stored.get(group) != config.get(group)
        and not (goes_on and same_pictures(group, stored.get(group), config.get(group)))
    }
    if differing:
        group, (value, asked) = next(iter(differing.items()))
        add = shlex.join(remedy(group, value, asked, stored.get("choices", {}).get(group)))
        raise CheckpointError(
            f"checkpoint {path} was trained with {group} {call(value)}, but this run has {call(asked)}: add "
            f"{add}{in_spite_of(path, differing)}"
        )


def in_spite_of(path: str, differing: Mapping[str, tuple[Any, Any]]) -> str:
    """Return the words that resume the run with the difference, after a comma; "" if these would be refused, too.

    Args:
        path: the checkpoint.
        differing: the stored and the requested node, by the group of the config.
    """
    folder = Path(path).parents[1] if Path(path).parts[-2:] == LAST.parts else None
    if folder is None or not all(may_change(group, *nodes) for group, nodes in differing.items()):
        return ""
    words = (word for group, (stored, asked) in differing.items() for word in remedy(group, asked, stored))
    return f", or accept this difference by {shlex.join([f'resume={folder}', *words])}"


def may_change(group: str, stored: Any, asked: Any) -> bool:
    """Whether `resume=` takes the difference as the user's word."""
    if group == "trainer":
        return asked.get("max_epochs", 0) >= stored.get("max_epochs", 0)
    return same_pictures(group, stored, asked)


def same_pictures(group: str, stored: Any, asked: Any) -> bool:
    """Whether two configs describe the same data in different places."""
    return group == "data" and all(stored.get(k) == asked.get(k) for k in {*stored, *asked} - {*PLACES})


def check_tensors(path: str, checkpoint: dict[str, Any], state_dict: Mapping[str, Tensor]) -> None:
    """Raise unless the checkpoint has exactly the tensors of `state_dict`, in their shapes.

    Raises:
        CheckpointError: it names the first tensor that is missing, unexpected, or of another shape.
    """
    stored = checkpoint["state_dict"]
    for name in [*state_dict, *stored]:
        size, asked = (tuple(d[name].shape) if name in d else None for d in (stored, state_dict))
        if size != asked:
            raise CheckpointError(
                f"checkpoint {path} is of another network: '{name}' is {shape(size)} in it, {shape(asked)} in this run"
            )


def call(node: Any) -> str:
    """Write a config node as its call: `qconv.schemes.shift_q(weight_bits=5)`; nulls are left out."""
    if not isinstance(node, dict) or "_target_" not in node:
        return repr(node)
    arguments = ", ".join(
        f"{k}={call(v)}" for k, v in node.items() if k not in ("_target_", "_partial_") and v is not None
    )
    return f"{node['_target_']}({arguments})"


def remedy(group: str, stored: Any, asked: Any, choice: str | None = None) -> Iterator[str]:
    """Yield command-line words that turn `asked` into `stored`.

    `choice` is the name of the chosen config; if unknown, configs are named after the functions they call.
    """
    if stored == {}:
        yield f"{group}=none"
        return
    if not isinstance(stored, dict) or not isinstance(asked, dict) or "_target_" not in stored:
        yield f"{group}={override(stored)}"
        return
    if stored["_target_"] != asked.get("_target_"):
        yield f"{group}={choice or stored['_target_'].rpartition('.')[2].lower()}"
        plain = {k: v for k, v in stored.items() if not k.startswith("_") and not isinstance(v, dict)}
        yield from (f"{group}.{k}={override(v)}" for k, v in plain.items())
        return
    for key in dict.fromkeys([*stored, *asked]):
        if stored.get(key, ABSENT) != asked.get(key, ABSENT):
            add = "" if key in asked else "++"  # Hydra takes other words for a key that is there already
            yield f"{add}{group}.{key}={override(stored[key])}" if key in stored else f"~{group}.{key}"


def override(value: Any) -> str:
    """A value in Hydra's command-line grammar."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{_escaped(k)}:{override(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(override, value)) + "]"
    if isinstance(value, str):
        return value if _is_plain(value) else _quoted(value)
    return "null" if value is None else str(value)


def _escaped(key: Any) -> str:
    """Return the key of a dictionary, for which the grammar has no quotes."""
    return re.sub(r"([\\()\[\]{}:=, \t])", r"\\\1", str(key))


def _is_plain(text: str) -> bool:
    """Whether the text without quotes means itself: no number, no list, none of several values."""
    try:
        return OverridesParser.create().parse_override(f"key=[{text}]").value() == [text]
    except HydraException:
        return False


def _quoted(text: str) -> str:
    """Return the text in quotes, before which, and only there, a backslash means something."""
    return '"' + re.sub(r'(\\*)("|\Z)', lambda found: 2 * found[1] + ('\\"' if found[2] else ""), text) + '"'


def shape(size: tuple[int, ...] | None) -> str:
    """Write a shape, or "absent"."""
    return "absent" if size is None else str(size)
