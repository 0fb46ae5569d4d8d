"""The namespace of qconv's operators, `torch.ops.qconv`."""

from collections.abc import Callable
from typing import Any

import torch

from .gpu import by_triton

LIBRARY = torch.library.Library("qconv", "DEF")
Scaled = tuple[torch.Tensor, torch.Tensor] | None
"""The scale and the bias of each output channel, float32, for the sums of a convolution; None leaves them whole."""


def register(
    definition: Callable[..., Any],
    kernel: Callable[..., Any] | None = None,
    triton: str = "",
    operands: Callable[..., tuple[Any, ...]] | None = None,
    shape: Callable[..., torch.Tensor] | None = None,
) -> None:
    """Make ``definition`` the operator of its name, on every device and for tensors without values.

    Args:
        definition: runs on every device.
        kernel: runs on the CPU; None is what it returns for what it leaves to the definition.
        triton: the module of `gpu` with a kernel of this name.
        operands: makes the arguments of these functions from the flat ones of the schema.
        shape: a faster definition for tensors without values.
    """
    name = definition.__name__
    LIBRARY.impl(name, _operator(definition, None, operands), "CompositeExplicitAutograd")
    torch.library.register_fake(f"qconv::{name}", _operator(shape or definition, None, operands), lib=LIBRARY)
    if kernel is not None:
        LIBRARY.impl(name, _operator(definition, kernel, operands), "CPU")
    if triton:
        LIBRARY.impl(name, _operator(by_triton(f"{triton}.{name}", definition), None, operands), "CUDA")


def _operator(
    definition: Callable[..., Any],
    kernel: Callable[..., Any] | None,
    operands: Callable[..., tuple[Any, ...]] | None,
) -> Callable[..., Any]:
    if kernel is None and operands is None:
        return definition

    def run(*arguments: Any) -> Any:
        given = arguments if operands is None else operands(*arguments)
        found = None if kernel is None else kernel(*given)
        return definition(*given) if found is None else found

    return run
