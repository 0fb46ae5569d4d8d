"""A note of which activations `qconv.convert` put before signs, saved in state dicts and compared when loading.

A ReLU before a sign, and what `qconv.convert` puts in its place, may have no tensors. Nothing else in a state dict
would then tell a model with one from a model with the other.
"""

from collections.abc import Collection

import torch
from torch import Tensor

KEY = "input_quantizer.before_sign"
"""The name of the note in state dicts, after the layer's prefix."""
ACTIVATIONS = ("identity", "hardtanh", "prelu", "leaky", "keep")
"""The activations that may stand there. Files store their order: append new ones."""


def note_of(choice: str, kinds: Collection[str]) -> Tensor:
    """Return two numbers: ``choice``, the argument of `qconv.convert`, and the set of resulting activations.

    They are float because averages of models refuse or truncate whole numbers, and always on the CPU.
    """
    marks = sum(2 ** ACTIVATIONS.index(name) for name in set(kinds))
    return torch.tensor([ACTIVATIONS.index(choice), marks], dtype=torch.float32, device="cpu")


def difference(own: Tensor, stored: object, where: str) -> str:
    """Return an error message if ``stored``, a note in a state dict, names other activations than ``own``; else ""."""
    if not isinstance(stored, Tensor) or stored.shape != own.shape:
        return f"{where}: before_sign in the checkpoint must be two numbers"
    if stored.is_meta:
        return ""
    here, there = _read(own), _read(stored)
    if there is None or here is None:
        return f"{where}: before_sign (={stored.tolist()}) in the checkpoint must be two numbers that qconv knows"
    if here[1] == there[1]:
        return ""
    remedy = (
        f"convert the model with before_sign={there[0]!r}"
        if here[0] != there[0]
        else f"both were converted with before_sign={here[0]!r}, so the networks or the versions of qconv differ"
    )
    return (
        f"{where}: the activations before its signs became {_listed(there[1])} in the checkpoint's model and "
        f"{_listed(here[1])} in this one: {remedy}"
    )


def _read(note: Tensor) -> tuple[str, int] | None:
    choice, marks = note.tolist()
    if not (-0.5 < choice < len(ACTIVATIONS) - 0.5 and 0.5 < marks < 2 ** len(ACTIVATIONS) - 0.5):  # NaN, too
        return None
    return ACTIVATIONS[round(choice)], round(marks)


def _listed(marks: int) -> str:
    return " and ".join(repr(name) for bit, name in enumerate(ACTIVATIONS) if marks >> bit & 1)
