"""The gradients of convolution in 1, 2 and 3 dimensions, with the signatures of `torch.nn.grad`.

For a convolution of G groups with I input and O output channels in each, with n-d indices k, l and s:

    output[n, g·O + o, l]       = Σ_{i, k}  weight[g·O + o, i, k] · input[n, g·I + i, stride·l + dilation·k − padding]
    grad_input[n, g·I + i, s]   = Σ_{o, k, l : stride·l + dilation·k − padding = s}
                                            weight[g·O + o, i, k] · grad_output[n, g·O + o, l]
    grad_weight[g·O + o, i, k]  = Σ_{n, l}  input[n, g·I + i, stride·l + dilation·k − padding]
                                            · grad_output[n, g·O + o, l]
    grad_bias[c]                = Σ_{n, l}  grad_output[n, c, l]

The input is 0 outside its bounds. A transposed convolution is the second line read as a forward. Its gradients are the
first line, and the third with `input` and `grad_output` exchanged.

`conv_backward` gives all three in one call. Each other function gives one, and needs only the size of the tensor that
it differentiates by. `qconv.grad.composed` holds the same functions over another `Kernel`; everything between the
checks of the input and the kernel is written here, once.

>>> conv1d_weight(torch.tensor([[[1.0, 2.0, 4.0]]]), (1, 1, 2), torch.ones(1, 1, 2))
tensor([[[3., 6.]]])
>>> conv2d_input((1, 1, 2, 3), torch.tensor([[[[1.0, 2.0]]]]), torch.ones(1, 1, 2, 2))
tensor([[[[1., 3., 2.],
          [1., 3., 2.]]]])
>>> conv_transpose1d_input((1, 1, 2), torch.tensor([[[1.0, 2.0]]]), torch.arange(4.0).reshape(1, 1, 4), stride=2)
tensor([[[2., 8.]]])
"""

from typing import Any

import torch
from torch import Tensor

from .kernel import Gradients, of_all, of_input, of_transposed_input, of_transposed_weight, of_weight


def aten_gradients(grad_output: Tensor, *arguments: Any) -> Gradients:
    """`conv_backward` without its checks: a `Kernel`, for operands that a forward has checked."""
    if not grad_output.is_floating_point():
        raise TypeError(f"dtype (={grad_output.dtype}) must be floating point; qconv.grad.composed takes integers too")
    *geometry, (needs_input, needs_weight, needs_bias) = arguments
    if needs_weight:
        return torch.ops.aten.convolution_backward(grad_output, *arguments)
    # For the bias aten would compute the gradient of the weight, too; it fails in 1d where only that of the bias, or
    # none, is asked for.
    grad_input = grad_bias = None
    if needs_input:
        grad_input, *_ = torch.ops.aten.convolution_backward(grad_output, *geometry, (True, False, False))
    if needs_bias:
        grad_bias = grad_output.sum((0, *range(2, grad_output.ndim)))
    return grad_input, None, grad_bias


_DOC = """Gradients of a 1d, 2d or 3d convolution with respect to input, weight and bias, in at most one aten call.

See the head of this module for the formulas. Memory formats are aten's: a channels_last input gets
a channels_last gradient.

Args:
    grad_output: gradient of the output, `(N, C_out, *spatial)`, or `(C_out, *spatial)` as the input.
    input: `(N, C_in, *spatial)` or `(C_in, *spatial)`, float16, bfloat16, float32 or float64. N may be 0.
    weight: `(C_out, C_in / groups, *kernel)`, transposed: `(C_in, C_out / groups, *kernel)`, of input's dtype.
    stride: an int, or one int per spatial dimension.
    padding: as stride; or "valid" (0), or, at stride 1, "same" (keeps the size; an odd total has one more at the
        right).
    dilation: as stride.
    groups: the number of blocks of channels.
    transposed: whether the forward was a transposed convolution.
    output_padding: as stride; of a transposed convolution only.
    output_mask: which of the three to compute; the others are None.

Returns:
    `grad_input`, `grad_weight` and `grad_bias`, of the sizes of input, weight and `(C_out,)`.

Raises:
    TypeError: if the dtypes differ or are not floating point.
    ValueError: if an argument is out of its range, the sizes do not fit each other, or the devices differ.

>>> input, weight = torch.randn(2, 4, 9, 9), torch.randn(6, 2, 3, 3)
>>> grads = conv_backward(torch.ones(2, 6, 5, 5), input, weight, stride=2, padding=1, groups=2)
>>> [tuple(grad.shape) for grad in grads]
[(2, 4, 9, 9), (6, 2, 3, 3), (6,)]
"""
conv_backward = of_all(aten_gradients, __name__, _DOC)
conv1d_input, conv2d_input, conv3d_input = (of_input(aten_gradients, n, __name__) for n in (1, 2, 3))
conv1d_weight, conv2d_weight, conv3d_weight = (of_weight(aten_gradients, n, __name__) for n in (1, 2, 3))
conv_transpose1d_input, conv_transpose2d_input, conv_transpose3d_input = (
    of_transposed_input(aten_gradients, n, __name__) for n in (1, 2, 3)
)
conv_transpose1d_weight, conv_transpose2d_weight, conv_transpose3d_weight = (
    of_transposed_weight(aten_gradients, n, __name__) for n in (1, 2, 3)
)
