"""The weight quantizer of a loaded layer: codes that no longer change."""

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor

from ..quantizers import Codes, Quantizer, Whole

INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64)


def smallest(numbers: Tensor) -> Tensor:
    """Whole numbers in the smallest signed integer dtype that holds them; very large ones in float64."""
    low, high = (int(numbers.min()), int(numbers.max())) if numbers.numel() else (0, 0)
    fitting = (dtype for dtype in INTEGERS if torch.iinfo(dtype).min <= low and high <= torch.iinfo(dtype).max)
    return numbers.to(next(fitting, torch.float64))


class FixedCodes(Quantizer):
    """``w_q = codes.dequantize()``, for any float weight; nothing in it is trained."""

    roles = ("weight",)
    replaces_weight = True
    values: Tensor
    scale: Tensor
    offset: Tensor | None
    negative_scale: Tensor | None

    def __init__(self, bits: float = 8) -> None:
        super().__init__()
        self.bits = bits
        self.register_buffer("values", torch.zeros(0, dtype=torch.int8))
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("offset", None)
        self.register_buffer("negative_scale", None)

    def set_(self, codes: Codes) -> None:
        """Set the codes; their `zero` must be 0."""
        self.values = codes.values
        self.scale, self.offset, self.negative_scale = codes.scale, codes.offset, codes.negative_scale

    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(
            tensor for tensor in (self.values, self.scale, self.offset, self.negative_scale) if tensor is not None
        )

    def quantize(self, x: Tensor, *tensors: Tensor) -> Tensor:
        return self.codes(x, *tensors).dequantize().to(x.dtype)

    @property
    def code_dtype(self) -> torch.dtype:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The dtype of the stored codes."""
        return self.values.dtype

    def whole(self, x: Tensor, *tensors: Tensor) -> Whole | None:
        values, scale, zero, offset, negative_scale = self.codes(x, *tensors)
        # Wider codes are those of powers of two and of 8-bit floats; the layers were trained with the products.
        if values.dtype not in (torch.int8, torch.int16) or zero or offset is not None or negative_scale is not None:
            return None
        return Whole(values.to(torch.promote_types(x.dtype, torch.float32)), scale)

    def codes(self, x: Tensor, *tensors: Tensor) -> Codes:
        values, scale, *others = tensors
        rest = iter(others)
        offset, negative_scale = (
            None if tensor is None else next(rest) for tensor in (self.offset, self.negative_scale)
        )
        return Codes(values, scale, 0, offset, negative_scale)

    def backward(self, grad: Tensor, x: Tensor, *tensors: Tensor) -> tuple[Tensor | None, ...]:
        return (None,) * (1 + len(tensors))

    def initialize(self, x: Tensor) -> None:
        if self.values.shape == x.shape and self.values.any():
            raise ValueError("the weights of a packed model are fixed: load them into the float model")
        self.values = torch.zeros(x.shape, dtype=torch.int8, device=x.device)  # until `set_`

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        # Move to another device, but not to another dtype: in half precision a scale of 2^-31 would be 0.
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, tensor in before.items():
            if tensor is not None and not tensor.is_meta:
                self._buffers[name] = tensor.to(getattr(self, name).device)
        return self

    def extra_repr(self) -> str:
        return f"bits={self.bits:g}"
