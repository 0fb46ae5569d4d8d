"""The model of a command: the folder of a run, a packed file, or a network of the zoo."""

import argparse
import shlex
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ..training.finished import FinishedRun
    from ..zoo.predict import Predictor


def add_model(parser: argparse.ArgumentParser, more: str = "") -> None:
    """Add the argument MODEL."""
    what = f"folder of a run (which must be trusted), a packed model, or a name that qconv zoo lists{more}"
    parser.add_argument("model", metavar="MODEL", type=Source, help=what)


def add_pictures(parser: argparse.ArgumentParser, what: str) -> None:
    """Add the argument IMAGE, of any number of files."""
    parser.add_argument("pictures", metavar="IMAGE", nargs="*", default=[], help=what)
    parser.set_defaults(more="pictures")


class Source:
    """The model named by MODEL, read only when needed."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)

    @cached_property
    def is_run(self) -> bool:
        """Whether MODEL is a folder; a ValueError says that there is neither a folder nor a file."""
        if self.path.is_dir():
            return True
        if not self.packed_file.exists():
            raise ValueError(f"packed model {self.path}: there is no such file")
        return False

    @property
    def packed_file(self) -> Path:
        """The packed file: MODEL itself, in the run's folder, or in the zoo."""
        from ..zoo import located

        return located(self.path)

    @cached_property
    def predictor(self) -> "Predictor":
        """The model of the packed file."""
        from ..zoo.predict import Predictor

        return Predictor(self.packed_file, self.unnamed_network)

    @property
    def unnamed_network(self) -> "nn.Module | None":
        """The float network that the run's config names, if its packed file does not name it."""
        from ..packed import read_header

        named = not self.is_run or read_header(self.packed_file).network is not None
        return None if named else self.run.network()

    @cached_property
    def run(self) -> "FinishedRun":
        """The run in its folder."""
        from ..training.finished import FinishedRun

        return FinishedRun(self.path)

    def trained(self) -> "nn.Module":
        """The network of the run's checkpoint, or of the packed file."""
        return self.run.trained() if self.is_run else self.predictor.model

    def shipped(self) -> "nn.Module":
        """The network of the packed file; for a run without one, of its checkpoint."""
        return self.run.model() if self.is_run else self.predictor.model

    def inputs(self, pictures: list[str], count: int, split: Literal["train", "val"]) -> "Tensor":
        """Return the network's inputs from these images; without any, `count` images of the run."""
        if pictures:
            import torch

            return torch.stack([self.predictor.read(path) for path in pictures])
        if not self.is_run:
            path = shlex.quote(str(self.path))
            raise ValueError(
                f"name image files after {path}, such as {path} *.jpg: only a run's folder has its own images"
            )
        return self.run.labelled(count, split)[0]
