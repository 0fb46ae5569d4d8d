"""Making a model lean, and undoing it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from torch import nn
from torch.nn.utils import parametrize

from ..function.kept_input import Lean
from ..ground.checks import check_flags, check_module
from ..layers import QuantizedLayer
from ..layers.computed import with_base
from . import activation, norm
from .format import choose_format, keep_format
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
_PLAIN = {kind: twin for twin, kind in (*_LEAN.items(), (nn.Conv2d, LeanConv2d))}


def lean(model: Model, on: bool = True, *, exact: bool = False) -> Model:
    """Make a model with quantized layers store bits instead of floats for its backward.

    A layer keeps codes of its input (1, 2, 4 or 8 bits, as its levels need), and where the gradient passes. If its
    gradient needs the input itself, the input is recomputed. A batch norm after it keeps its statistics, and recomputes
    its input from the codes, bit for bit. An activation keeps a bit for each element. Layers are matched while the
    model runs; a tensor that is changed in place between two layers is kept as a float.

    Parameters, state dict and the hooks of others stay as they are. By default gradients of layers of signs are sums in
    float32 in another order, looked up by bits; so are the outputs of binary weights and float inputs, and sums of
    8-bit codes are exact, not rounded. All other numbers of the forward stay as they are. An input that a gradient
    needs may be computed again as a difference, with rounding errors: in bfloat16 of 1 to 3 % of its largest value.

    Images keep their memory format from layer to layer. Steps are fastest in channels_last, in which torch's own batch
    norms and poolings sum in another order, too. So the first forward in training tries a copy of the model on such
    images. If this succeeds and returns no images, a hook makes the images of every such forward channels_last. A
    forward that calls ``x.view`` on them fails: use ``x.reshape``.

    ``DistributedDataParallel`` wraps a lean model like any other. ``fully_shard`` must hold a layer and the batch norm
    after it in one module, because the batch norm reads the layer's weight: if that is freed, the backward raises.

    Args:
        model: any module; it is changed in place.
        on: False undoes it.
        exact: whether all gradients must equal, bit for bit, the gradients of the model that is not lean, with the same
            operators and memory formats. It saves as much memory, but less time.

    Returns:
        The model.

    Raises:
        TypeError: ``model`` is not a module, ``on`` or ``exact`` not a bool.

    Example:
        >>> model = qconv.convert(nn.Sequential(nn.Conv2d(64, 64, 3), nn.BatchNorm2d(64)), qconv.schemes.bnn(), skip=())
        >>> type(qconv.lean(model)[1]).__name__
        'LeanBatchNorm2d'
    """
    check_module(model)
    check_flags(on=on, exact=exact)
    if on:
        from ..kernels import flops as _registered  # noqa: F401  # not before: it imports Triton

    for module in model.modules():
        keep_format(module)
        _undo(module)
        if on:
            _make_lean(module, "exact" if exact else "fast")
    if on and not exact:
        choose_format(model)
    return model


@contextmanager
def while_not_lean(model: nn.Module, *, swaps: bool = True) -> Iterator[None]:
    """Context manager: undo leanness while layers are swapped, so that every module has its plain class.

    Afterwards each module is as lean as before, and a new quantized layer is as lean as the others; without `swaps`
    there are no new layers.
    """
    modes: dict[nn.Module, Lean] = {module: module.__dict__["lean"] for module in model.modules() if is_lean(module)}
    for module in model.modules():
        _undo(module)
    try:
        yield
    finally:
        common: Lean | None = next(iter(modes.values()), None)
        for module in model.modules():
            mode = modes.get(module)
            if mode is None and swaps and isinstance(module, QuantizedLayer):
                mode = common
            if mode is not None:
                _make_lean(module, mode)


def is_lean(module: nn.Module) -> bool:
    """Whether `lean` has made this module lean, not counting its children."""
    return isinstance(module, (QuantizedLayer, *_PLAIN)) and "lean" in module.__dict__


def is_subclass(module: nn.Module) -> bool:
    """Whether the module is of a subclass of a class that `lean` replaces; such modules stay as they are."""
    return isinstance(module, tuple(_LEAN)) and type(module) not in (*_LEAN, *_PLAIN) and not is_lean(module)


def _undo(module: nn.Module) -> None:
    if not is_lean(module):
        return
    del module.__dict__["lean"]
    if parametrize.is_parametrized(module):  # its class is one of its own, over the one that it had
        of = next((kind for kind in type(module).__mro__ if kind in _PLAIN), None)
        if of is not None:
            module.__class__ = with_base(module, _PLAIN[of])
    elif type(module) in _PLAIN:
        module.__class__ = _PLAIN[type(module)]


def _make_lean(module: nn.Module, mode: Lean) -> None:
    if type(module) in _LEAN:
        module.__class__ = _LEAN[type(module)]
    elif type(module) is nn.Conv2d and module.in_channels <= CHANNELS:
        module.__class__ = LeanConv2d
    elif not isinstance(module, QuantizedLayer):
        return
    module.__dict__["lean"] = mode
