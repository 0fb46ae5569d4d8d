"""The autograd Function of every quantized layer, over two quantizers and an operation.

``output = op(quantize(input), quantize(weight), bias)``; if both are whole numbers times a scale, the sums are exact
and scaled afterwards (`sums`). The backward calls the convolution gradients of `qconv.grad` on the quantized
operands and then each quantizer's pseudo-gradient.

It saves the float input and the latent weight, which autograd keeps for `torch.nn.Conv2d` as well. The quantized copies
are computed again, which costs about as much as copying. A lean layer saves bits in place of the input
(`kept_input`), and may compute on them, or on the bits of its weight (`output`).
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, chain, pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..kernels.sizes import Sizes
from ..quantizers.node import as_result, held, once_differentiable
from .bit_operations import backward_of_bits
from .held import Held
from .kept_input import Keeping, KeptInput, Lean, keep
from .number_operations import backward_of_numbers, sizes_of
from .operations import ExtendedOperation, Operation
from .output import (
    LayerQuantizers as LayerQuantizers,
    bit_operands,
    output_again,
    output_of,
    output_of_bits,
    runs_on_bits,
)
from .recipes import Recipe, forget, hang, is_recorded, with_autocast_of_now
from .sign_weight import Filters, filters_of
from .sums import HALF, quantized_weight, runs_in_integers

T = TypeVar("T")


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
    input's, in which the operation and its gradients run. If `sums.scaled_sums` can compute it, the output is the
    exact sum of whole numbers, times the scales, plus the bias.

    Backward: with ``g = grad_quantizer(grad_output)``, ``grad_input = dq_input(op_input(g, weight_q))``, ``grad_weight
    = dq_weight(op_weight(g, input_q))``, ``grad_bias = op_bias(g)``, and each quantizer's learned tensors get their
    gradients. ``extra``, the tensors of the operation that are not quantized, get ``op_extra(g, input_q, weight_q)``.
    With a float ``backward_weight``, they and the input are differentiated at the float weight.

    ``lean`` keeps bits in place of the input (`qconv.lean`): the gradients are the same bit for bit if ``"exact"``; if
    ``"fast"``, those of signs are float32 sums in another order, and so is the output of a weight of signs and an input
    that is none. ``name`` gives the layer's, for messages.

    Mode, stage and schedules are those at the time of the forward, in the backward too.

    Differentiating a second time raises a RuntimeError: a pseudo-gradient has no meaningful derivative.
    """
    of_input, of_weight = quantizers.input.tensors(), quantizers.weight.tensors()
    of_grad = () if quantizers.grad is None else quantizers.grad.tensors()
    called = quantizers.as_called()
    if lean is None and not extra and not torch.compiler.is_compiling() and not _is_transformed():
        ends = len(of_input), len(of_input) + len(of_weight)
        return _Plain.apply(input, weight, bias, op, called, ends, *of_input, *of_weight, *of_grad)
    keeping = sizes = None
    kept: tuple[Tensor, ...] = ()
    again: tuple[Tensor, ...] = ()
    looked_up: tuple[Tensor, ...] = ()
    biases = () if bias is None else (bias,)
    if lean is not None and is_recorded():
        keeping, kept = keep(input, called.input, of_input, op, lean, name)
        if lean == "fast" and not extra and not runs_on_bits(op, called, keeping):
            sizes = sizes_of(op, called.weight, input, weight)
        if sizes is not None:
            with torch.no_grad():
                looked_up = filters_of(weight, called.weight, of_weight, sizes.window.groups).tensors
        if keeping.form is not None and not extra and not torch.compiler.is_compiling():
            # Views of learned numbers have nodes, by which a recipe would refer to them weakly.
            learned = (x.detach() for x in (*held(called.input, of_input), *held(called.weight, of_weight)))
            again = weight, *biases, *kept[: keeping.bits], *looked_up, *learned
    counts = len(extra), len(of_input), len(of_weight), len(of_grad), len(looked_up), len(kept)
    tensors = *extra, *of_input, *of_weight, *of_grad, *looked_up, *kept, *again
    arguments = input, weight, bias, op, called, keeping, sizes, counts, *tensors
    if torch.jit.is_tracing() and torch.onnx.is_in_onnx_export():  # pyright: ignore[reportPrivateImportUsage]
        raise ValueError(
            f"{name()}: torch.onnx.export(dynamo=False) has no operators for quantized layers: call "
            "qconv.export_onnx(model, path, images)"
        )
    # Without gradients torch 2.11 compiles a Function wrongly: it passes a context to forward, too.
    if torch.compiler.is_compiling() and not torch.is_grad_enabled():
        return _Composable.forward(*arguments)
    is_direct = not torch.compiler.is_compiling() and not _is_transformed()
    output = (_QuantizedOp if is_direct else _Composable).apply(*arguments)
    if keeping is not None and again:
        given = op, called, keeping, sizes, (len(biases), keeping.bits, len(looked_up), len(of_input))
        on_bits = runs_on_bits(op, called, keeping)
        compute_with = with_autocast_of_now(partial(output_again, *given), input.device)
        compute = partial(compute_with, None)
        folds = on_bits or not keeping.counts  # in one kernel, or in the memory of the output
        affine = compute_with if keeping.lean == "fast" and folds else None
        hang(output, Recipe(again, compute if on_bits else Held(compute), 1, affine=affine))
    return output


def _is_transformed() -> bool:
    """Whether `torch.func` or `torch.jit.trace` is active; they accept no Function with a context."""
    return torch._C._are_functorch_transforms_active() or torch.jit.is_tracing()  # pyright: ignore


class _Plain(torch.autograd.Function):
    """A layer that keeps its input; written for little Python time, which bounds an eager step on a GPU.

    In half precision it keeps the quantized weight as well, as autocast keeps the cast weights of a float network.
    """

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        op: Any,
        quantizers: LayerQuantizers,
        ends: tuple[int, int],
        *tensors: Tensor,
    ) -> Tensor:
        first, second = ends
        of_input, of_weight, of_grad = tensors[:first], tensors[first:second], tensors[second:]
        output, weight_q = output_of(
            input, weight, bias, op, (quantizers.input, of_input), (quantizers.weight, of_weight)
        )
        own = [*quantizers.input.hold(*of_input), *quantizers.weight.hold(*of_weight)]
        if quantizers.grad is not None:
            own += quantizers.grad.hold(*of_grad)
        if weight_q is not None and input.dtype in HALF and quantizers.backward_weight == "quantized":
            own.append(weight_q)
        ctx.op, ctx.quantizers, ctx.ends = op, quantizers, (*ends, len(tensors))
        ctx.save_for_backward(input, weight, *own)
        return output

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  # the decorator hides the names
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        (grad_output,), (input, weight, *tensors) = grad_outputs, ctx.saved_tensors
        quantizers, needs, (first, second, last) = ctx.quantizers, ctx.needs_input_grad, ctx.ends
        of_input, of_weight, of_grad = tensors[:first], tensors[first:second], tensors[second:last]
        kept = tensors[last:]
        if grad_output.numel():
            quantizers.settle_()
        if quantizers.grad is not None:
            grad_output = quantizers.grad.quantize(grad_output, *of_grad)
        needs_input = needs[0] or any(needs[6 : 6 + first])
        needs_weight = needs[1] or any(needs[6 + first : 6 + second])
        # The gradient of each operand reads the other one.
        input_q = quantizers.input.quantize(input, *of_input) if needs_weight else input
        if kept:
            weight_q = kept[0]
        elif needs_input and quantizers.backward_weight == "quantized":
            weight_q = quantizers.weight.quantize(weight, *of_weight).to(input.dtype)
        else:
            weight_q = weight.to(input.dtype)
        grads = ctx.op.backward(grad_output, input_q, weight_q, (needs_input, needs_weight, needs[2]))
        grad_input, grad_weight, grad_bias = grads
        input_grads: tuple[Tensor | None, ...] = (None,) * (1 + first)
        weight_grads: tuple[Tensor | None, ...] = (None,) * (1 + len(of_weight))
        if grad_input is not None:
            input_grads = quantizers.input.backward(grad_input, input, *of_input)
        if grad_weight is not None:
            weight_grads = quantizers.weight.backward(grad_weight.to(weight.dtype), weight, *of_weight)
        nones = None, None, None, *input_grads[1:], *weight_grads[1:], *(None for _ in of_grad)
        return input_grads[0], weight_grads[0], grad_bias, *nones


class _Composable(torch.autograd.Function):
    """Any layer: lean, compiled, with extra tensors, or under `torch.func`."""

    @staticmethod
    def forward(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        op: Any,
        quantizers: LayerQuantizers,
        keeping: Keeping | None,
        sizes: Sizes | None,
        counts: tuple[int, ...],
        *tensors: Tensor,
    ) -> Tensor:
        extra, input_tensors, weight_tensors, _, looked_up, kept, _ = _split(tensors, counts)
        of_input, of_weight = (quantizers.input, input_tensors), (quantizers.weight, weight_tensors)
        if keeping is not None and not extra and runs_on_bits(op, quantizers, keeping):
            return as_result(output_of_bits(op, keeping, kept[0], weight, bias, of_weight))
        given = input, weight, bias, op, of_input, of_weight, keeping, sizes, looked_up, *extra
        return as_result(output_of(*given)[0])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        input, weight, _, ctx.op, ctx.quantizers, ctx.keeping, ctx.sizes, ctx.counts, *tensors = inputs
        extra, of_input, of_weight, of_grad, looked_up, kept, again = _split(tensors, ctx.counts)
        owners = zip(ctx.quantizers[:3], (of_input, of_weight, of_grad), strict=True)
        own = chain.from_iterable(held(q, tensors) for q, tensors in owners if q is not None)
        kept = kept if ctx.keeping is not None else (input,)
        ctx.save_for_backward(weight, *extra, *own, *looked_up, *kept, *again)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        del info, in_dims, args
        raise RuntimeError("torch.vmap can't map quantized layers: call the model for each sample in turn")

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  # the decorator hides the names
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        (grad_output,) = grad_outputs
        op, quantizers, keeping, sizes = ctx.op, ctx.quantizers, ctx.keeping, ctx.sizes
        if not torch.compiler.is_compiling() and grad_output.numel():
            quantizers.settle_()
        if keeping is not None:
            forget(ctx)
        weight, *tensors = ctx.saved_tensors
        *others, kept, _ = _split(tensors, (*ctx.counts[:5], max(1, ctx.counts[5])))
        extra, input_tensors, weight_tensors, grad_tensors, looked_up = others
        input = KeptInput(quantizers.input, input_tensors, keeping, kept)
        needs_extra, needs_input_tensors, needs_weight_tensors, *_ = _split(ctx.needs_input_grad[8:], ctx.counts)
        needs_bias = ctx.needs_input_grad[2]
        needs_input = ctx.needs_input_grad[0] or any(needs_input_tensors)
        needs_weight = ctx.needs_input_grad[1] or any(needs_weight_tensors)
        needs_both = any(needs_extra)
        output_mask = needs_input, needs_weight, needs_bias, *needs_extra

        if quantizers.grad is not None:
            grad_output = quantizers.grad.quantize(grad_output, *grad_tensors)
        is_fast = keeping is not None and keeping.lean == "fast" and quantizers.backward_weight == "quantized"
        if is_fast and keeping is not None and runs_on_bits(op, quantizers, keeping):
            operands = bit_operands(op, keeping, kept[0], weight, (quantizers.weight, weight_tensors))
            grads = backward_of_bits(operands, grad_output, weight, output_mask)
        elif is_fast and sizes is not None:
            filters = Filters(weight.shape, *looked_up)
            operand = input.operand() if needs_weight else input.stand_in()
            grads = backward_of_numbers(op, filters, sizes, grad_output, operand, weight, output_mask)
        else:
            # Each gradient reads the other operand, those of extra tensors read both: quantize again only as needed.
            operand_input = input.operand() if needs_weight or needs_both else input.stand_in()
            if (needs_input or needs_both) and quantizers.backward_weight == "quantized":
                # What batch norm has just computed again, in integers, has left the weight in bytes.
                in_integers = keeping is not None and runs_in_integers(
                    operand_input, weight, op, quantizers.input, quantizers.weight, keeping.lean == "exact"
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
        firsts = input_grads[0], weight_grads[0], grad_bias, None, None, None, None, None
        nones = (None,) * (len(ctx.needs_input_grad) - 8 - sum(ctx.counts[:3]))
        return *firsts, *grad_extra, *input_grads[1:], *weight_grads[1:], *nones


class _QuantizedOp(torch.autograd.Function):
    """`_Composable` in eager mode: torch inspects the signature at each call of one that has a ``setup_context``."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        output = _Composable.forward(*arguments)
        _Composable.setup_context(ctx, arguments, output)
        return output

    backward = _Composable.backward


def _split(items: Sequence[T], counts: Sequence[int]) -> list[Sequence[T]]:
    """Split tensors into extra ones, the three quantizers', the filters', the kept ones, and the rest."""
    ends = [0, *accumulate(counts), len(items)]
    return [items[begin:end] for begin, end in pairwise(ends)]
