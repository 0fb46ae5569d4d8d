"""Make images ready for training: decode and resize them once, read them often."""

import argparse
import shlex
from pathlib import Path

HELP = "prepare large images for fast training"
EXAMPLE = "qconv data prepare imagenet imagenet-256"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand and its arguments."""
    kinds = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    parser = kinds.add_parser(
        "prepare",
        help="decode and resize large images once",
        description=_prepare.__doc__,
        epilog="example: qconv data prepare imagenet imagenet-256",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("source", metavar="SOURCE", help="train/<class>/* and val/<class>/*, test/<class>/* or both")
    parser.add_argument("folder", metavar="FOLDER", help="where the tar files go: a new folder")
    parser.add_argument("--size", type=int, default=256, help="shorter side in pixels")
    parser.add_argument(
        "--form", choices=["raw", "jpeg"], default="raw", help="pixels as they are, or JPEG: smaller, slower to read"
    )
    parser.add_argument("--quality", type=int, default=90, help="of JPEG, 1 to 100")
    parser.add_argument("--pictures-per-file", type=int, default=1000, metavar="COUNT", help="images in a tar file")
    parser.add_argument(
        "--pixel-range",
        nargs=2,
        type=float,
        metavar=("LOW", "HIGH"),
        help="for grey images of more than 8 bits: the pixel values of black and white, such as 0 4095 for 12 bits "
        "in 16 (default: those of the image's format)",
    )
    parser.add_argument(
        "--broken",
        choices=["fatal", "skip"],
        default="fatal",
        help="damaged or incomplete image files: stop with an error, or skip them",
    )
    parser.set_defaults(run=_prepare)


def _prepare(options: argparse.Namespace) -> int:
    """Write the images of SOURCE into tar files in FOLDER.

    They are resized to a shorter side of --size pixels if theirs is longer. data=prepared reads them several times
    as fast in training. After an interruption, the same command continues. The files have the format of WebDataset.
    """
    from ..data.prepare import prepare_pictures
    from ..training.resume import override

    folder = Path(options.folder).expanduser()
    prepared = prepare_pictures(
        options.source,
        folder,
        size=options.size,
        form=options.form,
        quality=options.quality,
        pictures_per_file=options.pictures_per_file,
        pixel_range=options.pixel_range,
        broken=options.broken,
    )
    splits = prepared.splits
    counts = ", ".join(f"{len(stored.labels):,} {name}" for name, stored in splits.items())
    files = sum(len(stored.files) for stored in splits.values())
    size = sum(sum(stored.sizes) for stored in splits.values())
    print(f"{folder}: {counts} images of {len(prepared.classes)} classes in {files} files, {size / 1e6:,.1f} MB")
    print(f"train with them: {shlex.join(['qconv', 'train', 'data=prepared', f'data.root={override(str(folder))}'])}")
    return 0
