"""Trained networks that come with the package: each is a packed file and its card.

>>> import qconv
>>> model = qconv.load("smallcnn-bnn-digits")
>>> qconv.zoo.card("smallcnn-bnn-digits").scheme
'bnn()'

"""

import difflib
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from ..runs.run_files import CONFIG, PACKED, why_no_run
from .card import Card as Card

if TYPE_CHECKING:
    from torch import nn

NETWORKS = Path(__file__).parent / "networks"


def names() -> list[str]:
    """The names of the networks."""
    return sorted(path.stem for path in NETWORKS.glob("*.safetensors"))


def file(name: str) -> Path:
    """The packed file of a network, which `qconv.zoo.predict.Predictor` and the command `qconv` take, too.

    Raises:
        ValueError: there is no such network; it names the nearest.
    """
    if name not in names():
        raise ValueError(f"name (={name!r}) is not a network of the zoo: {_nearest(name)}")
    return NETWORKS / f"{name}.safetensors"


def card(name: str) -> Card:
    """What a network was trained on, how, and with which accuracy.

    Raises:
        ValueError: there is no such network.
    """
    return Card.model_validate_json(file(name).with_suffix(".json").read_text(encoding="utf-8"))


def located(what: str | os.PathLike[str]) -> Path:
    """The packed file that `what` names: a file, the folder of a run, or a network of the zoo.

    A path goes first: a file or folder of the same name hides a network.

    Raises:
        ValueError: it is none of them.
    """
    path = Path(what)
    if path.is_dir():
        if (path / PACKED).is_file():
            return path / PACKED
        if not (path / CONFIG).is_file():
            raise ValueError(why_no_run(path))
        raise ValueError(f"{path} has no {PACKED}: write it by qconv export {shlex.quote(str(path))} --to packed")
    if path.exists() or path.suffix:  # spelled as a file
        return path
    if path.name != os.fspath(what):
        raise ValueError(f"{what} is not the folder of a run, a packed file or a network of the zoo (see qconv zoo)")
    if os.fspath(what) not in names():
        raise ValueError(
            f"packed model {what}: there is no such file, run or network of the zoo ({_nearest(path.name)})"
        )
    return file(os.fspath(what))


def _nearest(name: str) -> str:
    near = difflib.get_close_matches(name, names(), n=1)
    return f"did you mean {near[0]}?" if near else f"qconv zoo lists {', '.join(names())}"


def load(what: str | os.PathLike[str]) -> "nn.Module":
    """Return a trained network, on the CPU and in evaluation mode.

    Args:
        what: a name that `qconv zoo` lists, the folder of a run, or a packed file that names its network.

    Raises:
        ValueError: there is no such network or run.
        PackedFileError: the file is missing or damaged, or does not name its network (`qconv.load_packed` takes it).
    """
    from ..packed import load_packed

    return load_packed(located(what))
