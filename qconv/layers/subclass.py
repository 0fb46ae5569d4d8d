"""Subclasses of other packages' classes, which may keep account of their subclasses."""

from collections.abc import Mapping
from typing import Any

from torch import nn


class _Quiet(nn.Module):
    """Stands before a class to suppress its ``__init_subclass__``."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        pass


def subclass_of(kind: type[nn.Module], name: str, attributes: Mapping[str, Any]) -> type[nn.Module]:
    """Return a subclass of ``kind`` without a call of its ``__init_subclass__``, if Python can exchange bases.

    It might put the subclass in a registry in place of ``kind``, or want arguments that only its author knows.
    """
    made = type(name, (_Quiet, kind), dict(attributes))
    try:
        made.__bases__ = (kind,)
    except TypeError:  # instances of a class that begins with abc.ABC or Generic are laid out otherwise
        return type(name, (kind,), dict(attributes))
    return made
