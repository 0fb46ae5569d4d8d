"""The fingerprint of each module in a packed file, so that another network with the same tensors is refused."""

import base64
import hashlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, fx, nn
from torch.nn.modules.dropout import _DropoutNd

from ..convert.replacements import replaced
from ..layers import QuantizedLayer
from ..layers.naming import QUANTIZERS
from ..lean import plain_type
from .tensors import joined

LETTERS = 4
"""Bytes of the hash of each module: 24 bits."""
TRAINING = (
    *("device", "dtype", "inplace", "momentum", "drop_prob"),
    *("dropout", "attention_dropout", "stochastic_depth_prob", "drop_rate", "attn_drop_rate", "drop_path_rate"),
)
"""Arguments that have no effect in evaluation."""
IDLE = ("StochasticDepth", "DropPath", "DropBlock2d", "DropBlock3d")
"""Classes of torchvision and timm that do nothing in evaluation, like dropout."""
NORMS = "BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "SyncBatchNorm"
"""Interchangeable batch norms: training on several devices replaces them by SyncBatchNorm."""
KNOWN = ("torch", "torchvision", "timm", "qconv")
"""Packages with classes that store the arguments that they compute with; other classes may store anything."""


def fingerprint(model: nn.Module) -> str:
    """Return one hash for each module of `described`, in the order of `nn.Module.named_modules`."""
    return "".join(_word(name, module) for name, module in _modules(model))


def check_fingerprint(model: nn.Module, expected: str) -> None:
    """Raise a ValueError that names the first module that differs from the network of ``expected``."""
    modules = list(_modules(model))
    words = [expected[at : at + LETTERS] for at in range(0, len(expected), LETTERS)]
    for (name, module), word in zip(modules, words, strict=False):
        if word not in _words(name, module):
            raise ValueError(
                f"module '{name}' (here {described(module)}) differs in the file, by its class, its place or an "
                "argument: pass the network that was saved"
            )
    if len(modules) != len(words):
        raise ValueError(f"the network of the file has {len(words)} modules, and the one here has {len(modules)}")


def described(module: nn.Module) -> str:
    """The class of a module and the constructor arguments that it stores, except defaults and those for training.

    A quantized layer counts as its float twin; `qconv.convert` may have replaced an activation. A class from elsewhere
    than torch, torchvision, timm or qconv has the arguments of its base class from one of these: its other attributes
    may serve anything, and the test vector shows their effect.
    """
    if isinstance(module, fx.GraphModule):  # its class has another name in each copy, and its graph is no argument
        return "GraphModule()"
    was = replaced(module)
    kind = module.float_type if isinstance(module, QuantizedLayer) else plain_type(module) if was is None else was.kind
    arguments = {} if isinstance(module, _DropoutNd) else _arguments(module, kind)
    words = ", ".join(f"{name}={value}" for name, value in arguments.items())
    return f"{kind.__name__}({words})" + ("" if was is None else f", replaced by {was.choice}")


def _modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """All modules except the quantizers of layers, which the file describes in more detail."""
    inside: set[nn.Module] = set()
    for name, module in model.named_modules():
        if isinstance(module, QuantizedLayer):
            for key in QUANTIZERS:
                quantizer = getattr(module, key, None)
                inside.update(quantizer.modules() if isinstance(quantizer, nn.Module) else ())
        if module not in inside:
            yield name, module


def _word(name: str, module: nn.Module) -> str:
    return _hash(name, described(module))


def _hash(name: str, text: str) -> str:
    digest = hashlib.blake2b(joined(name, f" {text}").encode(), digest_size=3).digest()
    return base64.b64encode(digest).decode()


def _words(name: str, module: nn.Module) -> Iterator[str]:
    """Return the accepted hashes of a module: its own, and those of equivalent batch norms."""
    text = described(module)
    yield _hash(name, text)
    kind = plain_type(module).__name__
    if kind in NORMS:  # in evaluation they compute the same
        yield from (_hash(name, text.replace(f"{kind}(", f"{other}(", 1)) for other in NORMS)


def _arguments(module: nn.Module, kind: type[nn.Module]) -> dict[str, str]:
    kind = next(parent for parent in kind.__mro__ if parent.__module__.partition(".")[0] in KNOWN)
    if kind.__name__ in IDLE:
        return {}
    texts = {}
    if issubclass(kind, nn.RNNBase):  # its classes take any arguments, and hand them on
        kind = nn.RNNBase
    for name, parameter in inspect.signature(kind.__init__).parameters.items():
        only = getattr(module, "training_only", ())  # of a quantizer that stands alone
        if name in (*only, *TRAINING) or name in module._modules:
            continue
        if name in module._parameters or name in module._buffers:
            value: Any = getattr(module, name) is not None
        elif name in vars(module):
            value = vars(module)[name]
        else:
            continue
        if (text := _plain(value)) != _plain(parameter.default):
            texts[name] = text
    return texts


def _plain(value: Any) -> str:
    """Return text that is the same in every process."""
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"({', '.join(map(_plain, value))})"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_plain(key)}: {_plain(item)}' for key, item in value.items())}}}"
    if isinstance(value, Tensor):
        return f"tensor{tuple(value.shape)}"
    if isinstance(value, type | Callable) and hasattr(value, "__qualname__"):
        return value.__qualname__
    return type(value).__name__
