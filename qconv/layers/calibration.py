"""Setting the learned tensors of a layer's input quantizer from data, equal in all processes."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from ..ground.processes import is_distributed, is_sharded, mean_over_processes, meet, sum_over_processes
from ..quantizers import Quantizer
from ..quantizers.chosen_sign import ChosenSign
from ..quantizers.observers import Observer
from .computed import stored_weight
from .naming import name_of


@torch.no_grad()
def calibrate(layer: nn.Module, quantizer: Quantizer, input: Tensor, settles: bool) -> None:
    """`QuantizedLayer.calibrate_`; unless it ``settles``, the quantizer is fresh until the first backward.

    Several processes always settle: a backward in one alone would have the others wait for it.
    """
    if input.is_meta:
        return
    if why := lost(layer, quantizer.parameters()):
        if quantizer.calibrated:
            return
        raise RuntimeError(why)
    if is_distributed():
        meet(_place(layer), name_of(layer))
    seen = Observer()
    seen.observe(input)
    (wrong,) = sum_over_processes([not seen.is_finite], stored_weight(layer).device)
    if wrong:
        raise ValueError(f"the input of {name_of(layer)} has NaN or inf: it can't be calibrated with it")
    initialize = None if seen.is_blank else partial(quantizer.initialize, input.detach())
    _set(layer, quantizer, initialize, settles or is_distributed())


def lost(layer: nn.Module, tensors: Iterable[Tensor]) -> str:
    """Return why the layer's ``tensors`` would lose what this forward writes to them; empty if they keep it."""
    if layer.__dict__.get("_is_replica"):
        return (
            f"{name_of(layer)} is a replica of DataParallel, which is discarded after the forward: call "
            "qconv.calibrate(model, batches) before training, or use DistributedDataParallel"
        )
    if not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None:  # pyright: ignore
        return (
            f"{name_of(layer)} runs inside a transform of torch.func, which can't change its state: call "
            "qconv.calibrate(model, batches) first"
        )
    if any(type(tensor) is Tensor for tensor in tensors):
        return (
            f"{name_of(layer)} runs with other tensors in place of its parameters (as by "
            "torch.func.functional_call), which are discarded, so its range can't be set from this batch: call "
            "qconv.calibrate(model, batches) first"
        )
    return ""


@torch.no_grad()
def calibrate_from(layer: nn.Module, quantizer: Quantizer, observer: Observer) -> bool:
    """Calibrate as `QuantizedLayer.calibrate_`, from the finite values in an observer of the input's quantizer.

    Returns:
        Whether the quantizer was set, in all processes.
    """
    initialize = partial(quantizer.initialize_from, observer)
    return _set(layer, quantizer, None if observer.is_blank else initialize, settles=True)


def _place(layer: nn.Module) -> str:
    """Return a name that distinguishes a layer from the others of its model, equal in all processes."""
    name, stored = layer.__dict__.get("name_in_model"), stored_weight(layer)
    weight = stored.detach().flatten()
    if name is None:  # weights are equal in all processes, but rarely in two layers
        some = [weight[index].item() for index in (0, weight.numel() // 2, -1)] if weight.numel() else []
        name = str(some)
    return f"{type(layer).__name__} {tuple(stored.shape)} {name}"


def _set(layer: nn.Module, quantizer: Quantizer, initialize: Callable[[], None] | None, settles: bool) -> bool:
    """Initialize the quantizer if this process has data, and average over the processes that have."""
    if next(quantizer.parameters(), None) is not None and is_sharded(quantizer):
        raise ValueError(
            f"{name_of(layer)} can't take its range from a batch once fully_shard holds "
            "it: call qconv.calibrate(model, batches) before fully_shard; no later stage may need a range of its inputs"
        )
    parts = [cast(Quantizer, part) for part in quantizer.modules() if "calibrated" in part._buffers]
    before, stored = [part.calibrated for part in parts], stored_weight(layer)
    if initialize is not None:
        for part in parts:
            part.calibrated = False
        initialize()
        quantizer.to(stored.device, stored.dtype)
    own = [initialize is not None and part.calibrated for part in parts]
    votes = [part.vote() if mine and isinstance(part, ChosenSign) else 0 for part, mine in zip(parts, own, strict=True)]
    sums = sum_over_processes([*map(int, own), *votes], stored.device)
    counts = sums[: len(parts)]
    for part, was, mine, count, vote in zip(parts, before, own, counts, sums[len(parts) :], strict=True):
        part.calibrated = was or count > 0
        if count and not settles:
            part.start_()
        if count:
            if isinstance(part, ChosenSign):
                part.decide(vote)
            mean_over_processes(part.tensors(), mine, count)
    return any(counts)
