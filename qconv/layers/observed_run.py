"""Running a model to observe it, and restoring it afterwards."""

import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar

import torch
from torch import nn

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
