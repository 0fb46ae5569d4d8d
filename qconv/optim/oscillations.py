"""Oscillation of weights between two levels: measuring it, and iterative freezing (arXiv:2203.11086)."""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from ..ground.checks import check_bits, check_numbers
from ..layers import QuantizedLayer
from ..layers.on_levels import has_unit_steps, way_out, why_off_levels
from ..quantizers.part import has_begun
from .step_rules import Schedule, State, StepRule, at, since

FREQUENCY, FROZEN = "oscillation_frequency", "oscillation_frozen"
"""Names in the optimizer's state of a weight."""
OFTEN = 0.005
"""The frequency above which the paper counts a weight as one that oscillates."""


class Oscillations(StepRule):
    r"""Measures how often each weight goes back and forth between two levels, and freezes frequent oscillators.

    A weight oscillates at a step if its code changes in the direction opposite to its last change. Its
    frequency is an exponential moving average, with the momentum m:

    .. math:: f_t = m \cdot [oscillates] + (1 - m) \cdot f_{t-1}

    With ``freeze``, a weight of :math:`f_t` above this threshold stays at the nearest code to the moving average (also
    with m) of its codes: after each further step it is set to that level at its present scale.

    In the optimizer's state of each weight, by output channels first: ``oscillation_frequency``, and, with
    ``freeze``, ``oscillation_frozen`` (1 where it is frozen). `qconv.training.Diagnostics` draws both.

    The learned scale of a frozen weight gets the gradient of a weight that lies on its level. In the authors' code
    (Qualcomm-AI-research/oscillations-qat) that gradient has the code as a factor.

    Args:
        freeze: the threshold, from 0 to 1; a pair goes from the first to the second as half a cosine. The authors'
            script takes (0.1, 0.01) for 4 bits and (0.1, 0.011) for 3. None only measures.
        momentum: m, above 0 and at most 1; it should be at most half the threshold. The authors' program has 0.001.
        max_bits: weights of more bits are ignored.
        start: the progress from 0 to 1 at which a pair begins; nothing is frozen before. A single threshold holds from
            the first step.

    Raises:
        ValueError: an option out of its range.

    When attached (`attach`), it raises a TypeError for weights that have no codes, and with ``freeze`` for those whose
    levels are not evenly spaced, or are quantized to others, since they are normalized first: AdaBin's, for example.
    """

    schedules = ("freeze",)

    def __init__(
        self, freeze: Schedule | None = None, momentum: float = 0.001, max_bits: int = 4, start: float = 0.25
    ) -> None:
        is_pair = isinstance(freeze, Sequence) and not isinstance(freeze, str)
        ends: tuple[Any, ...] = tuple(cast(Any, freeze)) if is_pair else (freeze,)
        if is_pair and len(ends) != 2:
            raise ValueError(f"freeze (={freeze}) must be a number, a pair of numbers or None")
        for end in ends:
            check_numbers(freeze=end)
            if end is not None and not 0 <= end <= 1:
                raise ValueError(f"freeze (={freeze}) must be from 0 to 1")
        check_numbers(momentum=momentum, start=start)
        if not 0 < momentum <= 1:
            raise ValueError(f"momentum (={momentum}) must be above 0 and at most 1")
        check_bits("max_bits", max_bits)
        if not 0 <= start < 1:
            raise ValueError(f"start (={start}) must be at least 0 and below 1")
        self.freeze: Schedule | None = (ends[0], ends[1]) if is_pair else freeze
        self.momentum, self.max_bits, self.start = momentum, max_bits, start

    def wants(self, layer: QuantizedLayer) -> bool:
        """Whether the rule applies: quantized weights of at most `max_bits`."""
        return not layer.weight_quantizer.replaces_weight and layer.weight_quantizer.bits <= self.max_bits

    def check(self, name: str, layer: QuantizedLayer) -> None:
        """Raise a TypeError unless the weight has codes, and with ``freeze`` stays on the level that it is set to."""
        super().check(name, layer)
        try:
            layer.weight_codes()
        except TypeError as error:
            raise TypeError(f"{self!r} can't count codes of {name}.weight with {layer.scheme}: {error}") from error
        if self.freeze is None:
            return
        why = why_off_levels(layer)
        if not why and not layer.weight_quantizer.is_binary and not has_unit_steps(layer):
            why = "its levels are not evenly spaced"
        if why:
            remedy = way_out(layer, name, "weights of a scheme such as qconv.schemes.lsq can be frozen")
            raise TypeError(f"{self!r} can't freeze {name}.weight with {layer.scheme}: {why}; {remedy}")

    def after_step(self, layer: QuantizedLayer, state: State, progress: float) -> None:
        """Measure, and hold the frozen weights."""
        codes = layer.weight_codes()
        now = codes.values.to(layer.weight.dtype)
        if FREQUENCY not in state:
            state["oscillation_codes"] = now.clone()
            state["oscillation_direction"] = torch.zeros_like(now)
            state[FREQUENCY] = torch.zeros_like(now)
        freezes = self.freeze is not None and (not isinstance(self.freeze, tuple) or has_begun(self.start, progress))
        if freezes and FROZEN not in state:
            state["oscillation_average"] = now.clone()
            state[FROZEN] = torch.zeros_like(now)
        if freezes:
            now = torch.where(state[FROZEN] > 0, state["oscillation_average"], now)
        change = (now - state["oscillation_codes"]).sign()
        oscillates = (change * state["oscillation_direction"] < 0).to(now.dtype)
        state[FREQUENCY].lerp_(oscillates, self.momentum)
        state["oscillation_direction"] = torch.where(change == 0, state["oscillation_direction"], change)
        if freezes:
            now = self._hold(layer, codes, now, state, at(cast(Schedule, self.freeze), since(self.start, progress)))
        state["oscillation_codes"] = now

    def _hold(self, layer: QuantizedLayer, codes: Any, now: Tensor, state: State, threshold: float) -> Tensor:
        """Freeze weights that oscillate too often, set frozen weights to their levels, and return the codes."""
        average, frozen = state["oscillation_average"], state[FROZEN]
        newly = (state[FREQUENCY] > threshold) & (frozen == 0)
        level = torch.where(average < 0, -1.0, 1.0) if layer.weight_quantizer.is_binary else average.round()
        average.copy_(torch.where(newly, level.to(average.dtype), average))
        frozen.masked_fill_(newly, 1.0)
        average.lerp_(torch.where(frozen > 0, average, now), self.momentum)
        if not frozen.any():
            return now
        now = torch.where(frozen > 0, average, now)
        levels = codes._replace(values=now).dequantize().to(layer.weight.dtype)
        layer.weight.copy_(torch.where(layer.from_filters(frozen) > 0, layer.from_filters(levels), layer.weight))
        return now
