"""torchvision's residual networks for ImageNet (He et al. 2015, arXiv:1512.03385, table 1)."""

from torch import nn

from ..ground.checks import check_at_least_one

DEPTHS = (18, 34, 50, 101, 152)


def torchvision_resnet(in_channels: int = 3, num_classes: int = 1000, *, depth: int = 18) -> nn.Module:
    """`torchvision.models.resnet18`, 34, 50, 101 or 152, randomly initialized; torchvision must be installed.

    From 50 on, the stride is in the 3×3 convolution of a bottleneck; in the paper it is in the first 1×1 convolution.
    Published low-bit versions leave the first and the last layer float; binary ones also leave the 1×1 convolutions of
    the shortcuts: ``skip=("first", "last", ".*downsample.*")``.

    Args:
        in_channels: channels of the image; if it is not 3, the stem is a new convolution with torchvision's
            initialisation.
        num_classes: outputs.
        depth: number of layers.

    Raises:
        ValueError: a number below 1, or a depth that does not exist.
    """
    check_at_least_one(in_channels=in_channels, num_classes=num_classes)
    if depth not in DEPTHS:
        raise ValueError(f"depth (={depth}) must be one of {', '.join(map(str, DEPTHS))}")
    from torchvision import models

    model = getattr(models, f"resnet{depth}")(num_classes=num_classes)
    if in_channels != 3:
        model.conv1 = nn.Conv2d(in_channels, 64, 7, stride=2, padding=3, bias=False)
        nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
    return model
