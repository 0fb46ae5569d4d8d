"""Signs: the function with two values, and the base of the quantizers that use it."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..kernels import pointwise
from .base import Levels, Quantizer, Whole, is_eager_cuda, is_plain_cpu
from .form import Form
from .kept_codes import Coded, Coding
from .surrogates import Surrogate

_ops = torch.ops.qconv
_INTEGER = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_FEW = 1 << 13  # values to which 0 is added in less time than an operator's call takes


def sign(x: Tensor) -> Tensor:
    """Return the sign with two values: +1 where ``x >= 0``, also at -0.0, else -1; NaN gives either. No gradient.

    Example:
        >>> sign(torch.tensor([-2.0, -0.0, 0.0, 0.5]))
        tensor([-1.,  1.,  1.,  1.])
    """
    if torch.compiler.is_compiling():
        return torch.where(x < 0, -1.0, 1.0).to(x.dtype)  # Inductor fuses this, and would simplify `x + 0.0` to `x`
    # On the CPU copysign and addition take as long as a copy; comparisons and `where` are not vectorized and take ten
    # times that. Only -0.0 needs the addition, which makes it +0.0, and looking for one is cheaper than adding.
    x = x.detach().resolve_neg()
    if is_eager_cuda(x):
        return _ops.sign(x)
    if x.numel() > _FEW and is_plain_cpu(x) and not _has_negative_zero(x):
        return torch.copysign(torch.ones((), dtype=x.dtype, device="cpu"), x)
    return pointwise.sign(x)


def _has_negative_zero(x: Tensor) -> bool:
    """Whether -0.0 is among the values; its bits are the smallest integer."""
    bits = x.view(_INTEGER[x.element_size()])
    if x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last):
        bits = bits.movedim(1, -1)  # contiguous: reducing over other strides is slower than the addition
    return x.numel() > 0 and bits.min().item() == torch.iinfo(bits.dtype).min


def signs_kept(
    x: Tensor, form: Form, ends: tuple[float | None, float | None] | None, drawn: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Return bits: the signs of ``x``, or of ``drawn``; and where the gradient passes, if it stops anywhere.

    ``ends`` is `Surrogate.ends`; with None only signs are returned.
    """
    if ends is None or ends == (None, None):
        return (_ops.pack_signs(x if drawn is None else drawn, form.groups),)
    signs, passes, stops = _ops.pack_signs_and_passes(x, *ends, form.groups)
    if drawn is not None:
        signs = _ops.pack_signs(drawn, form.groups)
    is_known = is_plain_cpu(x) and not torch.compiler.is_compiling()
    return (signs, passes) if not is_known or stops.item() else (signs,)


def passed(grad: Tensor, passes: Sequence[Tensor], form: Form) -> Tensor:
    """Return the gradient where the bits of the first of ``passes`` are 1, else 0; without any, ``grad`` itself."""
    return _ops.where_passes(grad, passes[0], form.groups) if passes else grad


class Binary(Coded):
    """Base of quantizers with two values per scale: holds the surrogate of the sign and its schedule.

    Args:
        surrogate: makes the surrogate derivative of the sign (`qconv.quantizers.surrogates`).
    """

    bits = 1
    code_dtype = torch.int8

    def __init__(self, surrogate: Callable[[], Surrogate]) -> None:
        super().__init__()
        self.surrogate = surrogate()

    @property
    def coding(self) -> Coding:
        return Coding(2, low=-1, unit=2)

    def tensors(self) -> tuple[Tensor, ...]:
        return self.surrogate.tensors()

    def levels(self, *tensors: Tensor) -> Levels | None:
        return Levels(-1, 1, torch.ones(())) if self.signs else None

    def keep(self, x: Tensor, form: Form, *tensors: Tensor) -> tuple[Tensor, ...] | None:
        if not self.signs:
            return super().keep(x, form, *tensors)
        (signs,) = self.parts(x, *tensors)
        return signs_kept(signs, form, None)

    def restore(self, kept: Sequence[Tensor], form: Form, *tensors: Tensor) -> Whole | Tensor:
        return Whole(form.signs(kept[0])) if self.signs else super().restore(kept, form, *tensors)

    def restore_bytes(self, kept: Sequence[Tensor], form: Form, *tensors: Tensor, offset: int) -> Whole | None:
        kind = Quantizer if self.signs else Coded
        return kind.restore_bytes(self, kept, form, *tensors, offset=offset)

    @property
    def is_continuous(self) -> bool:
        return self.signs and self.surrogate.is_continuous

    def set_progress_(self, progress: float, x: Tensor | None) -> None:
        self.surrogate.set_progress_(progress)
