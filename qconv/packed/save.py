"""Writing a packed file, and its size before it is written."""

import json
import os
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors.torch import save
from torch import Tensor, nn

from ..convert.replacements import replaced
from ..ground.files import atomic_file
from ..layers import QuantizedLayer
from ..layers.bypassed import is_own_hook
from ..layers.computed import computed_by, evaluated, parts_of_weight
from ..layers.copies import copied
from ..layers.naming import QUANTIZERS, frozen_part, name_of
from ..quantizers import Quantizer
from .header import Header, checksum, first_line, to_json
from .layer import check_called, check_quantizers, describe
from .load import Content
from .stored_outputs import can_be_tried, find_shape, inputs_of, longest_trial, make_trial, why_not_copied, why_refused
from .tensors import check_values, counters, inner_model, joined
from .weight import Entry, entry

DTYPES = {
    # The names of safetensors, in the order in which it stores them; all others come last.
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def save_packed(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    network: Mapping[str, Any] | None = None,
    pictures: Mapping[str, Any] | None = None,
    classes: Sequence[str] | None = None,
    example: Tensor | None = None,
) -> None:
    """Write `model` to `path`, each weight in the bits of its scheme. The file is either complete or absent.

    A binary weight takes one bit, ternary weights are stored five to a byte (1.6 bits each), and all others take their
    own number of bits. Scales and all tensors that are not quantized are stored unchanged. `load_packed` returns a
    model with the same outputs, bit for bit. Tensors that only training needs are left out: latent weights, surrogates,
    quantizers of gradients, batch norm's count of batches.

    The file records the model's outputs for two inputs, so that `load_packed` refuses another network with the same
    tensors. The inputs have the shape of `pictures` or `example`, or a usual one that the model accepts. If it accepts
    none, or can't be copied, a warning says that there is no test. There is also none for a model with several inputs,
    in a dtype other than float32, or with outputs that move by a quarter through rounding (an untrained one).

    A forward that also reads ``layer.weight`` gets the quantized weight after loading, and the latent one before; read
    ``layer.quantized_weight()`` instead.

    Args:
        model: a converted model, trained and at its final stage.
        path: the file, by convention ``*.safetensors``.
        network: the call of a function of `qconv.models` that builds the float network, in Hydra's notation:
            ``{"_target_": "qconv.models.resnet20", "num_classes": 10}``. Without it, `load_packed` needs a model.
        pictures: the input of the network, as `header.Pictures`: size, resize, mean, std, pixel_range.
        classes: names of the outputs.
        example: a batch of inputs, used only for its shape; unnecessary with `pictures`, or if inputs of a usual shape
            suit: 32, 64, 224, 28, 16 or 8 pixels a side, 64 or 1024 in a row.

    Raises:
        ValueError: a quantizer that waits for data, is not at its last stage, or is not one of qconv's; numbers that
            are not finite; a weight that a float layer shares; a `network` that differs from the model's.
        TypeError: `model` is not a module, or is a frozen one; `example` is no tensor; `classes` is a string.
        OSError: the file can't be written.
    """
    model = inner_model(model)
    if example is not None and not isinstance(example, Tensor):
        raise TypeError(f"example ({type(example).__name__}) must be a tensor, a batch of inputs")
    if isinstance(classes, str):
        raise TypeError(f"classes (={classes!r}) must be a list of names")
    if (frozen := frozen_part(model)) is not None:
        raise TypeError(
            f"model: {frozen} is frozen: pack the trained model that it was made from; qconv.freeze accepts a "
            "loaded model"
        )
    _warn_of_hooks(model)
    described, entries = describe_model(model)
    described = described.model_copy(update=_checked_extras(network, pictures, classes))
    tensors = {stored.name: stored.make().detach().cpu().contiguous().clone() for stored in entries}
    check_values(model, tensors)
    if network is not None:
        try:
            Content(described, tensors).of_network()
        except ValueError as error:
            raise ValueError(f"network (={dict(network)}) must be the model's: {error}") from error
    shape = _shape_of_input(model, described, example)
    if shape and can_be_tried(model):
        check_called(copied(model).to("cpu"), inputs_of(shape)[:1])
    described = described.model_copy(update={"trial": make_trial(model, shape) if shape else None})
    described = described.model_copy(update={"sha256": checksum(described, tensors)})
    data = save(tensors, {"qconv": to_json(described)})
    try:
        with atomic_file(Path(path)) as file:
            file.write(data)
    except OSError as error:
        raise OSError(error.errno, f"packed model cannot be written: {error.strerror}", str(path)) from error


def _shape_of_input(model: nn.Module, described: Header, example: Tensor | None) -> tuple[int, ...] | None:
    """Return the shape without the batch; warn if none is known."""
    given = None if example is None else tuple(example.shape[1:])
    if given is None and described.pictures is not None:
        given = tuple(described.pictures.size)
    if given is None and not can_be_tried(model):
        return None
    uncopied = why_not_copied(model)
    if given is not None and not uncopied and can_be_tried(model) and (why := why_refused(model, given)):
        what = "the size of images" if example is None else "the shape of example without its first dimension"
        raise ValueError(f"{what} (={given}) must be one that the model takes: {why}")
    shape = None if uncopied else find_shape(model) if given is None else given
    if shape is None:
        why = (
            f"a model that can't be copied ({uncopied}) is not tried"
            if uncopied
            else "no usual input shape suits it. Pass one: save_packed(model, path, example=batch)"
        )
        warnings.warn(
            "the file can't hold a test of the model's outputs, so load_packed will not notice another "
            f"network with the same tensors: {why}",
            stacklevel=3,
        )
    return shape


def _warn_of_hooks(model: nn.Module) -> None:
    for name, module in model.named_modules():
        hooks = *module._forward_hooks.values(), *module._forward_pre_hooks.values()
        if computed_by(module) is None and not all(map(is_own_hook, hooks)):
            warnings.warn(
                f"{name_of(module, name)} has hooks, which the file does not hold: if they change what it computes, "
                "the loaded model computes something else. Remove them, or put what they do into a module",
                stacklevel=3,
            )
            return


def packed_sizes(model: nn.Module, size: tuple[int, ...] | None = None) -> tuple[dict[str, int], int]:
    """Return the bytes of each module's tensors in the file of `save_packed`, by its name, and the bytes of the header.

    The header has no descriptions of network, images and classes, and the longest test of outputs, so that the file is
    at most 8 bytes shorter. For a model that can't be packed yet, the bytes are those after training: codes are evenly
    spaced, with one scale if the weight has none yet.

    Args:
        model: the model.
        size: the shape of an input, without the batch, for the test of outputs if no usual one suits.
    """
    with evaluated(model):
        described, entries = describe_model(model, strict=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what can't be packed yet
        is_tried = can_be_tried(model) and not why_not_copied(model)
        shape = find_shape(model, *([size] if size else [])) if is_tried else None
        trial = longest_trial(model, shape) if shape else None
    described = described.model_copy(update={"sha256": "0" * 64, "trial": trial})
    listed: dict[str, Any] = {"__metadata__": {"qconv": to_json(described)}}
    sizes: Counter[str] = Counter()
    order = {dtype: number for number, dtype in enumerate(DTYPES)}
    offset = 0
    for stored in sorted(entries, key=lambda stored: (order.get(stored.dtype, len(order)), stored.name)):
        span = [offset, offset + stored.nbytes]
        listed[stored.name] = {
            "dtype": DTYPES.get(stored.dtype, "F8"),
            "shape": list(stored.shape),
            "data_offsets": span,
        }
        offset += stored.nbytes
        sizes[stored.owner] += stored.nbytes
    text = json.dumps(listed, separators=(",", ":"), ensure_ascii=False).encode()
    return dict(sizes), 8 + -(-len(text) // 8) * 8  # its length stands before it; it ends at a multiple of 8


def describe_model(model: nn.Module, strict: bool = True) -> tuple[Header, list[Entry]]:
    """Return the header and the tensors of a model's file; `strict` as in `layer.describe`."""
    modules = dict(model.named_modules(remove_duplicate=False))
    layers = {name: module for name, module in modules.items() if isinstance(module, QuantizedLayer)}
    first = {id(layer): name for name, layer in reversed(layers.items())}
    described, entries, shared = {}, [], {}
    for name, layer in layers.items():
        if first[id(layer)] == name:
            described[name], stored = describe(name, layer, strict)
            entries += stored
    inside = tuple(joined(name, f"{role}.") for name in layers for role in QUANTIZERS)
    weights = {joined(name, "weight"): layer for name, layer in layers.items()}
    latent = {_place(layer.weight): name for name, layer in weights.items()}
    quantizers = {name: module for name, module in modules.items() if isinstance(module, Quantizer)}
    alone = {name: quantizer for name, quantizer in quantizers.items() if not f"{name}.".startswith(inside)}
    if strict:
        check_quantizers("a quantizer outside of a layer", alone, "call its initialize(x) with inputs as in use")
    left_out = set(weights) | counters(modules) | {joined(name, "calibrated") for name in alone}
    left_out |= {joined(name, part) for name, layer in layers.items() for part in parts_of_weight(layer)}
    known: dict[Any, str] = {}
    for name, tensor in model.state_dict().items():
        if name in left_out or name.startswith(inside):
            continue
        if not isinstance(tensor, Tensor):
            if strict:
                raise ValueError(f"'{name}' (={type(tensor).__name__}) must be a tensor: other state can't be packed")
            continue
        place = _place(tensor)
        if strict and place in latent:
            raise ValueError(
                f"'{name}' is also the latent weight of the quantized layer '{latent[place]}': give it its own tensor"
            )
        if place in known:
            shared[name] = known[place]
        else:
            known[place] = name
            entries.append(entry(name, tensor, name.rpartition(".")[0]))
    activations: Any = {name: was.choice for name, module in model.named_modules() if (was := replaced(module))}
    return Header(layers=described, activations=activations, shared=shared), entries


def _place(tensor: Tensor) -> Any:
    """A key that is equal for tensors with the same values in memory."""
    if tensor.is_meta or not tensor.numel():
        return object()
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _checked_extras(
    network: Mapping[str, Any] | None, pictures: Mapping[str, Any] | None, classes: Sequence[str] | None
) -> dict[str, Any]:
    given = {"network": network, "pictures": pictures, "classes": None if classes is None else list(classes)}
    try:
        checked = Header.model_validate(json.loads(json.dumps(_as_plain(given))))
    except ValidationError as error:
        raise ValueError(first_line(error)) from error
    except TypeError as error:
        raise ValueError(f"network, images and classes must be plain values: {error}") from error
    return {name: getattr(checked, name) for name in given}


def _as_plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _as_plain(item) for name, item in value.items()}
    return [_as_plain(item) for item in value] if isinstance(value, list | tuple) else value
