"""Making subclasses of the classes of others, who may keep account of theirs."""

from collections.abc import Mapping
from typing import Any

from torch import nn


class _Quiet(nn.Module):
    """Goes before a class whose ``__init_subclass__`` is not to run."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        pass


def subclass_of(kind: type[nn.Module], name: str, attributes: Mapping[str, Any]) -> type[nn.Module]:
    """Return a subclass of ``kind`` of which its ``__init_subclass__`` hears nothing, where Python can exchange bases.

    It might put the subclass in a registry in place of ``kind``, or want arguments that only its author knows.
    """
    made = type(name, (_Quiet, kind), dict(attributes))
    try:
        made.__bases__ = (kind,)
    except TypeError:  # instances of a class that begins with abc.ABC or Generic are laid out otherwise
        return type(name, (kind,), dict(attributes))
    return made
