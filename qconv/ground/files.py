"""Files that are either complete or absent, clear messages about those that are damaged, and those of a folder."""

import errno
import os
import pickle
import re
import secrets
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

OLD = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""The first bytes of the files of `torch.save` before torch 1.6."""
LEFT_AFTER = 3600
"""Seconds without a change after which a temporary file counts as left by a process that was killed."""


class DamagedFileError(ValueError):
    """A file that is missing, damaged, or not a file of tensors."""


@contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """Wait until no other process of this machine is in such a block for the folder; on some file systems, for none."""
    with ExitStack() as stack:
        with suppress(OSError):  # a folder that can't be read, a file system without locks
            if fcntl is not None:
                opened = os.open(folder, os.O_RDONLY)
                stack.callback(os.close, opened)
                fcntl.flock(opened, fcntl.LOCK_EX)
        yield


def load_tensors(path: str | os.PathLike[str], what: str) -> Any:
    """Read a file written by `torch.save` onto the CPU, with `weights_only=True`; messages call it a `what`.

    Raises:
        DamagedFileError: the file is missing, cut off or damaged, or holds more than tensors and plain values.
    """
    path = Path(path)
    if not path.is_file():
        raise DamagedFileError(f"{what} {path}: {'it is a folder' if path.is_dir() else 'there is no such file'}")
    import torch  # takes seconds, and what writes files needs none

    if not zipfile.is_zipfile(path) and not _is_of_old_torch(path):
        size = f"{path.stat().st_size:,} bytes"
        raise DamagedFileError(f"{what} {path}: cut off or no {what} ({size}, the index at its end is missing)")
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise DamagedFileError(
            f"{what} {path}: not loaded, because it holds more than tensors and plain values"
        ) from error
    except (RuntimeError, EOFError, KeyError, zipfile.BadZipFile) as error:
        raise DamagedFileError(f"{what} {path}: the file is damaged ({str(error).splitlines()[0]})") from error


def _is_of_old_torch(path: Path) -> bool:
    """Whether torch before 1.6 wrote it, as it did many of torchvision's files."""
    with path.open("rb") as file:
        return file.read(len(OLD)) == OLD


class atomic_file:  # noqa: N801  # used like `open`
    """Context manager: a binary file that takes its name only when it is complete and on the disk.

    What a process that was killed has left of the same file is removed, once it is old.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        # Processes of two machines or containers may have one number.
        self.temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")

    def __enter__(self):
        if self.path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(self.path))
        try:
            self.file = self.temporary.open("wb")
        except OSError as error:
            error.filename = str(self.path)  # which the user knows
            raise
        self._remove_leftovers()
        return self.file

    def _remove_leftovers(self) -> None:
        """Remove the temporary files that are too old to be written to.

        Whether their processes run would not tell: they may be those of another machine.
        """
        pattern = re.compile(rf"\.{re.escape(self.path.name)}\.\d+(-[0-9a-f]+)?\.tmp")
        with suppress(OSError):  # another process may remove them, too
            now = os.fstat(self.file.fileno()).st_mtime  # by the clock of the file system
            for other in self.path.parent.iterdir():
                if pattern.fullmatch(other.name) and now - other.stat().st_mtime > LEFT_AFTER:
                    other.unlink()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            with self.file:
                if kind is None:
                    self.file.flush()
                    os.fsync(self.file.fileno())
            if kind is None:
                self.temporary.replace(self.path)
        finally:  # either renamed already or to be removed, even if the disk is full
            self.temporary.unlink(missing_ok=True)


def write_file(path: str | os.PathLike[str], content: bytes | str) -> None:
    """Write a whole file by `atomic_file`; in a text, what is no UTF-8, as in names of files, is escaped."""
    with atomic_file(Path(path)) as file:
        file.write(content.encode(errors="backslashreplace") if isinstance(content, str) else content)


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
