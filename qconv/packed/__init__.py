"""Packed files: what was trained is what ships."""

from .header import FILE as FILE
from .load import PackedFileError as PackedFileError
from .load import load_for_pictures as load_for_pictures
from .load import load_packed as load_packed
from .load import read_header as read_header
from .save import packed_sizes as packed_sizes
from .save import save_packed as save_packed
