"""Name the most probable classes of images.

The network is that of a run, of a packed model, or one that comes with qconv.
"""

import argparse
import glob
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ..ground.files import files_below
from ..ground.table import write_csv
from .source import add_model

HELP = "classify image files"
EXAMPLE = "qconv predict outputs/2026-01-31/12-00-00 cat.jpg *.png"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_model(parser)
    parser.add_argument("pictures", metavar="IMAGE", nargs="+", help="image files, folders of them, or patterns")
    parser.add_argument("--top", type=int, default=3, help="how many classes of each image (default: 3)")
    parser.add_argument("--json", action="store_true", help="print a line of JSON for each image")
    parser.add_argument("--csv", metavar="FILE", type=Path, help="also write a row for each image to a CSV file")
    parser.set_defaults(run=run, more="pictures")


def run(options: argparse.Namespace) -> int:
    """Print a line for each image; return 1 if one can't be read."""
    from ..ground.progress import shown
    from ..images import DecodingError

    if options.top < 1:
        raise ValueError(f"--top (={options.top}) must be at least 1")
    predictor = options.model.predictor
    pictures = picture_files(options.pictures)
    width = max(map(len, pictures))
    rows: list[dict[str, Any]] = []
    unreadable = 0
    results = predictor.many(pictures, options.top)
    for path, guesses in results if sys.stdout.isatty() else shown(results, "naming images", len(pictures)):
        if isinstance(guesses, DecodingError):  # continue with the others
            print(f"qconv: error: {guesses}", file=sys.stderr)
            unreadable += 1
            rows.append({"picture": path, "error": str(guesses)})
            continue
        rows.append({"picture": path, **columns(guesses)})
        if options.json:
            print(json.dumps({"picture": path, "classes": [guess._asdict() for guess in guesses]}), flush=True)
        else:
            shares = "   ".join(f"{guess.label} {100 * guess.probability:.1f} %" for guess in guesses)
            print(f"{path:{width}}  {shares}", flush=True)
    if options.csv:
        write_csv(rows, options.csv)
    if unreadable and len(pictures) > 1:
        print(f"qconv: {unreadable} of {len(pictures)} images could not be read", file=sys.stderr)
    return int(unreadable > 0)


def columns(guesses: Iterable[Any]) -> dict[str, Any]:
    """Return the cells of an image's row: the classes and their probabilities."""
    cells = ((f"class_{n}", f"probability_{n}", guess) for n, guess in enumerate(guesses, 1))
    pairs = (((label, guess.label), (share, guess.probability)) for label, share, guess in cells)
    return dict(cell for pair in pairs for cell in pair)


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
    from ..images import readable_suffixes

    suffixes = readable_suffixes()
    files = sorted(path for path in files_below(folder) if path.suffix.lower() in suffixes and path.is_file())
    if not files:
        raise ValueError(f"{folder} holds no images: no file ends in .jpg, .png or another ending of an image")
    return [str(path) for path in files]
