"""Quantizers with few levels: a lean layer keeps codes of its input, and bits of where the gradient passes."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .base import Quantizer, Whole, is_plain_cpu
from .form import Form
from .numbers import count_below, wide

_ops = torch.ops.qconv


class Coding(NamedTuple):
    """How values become codes from 0 up: ``value = code · unit + low``, or ``table[code]``.

    Attributes:
        number: of codes.
        low: the smallest value.
        unit: the difference between neighbours.
        table: all values in ascending order, if they are not evenly spaced.
    """

    number: int
    low: float = 0
    unit: float = 1
    table: tuple[float, ...] | None = None

    @property
    def bits(self) -> int | None:
        """The bits of a kept code: the smallest of 1, 2, 4 and 8 that hold all; None if none does."""
        return next((bits for bits in (1, 2, 4, 8) if self.number <= 2**bits), None)

    def pack(self, values: Tensor, bits: int) -> Tensor:
        """Return the codes of ``values``; those of NaN are arbitrary."""
        if self.table is not None:
            table = torch.tensor(self.table, dtype=values.dtype, device=values.device)
            values = count_below(values, table).clamp_(max=self.number - 1)  # NaN may be above all
        elif (self.low, self.unit) != (0, 1):
            values = (wide(values) - self.low).div_(self.unit)
        return _ops.pack_codes(values, bits)

    def unpack(self, packed: Tensor, bits: int, form: Form) -> Tensor:
        """Return the values, in at least float32."""
        dtype = torch.promote_types(form.dtype, torch.float32)
        if self.table is None:
            values = form.codes(packed, bits, dtype)
            values = values if self.unit == 1 else values.mul_(self.unit)
            return values if self.low == 0 else values.add_(self.low)
        places = form.codes(packed, bits, torch.uint8)
        table = torch.tensor(self.table, dtype=dtype, device=packed.device)
        if form.channels_last:  # indexing returns tensors that are contiguous
            return table[places.movedim(1, -1).int()].movedim(-1, 1)
        return table[places.int()]


class Coded(Quantizer):
    """Base of quantizers of which codes of 1, 2, 4 or 8 bits are kept, and the scales; `backward` gets ``x`` itself.

    A subclass states its `coding`.
    """

    @property
    def coding(self) -> Coding:
        """The codes of the values that `parts` returns."""
        raise NotImplementedError(f"{type(self).__name__} defines no coding")

    def parts(self, x: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return values of the `coding`, and small tensors that make ``x_q`` of them."""
        if self.has_whole:
            return tuple(part for part in self.whole(x, *tensors) or () if part is not None)
        values, scale, _, offset, _ = self.codes(x, *tensors)
        return (values, scale) if offset is None else (values, scale, offset)

    def joined(self, form: Form, values: Tensor, *others: Tensor) -> Whole | Tensor:
        """The inverse of `parts`."""
        if self.has_whole:
            return Whole(values, *others)
        scale, *offset = others
        x_q = values * scale
        return (x_q + offset[0] if offset else x_q).to(form.dtype)

    def keep(self, x: Tensor, form: Form, *tensors: Tensor) -> tuple[Tensor, ...] | None:
        bits = self.coding.bits
        if bits is None:
            return None
        values, *others = self.parts(x, *tensors)
        return self.coding.pack(values, bits), *(other.detach() for other in others)

    def restore(self, kept: Sequence[Tensor], form: Form, *tensors: Tensor) -> Whole | Tensor:
        packed, *others = kept
        return self.joined(form, self.coding.unpack(packed, self.coding.bits or 8, form), *others)


class Passing(Coded):
    """Base of those whose gradient passes or not, so that bits of where it does stand for ``x``.

    A subclass states where by `passes`, and overrides `backward` and `backward_kept` if it learns tensors.
    """

    def passes(self, x: Tensor, *tensors: Tensor) -> Tensor | None:
        """Return where the gradient passes, as True or 1; None for everywhere."""
        return None

    def backward(self, grad: Tensor, x: Tensor, *tensors: Tensor) -> tuple[Tensor | None, ...]:
        passes = self.passes(x, *tensors)
        return grad if passes is None else grad * passes, *(None for _ in tensors)

    @property
    def needs_input(self) -> bool:
        return False

    def keep(self, x: Tensor, form: Form, *tensors: Tensor) -> tuple[Tensor, ...] | None:
        kept = super().keep(x, form, *tensors)
        if kept is None:
            return None
        passes = self.passes(x, *tensors)
        is_known = is_plain_cpu(x) and not torch.compiler.is_compiling()
        if passes is None or (is_known and passes.all()):
            return *kept, torch.empty(0, dtype=torch.long, device=x.device)
        return *kept, _ops.pack_signs(passes.to(torch.bfloat16).neg_(), form.groups)

    def restore(self, kept: Sequence[Tensor], form: Form, *tensors: Tensor) -> Whole | Tensor:
        return super().restore(kept[:-1], form, *tensors)

    def backward_kept(
        self, grad: Tensor, kept: Sequence[Tensor], x: Tensor | None, form: Form, *tensors: Tensor
    ) -> tuple[Tensor | None, ...]:
        passes = kept[-1]
        if passes.numel():
            grad = _ops.where_passes(grad, passes, form.groups)
        return grad, *(None for _ in tensors)
