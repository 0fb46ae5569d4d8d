"""Compiles a network in place: as a whole, or block by block if its layers change during training."""

import os
import shutil
from collections.abc import Iterator
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from ..layers import QuantizedLayer
from ..quantizers import Stages

LISTS = (nn.ModuleList, nn.ModuleDict)
Mode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
"""The modes of `torch.compile`."""


AUTO = "auto"
PAYS = 15_000
"""The images for each compilation from which it pays: of fast_binary one took 20 s, and an image about 1.3 ms less."""


def check_mode(compile: bool | str) -> None:
    """Raise a ValueError unless it is a bool, auto, or a mode of `torch.compile`."""
    if not isinstance(compile, bool) and compile not in (AUTO, *get_args(Mode)):
        modes = ", ".join(get_args(Mode))
        raise ValueError(f"compile (={compile!r}) must be true, false, auto, or a mode of torch.compile: {modes}")


def chosen_mode(compile: Any, model: nn.Module, images: int | None) -> tuple[bool | Mode, str]:
    """Return whether and how to compile, and a note if it was asked for and is not done.

    Auto compiles if there are enough `images` in all epochs for the time that it takes, or their number is not known.
    """
    check_mode(compile)
    times = max(1, sum(len(starts(part)) for part in blocks(model)))
    if compile == AUTO and images is not None and images < PAYS * times:
        return False, f"compile: auto, off, because {images:,} images in all epochs are few for {times} compilations"
    if compile is not False and not has_compiler():
        return False, "compile: off, because there is no C++ compiler: install g++, or name one by CXX"
    return (True if compile == AUTO else compile), ""


def has_compiler() -> bool:
    """Whether torch finds the compiler that it needs: for C++, or Triton's for C on a GPU."""
    if torch.cuda.is_available():
        return any(map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang")))
    from torch._inductor.cpp_builder import get_cpp_compiler  # a second to import

    try:
        return bool(get_cpp_compiler())
    except RuntimeError:
        return False


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
