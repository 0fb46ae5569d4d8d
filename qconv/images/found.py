"""The files in a folder."""

import os
from collections.abc import Iterator
from pathlib import Path


def files_below(folder: Path) -> Iterator[Path]:
    """Yield the files in a folder and its subfolders, following links, without hidden ones."""
    visited: set[str] = set()
    for place, folders, names in os.walk(folder, followlinks=True):
        if (real := os.path.realpath(place)) in visited:
            folders.clear()
            continue
        visited.add(real)
        folders[:] = sorted(name for name in folders if name[0] != ".")
        yield from (Path(place, name) for name in names if name[0] != ".")
