"""Classification of image files by a packed model."""

import os
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..ground.checks import check_at_least_one
from ..images import DecodingError, Normalize, centre_crop, decode, read_picture
from ..inference import freeze
from ..packed import load_for_pictures
from . import located

BATCH_SIZE = 32
Path = str | os.PathLike[str]


class Guess(NamedTuple):
    """A class and its probability."""

    label: str
    probability: float


class Predictor:
    """Classifies image files with the model of a packed file, on the CPU.

    It computes in batches with the frozen model.

    Args:
        path: a packed file that describes its input, as every run of `qconv train` leaves one; the folder of a run; or
            the name of a network of the zoo.
        network: the float network, for a file that does not name one.

    Attributes:
        model: the packed model.

    Raises:
        ValueError: there is no such file, or it is damaged, or lacks that description.
    """

    def __init__(self, path: str | os.PathLike[str], network: nn.Module | None = None) -> None:
        path = located(path)
        self.model, header, self.pictures = load_for_pictures(path, network)
        channels, height, width = self.pictures.size
        if channels not in (1, 3):
            raise ValueError(f"{path}: it takes images of {channels} channels; files are read as RGB (3) or gray (1)")
        if self.pictures.resize is not None and height != width:
            raise ValueError(
                f"{path}: its images would be resized to a side of {self.pictures.resize} and cropped to "
                f"{height}×{width}, but only squares are cropped"
            )
        self.classes = header.classes
        self.normalize = Normalize(self.pictures.mean, self.pictures.std)

    @cached_property
    def frozen(self) -> nn.Module:
        """The model that computes: `freeze` of the packed model, or that model itself if it is not float32."""
        dtypes = {parameter.dtype for parameter in self.model.parameters() if parameter.is_floating_point()}
        if dtypes != {torch.float32}:
            return self.model
        with torch.inference_mode(False):  # of inference tensors kernels would keep nothing
            return freeze(self.model)

    def __call__(self, path: Path, top: int = 3) -> list[Guess]:
        """Return the `top` most probable classes of the image, the most probable first.

        Raises:
            DecodingError: the file is missing or not an image.
            ValueError: `top` is less than 1, or the model has another number of classes than names.
        """
        ((_, guesses),) = self.many([path], top)
        if isinstance(guesses, DecodingError):
            raise guesses
        return guesses

    def many(
        self, paths: Sequence[Path], top: int = 3, batch_size: int = BATCH_SIZE
    ) -> Iterator[tuple[Path, list[Guess] | DecodingError]]:
        """Yield each path with the result or error of `__call__`, in order, as soon as its batch is computed.

        Raises:
            ValueError: `top` or `batch_size` is less than 1, or the model has another number of classes than names.
            TypeError: `paths` is a single path.
        """
        if isinstance(paths, str | os.PathLike):
            raise TypeError(f"paths (={str(paths)!r}) must be several: call the predictor itself for a single path")
        check_at_least_one(top=top, batch_size=batch_size)
        for start in range(0, len(paths), batch_size):
            batch = paths[start : start + batch_size]
            read = [self._read_or_error(path) for path in batch]
            images = [result for result in read if isinstance(result, Tensor)]
            shares = iter(self._shares(torch.stack(images)) if images else ())
            for path, result in zip(batch, read, strict=True):
                yield path, result if isinstance(result, DecodingError) else self._guesses(next(shares), top)

    def _read_or_error(self, path: Path) -> Tensor | DecodingError:
        try:
            return self.read(path)
        except DecodingError as error:
            return error

    @torch.inference_mode()
    def _shares(self, images: Tensor) -> Tensor:
        dtype = next((parameter.dtype for parameter in self.model.parameters()), images.dtype)
        logits = self.frozen(images.to(dtype)).float()
        if logits.shape[1] == 1:  # of the second of two classes
            return torch.cat([(-logits).sigmoid(), logits.sigmoid()], 1)
        return logits.softmax(1)

    def _guesses(self, shares: Tensor, top: int) -> list[Guess]:
        names: Sequence[str] = self.classes or [str(index) for index in range(len(shares))]
        if len(names) != len(shares):
            raise ValueError(f"the model has {len(shares)} classes, but its file names {len(names)}")
        return [Guess(names[index], shares[index].item()) for index in shares.topk(min(top, len(shares))).indices]

    def read(self, path: Path) -> Tensor:
        """Return the model's input for the image.

        Raises:
            DecodingError: the file is missing or no image.
        """
        channels, *size = self.pictures.size
        try:
            pixel_range = self.pictures.pixel_range
            if self.pictures.resize is None:
                image = read_picture(path, (size[0], size[1]), channels, pixel_range)
            else:
                image = centre_crop(decode(path, channels, pixel_range), size[0], self.pictures.resize)
        except DecodingError as error:
            raise DecodingError(f"image {path} cannot be read: {error}") from error
        return self.normalize(image)
