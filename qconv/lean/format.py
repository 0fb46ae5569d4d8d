"""Conversion of a lean model's images to channels_last, its kernels' format, if the forward accepts it.

Its modules keep the format of their input, as their twins do. A forward that calls ``x.view`` does not accept it.
"""

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from ..function.recipes import is_recorded, runs_as_written
from ..layers.copies import copied
from ..layers.observed_run import as_written, random_state_kept, without_warnings
from ..quantizers.form import is_like_channels_last

_REFUSED = (RuntimeError, ValueError, TypeError, IndexError, AssertionError)


class _Images:
    """Hook that makes images channels_last before recorded forwards."""

    def __init__(self, takes: bool | None = None) -> None:
        self.takes = takes

    def before(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run before the forward."""
        if not is_recorded() or not any(map(_is_other, tree_leaves((args, kwargs)))):
            return None
        if self.takes is None and runs_as_written():
            self.takes = takes_channels_last(model, *args, **kwargs)
        return (_in_channels_last(args), _in_channels_last(kwargs)) if self.takes else None


def choose_format(model: nn.Module, takes: bool | None = None) -> None:
    """Compute with channels_last images; ``takes``: whether the model accepts them, if known."""
    keep_format(model)
    model.register_forward_pre_hook(_Images(takes).before, prepend=True, with_kwargs=True)


def keep_format(module: nn.Module) -> None:
    """Undo `choose_format`."""
    hooks = module._forward_pre_hooks
    for key in [key for key, hook in hooks.items() if isinstance(getattr(hook, "__self__", None), _Images)]:
        del hooks[key]
        module._forward_pre_hooks_with_kwargs.pop(key, None)


def takes_channels_last(model: nn.Module, *args: Any, **kwargs: Any) -> bool:
    """Whether the model runs on channels_last images and returns no images, which would then have this format.

    A copy runs, in the model's modes. False if the model can't be copied, or the copy refuses.
    """
    try:
        with as_written(), random_state_kept(model), without_warnings(), warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            copy = copied(model)
            output = copy(*_in_channels_last(args), **_in_channels_last(kwargs))
    except _REFUSED:
        return False
    return not any(map(_is_image, tree_leaves(output)))


def _in_channels_last(arguments: Any) -> Any:
    # A copy, for images of one channel have both formats, but strides of one.
    return tree_map(lambda x: x.clone(memory_format=torch.channels_last) if _is_other(x) else x, arguments)


def _is_other(x: Any) -> bool:
    """Whether ``x`` holds images in another format."""
    return _is_image(x) and x.is_floating_point() and not is_like_channels_last(x.shape, x.stride())


def _is_image(x: Any) -> bool:
    return isinstance(x, Tensor) and x.ndim == 4
