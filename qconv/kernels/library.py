"""The namespace of qconv's operators, `torch.ops.qconv`."""

from collections.abc import Callable
from typing import Any

import torch

from .gpu import by_triton

LIBRARY = torch.library.Library("qconv", "DEF")
Scaled = tuple[torch.Tensor, torch.Tensor] | None
"""The scale and the bias of each output channel, float32, for the sums of a convolution; None leaves them whole."""


def register(definition: Callable[..., Any], kernel: Callable[..., Any] | None = None, triton: str = "") -> None:
    """Make ``definition`` the operator of its name, on every device and for tensors without values.

    ``kernel`` runs on the CPU, and the function of this name in ``triton``, a module of `gpu`, on a GPU; what they
    leave to the definition gives None.
    """
    name = definition.__name__
    LIBRARY.impl(name, definition, "CompositeExplicitAutograd")
    torch.library.register_fake(f"qconv::{name}", definition, lib=LIBRARY)
    if kernel is not None:
        LIBRARY.impl(name, _or_definition(kernel, definition), "CPU")
    if triton:
        LIBRARY.impl(name, by_triton(f"{triton}.{name}", definition), "CUDA")


def _or_definition(kernel: Callable[..., Any], definition: Callable[..., Any]) -> Callable[..., Any]:
    def run(*arguments: Any) -> Any:
        found = kernel(*arguments)
        return definition(*arguments) if found is None else found

    return run
