"""Short names for screens and figures: calls without the paths of modules, schemes without what other columns say."""

import re
from collections.abc import Callable, Mapping
from typing import Any

HIDDEN = ("_target_", "_partial_", "_convert_", "_recursive_", "seed")
BITS = re.compile(r"\b(weight_bits|input_bits)=[^,()]+(, )?")


def short_call(node: Any, default: Callable[[str, str], Any] | None = None) -> str:
    """Write a config node as a call: ``small_cnn(width=48)``, without its module, nulls and the seed of the run.

    A node without `_target_` is written as it is. ``default`` gives that of a function's argument, by their names.
    """
    if not isinstance(node, Mapping) or "_target_" not in node:
        return "none" if node is None or node == {} else str(node)
    target = str(node["_target_"])
    given = ((key, value) for key, value in node.items() if key not in HIDDEN and value is not None)
    shown = [(key, value) for key, value in given if default is None or value != default(target, str(key))]
    name = target.rpartition(".")[2].removesuffix("DataModule")
    arguments = ", ".join(f"{key}={_short_value(value, default)}" for key, value in shown)
    return f"{name}({arguments})" if arguments else name


def short_scheme(name: str) -> str:
    """Shorten a scheme's name: ``lsq(weight_bits=4, input_bits=4)`` to ``lsq``, for bits have a column of their own."""
    short = BITS.sub("", name).replace(", )", ")")
    return short.replace("()", "")


def _short_value(value: Any, default: Callable[[str, str], Any] | None) -> str:
    if isinstance(value, Mapping):
        return short_call(value, default)
    if isinstance(value, list | tuple):
        return f"[{', '.join(_short_value(each, default) for each in value)}]"
    return str(value)
