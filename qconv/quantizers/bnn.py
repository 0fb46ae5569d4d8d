"""BNN: sign with a straight-through gradient (Courbariaux and Hubara, arXiv:1602.02830)."""

from collections.abc import Callable

import torch
from torch import Tensor

from .base import Quantizer, Whole, is_plain_cpu
from .numbers import check_flags, check_numbers, wide
from .stochastic import Stream
from .surrogates import HardClip, Surrogate

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


class Sign(Quantizer):
    r"""Binary values without a scale, the quantizer of BNN for both weights and activations.

    ``x_q = sign(x)`` with ``sign(±0) = +1``; ``dx = g · d(x)`` with the surrogate's d: for BNN ``1[|x| ≤ 1]``, where
    ties at ±1 pass.

    The paper clips the gradient of activations and, instead of the gradient, the latent weight itself after every
    optimizer step: ``weight_clip`` is the bound of `after_step_`. BinaryNet.pytorch leaves the activation mask to a
    Hardtanh before the sign; its latest version has lost the latent clamp, which is kept here. Larq's ``SteSign`` masks
    the weight gradient too (``surrogate=HardClip, weight_clip=1``).

    Args:
        surrogate: makes what stands for the derivative (`qconv.quantizers.surrogates`).
        weight_clip: latent weights are clamped to ``[-weight_clip, weight_clip]`` after each step; None leaves them.
        stochastic: in training, +1 with probability ``clamp((x + 1) / 2, 0, 1)``, the paper's equation 2, from a
            `Stream`; in evaluation the sign.
        sharded: with ``stochastic``: whether processes see different elements, as of an input, or the same, as of a
            weight.

    Raises:
        ValueError: ``weight_clip`` is not positive.
    """

    bits = 1
    signs = True
    code_dtype = torch.int8

    def __init__(
        self,
        surrogate: Callable[[], Surrogate] = HardClip,
        weight_clip: float | None = None,
        stochastic: bool = False,
        sharded: bool = True,
    ) -> None:
        super().__init__()
        check_numbers(weight_clip=weight_clip)
        check_flags(stochastic=stochastic, sharded=sharded)
        if weight_clip is not None and not weight_clip > 0:
            raise ValueError(f"weight_clip (={weight_clip}) must be positive or None")
        self.surrogate = surrogate()
        self.weight_clip = weight_clip
        self.stream = Stream(sharded) if stochastic else None
        if stochastic and sharded:
            self.roles = ("input", "grad")  # of a weight every process would hold another one

    def tensors(self) -> tuple[Tensor, ...]:
        random = () if self.stream is None else self.stream.tensors()
        return *self.surrogate.tensors(), *random

    def whole(self, x: Tensor, *tensors: Tensor) -> Whole:
        if self.stream is None or not self.training:
            return Whole(sign(x))
        key, step = tensors[-2:]
        # +1 where u is below (x + 1) / 2, so that x = −1 is never +1; sign(0) is +1, hence the two minus signs.
        return Whole(-sign(self.stream.uniform(x, key, step) - (wide(x) + 1) / 2).to(x.dtype))

    def backward(self, grad: Tensor, x: Tensor, *tensors: Tensor) -> tuple[Tensor | None, ...]:
        count = len(self.surrogate.tensors())
        return self.surrogate.backward(grad, x, *tensors[:count]), *(None,) * len(tensors)

    def after_step_(self, x: Tensor | None) -> None:
        if self.weight_clip is not None and x is not None:
            x.clamp_(-self.weight_clip, self.weight_clip)
        if self.stream is not None:
            self.stream.after_step_()

    def set_progress_(self, progress: float, x: Tensor | None) -> None:
        self.surrogate.set_progress_(progress)

    def extra_repr(self) -> str:
        return f"weight_clip={self.weight_clip}"
