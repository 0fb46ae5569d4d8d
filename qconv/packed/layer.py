"""A quantized layer as a header and tensors, and back."""

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import pairwise
from operator import index
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from .. import layers
from ..convert.activations import is_one_signed, replace_, replace_calls_
from ..layers import QuantizedLayer
from ..layers.bypassed import has_own_forward
from ..layers.computed import computed_by
from ..layers.naming import name_of
from ..layers.uncalibrated import warn_partly_calibrated
from ..quantizers import Codes, Identity, Quantizer, Stages, Stream, Surrogate
from ..quantizers.base import training_only
from ..quantizers.behind import KEY
from ..quantizers.chosen_sign import FLAG
from ..scheme import Scheme
from . import header
from .bits import LARGEST_RADIX, pack, packed_length, radix_of, unpack
from .calls import build_quantizer, quantizer_call
from .fixed import FixedCodes, smallest
from .tensors import joined

CLASSES = ("QConv1d", "QConv2d", "QConv3d", "QConvTranspose1d", "QConvTranspose2d", "QConvTranspose3d", "QLinear")
DEFORMABLE = ("QDeformConv2d", "QDeformConv2dPack")
KNOWN = CLASSES + DEFORMABLE + layers.OF_TIMM
QUANTIZERS = ("input_quantizer", "weight_quantizer", "grad_quantizer")
NO_CODES = Codes(torch.zeros(0, dtype=torch.int8, device="cpu"), torch.ones((), device="cpu"))


class Entry(NamedTuple):
    """A tensor of the file, whose values are made when they are written; `owner` is the module it belongs to."""

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


def layer_class(name: str) -> type[QuantizedLayer]:
    """Return the class of `qconv.layers` with this name.

    Raises:
        ValueError: there is none.
    """
    if name not in KNOWN:
        raise ValueError(f"type (={name!r}) must be one of {', '.join(KNOWN)}")
    try:
        return getattr(layers, name)  # imports torchvision or timm where the layer is theirs
    except ImportError as error:
        raise ValueError(f"type (={name!r}) needs a package that can't be imported: {error}") from error


def class_name(layer: QuantizedLayer) -> str:
    """Return the name of the class that loads the layer: the quantized form of its float twin.

    Raises:
        ValueError: its class is not one of qconv's, so its forward may differ.
    """
    if type(layer).__module__.startswith(f"{layers.__name__}."):
        names = CLASSES + (DEFORMABLE if "Deform" in layer.float_type.__name__ else ())
        names += layers.OF_TIMM if layer.float_type.__module__.startswith("timm.") else ()
        for name in names:
            if getattr(layers, name).float_type is layer.float_type:
                return name
    kind = type(layer).__name__
    made_of = f", made of a {layer.float_type.__name__}," if "float_type" in layer.__dict__ else ""
    raise ValueError(f"type (={kind}){made_of} must be one of {', '.join(KNOWN)}")


def geometry(layer: nn.Module, kind: type[QuantizedLayer]) -> dict[str, Any]:
    """Return the constructor arguments that made `layer`, float or of class `kind`, except defaults, as plain data."""
    arguments: dict[str, Any] = {name: getattr(layer, name) for name in kind.own_arguments}
    described = kind.float_type if kind.described_as is None else kind.described_as
    for name, parameter in list(inspect.signature(described.__init__).parameters.items())[1:]:
        if name in ("device", "dtype"):
            continue
        value = getattr(layer, name) is not None if name == "bias" else getattr(layer, name)
        default = parameter.default
        if isinstance(value, tuple):
            default = [default] * len(value) if isinstance(default, int) else default
            value = [index(number) for number in value]
        elif not isinstance(value, bool | str):
            value = index(value)
        if value != default:
            arguments[name] = value
    return arguments


def describe(name: str, layer: QuantizedLayer, strict: bool = True) -> tuple[header.Layer, list[Entry]]:
    """Return the layer's header, and its tensors except those that are stored unchanged.

    Args:
        name: the name of the layer in the model.
        layer: the layer to store.
        strict: whether to raise unless it can be stored now; else its size is that of a layer that can.

    Raises:
        ValueError: a quantizer that still waits for data, is not final, or is not one of qconv's; a layer that is not
            of a class of qconv, whose weight is computed, or that the model never calls; codes that do not reproduce
            its quantized weight.
    """
    input = current(layer.input_quantizer)
    if strict:
        if layer.is_bypassed:
            raise ValueError(
                f"{name_of(layer, name)} is quantized, but the model reads its weight and never calls it: "
                "convert the float model with it in skip"
            )
        if has_own_forward(layer):
            raise ValueError(
                f"{name_of(layer, name)}: its forward is replaced on the layer itself, which would be lost: call "
                "del layer.forward"
            )
        check_quantizers(name_of(layer, name), layer.quantizers())
        warn_partly_calibrated(layer, layer.weight)
        if computed := _computed(layer):
            raise ValueError(f"{name_of(layer, name)}: {computed}")
    try:
        kind, call = class_name(layer), quantizer_call(input)
    except ValueError as error:
        if strict:
            raise ValueError(f"{name_of(layer, name)}: {error}") from error
        kind, call = type(layer).__name__, {}
    weight, entries = _describe_weight(name, layer, strict)
    entries += [entry(joined(name, f"input_quantizer.{key}"), tensor, name) for key, tensor in _learned(input)]
    described = header.Layer(
        type=kind,
        arguments=geometry(layer, type(layer)),
        scheme=layer.scheme.name,
        input=call,
        weight=weight,
        padding_value=getattr(layer, "border_value", 0),
        scale_map=layer.has_scale_map,
    )
    return described, entries


def _computed(layer: QuantizedLayer) -> str:
    """Return the problem if the layer computes its weight or another tensor, or does not own it; else empty."""
    if maker := computed_by(layer):
        return str(maker)
    if parametrize.is_parametrized(layer):
        parametrizations: Any = layer.parametrizations
        key = next(iter(parametrizations))
        remedy = f"call torch.nn.utils.parametrize.remove_parametrizations(layer, '{key}') first"
        return f"its {key} is computed: {remedy}"
    return "" if "weight" in layer._parameters else "its weight is not a parameter of the layer: make it one first"


def check_quantizers(what: str, quantizers: Mapping[str, Quantizer]) -> None:
    """Raise a ValueError unless all of them quantize as they will at the end."""
    for quantizer in quantizers.values():
        if not quantizer.calibrated:
            raise ValueError(f"{what}: {quantizer} waits for data: train it, or call qconv.calibrate(model, batches)")
        if not quantizer.is_final:
            raise ValueError(f"{what} is not in its last stage yet: train it to the end")


def restore(layer: nn.Module, name: str, described: header.Layer) -> QuantizedLayer:
    """Turn the float layer `layer`, in place, into the described one, with the tensors that it has.

    Raises:
        ValueError: the layer differs from the stored one.
    """
    kind = layer_class(described.type)
    if type(layer) is not kind.float_type:
        stored, here = kind.float_type.__name__, type(layer).__name__
        raise ValueError(f"layer '{name}' is a {stored} in the file, and a {here} here: give the float network")
    own = geometry(layer, kind)
    for key in own.keys() | described.arguments.keys():
        if own.get(key) != described.arguments.get(key):
            stored, here = described.arguments.get(key), own.get(key)
            raise ValueError(f"{name_of(layer, name)}: {key} is {stored} in the file, and {here} here")
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
    shape = list(restored.filters().shape)
    if described.weight is not None and shape != described.weight.shape:
        raise ValueError(
            f"{name_of(layer, name)}: its weight is {described.weight.shape} in the file, and {shape} here"
        )
    return restored


def restore_activation(module: nn.Module, choice: str) -> None:
    """Replace an activation of the float network as `qconv.convert` did before signs.

    Raises:
        ValueError: it is not an activation, or is replaced already.
    """
    if is_one_signed(module):
        replace_(module, choice)
    else:
        replace_calls_(module, choice)


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


def current(quantizer: Quantizer) -> Quantizer:
    """The quantizer itself, or that of its stage."""
    return quantizer.current if isinstance(quantizer, Stages) else quantizer


def _learned(quantizer: Quantizer) -> Iterator[tuple[str, Tensor]]:
    """The tensors with which an input quantizer computes: no surrogate, random stream, flag, note or gradient's."""
    other = tuple(
        f"{name}." for name, part in quantizer.named_modules() if isinstance(part, Surrogate | Stream) and name
    )
    left_out = {"calibrated", FLAG, KEY} | training_only(quantizer)
    for key, tensor in quantizer.state_dict().items():
        if not key.startswith(other) and key not in left_out:
            yield key, tensor


def _describe_weight(name: str, layer: QuantizedLayer, strict: bool) -> tuple[header.Weight | None, list[Entry]]:
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
    """Return the values that occur, sorted."""
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
