"""The classes of pictures, by a packed model."""

import os
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .images import DecodingError, Normalize, centre_crop, decode, read_picture
from .packed import load_for_pictures


class Guess(NamedTuple):
    """A class and its probability."""

    label: str
    probability: float


class Predictor:
    """Names the classes of picture files as the model of a packed file does, on the CPU.

    Args:
        path: a packed file that says its network and what it takes, as every run of `train.py` leaves one.

    Raises:
        ValueError: the file is damaged, or does not say so much.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.model, header, self.pictures = load_for_pictures(path)
        self.classes = header.classes
        self.normalize = Normalize(self.pictures.mean, self.pictures.std)

    def __call__(self, path: str | os.PathLike[str], top: int = 3) -> list[Guess]:
        """The `top` most probable classes of the picture, the first one first.

        Raises:
            DecodingError: the file is missing or no picture.
            ValueError: `top` is less than 1, or the model has another number of classes than names.
        """
        if top < 1:
            raise ValueError(f"top (={top}) must be at least 1")
        with torch.inference_mode():
            shares = self.model(self.read(path).unsqueeze(0)).float().softmax(1)[0]
        names: Sequence[str] = self.classes or [str(index) for index in range(len(shares))]
        if len(names) != len(shares):
            raise ValueError(f"the model has {len(shares)} classes, and its file names {len(names)}")
        return [Guess(names[index], shares[index].item()) for index in shares.topk(min(top, len(shares))).indices]

    def read(self, path: str | os.PathLike[str]) -> Tensor:
        """What the model takes for the picture.

        Raises:
            DecodingError: the file is missing or no picture.
        """
        channels, *size = self.pictures.size
        try:
            if self.pictures.resize is None:
                image = read_picture(path, (size[0], size[1]), channels, resize=True)
            else:
                image = centre_crop(decode(path), size[0], self.pictures.resize)
        except DecodingError as error:
            raise DecodingError(f"picture {path} cannot be read: {error}") from error
        return self.normalize(image)
