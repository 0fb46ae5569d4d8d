"""Residual networks for small pictures (He et al. 2015, arXiv:1512.03385, sections 4.1 and 4.2).

`resnet20` is the paper's CIFAR network: 3 stages of 16, 32 and 64 channels, shortcuts without parameters ("option A");
in `shortcut="per_conv"` form each convolution has its own shortcut, as binary networks want it (Bi-Real Net,
arXiv:1808.00278). `resnet18` is the paper's ImageNet network with a 3×3 stem and no pooling, as it is used on CIFAR.
"""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

Activation = Callable[[], nn.Module]
SHORTCUTS = ("normal", "per_conv")


class OptionA(nn.Module):
    """Every `stride`-th pixel, with zero channels added on both sides: a shortcut without parameters."""

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.stride = stride
        before = (out_channels - in_channels) // 2
        self.padding = (before, out_channels - in_channels - before)

    def forward(self, input: Tensor) -> Tensor:
        """(N, C_in, H, W) to (N, C_out, ceil(H / stride), ceil(W / stride))."""
        return F.pad(input[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, *self.padding))


def option_a(in_channels: int, out_channels: int, stride: int) -> nn.Module:
    """The shortcut of `resnet20`: nothing to learn."""
    return nn.Identity() if (in_channels, stride) == (out_channels, 1) else OptionA(in_channels, out_channels, stride)


def option_b(in_channels: int, out_channels: int, stride: int) -> nn.Module:
    """The shortcut of `resnet18`: a 1×1 convolution and batch norm where the shape changes."""
    if (in_channels, stride) == (out_channels, 1):
        return nn.Identity()
    conv = nn.Conv2d(in_channels, out_channels, 1, stride=stride, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(out_channels))


class BasicBlock(nn.Module):
    """Two 3×3 convolutions, with one shortcut around both ("normal") or one around each ("per_conv")."""

    def __init__(
        self, in_channels: int, out_channels: int, stride: int, downsample: nn.Module, per_conv: bool, act: Activation
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(out_channels)
        self.act1 = act()
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out_channels)
        self.act2 = act()
        self.downsample = downsample
        self.per_conv = per_conv

    def forward(self, input: Tensor) -> Tensor:
        """(N, C_in, H, W) to (N, C_out, ceil(H / stride), ceil(W / stride))."""
        shortcut = self.downsample(input)
        hidden = self.bn1(self.conv1(input))
        hidden = self.act1(hidden + shortcut if self.per_conv else hidden)
        return self.act2(self.bn2(self.conv2(hidden)) + (hidden if self.per_conv else shortcut))


class ResNet(nn.Module):
    """Stem, stages of basic blocks, average pooling, one linear layer.

    Args:
        in_channels: channels of the picture.
        num_classes: outputs.
        widths: channels of each stage; each stage but the first halves the picture.
        blocks: basic blocks of each stage.
        downsample: builds the shortcut from `(in_channels, out_channels, stride)`.
        shortcut: "normal", one around each block, or "per_conv", one around each convolution.
        activation: builds an activation. A binary convolution needs one that lets negative values through.

    Raises:
        ValueError: if `shortcut` is none of the two.
    """

    def __init__(
        self,
        in_channels: int,
        num_classes: int,
        *,
        widths: tuple[int, ...],
        blocks: tuple[int, ...],
        downsample: Callable[[int, int, int], nn.Module],
        shortcut: str = "normal",
        activation: Activation = nn.ReLU,
    ) -> None:
        super().__init__()
        if shortcut not in SHORTCUTS:
            raise ValueError(f"shortcut (={shortcut!r}) must be one of {', '.join(map(repr, SHORTCUTS))}")
        self.conv1 = nn.Conv2d(in_channels, widths[0], 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(widths[0])
        self.act1 = activation()
        stages, channels = [], widths[0]
        for stage, (width, count) in enumerate(zip(widths, blocks, strict=True)):
            strides = [2 if stage > 0 else 1, *[1] * (count - 1)]
            layers = []
            for stride in strides:
                side = downsample(channels, width, stride)
                layers.append(BasicBlock(channels, width, stride, side, shortcut == "per_conv", activation))
                channels = width
            stages.append(nn.Sequential(*layers))
        self.stages = nn.Sequential(*stages)
        self.fc = nn.Linear(channels, num_classes)

    def forward(self, input: Tensor) -> Tensor:
        """(N, C, H, W) to (N, num_classes)."""
        hidden = self.stages(self.act1(self.bn1(self.conv1(input))))
        return self.fc(hidden.mean((2, 3)))


def resnet20(
    in_channels: int = 3, num_classes: int = 10, *, shortcut: str = "normal", activation: Activation = nn.ReLU
) -> ResNet:
    """The CIFAR ResNet-20 with option A shortcuts: 19 convolutions, 269,722 parameters at the defaults.

    Section 4.2 of the paper, n = 3.
    """
    return ResNet(
        in_channels,
        num_classes,
        widths=(16, 32, 64),
        blocks=(3, 3, 3),
        downsample=option_a,
        shortcut=shortcut,
        activation=activation,
    )


def resnet18(
    in_channels: int = 3, num_classes: int = 10, *, shortcut: str = "normal", activation: Activation = nn.ReLU
) -> ResNet:
    """ResNet-18 with a 3×3 stem and no pooling: 20 convolutions, 11,173,962 parameters at the defaults.

    Table 1 of the paper; the stem is the one everybody uses on CIFAR, the paper has none for it.
    """
    return ResNet(
        in_channels,
        num_classes,
        widths=(64, 128, 256, 512),
        blocks=(2, 2, 2, 2),
        downsample=option_b,
        shortcut=shortcut,
        activation=activation,
    )
