"""The model that a command is about: the folder of a run, or a packed file."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..packed import FILE

if TYPE_CHECKING:
    from ..predict import Predictor


def add_model(parser: argparse.ArgumentParser, what: str = "") -> None:
    """The argument MODEL."""
    parser.add_argument(
        "model", metavar="MODEL", type=Path, help=f"folder of a run of train.py, or a packed model{what}"
    )


def packed_file(model: Path) -> Path:
    """The packed file that MODEL is, or has."""
    if not model.is_dir():
        return model
    if not (model / FILE).is_file():
        raise ValueError(f"{model} has no {FILE}: qconv export {model} --to packed writes the one of a run")
    return model / FILE


def inputs(predictor: "Predictor", pictures: list[str]) -> Tensor:
    """What a model takes for picture files."""
    return torch.stack([predictor.read(path) for path in pictures])
