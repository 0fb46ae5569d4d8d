"""The contract of quantizers (`base.Quantizer`), the parts that papers share, and the quantizers of `qconv.methods`."""

from collections.abc import Mapping
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
    if _is_of_methods(name):
        return _methods()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    own = {name for name in globals() if name[0] != "_" and name not in ("Any", "Mapping", "TYPE_CHECKING")}
    return sorted(own | {*filter(_is_of_methods, _methods())})


def _is_of_methods(name: str) -> bool:
    """Whether it is a public name of `qconv.methods`, and no scheme."""
    from .. import schemes

    return not name.startswith("_") and callable(_methods().get(name)) and name not in schemes.__all__


def _methods() -> Mapping[str, Any]:
    from .. import methods  # late: the methods import this package

    return vars(methods)
