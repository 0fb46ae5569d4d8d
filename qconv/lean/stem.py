"""A float convolution with few input channels: cheap to compute again."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from ..function.kept_input import Lean
from ..function.recipes import Recipe, hang, runs_as_written, with_autocast_of_now
from ..kernels.onednn import overruns
from .node import as_node

CHANNELS = 4
"""The largest number of input channels that counts as few."""


class LeanConv2d(nn.Conv2d):
    """`torch.nn.Conv2d` with few input channels in a lean model: a later layer can compute its output again."""

    float_type = nn.Conv2d
    lean: Lean = "fast"

    def forward(self, input: Tensor) -> Tensor:
        if isinstance(input, fx.Proxy):
            return as_node(self, input)
        if not torch.is_grad_enabled() or not runs_as_written():  # as its twin, to the last bit
            return super().forward(input)
        if overruns(self.in_channels // self.groups, self.kernel_size, self.stride):
            input = input.contiguous()
        weight, bias = self.weight, self.bias  # each once: they may be computed, as by a parametrization
        output = self._conv_forward(input, weight, bias)
        if self.padding_mode != "zeros" or not input.is_floating_point():
            return output
        geometry = self.stride, self.padding, self.dilation, self.groups
        tensors = input, weight, *([] if bias is None else [bias])
        return hang(output, Recipe(tensors, with_autocast_of_now(partial(_again, geometry), input.device), 1))


def _again(geometry: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.conv2d(input, weight, bias, *geometry)
