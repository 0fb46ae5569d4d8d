"""Modules that read the weights of their children directly, always or on a fast path that can be switched off."""

import sys
from collections.abc import Iterator

from torch import nn

from .base import QuantizedLayer

READERS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("torch.nn", "MultiheadAttention", ("out_proj",)),
    ("torchvision.models.swin_transformer", "ShiftedWindowAttention", ("qkv", "proj")),
)
"""Module and name of a class, and the children that it never calls, although it computes with their weights."""

FAST_PATHS: tuple[tuple[str, str, str, object], ...] = (
    ("torch.nn", "TransformerEncoderLayer", "activation_relu_or_gelu", 0),
    ("torch.nn", "TransformerEncoder", "use_nested_tensor", False),
    ("timm.models.beit", "Attention", "qkv_bias_separate", True),
    ("timm.models.eva", "EvaAttention", "qkv_bias_separate", True),
    ("timm.models.swin_transformer_v2", "WindowAttention", "qkv_bias_separate", True),
)
"""Module and name of a class, and the attribute whose value makes its forward call its children.

`nn.TransformerEncoderLayer` has one operator for the whole layer in evaluation, which is ruled out if the kind of its
activation is 0. timm's attentions call ``qkv`` if its bias is added separately. Both compute the same, up to rounding.
"""

_BEFORE = "_before_quantization"


def read_by_parents(model: nn.Module) -> dict[nn.Module, str]:
    """The layers that their parents never call, with the class name of the parent."""
    readers: dict[nn.Module, str] = {}
    for module_name, class_name, children in READERS:
        for module in _instances(model, module_name, class_name):
            for name in children:
                child = getattr(module, name, None)
                if isinstance(child, nn.Module):
                    readers[child] = type(module).__name__
    return readers


def call_children_(model: nn.Module) -> None:
    """Switch off, in place, the fast paths of modules that hold quantized layers; `undo_` switches them on."""
    for module_name, class_name, attribute, value in FAST_PATHS:
        for module in _instances(model, module_name, class_name):
            is_quantized = any(isinstance(inner, QuantizedLayer) for inner in module.modules())
            if is_quantized and _BEFORE not in module.__dict__ and hasattr(module, attribute):
                module.__dict__[_BEFORE] = (attribute, getattr(module, attribute))
                setattr(module, attribute, value)


def undo_(model: nn.Module) -> None:
    """Undo `call_children_`."""
    for module in model.modules():
        if _BEFORE in module.__dict__:
            setattr(module, *module.__dict__.pop(_BEFORE))


def _instances(model: nn.Module, module_name: str, class_name: str) -> Iterator[nn.Module]:
    """Yield the instances of a class in the model; there are none if its module was never imported."""
    kind = getattr(sys.modules.get(module_name), class_name, None)
    return (module for module in model.modules() if kind is not None and isinstance(module, kind))
