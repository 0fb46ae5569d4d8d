"""Batch norm that keeps statistics, and computes its input again if there is a recipe."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..function.kept_input import Lean
from ..function.recipes import Recipe, forget, hang, recipe_of, saved
from ..kernels import norm as _registered  # noqa: F401
from ..layers.naming import name_of
from ..quantizers.node import once_differentiable
from .node import as_node

_aten = torch.ops.aten


class _LeanBatchNorm(_BatchNorm):
    """Base of the lean batch norms: as the twin, but stores less in training."""

    float_type: type[_BatchNorm]
    lean: Lean = "fast"

    def forward(self, input: Tensor) -> Tensor:
        if isinstance(input, fx.Proxy):
            return as_node(self, input)
        recipe = recipe_of(input) if self.training else None
        if recipe is None or input.numel() <= self.num_features:  # the twin raises for a single value of each channel
            return super().forward(input)
        self._check_input_dim(input)
        factor, statistics = self._updated()
        restored = saved(input, partial(name_of, self), is_own=self.lean == "fast")
        affine = (self.weight, self.bias) if self.affine else ()
        output = _Norm.apply(
            input,
            *(affine or (None, None)),
            statistics,
            factor,
            self.eps,
            self.lean,
            restored.restore,
            *restored.tensors,
        )
        running = None if statistics[0] is None else statistics[0].dtype
        counts = len(recipe.tensors), len(affine)
        compute = partial(_again, counts, recipe.compute, self.eps, running)
        if self.lean == "exact" or recipe.affine is None or output.grad_fn is None:
            return hang(output, Recipe((*recipe.tensors, *affine), compute, recipe.convolutions))
        tensors = *recipe.tensors, *affine, *output.grad_fn.statistics  # pyright: ignore[reportAttributeAccessIssue]
        rough = partial(_folded, counts, recipe.affine)
        return hang(output, Recipe(tensors, compute, recipe.convolutions, rough))

    def _updated(self) -> tuple[float, tuple[Tensor | None, Tensor | None]]:
        """Count the batch; return its weight in the running statistics, and these statistics."""
        if not self.track_running_stats:
            return 0.0, (None, None)
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        if self.momentum is not None:
            return self.momentum, (self.running_mean, self.running_var)
        return 1.0 / float(cast(Tensor, self.num_batches_tracked)), (self.running_mean, self.running_var)


class LeanBatchNorm1d(_LeanBatchNorm, nn.BatchNorm1d):
    """`torch.nn.BatchNorm1d` of a lean model."""

    float_type = nn.BatchNorm1d


class LeanBatchNorm2d(_LeanBatchNorm, nn.BatchNorm2d):
    """`torch.nn.BatchNorm2d` of a lean model."""

    float_type = nn.BatchNorm2d


class LeanBatchNorm3d(_LeanBatchNorm, nn.BatchNorm3d):
    """`torch.nn.BatchNorm3d` of a lean model."""

    float_type = nn.BatchNorm3d


class _Norm(torch.autograd.Function):
    """Batch norm by the operators of `torch.batch_norm`, with an input that is computed again."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        statistics: tuple[Tensor | None, Tensor | None],
        factor: float,
        eps: float,
        lean: Lean,
        restore: Callable[..., Tensor],
        *kept: Tensor,
    ) -> Tensor:
        output, mean, inverse, reserve, ctx.index = _aten._batch_norm_impl_index(
            input, weight, bias, *statistics, True, factor, eps, torch.backends.cudnn.enabled
        )
        ctx.eps, ctx.lean, ctx.restore, ctx.statistics = eps, lean, restore, (mean, inverse)
        ctx.save_for_backward(weight, mean, inverse, reserve, *kept)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        forget(ctx)
        ctx.statistics = None
        weight, mean, inverse, reserve, *kept = ctx.saved_tensors
        mask, nones = ctx.needs_input_grad[:3], (None,) * (5 + len(kept))
        (grad,), input = grad_outputs, ctx.restore(*kept)
        is_new = all(input.data_ptr() != tensor.data_ptr() for tensor in kept)
        has_kernel = input.ndim == 4 and (input.dtype == torch.float32 or input.is_cuda)
        if ctx.lean == "fast" and ctx.index == 0 and is_new and has_kernel:
            grad = grad.contiguous(memory_format=torch.channels_last)
            of_affine = torch.ops.qconv.norm_backward_(grad, input, weight, mean, inverse)
            return _asked((input, *of_affine), mask) + nones
        grads = _aten._batch_norm_impl_index_backward(
            ctx.index, input, grad, weight, None, None, mean, inverse, True, ctx.eps, mask, reserve
        )
        return _asked(grads, mask) + nones


def _asked(grads: Sequence[Tensor], mask: Sequence[bool]) -> tuple[Tensor | None, ...]:
    return tuple(grad if asked else None for grad, asked in zip(grads, mask, strict=True))


def _again(
    counts: tuple[int, int], compute: Callable[..., Tensor], eps: float, running: torch.dtype | None, *tensors: Tensor
) -> Tensor:
    """Normalize the input again, from the tensors of its recipe and of the layer.

    The operator chooses its arithmetic by the dtype of the running statistics, so it gets some.
    """
    of_input, learned, _ = _split(tensors, counts)
    weight, bias = learned or (None, None)
    input = compute(*of_input)
    statistics = (None, None) if running is None else input.new_zeros(2, input.shape[1], dtype=running).unbind()
    use_cudnn = torch.backends.cudnn.enabled
    return _aten._batch_norm_impl_index(input, weight, bias, *statistics, True, 0.0, eps, use_cudnn)[0]


def _folded(counts: tuple[int, int], affine: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """Normalize the input by one factor and one summand per channel."""
    of_input, learned, (mean, inverse) = _split(tensors, counts)
    factor = inverse * learned[0] if learned else inverse
    summand = learned[1] - mean * factor if learned else -mean * factor
    return affine((factor, summand), *of_input)


def _split(tensors: tuple[Tensor, ...], counts: tuple[int, int]) -> tuple[tuple[Tensor, ...], ...]:
    """Split the tensors of a recipe into tensors of the input, weight and bias, and statistics if there are any."""
    first, second = counts[0], sum(counts)
    return tensors[:first], tensors[first:second], tensors[second:]
