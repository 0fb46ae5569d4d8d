"""The contract of quantizers (`base.Quantizer`), the parts that papers share, and the quantizers of `qconv.methods`."""

from typing import TYPE_CHECKING, Any

from .base import Codes as Codes, Quantizer as Quantizer, Whole as Whole
from .filters import filter_scale as filter_scale
from .identity import Identity as Identity
from .mixed import Mixed as Mixed
from .signs import sign as sign
from .stages import Stages as Stages
from .stochastic import Stream as Stream
from .surrogates import (
    EDE as EDE,
    ApproxSign as ApproxSign,
    Fourier as Fourier,
    HardClip as HardClip,
    Polynomial as Polynomial,
    ReSTE as ReSTE,
    Straight as Straight,
    Surrogate as Surrogate,
    SwishSign as SwishSign,
)

if TYPE_CHECKING:
    from ..methods import *  # noqa: F403


def __getattr__(name: str) -> Any:
    known = {} if name.startswith("_") else _of_methods()
    if name not in known:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return known[name]


def __dir__() -> list[str]:
    own = {name for name in globals() if name[0] != "_" and name not in ("Any", "TYPE_CHECKING")}
    return sorted(own | {*_of_methods()})


def _of_methods() -> dict[str, Any]:
    """Return the public names of `qconv.methods` other than schemes. Imported late: the methods import this package."""
    from .. import methods, schemes

    return {name: value for name, value in vars(methods).items() if callable(value) and name not in schemes.__all__}
