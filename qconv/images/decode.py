"""Images from files as uint8 `(C, H, W)`, small ones whole, large ones cropped at the centre; and normalization.

PIL opens all of them and recognizes their format by their content. So large and small images have the same formats,
modes, errors, and limit of pixels (PIL's, against decompression bombs). They are turned as their EXIF orientation says;
transparency is ignored, and so are all pages of a file but the first. `pixel_range` is about more than 8 bits.
"""

import errno
import io
import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps, UnidentifiedImageError
from PIL.ImageFile import ImageFile
from torch import Tensor

from ..ground.extras import remedy
from .pixel_range import PixelRange as PixelRange, in_8_bits


class DecodingError(ValueError):
    """A file that is not an image."""


class ReadingError(DecodingError):
    """A file that could not be read now, though it may be an image."""


UNREADABLE = (
    # The errors of PIL and torchvision for damaged files; a warning counts where Python turns warnings into errors.
    *(OSError, EOFError, SyntaxError, ValueError, TypeError, LookupError, ArithmeticError, AttributeError),
    *(RuntimeError, MemoryError, struct.error, zlib.error, Image.DecompressionBombError, Warning),
)
OF_THE_FILE = frozenset(
    {
        *(errno.ENOENT, errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENXIO, errno.EINVAL),
        *(errno.EACCES, errno.EPERM, errno.EFBIG, errno.EOVERFLOW),
    }
)
"""What an `OSError` says of a file or of its content; others, such as too many open files, may pass."""
ORIENTATION = 0x0112  # the tag of EXIF
WIDTH, LENGTH = 0x0100, 0x0101  # the tags of a TIFF's size, as it is stored
TIFF_STARTS = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""What undoes each orientation; from 5 on it exchanges height and width."""
SUFFIXES = frozenset(
    (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".bmp", ".gif", ".ppm", ".pgm", ".tif", ".tiff", ".webp", ".avif")
)
HEIF_SUFFIXES = frozenset((".heic", ".heif"))
HEIF_BRANDS = (b"ftypheic", b"ftypheix", b"ftyphevc", b"ftypmif1", b"ftypmsf1")
"""The bytes 4 to 12 of such files."""
HEIF_REMEDY = remedy("pillow_heif")
MAX_RESIZED = 2**28
"""The most pixels of a resized image: a long and narrow one could have any number."""


@contextmanager
def opened(file: str | os.PathLike[str] | bytes) -> Iterator[ImageFile]:
    """Context manager: the image in a file or in its bytes; its pixels are decoded on access.

    Raises:
        DecodingError: replaces any error that the `with` block raises because of a damaged file.
        ReadingError: this one if the file may be whole, such as after an error of the disk or for want of memory.
    """
    reads_heif()
    try:
        with Image.open(io.BytesIO(file) if isinstance(file, bytes) else file) as picture:
            yield picture
    except DecodingError:
        raise
    except UnidentifiedImageError as error:
        if _start(file)[4:12] in HEIF_BRANDS:
            raise DecodingError(f"it is a HEIC image: {HEIF_REMEDY}") from error
        if _start(file)[:4] in TIFF_STARTS:
            kind = "it is a damaged TIFF image, or has pixels of a kind that PIL does not read"
            raise DecodingError(f"{kind}: store it as grey of 8 or 16 bits, or as RGB of 8") from error
        raise DecodingError("it is not an image of a known format") from error
    except UNREADABLE as error:
        if _may_pass(error):
            raise ReadingError(f"{reason(error)}; the file may be intact: try again") from error
        raise DecodingError(reason(error)) from error


def _may_pass(error: BaseException) -> bool:
    if isinstance(error, OSError):
        return error.errno is not None and error.errno not in OF_THE_FILE
    return isinstance(error, MemoryError) or "DefaultCPUAllocator" in str(error)  # torch's for want of memory


@cache
def reads_heif() -> bool:
    """Whether HEIC images, as iPhones take them, can be read: if pillow-heif is installed."""
    if find_spec("pillow_heif") is None:
        return False
    import pillow_heif

    pillow_heif.register_heif_opener()
    return True


def readable_suffixes() -> frozenset[str]:
    """The suffixes of the files that count as images."""
    return SUFFIXES | HEIF_SUFFIXES if reads_heif() else SUFFIXES


def _start(file: str | os.PathLike[str] | bytes) -> bytes:
    if isinstance(file, bytes):
        return file[:12]
    try:
        with Path(file).open("rb") as opened:
            return opened.read(12)
    except (OSError, TypeError):  # the second: it is open already
        return b""


def orientation(picture: Image.Image) -> int:
    """The EXIF orientation, 1 to 8; 1, upright, if it has none or a damaged one."""
    if picture.format == "PNG" and "exif" not in picture.info:  # PIL would decode it, and we would hide its errors
        return 1
    try:
        return picture.getexif().get(ORIENTATION, 1)
    except UNREADABLE:
        return 1


def size_of(picture: Image.Image) -> tuple[int, int]:
    """The height and width that an image will have upright; it must not be loaded yet."""
    width, height = picture.size
    if picture.format == "TIFF":  # newer versions of PIL give the size of what they will have turned
        tags: Any = picture
        width, height = tags.tag_v2[WIDTH], tags.tag_v2[LENGTH]
    return (width, height) if orientation(picture) in (5, 6, 7, 8) else (height, width)


def reason(error: BaseException) -> str:
    """The first line of what an error says, without the place in torch's source."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    line = next(iter(str(error).splitlines()), "")
    if isinstance(error, RuntimeError):  # torch's: drop the place in its source
        line = line.rpartition(", ")[2]
    return line or type(error).__name__


def decode(file: str | os.PathLike[str] | bytes, channels: int = 3, pixel_range: PixelRange | None = None) -> Tensor:
    """Decode the image as RGB, `(3, H, W)`, or with one channel as gray, `(1, H, W)`, uint8.

    torchvision decodes JPEG in at most two thirds of PIL's time. Its PNG decoder must not be used: it crashed the
    process on most damaged files.

    Raises:
        DecodingError: the file is missing or not a complete image, or its grey levels would be lost.
    """
    with opened(file) as picture:
        if channels == 1:
            return _pixels(picture, "L", pixel_range)
        if picture.format in ("JPEG", "MPO") and picture.mode in ("RGB", "L"):
            data = file if isinstance(file, bytes) else Path(file).read_bytes()
            return _turned(decode_jpegs([data])[0], orientation(picture))  # PIL's, which reads XMP, too
        return _pixels(picture, "RGB", pixel_range)


def decode_jpegs(files: Sequence[bytes], device: torch.device | str = "cpu") -> list[Tensor]:
    """Decode JPEG files as RGB by torchvision, on the CPU or a GPU of NVIDIA; they are not turned."""
    from torchvision.io import ImageReadMode, decode_jpeg

    contents = [torch.frombuffer(bytearray(data), dtype=torch.uint8) for data in files]
    images: Any = decode_jpeg(contents, ImageReadMode.RGB, device) if contents else []
    return images


def _turned(image: Tensor, orientation: int) -> Tensor:
    """The image `(C, H, W)` upright, as `TURNS` turns those of PIL."""
    if orientation in (5, 6, 7, 8):
        image = image.transpose(1, 2)
    mirrored = {2: (2,), 3: (1, 2), 4: (1,), 6: (2,), 7: (1, 2), 8: (1,)}.get(orientation)
    return image if mirrored is None else image.flip(mirrored)


def resize_bytes(images: Tensor, size: tuple[int, int]) -> Tensor:
    """Resize uint8 images `(N, C, H, W)`, filtered so that nothing aliases.

    Only the CPU resizes bytes; elsewhere they are floats meanwhile, which changes the rounding of some pixels by 1.
    """
    if images.device.type == "cpu":
        return F.interpolate(images, size, mode="bilinear", antialias=True)
    resized = F.interpolate(images.float(), size, mode="bilinear", antialias=True)
    return resized.round_().clamp_(0, 255).to(torch.uint8)


def centre_crop(image: Tensor, size: int, resize: int) -> Tensor:
    """Resize the image so that its shorter side is ``resize``, and crop it at the centre."""
    from torchvision.transforms.v2.functional import center_crop, resize as resized

    height, width = image.shape[1:]
    if resize * resize * max(height, width) > MAX_RESIZED * min(height, width):
        raise DecodingError(f"{height}×{width} pixels are too long and narrow for a shorter side of {resize}")
    return center_crop(resized(image, [resize], antialias=True), [size, size])


def read_picture(
    file: str | os.PathLike[str], size: tuple[int, int], channels: int, pixel_range: PixelRange | None = None
) -> Tensor:
    """Decode the image as uint8, `(channels, *size)`, resized to cover ``size`` and cropped."""
    mode = "RGB" if channels == 3 else "L"
    with opened(file) as picture:
        is_turned = size_of(picture) != (picture.height, picture.width)
        picture.draft(mode, size if is_turned else (size[1], size[0]))  # decodes a large JPEG at a smaller size
        return _pixels(picture, mode, pixel_range, size)


def _pixels(file: ImageFile, mode: str, pixel_range: PixelRange | None, size: tuple[int, int] | None = None) -> Tensor:
    """Return the pixels in ``mode``, resized to cover ``size``."""
    picture = in_8_bits(file, pixel_range)
    turn = None if file.format == "TIFF" else TURNS.get(orientation(file))  # PIL has turned a TIFF
    picture.info.pop("transparency", None)  # ignored; PIL would warn about palettes
    picture = picture.convert(mode)
    if turn is not None:
        picture = picture.transpose(turn)
    if size is not None and (picture.height, picture.width) != size:
        picture = ImageOps.fit(picture, (size[1], size[0]), Image.Resampling.BILINEAR)
    pixels = torch.from_numpy(np.array(picture))
    return pixels.view(picture.height, picture.width, -1).permute(2, 0, 1)


@dataclass(frozen=True)
class Normalize:
    """``(x − mean) / std`` in each channel, as float32.

    Args:
        mean: the mean of each channel, in the units of the images.
        std: the standard deviation of each channel.
    """

    mean: Sequence[float]
    std: Sequence[float]

    def __call__(self, images: Tensor) -> Tensor:
        """Normalize the images, `(N, C, H, W)` or `(C, H, W)`: mean 0, standard deviation 1 over the data set."""
        mean, std = (_per_channel(tuple(values), images.device) for values in (self.mean, self.std))
        floats = images.to(torch.float32, copy=True)
        if images.ndim == 4 and not images.is_contiguous() and images.is_contiguous(memory_format=torch.channels_last):
            n, c, h, w = images.shape  # a vector for a row of pixels: one for 3 channels took 4 times as long
            mean, std = (values.view(-1).expand(c).repeat(w) for values in (mean, std))
            floats.permute(0, 2, 3, 1).view(n, h, w * c).sub_(mean).div_(std)
            return floats
        return floats.sub_(mean).div_(std)


@cache
def _per_channel(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Return the numbers on the device, copied there once: not under `torch.inference_mode`, nor in a default dtype."""
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=torch.float32, device=device).view(-1, 1, 1)
