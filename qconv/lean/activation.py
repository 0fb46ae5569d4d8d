"""Activations that keep one bit per element, or compute their input again."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from ..function.kept_input import Lean
from ..function.recipes import Recipe, forget, hang, recipe_of, runs_as_written, saved, with_autocast_of_now
from ..kernels.native_bits import holds
from ..kernels.rprelu import has_kernel
from ..layers.naming import name_of
from ..models.activations import Maxout, RPReLU, maxout, per_channel, rprelu
from ..quantizers.base import is_wrapped
from ..quantizers.form import has_own_strides
from ..quantizers.node import once_differentiable
from .node import as_node

_aten = torch.ops.aten
_ops = torch.ops.qconv


class _Clamped(nn.Module):
    """Base of activations that pass gradients between two ends; keeps one bit per element."""

    float_type: type[nn.Module]
    inplace: bool
    min_val: float
    max_val: float

    def ends(self) -> tuple[float, float | None]:
        """The two ends between which the gradient passes."""
        return float(self.min_val), float(self.max_val)

    def forward(self, input: Tensor) -> Tensor:
        if isinstance(input, fx.Proxy):
            return as_node(self, input)
        low, high = self.ends()
        if not _is_traced(input) or input.ndim < 2 or not holds(input.dtype, low, high):
            return super().forward(input)
        recipe = recipe_of(input)
        output = _Clamp.apply(input, low, high, self.inplace)
        if recipe is not None:
            hang(output, Recipe(recipe.tensors, partial(_clamped, recipe.compute, low, high), recipe.convolutions))
        return output


class LeanReLU(_Clamped, nn.ReLU):
    """`torch.nn.ReLU` of a lean model."""

    float_type = nn.ReLU

    def ends(self) -> tuple[float, float | None]:
        return 0.0, None


class LeanHardtanh(_Clamped, nn.Hardtanh):
    """`torch.nn.Hardtanh` of a lean model."""

    float_type = nn.Hardtanh


class LeanReLU6(_Clamped, nn.ReLU6):
    """`torch.nn.ReLU6` of a lean model."""

    float_type = nn.ReLU6


class _Clamp(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, input: Tensor, low: float, high: float | None, inplace: bool
    ) -> Tensor:
        if inplace:
            passes, stops = _ops.pack_passes(input, low, high)
            ctx.mark_dirty(input)
            output = input.clamp_(low, high)
        elif has_own_strides(input):
            output, (passes, stops) = _twin(input, low, high), _ops.pack_passes(input, low, high)
        else:
            output, passes, stops = _ops.clamp_and_pack(input, low, high)
        ctx.stops, ctx.is_relu = not (stops.is_cpu and not stops.item()), high is None
        # Those of what the twin saves: its output, or its input, which may be part of a larger tensor.
        is_output = ctx.is_relu or 1 not in input.shape or 0 in input.stride()
        ctx.strides = (output if is_output else input).stride()
        ctx.save_for_backward(*([passes] if ctx.stops else []))
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        forget(ctx)
        (grad,) = grad_outputs
        if grad.numel() and (is_wrapped(grad) or grad.stride() != ctx.strides or has_own_strides(grad)):
            return _by_twin(grad, ctx.strides, ctx.saved_tensors, ctx.is_relu), None, None, None
        return _ops.where_passes(grad, *ctx.saved_tensors) if ctx.stops else grad, None, None, None


def _by_twin(grad: Tensor, strides: tuple[int, ...], passes: Sequence[Tensor], is_relu: bool) -> Tensor:
    """Return the gradient by the twin's operator, in the twin's memory layout.

    Convolutions choose the order of their sums by the layout.
    """
    output = torch.empty_strided(grad.shape, strides, dtype=grad.dtype, device=grad.device)
    if passes:
        output.copy_(_ops.unpack_signs(passes[0], grad.shape[1], 1, grad.dtype, True)).neg_()
    else:
        output.fill_(1)
    return _aten.threshold_backward(grad, output, 0) if is_relu else _aten.hardtanh_backward(grad, output, 0, 2)


def _clamped(compute: Callable[..., Tensor], low: float, high: float | None, *tensors: Tensor) -> Tensor:
    return _twin(compute(*tensors), low, high)


def _twin(input: Tensor, low: float, high: float | None) -> Tensor:
    return torch.relu(input) if high is None else F.hardtanh(input, low, high)


class Rebuilt(nn.Module):
    """Base of activations that need their input, and compute it again if there is a recipe."""

    float_type: type[nn.Module]
    inplace: bool = False

    def pure(self) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
        """Return a pure function of the input and the learned tensors, and these tensors."""
        raise NotImplementedError

    def forward(self, input: Tensor) -> Tensor:
        if isinstance(input, fx.Proxy):
            return as_node(self, input)
        recipe = recipe_of(input) if _is_traced(input) and not self.inplace else None
        if recipe is None:
            return super().forward(input)
        function, learned = self.pure()
        function = with_autocast_of_now(function, input.device)
        restored = saved(input, partial(name_of, self))
        output = _Again.apply(input, function, restored.restore, len(learned), *learned, *restored.tensors)
        compute = partial(_again, function, recipe.compute, len(learned))
        return hang(output, Recipe((*learned, *recipe.tensors), compute, recipe.convolutions))


class LeanPReLU(Rebuilt, nn.PReLU):
    """`torch.nn.PReLU` of a lean model."""

    float_type = nn.PReLU

    def pure(self) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
        return F.prelu, (self.weight,)


class LeanLeakyReLU(Rebuilt, nn.LeakyReLU):
    """`torch.nn.LeakyReLU` of a lean model."""

    float_type = nn.LeakyReLU

    def pure(self) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
        return partial(F.leaky_relu, negative_slope=self.negative_slope), ()


class LeanRPReLU(Rebuilt, RPReLU):
    """`qconv.models.activations.RPReLU` of a lean model; unless the model is exact, its sums have another order."""

    float_type = RPReLU
    lean: Lean = "fast"

    def pure(self) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
        function = _fused_rprelu if self.lean == "fast" and not torch.compiler.is_compiling() else rprelu
        return function, (self.before.bias, self.slope, self.after.bias)


def _fused_rprelu(input: Tensor, before: Tensor, slope: Tensor, after: Tensor) -> Tensor:
    if not has_kernel(input):  # autograd is faster than a definition
        return rprelu(input, before, slope, after)
    per_channel(before, input)  # refuses an input of another number of channels
    return _FusedRPReLU.apply(input, before, slope, after)


class _FusedRPReLU(torch.autograd.Function):
    """RPReLU in one pass over memory, and its gradients in another."""

    @staticmethod
    def forward(ctx: Any, *operands: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(*operands[:3])
        return _ops.rprelu(*operands)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        input, *others = ctx.saved_tensors
        (grad,) = grad_outputs
        if grad.stride() != input.stride():
            grad = torch.empty_like(input).copy_(grad)
        return _ops.rprelu_backward(grad, input, *others)


class LeanMaxout(Rebuilt, Maxout):
    """`qconv.models.activations.Maxout` of a lean model."""

    float_type = Maxout

    def pure(self) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
        return maxout, (self.positive, self.negative)


class _Again(torch.autograd.Function):
    """A pure function that computes its input again in the backward, with gradients from autograd."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        input: Tensor,
        function: Callable[..., Tensor],
        restore: Callable[..., Tensor],
        count: int,
        *tensors: Tensor,
    ) -> Tensor:
        ctx.function, ctx.restore, ctx.count = function, restore, count
        ctx.save_for_backward(*tensors)
        return function(input, *tensors[:count])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        forget(ctx)
        tensors = ctx.saved_tensors
        learned, kept = tensors[: ctx.count], tensors[ctx.count :]
        asked = ctx.needs_input_grad[0], *ctx.needs_input_grad[4 : 4 + ctx.count]
        operands = [
            tensor.detach().requires_grad_(needs)
            for tensor, needs in zip((ctx.restore(*kept), *learned), asked, strict=True)
        ]
        with torch.enable_grad():
            output = ctx.function(*operands)
        grads = iter(
            torch.autograd.grad(output, [operand for operand in operands if operand.requires_grad], grad_outputs)
        )
        given = [next(grads) if needs else None for needs in asked]
        return given[0], None, None, None, *given[1:], *(None for _ in kept)


def _again(function: Callable[..., Tensor], compute: Callable[..., Tensor], count: int, *tensors: Tensor) -> Tensor:
    return function(compute(*tensors[count:]), *tensors[:count])


def _is_traced(input: Tensor) -> bool:
    """Whether autograd records each operation on ``input``."""
    return torch.is_grad_enabled() and input.requires_grad and runs_as_written()
