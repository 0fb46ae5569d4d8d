"""Pictures from files as uint8 `(C, H, W)`, small ones whole, large ones cropped at the centre; and normalization.

PIL opens all of them and recognizes their format by their content. So large and small pictures have the same formats,
modes, errors, and limit of pixels (PIL's, against decompression bombs). Transparency is ignored, and so is the EXIF
orientation, except for TIFF, which PIL turns.
"""

import io
import os
import struct
import warnings
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor


class DecodingError(ValueError):
    """A file that is not a picture."""


UNREADABLE = (
    # The errors of PIL and torchvision for damaged files; a warning counts where Python turns warnings into errors.
    *(OSError, EOFError, SyntaxError, ValueError, TypeError, LookupError, ArithmeticError, AttributeError),
    *(RuntimeError, MemoryError, struct.error, zlib.error, Image.DecompressionBombError, Warning),
)
MAX_RESIZED = 2**28
"""The most pixels of a resized picture: a long and narrow one could have any number."""


@contextmanager
def opened(file: str | os.PathLike[str] | bytes) -> Iterator[Image.Image]:
    """Context manager: the picture in a file or in its bytes; its pixels are decoded on access.

    Raises:
        DecodingError: replaces any error that the `with` block raises because of a damaged file.
    """
    try:
        with Image.open(io.BytesIO(file) if isinstance(file, bytes) else file) as picture:
            yield picture
    except DecodingError:
        raise
    except UNREADABLE as error:
        raise DecodingError(_reason(error)) from error


def _reason(error: BaseException) -> str:
    if isinstance(error, UnidentifiedImageError):  # its message is the address of an object
        return "it is no picture of a known format"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    line = next(iter(str(error).splitlines()), "")
    if isinstance(error, RuntimeError):  # torch's: drop the place in its source
        line = line.rpartition(", ")[2]
    return line or type(error).__name__


def decode(file: str | os.PathLike[str] | bytes) -> Tensor:
    """Decode the picture as RGB, `(3, H, W)`, uint8.

    torchvision decodes JPEG in at most two thirds of PIL's time. Its PNG decoder must not be used: it crashed the
    process on most damaged files.

    Raises:
        DecodingError: the file is missing or not a complete picture.
    """
    with opened(file) as picture:
        if picture.format in ("JPEG", "MPO") and picture.mode in ("RGB", "L"):
            return _decode_jpeg(file if isinstance(file, bytes) else Path(file).read_bytes())
        return _pixels(picture, "RGB")


def _decode_jpeg(data: bytes) -> Tensor:
    from torchvision.io import ImageReadMode, decode_jpeg

    with warnings.catch_warnings():
        # torchvision 0.29 points to torchcodec, whose versions for the oldest torch we take have no such function.
        warnings.filterwarnings("ignore", "The image decoding", DeprecationWarning)
        image: Any = decode_jpeg(torch.frombuffer(bytearray(data), dtype=torch.uint8), ImageReadMode.RGB)
    return image


def centre_crop(image: Tensor, size: int, resize: int) -> Tensor:
    """Resize the picture so that its shorter side is ``resize``, and crop it at the centre.

    Raises:
        DecodingError: it is so long and narrow that it would exceed `MAX_RESIZED` pixels.
    """
    from torchvision.transforms.v2.functional import center_crop, resize as resized

    height, width = image.shape[1:]
    if resize * resize * max(height, width) > MAX_RESIZED * min(height, width):
        raise DecodingError(f"{height}×{width} pixels are too long and narrow for a shorter side of {resize}")
    return center_crop(resized(image, [resize], antialias=True), [size, size])


def read_picture(file: str | os.PathLike[str], size: tuple[int, int], channels: int, resize: bool) -> Tensor:
    """Decode the picture as uint8, `(channels, *size)`; with ``resize``, resized to cover ``size`` and cropped.

    Raises:
        DecodingError: it is not a complete picture, or has another size and ``resize`` is false.
    """
    mode = "RGB" if channels == 3 else "L"
    with opened(file) as picture:
        if not resize and (picture.height, picture.width) != size:
            raise DecodingError(
                f"it has {picture.height}×{picture.width} pixels, not {size[0]}×{size[1]}: give image_size"
            )
        if resize:
            picture.draft(mode, (size[1], size[0]))  # decodes a large JPEG at a smaller size
        return _pixels(picture, mode, size if resize else None)


def _pixels(picture: Image.Image, mode: str, size: tuple[int, int] | None = None) -> Tensor:
    """Return the pixels in ``mode``, resized to cover ``size``."""
    picture.load()
    picture.info.pop("transparency", None)  # ignored; PIL would warn about palettes
    if picture.mode.startswith("I"):  # 16 bits, which PIL's own conversion would clip at 255
        picture = Image.fromarray((np.asarray(picture).astype(np.uint32) >> 8).clip(0, 255).astype(np.uint8))
    elif picture.mode == "F":
        raise DecodingError("its pixels are floating-point numbers")
    picture = picture.convert(mode)
    if size is not None:
        picture = cover(picture, size)
    pixels = torch.from_numpy(np.array(picture))
    return pixels.view(picture.height, picture.width, -1).permute(2, 0, 1)


def cover(picture: Image.Image, size: tuple[int, int]) -> Image.Image:
    """Resize the picture to cover (height, width), and crop it at the centre."""
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
        mean: the mean of each channel, in the units of the pictures.
        std: the standard deviation of each channel.
    """

    mean: Sequence[float]
    std: Sequence[float]

    def __call__(self, images: Tensor) -> Tensor:
        """Normalize the pictures: mean 0 and standard deviation 1 over the data set."""
        mean, std = (_per_channel(tuple(values), images.device) for values in (self.mean, self.std))
        return images.float().sub_(mean).div_(std)


@cache
def _per_channel(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Return the numbers on the device, copied there once."""
    return torch.tensor(values, device=device).view(-1, 1, 1)
