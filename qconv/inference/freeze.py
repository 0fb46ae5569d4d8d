"""Freezing: a trained model becomes one that computes on integers."""

import copy
from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, fx, nn
from torch.fx.proxy import TraceError
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from ..layers import QuantizedLayer
from ..packed.layer import describe
from ..quantizers import Quantizer
from .layers import IntegerLayer
from .rewrite import Frozen, Rewriter


class FrozenModel(nn.Module):
    """An inference model: `network` computes on integers where `layers` says so.

    The input is brought into the channels_last memory format, in which the integer operators work.
    """

    def __init__(self, network: nn.Module, layers: tuple[Frozen, ...]) -> None:
        super().__init__()
        self.network, self.layers = network, layers

    def forward(self, input: Tensor) -> Tensor:
        """What the trained model gives in evaluation."""
        if input.ndim == 4:
            input = input.contiguous(memory_format=torch.channels_last)
        return self.network(input)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        if fn(torch.zeros(1)).dtype != torch.float32:
            raise ValueError("a frozen model computes on integers and float32: it can't be cast")
        return super()._apply(fn, recurse)

    def train(self, mode: bool = True) -> "FrozenModel":
        """Raise a ValueError unless `mode` is False."""
        if mode:
            raise ValueError("a frozen model can't be trained: train the model that it was made from")
        return super().train(False)


@torch.no_grad()
def freeze(model: nn.Module, *, tolerance: float = 0.0) -> FrozenModel:
    """An inference model of a trained one, which stays as it is: integers inside, batch norm folded; on the CPU.

    Quantized layers run on integer operators where their codes allow it: signs by exclusive or and counting bits, codes
    of up to 8 bits as int8 with 32-bit sums, powers of two on fixed-point inputs by shifts. Batch norm behind a layer
    becomes its scale and bias. Where nothing but batch norm, monotone activations and maximum pooling lies between two
    quantized layers, they become integers, too: a threshold per channel for signs, else a rounding that is proved to
    give the trained codes for every possible sum. `FrozenModel.layers` says what became of each layer, and why.

    The model takes one tensor. What can't be traced by `torch.fx` (a forward that branches on shapes) stays Python, and
    its parts are frozen alone.

    Args:
        model: the trained one.
        tolerance: how far a rounding may be from the trained quantizer's steps, in steps. With 0 it is proved equal,
            which float32 does not allow for codes of 8 bits: those go through floats. With 0.01 they are handed on, and
            may be off by one.

    Raises:
        TypeError: `model` is no module, or can't be copied.
        ValueError: a quantizer that waits for data or is not in its last stage; NaN or inf in a tensor; another dtype
            than float32; hooks, which would be lost; a model that is frozen; a tolerance outside 0 to 1.
    """
    if not 0 <= tolerance <= 1:
        raise ValueError(f"tolerance (={tolerance}) must be at least 0 and at most 1")
    if not isinstance(model, nn.Module):
        raise TypeError(f"model ({type(model).__name__}) must be a torch.nn.Module")
    if any(isinstance(module, IntegerLayer | FrozenModel) for module in model.modules()):
        raise ValueError("model is frozen already")
    exact = [name for name, module in model.named_modules() if isinstance(module, Quantizer)]  # scales may be float64
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if not tensor.is_floating_point():
            continue
        if tensor.dtype != torch.float32 and name.rpartition(".")[0] not in exact:
            raise ValueError(f"'{name}' is {tensor.dtype}: call model.float() before it is frozen")
        if not tensor.isfinite().all():
            raise ValueError(f"'{name}' has NaN or inf: nothing can be frozen with it")
    for name, module in model.named_modules():
        if module._forward_hooks or module._forward_pre_hooks:
            raise ValueError(
                f"'{name}' ({type(module).__name__}) has hooks, which a frozen model would lose: remove them"
            )
        if isinstance(module, QuantizedLayer):
            describe(name, module)  # raises where what it computes is not yet what ships
    try:
        network = copy.deepcopy(model).eval().cpu()
    except (TypeError, RuntimeError) as error:
        raise TypeError(f"model ({type(model).__name__}) can't be copied: {error}") from error
    frozen: list[Frozen] = []
    network = _freeze(network, "", frozen, tolerance).requires_grad_(False)
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            module.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    order = {name: index for index, (name, _) in enumerate(model.named_modules(remove_duplicate=False))}
    return FrozenModel(network, tuple(sorted(frozen, key=lambda each: order[each.name]))).eval()


def _freeze(module: nn.Module, prefix: str, frozen: list[Frozen], tolerance: float) -> nn.Module:
    """The frozen form of a module, traced as a whole if it can be."""
    if not any(isinstance(each, QuantizedLayer | _ConvNd) for each in module.modules()):
        return module
    if isinstance(module, _ConvNd) and not isinstance(module, QuantizedLayer):
        return module
    whole = nn.Sequential(module) if isinstance(module, QuantizedLayer) else module
    try:
        graph = _Tracer().trace(whole)
    except (TraceError, TypeError, ValueError, RuntimeError, AttributeError, NotImplementedError):
        for name, child in module.named_children():
            setattr(module, name, _freeze(child, f"{prefix}{name}.", frozen, tolerance))
        return module
    rewriter = Rewriter(fx.GraphModule(whole, graph, type(module).__name__), prefix, whole is not module, tolerance)
    rewriter.run()
    frozen += rewriter.frozen
    return rewriter.module


class _Tracer(fx.Tracer):
    """Looks into what holds layers that can be frozen; calls all else."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        inner = (each for each in m.modules() if each is not m)
        kinds = QuantizedLayer, _ConvNd, _BatchNorm
        is_torch = m.__module__.startswith("torch.nn") and not isinstance(m, nn.Sequential)
        return is_torch or isinstance(m, QuantizedLayer) or not any(isinstance(each, kinds) for each in inner)
