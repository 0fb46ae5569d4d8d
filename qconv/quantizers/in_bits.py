"""Quantized values in few bits, as integer sums and lean layers need them."""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from .codes import Whole, in_bytes
from .form import Form
from .part import Part
from .rounding import Rounding, bytes_of


class InBits(Part):
    """A quantizer's values as whole numbers, as bytes, and as the bits that a lean layer keeps of its input.

    By default there are none of them: the layer computes on floats, and keeps its input.

    Attributes:
        signs: every value is +1 or -1, so a convolution may run on only the codes.
        is_elementwise: each value depends only on its own ``x`` and on the tensors.
    """

    signs: bool = False
    is_elementwise: bool = True
    _has_rounding: bool = True  # no subclass has overridden only `whole` or `quantize`, and not `rounding_of`

    def whole(self, x: Tensor, *tensors: Tensor) -> Whole | None:
        """Return whole numbers and a scale with the product ``x_q``; None if ``x_q`` is not of that form.

        Layers add up products of whole numbers, which is exact, and multiply the sum by the scales. Quantizers that
        keep real numbers, or have an offset or two scales, return None; their `quantize` is called instead.
        """
        return None

    @property
    def whole_ends(self) -> tuple[int, int] | None:
        """The smallest and the largest number of `whole`; None if they depend on data or are not whole numbers."""
        return (-1, 1) if self.signs else None

    def rounding_of(self, x: Tensor, *tensors: Tensor) -> Rounding | None:
        """Return how `whole` rounds, if it rounds to evenly spaced levels between its `whole_ends`.

        Others ask `known_rounding`: a subclass may round otherwise than it inherits.
        """
        return None

    def known_rounding(self, x: Tensor, *tensors: Tensor) -> Rounding | None:
        """Return `rounding_of`; None if a subclass overrides only `whole` or `quantize`."""
        return self.rounding_of(x, *tensors) if self._has_rounding else None

    def whole_bytes(self, x: Tensor, *tensors: Tensor, offset: int) -> Whole | None:
        """Return `whole`, its values plus ``offset`` as uint8 modulo 256, in the memory format of ``x``; None for NaN.

        Only if there are `whole_ends`. Reads a value from the device.
        """
        rounding, ends = self.known_rounding(x, *tensors), self.whole_ends
        if rounding is None:
            values, scale = cast(Whole, self.whole(x, *tensors))
            if self.signs:  # which are never NaN, and of any dtype
                return Whole(values.to(torch.int8).add_(offset).view(torch.uint8), scale)
            codes = None if ends is None else bytes_of(values, offset, *ends)
        else:
            scale, codes = rounding.scale(x), rounding.bytes(x, offset)
        return None if codes is None else Whole(codes, scale)

    def restore_bytes(self, kept: Sequence[Tensor], form: Form, *tensors: Tensor, offset: int) -> Whole | None:
        """Return `whole_bytes` of the ``x`` of ``kept = keep(x, form, *tensors)``, if it has no NaN."""
        if self.signs:
            return Whole(form.signs(kept[0], torch.int8).add_(offset).view(torch.uint8))
        return in_bytes(self.restore(kept, form, *tensors), offset)

    @property
    def is_continuous(self) -> bool:
        """Whether `backward` is continuous in ``x``, so that rounding errors of ``x`` hardly change it."""
        return False

    @property
    def needs_input(self) -> bool:
        """Whether the gradient needs ``x`` besides what `keep` returns: `backward` is called, not `backward_kept`."""
        return True

    def keep(self, x: Tensor, form: Form, *tensors: Tensor) -> tuple[Tensor, ...] | None:
        """Return bits of ``x`` for a lean layer's backward, in place of ``x``; None if there are none.

        `restore` and `backward_kept` give from them, bit for bit, what `whole` (or `quantize`) and `backward` give from
        ``x``. A subclass that overrides one of these, but not what it inherits here, keeps no bits or needs ``x``.
        """
        return None

    def restore(self, kept: Sequence[Tensor], form: Form, *tensors: Tensor) -> Whole | Tensor:
        """Return `whole` of the ``x`` of ``kept = keep(x, form, *tensors)``; ``x_q`` if `whole` returns None.

        Values may have a wider dtype. What a NaN of ``x`` becomes is left open.
        """
        raise NotImplementedError(f"{type(self).__name__} defines keep() and no restore()")

    def backward_kept(
        self, grad: Tensor, kept: Sequence[Tensor], form: Form, *tensors: Tensor
    ) -> tuple[Tensor | None, ...]:
        """Return the result of `backward` from the kept bits. It is not called if this `needs_input`.

        ``grad`` may be overwritten, and returned.
        """
        raise NotImplementedError(f"{type(self).__name__} needs no input and defines no backward_kept()")
