"""Residual networks for small images (He et al. 2015, arXiv:1512.03385, sections 4.1 and 4.2).

`resnet20` to `resnet56` are the paper's CIFAR networks: 3 stages of 16, 32 and 64 channels. `resnet18` is the paper's
ImageNet network with a 3×3 stem and no pooling, as used on CIFAR. With `shortcut="per_conv"` each convolution has its
own shortcut, which suits binary networks (Bi-Real Net, arXiv:1808.00278).

Published low-bit versions leave the first convolution and the last linear layer float: ``skip=("first", "last")``. With
``downsample="B"`` the 1×1 convolutions of the shortcuts are quantized unless ``skip`` has ``".*downsample.*"``.
"""

from typing import Literal, get_args

import torch.nn.functional as F
from torch import Tensor, nn

from ..ground.checks import check_at_least_one, check_choice, check_widths
from .activations import Activation, build_activation

Shortcut = Literal["normal", "per_conv"]
Downsample = Literal["A", "avgpool", "B"]


class Stride(nn.Module):
    """Every `stride`-th pixel of each row and column."""

    def __init__(self, stride: int) -> None:
        super().__init__()
        self.stride = stride

    def forward(self, input: Tensor) -> Tensor:
        """(N, C, H, W) to (N, C, ceil(H / stride), ceil(W / stride))."""
        return input[:, :, :: self.stride, :: self.stride]


class ZeroChannels(nn.Module):
    """Adds zero channels on both sides of the input's, `channels` in total."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.padding = (channels // 2, channels - channels // 2)

    def forward(self, input: Tensor) -> Tensor:
        """(N, C, H, W) to (N, C + channels, H, W)."""
        return F.pad(input, (0, 0, 0, 0, *self.padding))


def average_pool(stride: int) -> nn.Module:
    """Means over squares of `stride` pixels; at odd sizes the last squares are smaller."""
    return nn.AvgPool2d(stride, ceil_mode=True, count_include_pad=False)


def make_downsample(kind: str, in_channels: int, out_channels: int, stride: int) -> nn.Module:
    """The shortcut of a block, from C_in to C_out channels: the input itself if its shape stays.

    "A", in the paper's CIFAR networks: every `stride`-th pixel, and zero channels. "B", in its ImageNet networks: a
    strided 1×1 convolution and batch norm. "avgpool", in ReCU (arXiv:2103.12369): means, and zero channels.

    Raises:
        ValueError: `kind` is none of the three, or it has no parameters and there are fewer channels out than in.
    """
    check_choice("downsample", kind, *get_args(Downsample))
    if (in_channels, stride) == (out_channels, 1):
        return nn.Identity()
    if kind == "B":
        conv = nn.Conv2d(in_channels, out_channels, 1, stride=stride, bias=False)
        return nn.Sequential(conv, nn.BatchNorm2d(out_channels))
    if out_channels < in_channels:
        raise ValueError(f"downsample (={kind!r}) cannot take {in_channels} channels to {out_channels}: use 'B'")
    smaller = Stride(stride) if kind == "A" else average_pool(stride)
    return nn.Sequential(smaller, ZeroChannels(out_channels - in_channels))


class BasicBlock(nn.Module):
    """Two 3×3 convolutions, with one shortcut around both ("normal") or one around each ("per_conv")."""

    def __init__(
        self, in_channels: int, out_channels: int, stride: int, downsample: nn.Module, per_conv: bool, act: Activation
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(out_channels)
        self.act1 = build_activation(act, out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out_channels)
        self.act2 = build_activation(act, out_channels)
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
        in_channels: channels of the image.
        num_classes: outputs.
        widths: channels of each stage; each stage but the first halves the image.
        blocks: basic blocks of each stage.
        downsample: the shortcut where the shape changes: "A", "avgpool" or "B", see `make_downsample`.
        shortcut: "normal", one around each block, or "per_conv", one around each convolution.
        activation: makes an activation from the number of channels, see `build_activation`. A binary convolution needs
            one that passes negative values on; `qconv.convert` replaces a ReLU before it (``before_sign``).
        norm_before_fc: whether a batch norm precedes the linear layer, as in the networks of IR-Net and those after it.

    Raises:
        ValueError: a number below 1, widths and blocks of different length, or an unknown `shortcut` or `downsample`.
        TypeError: `activation` makes no module.
    """

    def __init__(
        self,
        in_channels: int,
        num_classes: int,
        *,
        widths: tuple[int, ...],
        blocks: tuple[int, ...],
        downsample: Downsample,
        shortcut: Shortcut = "normal",
        activation: Activation = nn.ReLU,
        norm_before_fc: bool = False,
    ) -> None:
        super().__init__()
        check_at_least_one(in_channels=in_channels, num_classes=num_classes)
        check_widths(widths, blocks)
        check_choice("shortcut", shortcut, *get_args(Shortcut))
        self.conv1 = nn.Conv2d(in_channels, widths[0], 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(widths[0])
        self.act1 = build_activation(activation, widths[0])
        stages, channels = [], widths[0]
        for stage, (width, count) in enumerate(zip(widths, blocks, strict=True)):
            strides = [2 if stage > 0 else 1, *[1] * (count - 1)]
            layers = []
            for stride in strides:
                side = make_downsample(downsample, channels, width, stride)
                layers.append(BasicBlock(channels, width, stride, side, shortcut == "per_conv", activation))
                channels = width
            stages.append(nn.Sequential(*layers))
        self.stages = nn.Sequential(*stages)
        self.norm = nn.BatchNorm1d(channels) if norm_before_fc else None
        self.fc = nn.Linear(channels, num_classes)

    def forward(self, input: Tensor) -> Tensor:
        """(N, C, H, W) to (N, num_classes)."""
        hidden = self.stages(self.act1(self.bn1(self.conv1(input))))
        features = hidden.mean((2, 3))
        return self.fc(features if self.norm is None else self.norm(features))


def _cifar_resnet(depth: int, parameters: int):
    n = (depth - 2) // 6

    def function(
        in_channels: int = 3,
        num_classes: int = 10,
        *,
        downsample: Downsample = "A",
        shortcut: Shortcut = "normal",
        activation: Activation = nn.ReLU,
        norm_before_fc: bool = False,
    ) -> ResNet:
        return ResNet(
            in_channels,
            num_classes,
            widths=(16, 32, 64),
            blocks=(n, n, n),
            downsample=downsample,
            shortcut=shortcut,
            activation=activation,
            norm_before_fc=norm_before_fc,
        )

    function.__name__ = function.__qualname__ = f"resnet{depth}"
    function.__doc__ = f"""The CIFAR ResNet-{depth}: {depth - 1} convolutions, {parameters:,} parameters by default.

    Section 4.2 of the paper, n = {n}. Arguments and errors are as in `ResNet`.
    """
    return function


resnet20, resnet32 = _cifar_resnet(20, 269_722), _cifar_resnet(32, 464_154)
resnet44, resnet56 = _cifar_resnet(44, 658_586), _cifar_resnet(56, 853_018)


def resnet18(
    in_channels: int = 3,
    num_classes: int = 10,
    *,
    downsample: Downsample = "B",
    shortcut: Shortcut = "normal",
    activation: Activation = nn.ReLU,
    norm_before_fc: bool = False,
) -> ResNet:
    """ResNet-18 with a 3×3 stem and no pooling: 20 convolutions, 11,173,962 parameters at the defaults.

    Table 1 of the paper; the stem is the one everybody uses on CIFAR, the paper has none for it. Arguments and errors
    are as in `ResNet`.
    """
    return ResNet(
        in_channels,
        num_classes,
        widths=(64, 128, 256, 512),
        blocks=(2, 2, 2, 2),
        downsample=downsample,
        shortcut=shortcut,
        activation=activation,
        norm_before_fc=norm_before_fc,
    )
