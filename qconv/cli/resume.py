"""``qconv train resume=RUN``: continues a run with the config in its folder, without Hydra."""

import shlex
from collections.abc import Sequence

from omegaconf import DictConfig

from .configs import folder

WORD = "resume="


def folders(arguments: Sequence[str]) -> list[str]:
    """The folders of runs that the arguments resume by their own configs; with ``resume=auto`` Hydra composes it."""
    words = (word.lstrip("+") for word in arguments)
    named = [word.removeprefix(WORD).strip("\"'") for word in words if word.startswith(WORD)]
    return [] if {*named} <= {"auto"} else named


def config_of(arguments: Sequence[str]) -> DictConfig | None:
    """Return the config of the run to resume; None, with a message, if the run has finished."""
    from ..training.go_on import config_to_go_on, finished

    if flags := [word for word in arguments if word.startswith("-")]:
        raise ValueError(f"{flags[0]} can't be given with {WORD}RUN, which continues the run as it is")
    named = folders(arguments)
    words = [word for word in arguments if not word.lstrip("+").startswith(WORD)]
    if len(named) > 1 or not named[0]:
        raise ValueError(f"{WORD}{','.join(named)} must name the folder of one run")
    cfg = config_to_go_on(named[0], words, folder())
    if said := finished(cfg):
        unused = [word for word in words if not word.startswith("trainer.max_epochs=")]
        print(f"{said}; {shlex.join(unused)} changed nothing" if unused else said)
        return None
    return cfg
