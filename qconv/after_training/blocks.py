"""The blocks of a model for quantization after training, with their inputs and outputs."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from ..layers import QuantizedLayer
from ..layers.naming import name_of
from ..layers.observed_run import trial

Calls = Mapping[nn.Module, Sequence[str]]
"""Modules that are called, and for each call why it is not that of a block; empty if it is."""
PROBES = (1, 2)
"""The numbers of samples with which calls are looked at: another dimension may be as long as one, but not as both."""


def layers_of(module: nn.Module) -> list[QuantizedLayer]:
    """The quantized layers of a block."""
    return [each for each in module.modules() if isinstance(each, QuantizedLayer)]


@contextmanager
def frozen_parameters(module: nn.Module) -> Iterator[None]:
    """Context manager: no parameter has or needs a gradient; afterwards they are as before."""
    was = {each: (each.requires_grad, each.grad) for each in module.parameters()}
    for each in was:
        each.requires_grad_(False)
        each.grad = None
    try:
        yield
    finally:
        for each, (required, grad) in was.items():
            each.requires_grad_(required)
            each.grad = grad


def called_blocks(model: nn.Module, images: Tensor) -> dict[str, nn.Module]:
    """Return the blocks that a model calls, in the order of their calls: see `reconstruct`."""
    holders = [module for module in model.modules() if layers_of(module)]
    calls = _calls(model, holders, images)
    names: dict[nn.Module, str] = {}
    for name, module in _blocks_below(model, "", calls):
        names.setdefault(module, name)  # one block may have two names
    blocks = {names[module]: module for module in calls if module in names}
    _check_calls(blocks, calls)
    return blocks


def check_called(float_model: nn.Module, blocks: Iterable[str], images: Tensor) -> None:
    """Raise unless the float model calls all blocks, so that each has target outputs."""
    twins = {name: float_model.get_submodule(name) for name in blocks}
    calls = _calls(float_model, twins.values(), images)
    if left_out := [name for name, twin in twins.items() if twin not in calls]:
        raise ValueError(f"float_model ({type(float_model).__name__}) must call {left_out[0]}, as model does")
    _check_calls(twins, calls)


def _blocks_below(module: nn.Module, prefix: str, calls: Calls) -> Iterator[tuple[str, nn.Module]]:
    """Yield the blocks by their names; other modules are searched for blocks, down to their layers."""
    if isinstance(module, QuantizedLayer):
        if module in calls:
            yield prefix, module
        return
    for name, child in module.named_children():
        whole = f"{prefix}.{name}" if prefix else name
        inner = list(_blocks_below(child, whole, calls))
        if child not in calls or _is_container(child):
            yield from inner
        elif isinstance(child, QuantizedLayer) or (_fits(calls[child]) and not _is_of_blocks(child, inner, calls)):
            yield whole, child
        else:
            yield from inner


def _is_container(module: nn.Module) -> bool:
    """Whether it calls its children one after another, or is not called itself, without its own forward."""
    return type(module).forward in (nn.Sequential.forward, nn.Module.forward)


def _is_of_blocks(module: nn.Module, inner: Sequence[tuple[str, nn.Module]], calls: Calls) -> bool:
    """Whether a module is a stage or a whole network: it holds several blocks of layers, in containers."""
    containers = (each for each in module.modules() if isinstance(each, nn.Sequential | nn.ModuleList | nn.ModuleDict))
    held = {child for container in containers for child in container.children()}
    larger = {block for _, block in inner if len(layers_of(block)) > 1}
    return len(larger & held) > 1 and all(_fits(calls[block]) for _, block in inner)


def _fits(calls: Sequence[str]) -> bool:
    """Whether a module is called once, with the tensors of a block."""
    return len(calls) == len(PROBES) and not any(calls)


def _calls(model: nn.Module, modules: Iterable[nn.Module], images: Tensor) -> Calls:
    """Return the called modules in the order of their calls, with the result of `_why_none` for each call."""
    calls: dict[nn.Module, list[str]] = {}
    count = 0

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        calls.setdefault(module, []).append(_why_none(module, args, kwargs, output, count))

    with ExitStack() as hooks, trial(model):
        for module in dict.fromkeys(modules):
            hooks.enter_context(module.register_forward_hook(note, with_kwargs=True))
        for count in PROBES:  # which `note` reads
            model(torch.cat([images[:1]] * count))
    return calls


def _why_none(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, count: int) -> str:
    """Return why this call, with so many samples, can't be a block's; empty if it can."""
    if len(args) != 1 or kwargs or not isinstance(args[0], Tensor) or not isinstance(output, Tensor):
        return "must take one tensor, by position, and return one, to be a block"
    sizes = tuple(args[0].shape), tuple(output.shape)
    if not isinstance(module, QuantizedLayer) and any(size[:1] != (count,) for size in sizes):  # a layer takes any rows
        return (
            f"must have the samples in dimension 0 of its input and output (batch first), to be a block; for {count} "
            f"{'sample' if count == 1 else 'samples'} they are of shape {sizes[0]} and {sizes[1]}"
        )
    return ""


def _check_calls(blocks: Mapping[str, nn.Module], calls: Mapping[nn.Module, Sequence[str]]) -> None:
    for name, module in blocks.items():
        if not _fits(calls[module]):
            why = next(filter(None, calls[module]), "is called twice, with different inputs")
            raise TypeError(f"{name} ({type(module).__name__}) {why}")


def check_apart(blocks: Mapping[str, nn.Module]) -> None:
    """Raise a TypeError for a layer in two blocks: the second would undo the first one's rounding."""
    owners: dict[QuantizedLayer, str] = {}
    for name, block in blocks.items():
        for layer in layers_of(block):
            if (other := owners.setdefault(layer, name)) != name:
                raise TypeError(f"{other} and {name} share {name_of(layer)}: its rounding can't suit both")


FEW = 8
"""Samples that run at once: of large images, more no longer fit into the caches, and take twice as long each."""


def outputs_for(block: nn.Module, input: Tensor) -> Tensor:
    """Return the outputs of a block in evaluation."""
    with trial(block):
        return torch.cat([block(part.clone()) for part in input.split(FEW)])


class _EnoughError(Exception):
    """Ends a forward after the observed block."""


def seen_by(model: nn.Module, name: str, pictures: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the inputs and outputs of a block for these images.

    Where a linear layer has no samples in dimension 0, as of tokens that come first, each of its rows is a sample.
    """
    inputs: list[Tensor] = []
    outputs: list[Tensor] = []

    def before(module: nn.Module, args: tuple[Any, ...]) -> None:
        del module
        inputs.append(args[0].clone())  # the block, or a hook of its own, may write to it

    def behind(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        del module, args
        outputs.append(output)
        raise _EnoughError

    block = model.get_submodule(name)
    with block.register_forward_pre_hook(before, prepend=True), block.register_forward_hook(behind), trial(model):
        for images in pictures:
            with suppress(_EnoughError):
                model(images)
    if isinstance(block, nn.Linear) and [*map(len, inputs)] != [*map(len, pictures)]:
        inputs, outputs = ([x.flatten(0, -2) for x in each] for each in (inputs, outputs))
    return torch.cat(inputs), torch.cat(outputs)


@torch.no_grad()
def feature_dim_of(block: nn.Module, sample: Tensor) -> int:
    """Return the channel dimension of a block's output; the last one for a linear layer, as with tokens."""
    last: list[Any] = [None, None]

    def note(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        del args
        last[:] = module, output.shape

    with ExitStack() as hooks:
        for layer in layers_of(block):
            hooks.enter_context(layer.register_forward_hook(note))
        output = block(sample.clone())
    return -1 if isinstance(last[0], nn.Linear) and last[1] == output.shape else 1


def relative_error(output: Tensor, target: Tensor) -> float:
    """``Σ (y_q − y)² / Σ y²``."""
    energy = float(target.double().square().sum())
    return float((output - target).double().square().sum()) / max(energy, 1e-300)
