"""The base of rules that change the weights of quantized layers around each optimizer step."""

import math
import warnings
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer

from ..ground.checks import check_module
from ..layers import QuantizedLayer
from ..layers.computed import computed_by, trained_weights
from ..layers.naming import name_of
from ..loop.optimizer_step import innermost, is_inner_step, is_sharding
from ..quantizers import Stages

State = dict[str, Any]
Schedule = float | tuple[float, float]


class StepRule:
    """Changes the gradients of latent weights before each optimizer step, or the weights afterwards.

    A subclass overrides `wants`, and `before_step` or `after_step`. What it remembers of a weight it keeps in the
    optimizer's state, ``optimizer.state[weight]``, under its own names: the state is saved, resumed and moved with
    it. Of a model trained by several processes each gets the same, since gradients and weights are the same.

    Example:
        >>> model = nn.Sequential(qconv.QConv2d(3, 8, 3, scheme=qconv.schemes.lsq(2, 2)))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> handle = qconv.optim.Oscillations(freeze=0.02).attach(model, optimizer)
    """

    schedules: ClassVar[tuple[str, ...]] = ()
    """The options that may be a pair: their values at the start and at the end of training, see `at`."""

    def wants(self, layer: QuantizedLayer) -> bool:
        """Whether the rule applies to this layer."""
        raise NotImplementedError

    def check(self, name: str, layer: QuantizedLayer) -> None:
        """Raise an error if the rule can't be applied to a layer that it `wants`.

        Raises:
            TypeError: a weight of fewer than 32 bits of floating point, in which running averages don't move.
        """
        if torch.finfo(layer.weight.dtype).bits < 32:
            raise TypeError(
                f"{self!r} needs {name}.weight in float32, it is {layer.weight.dtype}: use autocast "
                "(trainer.precision=bf16-mixed) in place of weights in this dtype"
            )

    def before_step(self, layer: QuantizedLayer, state: State) -> None:
        """Change ``layer.weight.grad``; don't write to the weight's optimizer state yet."""

    def after_step(self, layer: QuantizedLayer, state: State, progress: float) -> None:
        """Change ``layer.weight`` or the state; ``progress`` goes from 0 to 1 during training."""

    def attach(self, model: nn.Module, optimizer: Optimizer, total_steps: int | None = None) -> "Attached":
        """Apply the rule to the trainable weights of ``model`` around each ``optimizer.step()``.

        Call it after `qconv.after_every_step`, and again for copies of the optimizer.

        Args:
            model: holds quantized layers.
            optimizer: a torch optimizer, or one that wraps it.
            total_steps: the length of the training in optimizer steps, for options that are schedules.

        Returns:
            A handle; ``handle.remove()`` undoes it.

        Raises:
            ValueError: no trainable weight of a layer that the rule is for is among the optimizer's parameters; an
                option is a schedule, and there are no ``total_steps``.
            TypeError: ``model`` is not a module; ``optimizer`` is not a torch optimizer; a layer whose scheme the rule
                can't work with, whose weight is computed (pruned, parametrized), or whose quantizer changes in the
                course of the training.
        """
        check_module(model)
        inner = innermost(optimizer)
        if is_sharding(inner):
            warnings.warn(
                f"{type(inner).__name__} does not save what {self!r} records about weights, so a resumed run "
                "starts it again from nothing. Use torch's fully_shard, or an optimizer that is not sharded",
                stacklevel=2,
            )
        held = {parameter for group in inner.param_groups for parameter in group["params"]}
        layers: dict[torch.Tensor, QuantizedLayer] = {}  # a shared weight once
        for name, layer in model.named_modules():
            if not isinstance(layer, QuantizedLayer):
                continue
            if maker := computed_by(layer):
                if self.wants(layer) and any(part in held and part.requires_grad for part in trained_weights(layer)):
                    raise TypeError(f"{self!r} can't work on {name_of(layer, name)}: {maker}")
                continue
            if layer.weight not in held or not layer.weight.requires_grad:
                continue
            if isinstance(layer.weight_quantizer, Stages):
                raise TypeError(
                    f"{self!r} can't work on {name}.weight with {layer.scheme}, because its quantizer changes "
                    "during training: train each stage in a separate run, with init_from="
                )
            if self.wants(layer):
                self.check(name, layer)
                layers.setdefault(layer.weight, layer)
        if not layers:
            raise ValueError(
                f"{self!r} finds no layer in model ({type(model).__name__}) to work on: {type(self).__name__}.wants "
                "accepts none of the layers whose weights the optimizer trains"
            )
        scheduled = [name for name in self.schedules if isinstance(getattr(self, name), tuple)]
        if total_steps is None and scheduled:
            raise ValueError(f"{self!r} has a schedule, {scheduled[0]}: attach it with total_steps")
        return Attached(self, list(layers.values()), inner, total_steps)

    def __repr__(self) -> str:
        options = ", ".join(f"{name}={value}" for name, value in vars(self).items())
        return f"{type(self).__name__}({options})"


def at(value: Schedule, progress: float) -> float:
    """Return ``end + (start − end) · (1 + cos π·progress) / 2`` for a pair; a number unchanged."""
    if not isinstance(value, tuple):
        return value
    start, end = value
    return end + (start - end) * (1 + math.cos(math.pi * min(progress, 1.0))) / 2


def since(start: float, progress: float) -> float:
    """Return the progress since ``start``, from 0 to 1."""
    return max(0.0, progress - start) / (1 - start)


class Attached:
    """A rule applied to the layers of a model, through hooks of one optimizer."""

    def __init__(
        self, rule: StepRule, layers: list[QuantizedLayer], optimizer: Optimizer, total_steps: int | None
    ) -> None:
        self.rule, self.layers, self.total_steps = rule, layers, total_steps
        self.steps = f"{type(rule).__name__}_steps"  # the name of a weight's step count in the optimizer's state
        self.handles = (
            optimizer.register_step_pre_hook(self.before),
            optimizer.register_step_post_hook(self.after),
        )

    def remove(self) -> None:
        """Remove the rule; its entries in the optimizer's state stay."""
        for handle in self.handles:
            handle.remove()

    def before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Change the gradients; with a closure, as under Lightning, after it has computed them.

        Raises:
            RuntimeError: the gradients are still multiplied by the scale of a GradScaler.
        """
        if is_inner_step(optimizer):
            return None
        changes = type(self.rule).before_step is not StepRule.before_step
        if changes and getattr(optimizer, "grad_scale", None) is not None:
            raise RuntimeError(
                f"{self.rule!r} gets gradients that {type(optimizer).__name__} unscales later: call "
                "scaler.unscale_(optimizer) before the step, or use fused=False"
            )
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self.change_gradients(optimizer)
            return None

        def then_change() -> Any:
            loss = closure()
            self.change_gradients(optimizer)
            return loss

        if "closure" in kwargs:
            return args, {**kwargs, "closure": then_change}
        return (*args[:1], then_change, *args[2:]), kwargs

    @torch.no_grad()
    def change_gradients(self, optimizer: Optimizer) -> None:
        """Apply the rule to each weight with a gradient."""
        for layer, state in self.trained(optimizer):
            self.rule.before_step(layer, state)

    @torch.no_grad()
    def after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Apply the rule to each weight that the step has changed."""
        del args, kwargs
        if is_inner_step(optimizer):
            return
        for layer, state in self.trained(optimizer):
            steps = state[self.steps] = state.get(self.steps, 0) + 1
            self.rule.after_step(layer, state, 0.0 if self.total_steps is None else steps / self.total_steps)

    def trained(self, optimizer: Optimizer) -> Iterator[tuple[QuantizedLayer, State]]:
        """Yield the layers with a weight gradient, with the optimizer's state of the weight."""
        for layer in self.layers:
            if layer.weight.grad is not None:
                yield layer, optimizer.state[layer.weight]
