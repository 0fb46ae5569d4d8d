"""The autograd Function of every quantized layer, over two quantizers and an operation.

``output = op(quantize(input), quantize(weight), bias)``. The backward calls the convolution gradients of `qconv.grad`
on the quantized operands and then each quantizer's pseudo-gradient. What is saved is the float input and the latent
weight, which autograd keeps for `torch.nn.Conv2d` as well: the quantized copies are computed again, which costs about
as much as copying.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from .grad import conv_backward
from .integer import conv2d_signs, has_fast_integers, signs_pay
from .quantizers import Quantizer
from .quantizers.base import as_called, held, is_plain_cpu, once_differentiable

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]
Mask = tuple[bool, bool, bool]
T = TypeVar("T")


class Operation(Protocol):
    """A bilinear operation with a bias, and its gradients.

    Weights are handed over in filter layout: dimension 0 is the output channel.
    """

    def forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The output."""
        ...

    def backward(self, grad_output: Tensor, input: Tensor, weight: Tensor, mask: Mask) -> Gradients:
        """Gradients of input, weight and bias; None where ``mask`` is False.

        An operand that no gradient needs is not read.
        """
        ...


class ExtendedOperation(Protocol):
    """An `Operation` that also reads ``extra`` differentiable tensors, which are not quantized: offsets, masks."""

    def forward(self, input: Tensor, weight: Tensor, bias: Tensor | None, *extra: Tensor) -> Tensor:
        """The output."""
        ...

    def backward(
        self, grad_output: Tensor, input: Tensor, weight: Tensor, mask: tuple[bool, ...], *extra: Tensor
    ) -> tuple[Tensor | None, ...]:
        """Gradients of input, weight, bias and each extra tensor; None where ``mask`` is False.

        Of input and weight, the quantized values are there if the other one or an extra tensor needs its gradient.
        """
        ...


@dataclass(frozen=True)
class Convolution:
    """Convolution in 1, 2 or 3 dimensions.

    Attributes:
        border: explicit padding in the order of `torch.nn.functional.pad`, filled with ``border_value``; it carries
            what ``padding`` can't: unequal sides and values other than 0. Empty when there is none.
    """

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    border: tuple[int, ...] = ()
    border_value: float = 0.0

    def forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        input = self._pad(input)
        zeros = (0,) * len(self.stride)
        return torch.convolution(
            input, weight, bias, self.stride, self.padding, self.dilation, False, zeros, self.groups
        )

    def forward_signs(self, input: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """The output in two dimensions, from int8 signs."""
        geometry = self.stride, self.padding, self.dilation, self.groups
        return conv2d_signs(input, weight, *geometry, self.border, int(self.border_value), dtype)

    def backward(self, grad_output: Tensor, input: Tensor, weight: Tensor, mask: Mask) -> Gradients:
        grad_input, grad_weight, grad_bias = conv_backward(
            grad_output,
            self._pad(input),
            weight,
            self.stride,
            self.padding,
            self.dilation,
            self.groups,
            output_mask=mask,
        )
        if grad_input is not None and self.border:
            grad_input = F.pad(grad_input, [-side for side in self.border])
        return grad_input, grad_weight, grad_bias

    def _pad(self, input: Tensor) -> Tensor:
        return F.pad(input, self.border, value=self.border_value) if self.border else input


@dataclass(frozen=True)
class TransposedConvolution:
    """Transposed convolution in 1, 2 or 3 dimensions, its weight ``(C_out, C_in / groups, *kernel_size)``."""

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

    def backward(self, grad_output: Tensor, input: Tensor, weight: Tensor, mask: Mask) -> Gradients:
        grad_input, grad_weight, grad_bias = conv_backward(
            grad_output,
            input,
            exchange_channels(weight, self.groups),
            self.stride,
            self.padding,
            self.dilation,
            self.groups,
            transposed=True,
            output_padding=self.output_padding,
            output_mask=mask,
        )
        if grad_weight is not None:
            grad_weight = exchange_channels(grad_weight, self.groups)
        return grad_input, grad_weight, grad_bias


@dataclass(frozen=True)
class Linear:
    """``input @ weight.T + bias`` over any leading dimensions."""

    def forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(input, weight, bias)

    def backward(self, grad_output: Tensor, input: Tensor, weight: Tensor, mask: Mask) -> Gradients:
        grad_input = grad_weight = grad_bias = None
        rows = grad_output.reshape(-1, grad_output.shape[-1])
        if mask[0]:
            grad_input = (rows @ weight).reshape(input.shape)
        if mask[1]:
            grad_weight = rows.t() @ input.flatten(end_dim=-2) if input.ndim > 1 else torch.outer(rows[0], input)
        if mask[2]:
            grad_bias = rows.sum(0)
        return grad_input, grad_weight, grad_bias


def exchange_channels(weight: Tensor, groups: int) -> Tensor:
    """Exchange the two channel dimensions within each group: ``(G·a, b, *k)`` to ``(G·b, a, *k)``; its own inverse."""
    if groups == 1:
        return weight.transpose(0, 1)
    return weight.unflatten(0, (groups, -1)).transpose(1, 2).flatten(0, 1)


def _signs_pay(input: Tensor, weight: Tensor, op: Convolution, quantizers: "Quantizers") -> bool:
    """Whether the forward runs on integers; a bias would be added in another order than in the float convolution."""
    return (
        (quantizers.input.signs and quantizers.weight.signs)
        and (
            input.ndim == 4
            and input.dtype in (torch.float32, torch.bfloat16)
            and is_plain_cpu(input)
            and is_plain_cpu(weight)
        )
        and not torch.compiler.is_compiling()
        and has_fast_integers()
        and signs_pay(input, weight, op.stride)
    )


class Quantizers(NamedTuple):
    """The quantizers of a layer, and whether ``grad_input`` is taken at the quantized or at the float weight."""

    input: Quantizer
    weight: Quantizer
    grad: Quantizer | None = None
    backward_weight: Literal["quantized", "float"] = "quantized"

    def as_called(self) -> "Quantizers":
        """The quantizers for a Function, which a later change of mode or stage must not reach."""
        grad = None if self.grad is None else as_called(self.grad)
        return Quantizers(as_called(self.input), as_called(self.weight), grad, self.backward_weight)


def quantized_op(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    op: Operation | ExtendedOperation,
    quantizers: Quantizers,
    *extra: Tensor,
) -> Tensor:
    """Apply ``op`` to the quantized input and weight, with straight-through gradients to the float ones.

    Forward: ``op(input_q, weight_q, bias, *extra)``; ``weight_q`` is computed in the weight's dtype and cast to the
    input's, in which the operation and its gradients run.

    Backward: with ``g = grad_quantizer(grad_output)``, ``grad_input = dq_input(op_input(g, weight_q))``,
    ``grad_weight = dq_weight(op_weight(g, input_q))``, ``grad_bias = op_bias(g)``, and each quantizer's learned tensors
    get theirs. ``extra``, tensors of the operation that are not quantized, get ``op_extra(g, input_q, weight_q)``; with
    a float ``backward_weight``, they as well as the input are differentiated at the float weight.

    Mode, stage and schedules are those of the moment of the forward, in the backward too.

    A second differentiation raises a RuntimeError: a pseudo-gradient has no derivative that means anything.
    """
    of_input, of_weight = quantizers.input.tensors(), quantizers.weight.tensors()
    of_grad = () if quantizers.grad is None else quantizers.grad.tensors()
    counts = len(extra), len(of_input), len(of_weight)
    arguments = input, weight, bias, op, quantizers.as_called(), counts, *extra, *of_input, *of_weight, *of_grad
    # Without gradients torch 2.11 compiles a Function wrongly: it hands forward a context, too.
    if torch.compiler.is_compiling() and not torch.is_grad_enabled():
        return _QuantizedOp.forward(*arguments)
    return _QuantizedOp.apply(*arguments)


class _QuantizedOp(torch.autograd.Function):
    @staticmethod
    def forward(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        op: Any,
        quantizers: Quantizers,
        counts: tuple[int, int, int],
        *tensors: Tensor,
    ) -> Tensor:
        extra, input_tensors, weight_tensors, _ = _split(tensors, counts)
        if isinstance(op, Convolution) and bias is None and _signs_pay(input, weight, op, quantizers):
            input_codes = quantizers.input.codes(input, *input_tensors).values
            weight_codes = quantizers.weight.codes(weight, *weight_tensors).values
            return op.forward_signs(input_codes, weight_codes, input.dtype)
        input_q = quantizers.input.quantize(input, *input_tensors)
        weight_q = quantizers.weight.quantize(weight, *weight_tensors).to(input.dtype)
        return op.forward(input_q, weight_q, bias, *extra)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        input, weight, _, ctx.op, ctx.quantizers, ctx.counts, *tensors = inputs
        extra, *others = _split(tensors, ctx.counts)
        kept = [held(q, own) for q, own in zip(ctx.quantizers[:3], others, strict=True) if q is not None]
        ctx.save_for_backward(input, weight, *extra, *chain.from_iterable(kept))

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  # the decorator hides the names
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        (grad_output,) = grad_outputs
        op, quantizers = ctx.op, ctx.quantizers
        input, weight, *tensors = ctx.saved_tensors
        extra, input_tensors, weight_tensors, grad_tensors = _split(tensors, ctx.counts)
        needs_extra, needs_input_tensors, needs_weight_tensors, _ = _split(ctx.needs_input_grad[6:], ctx.counts)
        needs_bias = ctx.needs_input_grad[2]
        needs_input = ctx.needs_input_grad[0] or any(needs_input_tensors)
        needs_weight = ctx.needs_input_grad[1] or any(needs_weight_tensors)
        needs_both = any(needs_extra)

        if quantizers.grad is not None:
            grad_output = quantizers.grad.quantize(grad_output, *grad_tensors)
        # Each gradient reads the other operand, and those of extra tensors both: quantize again only what is read.
        operand_input = quantizers.input.quantize(input, *input_tensors) if needs_weight or needs_both else input
        if (needs_input or needs_both) and quantizers.backward_weight == "quantized":
            operand_weight = quantizers.weight.quantize(weight, *weight_tensors).to(input.dtype)
        else:
            operand_weight = weight.to(input.dtype)
        mask = needs_input, needs_weight, needs_bias, *needs_extra
        grad_input, grad_weight, grad_bias, *grad_extra = op.backward(
            grad_output, operand_input, operand_weight, mask, *extra
        )

        input_grads: tuple[Tensor | None, ...] = (None,) * (1 + len(input_tensors))
        weight_grads: tuple[Tensor | None, ...] = (None,) * (1 + len(weight_tensors))
        if grad_input is not None:
            input_grads = quantizers.input.backward(grad_input, input, *input_tensors)
        if grad_weight is not None:
            weight_grads = quantizers.weight.backward(grad_weight.to(weight.dtype), weight, *weight_tensors)
        firsts = input_grads[0], weight_grads[0], grad_bias, None, None, None
        return *firsts, *grad_extra, *input_grads[1:], *weight_grads[1:], *(None for _ in grad_tensors)


def _split(items: Sequence[T], counts: tuple[int, int, int]) -> tuple[Sequence[T], ...]:
    """Those of the extra tensors, of the input's quantizer, of the weight's and of the gradient's."""
    first, second, third = accumulate(counts)
    return items[:first], items[first:second], items[second:third], items[third:]
