"""Packed files: what was trained is what ships."""

from .file import PackedFileError as PackedFileError
from .file import load_packed as load_packed
from .file import packed_sizes as packed_sizes
from .file import read_header as read_header
from .file import save_packed as save_packed
