"""Learned steps, clips and ranges of input quantizers, set from real inputs."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from .layers import QuantizedLayer
from .quantizers import Identity
from .quantizers.numbers import check_whole
from .quantizers.processes import sum_over_processes


def calibrate(model: nn.Module, batches: Iterable[Any], *, max_samples: int = 512) -> list[str]:
    """Set the learned tensors of all input quantizers that start from data (LSQ's step, a percentile's range).

    The model runs in evaluation mode without gradients, quantized weights on inputs that are not quantized, so that no
    layer is calibrated behind one that is not yet. Then each quantizer takes what its layer has seen. Under
    `torch.distributed` every process calls it with its own batches, as many as it has, and all get the mean over those
    with data. Without this call a layer calibrates itself with its first training batch. Call it before
    ``torch.compile``.

    Args:
        model: is run as it is; its mode, hooks and buffers come back unchanged.
        batches: inputs, or tuples and lists that begin with the input, as a DataLoader gives.
        max_samples: of each layer's inputs, the first so many samples are kept.

    Returns:
        The names of the layers whose quantizers were set; empty if none needs data.

    Raises:
        TypeError: a tensor or a mapping in place of batches.
        ValueError: no batch, or none with a sample; ``max_samples`` no whole number or less than 1; NaN or inf in the
            input of a layer, which is named. In all processes, if in one; no quantizer is set then.
    """
    if isinstance(batches, Tensor | Mapping):
        kind = type(batches).__name__
        raise TypeError(f"batches ({kind}) must be batches one after another, such as [images] or a DataLoader")
    if check_whole("max_samples", max_samples) < 1:
        raise ValueError(f"max_samples (={max_samples}) must be at least 1")
    layers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, QuantizedLayer) and module.input_quantizer.needs_data
    }
    seen: dict[str, list[Tensor]] = {name: [] for name in layers}
    quantizers = {name: layer.input_quantizer for name, layer in layers.items()}
    empty: list[Tensor] = []
    handles = [_record(layer, seen[name], empty, max_samples) for name, layer in layers.items()]
    modes = {module: module.training for module in model.modules()}
    # DDP's own forward waits for all processes, and one may have fewer batches than another.
    forward = model.module if isinstance(model, DistributedDataParallel) else model
    count = 0
    try:
        for layer in layers.values():
            layer.input_quantizer = Identity()
        model.eval()
        with torch.no_grad():
            for batch in batches if layers else ():
                forward(batch[0] if isinstance(batch, tuple | list) else batch)
                count += 1
    finally:
        for handle in handles:
            handle.remove()
        for name, layer in layers.items():
            layer.input_quantizer = quantizers[name]
        for module, training in modes.items():
            module.training = training
    if not layers:
        return []
    device = next(iter(layers.values())).weight.device
    count, empties, *kept = sum_over_processes([count, len(empty), *(len(inputs) for inputs in seen.values())], device)
    if not count:
        raise ValueError("batches must hold at least one batch")
    if empties and not any(kept):
        raise ValueError(f"batches must hold at least one sample: all {count} are empty")
    wrong = sum_over_processes([not _is_finite(inputs) for inputs in seen.values()], device)
    for name, is_wrong in zip(layers, wrong, strict=True):
        if is_wrong:
            raise ValueError(f"the input of layer '{name}' has NaN or inf: nothing can be calibrated with it")
    reached = [name for name, number in zip(layers, kept, strict=True) if number]
    for name in reached:  # by all processes, also those whose own batches did not reach the layer
        layers[name].calibrate_(torch.cat(seen[name]) if seen[name] else layers[name].weight.new_empty(0))
    return reached


def _record(layer: QuantizedLayer, inputs: list[Tensor], empty: list[Tensor], max_samples: int) -> RemovableHandle:
    def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        left = max_samples - sum(len(input) for input in inputs)
        if not len(args[0]):
            empty.append(args[0])
        elif left > 0:
            inputs.append(args[0][:left].clone())

    return layer.register_forward_pre_hook(hook)


def _is_finite(inputs: list[Tensor]) -> bool:
    return all(bool(input.isfinite().all()) for input in inputs)
