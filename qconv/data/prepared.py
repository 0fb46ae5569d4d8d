"""Large images that `qconv data prepare` has made ready: read from their places in large files, and cropped."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ..ground.checks import check_choice, check_pixel_range
from ..images import DecodingError, decode
from .large import Batch, Crop, LargePicturesDataModule, collate
from .loader import EpochLoader, EpochOrder, ahead, epoch_order, split_of
from .on_device import decode_on, decodes
from .pictures import share_out
from .prepared_files import Prepared, Stored, read_index


class PreparedDataModule(LargePicturesDataModule):
    """Images in a folder that ``qconv data prepare`` has written.

    Raw images need no decoding: what is left is to crop and resize them. The crops of training images are cut from
    the stored images, which are smaller than the originals; where a crop covers little of an image, it shows less
    detail than one of `ImageNetDataModule`.

    With ``decode="device"`` a GPU of NVIDIA decodes and crops JPEG files, and the threads only read them. Its decoder's
    pixels differ a little from the CPU's. On other devices the threads decode as ever.

    If there is no `val`, a fixed part of the training images is used for validation.

    Args:
        root: the folder.
        val_size: number or share of the training images used for validation.
        split_seed: chooses these images.
        decode: ``"cpu"``, or ``"device"`` for images that were prepared as JPEG files.
        options: those of `LargePicturesDataModule`; `workers` counts threads.

    Raises:
        FileNotFoundError: `root` was not prepared, or not to its end.
        ShardError: one of its files is missing or was changed.
        ValueError: `resize` is larger than the stored images, `decode` is "device" for pixels, which need no decoding,
            or an argument is out of range.
    """

    def __init__(
        self,
        root: str,
        *,
        val_size: float = 0.01,
        split_seed: int = 0,
        decode: Literal["cpu", "device"] = "cpu",
        **options: Any,
    ) -> None:
        super().__init__(**options)
        check_choice("decode", decode, "cpu", "device")
        self.root = Path(root).expanduser()
        self.prepared: Prepared = read_index(self.root)
        size = self.prepared.settings["size"]
        if self.resize > size:
            raise ValueError(
                f"resize (={self.resize}) must be at most {size}, the shorter side of the images in {self.root}"
            )
        if decode == "device" and self.prepared.settings["form"] == "raw":
            raise ValueError(
                "decode (='device') is for JPEG files (qconv data prepare --form jpeg): "
                f"the pixels in {self.root} need no decoding"
            )
        self.decode: Literal["cpu", "device"] = decode
        self.pixel_range = check_pixel_range(self.prepared.settings.get("pixel_range"))  # that of the original files
        self.classes, self.num_classes = self.prepared.classes, len(self.prepared.classes)
        self.val_size, self.split_seed = val_size, split_seed
        self.splits: dict[str, tuple[Stored, Tensor]] = {}

    def setup(self, stage: str) -> None:
        """Assign the images to the splits."""
        del stage
        stored = self.prepared.splits
        self.splits = {name: (of, torch.arange(len(of.labels), device="cpu")) for name, of in stored.items()}
        if "val" not in stored:
            taken = share_out(stored["train"].labels, self.val_size, self.split_seed)
            self.splits["train"] = stored["train"], (~taken).nonzero().squeeze(1)
            self.splits["val"] = stored["train"], taken.nonzero().squeeze(1)

    def loader(self, name: str, *, train: bool) -> "ThreadedLoader":
        """The images of the split."""
        stored, chosen = split_of(self.splits, name)
        pictures = PreparedPictures(self.root, stored, chosen, self.crop(train=train))
        # Elsewhere, as when a run is evaluated on a CPU, the threads decode.
        is_later = self.decode == "device" and self.trainer is not None and decodes(self.trainer.strategy.root_device)
        make = pictures.encoded if is_later else pictures.batch
        return ThreadedLoader(epoch_order(self, len(chosen), name, shuffle=train), make, self.workers)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> tuple[Tensor, Tensor]:
        """Decode the images on the device if they are not yet; report those that are left out, or end the run."""
        if isinstance(batch, Encoded) and self.trainer is not None:
            batch = batch.decoded(self.trainer.strategy.root_device)
        return super().on_before_batch_transfer(batch, dataloader_idx)


class Encoded(NamedTuple):
    """A batch of images that are not decoded yet."""

    files: list[bytes | DecodingError]
    places: list[str]
    labels: list[int]
    numbers: list[int]
    epoch: int
    crop: Crop

    def decoded(self, device: torch.device) -> Batch:
        """Return the images on the device, as `PreparedPictures.batch` does."""
        decoded = iter(decode_on(device, [file for file in self.files if isinstance(file, bytes)]))
        items: list[tuple[Tensor, int] | DecodingError] = []
        for file, place, label, number in zip(self.files, self.places, self.labels, self.numbers, strict=True):
            image = next(decoded) if isinstance(file, bytes) else file
            try:
                if isinstance(image, DecodingError):
                    raise image
                items.append((self.crop(image, self.epoch, number), label))
            except DecodingError as error:
                items.append(_damaged(place, error))
        return collate(items)


class ThreadedLoader(EpochLoader):
    """Batches that a method of `PreparedPictures` makes, in `workers` threads (0: in this one).

    Not by processes: there is hardly any Python to run for an image, and to hand over a batch would take half as long
    as to make it.
    """

    def __init__(self, sampler: EpochOrder, make: Callable[[int, Tensor], Batch | Encoded], workers: int) -> None:
        super().__init__(sampler)
        self.make, self.workers = make, workers

    def batches(self, start: int) -> Iterator[Batch | Encoded]:
        make = partial(self.make, self.sampler.epoch)
        if not self.workers:
            yield from map(make, self.sampler.parts(start))
            return
        threads = torch.get_num_threads()
        with ThreadPoolExecutor(self.workers, "crop", initializer=torch.set_num_threads, initargs=(1,)) as pool:
            for batch in ahead(pool, make, self.sampler.parts(start), 2 * self.workers):
                torch.set_num_threads(threads)  # the number for other threads that begin: the pool has set it to 1
                yield batch


class PreparedPictures:
    """Stored and cropped images."""

    def __init__(self, folder: Path, stored: Stored, chosen: Tensor, crop: Crop) -> None:
        self.stored, self.chosen, self.crop = stored, chosen, crop
        self.paths = [folder / name for name in stored.files]

    def batch(self, epoch: int, numbers: Tensor) -> Batch:
        """The images with these numbers in an epoch, channels last, their labels, and the problems with others."""
        indices, size, stored = self.chosen[numbers], self.crop.size, self.stored
        images = torch.empty(len(indices), size, size, 3, dtype=torch.uint8).permute(0, 3, 1, 2)
        buffer = torch.empty(int(stored.length[indices].max()) if len(indices) else 0, dtype=torch.uint8)
        fields: Any = (
            numbers,
            *(field[indices] for field in (stored.file, stored.offset, stored.length, stored.shape)),
        )
        whole: list[int] = []
        problems: list[DecodingError] = []
        rows = zip(*(field.tolist() for field in fields), strict=True)
        for position, (number, file, offset, length, shape) in enumerate(rows):
            try:
                images[len(whole)] = self._crop(self.paths[file], offset, buffer[:length], shape, epoch, number)
            except DecodingError as error:
                problems.append(_damaged(self._place(file, offset), error))
            else:
                whole.append(position)
        images, labels = images[: len(whole)], stored.labels[indices[whole]]
        return images.pin_memory() if torch.cuda.is_available() else images, labels, problems

    def encoded(self, epoch: int, numbers: Tensor) -> Encoded:
        """The files of the images with these numbers in an epoch."""
        indices, stored = self.chosen[numbers], self.stored
        files: list[bytes | DecodingError] = []
        places: list[str] = []
        rows = zip(*(field[indices].tolist() for field in (stored.file, stored.offset, stored.length)), strict=True)
        for file, offset, length in rows:
            places.append(self._place(file, offset))
            try:
                content = _read(self.paths[file], offset, torch.empty(length, dtype=torch.uint8))
            except DecodingError as error:
                files.append(error)
            else:
                files.append(content.numpy().tobytes())
        return Encoded(files, places, stored.labels[indices].tolist(), numbers.tolist(), epoch, self.crop)

    def _place(self, file: int, offset: int) -> str:
        return f"{self.paths[file]}: the image at byte {offset}"

    def _crop(self, path: Path, offset: int, buffer: Tensor, shape: tuple[int, int], epoch: int, number: int) -> Tensor:
        """Read an image into the buffer, of pixels only the rows of the crop, and crop it."""
        height, width = shape
        if not height:
            return self.crop(decode(_read(path, offset, buffer).numpy().tobytes()), epoch, number)
        box = self.crop.box(height, width, epoch, number)
        top, rows = (0, height) if box is None else (box.top, box.height)
        line = 3 * width
        pixels = _read(path, offset + top * line, buffer[: rows * line]).view(rows, width, 3).permute(2, 0, 1)
        return self.crop(pixels, epoch, number) if box is None else self.crop.cut(pixels, box)


def _damaged(place: str, error: DecodingError) -> DecodingError:
    return type(error)(f"{place} is damaged ({error})")


def _read(path: Path, offset: int, content: Tensor) -> Tensor:
    """Fill the bytes from a place in a file.

    Not mapped: a file that is cut off meanwhile would kill the process, and a copy costs less than the crop.
    """
    with path.open("rb", buffering=0) as file:
        file.seek(offset)
        if file.readinto(content.numpy().data) != len(content):
            raise DecodingError("the file is cut off")
    return content
