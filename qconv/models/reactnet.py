"""ReActNet (Liu et al. 2020, arXiv:2003.03488): Bi-Real Net and a MobileNet, both with RPReLU after each shortcut.

A published block is RSign → convolution → batch norm → + shortcut → RPReLU. RSign, ``sign(x + b_c)``, belongs to the
quantizer of the convolution's input and is not here. First and last layer stay float, and so do the 1×1 convolutions of
the shortcuts in `reactnet18`: ``skip=("first", "last", ".*downsample.*")``. `reactnet_a` has no such shortcuts and
takes ``skip=("first", "last")``.
"""

import torch
from torch import Tensor, nn

from ..ground.checks import check_at_least_one
from .activations import Activation, RPReLU, build_activation
from .birealnet import BiRealNet
from .resnet import average_pool

STEM_WIDTH = 32
# (channels, stride) of each block of the MobileNet
BLOCKS = ((64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), *[(512, 1)] * 5, (1024, 2), (1024, 1))


class MobileBlock(nn.Module):
    """A 3×3 and a 1×1 convolution, each with a shortcut without parameters.

    Where the channels double, the authors run two 1×1 convolutions with batch norm on the same signs, add the same
    shortcut to each and concatenate the outputs. Here these are the two halves of one convolution, which computes the
    same with one input quantizer.
    """

    def __init__(self, in_channels: int, out_channels: int, stride: int, activation: Activation) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, in_channels, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(in_channels)
        self.act1 = build_activation(activation, in_channels)
        self.pointwise = nn.Conv2d(in_channels, out_channels, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out_channels)
        self.act2 = build_activation(activation, out_channels)
        self.pool = nn.Identity() if stride == 1 else average_pool(stride)
        self.copies = out_channels // in_channels

    def forward(self, input: Tensor) -> Tensor:
        """(N, C_in, H, W) to (N, C_out, ceil(H / stride), ceil(W / stride))."""
        hidden = self.act1(self.bn1(self.conv(input)) + self.pool(input))
        return self.act2(self.bn2(self.pointwise(hidden)) + torch.cat([hidden] * self.copies, 1))


class MobileReActNet(nn.Module):
    """3×3 stem with a stride, 13 blocks, average pooling, one linear layer.

    Args:
        in_channels: channels of the image.
        num_classes: outputs.
        activation: makes the activation after each shortcut from the number of channels, see `build_activation`.

    Raises:
        ValueError: a number below 1.
        TypeError: `activation` makes no module.
    """

    def __init__(self, in_channels: int, num_classes: int, *, activation: Activation = RPReLU) -> None:
        super().__init__()
        check_at_least_one(in_channels=in_channels, num_classes=num_classes)
        self.conv1 = nn.Conv2d(in_channels, STEM_WIDTH, 3, stride=2, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(STEM_WIDTH)
        blocks, channels = [], STEM_WIDTH
        for width, stride in BLOCKS:
            blocks.append(MobileBlock(channels, width, stride, activation))
            channels = width
        self.blocks = nn.Sequential(*blocks)
        self.fc = nn.Linear(channels, num_classes)

    def forward(self, input: Tensor) -> Tensor:
        """(N, C, H, W) to (N, num_classes)."""
        hidden = self.blocks(self.bn1(self.conv1(input)))
        return self.fc(hidden.mean((2, 3)))


def reactnet18(in_channels: int = 3, num_classes: int = 1000, *, activation: Activation = RPReLU) -> BiRealNet:
    """ReActNet based on ResNet-18: `birealnet18` with RPReLU, 11,701,032 parameters at the defaults."""
    return BiRealNet(in_channels, num_classes, blocks=(4, 4, 4, 4), activation=activation)


def reactnet_a(in_channels: int = 3, num_classes: int = 1000, *, activation: Activation = RPReLU) -> MobileReActNet:
    """ReActNet-A, based on MobileNet: 4.82 billion binary and 12 million float multiply-accumulates at 224×224."""
    return MobileReActNet(in_channels, num_classes, activation=activation)
