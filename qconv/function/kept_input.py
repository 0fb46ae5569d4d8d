"""The input of a quantized layer for its backward: the tensor itself, or in a lean model bits of it."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor

from ..quantizers import Quantizer, Whole
from ..quantizers.form import Form, has_usual_strides
from .operations import ExtendedOperation, Linear, Operation
from .recipes import saved, shared

Lean = Literal["exact", "fast"]
"""The gradients of a lean layer: bit for bit those of one that keeps its input, or sums by the fastest kernels."""


class Keeping(NamedTuple):
    """The way in which a lean layer keeps its input.

    Attributes:
        lean: how it computes its gradients.
        form: of the input, if bits are kept.
        bits: the number of tensors of bits.
        restore: gives the input from the tensors after them; None if it is not needed.
        counts: whether bits of signs are counted for sums; on a GPU cuDNN multiplies in a quarter of that time.
    """

    lean: Lean
    form: Form | None
    bits: int
    restore: Callable[..., Tensor] | None
    counts: bool


def keep(
    input: Tensor,
    quantizer: Quantizer,
    tensors: Sequence[Tensor],
    op: Operation | ExtendedOperation,
    lean: Lean,
    name: Callable[[], str],
) -> tuple[Keeping, tuple[Tensor, ...]]:
    """Return how ``input`` is kept, and the tensors: bits, then those that restore the input itself.

    ``name`` gives the layer's, for messages.
    """
    form, bits = None, None
    is_batch = input.ndim == 2 if isinstance(op, Linear) else input.ndim > 2  # (N, C, *spatial)
    # By the strides of sides of 1, which bits do not keep, operators choose how they add up.
    if is_batch and (lean == "fast" or has_usual_strides(input)):
        form = Form.of(input, getattr(op, "groups", 1))
        with torch.no_grad():
            bits = quantizer.keep(input.detach(), form, *tensors)
            bits = None if bits is None else shared(input, bits)
    if bits is not None and not quantizer.needs_input:
        return Keeping(lean, form, len(bits), None, not input.is_cuda), bits
    restored = saved(input, name, exact=lean == "exact" or not quantizer.is_continuous)
    if bits is None:
        return Keeping(lean, None, 0, restored.restore, False), restored.tensors
    return Keeping(lean, form, len(bits), restored.restore, not input.is_cuda), (*bits, *restored.tensors)


class Restored:
    """Stands in for the input's quantizer; returns the stored codes."""

    has_whole = True

    def __init__(self, quantizer: Quantizer, keeping: Keeping, bits: Sequence[Tensor]) -> None:
        self._quantizer, self._form, self._bits = quantizer, cast(Form, keeping.form), bits
        self.signs, self.whole_ends = quantizer.signs, quantizer.whole_ends

    def whole(self, x: Any, *tensors: Tensor) -> Whole | None:
        """As `Quantizer.whole`."""
        restored = self._quantizer.restore(self._bits, self._form, *tensors)
        return None if isinstance(restored, Tensor) else restored

    def whole_bytes(self, x: Any, *tensors: Tensor, offset: int) -> Whole | None:
        """As `Quantizer.whole_bytes`."""
        return self._quantizer.restore_bytes(self._bits, self._form, *tensors, offset=offset)

    def quantize(self, x: Any, *tensors: Tensor) -> Tensor:
        """As `Quantizer.quantize`."""
        restored = self._quantizer.restore(self._bits, self._form, *tensors)
        if isinstance(restored, Tensor):
            return restored
        values, scale = restored
        return (values if scale is None else values * scale).to(self._form.dtype)


def stand_in(keeping: Keeping, bits: Sequence[Tensor]) -> Tensor:
    """Return a tensor of the shape, dtype and memory format of the input, without its values.

    By the format torch's operators choose how they add up. A contiguous one has no memory.
    """
    form, device = cast(Form, keeping.form), bits[0].device
    if form.picture_is_last:
        return torch.empty_strided(form.shape, form.strides, dtype=form.dtype, device=device)
    return torch.empty((), dtype=form.dtype, device=device).expand(form.shape)


class KeptInput:
    """The input in a backward: itself if ``keeping`` is None, else what was ``kept`` of it."""

    def __init__(
        self, quantizer: Quantizer, tensors: Sequence[Tensor], keeping: Keeping | None, kept: Sequence[Tensor]
    ) -> None:
        self._quantizer, self._tensors, self._keeping = quantizer, tensors, keeping
        count = 0 if keeping is None else keeping.bits
        self._form = None if keeping is None else keeping.form
        self._restore = None if keeping is None else keeping.restore
        self._bits, self._rest = tuple(kept[:count]), tuple(kept[count:])

    @property
    def _x(self) -> Tensor:
        """Return the input itself, if its values are needed."""
        # Once; a `cached_property` has a lock, which can't be compiled.
        if self._restore is not None:
            self._rest, self._restore = (self._restore(*self._rest),), None
        return self._rest[0]

    def stand_in(self) -> Tensor:
        """Return a tensor of the shape and dtype of the input, for an operation that does not read its values."""
        return self._x if self._keeping is None or self._form is None else stand_in(self._keeping, self._bits)

    def operand(self) -> Tensor:
        """Return the quantized input."""
        if self._form is None:
            return self._quantizer.quantize(self._x, *self._tensors)
        return Restored(self._quantizer, cast(Keeping, self._keeping), self._bits).quantize(None, *self._tensors)

    def gradients(self, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the input and of the quantizer's tensors, from the quantized input's."""
        if self._form is None or self._quantizer.needs_input:
            return self._quantizer.backward(grad, self._x, *self._tensors)
        return self._quantizer.backward_kept(grad, self._bits, self._form, *self._tensors)
