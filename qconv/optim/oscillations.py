"""Weights that oscillate between two levels: their measure, and iterative freezing (arXiv:2203.11086)."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..checks import check_numbers
from ..layers import QuantizedLayer
from .step_rules import Schedule, State, StepRule, at

FREQUENCY, FROZEN = "oscillation_frequency", "oscillation_frozen"
"""Names in the optimizer's state of a weight."""
OFTEN = 0.005
"""The frequency above which the paper counts a weight as one that oscillates."""


class Oscillations(StepRule):
    r"""Measures how often each weight goes back and forth between two levels, and freezes those that do so often.

    A weight oscillates at a step if its code changes in the direction opposite to that of its last change. Its
    frequency is an exponential moving average, with the momentum m:

    .. math:: f_t = m \cdot [oscillates] + (1 - m) \cdot f_{t-1}

    With ``freeze``, a weight of :math:`f_t` above this threshold stays at the nearest code to the moving average (also
    with m) of its codes: after each further step it is set to that level at the scale of then.

    In the optimizer's state of each weight, by output channels first: ``oscillation_frequency``, and, with
    ``freeze``, ``oscillation_frozen`` (1 where it is frozen). `qconv.training.Diagnostics` draws both.

    The learned scale of a frozen weight gets the gradient of a weight that lies on its level. In the authors' code
    (Qualcomm-AI-research/oscillations-qat) that gradient has the code as a factor.

    Args:
        freeze: the threshold, from 0 to 1; a pair ``(start, end)`` goes from one to the other as half a cosine. The
            authors' script takes (0.1, 0.01) for 4 bits and (0.1, 0.011) for 3. None measures alone.
        momentum: m, above 0 and at most 1.
        max_bits: weights of more bits are left alone.

    Raises:
        ValueError: an option out of its range.

    When attached (`attach`), it raises a TypeError for weights that have no codes, and with ``freeze`` for those whose
    levels are quantized to others, since they are normalized first: AdaBin's, for example.
    """

    schedules = ("freeze",)

    def __init__(self, freeze: Schedule | None = None, momentum: float = 0.01, max_bits: int = 4) -> None:
        pair = tuple(freeze) if isinstance(freeze, Sequence) and not isinstance(freeze, str) else None
        if pair is not None and len(pair) != 2:
            raise ValueError(f"freeze (={freeze}) must be a number, a pair of numbers or None")
        for end in (freeze,) if pair is None else pair:
            check_numbers(freeze=end)
            if end is not None and not 0 <= end <= 1:
                raise ValueError(f"freeze (={freeze}) must be from 0 to 1")
        check_numbers(momentum=momentum)
        if not 0 < momentum <= 1:
            raise ValueError(f"momentum (={momentum}) must be above 0 and at most 1")
        if not isinstance(max_bits, int) or max_bits < 1:
            raise ValueError(f"max_bits (={max_bits}) must be a whole number from 1")
        self.freeze: Schedule | None = freeze if pair is None else pair
        self.momentum, self.max_bits = momentum, max_bits

    def wants(self, layer: QuantizedLayer) -> bool:
        """Layers of quantized weights of few bits."""
        return not layer.weight_quantizer.replaces_weight and layer.weight_quantizer.bits <= self.max_bits

    def check(self, name: str, layer: QuantizedLayer) -> None:
        """Raise a TypeError unless the weight has codes, and its levels are those of themselves."""
        try:
            layer.weight_codes()
        except TypeError as error:
            raise TypeError(f"{self!r} needs codes, which {name}.weight with {layer.scheme} lacks: {error}") from error
        if self.freeze is not None and not are_levels_kept(layer):
            raise TypeError(
                f"{self!r} can't freeze {name}.weight: {layer.scheme} quantizes a weight that lies on a level to "
                "another one, since it normalizes it first; a scheme such as qconv.schemes.lsq does not"
            )

    def after_step(self, layer: QuantizedLayer, state: State, progress: float) -> None:
        """Measure, and hold the frozen weights."""
        codes = layer.weight_codes()
        now = codes.values.to(layer.weight.dtype)
        if FREQUENCY not in state:
            state["oscillation_codes"] = now.clone()
            state["oscillation_direction"] = torch.zeros_like(now)
            state[FREQUENCY] = torch.zeros_like(now)
        if self.freeze is not None and FROZEN not in state:
            state["oscillation_average"] = now.clone()
            state[FROZEN] = torch.zeros_like(now)
        if self.freeze is not None:
            now = torch.where(state[FROZEN] > 0, state["oscillation_average"], now)
        change = (now - state["oscillation_codes"]).sign()
        oscillates = (change * state["oscillation_direction"] < 0).to(now.dtype)
        state[FREQUENCY].lerp_(oscillates, self.momentum)
        state["oscillation_direction"] = torch.where(change == 0, state["oscillation_direction"], change)
        if self.freeze is not None:
            now = self._hold(layer, codes, now, state, at(self.freeze, progress))
        state["oscillation_codes"] = now

    def _hold(self, layer: QuantizedLayer, codes: Any, now: Tensor, state: State, threshold: float) -> Tensor:
        """Freeze what oscillates too often, set the frozen weights to their levels, and return the codes."""
        average, frozen = state["oscillation_average"], state[FROZEN]
        newly = (state[FREQUENCY] > threshold) & (frozen == 0)
        average.copy_(torch.where(newly, average.round(), average))
        frozen.masked_fill_(newly, 1.0)
        average.lerp_(torch.where(frozen > 0, average, now), self.momentum)
        if not frozen.any():
            return now
        now = torch.where(frozen > 0, average, now)
        levels = codes._replace(values=now).dequantize().to(layer.weight.dtype)
        layer.weight.copy_(torch.where(layer.from_filters(frozen) > 0, layer.from_filters(levels), layer.weight))
        return now


def are_levels_kept(layer: QuantizedLayer) -> bool:
    """Whether a weight that lies on one of its levels is quantized to this level: not if it is normalized first."""
    quantizer = layer.weight_quantizer
    with torch.no_grad():
        if not torch.equal(layer.from_filters(layer.filters()), layer.weight):  # the layer normalizes it
            return False
        codes = layer.weight_codes()
        levels = codes.dequantize().to(layer.weight.dtype)
        again = quantizer.codes(levels, *quantizer.tensors())
        near = torch.allclose(again.dequantize().to(levels.dtype), levels, rtol=1e-2)  # but for rounding, in any dtype
    return near and torch.equal(again.values, codes.values)
