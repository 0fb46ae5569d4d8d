"""Prepares large images once, so that training reads them several times as fast: what `qconv data prepare` does."""

import io
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor

from ..ground.checks import check_at_least_one, check_choice, check_pixel_range
from ..ground.files import atomic_file, write_file
from ..ground.progress import shown, terminal
from ..images import DecodingError, PixelRange, ReadingError, decode, opened
from .image_folder import Broken, BrokenPictureError, cores
from .loader import ahead
from .prepared_files import INDEX, SETTINGS, SUFFIX, Form, Prepared, index, ppm, read_index, write_index, write_tar
from .tree import Files, Tree, fingerprint, scan

LONGEST_JPEG = 65_500  # as in libjpeg
SEED = 0  # of the order in which training images are written, for those who stream the files


def prepare_pictures(
    source: str | Path,
    folder: str | Path,
    *,
    size: int = 256,
    form: Form = "raw",
    quality: int = 90,
    pictures_per_file: int = 1000,
    pixel_range: Sequence[float] | None = None,
    broken: Broken = "fatal",
) -> Prepared:
    """Write the images of a tree into tar files, resized to a shorter side of ``size`` pixels if theirs is longer.

    Threads decode them, one a core. A file takes its name when it is complete, and the index is written last; after an
    interruption the same call writes what is missing. The bytes are a function of the images and the arguments.

    Args:
        source: ``train/<class>/*`` and ``test/<class>/*``, ``val/<class>/*`` or both.
        folder: where the files go; new, empty, or begun with the same images and arguments.
        size: the shorter side.
        form: ``"raw"`` for pixels as they are, ``3 H W`` bytes an image; ``"jpeg"`` for about a tenth of that, whose
            decoding takes longer. JPEG files that are small enough are copied as they are.
        quality: of JPEG, 1 to 100.
        pictures_per_file: images in a tar file.
        pixel_range: as in `ImageFolderDataModule`.
        broken: as in `ImageFolderDataModule`.

    Returns:
        the index.

    Raises:
        ValueError: an argument out of range.
        FileNotFoundError: ``source`` is not such a tree.
        FileExistsError: ``folder`` holds something else, or lacks images that may not be left out.
        BrokenPictureError: a file that is no whole image, or a class without a whole training image.
    """
    check_at_least_one(size=size, pictures_per_file=pictures_per_file)
    check_choice("form", form, *SUFFIX)
    if not 1 <= quality <= 100:
        raise ValueError(f"quality (={quality}) must be from 1 to 100")
    check_choice("broken", broken, "fatal", "skip")
    source, folder = Path(source).expanduser(), Path(folder).expanduser()
    tree = scan(source, called="source")
    for line in tree.told:
        terminal().print(line, soft_wrap=True)
    settings: dict[str, Any] = {"size": size, "form": form, "pictures_per_file": pictures_per_file}
    if form == "jpeg":
        settings["quality"] = quality
    if (values := check_pixel_range(pixel_range)) is not None:
        settings["pixel_range"] = list(values)
    settings["source"] = fingerprint(source, tree, "")
    begin(folder, settings)
    if (folder / INDEX).is_file():
        prepared = read_index(folder)
        check_nothing_left_out(folder, prepared, tree, broken)
        return prepared
    encode = partial(picture_file, size=size, form=form, quality=quality, pixel_range=values)
    parts: list[Part] = []
    for name, files in tree.splits.items():
        if name == "train":  # without runs of one class
            order = torch.randperm(len(files), generator=torch.Generator().manual_seed(SEED))
            files = [files[number] for number in order.tolist()]
        for number, first in enumerate(range(0, len(files), pictures_per_file)):
            parts.append(Part(f"{name}-{number:05d}.tar", first, files[first : first + pictures_per_file]))
    total = sum(map(len, tree.splits.values()))
    with one_thread_each(), ThreadPoolExecutor(cores()) as pool:
        for part in shown(parts, f"preparing {folder}", total, lambda part: len(part.files)):
            if not (folder / part.name).is_file():
                with atomic_file(folder / part.name) as file:
                    write_tar(file, part.pictures(pool, encode, broken), SUFFIX[form])
    names = {name: [part.name for part in parts if part.name.startswith(f"{name}-")] for name in tree.splits}
    prepared = Prepared(settings, tree.classes, {name: index(folder, names[name]) for name in tree.splits})
    check_nothing_left_out(folder, prepared, tree, broken)
    left = Counter(prepared.splits["train"].labels.tolist())
    if empty := [name for label, name in enumerate(tree.classes) if not left[label]]:
        raise BrokenPictureError(f"class {empty[0]!r} has no readable training image")
    write_index(folder, prepared)
    return prepared


@contextmanager
def one_thread_each() -> Iterator[None]:
    """Context manager: torch computes with one thread, of which there are as many as cores already."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def begin(folder: Path, settings: dict[str, Any]) -> None:
    """Write the settings into a new folder, or compare them with those of one that was begun."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / SETTINGS
    if not path.is_file():
        if others := [other.name for other in folder.iterdir() if not other.name.startswith(".")]:
            raise FileExistsError(f"{folder} holds other files ({others[0]}): name a new folder")
        write_file(path, json.dumps(settings, indent=2))
        return
    try:
        found = json.loads(path.read_text())
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise FileExistsError(f"{path} is damaged: remove {folder}, or name a new folder")
    if found != settings:
        other = next(key for key in {**settings, **found} if settings.get(key) != found.get(key))
        differs = (
            "was prepared from other images, or they have changed since"
            if other == "source"
            else f"was prepared with {other}={found.get(other)}, not {settings.get(other)}"
        )
        raise FileExistsError(f"{folder} {differs}: remove it, or name a new folder")


def check_nothing_left_out(folder: Path, prepared: Prepared, tree: Tree, broken: Broken) -> None:
    """Raise a FileExistsError if an earlier call has left out images and this one must not.

    Their number tells it, not the settings: a call that ends at a broken image may go on by leaving it out.
    """
    count = sum(map(len, tree.splits.values()))
    missing = count - sum(len(stored.labels) for stored in prepared.splits.values())
    if missing and broken == "fatal":
        raise FileExistsError(
            f"{folder} was prepared with broken=skip, and lacks {missing} of {count} images: remove it, name a new "
            "folder, or leave them out again (--broken skip)"
        )


class Part(NamedTuple):
    """What one tar file holds: its name, the number of its first image in the split, and the images' files."""

    name: str
    first: int
    files: Files

    def pictures(
        self, pool: ThreadPoolExecutor, encode: Callable[[Path], bytes], broken: Broken
    ) -> Iterator[tuple[str, bytes, int]]:
        """Key, bytes and class of each image, made by the pool."""

        def one(path: Path) -> bytes | DecodingError:
            try:
                return encode(path)
            except DecodingError as error:
                return error

        encoded = ahead(pool, one, (path for path, _ in self.files), 4 * cores())
        for number, ((path, label), data) in enumerate(zip(self.files, encoded, strict=True), self.first):
            if isinstance(data, bytes):
                yield f"{number:08d}", data, label
            elif isinstance(data, ReadingError):
                raise BrokenPictureError(f"{path} can't be read ({data})")
            elif broken == "fatal":
                remedy = "repair or remove it, or leave out such files (--broken skip)"
                raise BrokenPictureError(f"{path} is damaged or not an image ({data}); {remedy}")
            else:
                terminal().print(f"left out: {path} ({data})", soft_wrap=True)


def picture_file(path: Path, size: int, form: Form, quality: int, pixel_range: PixelRange | None = None) -> bytes:
    """The bytes of a PPM or JPEG file of an image whose shorter side is at most ``size``."""
    image = decode(path, pixel_range=pixel_range)
    is_small = min(image.shape[1:]) <= size
    if form == "raw":
        return ppm(image if is_small else shrink(image, size))
    if is_small:
        with opened(path) as picture:
            if picture.format == "JPEG":
                return path.read_bytes()
    pixels = (image if is_small else shrink(image, size)).permute(1, 2, 0).contiguous()
    if max(pixels.shape) > LONGEST_JPEG:
        raise DecodingError(f"JPEG has no images of more than {LONGEST_JPEG} pixels a side")
    written = io.BytesIO()
    Image.fromarray(pixels.numpy()).save(written, "JPEG", quality=quality)
    return written.getvalue()


def shrink(image: Tensor, size: int) -> Tensor:
    """Resize the image to a shorter side of ``size``."""
    from torchvision.transforms.v2.functional import resize

    return resize(image, [size], antialias=True)
