"""Layers that a forward never calls although it computes with their weights, so their quantizers have no effect."""

import warnings
from collections import Counter
from collections.abc import Iterable
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Proxy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from ..checks import in_a_line
from . import QuantizedLayer
from .negative import tell_of
from .trial import trial

LISTED = 8
"""The number of layers that a message names."""


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

    Args:
        model: any module.
        layers: layers of the model.
        example: its input, a tuple of inputs, or a mapping by name.

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


class FirstForwards:
    """Watches a model's first forward in training and its first one in evaluation, then removes itself.

    A warning names layers that are bypassed there, and they are marked, so that nothing is shipped with them. In
    training, one message tells of negative inputs (`negative.tell_of`). Forwards
    that are traced, compiled or have compiled parts are not watched.
    """

    def __init__(self) -> None:
        self.left = {True, False}
        self.watch: Watch | None = None
        self.thread = 0  # of the watched forward: others may run at the same time

    def before(self, model: nn.Module, args: tuple[Any, ...]) -> None:
        """The hook before the forward."""
        if (
            torch.compiler.is_compiling()
            or torch._C._get_tracing_state() is not None
            or torch._C._functorch.peek_interpreter_stack() is not None  # pyright: ignore  # no storage there
            or any(isinstance(argument, Proxy) for argument in args)
        ):
            return
        if self.watch is not None or model.training not in self.left or getattr(model, "_is_replica", False):
            return
        self.left = self.left - {model.training}
        if any(map(is_compiled, model.modules())):  # Dynamo compiles nothing under a dispatch mode
            if not self.left:
                forget(model)
            return
        self.thread = get_ident()
        self.watch = Watch(model, [module for module in model.modules() if isinstance(module, QuantizedLayer)])
        self.watch.__enter__()

    def after(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """The hook after the forward, called even if it fails."""
        if torch.compiler.is_compiling() or self.watch is None or self.thread != get_ident():
            return
        watch, self.watch = self.watch, None
        watch.__exit__(None, None, None)
        if not self.left:
            forget(model)
        if watch.bypassed:
            mark(model, watch.bypassed)
        if model.training:
            tell_of(model)


def is_compiled(module: nn.Module) -> bool:
    """Whether `torch.compile` made a module from it, or compiled its call or forward."""
    forward = getattr(module, "forward", None)
    return getattr(module, "_compiled_call_impl", None) is not None or hasattr(forward, "_torchdynamo_orig_callable")


def watch_first_forwards(model: nn.Module) -> None:
    """Attach `FirstForwards` anew; a model that is a single layer needs none."""
    forget(model)
    if isinstance(model, QuantizedLayer):
        return
    first = FirstForwards()
    model.register_forward_pre_hook(first.before)
    model.register_forward_hook(first.after, always_call=True)


def forget(model: nn.Module) -> None:
    """Remove `FirstForwards` from a model and its parts."""
    for module in model.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key in [key for key, hook in hooks.items() if isinstance(_owner_of(hook), FirstForwards)]:
                hooks.pop(key, None)
                module._forward_hooks_always_called.pop(key, None)


def has_own_forward(module: nn.Module) -> bool:
    """Whether a call runs a forward that was put on the module itself, so that its class does not tell what it does."""
    return "forward" in vars(module)


def is_own_hook(hook: Any) -> bool:
    """Whether a hook is one of qconv's, which change no values: a function or a method."""
    return str(getattr(_owner_of(hook), "__module__", "")).startswith("qconv.")


def _owner_of(hook: Any) -> Any:
    return getattr(hook, "__self__", hook)


def mark(model: nn.Module, layers: Iterable[nn.Module]) -> None:
    """Warn about bypassed layers by their names, and mark them."""
    wrong = set(layers)
    names = [name for name, module in model.named_modules() if module in wrong]
    for layer in wrong:
        layer.__dict__["bypassed_in"] = layer.__dict__.get("bypassed_in", frozenset()) | {model.training}
    listed = ", ".join(f"'{name}' in {parent_of(model, name)}" for name in names[:LISTED])
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    warnings.warn(
        f"{type(model).__name__} computes with the float weights of quantized layers that it never calls "
        f"({len(names)}): {listed}{more}. Convert the float model with these in skip, or with example=input, which "
        "leaves them float",
        stacklevel=2,
    )


def parent_of(model: nn.Module, name: str) -> str:
    """The class of the module that holds the module of this name."""
    return type(model.get_submodule(name.rpartition(".")[0])).__name__
