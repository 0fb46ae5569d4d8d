"""Unsigned or signed levels, chosen once from the data and kept as a tensor.

Signed levels are twice as far apart. They pay where negative inputs carry much of the signal, as after a linear
bottleneck or a layer norm, and not where they are small, as after SiLU or Hardswish. So the squared error decides, and
not the share of negative inputs.
"""

from collections.abc import Mapping
from typing import Any, Self, cast

import torch
from torch import Tensor

from ..ground.checks import check_flags
from .base import Quantizer
from .flags import SHARE, Mark, flag_of, is_readable, is_set, may_differ
from .observers import Magnitudes, Values
from .part import Rule

FLAG = "is_signed"
"""The name of the choice in state dicts, after the quantizer's prefix."""
MOST_VALUES = 2**14
"""The number of data values that decide."""
STEPS = 32
"""The number of steps that are tried for the least error of each of the two."""


class MagnitudesAndValues(Magnitudes):
    """Observes the mean magnitude, and keeps some of the values."""

    def __init__(self, dim: int | None = None) -> None:
        super().__init__(dim)
        self.values = Values(MOST_VALUES, dim)

    def update(self, x: Tensor) -> None:
        super().update(x)
        self.values.observe(x)


def least_error(x: Tensor, low: int, high: int, power: int) -> tuple[Tensor, Tensor]:
    """Return each row's step with the least mean error to a power, on the levels from ``low`` to ``high``; and this.

    The steps are evenly spaced; the error is relative to the row's mean power. A row of zeros has the step 0.
    """
    bound = x.abs().amax(1, keepdim=True)
    x = x / bound  # whose squares neither overflow nor vanish
    best = torch.ones_like(bound) / high
    least = torch.full_like(bound, torch.inf)
    for step in (torch.arange(STEPS, 0, -1) / (STEPS * high)).tolist():
        z = x / step
        levels = torch.where(z < 0, -1.0, 1.0) if (low, high) == (-1, 1) else z.clamp_(low, high).round_()
        error = levels.mul_(step).sub_(x).pow_(power).mean(1, keepdim=True)
        best, least = torch.where(error < least, step, best), torch.minimum(error, least)
    return (best * bound).squeeze(1), (least / x.pow(power).mean(1, keepdim=True)).squeeze(1)


class ChosenSign(Quantizer):
    """A part of input quantizers with signed or unsigned levels, chosen by an argument or by the data.

    The choice is a float buffer, `FLAG`: 0 for unsigned, above 0 for signed. So state dicts, averages of models and
    broadcasts carry it. Read as `signed` it is a bool, which is read from an accelerator once there were data, and
    again if it may differ (`may_differ`).
    """

    chooses_sign: bool = False
    _signed: bool = False
    _sign_is_known: bool = True
    _sign_seen: Mark | None = None  # of the flag when it was read
    _vote: int = 0

    def set_sign(self, signed: bool | None, *, from_data: bool) -> None:
        """Apply the constructor's argument: True, False, or None to let the data choose."""
        if signed is not None:
            check_flags(signed=signed)
        self.chooses_sign = signed is None and from_data
        self._signed = bool(signed)
        self._sign_is_known = not self.chooses_sign
        self.register_buffer(FLAG, flag_of(self._signed))

    @property
    def signed(self) -> bool:
        """Whether the levels are signed; in a compiled graph, the last known choice."""
        if not torch.compiler.is_compiling():
            self._read_sign()
        return self._signed

    @property
    def ends(self) -> tuple[int, int]:
        """The smallest and the largest whole number."""
        raise NotImplementedError(f"{type(self).__name__} defines no ends")

    def snapshot(self) -> Self:
        self._signed = self.signed
        return super().snapshot()

    @property
    def is_unsigned(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return not self.chooses_sign and not self._signed and self.arguments.get("signed") is None

    @property
    def chosen_sign(self) -> bool | None:
        """Whether the data have chosen signed inputs; None without a choice, or before the data."""
        return self.signed if self.chooses_sign and self.calibrated else None

    def _read_sign(self) -> None:
        is_fixed = self._is_snapshot and self._sign_is_known
        if is_fixed or not self.chooses_sign or not self.calibrated:
            return
        flag = cast(Tensor, self._buffers[FLAG])
        again = not self._is_snapshot and is_readable(flag) and may_differ(flag, self._sign_seen, self.training)
        if again or not self._sign_is_known:
            self._know_sign(is_set(flag), flag)

    def choose_sign(self, observer: MagnitudesAndValues, unsigned: tuple[int, int], signed: tuple[int, int]) -> None:
        """Choose from the observer's values, and keep the vote for `decide`."""
        self._vote = -1  # without negative inputs it doesn't object to what other processes see
        if observer.low is not None and observer.low < 0:
            x = observer.values.kept.double().reshape(1, -1)
            gain = least_error(x, *unsigned, 2)[1] - least_error(x, *signed, 2)[1]
            self._vote = int((gain.nan_to_num(-1.0) * 2**20).round().item())
        self._set_sign(self._vote > 0)

    def vote(self) -> int:
        """Return a vote from the data of `initialize`, for a choice that all processes share; 0 without one."""
        return self._vote if self.chooses_sign else 0

    @torch.no_grad()
    def decide(self, votes: int) -> None:
        """Choose by the sum of all processes' `vote`, before their learned tensors are averaged."""
        is_other = votes <= 0 if self.signed else votes > 0
        if self.chooses_sign and is_other:
            before = self.ends
            self._set_sign(not self.signed)
            self.after_sign_(before)

    def after_sign_(self, before: tuple[int, int]) -> None:
        """Adapt the learned tensors, which started with the ends ``before``, to the new ones."""

    def _set_sign(self, value: bool) -> None:
        flag = cast(Tensor, self._buffers[FLAG])
        flag.fill_(1.0 if value else 0.0)  # a bool that torch.compile may hold as a symbol
        self._know_sign(value, flag)

    def _know_sign(self, value: bool, flag: Tensor) -> None:
        # To set an attribute of a module takes longer than to read the flag. Torch 2.11 compiles no `value != ...`.
        is_other = not value if self._signed else value
        if is_other:
            self._signed = not self._signed
        if not self._sign_is_known:
            self._sign_is_known = True
        if not flag.is_cpu:
            self._sign_seen = Mark.on(flag)

    def rules_of_sign(self) -> dict[str, Rule]:
        """Return the rule of the flag."""
        return {FLAG: SHARE}

    def takes_sign(self, flag: Tensor) -> bool:
        """Whether this flag of a checkpoint may be loaded: it does not contradict the constructor's argument."""
        return self.chooses_sign or flag.is_meta or is_set(flag) == self._signed

    def check_state(self, state_dict: Mapping[str, Any], prefix: str = "") -> None:
        super().check_state(state_dict, prefix)
        flag = state_dict.get(f"{prefix}{FLAG}")
        if not isinstance(flag, Tensor) or self.takes_sign(flag):
            return
        there, here = ("signed", "unsigned") if is_set(flag) else ("unsigned", "signed")
        raise ValueError(
            f"{prefix}{FLAG} (={flag.item():g}): inputs are {there} in the checkpoint, and {here} by the argument "
            "here: omit signed_input to load the checkpoint's choice"
        )

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._sign_is_known = not self.chooses_sign
        self._read_sign()
