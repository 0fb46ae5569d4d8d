"""The autograd Function of every quantized layer, over two quantizers and an operation.

``output = op(quantize(input), quantize(weight), bias)``; if both are whole numbers times a scale, the sums are exact
and scaled afterwards (`qconv.sums`). The backward calls the convolution gradients of `qconv.grad` on the quantized
operands and then each quantizer's pseudo-gradient.

It saves the float input and the latent weight, which autograd keeps for `torch.nn.Conv2d` as well. The quantized copies
are computed again, which costs about as much as copying. A lean layer saves bits in place of the input
(`qconv.kept_input`), and may compute on them (`qconv.bit_operations`).
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, chain, pairwise
from typing import Any, Literal, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from .bit_operations import BitOperands, backward_of_bits, filters_of, forward_of_bits, window_of
from .held import Held
from .kept_input import Keeping, KeptInput, Lean, Restored, keep, stand_in
from .kernels.window import Window
from .operations import ExtendedOperation, Operation
from .quantizers import Quantizer
from .quantizers.form import Form
from .quantizers.node import as_called, held, once_differentiable
from .recipes import Recipe, forget, hang, is_recorded
from .sums import quantized_weight, runs_in_integers, scaled_sums

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
    lean: Lean | None = None,
    name: Callable[[], str] = lambda: "a quantized layer",
) -> Tensor:
    """Apply ``op`` to the quantized input and weight, with straight-through gradients to the float ones.

    Forward: ``op(input_q, weight_q, bias, *extra)``; ``weight_q`` is computed in the weight's dtype and cast to the
    input's, in which the operation and its gradients run. If `qconv.sums.scaled_sums` can compute it, the output is the
    exact sum of whole numbers, times the scales, plus the bias.

    Backward: with ``g = grad_quantizer(grad_output)``, ``grad_input = dq_input(op_input(g, weight_q))``, ``grad_weight
    = dq_weight(op_weight(g, input_q))``, ``grad_bias = op_bias(g)``, and each quantizer's learned tensors get their
    gradients. ``extra``, the tensors of the operation that are not quantized, get ``op_extra(g, input_q, weight_q)``.
    With a float ``backward_weight``, they and the input are differentiated at the float weight.

    ``lean`` keeps bits in place of the input (`qconv.lean`): the gradients are the same bit for bit if ``"exact"``; if
    ``"fast"``, those of signs are float32 sums in another order. ``name`` gives the layer's, for messages.

    Mode, stage and schedules are those at the time of the forward, in the backward too.

    Differentiating a second time raises a RuntimeError: a pseudo-gradient has no meaningful derivative.
    """
    of_input, of_weight = quantizers.input.tensors(), quantizers.weight.tensors()
    of_grad = () if quantizers.grad is None else quantizers.grad.tensors()
    called, keeping = quantizers.as_called(), None
    kept: tuple[Tensor, ...] = ()
    again: tuple[Tensor, ...] = ()
    if lean is not None and is_recorded():
        keeping, kept = keep(input, called.input, of_input, op, lean, name)
        if keeping.form is not None and not extra and not torch.compiler.is_compiling():
            biases = () if bias is None else (bias,)
            # Views of learned numbers have nodes, by which a recipe would refer to them weakly.
            learned = (x.detach() for x in (*held(called.input, of_input), *held(called.weight, of_weight)))
            again = weight, *biases, *kept[: keeping.bits], *learned
    counts = len(extra), len(of_input), len(of_weight), len(of_grad), len(kept)
    tensors = *extra, *of_input, *of_weight, *of_grad, *kept, *again
    arguments = input, weight, bias, op, called, keeping, counts, *tensors
    # Without gradients torch 2.11 compiles a Function wrongly: it passes a context to forward, too.
    if torch.compiler.is_compiling() and not torch.is_grad_enabled():
        return _QuantizedOp.forward(*arguments)
    output = _QuantizedOp.apply(*arguments)
    if keeping is not None and again:
        given = op, called, keeping, (bias is not None, keeping.bits, len(of_input))
        on_bits, compute = _runs_on_bits(op, called, keeping), partial(_again, *given, None)
        affine = partial(_again, *given) if keeping.lean == "fast" and on_bits else None
        hang(output, Recipe(again, compute if on_bits else Held(compute), 1, affine=affine))
    return output


def _again(
    op: Any,
    quantizers: LayerQuantizers,
    keeping: Keeping,
    counts: tuple[int, ...],
    affine: tuple[Tensor, Tensor] | None,
    weight: Tensor,
    *tensors: Tensor,
) -> Tensor:
    """Return the output from what was kept of the input; if ``affine``, times its first plus its second tensor."""
    biases, bits, of_input, of_weight = _split(tensors, counts)
    bias = biases[0] if biases else None
    if _runs_on_bits(op, quantizers, keeping):
        return _output_of_bits(op, quantizers, keeping, bits[0], weight, bias, of_weight, affine)
    of_kept = Restored(quantizers.input, keeping, bits), of_input
    return _output(stand_in(keeping, bits), weight, bias, op, of_kept, (quantizers.weight, of_weight), keeping)


def _runs_on_bits(op: Any, quantizers: LayerQuantizers, keeping: Keeping) -> bool:
    """Whether the output is a sum of products of signs that is then scaled; if exact, bit for bit."""
    dtypes = (torch.float32,) if keeping.lean == "exact" else (torch.float32, torch.bfloat16)
    of_signs = quantizers.input.signs and quantizers.weight.is_binary
    return of_signs and keeping.form is not None and keeping.form.dtype in dtypes and window_of(op) is not None


def _bit_operands(
    op: Any, quantizers: LayerQuantizers, keeping: Keeping, signs: Tensor, weight: Tensor, of_weight: Sequence[Tensor]
) -> BitOperands:
    window = cast(Window, window_of(op))
    filters = filters_of(weight, quantizers.weight, of_weight, window.groups)
    return BitOperands(signs, cast(Form, keeping.form), filters, window)


def _output_of_bits(
    op: Any,
    quantizers: LayerQuantizers,
    keeping: Keeping,
    signs: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    of_weight: Sequence[Tensor],
    affine: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Return the output; of an exact layer in the memory format of one that is not lean."""
    operands = _bit_operands(op, quantizers, keeping, signs, weight, of_weight)
    if affine is not None:
        factor, summand = affine
        summand = summand if bias is None else summand + factor * bias
        return forward_of_bits(operands, factor.float(), summand.float())
    output = forward_of_bits(operands)
    is_last = operands.form.channels_last or (weight.ndim == 4 and _is_like_channels_last(weight))
    if not is_last and (keeping.lean == "exact" or output.ndim != 4):
        # A copy, for where a side is 1 it is contiguous already, but with strides by which others choose their format.
        output = output.contiguous() if output.ndim == 2 else output.clone(memory_format=torch.contiguous_format)
    return output if bias is None else output.add_(bias.view(-1, *[1] * (weight.ndim - 2)))


def _is_like_channels_last(x: Tensor) -> bool:
    """Whether torch's convolution takes ``x`` for channels_last: it asks the strides, those of sides of 1 as well."""
    (_, channels, height, width), (of_batch, of_channels, of_height, of_width) = x.shape, x.stride()
    ordered = of_channels * channels <= of_width and of_width * width <= of_height and of_height * height <= of_batch
    return ordered and of_channels < of_batch


def _output(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    op: Any,
    of_input: Any,
    of_weight: Any,
    keeping: Keeping | None,
    *extra: Tensor,
) -> Tensor:
    """Return the output, from quantizers and their tensors."""
    rounds = keeping is None or keeping.lean == "exact"
    output = None if extra else scaled_sums(input, weight, bias, op, of_input, of_weight, rounds)
    if output is not None:
        return output
    input_q, weight_q = (q.quantize(x, *tensors) for x, (q, tensors) in ((input, of_input), (weight, of_weight)))
    return op.forward(input_q, weight_q.to(input.dtype), bias, *extra)


class _QuantizedOp(torch.autograd.Function):
    @staticmethod
    def forward(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        op: Any,
        quantizers: LayerQuantizers,
        keeping: Keeping | None,
        counts: tuple[int, ...],
        *tensors: Tensor,
    ) -> Tensor:
        extra, input_tensors, weight_tensors, _, kept, _ = _split(tensors, counts)
        if keeping is not None and not extra and _runs_on_bits(op, quantizers, keeping):
            return _output_of_bits(op, quantizers, keeping, kept[0], weight, bias, weight_tensors)
        of_input, of_weight = (quantizers.input, input_tensors), (quantizers.weight, weight_tensors)
        return _output(input, weight, bias, op, of_input, of_weight, keeping, *extra)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        input, weight, _, ctx.op, ctx.quantizers, ctx.keeping, ctx.counts, *tensors = inputs
        extra, of_input, of_weight, of_grad, kept, again = _split(tensors, ctx.counts)
        owners = zip(ctx.quantizers[:3], (of_input, of_weight, of_grad), strict=True)
        own = chain.from_iterable(held(q, tensors) for q, tensors in owners if q is not None)
        ctx.save_for_backward(weight, *extra, *own, *(kept if ctx.keeping is not None else (input,)), *again)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  # the decorator hides the names
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        (grad_output,) = grad_outputs
        op, quantizers, keeping = ctx.op, ctx.quantizers, ctx.keeping
        if keeping is not None:
            forget(ctx)
        weight, *tensors = ctx.saved_tensors
        *others, kept, _ = _split(tensors, (*ctx.counts[:4], max(1, ctx.counts[4])))
        extra, input_tensors, weight_tensors, grad_tensors = others
        input = KeptInput(quantizers.input, input_tensors, keeping, kept)
        needs_extra, needs_input_tensors, needs_weight_tensors, *_ = _split(ctx.needs_input_grad[7:], ctx.counts)
        needs_bias = ctx.needs_input_grad[2]
        needs_input = ctx.needs_input_grad[0] or any(needs_input_tensors)
        needs_weight = ctx.needs_input_grad[1] or any(needs_weight_tensors)
        needs_both = any(needs_extra)
        output_mask = needs_input, needs_weight, needs_bias, *needs_extra

        if quantizers.grad is not None:
            grad_output = quantizers.grad.quantize(grad_output, *grad_tensors)
        if keeping is not None and keeping.lean == "fast" and _gradients_on_bits(op, quantizers, keeping):
            operands = _bit_operands(op, quantizers, keeping, kept[0], weight, weight_tensors)
            grads = backward_of_bits(operands, grad_output, output_mask)
        else:
            # Each gradient reads the other operand, those of extra tensors read both: quantize again only as needed.
            operand_input = input.operand() if needs_weight or needs_both else input.stand_in()
            if (needs_input or needs_both) and quantizers.backward_weight == "quantized":
                # What batch norm has just computed again, in integers, has left the weight in bytes.
                rounds, is_again = keeping is None or keeping.lean == "exact", keeping is not None
                in_integers = is_again and runs_in_integers(
                    operand_input, weight, op, quantizers.input, quantizers.weight, rounds
                )
                quantized = quantized_weight(weight, quantizers.weight, weight_tensors, in_integers)
                operand_weight = quantized.to(operand_input.dtype)
            else:
                operand_weight = weight.to(operand_input.dtype)
            grads = op.backward(grad_output, operand_input, operand_weight, output_mask, *extra)
        grad_input, grad_weight, grad_bias, *grad_extra = grads

        input_grads: tuple[Tensor | None, ...] = (None,) * (1 + len(input_tensors))
        weight_grads: tuple[Tensor | None, ...] = (None,) * (1 + len(weight_tensors))
        if grad_input is not None:
            input_grads = input.gradients(grad_input)
        if grad_weight is not None:
            weight_grads = quantizers.weight.backward(grad_weight.to(weight.dtype), weight, *weight_tensors)
        firsts = input_grads[0], weight_grads[0], grad_bias, None, None, None, None
        nones = (None,) * (len(ctx.needs_input_grad) - 7 - sum(ctx.counts[:3]))
        return *firsts, *grad_extra, *input_grads[1:], *weight_grads[1:], *nones


def _gradients_on_bits(op: Any, quantizers: LayerQuantizers, keeping: Keeping) -> bool:
    return quantizers.backward_weight == "quantized" and _runs_on_bits(op, quantizers, keeping)


def _split(items: Sequence[T], counts: Sequence[int]) -> list[Sequence[T]]:
    """Split tensors: extra ones, those of the quantizers of input, weight and gradient, what was kept, and the rest."""
    ends = [0, *accumulate(counts), len(items)]
    return [items[begin:end] for begin, end in pairwise(ends)]
