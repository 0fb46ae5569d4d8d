"""Base of data modules with large images, decoded and cropped by worker processes while the network trains."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ..ground.checks import check_at_least_one, check_choice, check_not_negative
from ..ground.progress import terminal
from ..images import DecodingError, Normalize, PixelRange, ReadingError, centre_crop, resize_bytes
from .image_folder import Broken, BrokenPictureError, cores
from .loader import EpochLoader, EpochOrder, SplitsDataModule

MEAN, STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)
"""ImageNet's mean and deviation for pixels from 0 to 255, as in all published networks."""

AREA, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)
"""Of random crops: the share of the area, and width over height."""

Item = tuple[int, int]
"""An epoch, and the number of an image."""
Batch = tuple[Tensor, Tensor, list[DecodingError]]
"""Images, labels, and the problems with others."""


class LargePicturesDataModule(SplitsDataModule):
    """Large images, which a subclass loads as batches of uint8 pixels, labels, and problems with other files.

    Training images are cropped at random (8 to 100 % of the area, aspect ratio 3/4 to 4/3), resized and mirrored at
    random, as for Inception; validation and test images are resized and cropped at the centre. All this is done on
    uint8 pixels; on the device they are normalized with ImageNet's mean and deviation. The treatment of an image is a
    function of (seed, epoch, image) alone. Formats and modes are those of `qconv.images`: grey, palette, CMYK and
    16-bit images become RGB of 8 bits, by `pixel_range`. A JPEG file whose bytes are wrong but complete cannot be
    recognized as damaged.

    Args:
        image_size: side of the images.
        resize: shorter side before the crop at the centre.
        workers: number of decoding processes, at most one per core; None means one per core.
        broken: what to do with files that cannot be decoded: ``"fatal"`` names the first in an error, ``"skip"`` leaves
            them out, and names and counts them.
        seed: seed of the order and augmentation of the training images.
        batch_size: largest batch of one process.

    Raises:
        ValueError: an argument out of range.
        BrokenPictureError: a file that cannot be decoded.
    """

    in_channels = 3
    pixel_range: PixelRange | None = None

    def __init__(
        self,
        *,
        image_size: int = 224,
        resize: int = 256,
        workers: int | None = None,
        broken: Broken = "fatal",
        seed: int = 0,
        batch_size: int = 256,
    ) -> None:
        super().__init__()
        check_at_least_one(image_size=image_size, batch_size=batch_size)
        if resize < image_size:
            raise ValueError(f"resize (={resize}) must be at least image_size (={image_size})")
        check_not_negative(workers=workers or 0)
        check_choice("broken", broken, "fatal", "skip")
        self.image_size, self.resize = (image_size, image_size), resize
        self.workers = cores() if workers is None else min(workers, cores())
        self.broken, self.seed, self.batch_size = broken, seed, batch_size
        self.normalize = Normalize(MEAN, STD)
        self.left_out: list[str] = []

    def crop(self, *, train: bool) -> "Crop":
        """Return the function that crops the images."""
        return Crop(self.image_size[0], self.resize, self.seed if train else None)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> tuple[Tensor, Tensor]:
        """Report the images that are left out, or end the run."""
        del dataloader_idx
        images, labels, problems = batch
        for problem in problems:
            if isinstance(problem, ReadingError):
                raise BrokenPictureError(str(problem))
            if self.broken == "fatal":
                raise BrokenPictureError(f"{problem}; repair or remove it, or leave out such files by data.broken=skip")
            if str(problem) not in self.left_out:
                self.left_out.append(str(problem))
                terminal().print(f"left out ({len(self.left_out)} so far): {problem}")
        if problems and not len(labels):
            raise BrokenPictureError(f"no image of a batch of {len(problems)} could be decoded: {problems[0]}")
        return images, labels

    def on_after_batch_transfer(self, batch: tuple[Tensor, Tensor], dataloader_idx: int) -> tuple[Tensor, Tensor]:
        """Normalize on the device."""
        del dataloader_idx
        images, labels = batch
        return self.normalize(images), labels


class Box(NamedTuple):
    """A part of an image, and whether it is mirrored."""

    top: int
    left: int
    height: int
    width: int
    is_mirrored: bool


class Crop:
    """Cuts an image to `(3, size, size)`: at random by (seed, epoch, number), or without a seed at the centre."""

    def __init__(self, size: int, resize: int, seed: int | None) -> None:
        self.size, self.resize, self.seed = size, resize, seed

    def __call__(self, image: Tensor, epoch: int, number: int) -> Tensor:
        """Crop the image `(3, H, W)` with this number."""
        _, height, width = image.shape
        box = self.box(height, width, epoch, number)
        if box is None:
            return centre_crop(image, self.size, self.resize)
        return self.cut(image[:, box.top : box.top + box.height], box)

    def box(self, height: int, width: int, epoch: int, number: int) -> Box | None:
        """Return which part of an image to take at random, or None if it is to be cropped at the centre."""
        if self.seed is None:
            return None
        mixed = (self.seed * 1_000_003 + epoch) * 1_000_003 + number
        return random_box(height, width, torch.Generator().manual_seed(mixed % 2**63))

    def cut(self, rows: Tensor, box: Box) -> Tensor:
        """Resize the part of an image, given the rows of the box, `(3, box.height, W)`."""
        part = rows[None, :, :, box.left : box.left + box.width]
        # In this memory format bytes are resized in two thirds of the time, the copy included.
        part = part.contiguous(memory_format=torch.channels_last)
        crop = resize_bytes(part, (self.size, self.size))[0]
        return crop.flip(2) if box.is_mirrored else crop


def random_box(height: int, width: int, generator: torch.Generator) -> Box:
    """Return a random part of an image, to be resized to a square and mirrored at random: Inception's crop."""
    # In four calls it took 3 times as long.
    drawn = torch.rand(23, generator=generator, dtype=torch.float32, device="cpu")
    *tries, y, x, mirror = drawn.tolist()
    for share, position in zip(tries[::2], tries[1::2], strict=True):
        target = height * width * (AREA[0] + (AREA[1] - AREA[0]) * share)
        aspect = RATIO[0] * (RATIO[1] / RATIO[0]) ** position  # evenly in the logarithm
        w, h = round((target * aspect) ** 0.5), round((target / aspect) ** 0.5)
        if 0 < w <= width and 0 < h <= height:
            break
    else:  # the whole image, as far as the ratio allows, or the centre of it
        w, h = min(width, round(height * RATIO[1])), min(height, round(width / RATIO[0]))
        return Box((height - h) // 2, (width - w) // 2, h, w, mirror < 0.5)
    return Box(int(y * (height - h + 1)), int(x * (width - w + 1)), h, w, mirror < 0.5)


def collate(items: Sequence[tuple[Tensor, int] | DecodingError]) -> Batch:
    """Return images and labels as tensors, and the problems of the others."""
    whole = [item for item in items if not isinstance(item, DecodingError)]
    problems = [item for item in items if isinstance(item, DecodingError)]
    pixels = [image.permute(1, 2, 0) for image, _ in whole]  # channels last, as crops are: to turn them is slow
    images = (torch.stack(pixels) if pixels else torch.empty(0, 1, 1, 3, dtype=torch.uint8)).permute(0, 3, 1, 2)
    return images, torch.tensor([label for _, label in whole], dtype=torch.long), problems


def one_thread(worker: int) -> None:
    """Have a worker process decode with one thread."""
    del worker
    torch.set_num_threads(1)


class CroppingLoader(EpochLoader):
    """Batches of images that `workers` processes read and crop (0: this process)."""

    def __init__(self, sampler: EpochOrder, pictures: Dataset[Any], workers: int) -> None:
        super().__init__(sampler)
        self.order = EpochBatches(sampler)
        self.loader = DataLoader(
            pictures,
            batch_sampler=self.order,
            collate_fn=collate,
            num_workers=workers,
            pin_memory=torch.cuda.is_available(),
            persistent_workers=workers > 0,
            worker_init_fn=one_thread,
            generator=torch.Generator(),  # otherwise it would use dropout's generator
        )

    def batches(self, start: int) -> Iterator[Any]:
        self.order.start = start
        yield from self.loader


class EpochBatches:
    """The batches of an `EpochOrder`, starting at number `start`, as lists of `Item`."""

    def __init__(self, order: EpochOrder) -> None:
        self.order, self.start = order, 0

    def __iter__(self) -> Iterator[list[Item]]:
        for indices in self.order.parts(self.start):
            yield [(self.order.epoch, index) for index in indices.tolist()]
