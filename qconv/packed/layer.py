"""A quantized layer as a header and tensors, and back."""

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import layers
from ..layers import QuantizedLayer
from ..quantizers import Codes, Identity, Quantizer, Stages, Stream, Surrogate
from ..schemes import Scheme
from . import header
from .bits import pack, packed_length, radix_of, unpack
from .calls import build_quantizer, quantizer_call
from .fixed import INTEGERS, FixedCodes, smallest

CLASSES = ("QConv1d", "QConv2d", "QConv3d", "QConvTranspose1d", "QConvTranspose2d", "QConvTranspose3d", "QLinear")
DEFORMABLE = ("QDeformConv2d", "QDeformConv2dPack")
WEIGHT_KEYS = ("codes", "levels", "scale", "offset", "negative_scale")
QUANTIZERS = ("input_quantizer", "weight_quantizer", "grad_quantizer")


class Entry(NamedTuple):
    """A tensor of the file, whose values are made when they are written; `owner` is the module it belongs to."""

    owner: str
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    make: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        """Of its values."""
        return math.prod(self.shape) * self.dtype.itemsize


def joined(name: str, rest: str) -> str:
    """The name of what is in the module `name`, which is "" for the model itself."""
    return f"{name}.{rest}" if name else rest


def entry(name: str, tensor: Tensor, owner: str) -> Entry:
    """A tensor as it is."""
    return Entry(owner, name, tensor.dtype, tuple(tensor.shape), lambda: tensor.detach())


def layer_class(name: str) -> type[QuantizedLayer]:
    """The class of `qconv.layers`.

    Raises:
        ValueError: there is none of this name.
    """
    if name not in (*CLASSES, *DEFORMABLE):
        raise ValueError(f"type (={name!r}) must be one of {', '.join((*CLASSES, *DEFORMABLE))}")
    return getattr(layers, name)  # of the deformable ones it imports torchvision


def class_name(layer: QuantizedLayer) -> str:
    """The name of the class that its float twin belongs to; a subclass with arguments of its own is left behind."""
    names = CLASSES + (DEFORMABLE if "Deform" in layer.float_type.__name__ else ())
    return next(name for name in names if getattr(layers, name).float_type is layer.float_type)


def geometry(layer: nn.Module, float_type: type[nn.Module]) -> dict[str, Any]:
    """The arguments of the constructor of `float_type` that made `layer`, but for defaults, as plain data."""
    found = {}
    for name, parameter in list(inspect.signature(float_type.__init__).parameters.items())[1:]:
        if name in ("device", "dtype"):
            continue
        value = getattr(layer, name) is not None if name == "bias" else getattr(layer, name)
        default = parameter.default
        if isinstance(value, tuple):
            value = list(value)
            default = [default] * len(value) if isinstance(default, int) else default
        if value != default:
            found[name] = value
    return found


def describe(name: str, layer: QuantizedLayer, strict: bool = True) -> tuple[header.Layer, list[Entry]]:
    """The layer's header, and its tensors but for those that are stored as they are.

    Args:
        name: of the layer in the model.
        layer: what is stored.
        strict: raise unless it can be stored as it is now; else its size is that of a layer that can.

    Raises:
        ValueError: a quantizer that still waits for data, that is not final, or that is none of qconv's.
    """
    input = current(layer.input_quantizer)
    if strict and not input.calibrated:
        raise ValueError(f"layer '{name}': {input} waits for data: train it, or call qconv.calibrate(model, batches)")
    if strict and not all(quantizer.is_final for quantizer in layer.quantizers().values()):
        raise ValueError(f"layer '{name}' ({layer.scheme.name}) is not in its last stage yet: train it to the end")
    weight, entries = _describe_weight(name, layer, strict)
    entries += [entry(joined(name, f"input_quantizer.{key}"), tensor, name) for key, tensor in _learned(input)]
    try:
        call = quantizer_call(input)
    except ValueError as error:
        if strict:
            raise ValueError(f"layer '{name}': {error}") from error
        call = {}
    described = header.Layer(
        type=class_name(layer),
        arguments=geometry(layer, layer.float_type),
        scheme=layer.scheme.name,
        input=call,
        weight=weight,
        padding_value=getattr(layer, "padding_value", 0),
        scale_map=layer.scheme.scale_map,
    )
    return described, entries


def restore(layer: nn.Module, name: str, described: header.Layer) -> QuantizedLayer:
    """Make the float layer `layer`, in place, the one that was described; its tensors are still those it had.

    Raises:
        ValueError: it is another layer than the one that was stored.
    """
    kind = layer_class(described.type)
    if type(layer) is not kind.float_type:
        stored, here = kind.float_type.__name__, type(layer).__name__
        raise ValueError(f"layer '{name}' is a {stored} in the file, and a {here} here: give the float network")
    found = geometry(layer, kind.float_type)
    for key in found.keys() | described.arguments.keys():
        if found.get(key) != described.arguments.get(key):
            raise ValueError(
                f"layer '{name}': {key} is {described.arguments.get(key)} in the file, and {found.get(key)} here"
            )
    weight = Identity if described.weight is None else partial(FixedCodes, described.weight.bits)
    scheme = Scheme(
        name=described.scheme,
        input=partial(build_quantizer, described.input),
        weight=weight,
        padding_value=described.padding_value if hasattr(layer, "padding_mode") else 0,
        scale_map=described.scale_map,
    )
    kind.adopt(layer, scheme)
    restored: Any = layer
    return restored


def decode(name: str, stored: header.Weight, tensors: Mapping[str, Tensor]) -> Codes:
    """The codes of a weight.

    Raises:
        ValueError: tensors that are missing or do not fit the header.
    """
    count = math.prod(stored.shape)
    prefix = joined(name, "weight.")

    def tensor(key: str) -> Tensor:
        if prefix + key not in tensors:
            raise ValueError(f"tensor '{prefix}{key}' is missing")
        return tensors[prefix + key]

    def factors(key: str) -> Tensor:
        found = tensor(key)
        fits = found.is_floating_point() and found.ndim <= len(stored.shape)
        ones = (1,) * (len(stored.shape) - found.ndim)
        if not fits or any(a not in (1, b) for a, b in zip(ones + found.shape, stored.shape, strict=True)):
            raise ValueError(f"'{prefix}{key}' ({found.dtype}, {list(found.shape)}) must fit weights {stored.shape}")
        if not found.isfinite().all():
            raise ValueError(f"'{prefix}{key}' must be finite")
        return found

    try:
        numbers = unpack(tensor("codes"), count, stored.radix)
    except ValueError as error:
        raise ValueError(f"'{prefix}codes': {error}") from error
    if stored.step:
        values = numbers.long() * stored.step + stored.first
    else:
        levels = tensor("levels")
        if levels.dtype not in INTEGERS or levels.ndim != 1 or not 0 < len(levels) <= stored.radix:
            raise ValueError(f"'{prefix}levels' must be 1 to {stored.radix} whole numbers")
        if count and int(numbers.max()) >= len(levels):
            raise ValueError(f"'{prefix}codes' must be below the number of levels (={len(levels)})")
        values = levels.long()[numbers.long()]
    others = [factors(key) if prefix + key in tensors else None for key in ("offset", "negative_scale")]
    return Codes(values.view(stored.shape), factors("scale"), stored.zero, *others)


def current(quantizer: Quantizer) -> Quantizer:
    """The quantizer itself, or that of its stage."""
    return quantizer.current if isinstance(quantizer, Stages) else quantizer


def _learned(quantizer: Quantizer) -> Iterator[tuple[str, Tensor]]:
    """What an input's quantizer computes with: no surrogate, no random stream, and no flag."""
    other = tuple(
        f"{name}." for name, part in quantizer.named_modules() if isinstance(part, Surrogate | Stream) and name
    )
    for key, tensor in quantizer.state_dict().items():
        if not key.startswith(other) and key != "calibrated":
            yield key, tensor


def _describe_weight(name: str, layer: QuantizedLayer, strict: bool) -> tuple[header.Weight | None, list[Entry]]:
    quantizer = layer.weight_quantizer
    shape = tuple(layer.filters().shape)
    dtype: Any = str(layer.weight.dtype).removeprefix("torch.")
    try:
        codes = layer.weight_codes()
    except TypeError as error:  # it keeps real numbers
        if quantizer.bits >= 32 or strict:
            if not current(quantizer).is_final:
                raise ValueError(f"layer '{name}': {error}") from error
            return None, [
                Entry(
                    name, joined(name, "weight"), layer.weight.dtype, tuple(layer.weight.shape), layer.quantized_weight
                )
            ]
        codes = Codes(torch.zeros(0, dtype=torch.int8), torch.ones(()))
    if layer.weight.is_meta:
        codes = codes._replace(values=torch.zeros(0, dtype=torch.int8))
    if strict:
        factors = (codes.values, codes.scale, codes.offset, codes.negative_scale)
        if not all(each.isfinite().all() for each in factors if each is not None):
            raise ValueError(f"layer '{name}': its weight has NaN or inf")
    values = codes.values.nan_to_num().long() if codes.values.is_floating_point() else codes.values.long()
    levels = values.unique()
    first, step, count = _progression(levels)
    radix = radix_of(quantizer.bits, count)
    if radix > 2 ** max(math.ceil(quantizer.bits), 2):  # far apart: the codes that there are, one by one
        step, radix = 0, radix_of(quantizer.bits, len(levels))
    stored = header.Weight(
        shape=list(shape), bits=quantizer.bits, radix=radix, first=first, step=step, zero=codes.zero, dtype=dtype
    )
    numbers = (values - first) // step if step else torch.searchsorted(levels, values.contiguous())
    length = packed_length(layer.weight.numel(), radix)
    entries = [Entry(name, joined(name, "weight.codes"), torch.uint8, (length,), lambda: pack(numbers, radix))]
    if not step:
        entries.append(entry(joined(name, "weight.levels"), smallest(levels), name))
    for key in ("scale", "offset", "negative_scale"):
        factor = getattr(codes, key)
        if factor is not None:
            entries.append(entry(joined(name, f"weight.{key}"), factor, name))
    return stored, entries


def _progression(levels: Tensor) -> tuple[int, int, int]:
    """First element, step and length of the shortest arithmetic progression that has all of the sorted levels."""
    if len(levels) < 2:
        return (int(levels[0]) if len(levels) else 0), 1, len(levels)
    step = math.gcd(*levels.diff().tolist())
    return int(levels[0]), step, int(levels[-1] - levels[0]) // step + 1
