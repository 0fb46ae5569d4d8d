"""Augmentation of whole batches, on their device.

Each augmentation is called with the images, `(N, C, H, W)` of any dtype, and a generator on the CPU, and returns new
images of the same dtype. Random numbers are drawn on the CPU, so a GPU sees the same images.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

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
    """

    padding: int = 4
    fill: float = 0

    def __post_init__(self) -> None:
        if self.padding < 0:
            raise ValueError(f"padding (={self.padding}) must be at least 0")

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Return the shifted images."""
        if not self.padding:
            return images
        n, _, height, width = images.shape
        padded = F.pad(images, (self.padding,) * 4, value=self.fill)
        windows = padded.unfold(2, height, 1).unfold(3, width, 1)  # (N, C, 2 padding + 1, 2 padding + 1, H, W)
        down, right = torch.randint(0, 2 * self.padding + 1, (2, n), generator=generator).to(images.device)
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
        flipped = torch.rand(len(images), generator=generator) < self.p
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
        if self.size < 1:
            raise ValueError(f"size (={self.size}) must be at least 1")

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Return the images, each with a square covered."""
        n, _, height, width = images.shape

        def covered(length: int) -> Tensor:
            centre = torch.randint(0, length, (n, 1), generator=generator).to(images.device)
            distance = torch.arange(length, device=images.device) - (centre - self.size // 2)
            return (distance >= 0) & (distance < self.size)

        rows, columns = covered(height), covered(width)
        fill = torch.as_tensor(self.fill, dtype=images.dtype, device=images.device).reshape(-1, 1, 1)
        return torch.where(rows[:, None, :, None] & columns[:, None, None, :], fill, images)


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
