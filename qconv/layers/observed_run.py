"""Running a model, or a copy, to observe it: batches on its device, copies that share no tensors, and restoring it."""

import copy
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from .state import State

_QUIET: ContextVar[bool] = ContextVar("quiet", default=False)


@contextmanager
def without_warnings() -> Iterator[None]:
    """Context manager: run models without warnings, when only shapes, calls or bytes are wanted."""
    token = _QUIET.set(True)
    try:
        yield
    finally:
        _QUIET.reset(token)


def is_quiet() -> bool:
    """Whether `without_warnings` is active."""
    return _QUIET.get()


@contextmanager
def trial(
    model: nn.Module, *, keep_random: bool = True, keep_state: bool = False, warns: bool = False
) -> Iterator[None]:
    """Context manager: evaluation mode without gradients; restores the modes of all modules afterwards.

    Compiled models run `as_written`.

    Args:
        model: any module.
        keep_random: restore the random state afterwards. Not if the inputs are drawn meanwhile.
        keep_state: restore its attributes and buffers, too, see `State`. Not needed for a copy.
        warns: let the forward warn; warnings of qconv's layers about evaluation are suppressed in any case.
    """
    modes = {module: module.training for module in model.modules()}
    with ExitStack() as stack:
        stack.enter_context(as_written())
        if not warns:
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
        stack.enter_context(torch.no_grad())
        stack.enter_context(without_warnings())
        if keep_random:
            stack.enter_context(random_state_kept(model))
        if keep_state:
            stack.callback(State(model).restore)
        stack.callback(set_modes, modes)
        model.eval()
        yield


@contextmanager
def as_written() -> Iterator[None]:
    """Context manager: run compiled models uncompiled, because compiled code ignores hooks."""
    with ExitStack() as stack:
        if "torch._dynamo" in sys.modules:  # without it nothing is compiled
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


@contextmanager
def random_state_kept(model: nn.Module) -> Iterator[None]:
    """Context manager: restore the random state of the CPU and of the devices of the model."""
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        for device in devices:
            if device.type not in ("cpu", "meta", "mps"):
                stack.enter_context(torch.random.fork_rng(devices=[device], device_type=device.type))
        yield


def check_not_inference(why: str) -> None:
    """Raise a RuntimeError under `torch.inference_mode`: its tensors have no gradients and count no changes."""
    if torch.is_inference_mode_enabled():
        raise RuntimeError(f"{why}: call it outside torch.inference_mode()")


def set_modes(modes: Mapping[nn.Module, bool]) -> None:
    """Restore the modes of modules, parents first, by their own `train`, which may do more than set an attribute.

    Some merge weights in evaluation, as LoRA's layers do, or run another graph, as torchvision's feature extractors.
    """
    for module, training in modes.items():
        if module.training != training:
            module.train(training)
    for module, training in modes.items():
        module.training = training


def copied(model: nn.Module) -> nn.Module:
    """Return a deep copy; results that modules hold, such as weights that are computed, are copied as plain data.

    Raises:
        TypeError: a forward that the copy would share, see `check_copies`.
    """
    check_copies(model)
    kept = [value for module in model.modules() for value in tree_leaves(vars(module)) if isinstance(value, Tensor)]
    return copy.deepcopy(model, {id(value): value.detach().clone() for value in kept if not value.is_leaf})


def check_copies(model: nn.Module) -> None:
    """Raise a TypeError if a copy of the model would compute with the original's tensors.

    That is so for a forward that was put on a module, and is a function with a module, its method or a tensor in its
    closure or its defaults, such as a lambda that calls the former forward: copying does not look into functions.
    What it reaches by other functions or by global names is not looked for.
    """
    for name, module in model.named_modules():
        if hasattr(module, "_orig_mod"):  # of torch.compile, which makes its forward anew in a copy
            continue
        if any(isinstance(getattr(held, "__self__", held), nn.Module | Tensor) for held in _held(module)):
            where = f"'{name}'" if name else "model"
            raise TypeError(
                f"{where} ({type(module).__name__}): its forward is a function that was put on the module. A copy "
                "would share it, and so compute with the original's weights: define forward in a class"
            )


def _held(module: nn.Module) -> list[Any]:
    """Return the objects in the closure and the defaults of a function that was set as a module's forward."""
    forward = vars(module).get("forward")
    while isinstance(forward, partial | MethodType):  # what these are bound to is copied
        forward = forward.func if isinstance(forward, partial) else forward.__func__
    if not isinstance(forward, FunctionType):
        return []
    held = (cell.cell_contents for cell in forward.__closure__ or () if cell != CellType())  # that is an empty one
    return [*held, *(forward.__defaults__ or ()), *(forward.__kwdefaults__ or {}).values()]


def on_device_of(model: nn.Module, batch: Any) -> Any:
    """Return a batch with its CPU tensors moved to the model's device.

    A model with parameters on several devices, or without any, gets its batch as it is: only the caller knows
    where the inputs belong.
    """
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) != 1 or devices == {torch.device("cpu")}:
        return batch
    device = devices.pop()
    if isinstance(batch, Mapping):  # of kinds that are no dict, such as those of tokenizers
        batch = dict(batch)

    def moved(tensor: Tensor) -> Tensor:
        return tensor.to(device, non_blocking=tensor.is_pinned()) if tensor.device.type == "cpu" else tensor

    return tree_map_only(Tensor, moved, batch)
