"""Quantizers with few levels: a lean layer keeps their codes, and bits of where the gradient passes."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .base import Quantizer, Whole, is_plain, is_plain_cpu, place
from .codes import in_bytes
from .form import Form, with_fresh_strides
from .numbers import count_below, flushes_denormals, wide

_ops = torch.ops.qconv


class Coding(NamedTuple):
    """The codes of values, from 0 up: ``value = code · unit + low``, or ``table[code]``.

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
        """Return the codes of ``values``; NaN gives arbitrary codes."""
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
    """Base of quantizers kept as codes of 1, 2, 4 or 8 bits and scales; `backward` gets ``x`` itself.

    A subclass states its `coding`.
    """

    @property
    def coding(self) -> Coding:
        """The codes of the values that `parts` returns."""
        raise NotImplementedError(f"{type(self).__name__} defines no coding")

    @property
    def _codes_whole(self) -> bool:
        """Whether the `coding` is of the values of `whole`: no subclass overrides `parts`."""
        return self.has_whole and type(self).parts is Coded.parts

    @property
    def whole_ends(self) -> tuple[int, int] | None:
        if not self._codes_whole:
            return None
        number, low, unit, table = self.coding
        ends = (low, low + unit * (number - 1)) if table is None else (table[0], table[-1])
        are_whole = all(float(value).is_integer() for value in table or (low, unit))
        return (int(ends[0]), int(ends[1])) if are_whole else None

    def parts(self, x: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return values of the `coding`, and small tensors from which, together, ``x_q`` follows."""
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
        rounding = self.known_rounding(x, *tensors) if self._codes_whole else None
        if rounding is not None and is_plain(x) and not torch.compiler.is_compiling():
            codes, is_nan = rounding.codes(x, -int(self.coding.low))
            if is_plain_cpu(x) and is_nan.item():  # from a GPU it is not read: that would wait
                return None
            return _ops.pack_codes(codes, bits), self._as_now(rounding.scale(x))
        values, *others = self.parts(x, *tensors)
        return self.coding.pack(values, bits), *map(self._as_now, others)

    def _as_now(self, tensor: Tensor) -> Tensor:
        """Return the kept form of a learned tensor: itself, or a copy while it is fresh (`hold`)."""
        return tensor.detach().clone() if self.is_fresh else tensor.detach()

    def restore(self, kept: Sequence[Tensor], form: Form, *tensors: Tensor) -> Whole | Tensor:
        packed, *others = kept
        return self.joined(form, self.coding.unpack(packed, self.coding.bits or 8, form), *others)

    def restore_bytes(self, kept: Sequence[Tensor], form: Form, *tensors: Tensor, offset: int) -> Whole | None:
        packed, *others = kept
        _, low, unit, table = self.coding
        if table is not None or unit != 1 or not self._codes_whole:
            return in_bytes(Coded.restore(self, kept, form, *tensors), offset)
        codes = form.codes(packed, self.coding.bits or 8, torch.uint8)
        scale = Whole(codes, *others).scale
        return Whole(codes if low + offset == 0 else codes.add_(int(low) + offset), scale)


class Passing(Coded):
    """Base of quantizers with a gradient that either passes or not, so that bits can replace ``x``.

    A subclass states where by `passes`, and overrides `backward` and `backward_kept` if it learns tensors.
    """

    _has_ends: bool = True  # no subclass has overridden only `passes`, and not `stops_at`

    def passes(self, x: Tensor, *tensors: Tensor) -> Tensor | None:
        """Return where the gradient passes, as True or 1; None for everywhere."""
        return None

    def stops_at(self, *tensors: Tensor) -> tuple[float, float] | None:
        """Return two ends: the gradient of a float32 ``x`` stops where ``x <= low`` and where ``x >= high``.

        A faster form of `passes`, for an ``x`` without NaN, of which `known_rounding` has given codes; None if it has
        no such form. A subclass that overrides `passes` alone is believed.
        """
        return None

    def passed(self, grad: Tensor, x: Tensor, *tensors: Tensor) -> Tensor:
        """Return ``grad`` where it `passes`, else 0; a subclass that overrides `passes` alone is believed."""
        passes = self.passes(x, *tensors)
        return grad if passes is None else grad * passes

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        of_passes = place(cls, "passes")
        cls._has_ends = place(cls, "stops_at") <= of_passes
        if of_passes < place(cls, "passed"):
            cls.passed = Passing.passed

    def backward(self, grad: Tensor, x: Tensor, *tensors: Tensor) -> tuple[Tensor | None, ...]:
        return self.passed(grad, x, *tensors), *(None for _ in tensors)

    @property
    def needs_input(self) -> bool:
        return False

    def keep(self, x: Tensor, form: Form, *tensors: Tensor) -> tuple[Tensor, ...] | None:
        kept = super().keep(x, form, *tensors)
        if kept is None:
            return None
        is_known = is_plain_cpu(x) and not torch.compiler.is_compiling()
        nowhere = torch.empty(0, dtype=torch.long, device=x.device)
        is_plain = is_known and x.dtype == torch.float32 and self._has_rounding and self._has_ends
        if is_plain and not flushes_denormals() and (ends := self.stops_at(*tensors)) is not None:
            packed, stops = _ops.pack_passes(x, *ends, form.groups)
            return *kept, packed if stops.item() else nowhere
        passes = self.passes(x, *tensors)
        if passes is None or (is_known and passes.all()):
            return *kept, nowhere
        return *kept, _ops.pack_signs(passes.to(torch.bfloat16).neg_(), form.groups)

    def restore(self, kept: Sequence[Tensor], form: Form, *tensors: Tensor) -> Whole | Tensor:
        return super().restore(kept[:-1], form, *tensors)

    def restore_bytes(self, kept: Sequence[Tensor], form: Form, *tensors: Tensor, offset: int) -> Whole | None:
        return super().restore_bytes(kept[:-1], form, *tensors, offset=offset)

    def backward_kept(
        self, grad: Tensor, kept: Sequence[Tensor], form: Form, *tensors: Tensor
    ) -> tuple[Tensor | None, ...]:
        passes = kept[-1]
        if passes.numel():
            grad = with_fresh_strides(_ops.where_passes(grad, passes, form.groups))
        return grad, *(None for _ in tensors)
