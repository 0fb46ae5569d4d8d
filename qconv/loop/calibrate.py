"""Setting learned steps, clips and ranges of input quantizers from real inputs."""

import inspect
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from ..ground.checks import check_at_least_one, check_module, in_a_line
from ..ground.processes import meet, sum_over_processes
from ..ground.progress import shown
from ..layers import QuantizedLayer
from ..layers.calibration import calibrate_from
from ..layers.computed import stored_weight
from ..layers.naming import name_of
from ..layers.observed_run import trial
from ..layers.placement import on_device_of
from ..layers.twins import quantized_layers
from ..quantizers import Identity
from ..quantizers.observers import Observer, Several, Signs
from .input_signs import is_unsigned, judged, note, tell
from .norms import batch_statistics


def calibrate(model: nn.Module, batches: Iterable[Any], *, max_samples: int = 512) -> list[str]:
    """Set the learned tensors of all input quantizers that start from data (LSQ's step, a percentile's range).

    The model runs without gradients, with quantized weights. Inputs of layers that are being calibrated are not
    quantized, so that no layer sees outputs of an uncalibrated one; inputs that need no data (DoReFa, PACT) are
    quantized. LSQ's steps start where the error is least, also those of weights that were not trained yet.
    Each quantizer observes its layer's inputs batch by batch and keeps a few statistics (`Quantizer.observer`), so
    memory does not grow with the samples. Your own quantizers with only `initialize` get the first samples, at most
    2^22 values.

    If the method allows it, the inputs decide whether a layer's levels are signed (`qconv.quantizers.LSQInput`); a line
    on stderr names the layers with signed levels. Methods without levels below 0 (PACT, SAWB, DoReFa, APoT, N2UQ) clip
    negative inputs; a warning names the layers and the share of these inputs.

    The model runs in evaluation mode. But a batch norm that is in training mode, or whose running statistics are still
    the initial ones, normalizes with the batch itself, as in training: the ranges are those of training, even before
    the first step. A model in evaluation mode (``model.eval()``) with trained statistics is calibrated with these; a
    batch norm that alone is in evaluation mode is frozen, and keeps its own. No running statistics change.

    Under `torch.distributed`, every process calls it with its own batches, any number of them, and all get the mean
    over those with data. Without this call, a layer calibrates itself on its first training batch, in all processes in
    the same step. If only some processes do so, there is an error: at once if the others calibrate something else in
    that step; if they calibrate nothing, after the timeout of the process group, because they could just be slow. The
    timeout is 10 to 30 minutes unless ``init_process_group(timeout=)``, or ``trainer.timeout_s`` of `qconv train`, sets
    less. A layer that sees only equal values, such as a blank image, is not calibrated; a warning says so, and it waits
    for a training batch.

    Args:
        model: run as it is; its mode, hooks and buffers are restored.
        batches: inputs, or tuples and lists that begin with the input, as from a DataLoader; a mapping holds the
            model's keyword arguments. They are read until ``max_samples`` are reached; tensors on the CPU are moved to
            the model's device.
        max_samples: number of samples to use.

    Returns:
        The names of the layers whose quantizers were set; empty if none needs data.

    Raises:
        TypeError: ``model`` is not a module; something else in place of batches, such as a tensor or a mapping, or of a
            batch's input; a model that needs several inputs, which require a mapping of its arguments by name.
        ValueError: no batch, or none with a sample; ``max_samples`` not a whole number or less than 1; NaN or inf in
            the input of a layer, which is named. It is raised in all processes if in one, and no quantizer of inputs is
            set.
    """
    done = calibrate_layers(model, batches, max_samples)
    for layer in quantized_layers(model).values():
        layer.weight_quantizer.settle_()
    return done


def calibrate_layers(
    model: nn.Module, batches: Iterable[Any], max_samples: int, only: Collection[str] | None = None
) -> list[str]:
    """`calibrate`, of the layers with these names alone if ``only`` is given: the others quantize their inputs."""
    check_module(model)
    if isinstance(batches, Tensor | Mapping) or not isinstance(batches, Iterable):
        kind = type(batches).__name__
        raise TypeError(f"batches ({kind}) must be batches one after another, such as [images] or a DataLoader")
    check_at_least_one(max_samples=max_samples)
    quantized = quantized_layers(model)
    for layer in quantized.values():
        layer.follow_weight(searches=True)
    layers = {
        name: layer
        for name, layer in quantized.items()
        if layer.input_quantizer.needs_data and (only is None or name in only)
    }
    counts = {
        name: Signs() for name, layer in quantized.items() if name in layers or is_unsigned(layer.input_quantizer)
    }
    if not counts:
        return []
    meet(", ".join(layers), "qconv.calibrate")
    observers = {name: layer.input_quantizer.observer() for name, layer in layers.items()}
    watched = {
        quantized[name]: Several([signs, *filter(None, [observers.get(name)])]) for name, signs in counts.items()
    }
    some = shown(batches, "calibrating", max_samples, _size)
    count, empty = _watch(model, layers.values(), watched, some, max_samples)
    device = stored_weight(next(iter(quantized.values()))).device
    reached = [not observer.is_empty for observer in observers.values()]
    count, empty, *reached = sum_over_processes([count, empty, *reached], device)
    if not count:
        raise ValueError("batches must hold at least one batch")
    if empty and not any(reached):
        raise ValueError(f"batches must hold at least one sample: all {count} are empty")
    wrong = sum_over_processes([not observer.is_finite for observer in observers.values()], device)
    for name, is_wrong in zip(layers, wrong, strict=True):
        if is_wrong:
            raise ValueError(
                f"the input of {name_of(layers[name], name)} has NaN or inf: it can't be calibrated with it"
            )
    # Called by all processes, even if their own batches did not reach the layer.
    seen = [name for name, number in zip(layers, reached, strict=True) if number]
    done = [name for name in seen if calibrate_from(layers[name], layers[name].input_quantizer, observers[name])]
    if blank := [name for name in seen if name not in done]:
        warnings.warn(
            f"calibrate: {_layers(blank)} could not be calibrated: the inputs have no range, such as equal values "
            "only. Pass other or more batches",
            stacklevel=3,
        )
    if unseen := [name for name in layers if name not in seen and not layers[name].input_quantizer.calibrated]:
        warnings.warn(
            f"calibrate: the model did not call {_layers(unseen)}: nothing was calibrated there", stacklevel=3
        )
    _tell({name: quantized[name] for name in counts}, counts.values(), device)
    return done


def _layers(names: Collection[str]) -> str:
    return ("layer " if len(names) == 1 else "layers ") + ", ".join(f"'{name}'" for name in names)


def _tell(layers: Mapping[str, QuantizedLayer], counts: Iterable[Signs], device: torch.device) -> None:
    """Tell once of the negative inputs that all processes have seen."""
    sums = sum_over_processes([number for signs in counts for number in (signs.negative, signs.total)], device)
    found = {}
    for (name, layer), negative, total in zip(layers.items(), sums[::2], sums[1::2], strict=True):
        if total and (what := judged(layer.input_quantizer, negative / total)) is not None:
            found[name or name_of(layer)] = what
        if total and layer.input_quantizer.calibrated:
            note([layer], "is_calibrated")
    tell(found)


def _watch(
    model: nn.Module,
    layers: Iterable[QuantizedLayer],
    observers: Mapping[QuantizedLayer, Observer],
    batches: Iterable[Any],
    max_samples: int,
) -> tuple[int, int]:
    """Run the batches up to ``max_samples``; return their number and how often a layer saw an empty one.

    ``layers`` leave their inputs unchanged.
    """
    # Their own forward would wait for all processes, and one may have fewer batches, or run copies of the layers.
    forward = model.module if isinstance(model, DistributedDataParallel | DataParallel) else model
    left, count, empty = max_samples, 0, 0
    share = 1, 1  # the part of the current batch that counts

    def watching(observer: Observer) -> Callable[[Tensor], None]:
        def observe(input: Tensor) -> None:
            nonlocal empty
            empty += not input.numel()
            part, whole = share
            observer.observe(input if part == whole else input[: -(-len(input) * part // whole)])

        return observe

    watch = {layer: watching(observer) for layer, observer in observers.items()}
    # As in training, but without gradients, in evaluation mode; the batches may be drawn at random.
    with batch_statistics(model), trial(model, keep_random=False, warns=True), _observed(watch, layers):
        for batch in batches:
            size = max(_size(batch), 1)
            share = min(left, size), size
            _run(forward, on_device_of(forward, batch))
            count += 1
            left -= _size(batch)
            if left <= 0:
                break
    return count, empty


def _run(forward: nn.Module, batch: Any) -> None:
    if isinstance(batch, Mapping):
        forward(**batch)
    else:
        input = batch[0] if isinstance(batch, tuple | list) and batch else batch
        if isinstance(input, int | float | str | None) or (isinstance(input, tuple | list) and not input):
            raise TypeError(
                f"batches: {in_a_line(batch)} must be an input of the model, such as a tensor, or begin with one"
            )
        try:
            inspect.signature(forward.forward, follow_wrapped=False).bind(input)
        except TypeError as error:
            raise TypeError(
                f"model ({type(forward).__name__}) can't be called with the first of a batch alone ({error}): give "
                "batches that are mappings of its arguments by name"
            ) from error
        forward(input)


def _size(batch: Any) -> int:
    """The number of samples in a batch: the length of its first tensor."""
    if isinstance(batch, Mapping):
        return next((len(value) for value in batch.values() if isinstance(value, Tensor) and value.ndim), 1)
    input = batch[0] if isinstance(batch, tuple | list) and batch else batch
    if isinstance(input, Mapping):
        return _size(input)
    return len(input) if (input.ndim if isinstance(input, Tensor) else hasattr(input, "__len__")) else 1


@contextmanager
def _observed(
    observe: Mapping[QuantizedLayer, Callable[[Tensor], None]], unchanged: Iterable[QuantizedLayer]
) -> Iterator[None]:
    """Make layers show their inputs, and some leave them unchanged."""

    def show(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        observe[layer](layer.padded(args[0] if args else kwargs["input"]))

    with ExitStack() as undone:
        for layer in observe:
            undone.enter_context(layer.register_forward_hook(show, with_kwargs=True))
        for layer in unchanged:
            undone.callback(setattr, layer, "input_quantizer", layer.input_quantizer)
            layer.input_quantizer = Identity()
        yield
