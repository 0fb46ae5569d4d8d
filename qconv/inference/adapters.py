"""Modules around an integer layer that adapt its input or output."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels.window import Window
from ..quantizers import input_scale
from .frozen_layers import IntegerLayer


class OfLastDimension(nn.Module):
    """A linear layer as a convolution of single pixels, over any leading dimensions.

    Args:
        conv: a convolution with 1×1 kernels.
        of_rows: whether a batch norm was folded, whose channels are the last dimension only of a matrix.
    """

    def __init__(self, conv: IntegerLayer, of_rows: bool = False) -> None:
        super().__init__()
        self.conv, self.of_rows = conv, of_rows
        self.out_features = conv.channels[1]  # the export replaces conv by a layer that does not say

    def forward(self, input: Tensor) -> Tensor:
        """(*, in_features) to (*, out_features)."""
        if self.of_rows and input.ndim != 2:
            raise ValueError(
                f"input has shape {tuple(input.shape)}; with its batch norm folded it must be (N, features)"
            )
        return self.conv(input.reshape(-1, input.shape[-1], 1, 1)).reshape(*input.shape[:-1], self.out_features)


class Padded(nn.Module):
    """Pads as the trained layer did, if one value can't express that."""

    def __init__(self, sides: tuple[int, ...], mode: str, layer: nn.Module) -> None:
        super().__init__()
        self.sides, self.mode, self.layer = sides, mode, layer

    def forward(self, input: Tensor) -> Tensor:
        """Pad (N, C, H, W) and apply the layer."""
        return self.layer(F.pad(input, self.sides, mode=self.mode))


class WithScaleMap(nn.Module):
    """A layer with an output that is multiplied by XNOR-Net's map K of input magnitudes, before the bias is added."""

    bias: Tensor | None

    def __init__(
        self,
        layer: nn.Module,
        window: Window,
        kernel_size: tuple[int, ...] | None,
        out_channels: int,
        bias: Tensor | None,
    ) -> None:
        super().__init__()
        self.layer, self.window, self.kernel_size = layer, window, kernel_size  # None for a linear layer
        self.repeats = out_channels // window.groups
        self.register_buffer("bias", bias)

    def forward(self, input: Tensor) -> Tensor:
        """Floats of the layer's output shape."""
        output = self.layer(input) * self._map(input)
        if self.bias is None:
            return output
        return output + (self.bias if self.kernel_size is None else self.bias.view(-1, 1, 1))

    def _map(self, input: Tensor) -> Tensor:
        if self.kernel_size is None:
            return input.abs().mean(-1, keepdim=True)
        stride, padding, dilation, groups, _ = self.window  # the map is padded with 0, whatever the signs are
        scale = input_scale(F.pad(input, padding), self.kernel_size, stride, (0, 0), dilation, groups)
        return scale.repeat_interleave(self.repeats, 1)


class Distance(nn.Module):
    """The distance of a sum from its channel's threshold, as a float; the next layer's input is its sign."""

    factor: Tensor
    shift: Tensor

    def __init__(self, threshold: Tensor, falling: Tensor) -> None:
        super().__init__()
        self.register_buffer("factor", torch.where(falling, -1.0, 1.0).view(-1, 1, 1))
        self.register_buffer("shift", (0.5 - threshold.float()).view(-1, 1, 1))

    def forward(self, input: Tensor) -> Tensor:
        """(N, C, H, W) sums to the same shape."""
        return input * self.factor + self.shift
