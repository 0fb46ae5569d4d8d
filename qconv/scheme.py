"""A scheme: the quantizers of a layer's input, weight and output gradient."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import Literal, ParamSpec

import torch

from .ground.checks import check_bits, check_choice, check_flags, check_padding_value
from .quantizers.base import Quantizer
from .quantizers.identity import Identity
from .quantizers.mixed import Mixed
from .quantizers.stages import Stages
from .quantizers.surrogates import Surrogate

Factory = Callable[[], Quantizer]
P = ParamSpec("P")
SURROGATES = ("surrogate", "weight_surrogate")
BITS = ("weight_bits", "input_bits", "format", "input_format")
"""The arguments that state numbers of bits."""


@dataclass(frozen=True)
class Starts:
    """The progress at which each layer of a network begins to follow a scheme, see `qconv.schemes.layerwise`.

    Attributes:
        scheme: the name of the scheme.
        inputs: the progress at which the inputs of the first and of the last layer begin to be quantized.
        weights: the same for their weights.
        ramp: how long it takes from the first element of a tensor to the last; 0 is at once.
    """

    scheme: str
    inputs: tuple[float, float]
    weights: tuple[float, float]
    ramp: float = 0.0

    def __str__(self) -> str:
        ramp = f", ramp={self.ramp}" if self.ramp else ""
        return f"layerwise({self.scheme}, inputs={self.inputs}, weights={self.weights}{ramp})"

    def stages(self, factory: Factory, start: float, is_weight: bool) -> Factory:
        """What makes the quantizer of a layer that begins at ``start``."""
        if not self.ramp:
            return partial(Stages, [(0.0, Identity), (start, factory)]) if start > 0 else factory
        mixed = [(start, partial(Mixed, factory, is_weight)), (start + self.ramp, factory)]
        return partial(Stages, [(0.0, Identity), *mixed] if start > 0 else mixed)


@dataclass(frozen=True)
class Scheme:
    """The parts of a quantized layer. Each layer calls the factories to make its own quantizers.

    Factories are classes or `functools.partial` objects rather than lambdas, so that a layer can be pickled. Each is
    called once here, so that invalid or incompatible ones raise an error at once; no random numbers are used up.

    Attributes:
        name: the name of the scheme in tables and messages; by default it lists the quantizers.
        input: makes the quantizer of the input.
        weight: makes the quantizer of the weight.
        grad: makes the quantizer of the output's gradient; None leaves the gradient as it is.
        backward_weight: the weight at which the gradient of the input is computed: ``"quantized"`` as published, or
            ``"float"``, the latent one.
        padding_value: the value with which zero-padding convolutions pad the quantized input: 0, or +1 or -1 if the
            input consists of these; as long as a stage keeps other inputs, 0.
        scale_map: whether to multiply the output by XNOR-Net's map K of input magnitudes, if the input's quantizer
            keeps only signs; not in stages in which it keeps more.
        starts: when each layer of a network begins to quantize, see `at_depth`; None is from the start of training.

    Raises:
        ValueError: an invalid ``backward_weight`` or ``padding_value``; a quantizer in a place that is not among its
            `Quantizer.roles`; ``padding_value`` or ``scale_map`` with an input that isn't ±1; ``"float"`` with a weight
            that learned tensors replace.
        TypeError: a quantizer in place of its factory, a factory that makes something else, or a ``scale_map`` that is
            not a bool.
    """

    name: str = ""
    input: Factory = Identity
    weight: Factory = Identity
    grad: Factory | None = None
    backward_weight: Literal["quantized", "float"] = "quantized"
    padding_value: int = 0
    scale_map: bool = False
    starts: Starts | None = None

    def __post_init__(self) -> None:
        check_choice("backward_weight", self.backward_weight, "quantized", "float")
        check_padding_value(self.padding_value)
        check_flags(scale_map=self.scale_map)
        # Streams draw a key on the CPU, which is discarded with the quantizers made here.
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            input, weight = _made("input", self.input), _made("weight", self.weight)
            if self.grad is not None:
                _made("grad", self.grad)
        if not self.name:
            object.__setattr__(self, "name", f"Scheme(input={input}, weight={weight})")
        if self.backward_weight == "float" and weight.replaces_weight:
            raise ValueError(
                f"backward_weight (='float') must be 'quantized' with {type(weight).__name__}: "
                "it learns other tensors in place of the float weight"
            )
        signs = any(part.signs for part in input.modules() if isinstance(part, Quantizer))  # in any stage
        if self.padding_value != 0 and not signs:
            raise ValueError(f"padding_value (={self.padding_value}) must be 0: {input} doesn't make the input ±1")
        if self.scale_map and not signs:
            raise ValueError(f"scale_map (=True) needs an input that is only signs: {input} keeps magnitudes itself")

    def with_grad(self, grad: Factory | None) -> "Scheme":
        """Return this scheme with another quantizer of the output's gradient, or without one.

        Raises:
            TypeError: ``grad`` makes no quantizer, or is one.

        Example:
            >>> qconv.schemes.bnn().with_grad(qconv.quantizers.DoReFaGradient).name
            'bnn() + grad DoReFaGradient(bits=6)'
        """
        plain, _ = split_name(self.name)
        if grad is None:
            return replace(self, name=plain, grad=None)
        with torch.random.fork_rng(devices=[]):  # its key is discarded with it
            made = _made("grad", grad, "grad_quantizer")
        return replace(self, name=f"{plain} + grad {made}", grad=grad)

    def at_depth(self, depth: float) -> "Scheme":
        """Return the scheme of one layer: `starts`, linear in its depth, become stages of its quantizers.

        Args:
            depth: 0 for the first layer, 1 for the last one.

        Raises:
            ValueError: ``depth`` is not from 0 to 1.

        Example:
            >>> qconv.schemes.layerwise(qconv.schemes.bnn(), inputs=(0, 0.4), weights=(0.4, 0.8)).at_depth(0.5).name
            'bnn() + inputs from 0.2 + weights from 0.6'
        """
        if not 0 <= depth <= 1:
            raise ValueError(f"depth (={depth}) must be from 0, the first layer, to 1, the last one")
        if self.starts is None:
            return self
        _, grad = split_name(self.name)
        begin = [first + depth * (last - first) for first, last in (self.starts.inputs, self.starts.weights)]
        ramp = f" + ramp of {self.starts.ramp:.3g}" if self.starts.ramp else ""
        name = "{} + inputs from {:.3g} + weights from {:.3g}{}{}".format(self.starts.scheme, *begin, ramp, grad)
        input = self.starts.stages(self.input, begin[0], is_weight=False)
        weight = self.starts.stages(self.weight, begin[1], is_weight=True)
        return replace(self, name=name, starts=None, input=input, weight=weight)

    def with_signed_input(self, signed: bool) -> "Scheme":
        """Return this scheme with the levels of its input on both sides of 0, or from 0 on.

        Raises:
            ValueError: the input's quantizer takes no argument ``signed``: it has these levels in any case, or none.
            TypeError: ``signed`` is not a bool.

        Example:
            >>> qconv.schemes.lsq(2, 2).with_signed_input(True).name
            'lsq(weight_bits=2, input_bits=2) + signed inputs'
        """
        check_flags(signed_inputs=signed)
        made = self.input()
        if "signed" not in inspect.signature(type(made)).parameters:
            remedy = f"{made} leaves no choice"
            if isinstance(made, Stages):
                remedy = f"set it in the schemes of its stages: lsq(…, signed_input={signed})"
            raise ValueError(f"signed_inputs (={signed}) must be None with {self}: {remedy}")
        plain, grad = split_name(self.name)
        note, starts = f" + {'signed' if signed else 'unsigned'} inputs", self.starts
        if starts is not None:
            starts = replace(starts, scheme=starts.scheme + note)
            plain, note = str(starts), ""
        return replace(
            self,
            name=f"{plain}{note}{grad}",
            starts=starts,
            input=partial(type(made), **{**made.arguments, "signed": signed}),
        )

    def __str__(self) -> str:
        return self.name


def split_name(name: str) -> tuple[str, str]:
    """Return the name without the scheme's own gradient quantizer, and what it says of that, or an empty text.

    Example:
        >>> split_name("staged([(0, bnn() + grad FP8())]) + grad Int8()")
        ('staged([(0, bnn() + grad FP8())])', ' + grad Int8()')
    """
    plain, word, grad = name.rpartition(" + grad ")
    if not word or plain.count("(") != plain.count(")"):  # it is that of a scheme inside
        return name, ""
    return plain, word + grad


def _made(role: str, factory: Factory, name: str = "") -> Quantizer:
    """Return the quantizer that the factory, an argument of this name, makes for ``role``, or raise."""
    name = name or role
    if isinstance(factory, Quantizer):
        raise TypeError(f"{name} (={factory}) must make a quantizer, not be one: pass the class or a partial")
    made = factory() if callable(factory) else factory
    if not isinstance(made, Quantizer):
        raise TypeError(f"{name} (={factory!r}) must make a quantizer, not {type(made).__name__}")
    if role not in made.roles:
        raise ValueError(f"{name} (={made}) must make a quantizer for {role}, not one for {' or '.join(made.roles)}")
    return made


def identity() -> Scheme:
    """No quantization: the layer computes the same as its ``torch.nn`` twin."""
    return Scheme("identity()")


def of_input(
    quantizer: type[Quantizer],
    input_bits: int | None,
    *arguments: object,
    low: int = 1,
    high: int = 8,
    method: str = "",
) -> Factory:
    """Return a factory of input quantizers with so many bits, from ``low`` to ``high``; `Identity` for None.

    Raises:
        ValueError: ``input_bits`` out of range, for this ``method``.
    """
    if input_bits is None:
        return Identity
    return partial(quantizer, check_bits("input_bits", input_bits, low, high, method), *arguments)


def named(function: Callable[P, Scheme]) -> Callable[P, Scheme]:
    """Decorate a function that makes a scheme: its call becomes the name, ``lsq(weight_bits=2, input_bits=4)``.

    The name lists the arguments that differ from their defaults, and always those that state numbers of bits. The
    factory of a surrogate is written as that surrogate.

    Raises:
        TypeError: from the function, if ``surrogate`` or ``weight_surrogate`` makes no surrogate.
    """
    signature = inspect.signature(function)

    @wraps(function)
    def make(*args: P.args, **kwargs: P.kwargs) -> Scheme:
        surrogates = {name: _surrogate(name, kwargs[name]) for name in SURROGATES if kwargs.get(name) is not None}
        made = function(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        shown = []
        for name, value in {**bound.arguments, **surrogates}.items():
            plain = tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else value
            if name in BITS or plain != signature.parameters[name].default:
                shown.append(f"{name}={plain}")
        # In place: `replace` would make all its quantizers a second time, to check them.
        object.__setattr__(made, "name", f"{function.__name__}({', '.join(shown)})")
        return made

    return make


def _surrogate(name: str, make: object) -> Surrogate:
    made = make() if callable(make) and not isinstance(make, Surrogate) else None
    if not isinstance(made, Surrogate):
        raise TypeError(
            f"{name} (={make}) must make a surrogate: pass a class of qconv.quantizers.surrogates or a "
            "functools.partial of one"
        )
    return made
