"""Compiles a network in place: as a whole, or block by block if its layers change during training."""

from collections.abc import Iterator
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from ..layers import QuantizedLayer
from ..quantizers import Stages

LISTS = (nn.ModuleList, nn.ModuleDict)
Mode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
"""The modes of `torch.compile`."""


def check_mode(compile: bool | str) -> None:
    """Raise a ValueError unless it is a bool or a mode of `torch.compile`."""
    if not isinstance(compile, bool) and compile not in get_args(Mode):
        modes = ", ".join(get_args(Mode))
        raise ValueError(f"compile (={compile!r}) must be true, false, or a mode of torch.compile: {modes}")


def replays(compile: bool | Mode) -> bool:
    """Whether a GPU replays compiled code as CUDA graphs; the next step then overwrites their outputs."""
    return compile in ("reduce-overhead", "max-autotune")


def compile_(model: nn.Module, mode: Mode | None = None) -> None:
    """Run `model` through `torch.compile` from now on; names in its state dict stay the same.

    Compiled code holds for one stage of each layer. With `schemes.layerwise` each layer changes twice, and compiling
    the whole network after each change can take longer than an epoch. A network with stages is therefore compiled block
    by block, see `blocks`: after a change one block is compiled.

    By default Dynamo gives up after it has compiled a function 8 times, and what follows runs without compilation. The
    blocks of a network share one ``forward``, so the limit is raised to the stages of all blocks, in training and in
    evaluation. Layers share one, too, which torch 2.11 compiles separately if the network's class is torch's own.
    """
    parts = blocks(model)
    layers = sum(isinstance(module, QuantizedLayer) for module in model.modules())
    versions = 16 + 4 * (layers + sum(len(starts(part)) for part in parts))
    config: Any = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, versions)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, versions)
    for part in parts:
        part.compile(mode=mode)


def fix_size(images: Tensor) -> None:
    """Mark images so that a compiled network gets code for batches of just their number.

    The batches of an epoch have one size or two, which differ by one image. When the second comes, Dynamo would
    compile code for any size, and use it for all batches from then on. On a CPU it is slower: in norms of few channels
    one thread alone sums over the batch. Networks with stages keep it: each change would be compiled twice.
    """
    torch._dynamo.mark_static(images, 0)


def blocks(model: nn.Module) -> list[nn.Module]:
    """Return the blocks that have layers with stages, or `model` alone if there are not several.

    Blocks are the items of nested `nn.Sequential` and lists. A module that has layers of its own is one block, so that
    what follows a convolution is compiled with it.
    """
    found = list(dict.fromkeys(_blocks(model))) if starts(model) else []
    return found if len(found) > 1 else [model]


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    inner = [child for child in module.children() if starts(child)]
    has_layers = not isinstance(module, LISTS) and any(isinstance(child, QuantizedLayer) for child in inner)
    if isinstance(module, QuantizedLayer) or has_layers:
        yield module
        return
    for child in inner:
        if len(inner) == 1 or isinstance(child, (nn.Sequential, *LISTS)):
            yield from _blocks(child)
        else:
            yield child


def starts(model: nn.Module) -> set[float]:
    """Return the progress at which stages begin, 0 among them; empty if no layer has stages."""
    return {start for module in model.modules() if isinstance(module, Stages) for start in module.starts}
