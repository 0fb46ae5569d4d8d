"""The image files named on a command line: files, folders, and patterns that the shell did not expand."""

import glob
from collections.abc import Iterable, Iterator
from pathlib import Path


def picture_files(words: Iterable[str]) -> list[str]:
    """Return the files, each once. A folder stands for all image files in it and its subfolders, sorted.

    A word that names nothing is returned as it is, so that the reader reports the error.
    """
    return list(dict.fromkeys(path for word in words for path in _of_word(word)))


def _of_word(word: str) -> Iterator[str]:
    if Path(word).exists() or not glob.has_magic(word):
        found = [word]
    else:
        found = sorted(glob.glob(word, recursive=True)) or [word]  # noqa: PTH207  # also below another folder
    for path in found:
        yield from _of_folder(Path(path)) if Path(path).is_dir() else (path,)


def _of_folder(folder: Path) -> list[str]:
    from ..images import files_below, readable_suffixes

    suffixes = readable_suffixes()
    files = sorted(path for path in files_below(folder) if path.suffix.lower() in suffixes and path.is_file())
    if not files:
        raise ValueError(f"{folder} holds no images: no file ends in .jpg, .png or another ending of an image")
    return [str(path) for path in files]
