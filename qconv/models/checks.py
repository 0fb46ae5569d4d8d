"""Checks of the arguments that every network has."""

from collections.abc import Sequence


def check_at_least_one(**values: int) -> None:
    """Raise a ValueError that names the first value below 1."""
    for name, value in values.items():
        if value < 1:
            raise ValueError(f"{name} (={value}) must be at least 1")


def check_stages(widths: Sequence[int], blocks: Sequence[int]) -> None:
    """Raise a ValueError unless there are as many widths as numbers of blocks, one or more, and all are positive."""
    if not widths or len(widths) != len(blocks) or min(*widths, *blocks) < 1:
        raise ValueError(
            f"widths (={widths}) and blocks (={blocks}) must be as many positive numbers, at least one each"
        )
