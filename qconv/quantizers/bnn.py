"""BNN: sign with a straight-through gradient (Courbariaux and Hubara, arXiv:1602.02830)."""

import math

import torch
from torch import Tensor

from .base import Codes, Quantizer, is_plain_cpu

_INTEGER = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def sign(x: Tensor) -> Tensor:
    """The sign with two values: +1 where ``x >= 0``, at -0.0 too, else -1; a NaN gives one of the two. Has no gradient.

    Example:
        >>> sign(torch.tensor([-2.0, -0.0, 0.0, 0.5]))
        tensor([-1.,  1.,  1.,  1.])
    """
    if torch.compiler.is_compiling():
        return torch.where(x < 0, -1.0, 1.0).to(x.dtype)  # Inductor fuses this, and would take `x + 0.0` for `x`
    # On the CPU copysign and addition cost what a copy costs; comparisons and `where` are not vectorized and cost ten
    # times that. Only -0.0 needs the addition, which makes it +0.0, and looking for one costs less than adding.
    x = x.detach()
    one = torch.ones((), dtype=x.dtype, device=x.device)
    if is_plain_cpu(x) and not _has_negative_zero(x):
        return torch.copysign(one, x)
    positive_zero = x + 0.0
    return torch.copysign(one, positive_zero, out=positive_zero)


def _has_negative_zero(x: Tensor) -> bool:
    """Whether -0.0 is among the values: as an integer of the same bits it is the smallest one."""
    bits = x.view(_INTEGER[x.element_size()])
    if x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last):
        bits = bits.movedim(1, -1)  # contiguous: a reduction over other strides is slower than the addition
    return x.numel() > 0 and bits.min().item() == torch.iinfo(bits.dtype).min


def hard_clip_backward(grad: Tensor, x: Tensor, clip: float, out: Tensor | None = None) -> Tensor:
    """The gradient of the clipped straight-through estimator: ``grad * 1[|x| <= clip]``, both ends included.

    A NaN in ``x`` gives gradient 0 or ``grad``; training stops on a NaN long before (`qconv.training.FiniteGuard`).
    ``out`` takes the result; it may be ``grad`` itself.
    """
    bound = _next_above(clip, x.dtype)
    if out is None or torch.compiler.is_compiling():
        return torch.ops.aten.hardtanh_backward(grad, x, -bound, bound)
    return torch.ops.aten.hardtanh_backward.grad_input(grad, x, -bound, bound, grad_input=out)


def _next_above(value: float, dtype: torch.dtype) -> float:
    """The smallest number of ``dtype`` above ``value > 0``: ``hardtanh_backward`` leaves its own bounds out."""
    step = torch.finfo(dtype).eps * 2.0 ** math.floor(math.log2(value))
    return (math.floor(value / step) + 1) * step


class Sign(Quantizer):
    r"""Binary values without a scale, the quantizer of BNN for both weights and activations.

    ``x_q = sign(x)`` with ``sign(±0) = +1``; ``dx = g · 1[|x| ≤ clip]``, ties at ±clip pass; ``clip=None``: ``dx = g``.

    The paper clips the gradient of activations and, instead of the gradient, the latent weight itself after every
    optimizer step: ``weight_clip`` is the bound of `clip_`. BinaryNet.pytorch leaves the activation mask to a Hardtanh
    before the sign; its latest version has lost the latent clamp, which is kept here. Larq's ``SteSign`` masks the
    weight gradient too (``clip=1, weight_clip=1``).

    Args:
        clip: the gradient passes where ``|x| <= clip``; None passes it everywhere.
        weight_clip: latent weights are clamped to ``[-weight_clip, weight_clip]`` after each step; None leaves them.

    Raises:
        ValueError: ``clip`` or ``weight_clip`` is not positive.
    """

    bits = 1
    signs = True

    def __init__(self, clip: float | None = 1.0, weight_clip: float | None = None) -> None:
        super().__init__()
        for name, value in (("clip", clip), ("weight_clip", weight_clip)):
            if value is not None and not value > 0:
                raise ValueError(f"{name} (={value}) must be positive or None")
        self.clip = clip
        self.weight_clip = weight_clip

    def quantize(self, x: Tensor, *tensors: Tensor) -> Tensor:
        return sign(x)

    def backward(self, grad: Tensor, x: Tensor, *tensors: Tensor) -> tuple[Tensor | None, ...]:
        return (grad if self.clip is None else hard_clip_backward(grad, x, self.clip, out=grad),)

    def codes(self, x: Tensor, *tensors: Tensor) -> Codes:
        return Codes(sign(x).to(torch.int8), torch.ones((), dtype=x.dtype, device=x.device))

    def clip_(self, x: Tensor) -> None:
        if self.weight_clip is not None:
            x.clamp_(-self.weight_clip, self.weight_clip)

    def extra_repr(self) -> str:
        return f"clip={self.clip}, weight_clip={self.weight_clip}"
