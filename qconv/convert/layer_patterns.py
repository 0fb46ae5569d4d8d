"""The names of a model's layers, and the words and patterns that choose among them."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn


def layer_names(model: nn.Module, quantized: Iterable[type[nn.Module]]) -> dict[nn.Module, tuple[str, ...]]:
    """Return every layer of a convertible kind, subclasses included, with all its names in the model."""
    names: dict[nn.Module, tuple[str, ...]] = {}
    kinds = tuple(quantized)
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, kinds):
            names[module] = (*names.get(module, ()), name)
    return names


def first_and_last(names: Mapping[nn.Module, Any], words: Sequence[str]) -> dict[nn.Module, str]:
    """Return the first and the last layer with their words, "first" and "last", of those that are given."""
    parts = {part for layer in names for part in layer.modules() if part is not layer}  # of a deformable layer
    layers = [layer for layer in names if layer not in parts]
    ends = {"first": layers[0], "last": layers[-1]}
    return {ends[word]: word for word in words}


def compiled_pattern(argument: str, pattern: str, names: Mapping[nn.Module, tuple[str, ...]]) -> re.Pattern[str]:
    """Return a pattern that matches a layer."""
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{argument} pattern {pattern!r} is not a regular expression: {error}") from error
    every = [name for at in names.values() for name in at]
    if not any(compiled.fullmatch(name) for name in every):
        raise ValueError(f"{argument} pattern {pattern!r} matches no layer; the layers are {', '.join(every)}")
    return compiled


def first_match(patterns: Mapping[str, re.Pattern[str]], at: tuple[str, ...]) -> str | None:
    """Return the text of the first pattern that matches one of a layer's names."""
    return next((text for text, pattern in patterns.items() if any(map(pattern.fullmatch, at))), None)
