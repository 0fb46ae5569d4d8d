"""QuickNet (Bannink et al. 2020, arXiv:2011.09398), in the three sizes of Larq Zoo 1.0.

Blocks are 3×3 convolution → activation → batch norm → + shortcut. Between sections, activation → maximum pooling →
fixed blur with stride 2 → float 1×1 convolution → batch norm. The stem and the transitions stay float, and binary
convolutions pad with +1: ``convert(model, schemes.bnn(padding_value=1), skip=("stem.*", ".*pointwise", "last"))``.

Larq's strided convolutions of the stem pad even sizes at the bottom and right only, as TensorFlow does; here they pad
on all sides, so weights trained there see images shifted by a pixel.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ground.checks import check_at_least_one, check_widths
from .activations import Activation, build_activation


class Blur(nn.Module):
    """Each channel filtered with (1, 2, 1)ᵀ(1, 2, 1)/16 at every second pixel, after zero padding by 1.

    This is the anti-aliased pooling of arXiv:1904.11486. The filter is not a parameter, and `convert` sees no layer.
    """

    kernel: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        line = torch.tensor([1.0, 2.0, 1.0])
        kernel = (torch.outer(line, line) / 16).expand(channels, 1, 3, 3)
        self.register_buffer("kernel", kernel.clone(), persistent=False)

    def forward(self, input: Tensor) -> Tensor:
        """(N, C, H, W) to (N, C, ceil(H / 2), ceil(W / 2))."""
        return F.conv2d(input, self.kernel.to(input.dtype), stride=2, padding=1, groups=len(self.kernel))


class Transition(nn.Module):
    """The transition to the next section: half the image, another number of channels."""

    def __init__(self, in_channels: int, out_channels: int, activation: Activation) -> None:
        super().__init__()
        self.act = build_activation(activation, in_channels)
        self.pool = nn.MaxPool2d(2, stride=1)
        self.blur = Blur(in_channels)
        self.pointwise = nn.Conv2d(in_channels, out_channels, 1, bias=False)
        self.bn = nn.BatchNorm2d(out_channels)

    def forward(self, input: Tensor) -> Tensor:
        """(N, C_in, H, W) to (N, C_out, H // 2, W // 2); H and W at least 2."""
        return self.bn(self.pointwise(self.blur(self.pool(self.act(input)))))


class ResidualBlock(nn.Module):
    """One 3×3 convolution with its shortcut."""

    def __init__(self, channels: int, activation: Activation) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.act = build_activation(activation, channels)
        self.bn = nn.BatchNorm2d(channels)

    def forward(self, input: Tensor) -> Tensor:
        """(N, C, H, W) to the same shape."""
        return self.bn(self.act(self.conv(input))) + input


class QuickNet(nn.Module):
    """Stem, sections of residual blocks with transitions between them, average pooling, one linear layer.

    Args:
        in_channels: channels of the image.
        num_classes: outputs.
        widths: channels of each section; the first is a multiple of 4.
        blocks: residual blocks of each section.
        activation: makes an activation from the number of channels, see `build_activation`.

    Raises:
        ValueError: a number below 1, widths and blocks of different length, or a first width that 4 does not divide.
        TypeError: `activation` makes no module.
    """

    def __init__(
        self,
        in_channels: int,
        num_classes: int,
        *,
        widths: tuple[int, ...],
        blocks: tuple[int, ...],
        activation: Activation = nn.ReLU,
    ) -> None:
        super().__init__()
        check_at_least_one(in_channels=in_channels, num_classes=num_classes)
        check_widths(widths, blocks)
        if widths[0] % 4:
            raise ValueError(f"widths[0] (={widths[0]}) must be a multiple of 4")
        self.stem = make_stem(in_channels, widths[0], activation)
        sections, channels = [], widths[0]
        for index, (width, count) in enumerate(zip(widths, blocks, strict=True)):
            between = [Transition(channels, width, activation)] if index > 0 else []
            sections.append(nn.Sequential(*between, *(ResidualBlock(width, activation) for _ in range(count))))
            channels = width
        self.sections = nn.Sequential(*sections)
        self.act = build_activation(activation, channels)
        self.fc = nn.Linear(channels, num_classes)

    def forward(self, input: Tensor) -> Tensor:
        """(N, C, H, W) to (N, num_classes)."""
        return self.fc(self.act(self.sections(self.stem(input))).mean((2, 3)))


def make_stem(in_channels: int, width: int, activation: Activation) -> nn.Module:
    """A strided 3×3, a strided depthwise 3×3 and a 1×1 convolution, all float: a quarter of the image."""
    narrow = width // 4
    # Keras' defaults for momentum and epsilon, which the authors keep here but nowhere else
    norm = partial(nn.BatchNorm2d, momentum=0.01, eps=1e-3)
    return nn.Sequential(
        nn.Conv2d(in_channels, narrow, 3, stride=2, padding=1, bias=False),
        norm(narrow),
        build_activation(activation, narrow),
        nn.Conv2d(narrow, narrow, 3, stride=2, padding=1, groups=narrow, bias=False),
        norm(narrow, affine=False),
        nn.Conv2d(narrow, width, 1, bias=False),
        norm(width),
    )


def quicknet_small(in_channels: int = 3, num_classes: int = 1000, *, activation: Activation = nn.ReLU) -> QuickNet:
    """QuickNet small: 16 binary convolutions, 12.66 million numbers stored at the defaults."""
    return QuickNet(in_channels, num_classes, widths=(32, 64, 256, 512), blocks=(4, 4, 4, 4), activation=activation)


def quicknet(in_channels: int = 3, num_classes: int = 1000, *, activation: Activation = nn.ReLU) -> QuickNet:
    """QuickNet: 16 binary convolutions, 13.23 million numbers stored at the defaults."""
    return QuickNet(in_channels, num_classes, widths=(64, 128, 256, 512), blocks=(4, 4, 4, 4), activation=activation)


def quicknet_large(in_channels: int = 3, num_classes: int = 1000, *, activation: Activation = nn.ReLU) -> QuickNet:
    """QuickNet large: 32 binary convolutions, 23.34 million numbers stored at the defaults."""
    return QuickNet(in_channels, num_classes, widths=(64, 128, 256, 512), blocks=(6, 8, 12, 6), activation=activation)
