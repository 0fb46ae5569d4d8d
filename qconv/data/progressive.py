"""Progressive resizing: small images first, whose steps are faster."""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from ..ground.checks import check_at_least_one, check_numbers


@dataclass(frozen=True)
class ProgressiveSize:
    """The size of training images during training: ``start`` times the full size at first, then growing to it.

    With the progress p, from 0 to 1, a side has ``start`` of its pixels while p ≤ ``grow_from``, all of them from p =
    ``full_from`` on, and in between a share that grows linearly, rounded to multiples of ``multiple`` pixels. A step
    costs in proportion to the pixels: at half the side a quarter. Validation and test images keep their size, and so
    do the training images of the last epoch, and those from which batch norms are taken anew (`reestimate_bn`). The
    network must take images of all sizes, as one with global average pooling does.

    Args:
        start: the share of each side at the start.
        grow_from: the progress until which it stays so.
        full_from: the progress from which images have their full size.
        multiple: sides are multiples of it, except for the full size; take 2^k for a network that halves its input k
            times.

    Raises:
        ValueError: ``start`` is not above 0 and at most 1, the two progresses are not from 0 to 1 in this order, or
            ``multiple`` is not a whole number from 1 on.
        TypeError: ``start``, ``grow_from`` or ``full_from`` is not a number.
    """

    start: float = 0.5
    grow_from: float = 0.4
    full_from: float = 0.8
    multiple: int = 4

    def __post_init__(self) -> None:
        check_numbers(start=self.start, grow_from=self.grow_from, full_from=self.full_from)
        check_at_least_one(multiple=self.multiple)
        if not 0 < self.start <= 1:
            raise ValueError(f"start (={self.start}) must be a share of the side, above 0 and at most 1")
        if not 0 <= self.grow_from <= self.full_from <= 1:
            raise ValueError(
                f"grow_from (={self.grow_from}) and full_from (={self.full_from}) must be shares of the training from "
                "0 to 1, in this order"
            )

    def side(self, full: int, progress: float) -> int:
        """The pixels of a side that has ``full`` of them in the end.

        Example:
            >>> [ProgressiveSize().side(32, p) for p in (0.0, 0.4, 0.5, 0.6, 0.7, 0.8)]
            [16, 16, 20, 24, 28, 32]
        """
        if progress >= self.full_from:
            return full
        growing = self.full_from - self.grow_from
        grown = max(progress - self.grow_from, 0.0) / growing if growing else 0.0
        share = self.start + (1 - self.start) * grown
        return min(full, max(self.multiple, self.multiple * round(share * full / self.multiple)))

    def smallest(self, size: tuple[int, int]) -> tuple[int, int]:
        """The size, (height, width), at the start of the training."""
        return self.side(size[0], 0.0), self.side(size[1], 0.0)

    def __call__(self, images: Tensor, progress: float) -> Tensor:
        """Return floating images ``(N, C, H, W)`` in the size of ``progress``, filtered so that nothing aliases."""
        full = images.shape[2:]
        size = self.side(full[0], progress), self.side(full[1], progress)
        return images if size == full else F.interpolate(images, size, mode="bilinear", antialias=True)
