"""Latent weights kept in the range of their quantizers after each optimizer step."""

from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from .layers import QuantizedLayer


def clip_latent_weights(model: nn.Module) -> None:
    """Clamp the latent weights of all quantized layers, in place: BNN and BWN to [-1, 1], DeepShift to its powers.

    Call it after ``optimizer.step()``, or let `clip_after_step` do so.
    """
    for module in model.modules():
        if isinstance(module, QuantizedLayer):
            module.clip_()


def clip_after_step(optimizer: Optimizer, model: nn.Module) -> RemovableHandle:
    """Make every ``optimizer.step()`` end with `clip_latent_weights`; ``handle.remove()`` undoes it.

    Works in a hand-written loop, under Lightning and with a gradient scaler, which all call ``step``.
    """

    def after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        clip_latent_weights(model)

    return optimizer.register_step_post_hook(after_step)
