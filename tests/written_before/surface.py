"""The public surface as plain data: `python surface.py FILE` writes what stands in a folder beside this file."""

import importlib
import inspect
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

MODULES = (
    *("qconv", "qconv.schemes", "qconv.quantizers", "qconv.layers", "qconv.grad", "qconv.grad_composed"),
    *("qconv.grad_deform", "qconv.optim", "qconv.distillation", "qconv.models", "qconv.data", "qconv.training"),
    *("qconv.training.losses", "qconv.training.schedules", "qconv.packed", "qconv.inference", "qconv.onnx"),
)


def written(value: object) -> str:
    """A default as text that says nothing of where its class stands."""
    return getattr(value, "__qualname__", None) or repr(value)


def parameters(function: Any) -> str:
    """Name, kind and default of every parameter, as in a signature without types."""
    try:
        every = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return "?"
    marks = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    shown = []
    for each in every:
        if each.kind is each.KEYWORD_ONLY and not any(text.startswith("*") for text in shown):
            shown.append("*")
        default = "" if each.default is each.empty else f"={written(each.default)}"
        shown.append(f"{marks.get(each.kind, '')}{each.name}{default}")
    return ", ".join(shown)


def found(name: str) -> ModuleType:
    """The module of that name, by attributes where it is one of another module."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        parent, _, last = name.rpartition(".")
        return getattr(importlib.import_module(parent), last)


def surface() -> dict[str, dict[str, str]]:
    """For each public module its public functions and classes, with their parameters, and public methods of classes."""
    shown: dict[str, dict[str, str]] = {}
    for name in MODULES:
        module = found(name)
        names = set(dir(module)) | set(getattr(module, "__all__", ()))
        for public in sorted(each for each in names if not each.startswith("_")):
            value = getattr(module, public)
            ours = str(getattr(value, "__module__", "")).startswith("qconv")
            if not callable(value) or not ours:
                continue
            entries = shown.setdefault(name, {})
            entries[public] = parameters(value)
            if isinstance(value, type):
                entries |= {
                    f"{public}.{key}": parameters(method)
                    for key, method in inspect.getmembers(value, inspect.isfunction)
                    if not key.startswith("_") and str(method.__module__).startswith("qconv")
                }
    return shown


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(surface(), indent=0, sort_keys=True) + "\n")
