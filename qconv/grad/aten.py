"""The gradients of convolution in 1, 2 and 3 dimensions, with the signatures of `torch.nn.grad`.

For a convolution of G groups with I input and O output channels in each, with n-d indices k, l and s:

    output[n, g·O + o, l]       = Σ_{i, k}  weight[g·O + o, i, k] · input[n, g·I + i, stride·l + dilation·k − padding]
    grad_input[n, g·I + i, s]   = Σ_{o, k, l : stride·l + dilation·k − padding = s}
                                            weight[g·O + o, i, k] · grad_output[n, g·O + o, l]
    grad_weight[g·O + o, i, k]  = Σ_{n, l}  input[n, g·I + i, stride·l + dilation·k − padding]
                                            · grad_output[n, g·O + o, l]
    grad_bias[c]                = Σ_{n, l}  grad_output[n, c, l]

The input is 0 outside its bounds. A transposed convolution is the second line read as a forward: its gradients are the
first line, and the third with `input` and `grad_output` exchanged.

`conv_backward` gives all three in one call; each other function gives one and needs only the size of what it
differentiates by. `qconv.grad_composed` holds the same functions over another `Kernel`; everything between the input's
checks and the kernel is written here, once.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

Ints = int | Sequence[int]
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]
Kernel = Callable[..., Gradients]
"""Gradients of a batched, symmetrically padded convolution; has the signature of `aten::convolution_backward`."""


def _ints(name: str, value: Ints, n: int, least: int) -> tuple[int, ...]:
    ints = (value,) * n if isinstance(value, int) else tuple(value)
    if len(ints) != n:
        raise ValueError(f"{name} (={ints}) must be an int or {n} ints")
    if min(ints) < least:
        raise ValueError(f"{name} (={value}) must be at least {least}")
    return ints


def _named_padding(
    padding: str, kernel_size: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """Padding of both sides, and the extra padding of the right sides (None where there is none)."""
    if padding == "valid":
        return (0,) * len(kernel_size), None
    if padding != "same":
        raise ValueError(f"padding (={padding!r}) must be 'same', 'valid' or ints")
    if max(stride) > 1:
        raise ValueError(f"padding='same' requires stride 1, not stride (={tuple(stride)})")
    total = [d * (k - 1) for d, k in zip(dilation, kernel_size, strict=True)]
    extra = tuple(t % 2 for t in total)
    return tuple(t // 2 for t in total), extra if any(extra) else None


def _check_tensors(grad_output: Tensor, input: Tensor, weight: Tensor) -> None:
    n = weight.ndim - 2
    if not 1 <= n <= 3:
        raise ValueError(f"weight (of size {tuple(weight.shape)}) must have 3, 4 or 5 dimensions")
    if input.ndim not in (n + 1, n + 2):
        raise ValueError(f"input_size (={tuple(input.shape)}) must have {n + 1} or {n + 2} dimensions")
    if grad_output.ndim != input.ndim:
        raise ValueError(
            f"grad_output (of size {tuple(grad_output.shape)}) must have {input.ndim} dimensions, as input"
        )
    if not grad_output.dtype == input.dtype == weight.dtype:
        dtypes = f"{grad_output.dtype}, {input.dtype}, {weight.dtype}"
        raise TypeError(f"grad_output, input and weight (={dtypes}) must have the same dtype")
    if not grad_output.device == input.device == weight.device:
        devices = f"{grad_output.device}, {input.device}, {weight.device}"
        raise ValueError(f"grad_output, input and weight (={devices}) must be on the same device")


def _check_sizes(
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    extra: Sequence[int] | None,
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> None:
    """Name what does not fit; aten's own words are "could not create a primitive descriptor"."""
    x, w = input.shape, weight.shape
    if groups < 1:
        raise ValueError(f"groups (={groups}) must be at least 1")
    if x[1] % groups:
        raise ValueError(f"groups (={groups}) must divide in_channels (={x[1]})")
    if w[0] % groups:  # of a transposed convolution, w[0] is in_channels, and wrong as such
        raise ValueError(f"groups (={groups}) must divide weight_size[0] (={w[0]})")
    in_channels, out_channels = (w[0], w[1] * groups) if transposed else (w[1] * groups, w[0])
    if x[1] != in_channels:
        rule = f"{in_channels} channels for weight_size (={tuple(w)}) and groups (={groups})"
        raise ValueError(f"input_size (={tuple(x)}) must have {rule}")
    expected = [x[0], out_channels]
    for i in range(len(stride)):  # plain indices: twice as fast as zip here, and this runs in every backward
        crop = 2 * padding[i] - dilation[i] * (w[i + 2] - 1)
        if transposed:
            if output_padding[i] >= stride[i] and output_padding[i] >= dilation[i]:
                rule = f"smaller than stride (={tuple(stride)}) or dilation (={tuple(dilation)})"
                raise ValueError(f"output_padding (={tuple(output_padding)}) must be {rule}")
            expected.append((x[i + 2] - 1) * stride[i] - crop + output_padding[i] + 1)
        elif output_padding[i]:
            raise ValueError(f"output_padding (={tuple(output_padding)}) must be 0 unless transposed")
        else:
            length = x[i + 2] if extra is None else x[i + 2] + extra[i]
            expected.append((length + crop - 1) // stride[i] + 1)
    if min(expected[2:]) < 1:
        rule = f"too small for weight_size (={tuple(w)}): its output would be {tuple(expected)}"
        raise ValueError(f"input_size (={tuple(x)}) is {rule}")
    if list(grad_output.shape) != expected:
        rule = f"{tuple(expected)} for input_size (={tuple(x)}) and weight_size (={tuple(w)})"
        raise ValueError(f"grad_output's size (={tuple(grad_output.shape)}) must be {rule}")


def _sides(extra: Sequence[int], sign: int = 1) -> list[int]:
    """The argument of `F.pad` for `extra` elements at the right side of each dimension."""
    return [side for e in reversed(extra) for side in (0, sign * e)]


def gradients(
    kernel: Kernel,
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor,
    stride: Ints,
    padding: Ints | str,
    dilation: Ints,
    groups: int,
    transposed: bool,
    output_padding: Ints,
    output_mask: tuple[bool, bool, bool],
) -> Gradients:
    """`conv_backward` over any `kernel`: checks, the batch dimension and the unequal padding of "same"."""
    _check_tensors(grad_output, input, weight)
    n = weight.ndim - 2
    stride = _ints("stride", stride, n, 1)
    dilation = _ints("dilation", dilation, n, 1)
    output_padding = _ints("output_padding", output_padding, n, 0)
    extra = None
    if not isinstance(padding, str):
        padding = _ints("padding", padding, n, 0)
    elif transposed:
        raise ValueError(f"padding (={padding!r}) of a transposed convolution must be an int or {n} ints")
    else:
        padding, extra = _named_padding(padding, weight.shape[2:], stride, dilation)
    unbatched = input.ndim == n + 1
    if unbatched:
        grad_output, input = grad_output.unsqueeze(0), input.unsqueeze(0)
    _check_sizes(grad_output, input, weight, stride, padding, extra, dilation, transposed, output_padding, groups)
    if extra is not None:
        input = F.pad(input, _sides(extra))
    bias_size = [grad_output.shape[1]]
    geometry = (stride, padding, dilation, transposed, output_padding, groups)
    grad_input, grad_weight, grad_bias = kernel(grad_output, input, weight, bias_size, *geometry, output_mask)
    if grad_input is not None:
        if extra is not None:
            grad_input = F.pad(grad_input, _sides(extra, -1))
        if unbatched:
            grad_input = grad_input.squeeze(0)
    return grad_input, grad_weight, grad_bias


def input_gradient(
    kernel: Kernel,
    n: int,
    input_size: Sequence[int],
    weight: Tensor,
    grad_output: Tensor,
    stride: Ints,
    padding: Ints | str,
    dilation: Ints,
    groups: int,
    transposed: bool = False,
    output_padding: Ints = 0,
) -> Tensor:
    """The n-d gradient with respect to an input of which only the size is known: a stub stands for it."""
    if weight.ndim != n + 2:
        raise ValueError(f"weight (of size {tuple(weight.shape)}) must have {n + 2} dimensions")
    stub = grad_output.new_empty(1).expand(tuple(input_size))
    geometry = (stride, padding, dilation, groups, transposed, output_padding)
    return cast(Tensor, gradients(kernel, grad_output, stub, weight, *geometry, (True, False, False))[0])


def weight_gradient(
    kernel: Kernel,
    n: int,
    input: Tensor,
    weight_size: Sequence[int],
    grad_output: Tensor,
    stride: Ints,
    padding: Ints | str,
    dilation: Ints,
    groups: int,
    transposed: bool = False,
    output_padding: Ints = 0,
) -> Tensor:
    """The n-d gradient with respect to a weight of which only the size is known."""
    if len(weight_size) != n + 2:
        raise ValueError(f"weight_size (={tuple(weight_size)}) must have {n + 2} dimensions")
    stub = grad_output.new_empty(1).expand(tuple(weight_size))
    geometry = (stride, padding, dilation, groups, transposed, output_padding)
    return cast(Tensor, gradients(kernel, grad_output, input, stub, *geometry, (False, True, False))[1])


def _aten(grad_output: Tensor, *arguments: Any) -> Gradients:
    if not grad_output.is_floating_point():
        raise TypeError(f"dtype (={grad_output.dtype}) must be floating point; qconv.grad_composed takes integers too")
    needs_input, needs_weight, needs_bias = arguments[-1]
    if not (needs_input or needs_weight):  # aten fails at this in 1d, and computes the other two as well in 2d and 3d
        return None, None, grad_output.sum((0, *range(2, grad_output.ndim))) if needs_bias else None
    return torch.ops.aten.convolution_backward(grad_output, *arguments)


def conv_backward(
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor,
    stride: Ints = 1,
    padding: Ints | str = 0,
    dilation: Ints = 1,
    groups: int = 1,
    *,
    transposed: bool = False,
    output_padding: Ints = 0,
    output_mask: tuple[bool, bool, bool] = (True, True, True),
) -> Gradients:
    """Gradients of a 1d, 2d or 3d convolution with respect to input, weight and bias, in at most one aten call.

    The formulas stand at the head of this module. Memory formats are those that aten gives: a channels_last input gets
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
    geometry = (stride, padding, dilation, groups, transposed, output_padding)
    return gradients(_aten, grad_output, input, weight, *geometry, output_mask)


def conv1d_input(
    input_size: Sequence[int],
    weight: Tensor,
    grad_output: Tensor,
    stride: Ints = 1,
    padding: Ints | str = 0,
    dilation: Ints = 1,
    groups: int = 1,
) -> Tensor:
    """Gradient of a 1d convolution with respect to its input.

    `grad_input[n, i, s] = Σ_{o, k, l} weight[o, i, k] · grad_output[n, o, l]`
    where `s = stride·l + dilation·k − padding`, in each group.
    Sizes: input_size `(N, C_in, L)`, weight `(C_out, C_in / groups, K)`,
    grad_output `(N, C_out, L')`, result input_size; in each, N may be absent.

    Raises:
        TypeError, ValueError: as `conv_backward`.
    """
    return input_gradient(_aten, 1, input_size, weight, grad_output, stride, padding, dilation, groups)


def conv1d_weight(
    input: Tensor,
    weight_size: Sequence[int],
    grad_output: Tensor,
    stride: Ints = 1,
    padding: Ints | str = 0,
    dilation: Ints = 1,
    groups: int = 1,
) -> Tensor:
    """Gradient of a 1d convolution with respect to its weight.

    `grad_weight[o, i, k] = Σ_{n, l} input[n, i, stride·l + dilation·k − padding] · grad_output[n, o, l]`
    in each group. Sizes: input `(N, C_in, L)`, weight_size `(C_out, C_in / groups, K)`,
    grad_output `(N, C_out, L')`, result weight_size; N may be absent.

    Raises:
        TypeError, ValueError: as `conv_backward`.

    >>> conv1d_weight(torch.tensor([[[1.0, 2.0, 4.0]]]), (1, 1, 2), torch.ones(1, 1, 2))
    tensor([[[3., 6.]]])
    """
    return weight_gradient(_aten, 1, input, weight_size, grad_output, stride, padding, dilation, groups)


def conv2d_input(
    input_size: Sequence[int],
    weight: Tensor,
    grad_output: Tensor,
    stride: Ints = 1,
    padding: Ints | str = 0,
    dilation: Ints = 1,
    groups: int = 1,
) -> Tensor:
    """Gradient of a 2d convolution with respect to its input.

    `grad_input[n, i, s] = Σ_{o, k, l} weight[o, i, k] · grad_output[n, o, l]`
    where `s = stride·l + dilation·k − padding`, in each group.
    Sizes: input_size `(N, C_in, H, W)`, weight `(C_out, C_in / groups, K, K)`,
    grad_output `(N, C_out, H', W')`, result input_size; in each, N may be absent.

    Raises:
        TypeError, ValueError: as `conv_backward`.

    >>> conv2d_input((1, 1, 2, 3), torch.tensor([[[[1.0, 2.0]]]]), torch.ones(1, 1, 2, 2))
    tensor([[[[1., 3., 2.],
              [1., 3., 2.]]]])
    """
    return input_gradient(_aten, 2, input_size, weight, grad_output, stride, padding, dilation, groups)


def conv2d_weight(
    input: Tensor,
    weight_size: Sequence[int],
    grad_output: Tensor,
    stride: Ints = 1,
    padding: Ints | str = 0,
    dilation: Ints = 1,
    groups: int = 1,
) -> Tensor:
    """Gradient of a 2d convolution with respect to its weight.

    `grad_weight[o, i, k] = Σ_{n, l} input[n, i, stride·l + dilation·k − padding] · grad_output[n, o, l]`
    in each group. Sizes: input `(N, C_in, H, W)`, weight_size `(C_out, C_in / groups, K, K)`,
    grad_output `(N, C_out, H', W')`, result weight_size; N may be absent.

    Raises:
        TypeError, ValueError: as `conv_backward`.
    """
    return weight_gradient(_aten, 2, input, weight_size, grad_output, stride, padding, dilation, groups)


def conv3d_input(
    input_size: Sequence[int],
    weight: Tensor,
    grad_output: Tensor,
    stride: Ints = 1,
    padding: Ints | str = 0,
    dilation: Ints = 1,
    groups: int = 1,
) -> Tensor:
    """Gradient of a 3d convolution with respect to its input.

    `grad_input[n, i, s] = Σ_{o, k, l} weight[o, i, k] · grad_output[n, o, l]`
    where `s = stride·l + dilation·k − padding`, in each group.
    Sizes: input_size `(N, C_in, D, H, W)`, weight `(C_out, C_in / groups, K, K, K)`,
    grad_output `(N, C_out, D', H', W')`, result input_size; in each, N may be absent.

    Raises:
        TypeError, ValueError: as `conv_backward`.
    """
    return input_gradient(_aten, 3, input_size, weight, grad_output, stride, padding, dilation, groups)


def conv3d_weight(
    input: Tensor,
    weight_size: Sequence[int],
    grad_output: Tensor,
    stride: Ints = 1,
    padding: Ints | str = 0,
    dilation: Ints = 1,
    groups: int = 1,
) -> Tensor:
    """Gradient of a 3d convolution with respect to its weight.

    `grad_weight[o, i, k] = Σ_{n, l} input[n, i, stride·l + dilation·k − padding] · grad_output[n, o, l]`
    in each group. Sizes: input `(N, C_in, D, H, W)`, weight_size `(C_out, C_in / groups, K, K, K)`,
    grad_output `(N, C_out, D', H', W')`, result weight_size; N may be absent.

    Raises:
        TypeError, ValueError: as `conv_backward`.
    """
    return weight_gradient(_aten, 3, input, weight_size, grad_output, stride, padding, dilation, groups)


def conv_transpose1d_input(
    input_size: Sequence[int],
    weight: Tensor,
    grad_output: Tensor,
    stride: Ints = 1,
    padding: Ints = 0,
    output_padding: Ints = 0,
    groups: int = 1,
    dilation: Ints = 1,
) -> Tensor:
    """Gradient of a 1d transposed convolution with respect to its input.

    `grad_input[n, i, s] = Σ_{o, k} weight[i, o, k] · grad_output[n, o, stride·s + dilation·k − padding]`
    in each group. Sizes: input_size `(N, C_in, L)`, weight `(C_in, C_out / groups, K)`,
    grad_output `(N, C_out, L')`, result input_size; in each, N may be absent.

    Raises:
        TypeError, ValueError: as `conv_backward`.

    >>> conv_transpose1d_input((1, 1, 2), torch.tensor([[[1.0, 2.0]]]), torch.arange(4.0).reshape(1, 1, 4), stride=2)
    tensor([[[2., 8.]]])
    """
    return input_gradient(
        _aten, 1, input_size, weight, grad_output, stride, padding, dilation, groups, True, output_padding
    )


def conv_transpose1d_weight(
    input: Tensor,
    weight_size: Sequence[int],
    grad_output: Tensor,
    stride: Ints = 1,
    padding: Ints = 0,
    output_padding: Ints = 0,
    groups: int = 1,
    dilation: Ints = 1,
) -> Tensor:
    """Gradient of a 1d transposed convolution with respect to its weight.

    `grad_weight[i, o, k] = Σ_{n, s} input[n, i, s] · grad_output[n, o, stride·s + dilation·k − padding]`
    in each group. Sizes: input `(N, C_in, L)`, weight_size `(C_in, C_out / groups, K)`,
    grad_output `(N, C_out, L')`, result weight_size; N may be absent.

    Raises:
        TypeError, ValueError: as `conv_backward`.
    """
    return weight_gradient(
        _aten, 1, input, weight_size, grad_output, stride, padding, dilation, groups, True, output_padding
    )


def conv_transpose2d_input(
    input_size: Sequence[int],
    weight: Tensor,
    grad_output: Tensor,
    stride: Ints = 1,
    padding: Ints = 0,
    output_padding: Ints = 0,
    groups: int = 1,
    dilation: Ints = 1,
) -> Tensor:
    """Gradient of a 2d transposed convolution with respect to its input.

    `grad_input[n, i, s] = Σ_{o, k} weight[i, o, k] · grad_output[n, o, stride·s + dilation·k − padding]`
    in each group. Sizes: input_size `(N, C_in, H, W)`, weight `(C_in, C_out / groups, K, K)`,
    grad_output `(N, C_out, H', W')`, result input_size; in each, N may be absent.

    Raises:
        TypeError, ValueError: as `conv_backward`.
    """
    return input_gradient(
        _aten, 2, input_size, weight, grad_output, stride, padding, dilation, groups, True, output_padding
    )


def conv_transpose2d_weight(
    input: Tensor,
    weight_size: Sequence[int],
    grad_output: Tensor,
    stride: Ints = 1,
    padding: Ints = 0,
    output_padding: Ints = 0,
    groups: int = 1,
    dilation: Ints = 1,
) -> Tensor:
    """Gradient of a 2d transposed convolution with respect to its weight.

    `grad_weight[i, o, k] = Σ_{n, s} input[n, i, s] · grad_output[n, o, stride·s + dilation·k − padding]`
    in each group. Sizes: input `(N, C_in, H, W)`, weight_size `(C_in, C_out / groups, K, K)`,
    grad_output `(N, C_out, H', W')`, result weight_size; N may be absent.

    Raises:
        TypeError, ValueError: as `conv_backward`.
    """
    return weight_gradient(
        _aten, 2, input, weight_size, grad_output, stride, padding, dilation, groups, True, output_padding
    )


def conv_transpose3d_input(
    input_size: Sequence[int],
    weight: Tensor,
    grad_output: Tensor,
    stride: Ints = 1,
    padding: Ints = 0,
    output_padding: Ints = 0,
    groups: int = 1,
    dilation: Ints = 1,
) -> Tensor:
    """Gradient of a 3d transposed convolution with respect to its input.

    `grad_input[n, i, s] = Σ_{o, k} weight[i, o, k] · grad_output[n, o, stride·s + dilation·k − padding]`
    in each group. Sizes: input_size `(N, C_in, D, H, W)`, weight `(C_in, C_out / groups, K, K, K)`,
    grad_output `(N, C_out, D', H', W')`, result input_size; in each, N may be absent.

    Raises:
        TypeError, ValueError: as `conv_backward`.
    """
    return input_gradient(
        _aten, 3, input_size, weight, grad_output, stride, padding, dilation, groups, True, output_padding
    )


def conv_transpose3d_weight(
    input: Tensor,
    weight_size: Sequence[int],
    grad_output: Tensor,
    stride: Ints = 1,
    padding: Ints = 0,
    output_padding: Ints = 0,
    groups: int = 1,
    dilation: Ints = 1,
) -> Tensor:
    """Gradient of a 3d transposed convolution with respect to its weight.

    `grad_weight[i, o, k] = Σ_{n, s} input[n, i, s] · grad_output[n, o, stride·s + dilation·k − padding]`
    in each group. Sizes: input `(N, C_in, D, H, W)`, weight_size `(C_in, C_out / groups, K, K, K)`,
    grad_output `(N, C_out, D', H', W')`, result weight_size; N may be absent.

    Raises:
        TypeError, ValueError: as `conv_backward`.
    """
    return weight_gradient(
        _aten, 3, input, weight_size, grad_output, stride, padding, dilation, groups, True, output_padding
    )
