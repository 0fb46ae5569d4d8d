"""Sums of products of whole numbers by float convolutions, exact and as fast as floats allow."""

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from .window import Window

_LIMIT = 2**24  # float32 holds every smaller whole number, and so every partial sum, in any order
_MOST = 4  # parts; together they take no longer than one convolution in float64
_Parts = tuple[tuple[int, int], ...]
_parts: Any = WeakTensorKeyDictionary()  # of weights, while they live


def sums_of_products(input: Tensor, weight: Tensor, window: Window, zero: int = 0) -> Tensor:
    """Return the convolution of ``input − zero`` with ``weight``: whole numbers below 2^53, as float32 or float64.

    8-bit operands are added up in float32 if no sum can reach 2^24, or in parts of the input channels for which that
    holds; all others in float64. Autocast has no effect.
    """
    parts = _exact_parts(input, weight, zero)
    if len(parts) > 1 and window.groups > 1:
        parts = ()
    dtype = torch.float32 if parts else torch.float64
    values = input.to(dtype) - zero if zero else input.to(dtype)
    padded, filters = window.pad(values), weight.to(dtype)
    geometry = window.stride, 0, window.dilation, window.groups
    with torch.autocast(input.device.type, enabled=False):
        if len(parts) < 2:
            sums = F.conv2d(padded, filters, None, *geometry)
        else:
            # With a dimension, so that its dtype counts.
            sums = torch.zeros(1, dtype=torch.float64, device=input.device)
            for begin, end in parts:
                sums = sums + F.conv2d(padded[:, begin:end], filters[:, begin:end], None, *geometry)
    return sums.contiguous(memory_format=torch.channels_last)


def are_floats_exact(input: Tensor, weight: Tensor, zero: int) -> bool:
    """Whether float32 holds every sum of products of any 8-bit codes with this weight."""
    return len(_exact_parts(input, weight, zero)) == 1


def _exact_parts(input: Tensor, weight: Tensor, zero: int) -> _Parts:
    """Return ranges of input channels with sums that float32 holds; none if no such division exists or is known.

    A GPU's library may choose a convolution by transforms, which rounds.
    """
    if input.dtype not in (torch.uint8, torch.int8) or type(input) is not Tensor or not input.is_cpu:
        return ()
    largest = max(zero, 255 - zero) if input.dtype == torch.uint8 else 128
    if weight.is_inference():  # such tensors don't tell that they have changed
        return _divided(weight, largest)
    key = largest, weight._version
    known: dict[Any, _Parts] = _parts.get(weight, {})
    if key not in known:
        known = {key: _divided(weight, largest)}
        _parts[weight] = known  # a new dictionary: other threads may be reading the old one
    return known[key]


def _divided(weight: Tensor, largest: int) -> _Parts:
    channels = weight.shape[1]
    reached = largest * weight.double().abs().sum((2, 3)).cumsum(1)  # (C_out, C / groups)
    if not weight.numel() or float(reached[:, -1].max()) < _LIMIT:
        return ((0, channels),)
    ends = [0]
    while ends[-1] < channels and len(ends) <= _MOST:
        before = reached[:, ends[-1] - 1 : ends[-1]] if ends[-1] else 0
        fits = (reached - before < _LIMIT).all(0)
        end = int(fits.cumprod(0).sum())  # the ones before fit as well, since their sums are smaller
        if end == ends[-1]:
            return ()
        ends.append(end)
    return tuple(pairwise(ends)) if ends[-1] == channels else ()
