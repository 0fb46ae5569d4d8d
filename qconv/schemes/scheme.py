"""What a scheme is: which quantizer a layer puts on its input, its weight and its output gradient."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch

from ..quantizers import Identity, Quantizer
from ..quantizers.numbers import check_flags

Factory = Callable[[], Quantizer]


@dataclass(frozen=True)
class Scheme:
    """What a quantized layer is made of. Every layer calls the factories for quantizers of its own.

    Factories are classes or `functools.partial` objects rather than lambdas, so that a layer can be pickled. Each is
    called once here, so that what can't be made or combined is told at once; no random numbers are used up.

    Attributes:
        name: how the scheme is written, for tables and messages.
        input: makes the quantizer of the input.
        weight: makes the quantizer of the weight.
        grad: makes the quantizer of the output's gradient; None leaves the gradient as it is.
        backward_weight: the weight at which the gradient of the input is taken: ``"quantized"`` as published, or
            ``"float"``, the latent one.
        padding_value: what zero-padding convolutions pad the quantized input with: 0, or +1 or -1 where the input is
            made of these.
        scale_map: multiply the output by XNOR-Net's map K of input magnitudes, where the input's quantizer leaves only
            signs.

    Raises:
        ValueError: ``backward_weight`` or ``padding_value`` is none of the values above; a quantizer in a place for
            which it isn't (`Quantizer.roles`); ``padding_value`` or ``scale_map`` with an input that isn't ±1;
            ``"float"`` with a weight that learned tensors replace.
        TypeError: a quantizer in place of what makes one, what makes something else, or a ``scale_map`` that is no
            bool.
    """

    name: str
    input: Factory = Identity
    weight: Factory = Identity
    grad: Factory | None = None
    backward_weight: Literal["quantized", "float"] = "quantized"
    padding_value: int = 0
    scale_map: bool = False

    def __post_init__(self) -> None:
        if self.backward_weight not in ("quantized", "float"):
            raise ValueError(f"backward_weight (={self.backward_weight!r}) must be 'quantized' or 'float'")
        check_padding_value(self.padding_value)
        check_flags(scale_map=self.scale_map)
        # Streams draw a key on the CPU, which is thrown away with what is made here.
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            input, weight = _made("input", self.input), _made("weight", self.weight)
            if self.grad is not None:
                _made("grad", self.grad)
        if self.backward_weight == "float" and weight.replaces_weight:
            raise ValueError(
                f"backward_weight (='float') must be 'quantized' with {type(weight).__name__}: "
                "it learns other tensors in place of the float weight"
            )
        signs = any(part.signs for part in input.modules() if isinstance(part, Quantizer))  # of some stage
        if self.padding_value != 0 and not signs:
            raise ValueError(f"padding_value (={self.padding_value}) must be 0: {input} doesn't make the input ±1")
        if self.scale_map and not signs:
            raise ValueError(f"scale_map (=True) needs an input that is only signs: {input} keeps magnitudes itself")

    def with_grad(self, grad: Factory | None) -> "Scheme":
        """This scheme with another quantizer of the output's gradient, or with none.

        Raises:
            TypeError: ``grad`` makes no quantizer, or is one.

        Example:
            >>> qconv.schemes.bnn().with_grad(qconv.quantizers.DoReFaGradient).name
            'bnn() + grad DoReFaGradient(bits=6)'
        """
        plain, _, _ = self.name.partition(" + grad ")
        if grad is None:
            return replace(self, name=plain, grad=None)
        if not callable(grad) or isinstance(grad, Quantizer):
            raise TypeError(
                f"grad_quantizer (={grad}) must make a quantizer: give a class or a functools.partial of one"
            )
        with torch.random.fork_rng(devices=[]):  # its key is drawn, and thrown away with it
            made = grad()
        if not isinstance(made, Quantizer):
            raise TypeError(f"grad_quantizer (={grad}) must make a quantizer, not {type(made).__name__}")
        return replace(self, name=f"{plain} + grad {made}", grad=grad)

    def __str__(self) -> str:
        return self.name


def _made(role: str, factory: Factory) -> Quantizer:
    """What the factory makes, if it is a quantizer for ``role``."""
    if isinstance(factory, Quantizer):
        raise TypeError(f"{role} (={factory}) must make a quantizer, not be one: give the class or a partial")
    made = factory() if callable(factory) else factory
    if not isinstance(made, Quantizer):
        raise TypeError(f"{role} (={factory}) must make a quantizer, not {type(made).__name__}")
    if role not in made.roles:
        raise ValueError(f"{role} (={made}) must make a quantizer for {role}, not one for {' or '.join(made.roles)}")
    return made


def check_padding_value(padding_value: float) -> None:
    """Raise a ValueError unless ``padding_value`` is 0, +1 or -1."""
    if padding_value not in (0, 1, -1):
        raise ValueError(f"padding_value (={padding_value}) must be 0, +1 or -1")


def identity() -> Scheme:
    """No quantization: the layer computes what its ``torch.nn`` twin computes."""
    return Scheme("identity()")


def written(method: str, **arguments: tuple[object, object]) -> str:
    """``method(argument=value, …)`` with the arguments that differ from their default."""
    given = (f"{key}={value}" for key, (value, default) in arguments.items() if value != default)
    return f"{method}({', '.join(given)})"
