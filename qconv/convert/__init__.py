"""Conversion of whole models: `plan` says what would happen, `convert` does it, `to_float` undoes it."""

from .swap import (
    Plan as Plan,
    convert as convert,
    float_state_dict as float_state_dict,
    plan as plan,
    to_float as to_float,
)
