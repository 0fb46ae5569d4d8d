"""Networks of torchvision and timm by their names there, with random weights.

One is torchvision's MobileNetV2 (Sandler et al. 2018, arXiv:1801.04381, table 2).
"""

import difflib
from collections.abc import Iterable
from typing import Any

from torch import nn

from ..ground.checks import check_at_least_one, check_flags, check_positive
from ..ground.extras import needed

DEPTHS = (18, 34, 50, 101, 152)
BLOCKS = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
"""The paper's t, c, n and s: expansion, output channels, number of blocks, and stride of the first one."""


def torchvision_model(in_channels: int = 3, num_classes: int = 1000, *, name: str = "resnet18") -> nn.Module:
    """A classifier of `torchvision.models`, randomly initialized; torchvision must be installed.

    Args:
        in_channels: channels of the image; if it is not 3, the first convolution is a new one.
        num_classes: outputs.
        name: what `torchvision.models.list_models(torchvision.models)` lists.

    Raises:
        ValueError: a number below 1, or a name that is not listed.
    """
    check_at_least_one(in_channels=in_channels, num_classes=num_classes)
    with needed("torchvision_model"):
        from torchvision import models
    check_listed(name, models.list_models(module=models), "torchvision")
    return with_channels(models.get_model(name, weights=None, num_classes=num_classes), in_channels)


def timm_model(in_channels: int = 3, num_classes: int = 1000, *, name: str = "resnet18") -> nn.Module:
    """A network of timm, randomly initialized; timm must be installed.

    Args:
        in_channels: channels of the image.
        num_classes: outputs.
        name: what `timm.list_models()` lists.

    Raises:
        ValueError: a number below 1, or a name that is not listed.
    """
    check_at_least_one(in_channels=in_channels, num_classes=num_classes)
    with needed("timm_model"):
        import timm
    check_listed(name, timm.list_models(), "timm")
    return timm.create_model(name, pretrained=False, in_chans=in_channels, num_classes=num_classes)


def torchvision_resnet(in_channels: int = 3, num_classes: int = 1000, *, depth: int = 18) -> nn.Module:
    """`torchvision.models.resnet18`, 34, 50, 101 or 152 (He et al. 2015, arXiv:1512.03385, table 1), random weights.

    From 50 on, the stride is in the 3×3 convolution of a bottleneck; in the paper it is in the first 1×1 convolution.
    Published low-bit versions leave the first and the last layer float; binary ones also leave the 1×1 convolutions of
    the shortcuts: ``skip=("first", "last", ".*downsample.*")``.

    Args:
        in_channels: channels of the image.
        num_classes: outputs.
        depth: number of layers.

    Raises:
        ValueError: a number below 1, or a depth that does not exist.
    """
    if depth not in DEPTHS:
        raise ValueError(f"depth (={depth}) must be one of {', '.join(map(str, DEPTHS))}")
    return torchvision_model(in_channels, num_classes, name=f"resnet{depth}")


def check_listed(name: str, known: Iterable[str], package: str) -> None:
    """Raise a ValueError unless the package lists the name: others could fetch code or files."""
    known = list(known)
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3)
        told = f"nearest: {', '.join(near)}" if near else f"such as {', '.join(known[:3])}"
        raise ValueError(f"name (={name!r}) must be a network of {package} ({told})")


def with_channels(model: nn.Module, in_channels: int) -> nn.Module:
    """Return the model with a new first convolution if images have other channels than 3."""
    if in_channels == 3:
        return model
    name, stem = next((name, each) for name, each in model.named_modules() if isinstance(each, nn.Conv2d))
    window: Any = stem.kernel_size, stem.stride, stem.padding
    made = nn.Conv2d(in_channels, stem.out_channels, *window, bias=stem.bias is not None)
    nn.init.kaiming_normal_(made.weight, mode="fan_out", nonlinearity="relu")
    model.set_submodule(name, made)
    return model


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
        ValueError: a number below 1, or a width that is not positive and finite.
    """
    check_at_least_one(in_channels=in_channels, num_classes=num_classes)
    check_positive(width=width)
    check_flags(small_pictures=small_pictures)
    from torchvision import models

    blocks = [[t, c, n, 1 if small_pictures and c == 24 else s] for t, c, n, s in BLOCKS]
    model: Any = models.mobilenet_v2(num_classes=num_classes, width_mult=width, inverted_residual_setting=blocks)
    if small_pictures:
        model.features[0][0].stride = (1, 1)
    return with_channels(model, in_channels)
