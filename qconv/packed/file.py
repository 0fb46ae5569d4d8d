"""Packed models: what was trained in the bits that it was trained for, in one safetensors file."""

import copy
import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from ..files import DamagedFileError, atomic_file
from ..layers import QuantizedLayer
from ..quantizers import Codes
from ..quantizers.part import Part
from .calls import build_network
from .header import FORMAT, VERSION, Header
from .layer import QUANTIZERS, WEIGHT_KEYS, Entry, decode, describe, entry, joined, restore

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
COUNTER = "num_batches_tracked"
"""Of batch norm: it counts training batches, and evaluation does not look at it."""


class PackedFileError(DamagedFileError):
    """A packed file that is missing, damaged, of another version, or of another model."""


def save_packed(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    network: Mapping[str, Any] | None = None,
    pictures: Mapping[str, Any] | None = None,
    classes: Sequence[str] | None = None,
) -> None:
    """Write `model` to `path`, each weight in the bits of its scheme: the file is whole or absent.

    One bit takes one, three values five to a byte (1.6 bits), other weights their own number of bits; scales, and all
    that is not quantized, are stored as they are. `load_packed` gives a model with the same outputs, bit for bit. What
    serves training alone is left out: latent weights, surrogates, quantizers of gradients, the count of batches.

    Args:
        model: a converted model, trained and at its final stage.
        path: of the file, by custom ``*.safetensors``.
        network: the call of a function of `qconv.models` that makes the float network, in Hydra's notation:
            ``{"_target_": "qconv.models.resnet20", "num_classes": 10}``. Without it, `load_packed` needs a model.
        pictures: what the network takes, as `header.Pictures`: size, resize, mean, std.
        classes: names of the outputs.

    Raises:
        ValueError: a quantizer that waits for data, or is not at its last stage, or is none of qconv's; NaN.
        OSError: the file can't be written.
    """
    described, entries = describe_model(model)
    described = described.model_copy(update=_checked_extras(network, pictures, classes))
    tensors = {each.name: each.make().detach().cpu().contiguous().clone() for each in entries}
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and tensor.isnan().any():
            raise ValueError(f"'{name}' has NaN: nothing is written")
    described = described.model_copy(update={"sha256": _checksum(described, tensors)})
    data = save(tensors, {"qconv": _to_json(described)})
    try:
        with atomic_file(Path(path)) as file:
            file.write(data)
    except OSError as error:
        raise OSError(f"packed model {path} cannot be written: {error.strerror}") from error


def load_packed(path: str | os.PathLike[str], model: nn.Module | None = None) -> nn.Module:
    """The model of a packed file, in evaluation mode on the CPU, or on the device of `model`.

    No code of the file is run. Checksum, names, shapes, dtypes and ranges are looked at before anything of `model` is
    changed. The layers compute in evaluation what the trained ones did; their weights can't be trained on.

    Args:
        path: what `save_packed` has written.
        model: the float network, which becomes the quantized one in place; None makes the one that the file names.

    Raises:
        PackedFileError: no such file, a damaged one, one of another version or of another model than `model`.
    """
    try:
        found, tensors = _read(Path(path))
        content = _Content(found, tensors)
        with torch.random.fork_rng(devices=[]):
            with torch.device("meta"):  # shapes first, where they take no memory, and on a copy
                network = _network(found) if model is None else _without_values(model)
                content.restore(network)
            content.check(network)
            model = _network(found) if model is None else model
            content.restore(model)
        content.fill(model)
    except (ValueError, TypeError, RuntimeError, OverflowError, RecursionError, MemoryError) as error:
        raise PackedFileError(f"packed model {path}: {error}") from error
    return model.eval()


def read_header(path: str | os.PathLike[str]) -> Header:
    """What a packed file says of itself.

    Raises:
        PackedFileError: no such file, a damaged one, or one of another version.
    """
    try:
        return _read(Path(path))[0]
    except (ValueError, TypeError, RuntimeError, RecursionError) as error:
        raise PackedFileError(f"packed model {path}: {error}") from error


def packed_sizes(model: nn.Module) -> tuple[dict[str, int], int]:
    """Bytes of each module's tensors in the file that `save_packed` writes, by its name, and those of the header.

    What is said of network, pictures and classes is not in it. Of a model that can't be packed yet they are those that
    it will have: of codes that are evenly spaced, with one scale where the weight has none yet.
    """
    described, entries = describe_model(model, strict=False)
    described = described.model_copy(update={"sha256": "0" * 64})
    listed: dict[str, Any] = {"__metadata__": {"qconv": _to_json(described)}}
    sizes: Counter[str] = Counter()
    order = list(DTYPES)
    offset = 0
    for each in sorted(entries, key=lambda each: (order.index(each.dtype), each.name)):
        span = [offset, offset + each.nbytes]
        listed[each.name] = {"dtype": DTYPES[each.dtype], "shape": list(each.shape), "data_offsets": span}
        offset += each.nbytes
        sizes[each.owner] += each.nbytes
    text = json.dumps(listed, separators=(",", ":"), ensure_ascii=False).encode()
    return dict(sizes), 8 + -(-len(text) // 8) * 8  # its length stands before it; it ends at a multiple of 8


def describe_model(model: nn.Module, strict: bool = True) -> tuple[Header, list[Entry]]:
    """The header and the tensors of a model's file; `strict` as in `layer.describe`."""
    names = {
        name: each for name, each in model.named_modules(remove_duplicate=False) if isinstance(each, QuantizedLayer)
    }
    first = {id(layer): name for name, layer in reversed(names.items())}
    layers, entries, shared = {}, [], {}
    for name, layer in names.items():
        if first[id(layer)] == name:
            layers[name], stored = describe(name, layer, strict)
            entries += stored
    own = tuple(joined(name, each) for name in names for each in QUANTIZERS)
    weights = {joined(name, "weight") for name in names}
    known: dict[tuple[Any, ...], str] = {}
    for name, tensor in model.state_dict().items():
        if name in weights or name.startswith(tuple(f"{each}." for each in own)) or name.endswith(COUNTER):
            continue
        place = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() and not tensor.is_meta and place in known:
            shared[name] = known[place]
        else:
            known[place] = name
            entries.append(entry(name, tensor, name.rpartition(".")[0]))
    return Header(layers=layers, shared=shared), entries


def _checked_extras(
    network: Mapping[str, Any] | None, pictures: Mapping[str, Any] | None, classes: Sequence[str] | None
) -> dict[str, Any]:
    if network is not None:
        with torch.device("meta"), torch.random.fork_rng(devices=[]):
            build_network(network)
    given = {"network": network, "pictures": pictures, "classes": None if classes is None else list(classes)}
    try:
        checked = Header.model_validate(given)
    except ValidationError as error:
        raise ValueError(_first_line(error)) from error
    return {name: getattr(checked, name) for name in given}


def _to_json(described: Header) -> str:
    plain = described.model_dump(mode="json", exclude_defaults=True)
    return json.dumps({"format": FORMAT, "version": VERSION, **plain}, separators=(",", ":"), allow_nan=False)


def _checksum(described: Header, tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(_to_json(described.model_copy(update={"sha256": ""})).encode())
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(memoryview(tensor.view(-1).view(torch.uint8).numpy()))  # pyright: ignore[reportArgumentType]
    return digest.hexdigest()


def _read(path: Path) -> tuple[Header, dict[str, Tensor]]:
    if not path.is_file():
        raise ValueError("there is no such file")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # it is no dictionary
    except (SafetensorError, OSError, UnicodeDecodeError, KeyError, AttributeError) as error:
        raise ValueError(f"cut off, damaged, or no safetensors file ({error})") from error
    if "qconv" not in metadata:
        raise ValueError("a safetensors file, but none of qconv: there is no entry 'qconv' in its metadata")
    plain = json.loads(metadata["qconv"], object_pairs_hook=_without_repetition)
    version = plain.get("version") if isinstance(plain, dict) else None
    if isinstance(version, int) and version > VERSION:
        raise ValueError(f"version {version} of the format; this qconv reads version {VERSION}: update it")
    try:
        found = Header.model_validate(plain)
    except ValidationError as error:
        raise ValueError(f"metadata: {_first_line(error)}") from error
    if found.sha256 != _checksum(found, tensors):
        raise ValueError("its checksum does not fit: it is damaged, or was edited")
    return found, tensors


def _without_repetition(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"metadata: '{key}' stands there twice")
        found[key] = value
    return found


def _first_line(error: ValidationError) -> str:
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc']))} (={first['input']!r:.200}): {first['msg']}"


def _network(found: Header) -> nn.Module:
    if found.network is None:
        raise ValueError("it does not say which network it is of: give load_packed(path, model=…) the float one")
    return build_network(found.network)


def _without_values(model: nn.Module) -> nn.Module:
    """A copy on the meta device."""
    memo: dict[int, Any] = {id(each): torch.empty_like(each, device="meta") for each in model.buffers()}
    for each in model.parameters():
        memo[id(each)] = nn.Parameter(torch.empty_like(each, device="meta"), each.requires_grad)
    return copy.deepcopy(model, memo)


def _stored(model: nn.Module) -> dict[str, Tensor]:
    """The parameters and persistent buffers themselves, by all of their names."""
    names = model.state_dict().keys()
    every = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {name: tensor for name, tensor in every if name in names}


class _Content:
    """What was read: the codes of the weights, and the tensors by their names in the model's state dict."""

    def __init__(self, found: Header, tensors: Mapping[str, Tensor]) -> None:
        self.layers = found.layers
        self.codes: dict[str, Codes] = {}
        self.state = dict(tensors)
        for name, described in found.layers.items():
            if described.weight is not None:
                self.codes[name] = decode(name, described.weight, tensors)
                for key in WEIGHT_KEYS:
                    self.state.pop(joined(name, f"weight.{key}"), None)
        for name, source in found.shared.items():
            if name in self.state or source not in self.state:
                raise ValueError(f"shared: '{name}' must be another tensor of the file, not '{source}'")
            self.state[name] = self.state[source]

    def restore(self, model: nn.Module) -> None:
        """Make the float layers of `model` the quantized ones, with what they have for weights."""
        for name, described in self.layers.items():
            try:
                layer = restore(model.get_submodule(name), name, described)
            except AttributeError as error:
                raise ValueError(f"layer '{name}' of the file is not in the network") from error
            stored = described.weight
            if stored is None:
                continue
            shape = list(layer.filters().shape)
            if shape != stored.shape:
                raise ValueError(f"layer '{name}': its weight is {stored.shape} in the file, and {shape} here")
            weight = self.codes[name].dequantize().to(getattr(torch, stored.dtype))
            self.state[joined(name, "weight")] = layer.from_filters(weight)

    def check(self, model: nn.Module) -> None:
        """Raise unless the names, shapes and kinds of the tensors are those of `model`, and their values in range."""
        targets = _stored(model)
        for name, tensor in self.state.items():
            target = targets.get(name)
            if target is None or name.endswith(COUNTER):
                raise ValueError(f"tensor '{name}' of the file is not in the network")
            if target.shape != tensor.shape:
                raise ValueError(f"tensor '{name}' is {list(tensor.shape)} in the file, and {list(target.shape)} here")
            if target.is_floating_point() != tensor.is_floating_point():
                raise ValueError(f"tensor '{name}' is {tensor.dtype} in the file, and {target.dtype} here")
            if tensor.is_floating_point() and tensor.isnan().any():
                raise ValueError(f"tensor '{name}' has NaN")
        parts = {name: part for name, part in model.named_modules(remove_duplicate=False) if isinstance(part, Part)}
        # Codes are not among the tensors, nor are surrogates and random streams within the input's quantizer.
        absent = tuple(f"{name}." for name in parts if not name.endswith("input_quantizer"))
        given = {id(targets[name]) for name in self.state}
        for name, target in targets.items():
            if id(target) not in given and not name.startswith(absent) and not name.endswith(COUNTER):
                raise ValueError(f"tensor '{name}' is missing")
        for name, part in parts.items():
            part.check_state(self.state, f"{name}.")

    def fill(self, model: nn.Module) -> None:
        """Give `model` the tensors."""
        targets = _stored(model)
        for name, tensor in self.state.items():
            targets[name].data = tensor.to(targets[name].device).clone()
        for name in self.layers:
            layer: Any = model.get_submodule(name)
            if name in self.codes:
                layer.weight_quantizer.set_(self.codes[name])
                layer.weight_quantizer.to(layer.weight.device)
            if "calibrated" in layer.input_quantizer.__dict__:
                layer.input_quantizer.calibrated = True
