"""Learned rounding of a block's weights, from its inputs and target outputs (AdaRound, BRECQ)."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ..layers import QuantizedLayer
from ..quantizers import Identity
from .blocks import feature_dim_of, frozen_parameters, layers_of

STRETCH = (-0.1, 1.1)
"""The ends of AdaRound's rectified sigmoid."""
BETA = (20.0, 2.0)
"""The exponent of its regularization at the start and at the end."""
WARM_UP = 0.2
"""The share of the iterations without regularization."""
POSITIONS, FEWEST = 2**12, 4
"""A step takes no more samples than have these positions in the output, but no fewer than these samples: on large
images others would repeat what it has seen, and take most of the time."""


class Rounding:
    """The weight of one layer between the levels below and above it.

    Attributes:
        logits: V.
        on_level: which weights lie on a level; they stay there.
    """

    def __init__(self, layer: QuantizedLayer) -> None:
        self.layer = layer
        codes = layer.weight_codes()
        self.scale = codes.scale.detach()
        self.low, self.high = layer.weight_quantizer.whole_ends or (0, 0)
        with layer.as_evaluated() as (_, filters):
            filters = filters.detach()
        place = torch.where(self.scale > 0, filters / self.scale, torch.zeros_like(filters))
        place = torch.where((place - place.round()).abs() < 1e-3, place.round(), place)  # it lies on a level
        place = place.clamp(self.low, self.high)
        self.nearest = codes.values - codes.zero
        self.floor = place.floor()
        self.on_level = place == self.floor
        stretched = (place - self.floor - STRETCH[0]) / (STRETCH[1] - STRETCH[0])
        self.logits = stretched.logit().requires_grad_()

    def up(self) -> Tensor:
        """Return h, the share of the upper level."""
        low, high = STRETCH
        return (self.logits.sigmoid() * (high - low) + low).clamp(0, 1).masked_fill(self.on_level, 0)

    def weight(self) -> Tensor:
        """The weight between its levels, in the layout of the layer."""
        return self.layer.from_filters(self.scale * (self.floor + self.up()).clamp(self.low, self.high))

    @torch.no_grad()
    def finish(self) -> int:
        """Set the latent weights to their levels; return how many are not on the nearest one."""
        self.layer.weight_quantizer.settle_()  # or the learned scale would follow the weight
        whole = (self.floor + (self.up() >= 0.5)).clamp(self.low, self.high)
        self.layer.weight.copy_(self.layer.from_filters(self.scale * whole))
        return int((whole != self.nearest).sum())


@contextmanager
def _open(block: nn.Module) -> Iterator[dict[str, Rounding]]:
    """Replace the weights of a block's layers by given tensors; yield the roundings by the weights' names."""
    layers = {name: each for name, each in block.named_modules() if isinstance(each, QuantizedLayer)}
    roundings = {f"{name}.weight" if name else "weight": Rounding(each) for name, each in layers.items()}
    quantizers = {layer: layer.weight_quantizer for layer in layers.values()}
    for layer in quantizers:
        layer.weight_quantizer = Identity()
    try:
        yield roundings
    finally:
        for layer, quantizer in quantizers.items():
            layer.weight_quantizer = quantizer


def learn_rounding(
    block: nn.Module,
    input: Tensor,
    target: Tensor,
    generator: torch.Generator,
    steps: Iterator[int],
    *,
    iterations: int,
    batch_size: int,
    learning_rate: float,
    input_learning_rate: float,
    regularization: float,
) -> float:
    """Learn the rounding of a block's weights, and apply it; return the share of changed weights.

    For each iteration the next number is taken from ``steps``, which may show the progress.
    """
    ranges = [each for layer in layers_of(block) for each in layer.input_quantizer.parameters() if each.requires_grad]
    with frozen_parameters(block):
        with _open(block) as roundings, torch.enable_grad():
            for each in ranges:
                each.requires_grad_()
            groups: list[dict[str, Any]] = [
                {"params": [rounding.logits for rounding in roundings.values()], "lr": learning_rate},
                {"params": ranges, "lr": input_learning_rate},
            ]
            optimizer = torch.optim.Adam([group for group in groups if group["params"]])
            feature_dim = feature_dim_of(block, input[:1])
            count = _samples(target.shape, feature_dim, batch_size)
            for step, _ in zip(range(iterations), steps, strict=False):
                batch = torch.randint(0, len(input), (count,), generator=generator, device="cpu")
                weights = {name: rounding.weight() for name, rounding in roundings.items()}
                output = functional_call(block, weights, (input[batch],))
                distance = (output - target[batch]).square()
                loss = distance.sum(feature_dim).mean()
                loss = loss + regularization * _regularization(roundings, step, iterations)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                with torch.no_grad():
                    for layer in layers_of(block):
                        layer.input_quantizer.after_step_(None)
        moved = sum(rounding.finish() for rounding in roundings.values())
    return moved / max(sum(rounding.logits.numel() for rounding in roundings.values()), 1)


def _samples(size: Sequence[int], feature_dim: int, most: int) -> int:
    """The number of samples in a step, of outputs of this size."""
    positions = max(math.prod(size[1:]) // max(size[feature_dim], 1), 1)
    return min(most, size[0], max(POSITIONS // positions, FEWEST))


def _regularization(roundings: dict[str, Rounding], step: int, iterations: int) -> Tensor | float:
    """``Σ (1 − |2h − 1|^β)``; 0 while the rounding warms up."""
    start = WARM_UP * iterations
    if step < start:
        return 0.0
    progress = (step - start) / max(iterations - start, 1)
    beta = BETA[1] + (BETA[0] - BETA[1]) * (1 - progress)
    return torch.stack([(1 - (2 * each.up() - 1).abs() ** beta).sum() for each in roundings.values()]).sum()
