"""Lean training: what a forward keeps for its backward is bits, statistics, or nothing."""

from .swap import lean as lean
