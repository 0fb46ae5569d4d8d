"""Convolutions and linear layers with signs for input and weight, computed on bits, and their gradients.

The forward counts bits. A gradient has one operand of ±1, and adds up numbers that were looked up by bits of it.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..grad.kernel import Gradients
from ..kernels.window import Window
from ..quantizers.form import Form
from .operations import OutputMask
from .sign_weight import Filters, as_by_torch, input_gradient, picture_of

_ops = torch.ops.qconv


class BitOperands(NamedTuple):
    """Both operands of an operation on signs: bits and form of the input, the filters, and the kernel's window."""

    input: Tensor
    form: Form
    weight: Filters
    window: Window

    @property
    def picture(self) -> Tensor:
        """The bits as ``(N, H, W, words)``."""
        batch, *spatial, words = self.input.shape
        return self.input.view(batch, *[1] * (2 - len(spatial)), *spatial, words)


def forward_of_bits(operands: BitOperands, factor: Tensor | None = None, summand: Tensor | None = None) -> Tensor:
    """Return the sums times the scale, in the input's dtype; images are channels_last.

    ``factor`` and ``summand``, float32 of each output channel, are applied to the result without rounding in between.
    """
    input, form, weight, (stride, padding, dilation, _, value) = operands
    scales = weight.scales
    if scales is None:
        scales = torch.ones(weight.shape[0], dtype=torch.float32, device=input.device)
    else:
        scales = scales.to(form.dtype).float()
    output = _ops.binary_conv2d(
        *(operands.picture, weight.bits, weight.sums, form.channels, weight.shape[0]),
        *(stride, padding, dilation, value, scales if factor is None else scales * factor),
        torch.zeros_like(scales) if summand is None else summand,
    )
    return _like_input(output, operands).to(form.dtype)


def backward_of_bits(operands: BitOperands, grad_output: Tensor, latent: Tensor, mask: OutputMask) -> Gradients:
    """Return the gradients of input, weight and bias; None where ``mask`` is False.

    ``latent`` is the weight before it was quantized, for its memory format.
    """
    form, weight = operands.form, operands.weight
    stride, padding, dilation, groups, value = operands.window
    grad_input = grad_weight = grad_bias = None
    if mask[0]:
        scales = None if weight.scales is None else weight.scales.float()
        grad_input = input_gradient(grad_output, weight, scales, operands.window, form.shape)
        grad_input = as_by_torch(grad_input, form, latent)
    if mask[1]:
        kernel = weight.kernel_size
        grad_weight = _ops.sign_grad_weight(
            picture_of(grad_output), operands.picture, form.channels, kernel, stride, padding, dilation, groups, value
        ).view(weight.shape)
    if mask[2]:
        grad_bias = grad_output.sum([0, *range(2, grad_output.ndim)])
    return grad_input, grad_weight, grad_bias


def _like_input(output: Tensor, operands: BitOperands) -> Tensor:
    """Drop the dimensions of size 1 that the input does not have.

    The result is no view for autograd, which would refuse an activation in place after the layer.
    """
    count = len(operands.form.shape) - 2
    shape = *output.shape[:2], *output.shape[4 - count :]
    return output if count == 2 else torch.ops.aten._unsafe_view(output, shape)
