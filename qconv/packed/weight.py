"""Conversion of a weight to codes in a file, and back."""

import math
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..layers import QuantizedLayer
from ..layers.naming import name_of
from ..quantizers import Codes, Identity
from . import header
from .fixed import smallest
from .radix import LARGEST_RADIX, pack, packed_length, radix_of, unpack
from .tensors import joined

NO_CODES = Codes(torch.zeros(0, dtype=torch.int8, device="cpu"), torch.ones((), device="cpu"))


class Entry(NamedTuple):
    """A tensor of the file, made when it is written; `owner` is the module it belongs to."""

    owner: str
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    make: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return math.prod(self.shape) * self.dtype.itemsize


def entry(name: str, tensor: Tensor, owner: str) -> Entry:
    """An entry for an unchanged tensor."""
    return Entry(owner, name, tensor.dtype, tuple(tensor.shape), lambda: tensor.detach())


def describe_weight(name: str, layer: QuantizedLayer, strict: bool) -> tuple[header.Weight | None, list[Entry]]:
    """Return how the weight is stored (None without codes), and its tensors; `strict` as in `layer.describe`."""
    quantizer = layer.weight_quantizer
    shape = tuple(layer.filters().shape)
    dtype: Any = str(layer.weight.dtype).removeprefix("torch.")
    codes = _codes(name, layer, strict)
    if codes is None:  # the weight keeps real numbers
        whole = tuple(layer.weight.shape)
        kept = layer.quantized_weight
        if layer.filters_are_computed:  # recomputed from the weight when it is loaded
            if strict and not isinstance(quantizer, Identity):
                where = name_of(layer, name)
                raise ValueError(f"{where}: the weight that it computes has no codes, and can't be packed")
            kept = layer.weight.detach
        return None, [Entry(name, joined(name, "weight"), layer.weight.dtype, whole, kept)]
    values = codes.values
    if not values.is_floating_point() or not values.numel() or values.abs().max() <= header.LARGEST_CODE:
        values = values.nan_to_num().long() - codes.zero
    levels = _levels(values)
    first, step, count = _progression(levels)
    radix = radix_of(quantizer.bits, count)
    if step == 0 or radix > 2 ** max(math.ceil(quantizer.bits), 2):  # far apart: store the existing codes one by one
        first, step, radix = 0, 0, radix_of(quantizer.bits, len(levels))

    def make() -> Tensor:
        return pack((values - first) // step if step else torch.searchsorted(levels, values.contiguous()), radix)

    length = packed_length(layer.weight.numel(), radix)
    stored = header.Weight(shape=list(shape), bits=quantizer.bits, radix=radix, first=first, step=step, dtype=dtype)
    entries = [Entry(name, joined(name, "weight.codes"), torch.uint8, (length,), make)]
    if not step:
        entries.append(entry(joined(name, "weight.levels"), smallest(levels), name))
    for key in ("scale", "offset", "negative_scale"):
        factor = getattr(codes, key)
        if factor is not None:
            entries.append(entry(joined(name, f"weight.{key}"), factor, name))
    if strict:
        kept = codes._replace(values=smallest(values), zero=0)
        if not torch.equal(layer.from_filters(weight_of(kept, stored)), layer.quantized_weight()):
            raise ValueError(f"{name_of(layer, name)}: the codes of its {quantizer} must give its quantized weight")
    return stored, entries


def _codes(name: str, layer: QuantizedLayer, strict: bool) -> Codes | None:
    """The codes of the weight; None if it has none, or they need more than 16 bits."""
    quantizer = layer.weight_quantizer
    try:
        codes = layer.weight_codes()
    except TypeError:
        if quantizer.is_final:
            return None
        codes = NO_CODES  # INQ, until its last weight is frozen
    if quantizer.bits > math.log2(LARGEST_RADIX):
        return None
    if layer.weight.is_meta:
        return codes._replace(values=NO_CODES.values)
    if strict:
        factors = (codes.values, codes.scale, codes.offset, codes.negative_scale)
        if not all(factor.isfinite().all() for factor in factors if factor is not None):
            raise ValueError(f"{name_of(layer, name)}: its weight has NaN or inf")
        if not codes.scale.is_floating_point():
            kind = codes.scale.dtype
            raise ValueError(f"{name_of(layer, name)}: the scale of its codes must be floating, not {kind}")
    return codes


def _levels(values: Tensor) -> Tensor:
    """Return the distinct values, sorted."""
    if values.is_floating_point() or not values.numel():
        return values.unique()
    first, last = (int(each) for each in values.aminmax())
    if last - first > LARGEST_RADIX:  # powers of two
        return values.unique()
    return torch.bincount((values - first).flatten()).nonzero().flatten() + first  # sorting takes many times as long


def _progression(levels: Tensor) -> tuple[int, int, int]:
    """Return first element, step and length of the shortest arithmetic progression that contains the sorted levels.

    The step is 0 if they are not whole numbers, or so large that they are powers of two.
    """
    if levels.is_floating_point():
        return 0, 0, len(levels)
    if len(levels) < 2:
        return (int(levels[0]) if len(levels) else 0), 1, len(levels)
    numbers = levels.tolist()
    step = math.gcd(*(after - before for before, after in pairwise(numbers)))
    if max(step, abs(numbers[0])) > header.LARGEST_CODE:
        return 0, 0, len(levels)
    return numbers[0], step, (numbers[-1] - numbers[0]) // step + 1


def weight_names(name: str, stored: header.Weight) -> list[str]:
    """The names of the tensors that may replace the weight."""
    keys = ("codes", "scale", "offset", "negative_scale", *(() if stored.step else ("levels",)))
    return [joined(name, f"weight.{key}") for key in keys]


def decode(name: str, stored: header.Weight, tensors: Mapping[str, Tensor]) -> Codes:
    """Return the codes of a weight.

    Raises:
        ValueError: tensors that are missing or do not fit the header, or a weight that is not finite.
    """
    count = math.prod(stored.shape)
    prefix = joined(name, "weight.")

    def tensor(key: str) -> Tensor:
        if prefix + key not in tensors:
            raise ValueError(f"tensor '{prefix}{key}' is missing")
        return tensors[prefix + key]

    def factors(key: str) -> Tensor:
        factor = tensor(key)
        fits = factor.is_floating_point() and factor.ndim <= len(stored.shape)
        ones = (1,) * (len(stored.shape) - factor.ndim)
        if not fits or any(a not in (1, b) for a, b in zip(ones + factor.shape, stored.shape, strict=True)):
            raise ValueError(f"'{prefix}{key}' ({factor.dtype}, {list(factor.shape)}) must fit weights {stored.shape}")
        return factor

    data = tensor("codes")  # its message need not repeat the name
    try:
        numbers = unpack(data, count, stored.radix)
    except ValueError as error:
        raise ValueError(f"'{prefix}codes': {error}") from error
    if stored.step:
        values = smallest(numbers.long().mul_(stored.step).add_(stored.first))
    else:
        levels = tensor("levels")
        if levels.dtype in (torch.bool, torch.uint8) or levels.ndim != 1 or not 0 < len(levels) <= stored.radix:
            raise ValueError(f"'{prefix}levels' must be 1 to {stored.radix} numbers")
        if count and int(numbers.max()) >= len(levels):
            raise ValueError(f"'{prefix}codes' must be below the number of levels (={len(levels)})")
        values = levels[numbers.int()]
    others = (factors(key) if prefix + key in tensors else None for key in ("offset", "negative_scale"))
    codes = Codes(values.view(stored.shape), factors("scale"), 0, *others)
    if not weight_of(codes, stored).isfinite().all():
        raise ValueError(f"layer '{name}': its weight must be finite")
    return codes


def weight_of(codes: Codes, stored: header.Weight) -> Tensor:
    """The quantized weight, output channels first."""
    return codes.dequantize().to(getattr(torch, stored.dtype))
