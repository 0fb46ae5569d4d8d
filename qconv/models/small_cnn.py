"""A small network for images of 8×8 to 32×32 pixels, designed for binary convolutions."""

from torch import Tensor, nn

from ..ground.checks import check_at_least_one


class Block(nn.Module):
    """3×3 convolution, pooling, batch norm, shortcut, Hardtanh.

    The next convolution may take the sign of the output: batch norm precedes it and centres its threshold, and pooling
    precedes batch norm, because a maximum of signs is nearly always +1. The shortcut carries the values around the
    sign; Hardtanh bounds them to the range in which a straight-through gradient passes.
    """

    def __init__(self, in_channels: int, out_channels: int, *, pool: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, 3, padding=1, bias=False)
        self.pool = nn.MaxPool2d(2) if pool else nn.Identity()
        self.bn = nn.BatchNorm2d(out_channels)
        self.act = nn.Hardtanh()
        self.shortcut = in_channels == out_channels and not pool

    def forward(self, input: Tensor) -> Tensor:
        """(N, C_in, H, W) to (N, C_out, H, W), half of H and W with pooling."""
        output = self.bn(self.pool(self.conv(input)))
        return self.act(output + input if self.shortcut else output)


class SmallCNN(nn.Module):
    """Four blocks (width, width, 2·width after pooling, 2·width), average pooling, one linear layer."""

    def __init__(self, in_channels: int, num_classes: int, *, width: int) -> None:
        super().__init__()
        check_at_least_one(width=width)
        self.blocks = nn.Sequential(
            Block(in_channels, width, pool=False),
            Block(width, width, pool=False),
            Block(width, 2 * width, pool=True),
            Block(2 * width, 2 * width, pool=False),
        )
        self.fc = nn.Linear(2 * width, num_classes)

    def forward(self, input: Tensor) -> Tensor:
        """(N, C, H, W) to (N, num_classes)."""
        return self.fc(self.blocks(input).mean((2, 3)))


def small_cnn(in_channels: int, num_classes: int, *, width: int = 48) -> SmallCNN:
    """The network of the default run."""
    return SmallCNN(in_channels, num_classes, width=width)
