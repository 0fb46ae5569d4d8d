"""Augmentation of whole batches, on their device.

Each augmentation is called with the images, `(N, C, H, W)` of any dtype, and a generator on the CPU, and returns new
images of the same dtype. Random numbers are drawn on the CPU, so a GPU sees the same images.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ground.checks import check_at_least_one, check_not_negative, check_numbers

Augment = Callable[[Tensor, torch.Generator], Tensor]


@dataclass(frozen=True)
class RandomCrop:
    """Pads each image and crops it back to its size, as torchvision's ``RandomCrop(size, padding)`` does.

    All ``(2 padding + 1)²`` shifts are equally likely.

    Args:
        padding: pixels on each side.
        fill: the value at the border; 0 is black.

    Raises:
        ValueError: ``padding`` is negative.
        TypeError: ``fill`` is not one number.
    """

    padding: int = 4
    fill: float = 0

    def __post_init__(self) -> None:
        check_not_negative(padding=self.padding)
        check_numbers(fill=self.fill)

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Return the shifted images."""
        if not self.padding:
            return images
        n, _, height, width = images.shape
        padded = F.pad(images, (self.padding,) * 4, value=self.fill)
        windows = padded.unfold(2, height, 1).unfold(3, width, 1)  # (N, C, 2 padding + 1, 2 padding + 1, H, W)
        drawn = torch.randint(0, 2 * self.padding + 1, (2, n), generator=generator, device="cpu")
        down, right = drawn.to(images.device)
        return windows[torch.arange(n, device=images.device), :, down, right]


@dataclass(frozen=True)
class RandomFlip:
    """Mirrors each image left to right with probability ``p``.

    Raises:
        ValueError: ``p`` is not from 0 to 1.
    """

    p: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.p <= 1:
            raise ValueError(f"p (={self.p}) must be from 0 to 1")

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Return the images, some mirrored."""
        flipped = torch.rand(len(images), generator=generator, dtype=torch.float32, device="cpu") < self.p
        chosen = flipped.nonzero().squeeze(1).to(images.device)  # cheaper than torch.where over all images
        return images.index_copy(0, chosen, images[chosen].flip(3))


@dataclass(frozen=True)
class Cutout:
    """Covers a square of each image; its centre may be any pixel (arXiv:1708.04552).

    Args:
        size: side of the square in pixels; parts of it may lie outside the image.
        fill: the value that covers it, one number or one for each channel; 0 is black. The paper's code covers with the
            mean of the images: 125, 123 and 114 on CIFAR-10.

    Raises:
        ValueError: ``size`` is less than 1.
    """

    size: int = 16
    fill: float | Sequence[float] = 0

    def __post_init__(self) -> None:
        check_at_least_one(size=self.size)

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Return the images, each with a square covered."""
        n, _, height, width = images.shape

        def covered(length: int) -> Tensor:
            centre = torch.randint(0, length, (n, 1), generator=generator, device="cpu").to(images.device)
            distance = torch.arange(length, device=images.device) - (centre - self.size // 2)
            return (distance >= 0) & (distance < self.size)

        rows, columns = covered(height), covered(width)
        fill = torch.as_tensor(self.fill, dtype=images.dtype, device=images.device).reshape(-1, 1, 1)
        return torch.where(rows[:, None, :, None] & columns[:, None, None, :], fill, images)


@dataclass(frozen=True)
class PerImage:
    """Calls a transform of torchvision, such as ``torchvision.transforms.v2.RandAugment()``, for image after image.

    Those transforms draw once for a whole batch: ``RandomHorizontalFlip`` would mirror all of its images or none. Here
    each image gets random numbers of its own. They follow from the generator, as long as the transform draws from
    torch's default generator of the CPU or from Python's, as those of torchvision do but for noise on a GPU. This takes
    time: the augmentations of `qconv.data` change whole batches at once.

    Args:
        transform: takes an image ``(C, H, W)``, here of uint8, and returns one of the same dtype; all get one size.

    Raises:
        TypeError: ``transform`` can't be called.
    """

    transform: Callable[[Tensor], Tensor]

    def __post_init__(self) -> None:
        if not callable(self.transform):
            raise TypeError(f"transform (={self.transform!r}) must be a function of an image")

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Return the transformed images."""
        seed = int(torch.randint(2**62, (), generator=generator, device="cpu"))
        state = random.getstate()
        try:
            random.seed(seed)
            with torch.random.fork_rng(devices=()):
                torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed GPUs, which are not forked
                return torch.stack([self.transform(image) for image in images]) if len(images) else images
        finally:
            random.setstate(state)


def check_augment(augment: Any) -> tuple[Augment, ...]:
    """Return the augmentations as a tuple."""
    if not isinstance(augment, Sequence) or isinstance(augment, str):
        raise TypeError(f"augment (={augment!r}) must be a list of augmentations, such as [qconv.data.RandomFlip()]")
    for each in augment:
        name = type(each).__name__
        if any(kind.__module__.startswith("torchvision.transforms") for kind in type(each).__mro__):
            raise TypeError(
                f"augment: {name} would draw once for a whole batch: use qconv.data.PerImage({name}(…)), in a config "
                "{_target_: qconv.data.PerImage, transform: {_target_: …}}"
            )
        if not callable(each):
            raise TypeError(f"augment: {each!r} must be a function of images (N, C, H, W) and a generator")
    return tuple(augment)


def augmented(images: Tensor, augment: Sequence[Augment], generator: torch.Generator) -> Tensor:
    """Return the images after all augmentations."""
    for each in augment:
        changed: Any = each(images, generator)
        if not isinstance(changed, Tensor) or changed.dtype != images.dtype or changed.shape[:2] != images.shape[:2]:
            is_tensor = isinstance(changed, Tensor)
            kind = f"{changed.dtype} of shape {tuple(changed.shape)}" if is_tensor else type(changed).__name__
            raise TypeError(
                f"augment: {each!r} must return {len(images)} images of {images.dtype} and {images.shape[1]} channels, "
                f"as it gets them, not {kind}; a transform of a single image goes into qconv.data.PerImage"
            )
        images = changed
    return images


def mean_and_std(images: Tensor) -> tuple[list[float], list[float]]:
    """Exact mean and standard deviation of each channel of uint8 images; the latter is 1 if all values are equal."""
    levels = torch.arange(256, dtype=torch.float64)
    means, stds = [], []
    for channel in images.unbind(1):
        counts = torch.zeros(256, dtype=torch.float64)
        for part in channel.split(4096):
            counts += torch.bincount(part.flatten(), minlength=256)
        mean = float((counts * levels).sum() / counts.sum())
        std = float(((counts * (levels - mean) ** 2).sum() / counts.sum()).sqrt())
        means.append(mean)
        stds.append(std if std > 0 else 1.0)
    return means, stds
