"""``qconv train resume=RUN``: continues a run with the config in its folder, without Hydra."""

import shlex
from collections.abc import Sequence

from omegaconf import DictConfig

from .configs import folder

WORD = "resume="


def is_resumed(arguments: Sequence[str]) -> bool:
    """Whether the arguments resume a run by its own config; with ``resume=auto`` Hydra composes it."""
    named = (word.lstrip("+").removeprefix(WORD) for word in arguments if word.lstrip("+").startswith(WORD))
    return any(name.strip("\"'") != "auto" for name in named)


def config_of(arguments: Sequence[str]) -> DictConfig | None:
    """Return the config of the run to resume; None, with a message, if the run has finished."""
    from ..training.go_on import config_to_go_on, finished

    if flags := [word for word in arguments if word.startswith("-")]:
        raise ValueError(f"{flags[0]} can't be given with {WORD}RUN, which continues the run as it is")
    named = [word.lstrip("+").removeprefix(WORD) for word in arguments if word.lstrip("+").startswith(WORD)]
    words = [word for word in arguments if not word.lstrip("+").startswith(WORD)]
    if len(named) > 1 or not named[0]:
        raise ValueError(f"{WORD}{','.join(named)} must name the folder of one run")
    cfg = config_to_go_on(named[0].strip("\"'"), words, folder())
    if said := finished(cfg):
        unused = [word for word in words if not word.startswith("trainer.max_epochs=")]
        print(f"{said}; {shlex.join(unused)} changed nothing" if unused else said)
        return None
    return cfg
