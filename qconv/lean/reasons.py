"""Why a layer of a lean model stores a float nevertheless."""

import re
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from ..function.recipes import has_recipe, itself
from ..layers import QuantizedLayer
from .activation import Rebuilt
from .make_lean import is_lean, is_subclass


def why_float(module: nn.Module, input: Any, output: Any) -> str:
    """Return why the call ``output = module(input)`` in a lean model stored a float of the size of ``input``.

    - "no bits of its input": there are none for the input's quantizer, for a linear layer's input that is not (N, C),
      or, with exact gradients, for one that has sides of 1 and other strides than a new tensor;
    - "input from cat": it needs its input, which this operator of autograd made, so that it can't be computed again;
    - "input has no gradient": the same, because autograd has not recorded how it was made;
    - "a subclass" of a class that `qconv.lean` replaces: its forward may differ;
    - "no lean form": `qconv.lean` replaces no such class;
    - "in evaluation", "in place", "returns indices": the module does;
    - empty: a float convolution or linear layer, a parent of other modules, or a cause that can't be told.
    """
    if not isinstance(input, Tensor) or not isinstance(output, Tensor):
        return ""
    if not is_lean(module):
        if is_subclass(module):
            return "a subclass"
        is_float = isinstance(module, (nn.Linear, _ConvNd)) or next(module.children(), None) is not None
        return "" if is_float else "no lean form"
    node: Any = output.grad_fn
    if isinstance(module, QuantizedLayer):
        keeping = getattr(node, "keeping", None)
        if keeping is None:
            return ""
        if keeping.form is None:
            return "no bits of its input"
        return _origin(input) if keeping.restore is itself else ""
    if isinstance(module, _BatchNorm):
        return "in evaluation" if not module.training else _unless_restored(node, input)
    if isinstance(module, Rebuilt):
        return "in place" if module.inplace else _unless_restored(node, input)
    return "returns indices" if getattr(module, "return_indices", False) else ""


def _unless_restored(node: Any, input: Tensor) -> str:
    return "" if hasattr(node, "restore") else _origin(input)


def _origin(input: Tensor) -> str:
    """Return the operator that made a tensor without a recipe."""
    node = input.grad_fn
    if node is None:
        return "input has no gradient"
    if has_recipe(input):  # one that was not used, for hooks were set or the tensor was changed
        return ""
    name = re.sub(r"Backward\d*$", "", node.name()).lstrip("_")
    return f"input from {re.sub(r'(?<=[a-z0-9])(?=[A-Z])', '_', name).lower()}"
