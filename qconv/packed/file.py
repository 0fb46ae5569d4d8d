"""Packed models: what was trained in the bits that it was trained for, in one safetensors file."""

import copy
import hashlib
import json
import os
import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from ..files import DamagedFileError, atomic_file
from ..layers import QuantizedLayer
from ..quantizers import Quantizer, Stream, Surrogate
from ..quantizers.part import Part
from .calls import build_network
from .fixed import FixedCodes
from .header import FORMAT, VERSION, Header
from .layer import (
    QUANTIZERS,
    Entry,
    check_quantizers,
    decode,
    describe,
    entry,
    joined,
    restore,
    weight_names,
)

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
    serves training alone is left out: latent weights, surrogates, quantizers of gradients, batch norm's count of
    batches.

    Args:
        model: a converted model, trained and at its final stage.
        path: of the file, by convention ``*.safetensors``.
        network: the call of a function of `qconv.models` that makes the float network, in Hydra's notation:
            ``{"_target_": "qconv.models.resnet20", "num_classes": 10}``. Without it, `load_packed` needs a model.
        pictures: what the network takes, as `header.Pictures`: size, resize, mean, std.
        classes: names of the outputs.

    Raises:
        ValueError: a quantizer that waits for data, is not at its last stage, or is none of qconv's; numbers that are
            not finite; a weight that a float layer shares; a `network` that is another one than the model's.
        TypeError: `model` is no module.
        OSError: the file can't be written.
    """
    model = _inner(model)
    described, entries = describe_model(model)
    described = described.model_copy(update=_checked_extras(network, pictures, classes))
    tensors = {each.name: each.make().detach().cpu().contiguous().clone() for each in entries}
    _check_values(model, tensors)
    if network is not None:
        try:
            content = _Content(described, tensors)
            made = content.of_network()
            _check_modules(model, made)
        except ValueError as error:
            raise ValueError(f"network (={dict(network)}) must be the model's: {error}") from error
    described = described.model_copy(update={"sha256": _checksum(described, tensors)})
    data = save(tensors, {"qconv": _to_json(described)})
    try:
        with atomic_file(Path(path)) as file:
            file.write(data)
    except OSError as error:
        raise OSError(error.errno, f"packed model cannot be written: {error.strerror}", str(path)) from error


def load_packed(path: str | os.PathLike[str], model: nn.Module | None = None) -> nn.Module:
    """The model of a packed file, in evaluation mode on the CPU, or on the device of `model`.

    No code of the file is run. Checksum, names, shapes, dtypes and values are looked at before anything of `model` is
    changed. The layers compute in evaluation what the trained ones did; their weights can't be trained on.

    Args:
        path: what `save_packed` has written.
        model: the float network, which becomes the quantized one in place; None makes the one that the file names.

    Raises:
        PackedFileError: no such file, a damaged one, one of another version or of another model than `model`.
        TypeError: `model` is no module, or can't be copied.
        ValueError: `model` is on the meta device.
    """
    if model is not None:
        model = _inner(model)
        if any(tensor.is_meta for tensor in _stored(model).values()):
            raise ValueError("model is on the meta device: give one with values")
    blank = None if model is None else _without_values(model)
    try:
        content = _Content(*_read(Path(path)))
        if blank is None:
            content.of_network()
            with torch.random.fork_rng(devices=[]):
                model = build_network(content.header.network or {})
        else:
            with torch.device("meta"):
                content.restore(blank)
            content.check(blank)
        assert model is not None
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
    order = {dtype: number for number, dtype in enumerate(DTYPES)}
    offset = 0
    for each in sorted(entries, key=lambda each: (order.get(each.dtype, len(order)), each.name)):
        span = [offset, offset + each.nbytes]
        listed[each.name] = {"dtype": DTYPES.get(each.dtype, "F8"), "shape": list(each.shape), "data_offsets": span}
        offset += each.nbytes
        sizes[each.owner] += each.nbytes
    text = json.dumps(listed, separators=(",", ":"), ensure_ascii=False).encode()
    return dict(sizes), 8 + -(-len(text) // 8) * 8  # its length stands before it; it ends at a multiple of 8


def describe_model(model: nn.Module, strict: bool = True) -> tuple[Header, list[Entry]]:
    """The header and the tensors of a model's file; `strict` as in `layer.describe`."""
    modules = dict(model.named_modules(remove_duplicate=False))
    layers = {name: each for name, each in modules.items() if isinstance(each, QuantizedLayer)}
    first = {id(layer): name for name, layer in reversed(layers.items())}
    described, entries, shared = {}, [], {}
    for name, layer in layers.items():
        if first[id(layer)] == name:
            described[name], stored = describe(name, layer, strict)
            entries += stored
    inside = tuple(joined(name, f"{each}.") for name in layers for each in QUANTIZERS)
    weights = {joined(name, "weight"): layer for name, layer in layers.items()}
    latent = {_place(layer.weight): name for name, layer in weights.items()}
    alone = {
        name: each
        for name, each in modules.items()
        if isinstance(each, Quantizer) and not f"{name}.".startswith(inside)
    }
    if strict:
        check_quantizers("a quantizer outside of a layer", alone)
    left_out = set(weights) | _counters(modules) | {joined(name, "calibrated") for name in alone}
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
                f"'{name}' is the latent weight of the quantized layer '{latent[place]}', too: give it one of its own"
            )
        if place in known:
            shared[name] = known[place]
        else:
            known[place] = name
            entries.append(entry(name, tensor, name.rpartition(".")[0]))
    return Header(layers=described, shared=shared), entries


def _place(tensor: Tensor) -> Any:
    """Equal for tensors that share their values."""
    if tensor.is_meta or not tensor.numel():
        return object()
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _counters(modules: Mapping[str, nn.Module]) -> set[str]:
    """The counts of training batches of batch norms, at which evaluation does not look."""
    return {joined(name, "num_batches_tracked") for name, each in modules.items() if isinstance(each, _NormBase)}


def _inner(model: nn.Module) -> nn.Module:
    """The model itself, without what compiles it or spreads it over devices."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model (={model!r:.200}) must be a torch.nn.Module")
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def _check_values(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Raise a ValueError unless the parameters and the statistics of batch norms are finite, and these variances."""
    modules = dict(model.named_modules(remove_duplicate=False))
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            continue
        owner, _, key = name.rpartition(".")
        is_norm = isinstance(modules.get(owner), _NormBase)
        if tensor.isnan().any() or ((name in parameters or is_norm) and not tensor.isfinite().all()):
            raise ValueError(f"'{name}' has NaN or inf")
        if is_norm and key == "running_var" and (tensor < 0).any():
            raise ValueError(f"'{name}' (={tensor.min().item()}) must not be negative")


def _check_modules(model: nn.Module, made: nn.Module) -> None:
    """Raise a ValueError unless both consist of the same kinds of modules under the same names."""
    kinds = [
        {
            name: (type(each).__mro__, each.extra_repr())
            for name, each in one.named_modules()
            if not isinstance(each, Part)
        }
        for one in (model, made)
    ]
    for name in kinds[0].keys() | kinds[1].keys():
        (here, says), (there, told) = (kind.get(name, ((type(None),), "")) for kind in kinds)
        quantized = QuantizedLayer in here and QuantizedLayer in there
        if not quantized and (here[0] is not there[0] or says != told):
            raise ValueError(f"'{name}' is {here[0].__name__}({says}) in the model, {there[0].__name__}({told}) there")


def _checked_extras(
    network: Mapping[str, Any] | None, pictures: Mapping[str, Any] | None, classes: Sequence[str] | None
) -> dict[str, Any]:
    given = {"network": network, "pictures": pictures, "classes": None if classes is None else list(classes)}
    try:
        plain = json.loads(
            json.dumps({name: None if each is None else _as_plain(each) for name, each in given.items()})
        )
        checked = Header.model_validate(plain)
    except ValidationError as error:
        raise ValueError(_first_line(error)) from error
    except TypeError as error:
        raise ValueError(f"network, pictures and classes must be plain values: {error}") from error
    return {name: getattr(checked, name) for name in given}


def _as_plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _as_plain(each) for name, each in value.items()}
    return [_as_plain(each) for each in value] if isinstance(value, list | tuple) else value


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
    try:
        if not path.is_file():
            raise ValueError("there is no such file")
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # it is no dictionary
        with path.open("rb") as raw:  # safetensors takes the last of two tensors of one name
            (length,) = struct.unpack("<Q", raw.read(8))
            json.loads(raw.read(length), object_pairs_hook=_without_repetition)
    except OSError as error:
        raise ValueError(f"it can't be read: {error.strerror or error}") from error
    except (SafetensorError, UnicodeDecodeError, KeyError, AttributeError) as error:
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


def _without_values(model: nn.Module) -> nn.Module:
    """A copy on the meta device."""
    memo: dict[int, Any] = {id(each): torch.empty_like(each, device="meta") for each in model.buffers()}
    for each in model.parameters():
        memo[id(each)] = nn.Parameter(torch.empty_like(each, device="meta"), each.requires_grad)
    try:
        return copy.deepcopy(model, memo)
    except (TypeError, RuntimeError) as error:
        raise TypeError(f"model ({type(model).__name__}) can't be copied: {error}") from error


def _stored(model: nn.Module) -> dict[str, Tensor]:
    """The parameters and persistent buffers themselves, by all of their names."""
    names = model.state_dict().keys()
    every = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {name: tensor for name, tensor in every if name in names}


class _Content:
    """What was read: the header, and the tensors by their names in the file."""

    def __init__(self, header: Header, tensors: Mapping[str, Tensor]) -> None:
        self.header = header
        self.tensors = tensors
        codes = {
            each
            for name, described in header.layers.items()
            if described.weight is not None
            for each in weight_names(name, described.weight)
        }
        self.state = {name: tensor for name, tensor in tensors.items() if name not in codes}
        for name, source in header.shared.items():
            if name in self.state or source not in self.state:
                raise ValueError(f"shared: '{name}' must be another tensor of the file, not '{source}'")
            self.state[name] = self.state[source]

    def of_network(self) -> nn.Module:
        """The network that the header names, without values, if the file fits it."""
        if self.header.network is None:
            raise ValueError("it does not say which network it is of: give load_packed(path, model=…) the float one")
        with torch.device("meta"), torch.random.fork_rng(devices=[]):
            network = build_network(self.header.network)
            self.restore(network)
        self.check(network)
        return network

    def restore(self, model: nn.Module) -> None:
        """Make the float layers of `model` the quantized ones, with what they have for weights."""
        for name, described in self.header.layers.items():
            try:
                layer = model.get_submodule(name)
            except AttributeError as error:
                raise ValueError(f"layer '{name}' of the file is not in the network") from error
            restore(layer, name, described)

    def check(self, model: nn.Module) -> None:
        """Raise unless names, shapes and dtypes of the tensors are those of `model`, and their values in range."""
        targets, modules = _stored(model), dict(model.named_modules(remove_duplicate=False))
        counters = _counters(modules)
        dtypes = {tensor.dtype for tensor in self.state.values() if tensor.is_floating_point()}
        for name, tensor in self.state.items():
            target = targets.get(name)
            if target is None or name in counters:
                raise ValueError(f"tensor '{name}' of the file is not in the network")
            if target.shape != tensor.shape:
                raise ValueError(f"tensor '{name}' is {list(tensor.shape)} in the file, and {list(target.shape)} here")
            # Another dtype is that of the whole model, which was cast.
            cast = tensor.is_floating_point() and target.is_floating_point() and len(dtypes) == 1
            if target.dtype != tensor.dtype and not cast:
                raise ValueError(f"tensor '{name}' is {tensor.dtype} in the file, and {target.dtype} here")
        _check_values(model, self.state)
        parts = {name: part for name, part in modules.items() if isinstance(part, Part)}
        training = tuple(
            f"{name}." for name, part in parts.items() if isinstance(part, Surrogate | Stream | FixedCodes)
        )
        given = {id(targets[name]) for name in self.state}
        given |= {id(targets[joined(name, "weight")]) for name, each in self.header.layers.items() if each.weight}
        for name, target in targets.items():
            if id(target) not in given and name not in counters and not name.startswith(training):
                raise ValueError(f"tensor '{name}' is missing")
        for name, part in parts.items():
            part.check_state(self.state, joined(name, ""))
        for _ in self._codes():  # which checks them
            pass

    def fill(self, model: nn.Module) -> None:
        """Make `model`, which `check` has found to fit, the one of the file."""
        self.restore(model)
        dtypes = {tensor.dtype for tensor in self.state.values() if tensor.is_floating_point()}
        if len(dtypes) == 1:
            model.to(dtype=dtypes.pop())
        targets = _stored(model)
        with torch.no_grad():
            for name, tensor in self.state.items():
                targets[name].copy_(tensor)
            for name, codes in self._codes():
                layer: Any = model.get_submodule(name)
                layer.weight_quantizer.set_(codes)
                layer.weight_quantizer.to(layer.weight.device)
                layer.weight.copy_(layer.quantized_weight())
        for part in model.modules():
            if isinstance(part, Quantizer) and "calibrated" in part.__dict__:
                part.calibrated = True

    def _codes(self) -> Iterator[tuple[str, Any]]:
        for name, described in self.header.layers.items():
            if described.weight is not None:
                yield name, decode(name, described.weight, self.tensors)
