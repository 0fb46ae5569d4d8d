"""How far rounding takes the numbers of a network in float32: each operation is followed in float64 beside it."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from .rounding_rules import Call

SURE = 8  # errors: no float is further from its exact value
TINY = 1e-37  # near the smallest normal float32: what lies below may become 0


class Rounded(NamedTuple):
    """What a tensor is in exact arithmetic, and the error with which float32 gives it; both in float64."""

    exact: Tensor
    error: Tensor


class Rounding(TorchDispatchMode):
    """Follows what runs under it: `of` gives the exact value of each floating tensor, and its error.

    The error is estimated from above: a few standard deviations of what float32 gives, whatever the order of its sums
    and whether batch norm is folded. `rounding_rules` has the formulas. It needs ``torch.no_grad()``.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would load its compiler, which takes seconds, to keep it from compiling what follows

    def __init__(self) -> None:
        super().__init__()
        self._followed: Any = WeakTensorKeyDictionary()
        self._paused = 0

    def of(self, tensor: Tensor) -> Rounded:
        """The exact value of a tensor, and its error; what was not computed here is exact."""
        found = self._followed.get(tensor)
        if found is not None:
            return found
        exact = tensor.detach().double()
        return Rounded(exact, torch.zeros_like(exact))

    def set(self, tensor: Tensor, rounded: Rounded) -> None:
        """Say what a tensor is."""
        self._followed[tensor] = Rounded(*(laid_out(part, tensor) for part in rounded))

    def pause(self) -> None:
        """Follow nothing until `resume` has been called as often."""
        self._paused += 1

    def resume(self) -> None:
        """Follow again."""
        self._paused -= 1

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = {} if kwargs is None else kwargs
        if self._paused:
            return func(*args, **kwargs)
        leaves, spec = tree_flatten((args, kwargs))
        known = {index: self.of(leaf) for index, leaf in enumerate(leaves) if _is_float(leaf)}
        output = func(*args, **kwargs)  # after `known`: it may overwrite its arguments
        outputs = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        if not any(_is_float(leaf) for leaf in outputs):
            return output
        exact, errors = Call(func, leaves, spec, known).rounded(outputs)
        for index, leaf in enumerate(outputs):
            if not _is_float(leaf):
                continue
            before = self._followed.get(leaf)
            is_in_place = func._schema.is_mutable and torch.Tag.inplace_view not in func.tags
            if is_in_place and before is not None:
                before.exact.copy_(exact[index])  # in place: views of it change, too
                before.error.copy_(errors[index])
            elif func.is_view:
                self._followed[leaf] = Rounded(exact[index], errors[index])
            else:
                self.set(leaf, Rounded(exact[index], errors[index]))
        return output


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def laid_out(part: Tensor, like: Tensor) -> Tensor:
    """With the strides of `like`, so that what is a view of the one is a view of the other."""
    if part.stride() == like.stride():
        return part
    return torch.empty_like(like, dtype=part.dtype).copy_(part)


def difference(got: Tensor, wanted: Tensor) -> Tensor:
    """How far numbers are from what they should be: 0 where both are NaN, inf where one is, or has another shape."""
    if got.shape != wanted.shape:
        return torch.full_like(wanted, torch.inf, dtype=torch.float64)
    got, wanted = got.double(), wanted.double()
    is_same = (got == wanted) | (got.isnan() & wanted.isnan())
    return torch.where(is_same, 0.0, (got - wanted).abs()).nan_to_num(torch.inf, torch.inf)
