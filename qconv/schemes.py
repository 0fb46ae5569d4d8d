"""Schemes: which quantizer a layer puts on its input, its weight and its output gradient.

A scheme is plain data and each published one a plain function. Write your own by calling `Scheme` with your quantizers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from .quantizers import FixedPoint, Identity, Quantizer, ScaledSign, ShiftPS, ShiftQ, Sign

__all__ = ["Scheme", "bnn", "bwn", "identity", "shift_ps", "shift_q", "xnor"]

Factory = Callable[[], Quantizer]


@dataclass(frozen=True)
class Scheme:
    """What a quantized layer is made of. Every layer calls the factories for quantizers of its own.

    Factories are classes or `functools.partial` objects rather than lambdas, so that a layer can be pickled.

    Attributes:
        name: how the scheme is written, for tables and messages.
        input: makes the quantizer of the input.
        weight: makes the quantizer of the weight.
        grad: makes the quantizer of the output's gradient; None leaves the gradient as it is.
        backward_weight: the weight at which the gradient of the input is taken: ``"quantized"`` as published, or
            ``"float"``, the latent one.
        padding_value: what zero-padding convolutions pad the quantized input with: 0, +1 or -1.
        scale_map: multiply the output by XNOR-Net's map K of input magnitudes.

    Raises:
        ValueError: ``backward_weight`` or ``padding_value`` is none of the values above.
        TypeError: a quantizer in place of what makes one.
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
        for name, factory in (("input", self.input), ("weight", self.weight), ("grad", self.grad)):
            if isinstance(factory, Quantizer):
                raise TypeError(f"{name} (={factory}) must make a quantizer, not be one: give the class or a partial")

    def __str__(self) -> str:
        return self.name


def check_padding_value(padding_value: float) -> None:
    """Raise a ValueError unless ``padding_value`` is 0, +1 or -1."""
    if padding_value not in (0, 1, -1):
        raise ValueError(f"padding_value (={padding_value}) must be 0, +1 or -1")


def identity() -> Scheme:
    """No quantization: the layer computes what its ``torch.nn`` twin computes."""
    return Scheme("identity()")


def bnn(padding_value: int = 0) -> Scheme:
    """BNN, W1A1: signs without a scale (arXiv:1602.02830).

    The gradient of the input passes where ``|x| <= 1``, the weight's everywhere; latent weights are clamped to [-1, 1]
    after each optimizer step (`qconv.clip_after_step`).
    """
    weight = partial(Sign, clip=None, weight_clip=1.0)
    return Scheme(_name("bnn", padding_value=(padding_value, 0)), Sign, weight, padding_value=padding_value)


def bwn(detach_scale: bool = False) -> Scheme:
    """BWN, W1A32: ``alpha_c · sign(w)`` with ``alpha_c = mean |w_c|`` (arXiv:1603.05279)."""
    return Scheme(_name("bwn", detach_scale=(detach_scale, False)), weight=partial(ScaledSign, detach_scale))


def xnor(scale_map: bool = False, detach_scale: bool = False, padding_value: int = 0) -> Scheme:
    """XNOR-Net, W1A1: the weights of `bwn`, the sign of the input (arXiv:1603.05279).

    ``scale_map`` multiplies the output by K, the mean magnitude of the input under the kernel. The paper has it, the
    authors' code and the released model do not. The input's gradient passes where ``|x| <= 1``; in the authors' code
    the interval is open.
    """
    name = _name(
        "xnor",
        scale_map=(scale_map, False),
        detach_scale=(detach_scale, False),
        padding_value=(padding_value, 0),
    )
    weight = partial(ScaledSign, detach_scale)
    return Scheme(name, Sign, weight, padding_value=padding_value, scale_map=scale_map)


def shift_q(weight_bits: int = 5, fixed_point: tuple[int, int] | None = None) -> Scheme:
    """DeepShift-Q: weights rounded to powers of two (arXiv:1905.13298).

    ``fixed_point=(integer_bits, fraction_bits)`` also puts the input in fixed point; the authors use (16, 16).
    """
    return _shift("shift_q", ShiftQ, weight_bits, fixed_point)


def shift_ps(weight_bits: int = 5, fixed_point: tuple[int, int] | None = None) -> Scheme:
    """DeepShift-PS: weights as a learned shift and a learned sign (arXiv:1905.13298).

    The authors give shift and sign no weight decay and add ``wd · ½ · Σ (2^shift)²`` to the loss; here the optimizer's
    decay acts on them unless they are put in a group of their own.

    ``fixed_point=(integer_bits, fraction_bits)`` also puts the input in fixed point; the authors use (16, 16).
    """
    return _shift("shift_ps", ShiftPS, weight_bits, fixed_point)


def _shift(
    method: str, quantizer: type[ShiftQ] | type[ShiftPS], weight_bits: int, fixed_point: tuple[int, int] | None
) -> Scheme:
    quantizer(weight_bits)  # a wrong number of bits is told here, not when the first layer is built
    name = _name(method, weight_bits=(weight_bits, None), fixed_point=(fixed_point, None))
    if fixed_point is not None and len(fixed_point) != 2:
        raise ValueError(f"fixed_point (={fixed_point}) must be (integer_bits, fraction_bits)")
    if fixed_point is None:
        return Scheme(name, weight=partial(quantizer, weight_bits))
    integer_bits, fraction_bits = fixed_point
    FixedPoint(integer_bits, fraction_bits)
    return Scheme(name, partial(FixedPoint, integer_bits, fraction_bits), partial(quantizer, weight_bits))


def _name(method: str, **arguments: tuple[object, object]) -> str:
    """``method(argument=value, …)`` with the arguments that differ from their default."""
    given = (f"{key}={value}" for key, (value, default) in arguments.items() if value != default)
    return f"{method}({', '.join(given)})"
