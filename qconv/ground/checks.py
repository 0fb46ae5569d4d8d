"""Checks of arguments: errors that name the argument, its value and the rule."""

import math
from collections.abc import Iterable, Sequence
from numbers import Integral, Real
from typing import Any

from torch import SymInt, Tensor, nn
from torch.utils._pytree import tree_map_only


def check_module(model: object, name: str = "model") -> None:
    """Raise a TypeError with ``name`` unless ``model`` is a module."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"{name} (={in_a_line(model)}) must be a torch.nn.Module")


def in_a_line(value: object) -> str:
    """Return the beginning of the value's representation, without line breaks; of tensors, type and shape."""
    text = repr(tree_map_only(Tensor, lambda each: f"{type(each).__name__} of {tuple(each.shape)}", value))
    line = text.partition("\n")[0][:100]
    return line if line == text else f"{line}…"


def some(names: Sequence[str], most: int = 5) -> str:
    """Return the first names, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if names[most:] else "")


def check_whole(name: str, value: int) -> int:
    """Return ``value`` as an int; raise a ValueError with ``name`` unless it is an integer, not a bool or string."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ValueError(f"{name} (={value!r}) must be a whole number, not of type {type(value).__name__}")
    return int(value)


def check_ints(name: str, value: int | Sequence[int], count: int, least: int) -> tuple[int, ...]:
    """Return ``value`` for each of ``count`` dimensions; raise a ValueError with ``name`` unless at least ``least``."""
    ints: tuple[Any, ...] = tuple(value) if isinstance(value, Iterable) else (value,) * count
    of_type = all(isinstance(each, Integral | SymInt) and not isinstance(each, bool) for each in ints)
    if len(ints) != count or not of_type:
        raise ValueError(f"{name} (={value!r}) must be an int" + (f" or {count} ints" if count > 1 else ""))
    if min(ints) < least:
        raise ValueError(f"{name} (={value!r}) must be at least {least}")
    return ints


def check_bits(name: str, bits: int, low: int = 1, high: int = 8, method: str = "") -> int:
    """Return ``bits`` as an int; raise a ValueError with ``name`` and ``method`` unless from ``low`` to ``high``."""
    of_type = isinstance(bits, Integral) and not isinstance(bits, bool)
    if not of_type or bits not in range(low, high + 1):
        where = f" for {method}" if method else ""
        kind = "" if of_type else f", not of type {type(bits).__name__}"
        raise ValueError(f"{name} (={bits!r}) must be a whole number from {low} to {high}{where}{kind}")
    return int(bits)


def check_numbers(**values: float | None) -> None:
    """Raise a TypeError that names the first of ``values`` that is neither None nor a number; a bool is not one."""
    for name, value in values.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, Real)):
            raise TypeError(f"{name} (={value!r}) must be a number, not of type {type(value).__name__}")


def check_not_negative(**values: float | None) -> None:
    """Raise an error that names the first of ``values`` that is not a number, or is below 0 or infinite."""
    check_numbers(**values)
    for name, value in values.items():
        if value is None or not 0 <= value < math.inf:
            raise ValueError(f"{name} (={value}) must be at least 0 and finite")


def check_positive(**values: float | None) -> None:
    """Raise an error that names the first of ``values`` that is not a number, or is not above 0 or infinite."""
    check_numbers(**values)
    for name, value in values.items():
        if value is None or not 0 < value < math.inf:
            raise ValueError(f"{name} (={value}) must be positive and finite")


def check_flags(**values: bool) -> None:
    """Raise a TypeError that names the first of ``values`` that is not a bool: ``"false"`` would count as True."""
    for name, value in values.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name} (={value!r}) must be True or False")


def check_choice(name: str, value: object, *choices: str) -> None:
    """Raise a ValueError with ``name`` unless ``value`` is one of the words."""
    if value not in choices:
        raise ValueError(f"{name} (={value!r}) must be {' or '.join(map(repr, choices))}")


def check_at_least_one(**values: int) -> None:
    """Raise a ValueError that names the first value that is not a whole number from 1 on."""
    for name, value in values.items():
        if check_whole(name, value) < 1:
            raise ValueError(f"{name} (={value}) must be at least 1")


def check_widths(widths: Sequence[int], blocks: Sequence[int]) -> None:
    """Raise a ValueError unless there are as many widths as numbers of blocks, at least one, and all are positive."""
    if not widths or len(widths) != len(blocks) or min(*widths, *blocks) < 1:
        raise ValueError(
            f"widths (={widths}) and blocks (={blocks}) must be as many positive numbers, at least one each"
        )


def check_padding_value(padding_value: float) -> None:
    """Raise a ValueError unless ``padding_value`` is 0, +1 or -1."""
    if isinstance(padding_value, bool) or padding_value not in (0, 1, -1):
        raise ValueError(f"padding_value (={padding_value}) must be 0, +1 or -1")


def check_pixel_range(pixel_range: Sequence[float] | None) -> tuple[float, float] | None:
    """Return the two numbers of a ``pixel_range``.

    Raises:
        ValueError: it is neither None nor a number and a larger one.
    """
    if pixel_range is None:
        return None
    if len(pixel_range) != 2 or not -math.inf < pixel_range[0] < pixel_range[1] < math.inf:
        raise ValueError(f"pixel_range (={pixel_range}) must be two numbers, the lower one first")
    return float(pixel_range[0]), float(pixel_range[1])
