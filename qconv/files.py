"""Files that are whole or absent."""

import os
from pathlib import Path


class atomic_file:  # noqa: N801  # used like `open`
    """Context manager: a binary file that takes its name only when it is complete and on the disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")

    def __enter__(self):
        self.file = self.temporary.open("wb")
        return self.file

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            with self.file:
                if kind is None:
                    self.file.flush()
                    os.fsync(self.file.fileno())
            if kind is None:
                self.temporary.replace(self.path)
        finally:  # renamed away, or to be removed: also when the disk is full
            self.temporary.unlink(missing_ok=True)
