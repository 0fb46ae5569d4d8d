"""Max pooling that keeps one byte per output; the twin keeps its input and an 8-byte index."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.modules.utils import _pair

from ..function.recipes import Recipe, forget, hang, is_recorded, recipe_of, runs_as_written
from ..quantizers.form import is_like_channels_last
from ..quantizers.node import once_differentiable
from .node import as_node

_aten = torch.ops.aten


class LeanMaxPool2d(nn.MaxPool2d):
    """`torch.nn.MaxPool2d` of a lean model."""

    float_type = nn.MaxPool2d

    def forward(self, input: Tensor) -> Any:
        if isinstance(input, fx.Proxy):
            return as_node(self, input)
        kernel, stride = _pair(self.kernel_size), _pair(self.stride)
        is_plain = input.ndim == 4 and not self.return_indices and kernel[0] * kernel[1] <= 256 and input.numel()
        if not runs_as_written() or not is_recorded() or not input.requires_grad or not is_plain:
            return super().forward(input)
        geometry = kernel, stride, _pair(self.padding), _pair(self.dilation), self.ceil_mode
        recipe = recipe_of(input)
        output = _MaxPool.apply(input, geometry)
        if recipe is not None:
            hang(output, Recipe(recipe.tensors, partial(_again, recipe.compute, geometry), recipe.convolutions))
        return output


class _MaxPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, geometry: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        output, indices = _aten.max_pool2d_with_indices(input, *geometry)
        places = indices.to(torch.int32)
        del indices  # 8 bytes for each output, which would be the peak of a network's step
        ctx.geometry, ctx.form = geometry, (input.shape, input.dtype, _memory_format(input))
        ctx.save_for_backward(_taps_(places, geometry, input.shape[3]))
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        forget(ctx)
        (grad,), (taps,), (shape, dtype, memory_format) = grad_outputs, ctx.saved_tensors, ctx.form
        indices = _indices(taps, ctx.geometry, shape[3])
        stand_in = torch.empty(shape, dtype=dtype, device=grad.device, memory_format=memory_format)  # not read
        return _aten.max_pool2d_with_indices_backward(grad, stand_in, *ctx.geometry, indices), None


def _origins(like: Tensor, geometry: Any) -> tuple[Tensor, Tensor]:
    """The row and the column of the first tap of each output."""
    _, stride, padding, *_ = geometry
    rows, columns = (torch.arange(size, dtype=torch.int32, device=like.device) for size in like.shape[2:])
    return (rows * stride[0] - padding[0]).view(-1, 1), columns * stride[1] - padding[1]


def _taps_(places: Tensor, geometry: Any, width: int) -> Tensor:
    """Return the tap of each output in its kernel, uint8, from indices in the image, which are overwritten."""
    (_, columns), dilation = geometry[0], geometry[3]
    top, left = _origins(places, geometry)
    row = places.div(width, rounding_mode="floor").sub_(top).div_(dilation[0], rounding_mode="floor")
    column = places.remainder_(width).sub_(left).div_(dilation[1], rounding_mode="floor")
    return row.mul_(columns).add_(column).to(torch.uint8)


def _indices(taps: Tensor, geometry: Any, width: int) -> Tensor:
    """The inverse of `_taps_`."""
    (_, columns), dilation = geometry[0], geometry[3]
    column = taps.to(torch.int32)
    top, left = _origins(taps, geometry)
    row = column.div(columns, rounding_mode="floor").mul_(dilation[0]).add_(top)
    return row.mul_(width).add_(column.remainder_(columns).mul_(dilation[1]).add_(left)).long()


def _memory_format(x: Tensor) -> torch.memory_format:
    return torch.channels_last if is_like_channels_last(x.shape, x.stride()) else torch.contiguous_format


def _again(compute: Callable[..., Tensor], geometry: Any, *tensors: Tensor) -> Tensor:
    return F.max_pool2d(compute(*tensors), *geometry)
