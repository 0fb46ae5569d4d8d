"""Reading a packed file: everything is checked before a model is changed."""

import copy
import json
import os
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from ..ground.files import DamagedFileError
from ..layers.parents import call_children_
from ..lean import while_not_lean
from ..quantizers import Codes, Quantizer, Stream, Surrogate
from ..quantizers.base import training_only
from ..quantizers.chosen_sign import FLAG
from ..quantizers.part import Part
from .calls import build_network
from .fixed import FixedCodes
from .header import VERSION, Header, Pictures, checksum, first_line
from .layer import restore, restore_activation
from .stored_outputs import check_trial
from .tensors import check_values, counters, inner_model, joined, stored_tensors
from .weight import decode, weight_names


class PackedFileError(DamagedFileError):
    """A packed file that is missing or damaged, or of another version or model."""


def load_packed(path: str | os.PathLike[str], model: nn.Module | None = None) -> nn.Module:
    """Return the model of a packed file, in evaluation mode on the CPU, or on the device of `model`.

    No code in the file is run. Checksum, names, shapes, dtypes and values are checked before `model` is changed. If the
    file has outputs for two inputs (`header.Trial`), the network must reproduce them, up to rounding. (Files of version
    1 have none, so a `model` with ReLU instead of Hardtanh goes unnoticed.) The layers compute the same as the trained
    ones in evaluation; their weights can't be trained any further.

    Args:
        path: a file written by `save_packed`.
        model: the float network, which becomes the quantized one in place; None builds the one named in the file.

    Raises:
        PackedFileError: a missing or damaged file, or one of another version or of another model than `model`.
        TypeError: `model` is not a module, or can't be copied.
        ValueError: `model` is on the meta device.
    """
    if model is None:
        return _load(path, None)[0]
    model = inner_model(model)
    if any(tensor.is_meta for tensor in stored_tensors(model).values()):
        raise ValueError("model is on the meta device: pass one with values")
    return _load(path, model)[0]


def load_for_pictures(
    path: str | os.PathLike[str], model: nn.Module | None = None
) -> tuple[nn.Module, Header, Pictures]:
    """Return the model of a file that describes its input, and the header."""
    model, header = _load(path, model)
    if header.pictures is None:
        raise PackedFileError(
            f"packed model {path}: it does not describe its images: pack it with save_packed(…, pictures=…)"
        )
    return model, header, header.pictures


def read_header(path: str | os.PathLike[str]) -> Header:
    """Return the header of a packed file.

    Raises:
        PackedFileError: a missing or damaged file, or one of another version.
    """
    try:
        return _read(Path(path))[0]
    except (ValueError, TypeError, RuntimeError, RecursionError) as error:
        raise PackedFileError(f"packed model {path}: {error}") from error


def _load(path: str | os.PathLike[str], model: nn.Module | None) -> tuple[nn.Module, Header]:
    path, blank = Path(path), None if model is None else _without_values(model)
    try:
        content = Content(*_read(path))
        if model is None or blank is None:
            content.of_network()
            with torch.random.fork_rng(devices=[]):
                model = build_network(content.header.network or {})
        else:
            with torch.device("meta"):
                content.restore(blank)
            content.check(blank)
            if content.header.trial is not None:  # on a copy: a model that is refused must not change
                trial = copy.deepcopy(model)
                content.fill(trial)
                check_trial(trial, content.header.trial)
                del trial
        content.fill(model)
        if blank is None and content.header.trial is not None:
            check_trial(model, content.header.trial)
    except (ValueError, TypeError, RuntimeError, OverflowError, RecursionError, MemoryError) as error:
        raise PackedFileError(f"packed model {path}: {error}") from error
    return model.eval(), content.header


def _read(path: Path) -> tuple[Header, dict[str, Tensor]]:
    try:
        if not path.is_file():
            raise ValueError("there is no such file")
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # it is not a dictionary
        with path.open("rb") as raw:  # of two tensors with one name safetensors takes the last
            (length,) = struct.unpack("<Q", raw.read(8))
            json.loads(raw.read(length), object_pairs_hook=_without_repetition)
    except OSError as error:
        raise ValueError(f"it can't be read: {error.strerror or error}") from error
    except (SafetensorError, UnicodeDecodeError, KeyError, AttributeError) as error:
        raise ValueError(f"cut off, damaged, or no safetensors file ({error})") from error
    if "qconv" not in metadata:
        raise ValueError("a safetensors file, but not one of qconv: there is no entry 'qconv' in its metadata")
    plain = json.loads(metadata["qconv"], object_pairs_hook=_without_repetition)
    version = plain.get("version") if isinstance(plain, dict) else None
    if isinstance(version, int) and version > VERSION:
        raise ValueError(f"version {version} of the format; this qconv reads version {VERSION}: update it")
    try:
        header = Header.model_validate(plain)
    except ValidationError as error:
        raise ValueError(f"metadata: {first_line(error)}") from error
    if header.sha256 != checksum(header, tensors):
        raise ValueError("its checksum does not match: it is damaged, or was edited")
    return header, tensors


def _without_repetition(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    unique: dict[str, Any] = {}
    for key, value in pairs:
        if key in unique:
            raise ValueError(f"metadata: '{key}' is there twice")
        unique[key] = value
    return unique


def _without_values(model: nn.Module) -> nn.Module:
    """Return a copy on the meta device."""
    memo: dict[int, Any] = {id(buffer): torch.empty_like(buffer, device="meta") for buffer in model.buffers()}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
    try:
        return copy.deepcopy(model, memo)
    except (TypeError, RuntimeError) as error:
        raise TypeError(f"model ({type(model).__name__}) can't be copied: {error}") from error


class Content:
    """The contents of a file: the header, and the tensors by their names in the file."""

    def __init__(self, header: Header, tensors: Mapping[str, Tensor]) -> None:
        self.header = header
        self.tensors = tensors
        self.codes: dict[str, Codes] = {}  # set by `check`
        codes = {
            weight
            for name, described in header.layers.items()
            if described.weight is not None
            for weight in weight_names(name, described.weight)
        }
        self.state = {name: tensor for name, tensor in tensors.items() if name not in codes}
        for name, source in header.shared.items():
            if name in self.state or source not in self.state:
                raise ValueError(f"shared: '{name}' must be another tensor of the file, not '{source}'")
            self.state[name] = self.state[source]

    def of_network(self) -> nn.Module:
        """Build the network named in the header, without values, if the file fits it."""
        if self.header.network is None:
            raise ValueError("it does not name its network: pass the float one, load_packed(path, model=…)")
        with torch.device("meta"), torch.random.fork_rng(devices=[]):
            network = build_network(self.header.network)
            self.restore(network)
        self.check(network)
        return network

    def restore(self, model: nn.Module) -> None:
        """Turn the float layers of `model` into the quantized ones, with their stored weights."""
        with while_not_lean(model):
            for name, described in self.header.layers.items():
                try:
                    layer = model.get_submodule(name)
                except AttributeError as error:
                    raise ValueError(f"layer '{name}' of the file is not in the network") from error
                restore(layer, name, described)
            for name, choice in self.header.activations.items():
                try:
                    restore_activation(model.get_submodule(name), choice)
                except (AttributeError, ValueError) as error:
                    raise ValueError(
                        f"activation '{name}' ({choice}) of the file can't be restored: {error}"
                    ) from error
        call_children_(model)

    def check(self, model: nn.Module) -> None:
        """Raise unless the tensors have the names, shapes and dtypes of `model`, and valid values."""
        targets, modules = stored_tensors(model), dict(model.named_modules(remove_duplicate=False))
        counts = counters(modules)
        dtypes = self._dtypes()
        for name, tensor in self.state.items():
            target = targets.get(name)
            if target is None or name in counts:
                raise ValueError(f"tensor '{name}' of the file is not in the network")
            if target.shape != tensor.shape:
                raise ValueError(f"tensor '{name}' is {list(tensor.shape)} in the file, and {list(target.shape)} here")
            # A different dtype is that of a whole model that was cast.
            cast = tensor.is_floating_point() and target.is_floating_point() and len(dtypes) == 1
            if target.dtype != tensor.dtype and not cast:
                raise ValueError(f"tensor '{name}' is {tensor.dtype} in the file, and {target.dtype} here")
        check_values(model, self.state)
        parts = {name: part for name, part in modules.items() if isinstance(part, Part)}
        training = tuple(
            f"{name}." for name, part in parts.items() if isinstance(part, Surrogate | Stream | FixedCodes)
        )
        flags = {
            joined(name, flag)
            for name, part in parts.items()
            if isinstance(part, Quantizer)
            for flag in ("calibrated", FLAG)
            if flag in part._buffers
        }
        flags |= training_only(model)
        given = {id(targets[name]) for name in self.state}
        given |= {id(targets[joined(name, "weight")]) for name, layer in self.header.layers.items() if layer.weight}
        for name, target in targets.items():
            if id(target) not in given and name not in counts | flags and not name.startswith(training):
                raise ValueError(f"tensor '{name}' is missing")
        self.codes = {
            name: decode(name, described.weight, self.tensors)
            for name, described in self.header.layers.items()
            if described.weight is not None
        }

    def _dtypes(self) -> set[torch.dtype]:
        """Return the dtypes of the file's floats; without floats, the dtypes of the weights behind its codes."""
        weights = (layer.weight for layer in self.header.layers.values())
        of_weights = {getattr(torch, weight.dtype) for weight in weights if weight is not None}
        return {tensor.dtype for tensor in self.state.values() if tensor.is_floating_point()} or of_weights

    def fill(self, model: nn.Module) -> None:
        """Load the file into `model`, after `check` has accepted it."""
        self.restore(model)
        dtypes, targets = self._dtypes(), stored_tensors(model)
        # Not if they agree: what the file does not hold, such as buffers that are not stored, may have another dtype.
        if len(dtypes) == 1 and any(each.is_floating_point() and each.dtype not in dtypes for each in targets.values()):
            model.to(dtype=dtypes.pop())
            targets = stored_tensors(model)
        with torch.no_grad():
            for name, tensor in self.state.items():
                targets[name].copy_(tensor)
            stored = {targets[name] for name in self.state}
            for name, codes in self.codes.items():
                layer: Any = model.get_submodule(name)
                layer.weight_quantizer.set_(codes)
                layer.weight_quantizer.to(layer.weight.device)
                if layer.weight not in stored:  # a layer with real weights may share it
                    layer.weight.copy_(layer.quantized_weight())
        for part in model.modules():
            if isinstance(part, Quantizer) and part.needs_data:
                part.calibrated = True
