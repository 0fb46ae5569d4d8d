"""The rounding error of a float32 network: each operation is also computed in float64."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from .rounding_rules import AtenCall

SURE = 8  # errors: no float is further from its exact value
TINY = 1e-37  # near the smallest normal float32: smaller numbers may become 0


class Rounded(NamedTuple):
    """The exact value of a tensor, and the error of float32; both in float64."""

    exact: Tensor
    error: Tensor


class Rounding(TorchDispatchMode):
    """Follows operations: `of` returns the exact value and the error of each floating tensor.

    The error is an upper estimate: a few standard deviations of float32's error, in any order of sums, with batch norm
    folded or not. `rounding_rules` has the formulas. It needs ``torch.no_grad()``.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise torch loads its compiler, which takes seconds, to exempt what follows from it

    def __init__(self) -> None:
        super().__init__()
        self._followed: Any = WeakTensorKeyDictionary()
        self._terms: Any = WeakTensorKeyDictionary()
        self._paused = 0

    def of(self, tensor: Tensor) -> Rounded:
        """Return the exact value of a tensor, and its error; tensors computed elsewhere are exact."""
        known = self._followed.get(tensor)
        if known is not None:
            return known
        exact = tensor.detach().double()
        return Rounded(exact, torch.zeros_like(exact))

    def set(self, tensor: Tensor, rounded: Rounded, terms: int = 0) -> None:
        """Set the exact value and error of a tensor, each number of which is a sum of ``terms`` products of floats."""
        self._terms[tensor] = terms
        self._followed[tensor] = Rounded(*(laid_out(part, tensor) for part in rounded))

    def pause(self) -> None:
        """Stop following until `resume` has been called equally often."""
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
        output = func(*args, **kwargs)  # after `known`, since it may overwrite its arguments
        outputs = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        if not any(_is_float(leaf) for leaf in outputs):
            return output
        first = leaves[0] if leaves and isinstance(leaves[0], Tensor) else None
        call = AtenCall(func, leaves, spec, known, 0 if first is None else self._terms.get(first, 0))
        exact, errors = call.rounded(outputs)
        for index, leaf in enumerate(outputs):
            if not _is_float(leaf):
                continue
            before = self._followed.get(leaf)
            is_in_place = func._schema.is_mutable and torch.Tag.inplace_view not in func.tags
            if is_in_place:
                self._terms[leaf] = 0
            if is_in_place and before is not None:
                before.exact.copy_(exact[index])  # in place: views of it change, too
                before.error.copy_(errors[index])
            elif func.is_view:
                self._followed[leaf] = Rounded(exact[index], errors[index])
            else:
                self.set(leaf, Rounded(exact[index], errors[index]), call.terms)
        return output


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def laid_out(part: Tensor, like: Tensor) -> Tensor:
    """Copy with the strides of `like`, so that views of one are views of the other."""
    if part.stride() == like.stride():
        return part
    return torch.empty_like(like, dtype=part.dtype).copy_(part)


def difference(got: Tensor, wanted: Tensor) -> Tensor:
    """Return the differences from the exact numbers: 0 if both are NaN, inf if one is or the shapes differ."""
    if got.shape != wanted.shape:
        return torch.full_like(wanted, torch.inf, dtype=torch.float64)
    got, wanted = got.double(), wanted.double()
    is_same = (got == wanted) | (got.isnan() & wanted.isnan())
    return torch.where(is_same, 0.0, (got - wanted).abs()).nan_to_num(torch.inf, torch.inf)
