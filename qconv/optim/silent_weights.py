"""OvSW: weights of binary layers that never change sign (arXiv:2407.05257)."""

import torch

from ..ground.checks import check_not_negative, check_numbers
from ..layers import QuantizedLayer
from ..quantizers.filters import per_filter
from .step_rules import State, StepRule

FLIPS = "flip_frequency"
"""Name in the optimizer's state of a weight."""


class OvSW(StepRule):
    r"""Overcomes silent weights: scales gradients too small to flip a sign, and decays weights that never flip.

    Before each step, for each filter c of a binary weight with the gradient g:

    .. math::

        g_c \leftarrow g_c \cdot \max(1, \delta \lVert w_c \rVert / \lVert g_c \rVert), \qquad
        g \leftarrow g + \lambda w \cdot [f < \sigma]

    with :math:`f \leftarrow m f + (1 - m) [\text{the sign has changed in the step}]`, which begins at 0 and counts from
    the second step on, as signs are first recorded after one. The first is
    the adaptive gradient scale; norms are taken as at least 1e-6 (gradient) and 1e-3 (weight). The second, silence
    awareness, lets weights decay that don't change their sign, so that they can.

    In the optimizer's state of each weight, by output channels first: ``flip_frequency``, the f.

    The defaults are from the authors' script for ResNet-20 on CIFAR-10 (JingyangXiang/OvSW). There, as here, the
    optimizer's own weight decay comes on top.

    Args:
        delta: :math:`\delta`, the least norm of a filter's gradient relative to the filter's norm; 0 disables this.
        decay: :math:`\lambda`; 0 ignores silent weights.
        momentum: m, at least 0 and below 1.
        threshold: :math:`\sigma`.

    Raises:
        ValueError: an option out of its range.
    """

    def __init__(
        self, delta: float = 0.04, decay: float = 9e-4, momentum: float = 0.999, threshold: float = 1e-4
    ) -> None:
        check_not_negative(delta=delta, decay=decay, threshold=threshold)
        check_numbers(momentum=momentum)
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum (={momentum}) must be at least 0 and below 1")
        self.delta, self.decay, self.momentum, self.threshold = delta, decay, momentum, threshold

    def wants(self, layer: QuantizedLayer) -> bool:
        """Whether the rule applies: binary weights."""
        return layer.weight_quantizer.is_binary and not layer.weight_quantizer.replaces_weight

    def before_step(self, layer: QuantizedLayer, state: State) -> None:
        """Scale small gradients, and add the decay of silent weights."""
        weight, grad = layer.weight, layer.weight.grad
        assert grad is not None  # the base calls it for no others
        if self.delta > 0:
            # The exchange of channels in the weight of a transposed convolution is its own inverse.
            of_grad, of_weight = (layer.from_filters(x.detach()).flatten(1) for x in (grad, weight))
            norms = of_weight.norm(dim=1).clamp(min=1e-3) / of_grad.norm(dim=1).clamp(min=1e-6)
            factors = (self.delta * norms).clamp(min=1.0)
            grad.mul_(layer.from_filters(per_filter(factors, layer.filters()).expand_as(layer.filters())))
        if self.decay > 0:
            flips = state.get(FLIPS)
            silent = self.threshold > 0 if flips is None else layer.from_filters(flips) < self.threshold
            grad.add_(weight * silent, alpha=self.decay)

    def after_step(self, layer: QuantizedLayer, state: State, progress: float) -> None:
        """Count the changes of sign."""
        del progress
        now = layer.weight_codes().values.to(layer.weight.dtype)
        if FLIPS not in state:
            state[FLIPS] = torch.zeros_like(now)
        else:
            state[FLIPS].lerp_((now != state["flip_codes"]).to(now.dtype), 1 - self.momentum)
        state["flip_codes"] = now
