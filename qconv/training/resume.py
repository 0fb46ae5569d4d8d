"""The checkpoint that a run continues or evaluates: does it belong to this run?

The stored config is compared with the requested one, and then the tensors.
"""

import inspect
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hydra._internal.grammar.utils import escape_special_characters
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException
from omegaconf import OmegaConf
from pytorch_lightning.callbacks import StochasticWeightAveraging, WeightAveraging
from torch import Tensor

from ..runs.run_files import CONFIG, LAST, config_folder
from .callbacks.checkpoints import Checkpoints
from .callbacks.ewgs_delta import EWGSDelta
from .checkpoint_io import CheckpointError
from .classifier import Classifier
from .trained_on import class_of

# The parts of the config that a checkpoint and its reader must share: to evaluate, and to resume.
NETWORK = ("model", "scheme", "grad_quantizer", "skip", "first_last", "overrides", "before_sign")
RUN = (
    *(*NETWORK, "data", "seed", "loss", "shift_decay", "dampening", "sine_penalty", "step_rules", "optimizer"),
    *("scheduler", "trainer", "callbacks", "init_from", "weight_init", "reestimate_bn"),
)

# Where the images lie, who reads them, and how many at once; a run goes on with other values.
PLACES = ("root", "cache", "workers", "decode", "download", "train", "val", "test", "index", "batch_size")


def first_defaults() -> dict[str, Any]:
    """The defaults of the settings outside of groups, which a config from before one of them was there lacks."""
    written: Any = OmegaConf.to_container(OmegaConf.load(config_folder() / CONFIG))
    return {key: value for key, value in written.items() if key not in ("defaults", "hydra", "run_dir")}


def check_checkpoint(path: Path, checkpoint: dict[str, Any], classifier: Classifier, groups: tuple[str, ...]) -> None:
    """Raise a CheckpointError unless it is one of this network and its config agrees in `groups`."""
    check_config(path, checkpoint, classifier.config or {}, groups)
    check_tensors(path, checkpoint, classifier.state_dict())


def check_config(path: Path, checkpoint: dict[str, Any], config: dict[str, Any], groups: tuple[str, ...]) -> None:
    """Raise a CheckpointError unless the config of the checkpoint's run agrees with `config` in `groups`."""
    stored = checkpoint.get("config")
    if not isinstance(stored, dict):
        raise CheckpointError(f"checkpoint {path}: not written by qconv train (it has no 'config')")
    known = {**first_defaults(), **stored}
    for group in groups:
        before, now = decisive(group, known), decisive(group, config)
        if before != now:
            words = f"was trained with {group} {call(before)}, but this run has {call(now)}"
            raise CheckpointError(f"checkpoint {path} {words}: {as_it_was(path)}")


def decisive(group: str, config: Mapping[str, Any]) -> Any:
    """Return what decides the results in a part of a config: the images may lie elsewhere.

    Of the callbacks these are those that average weights (the file's state dict then holds the averages), measure
    EWGS's delta, or choose the best epoch (a best score is useless for another figure); with their defaults.
    """
    node = config.get(group)
    if group == "data" and node:
        return {key: value for key, value in node.items() if key not in PLACES and value is not None}
    if group != "callbacks":
        return node
    kinds = [(class_of(each), each) for each in (node or {}).values() if isinstance(each, dict)]
    deciding = WeightAveraging | StochasticWeightAveraging | EWGSDelta | Checkpoints
    found = [_arguments(kind, each) for kind, each in kinds if kind is not None and issubclass(kind, deciding)]
    return sorted(found, key=lambda each: each["_target_"])


def _arguments(kind: type, node: Mapping[str, Any]) -> dict[str, Any]:
    known = inspect.signature(kind).parameters.values()
    values = {each.name: each.default for each in known if each.default is not each.empty} | dict(node)
    names = ("monitor",) if issubclass(kind, Checkpoints) else (name for name in values if not name.startswith("_"))
    return {"_target_": kind.__name__, **{name: values[name] for name in names}}


def as_it_was(path: Path) -> str:
    """Say how to resume or test a checkpoint with the config of its run."""
    if path.parts[-2:-1] != LAST.parts[:1]:
        return "give the arguments of its run"
    folder = shlex.quote(str(path.parents[1]))
    return (
        f"qconv train resume={folder} continues with the config of its run, qconv evaluate {folder} tests it, and "
        "another run_dir= starts a new run"
    )


def check_tensors(path: Path, checkpoint: dict[str, Any], state_dict: Mapping[str, Tensor]) -> None:
    """Raise a CheckpointError that names the first tensor that is missing, unexpected or of another shape."""
    stored = checkpoint["state_dict"]
    for name in [*state_dict, *stored]:
        size, asked = (tuple(d[name].shape) if name in d else "absent" for d in (stored, state_dict))
        if size != asked:
            raise CheckpointError(
                f"checkpoint {path} is of another network: '{name}' is {size} in it, {asked} in this run"
            )


def call(node: Any) -> str:
    """Write a config node as its call: `qconv.schemes.shift_q(weight_bits=5)`; nulls are left out."""
    if isinstance(node, list):
        return f"[{', '.join(map(call, node))}]"
    if not isinstance(node, dict) or "_target_" not in node:
        return repr(node)
    arguments = ", ".join(
        f"{k}={call(v)}" for k, v in node.items() if k not in ("_target_", "_partial_") and v is not None
    )
    return f"{node['_target_']}({arguments})"


def override(value: Any) -> str:
    """A value in Hydra's command-line grammar."""
    if isinstance(value, dict):  # for whose keys the grammar has no quotes
        return "{" + ",".join(f"{escape_special_characters(str(k))}:{override(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(override, value)) + "]"
    if isinstance(value, str):
        return value if _is_plain(value) else QuotedString(value, Quote.double).with_quotes()
    return "null" if value is None else str(value)


def _is_plain(text: str) -> bool:
    """Whether the text without quotes means itself: no number, no list, none of several values."""
    try:
        return OverridesParser.create().parse_override(f"key=[{text}]").value() == [text]
    except HydraException:
        return False
