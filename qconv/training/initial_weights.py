"""How the weights of a run start: drawn at random, or trained before, in a float network or one with more bits."""

import copy
import re
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..convert.swap import quantizer_prefixes
from ..ground.checks import check_choice
from ..ground.files import DamagedFileError, load_tensors
from ..layers import QuantizedLayer
from ..layers.loading import translate
from ..layers.sign_note import KEY
from ..models import he_normal_
from ..quantizers.base import training_only
from ..quantizers.chosen_sign import FLAG, ChosenSign
from .checkpoint_io import CheckpointError

PREFIXES = ("model.", "module.", "_orig_mod.")
"""Prefixes that Lightning, DataParallel and `torch.compile` put before all names."""
AVERAGED = ("state_dict_ema", "ema_state_dict", "model_ema", "ema_model", "ema", "averaged_model")
"""Keys under which training programs keep averaged weights, which they evaluate; `load_weights` prefers them."""
AROUND = (*AVERAGED, "state_dict", "model_state_dict", "model", "net")
"""The keys under which training programs keep a state dict."""
COUNT = "n_averaged"
"""The key of the number of averaged models in a state dict of `torch.optim.swa_utils`."""
ROLES = (".input_quantizer.", ".weight_quantizer.", ".grad_quantizer.")
SIGN = re.compile(r"signed=\w+")
"""Part of a quantizer's description that its tensors decide."""
DRAWN: Mapping[str, Callable[[nn.Module], nn.Module]] = {"default": lambda model: model, "he_normal": he_normal_}
"""The function that `weight_init` applies to a new network."""


def draw_weights(model: nn.Module, weight_init: str) -> nn.Module:
    """Draw the weights of a new network as `weight_init`, a key of `DRAWN`, says."""
    check_choice("weight_init", weight_init, *DRAWN)
    return DRAWN[weight_init](model)


def load_weights(model: nn.Module, path: str) -> str:
    """Load the network's weights from `path`, a checkpoint of `qconv train` or a state dict; return a note.

    A state dict is a file of `torch.save` or safetensors, for example from torchvision or timm. Prefixes and
    dictionaries that training programs add around it are removed. If the file also has averaged weights, like timm's,
    these are loaded, and the result says so, as it does if there are weights under an unknown key beside those that it
    loads. If the last layer has another number of outputs in the file, or is
    missing there, it starts as in a new network, and the result says so.

    Learned tensors of quantizers are loaded if the checkpoint has the same quantizer. If it has one of the same class
    with other arguments (other bits), they are loaded, and then tensors that come from data are set again: a weight's
    step from the loaded weight, an input's from the first training batch. So APoT's ranges are kept, but LSQ's steps
    are not. Otherwise, as with a float network's file, they start as in a new network.

    Raises:
        CheckpointError: the file is missing or damaged, or belongs to another network: the message names the first
            tensor that is missing, left over, or of another shape, and the nearest names.
    """
    return "; ".join(filter(None, load(model, path)))


def load(model: nn.Module, path: str) -> tuple[str, str]:
    """`load_weights`; return notes whether the weights are averages, and what the file lacks."""
    weights, kinds, averaged = read_weights(path)
    # The activations before its signs are this network's own choice, as is its scheme.
    weights, own = (
        {name: tensor for name, tensor in state.items() if not name.endswith(f".{KEY}")}
        for state in (without_prefix(weights, model.state_dict()), model.state_dict())
    )
    for name, part in model.named_modules():
        if isinstance(part, QuantizedLayer):
            before = {*weights}
            if wrong := translate(part, weights, f"{name}." if name else ""):
                raise CheckpointError(f"weights file {path}: {wrong[0]}")
            translated = {key.rpartition(".")[0] for key in {*weights} - before}
            kinds = {**kinds, **{key: each for key, each in describe_quantizers(model).items() if key in translated}}
    head, told = new_head(model, weights, own)
    if head:
        weights = {name: tensor for name, tensor in weights.items() if not name.startswith(head)}
    wanted, again = _of_quantizers(model, weights, own, kinds)
    plain = {name: tensor for name, tensor in weights.items() if not any(role in name for role in ROLES)}
    needed = [
        name for name in own if not name.startswith(quantizer_prefixes(model)) and not (head and name.startswith(head))
    ]
    _check_fit(plain, {name: own[name] for name in needed}, path)
    model.load_state_dict(wanted | plain, strict=False)
    for name in again:  # of these, the tensors that come from data are set again
        owner, _, place = name.rpartition(".")
        layer: Any = model.get_submodule(owner)
        quantizer = layer.quantizers()[place]
        filters = layer.filters().detach() if place == "weight_quantizer" else None
        quantizer.go_on_from_(copy.deepcopy(quantizer), filters)
    return averaged, told


def without_prefix(weights: dict[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Remove prefixes that all names of a file have and the network's lack, such as DataParallel's ``module.``."""
    while prefix := next((each for each in PREFIXES if weights and all(name.startswith(each) for name in weights)), ""):
        if any(name.startswith(prefix) for name in own):
            break
        weights = {name.removeprefix(prefix): tensor for name, tensor in weights.items()}
    return weights


def new_head(model: nn.Module, weights: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> tuple[str, str]:
    """Return the prefix of the last layer, and a note, if only this layer differs from the file; else empty texts."""
    layers = [name for name, module in model.named_modules() if isinstance(module, nn.Linear | nn.modules.conv._ConvNd)]
    if not layers or not layers[-1]:
        return "", ""
    head = layers[-1]
    here, there = own[f"{head}.weight"], weights.get(f"{head}.weight")
    if there is None:
        rest = [name for name in weights if name not in own]
        known = any(name in own for name in weights)
        return (f"{head}.", f"it has no last layer '{head}', which is initialized") if known and not rest else ("", "")
    if there.shape == here.shape or there.shape[1:] != here.shape[1:]:
        return "", ""
    return f"{head}.", f"'{head}' has {len(there)} outputs in it and {len(here)} here, and is initialized"


def _of_quantizers(
    model: nn.Module, weights: Mapping[str, Tensor], own: Mapping[str, Tensor], kinds: Mapping[str, str]
) -> tuple[dict[str, Tensor], list[str]]:
    """Return the tensors of quantizers to be loaded, and the names of quantizers that start again from them."""
    left_out = training_only(model)
    kept = {name: own[name] for name in left_out}
    weights, own = ({k: t for k, t in state.items() if k not in left_out} for state in (weights, own))
    wanted: dict[str, Tensor] = {}
    again: list[str] = []
    for name, kind in describe_quantizers(model).items():
        # Load all of a quantizer's tensors or none: a mixture would combine the steps of one with the clip of another.
        theirs, mine = ({k: t for k, t in state.items() if k.startswith(f"{name}.")} for state in (weights, own))
        same_class = kinds.get(name, "").partition("(")[0] == kind.partition("(")[0]
        if not same_class or {k: t.shape for k, t in theirs.items()} != {k: t.shape for k, t in mine.items()}:
            continue
        sign = theirs.get(f"{name}.{FLAG}")
        quantizer = model.get_submodule(name)
        takes_sign = not isinstance(quantizer, ChosenSign) or sign is None or quantizer.takes_sign(sign)
        if not takes_sign or SIGN.sub("", kinds[name]) != SIGN.sub("", kind):
            again.append(name)
            theirs.pop(f"{name}.{FLAG}", None)
        wanted |= theirs | {k: t for k, t in kept.items() if k.startswith(f"{name}.")}
    return wanted, again


def _check_fit(plain: Mapping[str, Tensor], needed: Mapping[str, Tensor], path: str) -> None:
    """Raise a CheckpointError unless the file has all tensors that the network needs, and no others."""
    fit = sum(name in needed and tensor.shape == needed[name].shape for name, tensor in plain.items())
    share = f"({fit} of its {len(plain)} tensors fit)"
    for name, tensor in plain.items():
        if name not in needed:
            raise CheckpointError(
                f"weights file {path}: it has '{name}', which this network has not{_nearest(name, needed)} {share}"
            )
        if tensor.shape != needed[name].shape:
            sizes = f"{tuple(tensor.shape)} in it, {tuple(needed[name].shape)} in this network"
            raise CheckpointError(f"weights file {path}: '{name}' is {sizes} {share}")
    for name in needed:
        if name not in plain and not name.endswith("num_batches_tracked"):  # which older files lack
            raise CheckpointError(f"weights file {path}: '{name}' is missing{_nearest(name, plain)} {share}")


def _nearest(name: str, names: Iterable[str]) -> str:
    close = get_close_matches(name, list(names), n=2)
    return f"; nearest: {' and '.join(map(repr, close))}" if close else ""


def describe_quantizers(model: nn.Module) -> dict[str, str]:
    """Return a description of each quantizer of the network, by name."""
    return {
        f"{name}.{place}" if name else place: repr(quantizer)
        for name, module in model.named_modules()
        if isinstance(module, QuantizedLayer)
        for place, quantizer in module.quantizers().items()
    }


def read_weights(path: str) -> tuple[dict[str, Tensor], dict[str, str], str]:
    """Return the tensors in the file by their names, the descriptions of its quantizers if given, and notes."""
    content = _read(path)
    around = content if isinstance(content, dict) else {}
    key = next((key for key in AROUND if isinstance(around.get(key), dict)), "")
    state = around.get(key, content)
    if not isinstance(state, dict) or not state or not all(isinstance(value, Tensor) for value in state.values()):
        raise CheckpointError(f"weights file {path}: not a checkpoint of qconv train or a state dict")
    told = f"using the averaged weights, {key!r}" if key in AVERAGED else ""
    beside = [name for name, other in around.items() if other is not state and _may_be_weights(other, len(state))]
    if beside and not told:
        told = f"using the weights of {key!r}, not those of {' or '.join(map(repr, beside))}"
    if COUNT in state:
        told = f"the weights are the average of {int(state[COUNT])} models"
    tensors = {name: tensor for name, tensor in state.items() if name != COUNT}
    return tensors, {} if state is content else around.get("quantizers", {}), told


def _may_be_weights(other: Any, count: int) -> bool:
    """Whether what lies beside a state dict in a file may be another one of that network, such as an average."""
    return isinstance(other, dict) and len(other) >= count and all(isinstance(v, Tensor) for v in other.values())


def checkpoint_of_run(path: str) -> dict[str, Any]:
    """Return the checkpoint of a run, with its ``config``; nothing if the file is a state dict."""
    content = _read(path)
    return content if isinstance(content, dict) and isinstance(content.get("config"), dict) else {}


def _read(path: str) -> Any:
    if Path(path).suffix == ".safetensors" and Path(path).is_file():
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            return load_file(path)
        except SafetensorError as error:
            raise CheckpointError(f"weights file {path}: the file is damaged ({error})") from error
    try:
        return load_tensors(path, "weights file")
    except DamagedFileError as error:
        raise CheckpointError(str(error)) from error
