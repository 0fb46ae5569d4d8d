"""Bi-Real Net (Liu et al. 2018, arXiv:1808.00278): ResNet-18 and -34 with a shortcut around each convolution.

Networks for ImageNet, with blocks convolution → batch norm → + shortcut → activation. The published ones have no
activation other than the sign that quantizes the convolution's input, and leave the stem, the 1×1 convolutions of the
shortcuts and the linear layer float: ``skip=("first", "last", ".*downsample.*")``.
"""

from torch import Tensor, nn

from ..ground.checks import check_at_least_one, check_widths
from .activations import Activation, build_activation
from .resnet import average_pool


def mean_downsample(in_channels: int, out_channels: int, stride: int) -> nn.Module:
    """Means over squares, a 1×1 convolution and batch norm; the input itself if its shape stays."""
    if (in_channels, stride) == (out_channels, 1):
        return nn.Identity()
    conv = nn.Conv2d(in_channels, out_channels, 1, bias=False)
    return nn.Sequential(average_pool(stride), conv, nn.BatchNorm2d(out_channels))


class BiRealBlock(nn.Module):
    """One 3×3 convolution with its shortcut."""

    def __init__(self, in_channels: int, out_channels: int, stride: int, activation: Activation) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, 3, stride=stride, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(out_channels)
        self.downsample = mean_downsample(in_channels, out_channels, stride)
        self.act = build_activation(activation, out_channels)

    def forward(self, input: Tensor) -> Tensor:
        """(N, C_in, H, W) to (N, C_out, ceil(H / stride), ceil(W / stride))."""
        return self.act(self.bn(self.conv(input)) + self.downsample(input))


class BiRealNet(nn.Module):
    """7×7 stem, maximum pooling, stages of single convolutions with shortcuts, average pooling, one linear layer.

    Args:
        in_channels: channels of the image.
        num_classes: outputs.
        blocks: convolutions of each of the four stages.
        activation: makes the activation after each shortcut from the number of channels, see `build_activation`; the
            default is the identity, as published. ReActNet's is `RPReLU`.

    Raises:
        ValueError: a number below 1, or not four stages.
        TypeError: `activation` makes no module.
    """

    def __init__(
        self, in_channels: int, num_classes: int, *, blocks: tuple[int, ...], activation: Activation = nn.Identity
    ) -> None:
        super().__init__()
        widths = (64, 128, 256, 512)
        check_at_least_one(in_channels=in_channels, num_classes=num_classes)
        check_widths(widths, blocks)
        self.conv1 = nn.Conv2d(in_channels, widths[0], 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(widths[0])
        self.pool = nn.MaxPool2d(3, stride=2, padding=1)
        stages, channels = [], widths[0]
        for width, count in zip(widths, blocks, strict=True):
            layers = []
            for _ in range(count):
                layers.append(BiRealBlock(channels, width, 1 if width == channels else 2, activation))
                channels = width
            stages.append(nn.Sequential(*layers))
        self.stages = nn.Sequential(*stages)
        self.fc = nn.Linear(channels, num_classes)

    def forward(self, input: Tensor) -> Tensor:
        """(N, C, H, W) to (N, num_classes)."""
        hidden = self.stages(self.pool(self.bn1(self.conv1(input))))
        return self.fc(hidden.mean((2, 3)))


def birealnet18(in_channels: int = 3, num_classes: int = 1000, *, activation: Activation = nn.Identity) -> BiRealNet:
    """Bi-Real Net 18: 16 binary convolutions, 11,689,512 parameters, as many as ResNet-18 at the defaults."""
    return BiRealNet(in_channels, num_classes, blocks=(4, 4, 4, 4), activation=activation)


def birealnet34(in_channels: int = 3, num_classes: int = 1000, *, activation: Activation = nn.Identity) -> BiRealNet:
    """Bi-Real Net 34: 32 binary convolutions, 21,797,672 parameters, as many as ResNet-34 at the defaults."""
    return BiRealNet(in_channels, num_classes, blocks=(6, 8, 12, 6), activation=activation)
