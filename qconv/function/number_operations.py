"""Convolutions and linear layers of numbers with a weight of signs, by lookup tables.

The output and the gradient of the input are sums of numbers whose signs are those of the weight
(`qconv.kernels.look_up`). The gradient of the weight has no signs in it, and is torch's own. Images are
channels_last, in which the look-up reads and writes them, and in which torch's gradient of the weight is not slower.
"""

from typing import Any

import torch
from torch import Tensor

from ..grad.kernel import Gradients
from ..kernels import sign_conv as _registered  # noqa: F401
from ..kernels.look_up import is_fast, weight_pays
from ..kernels.sizes import Sizes
from ..quantizers import Quantizer
from ..quantizers.base import is_plain_cpu
from ..quantizers.form import Form
from .operations import Linear, OutputMask
from .sign_weight import Filters, as_by_torch, input_gradient, picture_of, window_of

_ops = torch.ops.qconv
_PACKED = 1 << 22  # multiplications that make up for quantizing and packing the weight apart


def sizes_of(op: Any, quantizer: Quantizer, input: Tensor, weight: Tensor) -> Sizes | None:
    """Return the sizes of the convolution if its weight is signs and lookup is faster; else None.

    It depends on nothing but the machine and the arguments' sizes, dtypes and devices.
    """
    window = window_of(op)
    if window is None or not quantizer.is_binary or input.dtype not in (torch.float32, torch.bfloat16):
        return None
    if torch.compiler.is_compiling() or not (is_plain_cpu(input) and is_plain_cpu(weight)):
        return None
    shape = input.shape
    if isinstance(op, Linear):
        shape = input.shape[:-1].numel(), input.shape[-1]
    height, width, kernel_h, kernel_w = *(1, 1, *shape[2:])[-2:], *(1, 1, *weight.shape[2:])[-2:]
    sizes = Sizes(shape[0], (shape[1], weight.shape[0]), (height, width), (kernel_h, kernel_w), window)
    pays = sizes.products >= _PACKED and weight_pays(sizes)
    return sizes if pays and is_fast() else None


def forward_of_numbers(
    values: Tensor, filters: Filters, scale: Tensor | None, bias: Tensor | None, sizes: Sizes
) -> Tensor:
    """Return ``scale_o · Σ sign · value + bias_o`` in the dtype of the values.

    The sum is rounded after the product and after the bias. Sums of whole numbers are exact below 2^24.

    Args:
        values: the quantized input, or the whole numbers of it.
        filters: the weight.
        scale: of the sums, in a shape that broadcasts against ``(C_out, 1, 1)``, in the dtype of the values.
        bias: of the output.
        sizes: of the convolution.
    """
    channels, window = sizes.channels[1], sizes.window
    scales = None if scale is None else scale.flatten().float().expand(channels).contiguous()
    output = _ops.sign_conv2d(
        *(_picture(values, filters), filters.bits, scales, None if bias is None else bias.float(), channels),
        *(window.stride, window.padding, window.dilation, window.padding_value),
    )
    if len(filters.shape) == 4:
        return output
    shape = (*values.shape[:-1], channels) if len(filters.shape) == 2 else (*output.shape[:2], output.shape[3])
    # No view for autograd, which would refuse an activation in place after the layer.
    return torch.ops.aten._unsafe_view(output.contiguous(), shape)


def backward_of_numbers(
    op: Any, filters: Filters, sizes: Sizes, grad_output: Tensor, input: Tensor, weight: Tensor, mask: OutputMask
) -> Gradients:
    """Return the gradients of input, weight and bias; None where ``mask`` is False.

    Of ``input``, which is quantized, only the form is read unless the gradient of the weight is requested. ``weight``
    gives the memory format of its gradient, and of the input's, too, if it is channels_last.
    """
    last = torch.channels_last if len(filters.shape) == 4 else torch.contiguous_format
    grad_output, grad_input = grad_output.contiguous(memory_format=last), None
    if mask[0]:
        scales = filters.scales
        scales = None if scales is None else scales.to(grad_output.dtype).float()
        grad = _picture(grad_output, filters)
        of_picture = input_gradient(grad, filters, scales, sizes.window, sizes.input)
        grad_input = as_by_torch(of_picture.reshape(input.shape), Form.of(input), weight)
    stand_in = grad_output.new_empty(filters.shape).to(memory_format=last)  # its values are not read
    if mask[1]:
        input = input.contiguous(memory_format=last)
    _, grad_weight, grad_bias = op.backward(grad_output, input, stand_in, (False, *mask[1:]))
    if grad_weight is not None and weight.is_contiguous():  # else what follows would convert one of the two each time
        grad_weight = grad_weight.contiguous()
    return grad_input, grad_weight, grad_bias


def _picture(x: Tensor, filters: Filters) -> Tensor:
    """View an operand of the layer of these filters as images, ``(N, C, H, W)``: each row of a linear one is one."""
    return picture_of(x.reshape(-1, x.shape[-1]) if len(filters.shape) == 2 else x)
