"""All methods, as `qconv.methods` exports them and as `golden` describes them: what the tests run over.

Arguments and their defaults are those of the signatures, and so are the words that one may be; the ranges of numbers
are those of `golden`. A scheme's arguments have the ranges of those of its quantizers.
"""

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch
from golden import QUANTIZERS as GOLDEN, SCHEMES as VARIANTS, SURROGATES as GOLDEN_SURROGATES, Entry, Range
from torch import Tensor

import qconv
from qconv import quantizers, schemes
from qconv.quantizers import HardClip, Identity, Int8Stochastic, Mixed, Quantizer, Sign, Stages, Straight, Surrogate

Make = Callable[[], Quantizer]


def classes(base: type) -> dict[str, type]:
    """The classes below ``base`` that qconv.quantizers gives, those of qconv.methods among them."""
    found = {name: getattr(quantizers, name) for name in dir(quantizers)}
    return {name: kind for name, kind in found.items() if isinstance(kind, type) and issubclass(kind, base)}


KINDS: dict[str, type[Quantizer]] = {
    name: kind for name, kind in classes(Quantizer).items() if kind not in (Quantizer, Stages, Mixed)
}
SURROGATES: dict[str, type[Surrogate]] = {
    name: kind for name, kind in classes(Surrogate).items() if kind is not Surrogate
}
FUNCTIONS: dict[str, Callable[..., qconv.Scheme]] = {
    name: getattr(schemes, name) for name in schemes.__all__ if name != "Scheme"
}
MADE_OF_SCHEMES = "staged", "two_stage", "layerwise"
"""Those whose first argument is a scheme, or more of them."""
CALLABLES: dict[str, Callable[..., Any]] = {**FUNCTIONS, **KINDS, **SURROGATES, "Stages": Stages}


def parameters(name: str) -> dict[str, inspect.Parameter]:
    found = inspect.signature(CALLABLES[name]).parameters
    return {key: each for key, each in found.items() if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)}


def choices(name: str, argument: str) -> tuple[Any, ...]:
    """The words that an argument may be, and None if it may be that; none for what is no word."""
    make = CALLABLES[name]
    hints = get_type_hints(make.__init__ if isinstance(make, type) else inspect.unwrap(make))
    hint = hints.get(argument)
    parts = (hint,) if get_origin(hint) is Literal else get_args(hint)
    words = [word for part in parts if get_origin(part) is Literal for word in get_args(part)]
    return (*words, *([None] if words and NoneType in parts else []))


def may_be_none(name: str, argument: str) -> bool:
    return parameters(name)[argument].default is None or "None" in str(parameters(name)[argument].annotation)


def parts(scheme: qconv.Scheme) -> list[torch.nn.Module]:
    """The scheme's quantizers, that of the weight first, and their surrogates."""
    made = [scheme.weight(), scheme.input(), *([] if scheme.grad is None else [scheme.grad()])]
    return [module for part in made for module in part.modules() if isinstance(module, Quantizer | Surrogate)]


def owners(name: str, argument: str) -> Iterator[tuple[str, str]]:
    """The quantizers and surrogates, and their arguments, that an argument of a scheme is for."""
    prefix, _, bits = argument.partition("_")
    if bits == "bits" and prefix in ("weight", "input", "grad"):
        found = FUNCTIONS[name](**{argument: 4})
        kind = type(getattr(found, prefix)())
        yield kind.__name__, next(each for each in parameters(kind.__name__) if each in ("bits", argument))
        return
    made = FUNCTIONS[name]()
    of_weight = argument == "per_channel" or f"input_{argument}" in parameters(name)
    found = [made.weight()] if of_weight else parts(made)
    for kind in dict.fromkeys(type(part).__name__ for part in found):
        if argument in parameters(kind):
            yield kind, argument


def range_of(name: str, argument: str) -> Range | None:
    """The range of a number; that of what a scheme gives it to."""
    if name in MADE_OF_SCHEMES:
        return Range(0, 1, "(]") if argument == "start" else None
    if name in FUNCTIONS:
        return next((range_of(*owner) for owner in owners(name, argument)), None)
    entry = (GOLDEN | GOLDEN_SURROGATES).get(name)
    return entry.ranges.get(argument) if entry else None


def numbers(name: str) -> list[str]:
    """The arguments that are numbers, whole ones too."""
    return [each for each in parameters(name) if range_of(name, each)]


def arguments(are: Callable[[str, str], object]) -> list[tuple[str, str]]:
    """Every argument of every callable of which ``are`` is true."""
    return [(name, argument) for name in CALLABLES for argument in parameters(name) if are(name, argument)]


# Quantizers


def variants(name: str) -> Iterator[dict[str, Any]]:
    """The arguments to make a quantizer with: every flag and every word, bits at both ends, those of `golden`."""
    yield {}
    for argument, parameter in parameters(name).items():
        if argument.endswith("bits"):
            entry = GOLDEN[name].ranges[argument]
            every = range(int(entry.low), int(entry.high) + 1)
            yield from ({argument: bits} for bits in every if bits in (*every[:2], 3, every[-1]))
        elif isinstance(parameter.default, bool):
            yield {argument: not parameter.default}
        else:
            yield from ({argument: word} for word in choices(name, argument))
    for row in GOLDEN[name].rows:
        yield {key: value for key, value in row.args.items() if not key.endswith("bits")}


def plain(name: str, args: dict[str, Any]) -> dict[str, Any]:
    """Without what is the default."""
    return {key: value for key, value in args.items() if value != parameters(name)[key].default}


def written(name: str, args: dict[str, Any]) -> str:
    return f"{name}({', '.join(f'{key}={value}' for key, value in args.items())})" if args else name


def every_quantizer() -> Iterator[tuple[str, tuple[Make, float]]]:
    """How it is written, what makes it, and the largest number of values that one filter may take at the end."""
    for name, kind in KINDS.items():
        if name not in GOLDEN:  # which a test says
            continue
        for args in variants(name):
            made = partial(kind, **plain(name, args))
            quantizer = made()
            count = GOLDEN[name].levels
            yield written(name, plain(name, args)), (made, 2**quantizer.bits if count is None else count(quantizer))


QUANTIZERS: dict[str, tuple[Make, float]] = dict(every_quantizer()) | {
    "Sign(HardClip(1.3))": (partial(Sign, partial(HardClip, 1.3)), 2),
    "Sign(Straight)": (partial(Sign, Straight), 2),
    "ScaledSign(paper_gradient, center)": (partial(quantizers.ScaledSign, center=True, paper_gradient=True), 2),
    "FixedPoint(3, 2)": (partial(quantizers.FixedPoint, 3, 2), 2**5),
    "Stages(first)": (partial(Stages, [(0, partial(quantizers.LSQ, 3)), (0.5, Sign)]), 8),
    "Stages(Sign)": (partial(Stages, [(0, Sign), (0.9, Identity)]), 2),
}


def entry_of(quantizer: Quantizer) -> Entry:
    return GOLDEN["Sign" if isinstance(quantizer, Stages) else type(quantizer).__name__]


def ready(make: Make, x: Tensor, dtype: torch.dtype | None = None) -> tuple[Quantizer, tuple[Tensor, ...]]:
    """A quantizer with its learned tensors set from ``x``, in ``dtype`` (of ``x`` if None), and those tensors."""
    quantizer = make()
    dim = 1 if x.ndim > 1 else -1
    quantizer.build(x.shape[dim], dim)
    quantizer.to(x.dtype if dtype is None else dtype)
    quantizer.initialize(x)
    quantizer.to(x.dtype if dtype is None else dtype)
    return quantizer, handed(quantizer)


def handed(quantizer: Quantizer) -> tuple[Tensor, ...]:
    """Its tensors as a layer hands them over."""
    return tuple(tensor.detach() for tensor in quantizer.tensors())


def tensor_dtypes(make: Make, dtype: torch.dtype) -> set[torch.dtype]:
    """Under autocast learned float32 tensors meet an input of fewer bits, unless they stand for the weight."""
    return {dtype} if make().replaces_weight else {dtype, torch.promote_types(dtype, torch.float32)}


# Schemes


def scheme_variants(name: str) -> Iterator[dict[str, Any]]:
    """The arguments to make a scheme with: every flag, every word, bits at both ends and a float input."""
    for argument, parameter in parameters(name).items():
        if argument.endswith("bits"):
            limits = range_of(name, argument)
            assert limits is not None
            yield from ({argument: int(bits)} for bits in (limits.low, limits.high))
            if may_be_none(name, argument):
                yield {argument: None}
        elif isinstance(parameter.default, bool):
            yield {argument: not parameter.default}
        else:
            yield from ({argument: word} for word in choices(name, argument))


METHODS: dict[str, qconv.Scheme] = {
    scheme.name: scheme
    for scheme in (
        *(FUNCTIONS[name](**args) for name, entry in VARIANTS.items() for args in entry.variants),
        schemes.minmax().with_grad(Int8Stochastic),
        schemes.two_stage(schemes.reactnet()),
        schemes.staged([(0, schemes.lsq(4, 4)), (0.5, schemes.lsq(2, 2))]),
    )
}
"""Every method."""
SCHEMES = {
    name: METHODS[name]
    for name in (
        "identity()",
        "bnn()",
        "bnn(padding_value=1)",
        "bwn()",
        "bwn(detach_scale=True)",
        "xnor()",
        "xnor(scale_map=True)",
        "shift_q(weight_bits=5)",
        "shift_q(weight_bits=3, fixed_point=(4, 6))",
        "shift_ps(weight_bits=5)",
    )
}
"""One of each kind, for what is slow."""
CONSTANTS: dict[str, tuple[qconv.Scheme, tuple[float, float]]] = {
    (scheme := FUNCTIONS[name](**args)).name: (scheme, values)
    for name, entry in VARIANTS.items()
    for args, values in entry.constants
}
"""Schemes, with what they make of a filter of zeros, and of one of 0.7."""
