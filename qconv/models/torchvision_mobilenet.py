"""torchvision's MobileNetV2 (Sandler et al. 2018, arXiv:1801.04381, table 2)."""

import math
from typing import Any

from torch import nn

from ..ground.checks import check_at_least_one, check_flags, check_numbers
from .by_name import with_channels

BLOCKS = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
"""The paper's t, c, n and s: expansion, output channels, number of blocks, and stride of the first one."""


def torchvision_mobilenet_v2(
    in_channels: int = 3, num_classes: int = 1000, *, width: float = 1.0, small_pictures: bool = False
) -> nn.Module:
    """`torchvision.models.mobilenet_v2`, randomly initialized; torchvision must be installed.

    Low-bit versions leave the first and the last layer float, or give them 8 bits. Most of its convolutions are
    depthwise or 1×1: their outputs are sums of few products, in which errors of rounding cancel less.

    Args:
        in_channels: channels of the image; if it is not 3, the stem is a new convolution with torchvision's
            initialisation.
        num_classes: outputs.
        width: the width multiplier, above 0; numbers of channels are rounded to multiples of 8.
        small_pictures: leave out the strides of the stem and of the second group of blocks, so that images of 32×32
            end as 4×4 rather than 1×1.

    Raises:
        ValueError: a number below 1, or a width that is not above 0 and finite.
    """
    check_at_least_one(in_channels=in_channels, num_classes=num_classes)
    check_numbers(width=width)
    check_flags(small_pictures=small_pictures)
    if not 0 < width < math.inf:
        raise ValueError(f"width (={width}) must be above 0 and finite")
    from torchvision import models

    blocks = [[t, c, n, 1 if small_pictures and c == 24 else s] for t, c, n, s in BLOCKS]
    model: Any = models.mobilenet_v2(num_classes=num_classes, width_mult=width, inverted_residual_setting=blocks)
    if small_pictures:
        model.features[0][0].stride = (1, 1)
    return with_channels(model, in_channels)
