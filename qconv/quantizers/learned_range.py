"""The base of quantizers that learn both ends of their range."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .kept_codes import Coded
from .numbers import SMALLEST, learned


class LearnedRange(Coded):
    """Base of quantizers with a learned range from ``lower`` to ``upper``, which start at −1 and 1."""

    lower: nn.Parameter
    upper: nn.Parameter

    def __init__(self) -> None:
        super().__init__()
        self.lower = learned(-1.0)
        self.upper = learned(1.0)

    def after_step_(self, x: Tensor | None) -> None:
        """Keep ``upper`` above ``lower``, by 2^-20 or by what its dtype can represent there.

        ``upper`` moves, or ``lower`` if ``upper`` is frozen.
        """
        if self.upper.requires_grad:
            above = torch.nextafter(self.lower, torch.full_like(self.lower, torch.inf))
            self.upper.copy_(self.upper.maximum(self.lower + SMALLEST).maximum(above))
        elif self.lower.requires_grad:
            below = torch.nextafter(self.upper, torch.full_like(self.upper, -torch.inf))
            self.lower.copy_(self.lower.minimum(self.upper - SMALLEST).minimum(below))
        super().after_step_(x)

    def check_state(self, state_dict: Mapping[str, Any], prefix: str = "") -> None:
        super().check_state(state_dict, prefix)
        lower, upper = (state_dict.get(f"{prefix}{name}", getattr(self, name)) for name in ("lower", "upper"))
        both = isinstance(lower, Tensor) and isinstance(upper, Tensor)
        if both and not (lower.is_meta or upper.is_meta) and not (lower <= upper).all():
            raise ValueError(f"{prefix}lower (={lower.item()}) must be at most upper (={upper.item()})")
