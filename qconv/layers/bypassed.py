"""Layers that a forward never calls although it computes with their weights: their quantizers have no effect."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from ..ground.checks import in_a_line
from .observed_run import trial


class Watch(TorchDispatchMode):
    """While it is active, records which layers of a model are called, and whose weights an operator reads.

    Attributes:
        called: the layers that were called.
        read: the layers whose weight an operator has read, except weights that several modules hold.
    """

    def __init__(self, model: nn.Module, layers: Iterable[nn.Module]) -> None:
        super().__init__()
        self.called: set[nn.Module] = set()
        self.read: set[nn.Module] = set()
        self._layers = list(dict.fromkeys(layers))
        self._handles: list[RemovableHandle] = []
        holders = Counter(parameter for module in model.modules() for parameter in module.parameters(recurse=False))
        weights = {layer: layer._parameters.get("weight") for layer in self._layers}
        self._owners: dict[Any, nn.Module] = {
            weight.untyped_storage(): layer
            for layer, weight in weights.items()
            if weight is not None and weight.device.type != "meta" and holders[weight] == 1
        }

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let Dynamo compile functions that a forward calls; what they read is not seen."""
        return True

    @property
    def bypassed(self) -> list[nn.Module]:
        """The layers that were read but not called."""
        return [layer for layer in self._layers if layer in self.read and layer not in self.called]

    def __enter__(self) -> "Watch":
        self._handles = [layer.register_forward_pre_hook(self._call) for layer in self._layers]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        for handle in self._handles:
            handle.remove()
        super().__exit__(*error)

    def _call(self, layer: nn.Module, args: Any) -> None:
        self.called.add(layer)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        if not func.is_view:
            for leaf in tree_leaves((args, kwargs)):
                if type(leaf) in (Tensor, nn.Parameter) and torch._C._has_storage(leaf):  # not what oneDNN has packed
                    owner = self._owners.get(leaf.untyped_storage())
                    if owner is not None:
                        self.read.add(owner)
        return func(*args, **(kwargs or {}))


def run(model: nn.Module, layers: Iterable[nn.Module], example: Any) -> Watch:
    """Run `Watch` in one forward in evaluation, without gradients; modes and random state are restored.

    ``example`` is the model's input, a tuple of inputs, or a mapping by name.

    Raises:
        TypeError: the model can't take ``example``, which is neither a tensor, nor a tuple, nor a dictionary.
    """
    with trial(model, warns=True), Watch(model, layers) as watch:
        if isinstance(example, dict):
            model(**example)
        elif isinstance(example, tuple):
            model(*example)
        else:
            try:
                model(example)
            except (TypeError, AttributeError) as error:  # a list of tensors may be one input
                if isinstance(example, Tensor):
                    raise
                raise TypeError(
                    f"example (={in_a_line(example)}) must be an input that the model takes, such as a tensor, a tuple "
                    f"of its inputs, or a dictionary of them: {error}"
                ) from error
    return watch


def has_own_forward(module: nn.Module) -> bool:
    """Whether a call runs a forward that was set on the module itself, not the one of its class."""
    return "forward" in vars(module)


def is_own_hook(hook: Any) -> bool:
    """Whether a hook is qconv's, a function, method or object that changes no values."""
    return str(getattr(getattr(hook, "__self__", hook), "__module__", "")).startswith("qconv.")


def parent_of(model: nn.Module, name: str) -> str:
    """Return the class name of the parent of the module of this name."""
    return type(model.get_submodule(name.rpartition(".")[0])).__name__
