"""A weight of signs: its bits, its scales, and the input's gradient by lookup tables.

Layers compute on them whatever their input is: signs (`bit_operations`) or numbers (`number_operations`).
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ..kernels import sign_gradients as _registered  # noqa: F401
from ..kernels.window import Window
from ..quantizers import Quantizer, Whole
from ..quantizers.base import whole_of
from ..quantizers.form import Form, is_like_channels_last
from .held import form_of_weight
from .operations import Convolution, Linear

_ops = torch.ops.qconv


def window_of(op: Any) -> Window | None:
    """Return the positions of the kernel of ``op`` in two dimensions; None if it does not run on bits."""
    return op.window if isinstance(op, Convolution | Linear) else None


def has_window(op: Any) -> bool:
    """Whether ``op`` runs on bits: `window_of`, without making it."""
    return isinstance(op, Linear) or (isinstance(op, Convolution) and len(op.stride) < 3)


class Filters(NamedTuple):
    """A weight of signs: its shape, the bits and the sums of each tap as the kernels take them, and the filters' scale.

    The scale is float32; None is 1.
    """

    shape: torch.Size
    bits: Tensor
    sums: Tensor
    scale: Tensor | None = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors, for `torch.autograd.Function.apply`: ``Filters(shape, *tensors)`` are the filters."""
        return (self.bits, self.sums) if self.scale is None else (self.bits, self.sums, self.scale)

    @property
    def kernel_size(self) -> tuple[int, int]:
        """Height and width of the kernel."""
        sizes = (1, 1, *self.shape[2:])
        return sizes[-2], sizes[-1]

    @property
    def scales(self) -> Tensor | None:
        """The scale as ``(C_out,)``."""
        return None if self.scale is None else self.scale.flatten().expand(self.shape[0]).contiguous()


def filters_of(weight: Tensor, quantizer: Quantizer, tensors: Sequence[Tensor], groups: int) -> Filters:
    """Return the quantized weight as bits."""
    return form_of_weight(partial(_filters, weight, quantizer, tensors, groups), weight, quantizer, groups)


def _filters(weight: Tensor, quantizer: Quantizer, tensors: Sequence[Tensor], groups: int) -> Filters:
    values, scale = cast(Whole, whole_of(quantizer, weight, tensors))
    kernel = (1, 1, *weight.shape[2:])[-2:]
    bits, sums = _ops.pack_weight(values.view(*weight.shape[:2], *kernel), groups)
    return Filters(weight.shape, bits, sums, scale)


def picture_of(x: Tensor) -> Tensor:
    """View ``(N, C, *spatial)`` as an image, ``(N, C, H, W)``."""
    return x.view(*x.shape[:2], *(1, 1, *x.shape[2:])[-2:])


def as_by_torch(result: Tensor, input: Form, weight: Tensor) -> Tensor:
    """Convert a channels_last result to the format of torch's convolution: the input's or the weight's."""
    if input.picture_is_last or (weight.ndim == 4 and is_like_channels_last(weight.shape, weight.stride())):
        return result
    # A copy, for where a side is 1 it is contiguous already, but with strides by which others choose their format.
    return result.contiguous() if result.ndim == 2 else result.clone(memory_format=torch.contiguous_format)


def input_gradient(
    grad_output: Tensor, filters: Filters, scales: Tensor | None, window: Window, shape: Sequence[int]
) -> Tensor:
    """Return the gradient of an input of this shape, ``(N, C, *spatial)``, by lookup with the weight's signs.

    ``scales`` of the filters are ``(C_out,)``, float32.
    """
    stride, padding, dilation, _, _ = window
    size = (1, 1, *shape[2:])[-2:]
    grad = _ops.sign_grad_input(
        picture_of(grad_output), filters.bits, scales, shape[1], size, stride, padding, dilation
    )
    return grad.view(shape)
