"""The two gradients of a binary convolution, as `torch.library` operators: one factor of each product is a sign.

The other factor is `grad_output`. Signs are the bits of `operators`, 1 for −1. The definitions are torch's own gradient
convolutions of the unpacked signs; on a GPU these are cuDNN's in the dtype of `grad_output`, and no kernel of ours. On
the CPU a C kernel looks sums of several products up in tables of float32; its result does not depend on the number of
threads. Neither operator has a gradient.

>>> weight, _ = pack_weight(torch.tensor([[1, -1], [-1, -1]]).view(2, 2, 1, 1))
>>> grad_output = torch.tensor([3.0, 5.0]).view(1, 2, 1, 1)
>>> torch.ops.qconv.sign_grad_input(grad_output, weight, None, 2, (1, 1), (1, 1), (0, 0, 0, 0), (1, 1)).flatten()
tensor([-2., -8.])
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .library import LIBRARY, register
from .look_up import look_up_grad_input, look_up_grad_weight
from .onednn import overruns
from .operators import pack_weight as pack_weight, unpack_weight
from .sizes import Sizes, must_be
from .window import Window

LIBRARY.define(
    "sign_grad_input(Tensor grad_output, Tensor weight, Tensor? scale, int in_channels, int[2] input_size, "
    "int[2] stride, int[4] padding, int[2] dilation, Tensor? passes=None) -> Tensor"
)
LIBRARY.define(
    "sign_grad_weight(Tensor grad_output, Tensor input, int in_channels, int[2] kernel_size, int[2] stride, "
    "int[4] padding, int[2] dilation, int groups, int padding_value) -> Tensor"
)


def _checked(grad_output: Tensor, sizes: Sizes, **others: tuple[Tensor | None, Sequence[int], torch.dtype]) -> None:
    if not grad_output.is_floating_point():
        raise TypeError(f"grad_output (of dtype {grad_output.dtype}) must be floating point")
    must_be("grad_output", grad_output, sizes.output, grad_output.dtype, grad_output.device)
    for name, (tensor, shape, dtype) in others.items():
        if tensor is not None:
            must_be(name, tensor, shape, dtype, grad_output.device)


def _of_input(
    grad_output: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    in_channels: int,
    input_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    passes: Tensor | None = None,
) -> tuple[Tensor, Sizes, Tensor, Tensor | None, Tensor | None]:
    if grad_output.ndim != 4 or weight.ndim != 6:
        raise ValueError(
            f"grad_output (of shape {tuple(grad_output.shape)}) must be (N, C_out, H, W), and weight (of shape "
            f"{tuple(weight.shape)}) what pack_weight makes"
        )
    batch, out_channels = grad_output.shape[:2]
    window = Window.of(stride, padding, dilation, weight.shape[0])
    channels, kernel = (in_channels, out_channels), (weight.shape[2], weight.shape[3])
    sizes = Sizes(batch, channels, (input_size[0], input_size[1]), kernel, window).checked()
    _checked(
        *(grad_output, sizes),
        weight=(weight, sizes.packed, torch.int64),
        scale=(scale, (out_channels,), torch.float32),
        passes=(passes, sizes.bits, torch.int64),
    )
    return grad_output, sizes, weight, scale, passes


def _of_weight(
    grad_output: Tensor,
    input: Tensor,
    in_channels: int,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    padding_value: int,
) -> tuple[Tensor, Sizes, Tensor]:
    if grad_output.ndim != 4 or input.ndim != 4:
        raise ValueError(
            f"grad_output (of shape {tuple(grad_output.shape)}) must be (N, C_out, H, W), and input (of shape "
            f"{tuple(input.shape)}) what pack_signs makes"
        )
    window = Window.of(stride, padding, dilation, groups, padding_value)
    channels, kernel = (in_channels, grad_output.shape[1]), (kernel_size[0], kernel_size[1])
    sizes = Sizes(input.shape[0], channels, (input.shape[1], input.shape[2]), kernel, window).checked()
    _checked(grad_output, sizes, input=(input, sizes.bits, torch.int64))
    return grad_output, sizes, input


def _backward(
    grad_output: Tensor, input: Tensor, weight: Tensor, window: Window, padding: Sequence[int], of: int
) -> Any:
    mask = [of == 0, of == 1, False]
    geometry = window.stride, padding, window.dilation, False, (0, 0), window.groups
    return torch.ops.aten.convolution_backward(grad_output, input, weight, None, *geometry, mask)[of]


def sign_grad_input(
    grad_output: Tensor, sizes: Sizes, weight: Tensor, scale: Tensor | None = None, passes: Tensor | None = None
) -> Tensor:
    """Return the gradient of a convolution's input, ``(N, in_channels, H, W)``, channels_last.

    Args:
        grad_output: ``(N, C_out, *out)``, of any floating-point dtype; the result has the same.
        sizes: of the convolution; `padding_value` has no influence.
        weight: the signs, as `pack_weight` makes them.
        scale: ``(C_out,)`` float32, which multiplies grad_output.
        passes: bits as `pack_signs` makes them; the gradient becomes 0 where they are 0.
    """
    window, (height, width) = sizes.window, sizes.input_size
    signs = unpack_weight(weight, *sizes.channels, grad_output.dtype)
    if scale is not None:
        grad_output = (grad_output * scale.view(-1, 1, 1)).to(grad_output.dtype)
    left, right, top, bottom = window.padding
    if window.is_symmetric:
        shape, padding = sizes.input, (top, left)
    else:
        shape, padding = (*sizes.input[:2], height + top + bottom, width + left + right), (0, 0)
    grad = _backward(grad_output, grad_output.new_empty(1).expand(shape), signs, window, padding, of=0)
    if not window.is_symmetric:
        grad = grad[..., top : top + height, left : left + width]
    if passes is not None:
        grad = torch.ops.qconv.where_passes(grad, passes, window.groups)
    return grad.contiguous(memory_format=torch.channels_last)


def sign_grad_weight(grad_output: Tensor, sizes: Sizes, input: Tensor) -> Tensor:
    """Return the gradient of a convolution's weight, ``(C_out, in_channels / groups, *kernel)``, contiguous.

    Args:
        grad_output: ``(N, C_out, *out)``, of any floating-point dtype; the result has the same.
        sizes: of the convolution; the padding of the input counts as `padding_value`.
        input: the signs, as `pack_signs` makes them.
    """
    window = sizes.window
    last = not overruns(sizes.channels[0] // window.groups, sizes.kernel_size, window.stride)
    signs = torch.ops.qconv.unpack_signs(input, sizes.channels[0], window.groups, grad_output.dtype, last)
    signs, padding = window.pad_but_zeros(signs)
    weight = grad_output.new_empty(1).expand(sizes.weight)
    return _backward(grad_output, signs, weight, window, padding, of=1).contiguous()


def _shape_of_input(grad_output: Tensor, sizes: Sizes, *_: Any) -> Tensor:
    like = {"dtype": grad_output.dtype, "device": grad_output.device}
    return torch.empty(sizes.input, memory_format=torch.channels_last, **like)


def _shape_of_weight(grad_output: Tensor, sizes: Sizes, *_: Any) -> Tensor:
    return grad_output.new_empty(sizes.weight)


register(sign_grad_input, look_up_grad_input, operands=_of_input, shape=_shape_of_input)
register(sign_grad_weight, look_up_grad_weight, operands=_of_weight, shape=_shape_of_weight)
