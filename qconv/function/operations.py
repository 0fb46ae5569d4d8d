"""The operations of quantized layers, on operands that are already quantized, and their gradients."""

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ..grad.aten import aten_gradients
from ..grad.kernel import Gradients
from ..kernels.window import Window

OutputMask = tuple[bool, bool, bool]


class Operation(Protocol):
    """A bilinear operation with a bias, and its gradients.

    Weights are in filter layout: dimension 0 is the output channel.
    """

    def forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the output."""
        ...

    def backward(self, grad_output: Tensor, input: Tensor, weight: Tensor, output_mask: OutputMask) -> Gradients:
        """Return the gradients of input, weight and bias; None where ``output_mask`` is False.

        Operands that no requested gradient needs are not read.
        """
        ...


class ExtendedOperation(Protocol):
    """An `Operation` that also reads ``extra`` differentiable tensors, which are not quantized: offsets, masks."""

    def forward(self, input: Tensor, weight: Tensor, bias: Tensor | None, *extra: Tensor) -> Tensor:
        """Return the output."""
        ...

    def backward(
        self, grad_output: Tensor, input: Tensor, weight: Tensor, output_mask: tuple[bool, ...], *extra: Tensor
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of input, weight, bias and each extra tensor; None where ``output_mask`` is False.

        The quantized input is valid if the gradient of the weight or of an extra tensor is requested; likewise the
        weight.
        """
        ...


@dataclass(frozen=True)
class Convolution:
    """Convolution in 1, 2 or 3 dimensions.

    Attributes:
        border: explicit padding in the order of `torch.nn.functional.pad`, filled with ``border_value``, for what
            ``padding`` can't express: unequal sides and values other than 0. Empty if there is none.
    """

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    border: tuple[int, ...] = ()
    border_value: float = 0.0

    @property
    def window(self) -> Window | None:
        """The positions of the kernel in two dimensions, or in one as a row; None in three."""
        if len(self.stride) > 2:
            return None
        fill = [(0, 1, 1), *zip(self.padding, self.stride, self.dilation, strict=True)][-2:]
        (top, *_), (left, *_) = fill
        sides = [left, left, top, top]
        for place, side in enumerate(self.border):
            sides[place] += side
        strides, dilations = tuple(s for _, s, _ in fill), tuple(d for _, _, d in fill)
        return Window(strides, tuple(sides), dilations, self.groups, int(self.border_value))  # pyright: ignore

    def forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        input = self._pad(input)
        zeros = (0,) * len(self.stride)
        return torch.convolution(
            input, weight, bias, self.stride, self.padding, self.dilation, False, zeros, self.groups
        )

    def backward(self, grad_output: Tensor, input: Tensor, weight: Tensor, output_mask: OutputMask) -> Gradients:
        geometry = self.stride, self.padding, self.dilation, False, (0,) * len(self.stride), self.groups
        grads = aten_gradients(grad_output, self._pad(input), weight, grad_output.shape[1:2], *geometry, output_mask)
        grad_input, grad_weight, grad_bias = grads
        if grad_input is not None and self.border:
            grad_input = F.pad(grad_input, [-side for side in self.border])
        return grad_input, grad_weight, grad_bias

    def _pad(self, input: Tensor) -> Tensor:
        return F.pad(input, self.border, value=self.border_value) if self.border else input


@dataclass(frozen=True)
class TransposedConvolution:
    """Transposed convolution in 1, 2 or 3 dimensions; its weight is ``(C_out, C_in / groups, *kernel_size)``."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    output_padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return torch.convolution(
            input,
            exchange_channels(weight, self.groups),
            bias,
            self.stride,
            self.padding,
            self.dilation,
            True,
            self.output_padding,
            self.groups,
        )

    def backward(self, grad_output: Tensor, input: Tensor, weight: Tensor, output_mask: OutputMask) -> Gradients:
        geometry = self.stride, self.padding, self.dilation, True, self.output_padding, self.groups
        filters = exchange_channels(weight, self.groups)
        grads = aten_gradients(grad_output, input, filters, grad_output.shape[1:2], *geometry, output_mask)
        grad_input, grad_weight, grad_bias = grads
        if grad_weight is not None:
            grad_weight = exchange_channels(grad_weight, self.groups)
        return grad_input, grad_weight, grad_bias


@dataclass(frozen=True)
class Linear:
    """``input @ weight.T + bias`` over any leading dimensions."""

    window = Window()  # of a convolution with one position

    def forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(input, weight, bias)

    def backward(self, grad_output: Tensor, input: Tensor, weight: Tensor, output_mask: OutputMask) -> Gradients:
        grad_input = grad_weight = grad_bias = None
        # `flatten` and `unflatten` have no rule for gradients in batches (``is_grads_batched``).
        count = grad_output.shape[:-1].numel()
        rows = grad_output.reshape(count, grad_output.shape[-1])
        if output_mask[0]:
            grad_input = (rows @ weight).reshape(input.shape)
        if output_mask[1]:
            grad_weight = rows.t() @ input.reshape(count, input.shape[-1])
        if output_mask[2]:
            grad_bias = rows.sum(0)
        return grad_input, grad_weight, grad_bias


def exchange_channels(weight: Tensor, groups: int) -> Tensor:
    """Exchange the two channel dimensions within each group: ``(G·a, b, *k)`` to ``(G·b, a, *k)``; its own inverse."""
    if groups == 1:
        return weight.transpose(0, 1)
    outer, inner, *kernel = weight.shape
    by_groups = weight.reshape(groups, outer // groups, inner, *kernel)
    return by_groups.transpose(1, 2).reshape(groups * inner, outer // groups, *kernel)
