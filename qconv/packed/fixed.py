"""The weight quantizer of a layer that was loaded: codes that no longer change."""

import torch
from torch import Tensor

from ..quantizers import Codes, Quantizer

INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64)


def smallest(numbers: Tensor) -> Tensor:
    """Whole numbers in the smallest of the signed integer dtypes that holds them."""
    low, high = (int(numbers.min()), int(numbers.max())) if numbers.numel() else (0, 0)
    return numbers.to(next(each for each in INTEGERS if torch.iinfo(each).min <= low and high <= torch.iinfo(each).max))


class FixedCodes(Quantizer):
    """``w_q = codes.dequantize()``, whatever the float weight is; nothing of it is trained.

    Args:
        bits: information per element.

    Attributes:
        values: the codes, in the smallest integer dtype that holds them.
    """

    roles = ("weight",)
    replaces_weight = True
    values: Tensor
    scale: Tensor
    offset: Tensor | None
    negative_scale: Tensor | None

    def __init__(self, bits: float = 8) -> None:
        super().__init__()
        self.bits = bits
        self.zero = 0
        self.register_buffer("values", torch.zeros(0, dtype=torch.int8))
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("offset", None)
        self.register_buffer("negative_scale", None)

    def set_(self, codes: Codes) -> None:
        """Take the codes over."""
        self.values, self.zero = smallest(codes.values), codes.zero
        self.scale, self.offset, self.negative_scale = codes.scale, codes.offset, codes.negative_scale

    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(each for each in (self.values, self.scale, self.offset, self.negative_scale) if each is not None)

    def quantize(self, x: Tensor, *tensors: Tensor) -> Tensor:
        return self.codes(x, *tensors).dequantize().to(x.dtype)

    def codes(self, x: Tensor, *tensors: Tensor) -> Codes:
        values, scale, *others = tensors
        rest = iter(others)
        offset, negative_scale = (None if each is None else next(rest) for each in (self.offset, self.negative_scale))
        return Codes(values, scale, self.zero, offset, negative_scale)

    def backward(self, grad: Tensor, x: Tensor, *tensors: Tensor) -> tuple[Tensor | None, ...]:
        return (None,) * (1 + len(tensors))

    def initialize(self, x: Tensor) -> None:
        if self.values.shape != x.shape:  # until `set_`
            self.values = torch.zeros(x.shape, dtype=torch.int8, device=x.device)

    def extra_repr(self) -> str:
        return f"bits={self.bits:g}"
