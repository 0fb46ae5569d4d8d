"""Conversion of whole models: `plan` says what would happen, `convert` does it, `to_float` undoes it."""

from .decisions import Plan as Plan
from .swap import (
    convert as convert,
    float_state_dict as float_state_dict,
    plan as plan,
    to_float as to_float,
)
