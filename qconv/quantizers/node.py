"""Quantizers as autograd nodes, which keep what their backward needs from their forward."""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

Q = TypeVar("Q")
_COPIES = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 15)
"""Whether `as_result` copies: 2.11 needs it, 2.15 does not, and those between were not tried."""


def as_called(quantizer: Q) -> Q:
    """Return the quantizer for a Function: a snapshot if it may change before the backward, else itself.

    Compiled code traces forward and backward together. `torch.jit.trace` checks its result without gradients.
    """
    is_traced = torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage]
    if torch.compiler.is_compiling() or not (torch.is_grad_enabled() or is_traced):
        return quantizer
    return quantizer.snapshot()  # pyright: ignore[reportAttributeAccessIssue]  # a quantizer


def held(quantizer: Any, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the quantizer's tensors in the form that a Function saves."""
    return tensors if torch.compiler.is_compiling() else quantizer.hold(*tensors)


def as_result(output: Tensor) -> Tensor:
    """Return the result for a Function's forward.

    Torch 2.11 compiles the gradient to 0 if the output comes from an operation that returned its operand: a cast to its
    own dtype, or one in place. A copy is not such an operation, and the compiler leaves it out.
    """
    return output.clone() if _COPIES and torch.compiler.is_compiling() else output


def once_differentiable(backward: Callable[..., tuple[Tensor | None, ...]]) -> Callable[..., tuple[Tensor | None, ...]]:
    """Decorate a Function's ``backward`` so that differentiating its result raises a RuntimeError.

    Unlike torch's decorator of this name it does so wherever the gradient came from. A loss that is linear in the
    output passes on a constant; torch's decorator would then silently drop the second derivative of input and weight.
    """

    def guarded(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        again = torch.is_grad_enabled() and not torch.compiler.is_compiling()  # compiled graphs refuse by themselves
        ctx = _UnpackedOnce(ctx) if again else ctx
        with torch.no_grad():
            grads = backward(ctx, *grad_outputs)
        if not again:
            return grads
        computed = [grad for grad in grads if grad is not None]
        leaf = torch.empty(0, requires_grad=True)  # saved bits do not require a gradient
        guards = iter(_Refuse.apply(len(computed), *computed, *grad_outputs, *ctx.saved_tensors, leaf))
        return tuple(None if grad is None else next(guards) for grad in grads)

    return guarded


class _UnpackedOnce:
    """A backward's context that unpacks its saved tensors once, because checkpointing allows no second time."""

    def __init__(self, ctx: Any) -> None:
        self.__dict__["_ctx"] = ctx

    @cached_property
    def saved_tensors(self) -> tuple[Tensor, ...]:
        return self._ctx.saved_tensors

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._ctx, name, value)


class _Refuse(torch.autograd.Function):
    """Passes the first ``count`` tensors through, tied to all others; its backward raises."""

    generate_vmap_rule = True

    @staticmethod
    def forward(count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensor.view_as(tensor) for tensor in tensors[:count])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> None:
        raise RuntimeError(
            "trying to differentiate twice through a quantized or lean layer: its gradient has no derivative, so it "
            "can't be part of a gradient penalty"
        )


class Quantize(torch.autograd.Function):
    """Stand-alone form of a quantizer: ``quantize`` forward, ``backward`` backward."""

    @staticmethod
    def forward(x: Tensor, quantizer: Any, *tensors: Tensor) -> Tensor:
        x_q = quantizer.quantize(x, *tensors)
        return x.view_as(x) if x_q is x else as_result(x_q)  # autograd wants an input that is returned as a view

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, quantizer, *tensors = inputs
        ctx.quantizer = quantizer
        ctx.save_for_backward(x, *held(quantizer, tensors))

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  # the decorator hides the names
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        x, *tensors = ctx.saved_tensors
        (grad,) = grad_outputs
        grad_x, *grads = ctx.quantizer.backward(grad.clone(), x, *tensors)  # autograd may hand `grad` to others too
        return grad_x, None, *grads
