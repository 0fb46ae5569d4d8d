"""Schemes: which quantizer a layer puts on its input, its weight and its output gradient.

A scheme is plain data, and a published one is a plain function of `qconv.methods`. Write your own by calling `Scheme`
with your quantizers.
"""

from . import methods
from .methods import *  # noqa: F403  # a method is imported by one line, in methods/__init__.py
from .scheme import Factory as Factory, Scheme as Scheme, identity as identity

_MADE = [name for name, value in vars(methods).items() if getattr(value, "__annotations__", {}).get("return") is Scheme]
__all__ = ["Scheme", *sorted(["identity", *_MADE])]  # pyright: ignore[reportUnsupportedDunderAll]


def __dir__() -> list[str]:
    return __all__
