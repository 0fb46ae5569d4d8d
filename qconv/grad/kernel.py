"""The gradients of convolution over any `Kernel`; `aten` and `composed` use these functions with their own kernel."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar, cast

import torch.nn.functional as F
from torch import Tensor

from ..ground.checks import check_ints

Named = TypeVar("Named", bound=Callable[..., Any])
Ints = int | Sequence[int]
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]
Kernel = Callable[..., Gradients]
"""Gradients of a batched, symmetrically padded convolution; has the signature of `aten::convolution_backward`."""


def _named_padding(
    padding: str, kernel_size: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """Return the padding of both sides, and the extra padding of the right sides (None if there is none)."""
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
    """Raise an error that names the mismatch; aten's own message is "could not create a primitive descriptor"."""
    x, w = input.shape, weight.shape
    if groups < 1:
        raise ValueError(f"groups (={groups}) must be at least 1")
    if x[1] % groups:
        raise ValueError(f"groups (={groups}) must divide in_channels (={x[1]})")
    if w[0] % groups:  # in a transposed convolution, w[0] is in_channels, and equally wrong
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
    """Return the argument of `F.pad` for `extra` elements at the right side of each dimension."""
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
    stride = check_ints("stride", stride, n, 1)
    dilation = check_ints("dilation", dilation, n, 1)
    output_padding = check_ints("output_padding", output_padding, n, 0)
    extra = None
    if not isinstance(padding, str):
        padding = check_ints("padding", padding, n, 0)
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


def one_gradient(
    kernel: Kernel,
    n: int,
    which: Literal[0, 1],
    input: Any,
    weight: Any,
    grad_output: Tensor,
    stride: Ints,
    padding: Ints | str,
    dilation: Ints,
    groups: int,
    transposed: bool = False,
    output_padding: Ints = 0,
) -> Tensor:
    """Return the n-d gradient of the input, or of the weight if ``which`` is 1, by its size; a stub replaces it."""
    size = tuple(weight if which else weight.shape)
    if len(size) != n + 2:
        given = f"weight_size (={size})" if which else f"weight (of size {size})"
        raise ValueError(f"{given} must have {n + 2} dimensions")
    stub = grad_output.new_empty(1).expand(tuple(weight if which else input))
    operands = (input, stub) if which else (stub, weight)
    geometry = (stride, padding, dilation, groups, transposed, output_padding)
    return cast(Tensor, gradients(kernel, grad_output, *operands, *geometry, (which == 0, which == 1, False))[which])


_RAISES = """

Raises:
    TypeError, ValueError: as `conv_backward`.
"""
_FORMULAS = {
    "conv_input": """
`grad_input[n, i, s] = Σ_{o, k, l} weight[o, i, k] · grad_output[n, o, l]`
where `s = stride·l + dilation·k − padding`, in each group.
Sizes: input_size `(N, C_in, *spatial)`, weight `(C_out, C_in / groups, *kernel)`,
grad_output `(N, C_out, *spatial_out)`, result input_size; in each, N may be absent.""",
    "conv_weight": """
`grad_weight[o, i, k] = Σ_{n, l} input[n, i, stride·l + dilation·k − padding] · grad_output[n, o, l]`
in each group. Sizes: input `(N, C_in, *spatial)`, weight_size `(C_out, C_in / groups, *kernel)`,
grad_output `(N, C_out, *spatial_out)`, result weight_size; N may be absent.""",
    "conv_transpose_input": """
`grad_input[n, i, s] = Σ_{o, k} weight[i, o, k] · grad_output[n, o, stride·s + dilation·k − padding]`
in each group. Sizes: input_size `(N, C_in, *spatial)`, weight `(C_in, C_out / groups, *kernel)`,
grad_output `(N, C_out, *spatial_out)`, result input_size; in each, N may be absent.""",
    "conv_transpose_weight": """
`grad_weight[i, o, k] = Σ_{n, s} input[n, i, s] · grad_output[n, o, stride·s + dilation·k − padding]`
in each group. Sizes: input `(N, C_in, *spatial)`, weight_size `(C_in, C_out / groups, *kernel)`,
grad_output `(N, C_out, *spatial_out)`, result weight_size; N may be absent.""",
}


def of_all(kernel: Kernel, module: str, doc: str):
    """``conv_backward`` of a module, over its kernel."""

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
        geometry = stride, padding, dilation, groups, transposed, output_padding
        return gradients(kernel, grad_output, input, weight, *geometry, output_mask)

    return _placed(conv_backward, "conv_backward", module, doc)


def of_input(kernel: Kernel, n: int, module: str):
    """``conv{n}d_input`` of a module, over its kernel."""

    def function(
        input_size: Sequence[int],
        weight: Tensor,
        grad_output: Tensor,
        stride: Ints = 1,
        padding: Ints | str = 0,
        dilation: Ints = 1,
        groups: int = 1,
    ) -> Tensor:
        return one_gradient(kernel, n, 0, input_size, weight, grad_output, stride, padding, dilation, groups)

    return _named(function, "conv_input", n, module)


def of_weight(kernel: Kernel, n: int, module: str):
    """``conv{n}d_weight`` of a module, over its kernel."""

    def function(
        input: Tensor,
        weight_size: Sequence[int],
        grad_output: Tensor,
        stride: Ints = 1,
        padding: Ints | str = 0,
        dilation: Ints = 1,
        groups: int = 1,
    ) -> Tensor:
        return one_gradient(kernel, n, 1, input, weight_size, grad_output, stride, padding, dilation, groups)

    return _named(function, "conv_weight", n, module)


def of_transposed_input(kernel: Kernel, n: int, module: str):
    """``conv_transpose{n}d_input`` of a module, over its kernel."""

    def function(
        input_size: Sequence[int],
        weight: Tensor,
        grad_output: Tensor,
        stride: Ints = 1,
        padding: Ints = 0,
        output_padding: Ints = 0,
        groups: int = 1,
        dilation: Ints = 1,
    ) -> Tensor:
        geometry = stride, padding, dilation, groups, True, output_padding
        return one_gradient(kernel, n, 0, input_size, weight, grad_output, *geometry)

    return _named(function, "conv_transpose_input", n, module)


def of_transposed_weight(kernel: Kernel, n: int, module: str):
    """``conv_transpose{n}d_weight`` of a module, over its kernel."""

    def function(
        input: Tensor,
        weight_size: Sequence[int],
        grad_output: Tensor,
        stride: Ints = 1,
        padding: Ints = 0,
        output_padding: Ints = 0,
        groups: int = 1,
        dilation: Ints = 1,
    ) -> Tensor:
        geometry = stride, padding, dilation, groups, True, output_padding
        return one_gradient(kernel, n, 1, input, weight_size, grad_output, *geometry)

    return _named(function, "conv_transpose_weight", n, module)


def _named(function: Named, name: str, n: int, module: str) -> Named:
    operation, _, operand = name.rpartition("_")
    kind = "transposed convolution" if "transpose" in name else "convolution"
    doc = f"Gradient of a {n}d {kind} with respect to its {operand}.\n{_FORMULAS[name]}{_RAISES}"
    return _placed(function, f"{operation}{n}d_{operand}", module, doc)


def _placed(function: Named, name: str, module: str, doc: str) -> Named:
    """Give a generated function name, place and docstring like a written one, so that it can be pickled."""
    function.__name__ = function.__qualname__ = name
    function.__module__, function.__doc__ = module, doc
    return function
