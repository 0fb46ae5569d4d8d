"""Folders of classes: the images in them, and what is said of everything else."""

import unicodedata
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from ..ground.checks import some
from ..ground.files import files_below
from ..images import HEIF_REMEDY, HEIF_SUFFIXES, readable_suffixes

NO_PICTURES = ("thumbs.db", "desktop.ini")
"""What operating systems leave beside images."""
WITHIN = "images"
"""The folder in which Tiny-ImageNet has the images of a class, and those of a split whose classes a file lists."""


def by_class(folder: Path) -> tuple[dict[str, list[Path]], list[Path]]:
    """Return the images of each class in a folder of classes, in order, and the folders in which they are.

    Those in nested folders are read, too, unless all are there: then classes may lie deeper.
    """
    folders = sorted(path for path in folder.iterdir() if is_seen(path))
    lines = folder / f"{folder.name}_annotations.txt"
    found: dict[str, list[Path]] = {}
    if [each.name for each in folders] == [WITHIN] and lines.is_file():
        for line in filter(None, lines.read_text("utf-8", "backslashreplace").splitlines()):
            name, label = (*line.split("\t"), "")[:2]
            found.setdefault(label, []).append(folder / WITHIN / name)
        named = Counter(path.name for paths in found.values() for path in paths)
        if twice := next((name for name, count in named.items() if count > 1), None):
            raise ValueError(f"{lines} names {twice} more than once")
        if left := [path.name for path in pictures_in(folder / WITHIN) if path.name not in named]:
            raise ValueError(
                f"{lines} names no class of {left[0]}, one of {len(left)} such images in {folder / WITHIN}"
            )
        return dict(sorted(found.items())), []
    places = [_place(each) for each in folders]
    read = pictures_below if any(map(pictures_in, places)) else pictures_in
    for each, place in zip(folders, places, strict=True):
        found.setdefault(unicodedata.normalize("NFC", each.name), []).extend(read(place))
    return dict(sorted(found.items())), places


def _place(folder: Path) -> Path:
    """The folder in which the images of a class are."""
    within = folder / WITHIN
    return within if within.is_dir() and not pictures_in(folder) else folder


def no_names(unnamed: Sequence[str]) -> str:
    """Say of which splits nothing names the classes of the images."""
    places, lists = (
        ", ".join(form.format(name) for name in unnamed) for form in ("{0}/images", "{0}/{0}_annotations.txt")
    )
    return f"images lie deeper, in {places}, and neither folders nor {lists} name their classes"


def deeper(root: Path, called: str) -> str:
    """Say where below ``root`` images lie deeper than in its folders."""
    for pattern in ("*/*", "*/*/*"):
        for folder in sorted(root.glob(pattern)):
            if is_seen(folder) and pictures_in(folder):
                alone = len([*filter(is_seen, root.iterdir())]) == 1
                above = root / folder.relative_to(root).parts[0]
                return f"; images lie deeper, in {folder}" + (f": give {called}={above}" if alone else "")
    return ""


def is_seen(path: Path) -> bool:
    """Whether it is a folder, and not a hidden one."""
    return path.is_dir() and not path.name.startswith(".")


def no_class(empty: Sequence[str]) -> tuple[str, ...]:
    """Say which folders are no class, as they hold no images."""
    return (f"no images in {some(empty)}, which {'is' if len(empty) == 1 else 'are'} no class",) if empty else ()


def pictures_in(folder: Path) -> list[Path]:
    """The files of a folder that should be images, in order."""
    suffixes = readable_suffixes()
    return sorted(
        path for path in folder.iterdir() if path.suffix.lower() in suffixes and not path.name.startswith(".")
    )


def pictures_below(folder: Path) -> list[Path]:
    """The files of a folder and its subfolders that should be images, in order."""
    suffixes = readable_suffixes()
    return sorted({*pictures_in(folder), *(path for path in files_below(folder) if path.suffix.lower() in suffixes)})


def left_out(folders: Sequence[Path], tops: Sequence[Path]) -> tuple[str, ...]:
    """Say which nested folders are read, which images are beside the folders of classes, and count the other files."""
    suffixes = readable_suffixes()
    files = [path for folder in folders if folder.is_dir() for path in files_below(folder)]
    within = {path.parent: None for path in files if path.suffix.lower() in suffixes and path.parent not in folders}
    told = [f"images in nested folders are read, too: {some(sorted(map(str, within)))}"] if within else []
    loose = [str(path) for top in tops for path in pictures_in(top) if path.is_file()]
    if loose:
        told.append(f"left out: {some(loose)}, beside the folders of classes")
    others = [path for path in files if path.suffix.lower() not in suffixes and path.name.lower() not in NO_PICTURES]
    parts = []
    for kind, count in Counter(path.suffix.lower() or "without a suffix" for path in others).most_common():
        remedy = f" ({HEIF_REMEDY} to read them)" if kind in HEIF_SUFFIXES else ""
        parts.append(f"{count} {kind}{remedy}")
    return (*told, f"left out: {', '.join(parts)}") if parts else tuple(told)
