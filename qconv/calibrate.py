"""Learned steps, clips and ranges of input quantizers, set from real inputs."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .layers import QuantizedLayer
from .quantizers import Identity, Quantizer


def calibrate(model: nn.Module, batches: Iterable[Any], *, max_samples: int = 512) -> list[str]:
    """Set the learned tensors of all input quantizers that start from data (LSQ's step, a percentile's range).

    The model runs in evaluation mode without gradients, quantized weights on inputs that are not quantized, so that no
    layer is calibrated behind one that is not yet. Then each quantizer takes what its layer has seen. Under
    `torch.distributed` every process gives its own batches, and all get the mean. Without this call a layer calibrates
    itself with its first training batch. Call it before ``torch.compile``.

    Args:
        model: is run as it is; its mode, hooks and buffers come back unchanged.
        batches: inputs, or tuples and lists that begin with the input, as a DataLoader gives.
        max_samples: of each layer's inputs, the first so many samples are kept.

    Returns:
        The names of the layers whose quantizers were set; empty if none needs data.

    Raises:
        ValueError: no batch, ``max_samples`` less than 1, or NaN or inf in the input of a layer, which is named.
    """
    if max_samples < 1:
        raise ValueError(f"max_samples (={max_samples}) must be at least 1")
    layers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, QuantizedLayer) and _needs_data(module.input_quantizer)
    }
    seen: dict[str, list[Tensor]] = {name: [] for name in layers}
    quantizers = {name: layer.input_quantizer for name, layer in layers.items()}
    handles = [_record(layer, seen[name], max_samples) for name, layer in layers.items()]
    modes = {module: module.training for module in model.modules()}
    count = 0
    try:
        for layer in layers.values():
            layer.input_quantizer = Identity()
        model.eval()
        with torch.no_grad():
            for batch in batches if layers else ():
                model(batch[0] if isinstance(batch, tuple | list) else batch)
                count += 1
    finally:
        for handle in handles:
            handle.remove()
        for name, layer in layers.items():
            layer.input_quantizer = quantizers[name]
        for module, training in modes.items():
            module.training = training
    if layers and not count:
        raise ValueError("batches must hold at least one batch")
    for name, inputs in seen.items():
        _check_finite(name, inputs)
    reached = [name for name, inputs in seen.items() if inputs]
    for name in reached:
        layers[name].calibrate_(torch.cat(seen[name]))
    return reached


def _needs_data(quantizer: Quantizer) -> bool:
    return any("calibrated" in module.__dict__ for module in quantizer.modules())


def _record(layer: QuantizedLayer, inputs: list[Tensor], max_samples: int) -> RemovableHandle:
    def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        left = max_samples - sum(len(input) for input in inputs)
        if left > 0 and len(args[0]):
            inputs.append(args[0][:left].clone())

    return layer.register_forward_pre_hook(hook)


def _check_finite(name: str, inputs: list[Tensor]) -> None:
    if not all(bool(input.isfinite().all()) for input in inputs):
        raise ValueError(f"the input of layer '{name}' has NaN or inf: nothing can be calibrated with it")
