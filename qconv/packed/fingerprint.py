"""What a packed file says of each module of its model, so that another network with the same tensors is refused."""

import base64
import hashlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from ..activations import replaced
from ..layers import QuantizedLayer
from .tensors import joined

LETTERS = 4
"""Of the word of each module: 24 bits."""
QUANTIZERS = ("input_quantizer", "weight_quantizer", "grad_quantizer")
TRAINING = ("device", "dtype", "inplace", "momentum", "drop_prob")
"""Arguments that change nothing in evaluation."""


def fingerprint(model: nn.Module) -> str:
    """One word for each module, in the order of `nn.Module.named_modules`, of `described`."""
    return "".join(_word(name, module) for name, module in _modules(model))


def check_fingerprint(model: nn.Module, expected: str) -> None:
    """Raise a ValueError that names the first module which is another one than where ``expected`` was made."""
    modules = list(_modules(model))
    words = [expected[at : at + LETTERS] for at in range(0, len(expected), LETTERS)]
    for (name, module), word in zip(modules, words, strict=False):
        if _word(name, module) != word:
            raise ValueError(
                f"module '{name}' (here {described(module)}) is another one in the file: its class, its place or one "
                "of its arguments differs: give the network that was saved"
            )
    if len(modules) != len(words):
        raise ValueError(f"the file is of a network of {len(words)} modules, and the one here has {len(modules)}")


def described(module: nn.Module) -> str:
    """The class of a module and those arguments of its constructor that it keeps, but for defaults and training's.

    A quantized layer is its float twin; `qconv.convert` may have replaced an activation.
    """
    was = replaced(module)
    kind = module.float_type if isinstance(module, QuantizedLayer) else type(module) if was is None else was.kind
    arguments = {} if isinstance(module, _DropoutNd) else _arguments(module, kind)
    words = ", ".join(f"{name}={value}" for name, value in arguments.items())
    return f"{kind.__name__}({words})" + ("" if was is None else f", replaced by {was.choice}")


def _modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """All modules but the quantizers of layers, of which the file says more."""
    inside: set[nn.Module] = set()
    for name, module in model.named_modules():
        if isinstance(module, QuantizedLayer):
            for key in QUANTIZERS:
                quantizer = getattr(module, key, None)
                inside.update(quantizer.modules() if isinstance(quantizer, nn.Module) else ())
        if module not in inside:
            yield name, module


def _word(name: str, module: nn.Module) -> str:
    digest = hashlib.blake2b(joined(name, f" {described(module)}").encode(), digest_size=3).digest()
    return base64.b64encode(digest).decode()


def _arguments(module: nn.Module, kind: type[nn.Module]) -> dict[str, str]:
    found = {}
    for name, parameter in inspect.signature(kind.__init__).parameters.items():
        if name in TRAINING or name in module._modules:
            continue
        if name in module._parameters or name in module._buffers:
            value: Any = getattr(module, name) is not None
        elif name in vars(module):
            value = vars(module)[name]
        else:
            continue
        if (text := _plain(value)) != _plain(parameter.default):
            found[name] = text
    return found


def _plain(value: Any) -> str:
    """Text that is the same in every process."""
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"({', '.join(map(_plain, value))})"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_plain(key)}: {_plain(each)}' for key, each in value.items())}}}"
    if isinstance(value, Tensor):
        return f"tensor{tuple(value.shape)}"
    if isinstance(value, type | Callable) and hasattr(value, "__qualname__"):
        return value.__qualname__
    return type(value).__name__
