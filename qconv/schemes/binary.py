"""Schemes with binary weights.

Each takes surrogates in place of the published ones: ``surrogate`` stands for the derivative of the sign of the input
and ``weight_surrogate`` for that of the weight, each a class of `qconv.quantizers.surrogates` or a `functools.partial`
of one; None is the published one. What else a method does to a gradient (its scale, ReCU's mask, the gradient through
mean and deviation) stays.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

from ..quantizers import ScaledSign, Sign, Straight
from ..quantizers.adabin import AdaBinInput, AdaBinWeight
from ..quantizers.bireal import BiRealWeight
from ..quantizers.irnet import IRNetWeight
from ..quantizers.numbers import check_flags
from ..quantizers.reactnet import ReActNetInput
from ..quantizers.recu import ReCUInput, ReCUWeight
from ..quantizers.reste import ReSTEWeight
from ..quantizers.surrogates import EDE, ApproxSign, HardClip, ReSTE, Surrogate
from ..quantizers.xnorpp import XNORppWeight
from .scheme import Factory, Scheme, written

Make = Callable[[], Surrogate]


def bnn(
    padding_value: int = 0,
    *,
    stochastic: bool = False,
    surrogate: Make | None = None,
    weight_surrogate: Make | None = None,
) -> Scheme:
    """BNN, W1A1: signs without a scale (arXiv:1602.02830).

    The gradient of the input passes where ``|x| <= 1``, the weight's everywhere; latent weights are clamped to [-1, 1]
    after each optimizer step (`qconv.after_every_step`). The authors make the last layer binary, too
    (``skip=("first",)``). ``stochastic`` draws the signs of the input, in training, as in some of the paper's
    experiments; those of the weight it never draws.

    Raises:
        TypeError: a surrogate that is none.
    """
    given = _given(surrogate=surrogate, weight_surrogate=weight_surrogate)
    name = written("bnn", padding_value=(padding_value, 0), stochastic=(stochastic, False), **given)
    weight = partial(Sign, _chosen(weight_surrogate, Straight), weight_clip=1.0)
    return Scheme(name, _sign(_chosen(surrogate, HardClip), stochastic), weight, padding_value=padding_value)


def bwn(
    detach_scale: bool = False,
    *,
    center: bool = False,
    paper_gradient: bool = False,
    numel_gradient: bool = False,
    surrogate: Make | None = None,
) -> Scheme:
    """BWN, W1A32: ``alpha_c · sign(w)`` with ``alpha_c = mean |w_c|`` (arXiv:1603.05279).

    The input is float, so that ``surrogate`` is that of the weight. The other arguments are those of
    `qconv.quantizers.ScaledSign`.

    Raises:
        ValueError: ``detach_scale`` together with ``paper_gradient``.
        TypeError: a surrogate that is none.
    """
    given = _given(surrogate=surrogate)
    options = _scaled_options(detach_scale, center, paper_gradient, numel_gradient)
    return Scheme(written("bwn", **options, **given), weight=_scaled(options, surrogate))


def xnor(
    scale_map: bool = False,
    detach_scale: bool = False,
    padding_value: int = 0,
    *,
    center: bool = False,
    paper_gradient: bool = False,
    numel_gradient: bool = False,
    surrogate: Make | None = None,
    weight_surrogate: Make | None = None,
) -> Scheme:
    """XNOR-Net, W1A1: the weights of `bwn`, the sign of the input (arXiv:1603.05279).

    ``scale_map`` multiplies the output by K, the mean magnitude of the input under the kernel. The paper has it, the
    authors' code and the released model do not. The input's gradient passes where ``|x| <= 1``; in the authors' code
    the interval is open. ``center``, ``paper_gradient`` and ``numel_gradient`` are those of
    `qconv.quantizers.ScaledSign`.

    Raises:
        ValueError: ``detach_scale`` together with ``paper_gradient``.
        TypeError: a surrogate that is none.
    """
    given = _given(surrogate=surrogate, weight_surrogate=weight_surrogate)
    options = _scaled_options(detach_scale, center, paper_gradient, numel_gradient)
    name = written("xnor", scale_map=(scale_map, False), **options, padding_value=(padding_value, 0), **given)
    input, weight = _sign(_chosen(surrogate, HardClip)), _scaled(options, weight_surrogate)
    return Scheme(name, input, weight, padding_value=padding_value, scale_map=scale_map)


def xnorpp(padding_value: int = 0, *, surrogate: Make | None = None, weight_surrogate: Make | None = None) -> Scheme:
    """XNOR-Net++, W1A1: signs with a learned scale for each output channel, the paper's case 1 (arXiv:1909.13863).

    The gradients of input and weight pass where the magnitude is at most 1.

    Raises:
        TypeError: a surrogate that is none.
    """
    given = _given(surrogate=surrogate, weight_surrogate=weight_surrogate)
    name = written("xnorpp", padding_value=(padding_value, 0), **given)
    weight = partial(XNORppWeight, _chosen(weight_surrogate, HardClip))
    return Scheme(name, _sign(_chosen(surrogate, HardClip)), weight, padding_value=padding_value)


def bireal(
    gradient: Literal["code", "paper"] = "code",
    padding_value: int = 0,
    *,
    surrogate: Make | None = None,
    weight_surrogate: Make | None = None,
) -> Scheme:
    """Bi-Real Net, W1A1: the derivative of a piecewise quadratic for the input's sign (arXiv:1808.00278).

    ``gradient`` is that of `qconv.quantizers.bireal.BiRealWeight`: of the weight, without or with the scale.

    Raises:
        ValueError: ``gradient`` is none of the two.
        TypeError: a surrogate that is none.
    """
    return _bireal(
        "bireal", _sign(_chosen(surrogate, ApproxSign)), gradient, padding_value, surrogate, weight_surrogate
    )


def reactnet(
    gradient: Literal["code", "paper"] = "code",
    padding_value: int = 0,
    *,
    surrogate: Make | None = None,
    weight_surrogate: Make | None = None,
) -> Scheme:
    """ReActNet, W1A1: `bireal` with a learned threshold for each input channel (arXiv:2003.03488).

    Raises:
        ValueError: ``gradient`` is none of the two.
        TypeError: a surrogate that is none.
    """
    input = partial(ReActNetInput, _chosen(surrogate, ApproxSign))
    return _bireal("reactnet", input, gradient, padding_value, surrogate, weight_surrogate)


def irnet(
    t_min: float = 0.1,
    padding_value: int = 0,
    *,
    binary_input: bool = True,
    surrogate: Make | None = None,
    weight_surrogate: Make | None = None,
) -> Scheme:
    """IR-Net, W1A1 or W1A32: signs of standardized weights, a power of two as scale (arXiv:1909.10788).

    ``t_min`` is where the `qconv.quantizers.EDE` of input and weight starts: 0.1 in the paper, and in the code for
    VGG-small and for W1A32; 0.001 in the code for ResNet-20 W1A1. ``binary_input=False`` leaves the input float.

    Raises:
        ValueError: ``t_min`` out of range, or a padding value or a surrogate for an input that is float.
        TypeError: a surrogate that is none.
    """
    EDE(t_min)  # a wrong value is told here, not when the first layer is built
    check_flags(binary_input=binary_input)
    given = _given(surrogate=surrogate, weight_surrogate=weight_surrogate)
    options = {"padding_value": (padding_value, 0), "binary_input": (binary_input, True)}
    name = written("irnet", t_min=(t_min, 0.1), **options, **given)
    ede = partial(EDE, t_min)
    weight = partial(IRNetWeight, _chosen(weight_surrogate, ede))
    if not binary_input:
        return _float_input(name, weight, padding_value, surrogate)
    return Scheme(name, _sign(_chosen(surrogate, ede)), weight, padding_value=padding_value)


def recu(
    tau_min: float = 0.85,
    tau_max: float = 0.99,
    scale_init: Literal["uniform", "mean"] = "uniform",
    padding_value: int = 0,
    *,
    surrogate: Make | None = None,
    weight_surrogate: Make | None = None,
) -> Scheme:
    """ReCU, W1A1: standardized weights clamped at a quantile, a learned scale (arXiv:2103.12369).

    ``tau_min``, ``tau_max`` and ``scale_init`` are those of `qconv.quantizers.recu.ReCUWeight`.

    Raises:
        ValueError: not ``0.5 < tau_min <= tau_max < 1``, or ``scale_init`` is none of the two.
        TypeError: a surrogate that is none.
    """
    given = _given(surrogate=surrogate, weight_surrogate=weight_surrogate)
    name = written(
        "recu",
        tau_min=(tau_min, 0.85),
        tau_max=(tau_max, 0.99),
        scale_init=(scale_init, "uniform"),
        padding_value=(padding_value, 0),
        **given,
    )
    weight = _checked(partial(ReCUWeight, tau_min, tau_max, scale_init, _chosen(weight_surrogate, Straight)))
    return Scheme(name, partial(ReCUInput, _chosen(surrogate, ApproxSign)), weight, padding_value=padding_value)


def adabin(
    t_min: float = 0.001,
    offset: Literal["paper", "code"] = "paper",
    *,
    surrogate: Make | None = None,
    weight_surrogate: Make | None = None,
) -> Scheme:
    """AdaBin, W1A1: two values at a centre and a distance of their own, for weight and input (arXiv:2208.08084).

    ``t_min`` is where the `qconv.quantizers.EDE` of the weight starts; 0.001 is that of the authors' code. ``offset``
    is that of `qconv.quantizers.adabin.AdaBinInput`. The input isn't ±1, so padding is 0.

    Raises:
        ValueError: ``t_min`` out of range, or ``offset`` is none of the two.
        TypeError: a surrogate that is none.
    """
    EDE(t_min)
    given = _given(surrogate=surrogate, weight_surrogate=weight_surrogate)
    name = written("adabin", t_min=(t_min, 0.001), offset=(offset, "paper"), **given)
    input = _checked(partial(AdaBinInput, offset, _chosen(surrogate, ApproxSign)))
    return Scheme(name, input, partial(AdaBinWeight, _chosen(weight_surrogate, partial(EDE, t_min))))


def reste(
    o_max: float = 3.0,
    padding_value: int = 0,
    *,
    binary_input: bool = True,
    surrogate: Make | None = None,
    weight_surrogate: Make | None = None,
) -> Scheme:
    """ReSTE, W1A1 or W1A32: signs with a rectified power as surrogate, one scale for a layer (arXiv:2303.17153).

    ``o_max`` is what the o of the `qconv.quantizers.ReSTE` of input and weight ends at, from 1.
    ``binary_input=False`` leaves the input float.

    Raises:
        ValueError: ``o_max`` is less than 1, or a padding value or a surrogate for an input that is float.
        TypeError: a surrogate that is none.
    """
    ReSTE(o_max)
    check_flags(binary_input=binary_input)
    given = _given(surrogate=surrogate, weight_surrogate=weight_surrogate)
    options = {"padding_value": (padding_value, 0), "binary_input": (binary_input, True)}
    name = written("reste", o_max=(o_max, 3.0), **options, **given)
    published = partial(ReSTE, o_max)
    weight = partial(ReSTEWeight, _chosen(weight_surrogate, published))
    if not binary_input:
        return _float_input(name, weight, padding_value, surrogate)
    return Scheme(name, _sign(_chosen(surrogate, published)), weight, padding_value=padding_value)


def _chosen(given: Make | None, published: Make) -> Make:
    return published if given is None else given


def _sign(surrogate: Make, stochastic: bool = False) -> Factory:
    return partial(Sign, surrogate, stochastic=stochastic)


def _scaled_options(
    detach_scale: bool, center: bool, paper_gradient: bool, numel_gradient: bool
) -> dict[str, tuple[bool, bool]]:
    return {
        "detach_scale": (detach_scale, False),
        "center": (center, False),
        "paper_gradient": (paper_gradient, False),
        "numel_gradient": (numel_gradient, False),
    }


def _scaled(options: dict[str, tuple[bool, bool]], surrogate: Make | None) -> Factory:
    values: dict[str, Any] = {name: value for name, (value, _) in options.items()}
    return _checked(partial(ScaledSign, **values, surrogate=_chosen(surrogate, HardClip)))


def _bireal(
    method: str,
    input: Factory,
    gradient: Literal["code", "paper"],
    padding_value: int,
    surrogate: Make | None,
    weight_surrogate: Make | None,
) -> Scheme:
    given = _given(surrogate=surrogate, weight_surrogate=weight_surrogate)
    name = written(method, gradient=(gradient, "code"), padding_value=(padding_value, 0), **given)
    weight = _checked(partial(BiRealWeight, gradient, _chosen(weight_surrogate, HardClip)))
    return Scheme(name, input, weight, padding_value=padding_value)


def _float_input(name: str, weight: Factory, padding_value: int, surrogate: Make | None) -> Scheme:
    if padding_value != 0:
        raise ValueError(f"padding_value (={padding_value}) must be 0 with binary_input=False")
    if surrogate is not None:
        raise ValueError(f"surrogate (={surrogate}) must be None with binary_input=False: give weight_surrogate")
    return Scheme(name, weight=weight)


def _given(**surrogates: Make | None) -> dict[str, tuple[object, None]]:
    """How the surrogates are written, for `written`, from what makes them.

    Raises:
        TypeError: one of them makes none.
    """
    given: dict[str, tuple[object, None]] = {}
    for name, make in surrogates.items():
        surrogate = make() if callable(make) and not isinstance(make, Surrogate) else None
        if make is not None and not isinstance(surrogate, Surrogate):
            raise TypeError(
                f"{name} (={make}) must make a surrogate: give a class of qconv.quantizers.surrogates or a "
                "functools.partial of one"
            )
        given[name] = surrogate, None
    return given


def _checked(factory: Factory) -> Factory:
    """``factory``, called once: a wrong argument is told here, not when the first layer is built."""
    factory()
    return factory
