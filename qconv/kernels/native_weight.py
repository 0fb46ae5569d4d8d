"""The operator `pack_weight` in C, called on the memory of tensors."""

import torch
from torch import Tensor

from .native import BLOCK, best, kernels

_GRAIN = 1 << 17  # weights below which a second thread costs more than it gains
_MOST_TAPS = 256


def pack_weight(signs: Tensor, groups: int = 1) -> tuple[Tensor, Tensor] | None:
    """`qconv.kernels.operators.pack_weight`; None where the definition has to run.

    That is without a compiled module, for other dtypes than float32, other memory formats than contiguous and
    channels_last, and unusual shapes.
    """
    module = kernels()
    if module is None or signs.dtype != torch.float32 or signs.ndim != 4 or not signs.numel():
        return None
    out_channels, in_channels, height, width = signs.shape
    last = signs.is_contiguous(memory_format=torch.channels_last)
    is_plain = signs.is_contiguous() and height * width <= _MOST_TAPS
    if groups < 1 or out_channels % groups or not (last or is_plain):
        return None
    blocks = -(-out_channels // groups // BLOCK)
    words = torch.empty((groups, blocks, height, width, -(-in_channels // 64), BLOCK), dtype=torch.int64, device="cpu")
    sums = torch.empty((groups, height, width, blocks * BLOCK), dtype=torch.int32, device="cpu")
    module.pack_weight(
        *(signs.data_ptr(), words.data_ptr(), sums.data_ptr()),
        *(groups, out_channels // groups, in_channels, height * width, blocks, int(last), best()),
        _GRAIN // (BLOCK * in_channels * height * width) + 1,
    )
    return words, sums
