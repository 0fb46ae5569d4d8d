"""The autograd Function of every quantized layer, over two quantizers and an operation.

``output = op(quantize(input), quantize(weight), bias)``; if both are whole numbers times a scale, the sums are exact
and scaled afterwards (`qconv.sums`). The backward calls the convolution gradients of `qconv.grad` on the quantized
operands and then each quantizer's pseudo-gradient. It saves the float input and the latent weight, which autograd keeps
for `torch.nn.Conv2d` as well. The quantized copies are computed again, which costs about as much as copying.
"""

from collections.abc import Sequence
from itertools import accumulate, chain
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from .operations import ExtendedOperation, Operation
from .quantizers import Quantizer
from .quantizers.node import as_called, held, once_differentiable
from .sums import scaled_sums

T = TypeVar("T")


class LayerQuantizers(NamedTuple):
    """The quantizers of a layer, and whether ``grad_input`` uses the quantized or the float weight."""

    input: Quantizer
    weight: Quantizer
    grad: Quantizer | None = None
    backward_weight: Literal["quantized", "float"] = "quantized"

    def as_called(self) -> "LayerQuantizers":
        """Return the quantizers for a Function, protected from later changes of mode or stage."""
        grad = None if self.grad is None else as_called(self.grad)
        return LayerQuantizers(as_called(self.input), as_called(self.weight), grad, self.backward_weight)


def quantized_op(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    op: Operation | ExtendedOperation,
    quantizers: LayerQuantizers,
    *extra: Tensor,
) -> Tensor:
    """Apply ``op`` to the quantized input and weight, with straight-through gradients to the float ones.

    Forward: ``op(input_q, weight_q, bias, *extra)``; ``weight_q`` is computed in the weight's dtype and cast to the
    input's, in which the operation and its gradients run. If `qconv.sums.scaled_sums` can compute it, the output is the
    exact sum of whole numbers, times the scales, plus the bias.

    Backward: with ``g = grad_quantizer(grad_output)``, ``grad_input = dq_input(op_input(g, weight_q))``, ``grad_weight
    = dq_weight(op_weight(g, input_q))``, ``grad_bias = op_bias(g)``, and each quantizer's learned tensors get their
    gradients. ``extra``, the tensors of the operation that are not quantized, get ``op_extra(g, input_q, weight_q)``.
    With a float ``backward_weight``, they and the input are differentiated at the float weight.

    Mode, stage and schedules are those at the time of the forward, in the backward too.

    Differentiating a second time raises a RuntimeError: a pseudo-gradient has no meaningful derivative.
    """
    of_input, of_weight = quantizers.input.tensors(), quantizers.weight.tensors()
    of_grad = () if quantizers.grad is None else quantizers.grad.tensors()
    counts = len(extra), len(of_input), len(of_weight)
    arguments = input, weight, bias, op, quantizers.as_called(), counts, *extra, *of_input, *of_weight, *of_grad
    # Without gradients torch 2.11 compiles a Function wrongly: it passes a context to forward, too.
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
        quantizers: LayerQuantizers,
        counts: tuple[int, int, int],
        *tensors: Tensor,
    ) -> Tensor:
        extra, input_tensors, weight_tensors, _ = _split(tensors, counts)
        of_input, of_weight = (quantizers.input, input_tensors), (quantizers.weight, weight_tensors)
        output = None if extra else scaled_sums(input, weight, bias, op, of_input, of_weight)
        if output is not None:
            return output
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
        # Each gradient reads the other operand, and those of extra tensors read both: quantize again only as needed.
        operand_input = quantizers.input.quantize(input, *input_tensors) if needs_weight or needs_both else input
        if (needs_input or needs_both) and quantizers.backward_weight == "quantized":
            operand_weight = quantizers.weight.quantize(weight, *weight_tensors).to(input.dtype)
        else:
            operand_weight = weight.to(input.dtype)
        output_mask = needs_input, needs_weight, needs_bias, *needs_extra
        grad_input, grad_weight, grad_bias, *grad_extra = op.backward(
            grad_output, operand_input, operand_weight, output_mask, *extra
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
    """Split the tensors: extra ones, then those of the quantizers of input, weight and gradient."""
    first, second, third = accumulate(counts)
    return items[:first], items[first:second], items[second:third], items[third:]
