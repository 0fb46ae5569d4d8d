"""Packed files: the trained network, ready to ship."""

from .load import (
    PackedFileError as PackedFileError,
    load_for_pictures as load_for_pictures,
    load_packed as load_packed,
    read_header as read_header,
)
from .save import packed_sizes as packed_sizes, save_packed as save_packed
