"""Start from weights that were trained before: a float network's, or those of one with more bits."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..convert import quantizer_prefixes
from .checkpoint_io import CheckpointError, load_checkpoint


def load_weights(model: nn.Module, path: str) -> None:
    """Load the network's weights from `path`: a checkpoint of `train.py`, or a state dict written by `torch.save`.

    Learned tensors of quantizers that are there are loaded with them. Where a layer's are missing, as in a float
    network's file, they start from the loaded weight; those of another quantizer than the layer's are left out.

    Raises:
        CheckpointError: no such file, a damaged one, or one of another network: the first tensor that is missing, left
            over, or of another shape is named.
    """
    found = read_weights(path)
    own = model.state_dict()
    of_quantizers = quantizer_prefixes(model)
    # All of a quantizer's tensors or none: half of them would be the steps of one and the clip of another.
    wanted = {}
    for prefix in of_quantizers:
        theirs = {name: tensor for name, tensor in found.items() if name.startswith(prefix)}
        mine = {name: tensor for name, tensor in own.items() if name.startswith(prefix)}
        if {n: t.shape for n, t in theirs.items()} == {n: t.shape for n, t in mine.items()}:
            wanted |= theirs
    for name, tensor in found.items():
        if ".input_quantizer." in name or ".weight_quantizer." in name or ".grad_quantizer." in name:
            continue
        if name not in own:
            raise CheckpointError(f"init_from {path}: it has '{name}', which this network has not")
        if tensor.shape != own[name].shape:
            sizes = f"{tuple(tensor.shape)} in it, {tuple(own[name].shape)} in this network"
            raise CheckpointError(f"init_from {path}: '{name}' is {sizes}")
        wanted[name] = tensor
    for name in own:
        if name not in wanted and not name.startswith(of_quantizers):
            raise CheckpointError(f"init_from {path}: '{name}' is missing")
    model.load_state_dict(wanted, strict=False)


def read_weights(path: str) -> dict[str, Tensor]:
    """The tensors in the file by their names in the network."""
    if not Path(path).is_file():
        raise CheckpointError(f"init_from {path}: there is no such file")
    try:
        content: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception:  # noqa: BLE001  # the checkpoint's reader says what is wrong with it
        content = load_checkpoint(path)
    state = content["state_dict"] if isinstance(content, dict) and "state_dict" in content else content
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise CheckpointError(f"init_from {path}: neither a checkpoint of train.py nor a state dict")
    return {name.removeprefix("model."): tensor for name, tensor in state.items() if not name.startswith("loss.")}
