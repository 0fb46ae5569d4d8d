"""Schemes with uniform levels for weights and activations."""

from functools import partial

from ..quantizers import Identity, Quantizer
from ..quantizers.dorefa import DoReFaGradient, DoReFaInput, DoReFaWeight
from ..quantizers.lsq import LSQ, GradScale, LSQInput
from ..quantizers.lsq_plus import LSQPlus, LSQPlusInput
from ..quantizers.numbers import check_bits, check_flags
from ..quantizers.pact import PACT
from .scheme import Factory, Scheme, written


def dorefa(
    weight_bits: int = 1, input_bits: int | None = 2, grad_bits: int | None = None, detach_max: bool = True
) -> Scheme:
    """DoReFa-Net: weights, inputs in [0, 1] and gradients of few bits (arXiv:1606.06160).

    ``input_bits=None`` leaves the input float, ``grad_bits=None`` the gradient. The paper leaves the first and the last
    layer float. ``detach_max=False`` follows the gradient through the largest weight, as tensorpack does.
    """
    check_bits("weight_bits", weight_bits)
    name = written(
        "dorefa",
        weight_bits=(weight_bits, ""),
        input_bits=(input_bits, ""),
        grad_bits=(grad_bits, None),
        detach_max=(detach_max, True),
    )
    input = _input(DoReFaInput, input_bits)
    if grad_bits is not None:
        check_bits("grad_bits", grad_bits)
    grad = None if grad_bits is None else partial(DoReFaGradient, grad_bits)
    return Scheme(name, input, partial(DoReFaWeight, weight_bits, detach_max), grad)


def pact(weight_bits: int = 4, input_bits: int | None = 4, alpha: float | None = None) -> Scheme:
    """PACT: inputs clipped at a learned bound that starts at ``alpha``, the weights of `dorefa` (arXiv:1805.06085).

    ``input_bits=None`` leaves the input float. Without ``alpha`` the bound starts at 8 as in the paper, and lower with
    less than 4 bits (`qconv.quantizers.PACT`). It needs weight decay; the paper leaves the first and the last layer
    float.
    """
    check_bits("weight_bits", weight_bits)
    name = written("pact", weight_bits=(weight_bits, ""), input_bits=(input_bits, ""), alpha=(alpha, None))
    return Scheme(name, _input(PACT, input_bits, alpha), partial(DoReFaWeight, weight_bits))


def lsq(
    weight_bits: int = 4,
    input_bits: int | None = 4,
    signed_input: bool = False,
    per_channel: bool = False,
    grad_scale: GradScale = "paper",
    strict: bool = False,
    step_init: float | None = None,
) -> Scheme:
    """LSQ: learned steps for weights and inputs (arXiv:1902.08153).

    ``input_bits=None`` leaves the input float; ``per_channel`` gives each filter a step, the input keeps one. The step
    of the input starts from the first training batch, or at ``step_init``. The paper starts from a trained float
    network and gives the first and the last layer 8 bits; an input with negative values needs ``signed_input``.
    """
    check_bits("weight_bits", weight_bits)
    check_flags(signed_input=signed_input)
    name = written(
        "lsq",
        weight_bits=(weight_bits, ""),
        input_bits=(input_bits, ""),
        signed_input=(signed_input, False),
        per_channel=(per_channel, False),
        grad_scale=(grad_scale, "paper"),
        strict=(strict, False),
        step_init=(step_init, None),
    )
    weight = partial(LSQ, weight_bits, per_channel, grad_scale, strict)
    weight()
    input = _input(LSQInput, input_bits, signed_input, False, grad_scale, strict, step_init)
    return Scheme(name, input, weight)


def lsq_plus(
    weight_bits: int = 4,
    input_bits: int | None = 4,
    per_channel: bool = False,
    grad_scale: GradScale = "paper",
) -> Scheme:
    """LSQ+: learned step and offset for inputs with negative values, learned steps for weights (arXiv:2004.09576).

    ``input_bits=None`` leaves the input float; ``per_channel`` gives each filter a step. Step and offset of the input
    start from the first training batch.
    """
    check_bits("weight_bits", weight_bits)
    name = written(
        "lsq_plus",
        weight_bits=(weight_bits, ""),
        input_bits=(input_bits, ""),
        per_channel=(per_channel, False),
        grad_scale=(grad_scale, "paper"),
    )
    weight = partial(LSQPlus, weight_bits, per_channel, grad_scale)
    weight()
    return Scheme(name, _input(LSQPlusInput, input_bits, grad_scale), weight)


def _input(kind: type[Quantizer], input_bits: int | None, *arguments: object) -> Factory:
    """What makes the input's quantizer, tried once so that a wrong argument is told here; `Identity` for None."""
    if input_bits is None:
        return Identity
    factory = partial(kind, check_bits("input_bits", input_bits), *arguments)
    factory()
    return factory
