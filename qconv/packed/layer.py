"""Conversion of a quantized layer to a header and tensors, and back; `weight` handles its weight."""

import inspect
from collections.abc import Iterator, Mapping
from functools import partial
from operator import index
from typing import Any, cast

from torch import Tensor, nn
from torch.nn.utils import parametrize

from .. import layers
from ..convert.decisions import QUANTIZED
from ..convert.replacements import is_one_signed, replace_, replace_calls_
from ..layers import QuantizedLayer
from ..layers.adopt import adopt
from ..layers.bypassed import has_own_forward, run
from ..layers.computed import computed_by
from ..layers.naming import name_of
from ..layers.twins import quantized_layers
from ..quantizers import Identity, Quantizer, Stream, Surrogate
from ..quantizers.base import training_only
from ..quantizers.chosen_sign import FLAG
from ..scheme import Scheme
from . import header
from .calls import build_quantizer, quantizer_call
from .fixed import FixedCodes
from .tensors import joined
from .weight import Entry, describe_weight, entry

CLASSES = tuple(layer.__name__ for layer in QUANTIZED.values())
DEFORMABLE = ("QDeformConv2d", "QDeformConv2dPack")
KNOWN = CLASSES + DEFORMABLE + layers.OF_TIMM


def layer_class(name: str) -> type[QuantizedLayer]:
    """Return the class of `qconv.layers` with this name."""
    if name not in KNOWN:
        raise ValueError(f"type (={name!r}) must be one of {', '.join(KNOWN)}")
    try:
        return getattr(layers, name)  # imports torchvision or timm where the layer is theirs
    except ImportError as error:
        raise ValueError(f"type (={name!r}) needs a package that can't be imported: {error}") from error


def class_name(layer: QuantizedLayer) -> str:
    """Return the name of the class that loads the layer: the quantized form of its float twin."""
    if type(layer).__module__.startswith(f"{layers.__name__}."):
        names = CLASSES + (DEFORMABLE if "Deform" in layer.float_type.__name__ else ())
        names += layers.OF_TIMM if layer.float_type.__module__.startswith("timm.") else ()
        for name in names:
            if getattr(layers, name).float_type is layer.float_type:
                return name
    kind = type(layer).__name__
    if "float_type" in layer.__dict__:  # named by subclasses= of convert
        of, plain = layer.float_type.__name__, type(layer).float_type.__name__
        raise ValueError(
            f"type (={kind}), made of a {of}, must be made of a {plain}: a {of} may compute something else. If it does "
            f"not, set layer.__class__ = {plain} before convert"
        )
    raise ValueError(
        f"type (={kind}) must be one of {', '.join(KNOWN)}: put what its forward adds, such as padding, into a module "
        "before the float layer, and convert that"
    )


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
        strict: whether to raise unless it can be stored now; else only its size as a storable layer is wanted.
    """
    input = layer.input_quantizer.at_work
    if strict:
        check_shippable(name, layer)
    try:
        kind, call = class_name(layer), quantizer_call(input)
    except ValueError as error:
        if strict:
            raise ValueError(f"{name_of(layer, name)}: {error}") from error
        kind, call = type(layer).__name__, {}
    weight, entries = describe_weight(name, layer, strict)
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


def check_shippable(name: str, layer: QuantizedLayer) -> None:
    """Raise unless the layer already computes as it will after training."""
    where = name_of(layer, name)
    if has_own_forward(layer):
        raise ValueError(
            f"{where}: its forward is replaced on the layer itself, which would be lost: call del layer.forward"
        )
    check_quantizers(where, layer.quantizers())
    if computed := _computed(layer):
        raise ValueError(f"{where}: {computed}")
    try:
        class_name(layer)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def check_called(model: nn.Module, input: Tensor) -> None:
    """Raise a ValueError if a forward with ``input`` reads a quantized layer's weight without calling the layer."""
    layers = {layer: name for name, layer in quantized_layers(model).items()}
    for layer in run(model, layers, input).bypassed:
        raise ValueError(
            f"{name_of(layer, layers[cast(QuantizedLayer, layer)])} is quantized, but the model reads its weight and "
            "never calls it: convert the float model with it in skip"
        )


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


BY_DATA = (
    "train it, or call qconv.calibrate(model, batches). If the model does not call the layer in evaluation, such "
    "as a head used only in training, or if all its inputs are equal, such as after a ReLU that returns only 0, "
    "remove the layer or leave it float (skip=)"
)


def check_quantizers(what: str, quantizers: Mapping[str, Quantizer], remedy: str = BY_DATA) -> None:
    """Raise a ValueError unless all quantizers already quantize as at the end of training."""
    for quantizer in quantizers.values():
        if not quantizer.calibrated:
            raise ValueError(f"{what}: {quantizer} waits for data: {remedy}")
        if not quantizer.is_final:
            raise ValueError(f"{what} is not in its last stage yet: train it to the end")


def restore(layer: nn.Module, name: str, described: header.Layer) -> QuantizedLayer:
    """Turn the float layer `layer`, in place, into the described one, with the tensors that it has."""
    kind = layer_class(described.type)
    if type(layer) is not kind.float_type:
        stored, here = kind.float_type.__name__, type(layer).__name__
        raise ValueError(f"layer '{name}' is a {stored} in the file, and a {here} here: pass the float network")
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
    adopt(layer, kind, scheme)
    restored: Any = layer
    shape = list(restored.filters().shape)
    if described.weight is not None and shape != described.weight.shape:
        raise ValueError(
            f"{name_of(layer, name)}: its weight is {described.weight.shape} in the file, and {shape} here"
        )
    return restored


def restore_activation(module: nn.Module, choice: str) -> None:
    """Replace an activation of the float network as `qconv.convert` did before signs."""
    if is_one_signed(module):
        replace_(module, choice)
    else:
        replace_calls_(module, choice)


def _learned(quantizer: Quantizer) -> Iterator[tuple[str, Tensor]]:
    """Return the tensors that an input quantizer computes with: no surrogates, streams, flags, gradients."""
    other = tuple(
        f"{name}." for name, part in quantizer.named_modules() if isinstance(part, Surrogate | Stream) and name
    )
    left_out = {"calibrated", FLAG} | training_only(quantizer)
    for key, tensor in quantizer.state_dict().items():
        if not key.startswith(other) and key not in left_out:
            yield key, tensor
