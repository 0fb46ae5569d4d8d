"""Lean training: a forward keeps only bits, statistics or nothing for its backward."""

from .format import (
    choose_format as choose_format,
    keep_format as keep_format,
    takes_channels_last as takes_channels_last,
)
from .make_lean import is_lean as is_lean, lean as lean, while_not_lean as while_not_lean
from .reasons import why_float as why_float
