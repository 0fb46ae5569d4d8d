"""Images of more than 8 bits as images of 8, by a range of values that all images of a data set share.

Grey values become 8 bits by the range that their format states, such as 65,535 for white in a PNG file, 4,095 in a TIFF
file of 12 bits, or the largest value that a PGM file names. A data set may state another one (`PixelRange`). It is that
of all its images, so that equal values stay equal. Without it, an image is refused whose format states none (numbers of
32 bits or with a sign), or of which few grey levels would be left, as of 12 bits in a PNG file.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image
from PIL.ImageFile import ImageFile

PixelRange = Sequence[float]
"""The two values of images of more than 8 bits that become 0 and 255; those beyond them do, too."""
FULL_RANGE = (0, 65_535)
FEW, DARK = 32, 16
"""Fewer grey levels are left of 12 bits in 16 (16, and those of a few bright pixels), and smaller values of colours."""
REMEDY = "data.pixel_range=[LOW,HIGH] (of qconv data prepare, --pixel-range LOW HIGH)"
BITS, PHOTOMETRIC, FORMAT = 0x0102, 0x0106, 0x0153  # the tags of a TIFF's numbers
UNSIGNED, SIGNED, ZERO_IS_WHITE = 1, 2, 0


def in_8_bits(picture: ImageFile, pixel_range: PixelRange | None) -> Image.Image:
    """Load the image, in 8 bits: grey if it has more or a sign, else as it is."""
    has_16_bits = ";16" in str(picture.tile)  # also of colours, of which PIL keeps the upper 8
    white = stated_white(picture)
    picture.load()
    values = grey_values(picture, white)
    if values is None:
        if has_16_bits:
            check_colours(picture, pixel_range)
        return picture
    if pixel_range is not None:
        grey = scaled(values, pixel_range)
    elif white is not None:
        grey = scaled(values, (0, white))
        check_levels(values, grey)
    else:
        raise ValueError(
            f"its pixels are {kind(picture)}, and their values of black and white are not known: in training, set "
            f"{REMEDY}"
        )
    return Image.fromarray(255 - grey if tag(picture, PHOTOMETRIC, 1) == ZERO_IS_WHITE else grey)


def tag(picture: Image.Image, number: int, default: int) -> int:
    """The first value of a tag of a TIFF file."""
    tags: Any = picture
    value = tags.tag_v2.get(number, default) if picture.format == "TIFF" else default
    return value[0] if isinstance(value, tuple) else value


def stated_white(picture: ImageFile) -> int | None:
    """The value of white in the format of an image of more than 8 bits, before it is loaded; None if there is none."""
    if picture.mode.startswith("I;16"):
        return 2 ** tag(picture, BITS, 16) - 1
    if picture.mode == "I" and picture.format == "PPM":
        args = picture.tile[0].args
        return args[1] if isinstance(args, tuple) else FULL_RANGE[1]
    return None


def grey_values(picture: Image.Image, white: int | None) -> np.ndarray | None:
    """The values of an image of more than 8 bits or with a sign, as its file has them; None of others."""
    if picture.mode != "L" and picture.mode[0] not in "IF":
        return None
    values, has_sign = np.asarray(picture), tag(picture, FORMAT, UNSIGNED) == SIGNED
    if picture.mode == "L":
        return values.view(np.int8) if has_sign else None  # for PIL they have none
    if picture.mode == "I" and picture.format == "TIFF" and not has_sign:  # for PIL they have one
        return values.view(np.uint32)
    if picture.format == "PPM" and white is not None:  # PIL has brought them to 16 bits
        return np.rint(values * (white / FULL_RANGE[1]))
    return values


def kind(picture: Image.Image) -> str:
    """What numbers the pixels are, if their format does not say which is white."""
    if picture.mode == "F":
        return "floating-point numbers"
    return "integers of 32 bits" if tag(picture, BITS, 16) == 32 else "integers with a sign"


def scaled(values: np.ndarray, pixel_range: PixelRange) -> np.ndarray:
    """Bring values to 0 to 255, in 256 equal steps: of whole numbers of n bits those are their upper 8."""
    low, high = pixel_range
    steps = (values.astype(np.float64) - low) * (256 / (high - low))
    if np.isnan(steps).any():
        raise ValueError("some of its pixels are NaN")
    return steps.clip(0, 255).astype(np.uint8)


def check_levels(values: np.ndarray, grey: np.ndarray) -> None:
    """Raise a ValueError if less than `FEW` grey levels are left of more than twice as many."""
    left = len(np.unique(grey))
    if left < FEW and 2 * left < (found := len(np.unique(values))):
        raise ValueError(
            f"{left} of {found} grey levels would be left, of values up to {values.max():,.0f}: in training, set "
            f"black and white by {REMEDY}, such as [0,4095] for 12 bits ([0,65535] keeps the values)"
        )


def check_colours(picture: Image.Image, pixel_range: PixelRange | None) -> None:
    """Raise a ValueError if the upper 8 bits of colours, all that PIL reads of 16, are not what is wanted."""
    colours: Any = picture.getextrema()
    if pixel_range is None and all(most < DARK for _, most in colours[:3]):
        raise ValueError(
            "its colours have 16 bits, the upper 4 bits are 0, and PIL reads only the upper 8: store it with 8 "
            "bits (or in training, if the image is just dark, set data.pixel_range=[0,65535])"
        )
    if pixel_range is not None and tuple(pixel_range) != FULL_RANGE:
        raise ValueError(
            "its colours have 16 bits, of which PIL reads the upper 8, and data.pixel_range "
            f"(={list(pixel_range)}) is only for grey images: store it with 8 bits"
        )
