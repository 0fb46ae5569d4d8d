"""Making a model lean, and undoing it."""

from typing import Any, TypeVar

from torch import nn

from ..checks import check_flags
from ..layers import QuantizedLayer
from . import activation, norm
from .pool import LeanMaxPool2d
from .stem import CHANNELS, LeanConv2d

Model = TypeVar("Model", bound=nn.Module)

_LEAN: dict[type[nn.Module], type[nn.Module]] = {
    kind.float_type: kind
    for kind in (
        *(norm.LeanBatchNorm1d, norm.LeanBatchNorm2d, norm.LeanBatchNorm3d),
        LeanMaxPool2d,
        *(activation.LeanReLU, activation.LeanReLU6, activation.LeanHardtanh),
        *(activation.LeanPReLU, activation.LeanLeakyReLU, activation.LeanRPReLU, activation.LeanMaxout),
    )
}


def lean(model: Model, on: bool = True, *, exact: bool = False) -> Model:
    """Make a model with quantized layers keep less for its backward: bits where it kept floats.

    A layer keeps codes of its input, of 1, 2, 4 or 8 bits as its quantizer has levels, and where its gradient passes.
    If its gradient needs the input itself, this is computed again as well. A batch norm behind it keeps its statistics,
    and computes its input again from the codes, bit for bit. An activation keeps a bit for each element.
    Layers find each other while the model runs; what has been changed in place in between is kept as a float.

    Parameters, state dict, hooks and the numbers of the forward stay as they are. By default gradients of layers of
    signs are sums in float32 in another order, looked up by bits, and pictures between layers are channels_last.

    Args:
        model: any module; it is changed in place.
        on: False undoes it.
        exact: whether all gradients shall be equal bit for bit to those of the model that is not lean, with the same
            operators and memory formats. It saves as much memory, but less time.

    Returns:
        The model.

    Raises:
        TypeError: ``on`` or ``exact`` is not a bool.

    Example:
        >>> model = qconv.convert(nn.Sequential(nn.Conv2d(64, 64, 3), nn.BatchNorm2d(64)), qconv.schemes.bnn(), skip=())
        >>> type(qconv.lean(model)[1]).__name__
        'LeanBatchNorm2d'
    """
    check_flags(on=on, exact=exact)
    from ..kernels import flops as _registered  # noqa: F401  # not before: it imports Triton

    for module in model.modules():
        _undo(module)
        if on:
            _make_lean(module, exact)
    return model


def _undo(module: nn.Module) -> None:
    module.__dict__.pop("lean", None)
    kind: Any = type(module)
    if kind is LeanConv2d or kind in _LEAN.values():
        module.__class__ = kind.float_type


def _make_lean(module: nn.Module, exact: bool) -> None:
    if type(module) in _LEAN:
        module.__class__ = _LEAN[type(module)]
    elif type(module) is nn.Conv2d and module.in_channels <= CHANNELS:
        module.__class__ = LeanConv2d
    elif not isinstance(module, QuantizedLayer):
        return
    module.__dict__["lean"] = "exact" if exact else "fast"
