"""The files of `qconv data prepare`: tar files of images, and an index of where each image lies in them.

A tar file holds `<key>.cls`, the number of the class, beside `<key>.ppm`, pixels as they are, or `<key>.jpg`: the
format of WebDataset, which other programs read, too. It is not compressed as a whole, so any image can be read alone.
"""

import io
import shlex
import tarfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

import torch
from torch import Tensor

from ..ground.files import DamagedFileError, atomic_file, load_tensors
from .shard_index import ShardError

INDEX = "index.pt"
SETTINGS = "settings.json"
VERSION = 1  # of the index
Form = Literal["raw", "jpeg"]
SUFFIX: dict[Form, str] = {"raw": "ppm", "jpeg": "jpg"}


class Stored(NamedTuple):
    """The N images of a split.

    Attributes:
        files: names of the tar files.
        sizes: their bytes.
        labels: `(N,)`, the classes.
        file: `(N,)`, which of the files an image lies in.
        offset: `(N,)`, where its pixels begin there, or its JPEG file.
        length: `(N,)`, the bytes of the pixels, or of the JPEG file.
        shape: `(N, 2)`, height and width of pixels; 0 for JPEG files.
    """

    files: list[str]
    sizes: list[int]
    labels: Tensor
    file: Tensor
    offset: Tensor
    length: Tensor
    shape: Tensor


class Prepared(NamedTuple):
    """A folder of prepared images."""

    settings: dict[str, Any]
    classes: list[str]
    splits: dict[str, Stored]


def write_tar(file: BinaryIO, pictures: Iterable[tuple[str, bytes, int]], suffix: str) -> None:
    """Write a key, the bytes of an image's file and its class for each image."""
    with tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for key, data, label in pictures:
            for name, content in ((f"{key}.cls", str(label).encode()), (f"{key}.{suffix}", data)):
                member = tarfile.TarInfo(name)
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))


def ppm(pixels: Tensor) -> bytes:
    """The PPM file of pixels `(3, H, W)`: a line with width and height, then the pixels as `(H, W, 3)`."""
    _, height, width = pixels.shape
    return f"P6\n{width} {height}\n255\n".encode() + pixels.permute(1, 2, 0).contiguous().numpy().tobytes()


def index(folder: Path, files: Sequence[str]) -> Stored:
    """Read where the images of some tar files lie."""
    labels: list[int] = []
    places: list[tuple[int, int, int, int, int]] = []
    for number, name in enumerate(files):
        path = folder / name
        try:
            with tarfile.open(path, "r:") as tar, path.open("rb") as bytes_of:
                for member in tar:
                    if member.name.endswith(".cls"):
                        bytes_of.seek(member.offset_data)
                        labels.append(int(bytes_of.read(member.size)))
                    else:
                        places.append((number, *_place(bytes_of, member)))
        except (tarfile.TarError, ValueError) as error:
            raise ShardError(f"{path}: damaged ({error}): remove it and prepare the images again") from error
    if len(labels) != len(places):
        raise ShardError(f"{folder}: {len(places)} images, but {len(labels)} classes: prepare the images again")
    file, offset, length, height, width = torch.tensor(places, dtype=torch.long).view(-1, 5).unbind(1)
    sizes = [(folder / name).stat().st_size for name in files]
    shape = torch.stack((height, width), 1)
    return Stored(list(files), sizes, torch.tensor(labels, dtype=torch.long), file, offset, length, shape)


def _place(file: BinaryIO, member: tarfile.TarInfo) -> tuple[int, int, int, int]:
    """Offset, bytes, height and width."""
    if not member.name.endswith(".ppm"):
        return member.offset_data, member.size, 0, 0
    file.seek(member.offset_data)
    width, height = map(int, file.read(32).split()[1:3])
    length = 3 * height * width
    return member.offset_data + member.size - length, length, height, width


def write_index(folder: Path, prepared: Prepared) -> None:
    """Write the index, whose presence says that all images are there."""
    splits = {name: tuple(stored) for name, stored in prepared.splits.items()}
    content = {"version": VERSION, "settings": prepared.settings, "classes": prepared.classes, "splits": splits}
    with atomic_file(folder / INDEX) as file:
        torch.save(content, file)


def read_index(folder: Path) -> Prepared:
    """Read the index, and look whether the files are those that it names."""
    path = folder / INDEX
    if not path.is_file():
        what, source, target = "there is no such folder", "SOURCE", shlex.quote(str(folder))
        if (folder / SETTINGS).is_file():
            what = "it is not finished: run the command again"
        elif folder.is_dir():
            what, source, target = "its images are not prepared", target, "NEW_FOLDER"
        raise FileNotFoundError(f"data.root (={folder}): {what} (qconv data prepare {source} {target})")
    content = load_tensors(path, "index")
    if not isinstance(content, dict) or content.get("version") != VERSION:
        raise DamagedFileError(f"index {path}: not written by this version of qconv: prepare the images again")
    splits = {name: Stored(*fields) for name, fields in content["splits"].items()}
    for stored in splits.values():
        for name, size in zip(stored.files, stored.sizes, strict=True):
            found = (folder / name).stat().st_size if (folder / name).is_file() else None
            if found != size:
                has = "is missing" if found is None else f"has {found:,} bytes instead of {size:,}"
                raise ShardError(f"{folder / name} {has}: remove {INDEX} and it, and prepare the images again")
    return Prepared(content["settings"], content["classes"], splits)
