"""Image files as uint8 tensors: decoding with PIL, pixels of more than 8 bits, and normalization."""

from .decode import (
    HEIF_REMEDY as HEIF_REMEDY,
    HEIF_SUFFIXES as HEIF_SUFFIXES,
    SUFFIXES as SUFFIXES,
    DecodingError as DecodingError,
    Normalize as Normalize,
    ReadingError as ReadingError,
    centre_crop as centre_crop,
    decode as decode,
    decode_jpegs as decode_jpegs,
    opened as opened,
    orientation as orientation,
    read_picture as read_picture,
    readable_suffixes as readable_suffixes,
    reads_heif as reads_heif,
    reason as reason,
    resize_bytes as resize_bytes,
    size_of as size_of,
)
from .pixel_range import PixelRange as PixelRange
