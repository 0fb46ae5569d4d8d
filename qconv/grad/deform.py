"""The gradients of deformable convolution, v1 (arXiv:1703.06211) and v2, which has a mask (arXiv:1811.11168).

In G groups of channels and D groups of offsets, with 2d indices k (tap of the kernel), l (output) and s (input); c is a
channel, d(c) its group of offsets, and `offset` is read as `(N, D, K, 2, H', W')`, y before x, for K taps:

    p[n, d, k, l]       = stride·l + dilation·k − padding + offset[n, d, k, :, l]
    at[n, c, k, l]      = Σ_s  hat(s_y − p_y) · hat(s_x − p_x) · input[n, c, s]        where hat(t) = max(0, 1 − |t|)
    output[n, o, l]     = bias[o] + Σ_{c, k}  weight[o, c, k] · mask[n, d(c), k, l] · at[n, c, k, l]

    back[n, c, k, l]    = Σ_o  weight[o, c, k] · grad_output[n, o, l]
    grad_input[n, c, s] = Σ_{k, l}  hat(s_y − p_y) · hat(s_x − p_x) · mask[n, d(c), k, l] · back[n, c, k, l]
    grad_weight[o, c, k] = Σ_{n, l}  grad_output[n, o, l] · mask[n, d(c), k, l] · at[n, c, k, l]
    grad_offset[n, d, k, y, l] = Σ_{c in d}  mask[n, d, k, l] · back[n, c, k, l] · ∂at[n, c, k, l] / ∂p_y,   x alike
    grad_mask[n, d, k, l] = Σ_{c in d}  back[n, c, k, l] · at[n, c, k, l]
    grad_bias[o]        = Σ_{n, l}  grad_output[n, o, l]

Sums over c and o stay within a group. Without a mask it is 1. The input is 0 outside its bounds, so samples fade to 0
over one pixel. At whole numbers, as with offsets of 0, ∂at/∂p is the derivative from the right.

Everything is computed by torchvision's operator, which gives all gradients in one call, on CPU and CUDA; torchvision is
imported when a function is called. float16 and bfloat16 are computed in float32 and rounded once.
"""

import warnings
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from ..ground.checks import check_ints
from ..ground.extras import needed
from .kernel import Ints

DeformGradients = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]
Mask = tuple[bool, bool, bool, bool, bool]
Pair = tuple[int, int]


def _operator() -> Any:
    with needed("deformable convolution"):
        import torchvision  # noqa: F401  # registers the operator
    return torch.ops.torchvision._deform_conv2d_backward


def _alert_not_deterministic(device: torch.device) -> None:
    """Raise or warn as torchvision's autograd does; the operator itself does not in every version."""
    if device.type != "cuda" or not torch.are_deterministic_algorithms_enabled():
        return
    message = "the backward of deformable convolution on cuda is not deterministic: it adds in any order"
    if not torch.is_deterministic_algorithms_warn_only_enabled():
        raise RuntimeError(message)
    warnings.warn(message, stacklevel=3)


def wide(x: Tensor) -> Tensor:
    """Return the tensor in a dtype for torchvision, which lacks bfloat16 on the CPU and sums float16 in float16."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def readable(offset: Tensor) -> Tensor:
    """Return the offsets with 0 in place of NaN, which torchvision's CPU kernels do not take."""
    return offset.masked_fill(offset.isnan(), 0) if offset.is_cpu else offset


def marked(x: Tensor, offset: Tensor) -> Tensor:
    """Return outputs, or their gradients, that are NaN where an offset is."""
    return x.masked_fill(offset.isnan().any(1, keepdim=True), torch.nan) if offset.is_cpu else x


def check_sizes(
    input_size: Sequence[int],
    weight_size: Sequence[int],
    offset_size: Sequence[int],
    mask_size: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> tuple[int, int, int, int]:
    """Check the sizes and return the output's; the operator's backward would read beyond wrong tensors.

    Raises:
        ValueError: sizes that do not fit each other.
    """
    x, w, o = tuple(input_size), tuple(weight_size), tuple(offset_size)
    for name, size in (("input", x), ("weight", w), ("offset", o)):
        if len(size) != 4:
            raise ValueError(f"{name}'s size (={size}) must have 4 dimensions")
    if w[1] < 1 or x[1] % w[1]:
        raise ValueError(f"weight's size (={w}) must have a divisor of in_channels (={x[1]}) in dimension 1")
    groups = x[1] // w[1]
    if groups < 1 or w[0] % groups:
        raise ValueError(f"groups (={groups}) must divide out_channels (={w[0]})")
    height, width = ((x[i + 2] + 2 * padding[i] - dilation[i] * (w[i + 2] - 1) - 1) // stride[i] + 1 for i in range(2))
    if min(height, width) < 1:
        raise ValueError(f"input's size (={x}) is too small for weight's (={w}): its output would be {height}×{width}")
    taps = w[2] * w[3]
    offset_groups = o[1] // (2 * taps) if taps else 0
    if offset_groups < 1 or o[1] != 2 * taps * offset_groups or x[1] % offset_groups:
        rule = f"2·{taps}·D channels for kernel_size (={w[2:]}) and a D that divides in_channels (={x[1]})"
        raise ValueError(f"offset's size (={o}) must have {rule}")
    if (o[0], *o[2:]) != (x[0], height, width):
        raise ValueError(f"offset's size (={o}) must be {(x[0], o[1], height, width)}, as the output's")
    expected = x[0], taps * offset_groups, height, width
    if mask_size is not None and tuple(mask_size) != expected:
        raise ValueError(f"mask's size (={tuple(mask_size)}) must be {expected} for offset's size (={o})")
    return x[0], w[0], height, width


def deform_conv2d_backward(
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor,
    offset: Tensor,
    mask: Tensor | None = None,
    stride: Ints = 1,
    padding: Ints = 0,
    dilation: Ints = 1,
    *,
    output_mask: Mask = (True, True, True, True, True),
) -> DeformGradients:
    """Gradients of a deformable convolution with respect to input, weight, offset, mask and bias, in one call.

    See the head of this module for the formulas. The numbers of groups follow from the sizes.

    Args:
        grad_output: gradient of the output, `(N, C_out, H', W')`.
        input: `(N, C_in, H, W)`, of a floating dtype. N may be 0.
        weight: `(C_out, C_in / groups, kh, kw)`.
        offset: `(N, 2·kh·kw·D, H', W')` for D groups of offsets; for each tap y before x. On the CPU, one of NaN makes
            `grad_output` NaN at its pixel.
        mask: `(N, kh·kw·D, H', W')`; None for v1.
        stride: an int, or one int per spatial dimension.
        padding: as stride.
        dilation: as stride.
        output_mask: which of the five to return; the others are None. The operator computes all of them unless only the
            bias's is requested.

    Returns:
        `grad_input`, `grad_weight`, `grad_offset`, `grad_mask` (None without a mask) and `grad_bias`, of the sizes of
        input, weight, offset, mask and `(C_out,)`.

    Raises:
        TypeError: if the dtypes differ or are not floating point.
        ValueError: if an argument is out of its range, the sizes do not fit each other, or the devices differ.
        ImportError: if there is no torchvision.
        RuntimeError: on CUDA under `torch.use_deterministic_algorithms(True)`.

    >>> input, weight = torch.randn(2, 4, 9, 9), torch.randn(6, 2, 3, 3)
    >>> offset, mask = torch.randn(2, 18, 5, 5), torch.rand(2, 9, 5, 5)
    >>> grads = deform_conv2d_backward(torch.ones(2, 6, 5, 5), input, weight, offset, mask, stride=2, padding=1)
    >>> [tuple(grad.shape) for grad in grads]
    [(2, 4, 9, 9), (6, 2, 3, 3), (2, 18, 5, 5), (2, 9, 5, 5), (6,)]
    """
    stride, padding, dilation = _pair("stride", stride, 1), _pair("padding", padding, 0), _pair("dilation", dilation, 1)
    _check_tensors(grad_output, input, weight, offset, mask)
    mask_size = None if mask is None else mask.shape
    expected = check_sizes(input.shape, weight.shape, offset.shape, mask_size, stride, padding, dilation)
    if tuple(grad_output.shape) != expected:
        raise ValueError(f"grad_output's size (={tuple(grad_output.shape)}) must be {expected}")
    grad_output = marked(grad_output, offset)
    if not any(output_mask[:4]):
        return None, None, None, None, grad_output.sum((0, 2, 3)) if output_mask[4] else None
    _alert_not_deterministic(grad_output.device)
    groups = input.shape[1] // weight.shape[1]
    offset_groups = offset.shape[1] // (2 * weight.shape[2] * weight.shape[3])
    no_mask = grad_output.new_zeros(input.shape[0], 1)
    tensors = (grad_output, input, weight, readable(offset), no_mask if mask is None else mask)
    bias = grad_output.new_zeros(weight.shape[0])
    geometry = (*stride, *padding, *dilation, groups, offset_groups, mask is not None)
    grads = _operator()(*map(wide, tensors), wide(bias), *geometry)
    wanted = (*output_mask[:3], output_mask[3] and mask is not None, output_mask[4])
    rounded = (grad.to(input.dtype) if is_wanted else None for grad, is_wanted in zip(grads, wanted, strict=True))
    return cast(DeformGradients, tuple(rounded))


def deform_conv2d_input(
    input_size: Sequence[int],
    weight: Tensor,
    offset: Tensor,
    grad_output: Tensor,
    stride: Ints = 1,
    padding: Ints = 0,
    dilation: Ints = 1,
    mask: Tensor | None = None,
) -> Tensor:
    """Gradient of a deformable convolution with respect to its input.

    `grad_input[n, c, s] = Σ_{k, l} hat(s_y − p_y) · hat(s_x − p_x) · mask[n, d(c), k, l] · back[n, c, k, l]`, in the
    notation of this module. Sizes: input_size `(N, C_in, H, W)`, weight `(C_out, C_in / groups, kh, kw)`, offset
    `(N, 2·kh·kw·D, H', W')`, mask `(N, kh·kw·D, H', W')`, grad_output `(N, C_out, H', W')`, result input_size.

    Raises:
        TypeError, ValueError, ImportError: as `deform_conv2d_backward`.
    """
    stub = grad_output.new_zeros(1).expand(tuple(input_size))
    return _one(0, grad_output, stub, weight, offset, mask, stride, padding, dilation)


def deform_conv2d_weight(
    input: Tensor,
    weight_size: Sequence[int],
    offset: Tensor,
    grad_output: Tensor,
    stride: Ints = 1,
    padding: Ints = 0,
    dilation: Ints = 1,
    mask: Tensor | None = None,
) -> Tensor:
    """Gradient of a deformable convolution with respect to its weight.

    `grad_weight[o, c, k] = Σ_{n, l} grad_output[n, o, l] · mask[n, d(c), k, l] · at[n, c, k, l]`, in the notation of
    this module. Sizes: input `(N, C_in, H, W)`, weight_size `(C_out, C_in / groups, kh, kw)`, offset
    `(N, 2·kh·kw·D, H', W')`, mask `(N, kh·kw·D, H', W')`, grad_output `(N, C_out, H', W')`, result weight_size.

    Raises:
        TypeError, ValueError, ImportError: as `deform_conv2d_backward`.
    """
    stub = grad_output.new_zeros(1).expand(tuple(weight_size))
    return _one(1, grad_output, input, stub, offset, mask, stride, padding, dilation)


def deform_conv2d_offset(
    input: Tensor,
    weight: Tensor,
    offset: Tensor,
    grad_output: Tensor,
    stride: Ints = 1,
    padding: Ints = 0,
    dilation: Ints = 1,
    mask: Tensor | None = None,
) -> Tensor:
    """Gradient of a deformable convolution with respect to its offsets.

    `grad_offset[n, d, k, y, l] = Σ_{c in d} mask[n, d, k, l] · back[n, c, k, l] · ∂at[n, c, k, l] / ∂p_y` and x alike,
    in the notation of this module; the offset itself is needed, since it is not linear in it. Sizes: input
    `(N, C_in, H, W)`, weight `(C_out, C_in / groups, kh, kw)`, offset `(N, 2·kh·kw·D, H', W')`, mask
    `(N, kh·kw·D, H', W')`, grad_output `(N, C_out, H', W')`, result as offset.

    Raises:
        TypeError, ValueError, ImportError: as `deform_conv2d_backward`.
    """
    return _one(2, grad_output, input, weight, offset, mask, stride, padding, dilation)


def deform_conv2d_mask(
    input: Tensor,
    weight: Tensor,
    offset: Tensor,
    grad_output: Tensor,
    stride: Ints = 1,
    padding: Ints = 0,
    dilation: Ints = 1,
) -> Tensor:
    """Gradient of a deformable convolution with respect to its mask, which is linear in it.

    `grad_mask[n, d, k, l] = Σ_{c in d} back[n, c, k, l] · at[n, c, k, l]`, in the notation of this module. Sizes:
    input `(N, C_in, H, W)`, weight `(C_out, C_in / groups, kh, kw)`, offset `(N, 2·kh·kw·D, H', W')`, grad_output
    `(N, C_out, H', W')`, result `(N, kh·kw·D, H', W')`.

    Raises:
        TypeError, ValueError, ImportError: as `deform_conv2d_backward`.
    """
    stub = None
    if offset.ndim == 4:  # otherwise the checks raise an error
        batch, channels, *spatial = offset.shape
        stub = grad_output.new_zeros(1).expand(batch, channels // 2, *spatial)
    return _one(3, grad_output, input, weight, offset, stub, stride, padding, dilation)


def _one(index: int, *operands: Any) -> Tensor:
    """Return one of the gradients of `deform_conv2d_backward`."""
    output_mask: Any = tuple(place == index for place in range(5))
    return cast(Tensor, deform_conv2d_backward(*operands, output_mask=output_mask)[index])


def _pair(name: str, value: Ints, least: int) -> Pair:
    return cast(Pair, check_ints(name, value, 2, least))


def _check_tensors(grad_output: Tensor, input: Tensor, weight: Tensor, offset: Tensor, mask: Tensor | None) -> None:
    named = {"grad_output": grad_output, "input": input, "weight": weight, "offset": offset, "mask": mask}
    for name, tensor in named.items():
        if tensor is None:
            continue
        if not tensor.is_floating_point():
            raise TypeError(f"{name}'s dtype (={tensor.dtype}) must be floating point")
        if tensor.dtype != grad_output.dtype:
            raise TypeError(f"{name}'s dtype (={tensor.dtype}) must be grad_output's (={grad_output.dtype})")
        if tensor.device != grad_output.device:
            raise ValueError(f"{name}'s device (={tensor.device}) must be grad_output's (={grad_output.device})")
