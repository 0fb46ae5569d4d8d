"""BWN and XNOR-Net: sign with the filter's mean magnitude as scale (Rastegari et al., arXiv:1603.05279)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from .base import Codes, Quantizer
from .bnn import sign
from .surrogates import hard_clip_backward


def filter_scale(weight: Tensor) -> Tensor:
    """``alpha_c = mean |weight_c|`` over each filter, shape ``(C_out, 1, ...)``; 0 for filters without elements."""
    if weight[:1].numel() == 0:
        return weight.new_zeros(weight.shape[0], *[1] * (weight.ndim - 1))
    return weight.abs().mean(dim=tuple(range(1, weight.ndim)), keepdim=True)


def input_scale(
    input: Tensor,
    kernel_size: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    groups: int,
) -> Tensor:
    """XNOR-Net's K: the mean magnitude of the input under each position of the kernel.

    ``K = mean_c |input| * box``, where the box filter holds ``1 / prod(kernel_size)``; padding counts as 0. One map
    for each group of channels.

    Args:
        input: ``(N, C_in, *spatial)``.
        kernel_size: of the layer.
        stride: of the layer.
        padding: of the layer, equal on both sides.
        dilation: of the layer.
        groups: of the layer.

    Returns:
        ``(N, groups, *spatial_out)``.
    """
    grouped = input.abs().unflatten(1, (groups, -1)).mean(2)
    box = grouped.new_full((groups, 1, *kernel_size), 1 / torch.Size(kernel_size).numel())
    convolution = (F.conv1d, F.conv2d, F.conv3d)[len(kernel_size) - 1]
    return convolution(grouped, box, None, stride, padding, dilation, groups)


class ScaledSign(Quantizer):
    r"""Binary weights with one scale for each filter, the weight quantizer of BWN and XNOR-Net.

    ``w_q = alpha_c · sign(w)``, ``alpha_c = mean |w|`` over the n weights of filter c, ``sign(±0) = +1``; a filter of
    zeros gives zeros.

    ``dw = alpha_c · g · 1[|w| ≤ 1] + sign(w)/n · Σ_j g_j sign(w_j)``, the exact gradient of ``alpha · ste_sign(w)``;
    ``detach_scale=True`` drops the second term. The paper's own formula, ``g · (1/n + alpha · 1[|w| < 1])``, takes
    the sum over j for g alone; the authors' Torch code multiplies that by ``1 − 1/C_in`` (and by n under SGD).

    Args:
        detach_scale: treat alpha as a constant in the gradient.
        weight_clip: latent weights are clamped to ``[-weight_clip, weight_clip]`` after each step, as in the authors'
            code; None leaves them.

    Raises:
        ValueError: ``weight_clip`` is not positive.
    """

    bits = 1

    def __init__(self, detach_scale: bool = False, weight_clip: float | None = 1.0) -> None:
        super().__init__()
        if weight_clip is not None and not weight_clip > 0:
            raise ValueError(f"weight_clip (={weight_clip}) must be positive or None")
        self.detach_scale = detach_scale
        self.weight_clip = weight_clip

    def quantize(self, x: Tensor, *tensors: Tensor) -> Tensor:
        return sign(x) * filter_scale(x)

    def backward(self, grad: Tensor, x: Tensor, *tensors: Tensor) -> tuple[Tensor | None, ...]:
        grad_sign = hard_clip_backward(grad, x, 1.0) * filter_scale(x)
        if self.detach_scale:
            return (grad_sign,)
        signs = sign(x)
        count = max(x[:1].numel(), 1)
        grad_scale = (grad * signs).sum(dim=tuple(range(1, x.ndim)), keepdim=True)
        return (torch.addcmul(grad_sign, signs, grad_scale / count),)

    def codes(self, x: Tensor, *tensors: Tensor) -> Codes:
        return Codes(sign(x).to(torch.int8), filter_scale(x))

    def after_step_(self, x: Tensor | None) -> None:
        if self.weight_clip is not None and x is not None:
            x.clamp_(-self.weight_clip, self.weight_clip)

    def extra_repr(self) -> str:
        return f"detach_scale={self.detach_scale}, weight_clip={self.weight_clip}"
