"""Batches on the device of a model."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only


def on_device_of(model: nn.Module, batch: Any) -> Any:
    """Return a batch with its CPU tensors moved to the model's device.

    A model with parameters on several devices, or without any, gets its batch as it is: only the caller knows
    where the inputs belong.
    """
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) != 1 or devices == {torch.device("cpu")}:
        return batch
    device = devices.pop()
    if isinstance(batch, Mapping):  # of kinds that are no dict, such as those of tokenizers
        batch = dict(batch)

    def moved(tensor: Tensor) -> Tensor:
        return tensor.to(device, non_blocking=tensor.is_pinned()) if tensor.device.type == "cpu" else tensor

    return tree_map_only(Tensor, moved, batch)
