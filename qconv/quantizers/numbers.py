"""What several methods need of numbers: bits in their range, wider dtypes, a search among sorted levels."""

import torch
from torch import Tensor


def check_bits(name: str, bits: int, low: int = 1, high: int = 8, method: str = "") -> int:
    """``bits`` as an int; a ValueError with ``name`` and ``method`` unless it is whole, from ``low`` to ``high``."""
    if bits not in range(low, high + 1):
        where = f" for {method}" if method else ""
        raise ValueError(f"{name} (={bits}) must be a whole number from {low} to {high}{where}")
    return int(bits)


def wide(x: Tensor) -> Tensor:
    """``x`` in at least float32: levels and learned tensors of half precision are computed there."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def bucketize(x: Tensor, boundaries: Tensor) -> Tensor:
    """How many of the sorted boundaries are below each element; all of them for NaN. Keeps channels_last."""
    if x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last):
        return torch.bucketize(x.movedim(1, -1), boundaries).movedim(-1, 1)
    return torch.bucketize(x.contiguous(), boundaries)
