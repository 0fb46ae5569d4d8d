"""The two VGG-like networks that the low-bit literature trains on CIFAR.

Both have six 3×3 convolutions of 128, 128, 256, 256, 512 and 512 channels and halve the image after every second one.
`vgg_small` is that of LQ-Net (arXiv:1807.10029), IR-Net (arXiv:1909.10788) and the binary networks since, with one
linear layer; pooling precedes batch norm, as in BNN (arXiv:1602.02830), because a maximum of signs is nearly always +1.
`vgg7` is the network of TWN (arXiv:1605.04711): pooling comes last, and a linear layer of 1024 precedes the last one.
"""

from torch import Tensor, nn

from ..ground.checks import check_at_least_one
from .activations import Activation, build_activation

WIDTHS = (128, 128, 256, 256, 512, 512)
SHRINKS = 8


class ConvBlock(nn.Module):
    """3×3 convolution, batch norm and activation, with pooling before batch norm, at the end or not at all."""

    def __init__(self, in_channels: int, out_channels: int, *, pool: bool, pool_first: bool, act: Activation) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(out_channels)
        self.act = build_activation(act, out_channels)
        self.pool = nn.MaxPool2d(2) if pool else nn.Identity()
        self.pool_first = pool_first

    def forward(self, input: Tensor) -> Tensor:
        """(N, C_in, H, W) to (N, C_out, H, W), half of H and W with pooling."""
        hidden = self.conv(input)
        if self.pool_first:
            return self.act(self.bn(self.pool(hidden)))
        return self.pool(self.act(self.bn(hidden)))


class ImageSize(nn.Module):
    """Passes images of one size on; a module of its own, so that the network's forward has no branch."""

    def __init__(self, image_size: int) -> None:
        super().__init__()
        self.image_size = image_size

    def forward(self, input: Tensor) -> Tensor:
        """(N, C, image_size, image_size), unchanged."""
        if input.shape[-2:] != (self.image_size, self.image_size):
            raise ValueError(
                f"input (of shape {tuple(input.shape)}) must have image_size (={self.image_size}) as height and width"
            )
        return input


class VGG(nn.Module):
    """Six convolutions and one or two linear layers.

    Args:
        in_channels: channels of the image.
        num_classes: outputs.
        hidden: outputs of a linear layer before the last one, followed by batch norm and activation; None for no such
            layer.
        pool_first: whether pooling precedes batch norm and activation or follows them.
        image_size: height and width of the image, a multiple of 8.
        activation: makes an activation from the number of channels, see `build_activation`.
        norm_outputs: whether a batch norm without parameters follows the last linear layer, which a binary one needs:
            its outputs are sums of many signs.

    Raises:
        ValueError: a number below 1, an `image_size` that is no multiple of 8, or an input of another size.
        TypeError: `activation` makes no module.
    """

    def __init__(
        self,
        in_channels: int,
        num_classes: int,
        *,
        hidden: int | None,
        pool_first: bool,
        image_size: int = 32,
        activation: Activation = nn.ReLU,
        norm_outputs: bool = False,
    ) -> None:
        super().__init__()
        check_at_least_one(in_channels=in_channels, num_classes=num_classes, image_size=image_size)
        if image_size % SHRINKS:
            raise ValueError(f"image_size (={image_size}) must be a multiple of {SHRINKS}")
        self.size = ImageSize(image_size)
        blocks, channels = [], in_channels
        for index, width in enumerate(WIDTHS):
            blocks.append(ConvBlock(channels, width, pool=index % 2 == 1, pool_first=pool_first, act=activation))
            channels = width
        self.blocks = nn.Sequential(*blocks)
        features = channels * (image_size // SHRINKS) ** 2
        self.hidden = nn.Identity()
        if hidden is not None:
            check_at_least_one(hidden=hidden)
            act = build_activation(activation, hidden)
            self.hidden = nn.Sequential(nn.Linear(features, hidden, bias=False), nn.BatchNorm1d(hidden), act)
            features = hidden
        self.fc = nn.Linear(features, num_classes)
        self.norm = nn.BatchNorm1d(num_classes, affine=False) if norm_outputs else None

    def forward(self, input: Tensor) -> Tensor:
        """(N, C, image_size, image_size) to (N, num_classes)."""
        outputs = self.fc(self.hidden(self.blocks(self.size(input)).flatten(1)))
        return outputs if self.norm is None else self.norm(outputs)


def vgg_small(
    in_channels: int = 3,
    num_classes: int = 10,
    *,
    image_size: int = 32,
    activation: Activation = nn.Hardtanh,
    norm_outputs: bool = False,
) -> VGG:
    """VGG-small of the binary networks: 4,660,106 parameters at the defaults.

    Convolution → pooling → batch norm → activation; published with Hardtanh. First and last layer stay float:
    ``skip=("first", "last")``. Arguments and errors are as in `VGG`.
    """
    return VGG(
        in_channels,
        num_classes,
        hidden=None,
        pool_first=True,
        image_size=image_size,
        activation=activation,
        norm_outputs=norm_outputs,
    )


def vgg7(in_channels: int = 3, num_classes: int = 10, *, image_size: int = 32, activation: Activation = nn.ReLU) -> VGG:
    """VGG-7 of TWN: 2×128 - pool - 2×256 - pool - 2×512 - pool - 1024 - classes, 12,979,082 parameters at the defaults.

    Convolution → batch norm → ReLU → pooling. TWN makes all layers ternary but the last: ``skip=("last",)``. Arguments
    and errors are as in `VGG`.
    """
    return VGG(in_channels, num_classes, hidden=1024, pool_first=False, image_size=image_size, activation=activation)
