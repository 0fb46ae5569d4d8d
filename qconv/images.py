"""Pictures from files, uint8 `(C, H, W)`, small ones whole, large ones cropped at the centre; and normalized."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor


class DecodingError(ValueError):
    """A file that is no picture."""


def decode(file: str | bytes) -> Tensor:
    """The picture in RGB, `(3, H, W)`, uint8."""
    from torchvision.io import ImageReadMode, decode_image

    with warnings.catch_warnings():
        # torchvision 0.29 points to torchcodec, whose versions for the oldest torch we take have no such function.
        warnings.filterwarnings("ignore", "The image decoding", DeprecationWarning)
        source = file if isinstance(file, str) else torch.frombuffer(bytearray(file), dtype=torch.uint8)
        return decode_image(source, ImageReadMode.RGB)


def centre_crop(image: Tensor, size: int, resize: int) -> Tensor:
    """The picture with its shorter side at ``resize``, cut at the centre."""
    from torchvision.transforms.v2.functional import center_crop
    from torchvision.transforms.v2.functional import resize as resized

    return center_crop(resized(image, [resize], antialias=True), [size, size])


def read_picture(path: Path, size: tuple[int, int], channels: int, resize: bool) -> Tensor:
    """The picture at ``path`` as uint8, `(channels, *size)`; resized to cover ``size`` and cropped, if ``resize``.

    Raises:
        OSError, SyntaxError, ValueError: it is no whole picture, or has another size and ``resize`` is false.
    """
    with Image.open(path) as picture:
        if resize:
            picture.draft("RGB" if channels == 3 else "L", (size[1], size[0]))  # a large JPEG is decoded smaller
        picture.load()
        if picture.mode.startswith("I"):  # 16 bits, which PIL's own conversion would cut off at 255
            picture = Image.fromarray((np.asarray(picture).astype(np.uint32) >> 8).clip(0, 255).astype(np.uint8))
        elif picture.mode == "F":
            raise ValueError("its pixels are floating-point numbers")
        picture = picture.convert("RGB" if channels == 3 else "L")
        if resize:
            picture = cover(picture, size)
        elif (picture.height, picture.width) != size:
            raise ValueError(
                f"it has {picture.height}×{picture.width} pixels, not {size[0]}×{size[1]}: give image_size"
            )
        pixels = np.asarray(picture)
    return torch.from_numpy(pixels.copy()).view(*size, channels).permute(2, 0, 1)


def cover(picture: Image.Image, size: tuple[int, int]) -> Image.Image:
    """The picture, resized to cover (height, width) and cropped at the centre."""
    height, width = size
    scale = max(height / picture.height, width / picture.width)
    box_height, box_width = height / scale, width / scale
    left, top = (picture.width - box_width) / 2, (picture.height - box_height) / 2
    box = left, top, left + box_width, top + box_height
    return picture.resize((width, height), Image.Resampling.BILINEAR, box)


@dataclass(frozen=True)
class Normalize:
    """``(x − mean) / std`` in each channel, as float32.

    Args:
        mean: of each channel, in the units of the pictures.
        std: of each channel.
    """

    mean: Sequence[float]
    std: Sequence[float]

    def __call__(self, images: Tensor) -> Tensor:
        """The pictures with mean 0 and standard deviation 1 over the data set."""
        mean, std = (_per_channel(tuple(values), images.device) for values in (self.mean, self.std))
        return images.float().sub_(mean).div_(std)


@cache
def _per_channel(values: tuple[float, ...], device: torch.device) -> Tensor:
    """The numbers on the device, sent there once."""
    return torch.tensor(values, device=device).view(-1, 1, 1)
