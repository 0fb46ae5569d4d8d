"""The blocks of a model that is quantized after training: what they are, and what they get and give."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..layers import QuantizedLayer
from ..layers.naming import name_of
from ..layers.trial import trial


def layers_of(module: nn.Module) -> list[QuantizedLayer]:
    """The quantized layers of a block."""
    return [each for each in module.modules() if isinstance(each, QuantizedLayer)]


def blocks_below(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the blocks of a model by their names: see `reconstruct`."""
    if isinstance(module, QuantizedLayer):  # the model itself
        yield prefix, module
        return
    for name, child in module.named_children():
        whole = f"{prefix}.{name}" if prefix else name
        if isinstance(child, nn.Sequential | nn.ModuleList | nn.ModuleDict):
            yield from blocks_below(child, whole)
        elif layers_of(child):
            yield whole, child


def called_blocks(model: nn.Module, blocks: Mapping[str, nn.Module], sample: Tensor) -> dict[str, nn.Module]:
    """Return those of the blocks that ``model`` calls, in the order of their calls."""
    called: list[str] = []

    def note(name: str):
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            if len(args) != 1 or kwargs or not isinstance(args[0], Tensor) or not isinstance(output, Tensor):
                kind = type(module).__name__
                raise TypeError(f"{name} ({kind}) must take one tensor, by position, and return one, to be a block")
            if name in called:
                raise TypeError(f"{name} ({type(module).__name__}) is called twice: its calls have inputs of their own")
            called.append(name)

        return hook

    handles = [block.register_forward_hook(note(name), with_kwargs=True) for name, block in blocks.items()]
    try:
        with trial(model):
            model(sample)
    finally:
        for handle in handles:
            handle.remove()
    first: dict[nn.Module, str] = {}  # one block may have two names
    return {first.setdefault(blocks[name], name): blocks[name] for name in called}


def check_called(float_model: nn.Module, blocks: Iterable[str], sample: Tensor) -> None:
    """Raise unless the float model calls all blocks, so that each has outputs to be kept."""
    called = called_blocks(float_model, {name: float_model.get_submodule(name) for name in blocks}, sample)
    if left_out := [name for name in blocks if name not in called]:
        raise ValueError(f"float_model ({type(float_model).__name__}) must call {left_out[0]}, as model does")


def check_apart(blocks: Mapping[str, nn.Module]) -> None:
    """Raise a TypeError for a layer in two blocks: the second would change what the first has found."""
    owners: dict[QuantizedLayer, str] = {}
    for name, block in blocks.items():
        for layer in layers_of(block):
            if (other := owners.setdefault(layer, name)) != name:
                raise TypeError(f"{other} and {name} share {name_of(layer)}: its rounding can't suit both")


class _EnoughError(Exception):
    """Ends a forward after the block that is looked at."""


def seen_by(model: nn.Module, name: str, pictures: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the inputs and outputs of a block for these images."""
    inputs: list[Tensor] = []
    outputs: list[Tensor] = []

    def before(module: nn.Module, args: tuple[Any, ...]) -> None:
        del module
        inputs.append(args[0].clone())  # the block may write to it

    def behind(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        del module, args
        outputs.append(output)
        raise _EnoughError

    block = model.get_submodule(name)
    handles = block.register_forward_pre_hook(before), block.register_forward_hook(behind)
    try:
        with trial(model):
            for images in pictures:
                try:
                    model(images)
                except _EnoughError:
                    continue
    finally:
        for handle in handles:
            handle.remove()
    return torch.cat(inputs), torch.cat(outputs)


@torch.no_grad()
def feature_dim_of(block: nn.Module, sample: Tensor) -> int:
    """Return the dimension of a block's channels: the last one of what a linear layer returns, as of tokens."""
    last: list[Any] = [None, None]

    def note(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        del args
        last[:] = module, output.shape

    handles = [layer.register_forward_hook(note) for layer in layers_of(block)]
    try:
        output = block(sample.clone())
    finally:
        for handle in handles:
            handle.remove()
    return -1 if isinstance(last[0], nn.Linear) and last[1] == output.shape else 1


def relative_error(output: Tensor, target: Tensor) -> float:
    """``Σ (y_q − y)² / Σ y²``."""
    energy = float(target.double().square().sum())
    return float((output - target).double().square().sum()) / max(energy, 1e-300)
