"""Convolutions and linear layers whose input and weight are signs, on the bits of them, and their gradients.

The forward counts bits. A gradient has one operand of ±1, and adds up numbers that were looked up by bits of it.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .grad.kernel import Gradients
from .kernels.sign_gradients import pack_weight
from .kernels.window import Window
from .operations import Convolution, Linear, OutputMask
from .quantizers import Whole
from .quantizers.form import Form

_ops = torch.ops.qconv


def window_of(op: Any) -> Window | None:
    """Return the positions of the kernel of ``op`` in two dimensions; None if it does not run on bits."""
    return op.window if isinstance(op, Convolution | Linear) else None


class BitOperands(NamedTuple):
    """Both operands of an operation on signs.

    Attributes:
        input: bits of the signs of the input.
        form: of the input.
        weight: +1 and −1, and a scale for each filter.
        window: of the kernel, in two dimensions.
    """

    input: Tensor
    form: Form
    weight: Whole
    window: Window

    @property
    def picture(self) -> Tensor:
        """The bits as ``(N, H, W, words)``."""
        batch, *spatial, words = self.input.shape
        return self.input.view(batch, *[1] * (2 - len(spatial)), *spatial, words)

    @property
    def kernel_size(self) -> tuple[int, int]:
        """Height and width of the kernel."""
        sizes = (1, 1, *self.weight.values.shape[2:])
        return sizes[-2], sizes[-1]

    def filters(self) -> tuple[Tensor, Tensor]:
        """The weight as bits, and the sums of its taps."""
        values = self.weight.values
        return pack_weight(values.view(*values.shape[:2], *self.kernel_size), self.window.groups)

    def channels(self) -> tuple[int, int]:
        """The numbers of input and output channels."""
        return self.form.channels, len(self.weight.values)


def forward_of_bits(operands: BitOperands, scale: Tensor | None) -> Tensor:
    """Return the sums times ``scale``, one number or one for each output channel, in the input's dtype.

    Pictures are channels_last.
    """
    weight, sums = operands.filters()
    outputs = len(operands.weight.values)
    one = torch.ones(outputs, device=sums.device)
    scales = one if scale is None else scale.flatten().float().expand(outputs).contiguous()
    stride, padding, dilation, _, value = operands.window
    output = _ops.binary_conv2d(
        *(operands.picture, weight, sums, *operands.channels(), stride, padding, dilation, value),
        *(scales, torch.zeros_like(one)),
    )
    return _like_input(output, operands).to(operands.form.dtype)


def backward_of_bits(operands: BitOperands, grad_output: Tensor, mask: OutputMask) -> Gradients:
    """Return the gradients of input, weight and bias; None where ``mask`` is False.

    Args:
        operands: those of the forward.
        grad_output: gradient of the output.
        mask: which gradients are requested.
    """
    form, window = operands.form, operands.window
    stride, padding, dilation, groups, value = window
    grad_input = grad_weight = grad_bias = None
    grad = grad_output.view(*grad_output.shape[:2], *(1, 1, *grad_output.shape[2:])[-2:])
    if mask[0]:
        size = (1, 1, *form.shape[2:])[-2:]
        scale = operands.weight.scale
        scale = None if scale is None else scale.flatten().float().expand(len(operands.weight.values)).contiguous()
        grad_input = _ops.sign_grad_input(
            grad, operands.filters()[0], scale, form.channels, size, stride, padding, dilation
        ).view(form.shape)
    if mask[1]:
        kernel = operands.kernel_size
        grad_weight = _ops.sign_grad_weight(
            grad, operands.picture, form.channels, kernel, stride, padding, dilation, groups, value
        ).view(operands.weight.values.shape)
    if mask[2]:
        grad_bias = grad_output.sum([0, *range(2, grad_output.ndim)])
    return grad_input, grad_weight, grad_bias


def _like_input(output: Tensor, operands: BitOperands) -> Tensor:
    """Drop the dimensions of size 1 that the input does not have."""
    count = len(operands.form.shape) - 2
    return output if count == 2 else output.view(*output.shape[:2], *output.shape[4 - count :])
