"""The functions of `qconv.grad`, built only from forward convolutions and transposed convolutions.

- `grad_input` is the transposed convolution of grad_output with the same weight (the convolution, if the forward was
  transposed); the remainder of the stride's division is its output_padding.
- `grad_weight` is a convolution in which batch and channel, and stride and dilation, are exchanged: the image is the
  input as `(C_in / G, G·N, *spatial)`, the filters are grad_output as `(C_out, N, *spatial)`, both in G groups. If the
  forward was transposed, input and grad_output exchange these roles.

It has three uses: an oracle for `qconv.grad`; gradients that can be differentiated any number of times; and exact
arithmetic on integer tensors on the CPU, modulo 2^bits, so that the gradients of fixed-point numbers and of additive
secret shares add up bit for bit. Formulas, arguments and errors are as in `qconv.grad`.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .kernel import (
    Gradients,
    gradients as gradients,
    of_all,
    of_input,
    of_transposed_input,
    of_transposed_weight,
    of_weight,
)


def _narrow(x: Tensor, size: Sequence[int]) -> Tensor:
    for dim, length in enumerate(size, start=2):
        x = x.narrow(dim, 0, length)
    return x


def _input(
    grad_output: Tensor,
    size: Sequence[int],
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    groups: int,
) -> Tensor:
    geometry = zip(size, weight.shape[2:], stride, padding, dilation, strict=True)
    rest = [0 if transposed else (x + 2 * p - d * (k - 1) - 1) % s for x, k, s, p, d in geometry]
    grad = torch.convolution(grad_output, weight, None, stride, padding, dilation, not transposed, rest, groups)
    return _narrow(grad, size)  # with an output_padding of at least the stride, the transposed form exceeds size


def _weight(
    image: Tensor,
    filters: Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    n = len(size)
    if image.shape[0] == 0:  # torch.convolution gives a wrong size for 0 channels, so use one sample of zeros
        sample = [0, 0] * (n + 1) + [0, 1]
        image, filters = F.pad(image, sample), F.pad(filters, sample)
    image = image.unflatten(1, (groups, -1)).movedim((1, 2), (1, 0)).flatten(1, 2)
    grad = torch.convolution(image, filters.transpose(0, 1), None, dilation, padding, stride, False, (0,) * n, groups)
    return _narrow(grad, size).transpose(0, 1)


def _composed(
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor,
    bias_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: tuple[bool, bool, bool],
) -> Gradients:
    """A `Kernel`; some of its arguments are unused."""
    dtype = grad_output.dtype
    if dtype.is_complex or dtype == torch.bool:
        raise TypeError(f"dtype (={dtype}) must be floating point or integer")
    if not dtype.is_floating_point:  # torch convolves only int64, and only on the CPU; conversion wraps
        if grad_output.device.type != "cpu":
            raise ValueError(f"device (={grad_output.device}) of integer tensors must be cpu")
        grad_output, input, weight = grad_output.long(), input.long(), weight.long()
    if dtype in (torch.float16, torch.bfloat16):  # torch's 3d ones with strides and dilation are wrong on some CPUs
        grad_output, input, weight = grad_output.float(), input.float(), weight.float()
    grad_input = grad_weight = grad_bias = None
    if output_mask[0]:
        grad_input = _input(grad_output, input.shape[2:], weight, stride, padding, dilation, transposed, groups)
        grad_input = grad_input.to(dtype)
    if output_mask[1]:
        image, filters = (grad_output, input) if transposed else (input, grad_output)
        if dtype == torch.float32:  # N·L products in one run: float32 would err up to 8 times as much as aten
            image, filters = image.double(), filters.double()
        grad_weight = _weight(image, filters, weight.shape[2:], stride, padding, dilation, groups).to(dtype)
    if output_mask[2]:
        grad_bias = grad_output.sum((0, *range(2, grad_output.ndim))).to(dtype)
    return grad_input, grad_weight, grad_bias


_DOC = """Gradients of a 1d, 2d or 3d convolution with respect to input, weight and bias, from forward convolutions.

Arguments, result and errors are as in `qconv.grad.conv_backward`, except that integer tensors are allowed on the
CPU (results are exact modulo 2^bits of their dtype) and that the result can be differentiated any number of times.

Raises:
    TypeError: if the dtypes differ, or are complex or bool.
    ValueError: if an argument is out of its range, the sizes do not fit each other, the devices differ, or integer
        tensors are not on the CPU.

>>> input, weight = torch.tensor([[[1, 2, 4]]]), torch.tensor([[[1, 3]]])
>>> conv_backward(torch.tensor([[[1, 10]]]), input, weight)
(tensor([[[ 1, 13, 30]]]), tensor([[[21, 42]]]), tensor([11]))
"""
conv_backward = of_all(_composed, __name__, _DOC)
conv1d_input, conv2d_input, conv3d_input = (of_input(_composed, n, __name__) for n in (1, 2, 3))
conv1d_weight, conv2d_weight, conv3d_weight = (of_weight(_composed, n, __name__) for n in (1, 2, 3))
conv_transpose1d_input, conv_transpose2d_input, conv_transpose3d_input = (
    of_transposed_input(_composed, n, __name__) for n in (1, 2, 3)
)
conv_transpose1d_weight, conv_transpose2d_weight, conv_transpose3d_weight = (
    of_transposed_weight(_composed, n, __name__) for n in (1, 2, 3)
)
