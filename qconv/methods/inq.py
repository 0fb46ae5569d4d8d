"""INQ: weights become powers of two in portions, and are then frozen (arXiv:1702.03044)."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..ground.checks import check_bits, check_numbers
from ..ground.processes import placed_as, whole
from ..quantizers.base import Codes, Quantizer, Whole
from ..quantizers.flags import SHARE
from ..quantizers.numbers import wide
from ..quantizers.part import FINITE, Rule, has_begun
from ..scheme import Scheme, named


def power_exponent(x: Tensor) -> Tensor:
    """The k with ``0.75 · 2^k <= |x| < 1.5 · 2^k``, exact at both ends; meaningless for 0.

    Example:
        >>> power_exponent(torch.tensor([0.74, 0.75, -1.0, 1.49, 1.5]))
        tensor([-1,  0,  0,  0,  1], dtype=torch.int32)
    """
    mantissa, exponent = _frexp(x)
    return exponent - (mantissa < 0.75).to(exponent.dtype)


def _frexp(x: Tensor) -> tuple[Tensor, Tensor]:
    """``|x| = mantissa · 2^exponent`` with the mantissa in [0.5, 1); torch lacks it for half precision."""
    mantissa, exponent = torch.frexp(wide(x.abs()))
    return mantissa, exponent


class INQ(Quantizer):
    r"""Weights quantized to powers of two in portions, largest first, the quantizer of INQ.

    ``w_q = level`` for frozen weights, ``w`` for the others; ``dw = g`` for the others, 0 for frozen ones. Latent
    weights that are not frozen are not clipped.

    The levels are 0 and ``±2^n2 … ±2^n1`` with ``n1 = floor(log2(4 s / 3))``, ``n2 = n1 + 1 − 2^(b−1) / 2`` and ``s``
    the largest magnitude in the layer when the first portion is frozen. A weight takes the level beta where
    ``(alpha + beta) / 2 <= |w| < 3 beta / 2``, alpha the next lower level: the lower ends belong to beta. Weights that
    grew beyond ``3 · 2^n1 / 2`` later take the largest level, ``±2^n1``.

    `set_progress_` freezes weights. With n portions, progress in ``[i / n, (i + 1) / n)`` means the i-th accumulated
    portion of the layer's weights, and 1 the last (their number rounded to the nearest). The largest magnitudes not yet
    frozen come next; of equal ones, the first in memory. Frozen weights stay frozen and keep their level: whatever an
    optimizer's momentum and weight decay do to the latent weight, it is brought back after each optimizer step. The
    paper trains for some epochs after each portion and restarts the learning rate; its portions are 50, 75, 87.5 and
    100 % (68.98 % of ResNet-18 on ImageNet with 5 bits), and a well-known reimplementation has 82 % for the third.

    Float buffers, 0 before and constant afterwards, record which weights are frozen (1), their levels and n1. In an
    average of models all of a weight's constants have the same share, so it keeps its level exactly.

    In a layer of zeros all levels are 0 until a weight is not 0. NaN and inf pass while not frozen, and cannot be
    frozen.

    Args:
        weight_bits: 2 (ternary) to 7; one of them is for the 0.
        portions: accumulated parts of the weights, increasing, the last one 1.

    Raises:
        ValueError: ``weight_bits`` out of range, or ``portions`` not increasing from above 0 to 1; from
            `set_progress_`, a weight that is NaN or inf; in a checkpoint, levels of another number of bits.
    """

    roles = ("weight",)
    casts = ("frozen", "code", "top")
    frozen: Tensor
    code: Tensor
    top: Tensor

    def __init__(self, weight_bits: int = 5, portions: Sequence[float] = (0.5, 0.75, 0.875, 1.0)) -> None:
        super().__init__()
        self.bits = check_bits("weight_bits", weight_bits, 2, 7, "INQ")
        self.portions = tuple(portions)
        for portion in self.portions:
            check_numbers(portions=portion)
        ascending = all(low < high for low, high in zip((0.0, *self.portions), self.portions, strict=False))
        if not self.portions or not ascending or self.portions[-1] != 1:
            raise ValueError(f"portions (={self.portions}) must increase from above 0 to 1")
        self.final_from = (len(self.portions) - 1) / len(self.portions)
        self.powers = 2 ** (weight_bits - 1) // 2
        # A level is stored as 0 or ±(1 + exponent − n2), with n1 rather than s, since casting the layer would change s.
        self.register_buffer("frozen", torch.zeros(()))
        self.register_buffer("code", torch.zeros(()))
        self.register_buffer("top", torch.zeros(()))

    @property
    def is_final(self) -> bool:
        """Whether all weights are frozen."""
        return bool((self.frozen > 0).all())

    def initialize(self, x: Tensor) -> None:
        if (self.frozen.device, self.frozen.shape) != (x.device, x.shape):
            self.frozen, self.code, self.top = torch.zeros_like(x), torch.zeros_like(x), x.new_zeros(())
        for tensor in self.tensors():
            tensor.fill_(0)

    def rules(self) -> dict[str, Rule]:
        return {"frozen": SHARE, "code": FINITE, "top": FINITE}

    def check_state(self, state_dict: Mapping[str, Any], prefix: str = "") -> None:
        super().check_state(state_dict, prefix)
        code = state_dict.get(f"{prefix}code")
        if not isinstance(code, Tensor) or code.is_meta or not code.numel():
            return
        frozen = state_dict.get(f"{prefix}frozen")
        if isinstance(frozen, Tensor) and frozen.shape == code.shape and frozen.device == code.device:
            code = constant(code, frozen)
        largest = int(code.abs().max())
        if largest not in (0, self.powers):  # the first weight to be frozen is the largest, and takes the top level
            raise ValueError(
                f"{prefix}code in the checkpoint reaches {largest}; with weight_bits (={self.bits}) it must be "
                f"{self.powers}: the weights were frozen with another number of bits"
            )

    def tensors(self) -> tuple[Tensor, ...]:
        return self.frozen, self.code, self.top

    def whole(self, x: Tensor, *tensors: Tensor) -> Whole:
        """Return powers of two; weights that are not frozen, and zeros, for example pruned ones, stay as they are."""
        frozen, code, top = tensors
        return Whole(torch.where((frozen > 0) & (x != 0), self._level(frozen, code, top, x.dtype), x))

    def backward(self, grad: Tensor, x: Tensor, *tensors: Tensor) -> tuple[Tensor | None, ...]:
        return grad.masked_fill(tensors[0] > 0, 0.0), None, None, None

    def codes(self, x: Tensor, *tensors: Tensor) -> Codes:
        """Integer codes, once all weights are frozen.

        Raises:
            TypeError: some weights are not frozen.
        """
        frozen, code, top = tensors
        if not (frozen > 0).all():
            raise TypeError(
                f"INQ has integer codes once all weights are frozen; {int((frozen > 0).sum())} of {frozen.numel()} "
                "are: call set_progress with 1"
            )
        numbers = constant(code, frozen).long() * (x != 0)
        values = (numbers != 0).long().bitwise_left_shift((numbers.abs() - 1).clamp(min=0)) * numbers.sign()
        return Codes(values, torch.exp2((_top(frozen, code, top) + 1 - self.powers).double()))

    def after_step_(self, x: Tensor | None) -> None:
        if x is not None:
            x.copy_(placed_as(x, self.quantize(whole(x), *self.tensors())))

    def set_progress_(self, progress: float, x: Tensor | None) -> None:
        if x is None:
            return
        shard, x = x, whole(x)
        count = len(self.portions)
        portion = self.portions[sum(has_begun(index / count, progress) for index in range(1, count))]
        more = round(portion * x.numel()) - int((self.frozen > 0).sum())
        if more <= 0:
            return
        if not x.isfinite().all():
            raise ValueError("the weight has NaN or inf: INQ can't freeze it")
        self._settle()
        magnitude = x.abs()
        if not self.code.any() and magnitude.any():  # only level 0 is in use
            self.top.copy_(power_exponent(magnitude.max()))
        frozen = self.frozen > 0
        waiting = magnitude.masked_fill(frozen, -1.0).flatten()
        chosen = torch.zeros_like(frozen).flatten()
        chosen[waiting.argsort(descending=True, stable=True)[:more]] = True
        chosen = chosen.view(frozen.shape)
        self.code.copy_(torch.where(chosen, self._nearest(x), self.code))
        self.frozen.copy_(frozen | chosen)
        shard.copy_(placed_as(shard, self.quantize(x, *self.tensors())))

    def _settle(self) -> None:
        """Turn averaged buffers into constants when training continues from an average."""
        top, code = _top(*self.tensors()), constant(self.code, self.frozen)
        self.top.copy_(top)
        self.code.copy_(code)
        self.frozen.copy_(self.frozen > 0)

    def _nearest(self, x: Tensor) -> Tensor:
        """The code of the level given by the rule."""
        exponent = power_exponent(x)
        lowest = self.top + 1 - self.powers
        index = (exponent - lowest + 1).clamp(1, self.powers)
        # Below beta / 2 = 2^(n2 − 1) the lowest level gives way to 0; the mantissa starts at 0.5.
        is_zero = (_frexp(x)[1] < lowest) | (x == 0)
        return (index.masked_fill(is_zero, 0) * x.sign()).to(self.code.dtype)

    def _level(self, frozen: Tensor, code: Tensor, top: Tensor, dtype: torch.dtype) -> Tensor:
        number = constant(code, frozen).to(torch.promote_types(dtype, torch.float32))
        exponent = number.abs() + (_top(frozen, code, top) - self.powers)
        return (torch.exp2(exponent) * number.sign()).to(dtype)


def constant(share: Tensor, flag: Tensor) -> Tensor:
    """The whole number whose average with zeros is ``share`` if that of 1 is ``flag``; 0 if ``flag`` is 0."""
    share, flag = wide(share), wide(flag)
    return (share / torch.where(flag > 0, flag, 1.0)).round()


def _top(frozen: Tensor, code: Tensor, top: Tensor) -> Tensor:
    """Return n1, set when the first weight got a nonzero level."""
    levels = frozen * (code != 0)
    return constant(top, levels.max() if levels.numel() else levels.sum())


@named
def inq(weight_bits: int = 5, portions: Sequence[float] = (0.5, 0.75, 0.875, 1.0)) -> Scheme:
    """INQ: weights become powers of two in portions, and are then frozen (arXiv:1702.03044).

    ``portions`` are accumulated; `qconv.set_progress` moves from one to the next. The authors start from a trained
    float network and restart the learning rate with each portion.
    """
    if not isinstance(portions, Sequence) or isinstance(portions, str):
        raise TypeError(f"portions (={portions!r}) must be a sequence of numbers")
    portions = tuple(portions)
    return Scheme(weight=partial(INQ, weight_bits, portions))
