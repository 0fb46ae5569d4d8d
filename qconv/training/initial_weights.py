"""Starting from weights that were trained before: those of a float network, or of one with more bits."""

import copy
from typing import cast

from torch import Tensor, nn

from ..convert.swap import quantizer_prefixes
from ..files import DamagedFileError, load_tensors
from ..layers import QuantizedLayer
from ..quantizers.behind import KEY
from ..quantizers.part import Part
from .checkpoint_io import CheckpointError


def load_weights(model: nn.Module, path: str) -> None:
    """Load the network's weights from `path`: a checkpoint of `train.py`, or a state dict written by `torch.save`.

    Learned tensors of quantizers are loaded if the checkpoint has the same quantizer. If it has one of the same class
    with other arguments (other bits), they are loaded, and then those that come from data are set anew: a weight's step
    from the loaded weight, an input's from the first training batch. So APoT's ranges are kept, but LSQ's steps are
    not. Otherwise, as with a float network's file, they start as in a new network.

    Raises:
        CheckpointError: a missing or damaged file, or one of another network: it names the first tensor that is
            missing, left over, or of another shape.
    """
    weights, kinds = read_weights(path)
    # The activations before its signs are this network's own choice, as is its scheme.
    weights, own = (
        {name: tensor for name, tensor in state.items() if not name.endswith(f".input_quantizer.{KEY}")}
        for state in (weights, model.state_dict())
    )
    own_kinds = describe_quantizers(model)
    of_quantizers = quantizer_prefixes(model)
    for name, part in model.named_modules():
        if isinstance(part, Part):
            part.upgrade_state(weights, f"{name}.")
    wanted: dict[str, Tensor] = {}
    again: list[str] = []
    for name, kind in own_kinds.items():
        # Load all of a quantizer's tensors or none: a mixture would combine the steps of one with the clip of another.
        theirs, mine = ({k: t for k, t in state.items() if k.startswith(f"{name}.")} for state in (weights, own))
        same_class = kinds.get(name, "").partition("(")[0] == kind.partition("(")[0]
        if same_class and {k: t.shape for k, t in theirs.items()} == {k: t.shape for k, t in mine.items()}:
            wanted |= theirs
            if kinds[name] != kind:
                again.append(name)
    for name, tensor in weights.items():
        if ".input_quantizer." in name or ".weight_quantizer." in name or ".grad_quantizer." in name:
            continue
        if name not in own:
            raise CheckpointError(f"weights file {path}: it has '{name}', which this network has not")
        if tensor.shape != own[name].shape:
            sizes = f"{tuple(tensor.shape)} in it, {tuple(own[name].shape)} in this network"
            raise CheckpointError(f"weights file {path}: '{name}' is {sizes}")
        wanted[name] = tensor
    for name in own:
        if name not in wanted and not name.startswith(of_quantizers):
            raise CheckpointError(f"weights file {path}: '{name}' is missing")
    model.load_state_dict(wanted, strict=False)
    for name in again:
        layer, place = name.rpartition(".")[0], name.rpartition(".")[2]
        _start_again(cast(QuantizedLayer, model.get_submodule(layer)), place)


def describe_quantizers(model: nn.Module) -> dict[str, str]:
    """Return a description of each quantizer of the network, by name."""
    return {
        f"{name}.{place}" if name else place: repr(quantizer)
        for name, module in model.named_modules()
        if isinstance(module, QuantizedLayer)
        for place, quantizer in module.quantizers().items()
    }


def _start_again(layer: QuantizedLayer, place: str) -> None:
    """Set the tensors that come from data anew."""
    quantizer = layer.quantizers()[place]
    loaded = copy.deepcopy(quantizer)
    quantizer.go_on_from_(loaded, layer.filters().detach() if place == "weight_quantizer" else None)


def read_weights(path: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors in the file by their names in the network, and the descriptions of its quantizers if given."""
    try:
        content = load_tensors(path, "weights file")
    except DamagedFileError as error:
        raise CheckpointError(str(error)) from error
    state = content["state_dict"] if isinstance(content, dict) and "state_dict" in content else content
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise CheckpointError(f"weights file {path}: neither a checkpoint of train.py nor a state dict")
    kinds = content.get("quantizers", {}) if state is not content else {}
    return {name.removeprefix("model."): tensor for name, tensor in state.items()}, kinds
