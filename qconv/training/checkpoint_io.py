"""Checkpoint files that are either complete or absent, and clear messages about damaged ones."""

import os
from pathlib import Path
from typing import Any

import torch
from lightning_fabric.plugins import CheckpointIO

from ..ground.files import DamagedFileError, atomic_file, load_tensors


class CheckpointError(ValueError):
    """A checkpoint that is missing or damaged, or belongs to something else or another run."""


class AtomicCheckpointIO(CheckpointIO):
    """Writes a temporary file in the same folder and renames it; reads with `weights_only=True`.

    At every moment the file of a given name is the old or the new checkpoint, even after a kill or a power cut.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write `checkpoint` to `path`."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with atomic_file(path) as file:
                torch.save(checkpoint, file)
        except RuntimeError as error:  # torch's error for a failed write
            reason = str(error).splitlines()[0]
            raise OSError(f"checkpoint {path} could not be written (is the disk full?): {reason}") from error

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        """Read the checkpoint at `path` onto the CPU; it may hold only tensors and plain values."""
        return load_checkpoint(path)

    def remove_checkpoint(self, path: Any) -> None:
        """Delete the file."""
        Path(path).unlink(missing_ok=True)


def load_checkpoint(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a Lightning checkpoint from `path` onto the CPU, with `weights_only=True`.

    Raises:
        CheckpointError: the file is missing, cut off or damaged, holds more than tensors and plain values, or is not a
            Lightning checkpoint.
    """
    try:
        checkpoint = load_tensors(path, "checkpoint")
    except DamagedFileError as error:
        raise CheckpointError(str(error)) from error
    if not isinstance(checkpoint, dict) or not isinstance(checkpoint.get("state_dict"), dict):
        raise CheckpointError(f"checkpoint {path}: not written by qconv train (it has no 'state_dict')")
    return checkpoint
