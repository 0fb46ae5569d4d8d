"""The output of a quantized layer, from its input or, in a lean model, from bits of it.

There are three ways to the same sums. Signs on both sides are counted as bits (`bit_operations`); numbers are
looked up by the signs of a weight (`number_operations`); all others are multiplied by torch. Only a lean layer in
fast mode takes the second one, since its sums of real numbers have another order.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor

from ..kernels.sizes import Sizes
from ..kernels.window import Window
from ..quantizers import Quantizer
from ..quantizers.base import Whole
from ..quantizers.form import Form
from ..quantizers.node import as_called
from .bit_operations import BitOperands, forward_of_bits
from .kept_input import Keeping, Restored, stand_in
from .number_operations import forward_of_numbers
from .sign_weight import Filters, as_by_torch, filters_of, has_window, window_of
from .sums import HALF, Quantized, output_scale, plus, runs_in_integers, scaled_sums, whole_input


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

    def settle_(self) -> None:
        """Note that training has begun: the quantizers keep their learned tensors from now on (`NeedsData`)."""
        self.input.settle_()
        self.weight.settle_()


def output_of(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    op: Any,
    of_input: Quantized,
    of_weight: Quantized,
    keeping: Keeping | None = None,
    sizes: Sizes | None = None,
    looked_up: Sequence[Tensor] = (),
    *extra: Tensor,
) -> tuple[Tensor, Tensor | None]:
    """Return the output from quantizers and their tensors, and the quantized weight if the output used it.

    ``sizes`` comes from `number_operations.sizes_of`, and if it is not None ``looked_up`` the tensors of the filters.
    Codes whose sums run in 8-bit integers are not looked up, which takes longer.
    """
    rounds = keeping is None or keeping.lean == "exact"
    in_integers = sizes is not None and runs_in_integers(input, weight, op, of_input[0], of_weight[0], rounds)
    if sizes is not None and not in_integers:
        filters = Filters(weight.shape, *looked_up)
        whole = None if input.dtype in HALF else whole_input(input, op, of_input)
        values, scale = whole or Whole(of_input[0].quantize(input, *of_input[1]))
        scale = output_scale(scale, filters.scale, input.dtype)
        output = forward_of_numbers(values.to(input.dtype), filters, scale, bias, sizes)
        return (output if output.ndim != 4 else as_by_torch(output, Form.of(input), weight)), None
    output = None if extra else scaled_sums(input, weight, bias, op, of_input, of_weight, rounds)
    if output is not None:
        return output, None
    input_q = of_input[0].quantize(input, *of_input[1])
    weight_q = of_weight[0].quantize(weight, *of_weight[1]).to(input.dtype)
    return op.forward(input_q, weight_q, bias, *extra), weight_q


def runs_on_bits(op: Any, quantizers: LayerQuantizers, keeping: Keeping) -> bool:
    """Whether the output is a scaled sum of products of signs; if exact, equal bit for bit."""
    dtypes = (torch.float32,) if keeping.lean == "exact" else (torch.float32, torch.bfloat16)
    of_signs = quantizers.input.signs and quantizers.weight.is_binary
    has_bits = keeping.counts and keeping.form is not None and keeping.form.dtype in dtypes
    return of_signs and has_bits and has_window(op)


def bit_operands(op: Any, keeping: Keeping, signs: Tensor, weight: Tensor, of_weight: Quantized) -> BitOperands:
    """Return the operands of a layer that `runs_on_bits`."""
    window = cast(Window, window_of(op))
    return BitOperands(signs, cast(Form, keeping.form), filters_of(weight, *of_weight, window.groups), window)


def output_of_bits(
    op: Any,
    keeping: Keeping,
    signs: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    of_weight: Quantized,
    affine: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Return the output, in the memory format that the layer has when it is not lean."""
    operands = bit_operands(op, keeping, signs, weight, of_weight)
    if affine is not None:
        factor, summand = affine
        summand = summand if bias is None else summand + factor * bias
        return as_by_torch(forward_of_bits(operands, factor.float(), summand.float()), operands.form, weight)
    output = as_by_torch(forward_of_bits(operands), operands.form, weight)
    return output if bias is None else plus(output, bias, weight)


def output_again(
    op: Any,
    quantizers: LayerQuantizers,
    keeping: Keeping,
    sizes: Sizes | None,
    counts: tuple[int, int, int, int],
    affine: tuple[Tensor, Tensor] | None,
    weight: Tensor,
    *tensors: Tensor,
) -> Tensor:
    """Return the output from the kept input; if ``affine``, times its first plus its second tensor.

    ``counts`` says how many of the tensors are biases, kept bits, those of the filters that are looked up, and those of
    the input's quantizer; the weight's quantizer has the others.
    """
    first, second, third, fourth = accumulate(counts)
    bias, bits, looked_up = tensors[0] if first else None, tensors[first:second], tensors[second:third]
    of_weight = quantizers.weight, tensors[fourth:]
    if runs_on_bits(op, quantizers, keeping):
        return output_of_bits(op, keeping, bits[0], weight, bias, of_weight, affine)
    of_kept: Any = Restored(quantizers.input, keeping, bits), tensors[third:fourth]
    output, _ = output_of(stand_in(keeping, bits), weight, bias, op, of_kept, of_weight, keeping, sizes, looked_up)
    if affine is None:
        return output
    factor, summand = (each.view(-1, *[1] * (weight.ndim - 2)) for each in affine)
    return output.mul_(factor).add_(summand)
