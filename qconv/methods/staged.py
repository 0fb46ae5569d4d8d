"""Schemes that change during training: float weights first, or fewer and fewer bits."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from ..ground.checks import check_numbers
from ..quantizers.identity import Identity
from ..quantizers.stages import Stages
from ..scheme import Factory, Scheme, Starts, split_name


def staged(stages: Sequence[tuple[float, Scheme]]) -> Scheme:
    """Return one scheme that runs several in turn; each begins at its progress, set by `qconv.set_progress`.

    Progressive bits (APoT's initialization, arXiv:1909.13144) are ``staged([(0, apot(4, 4)), (0.5, apot(2, 2))])``.
    `qconv.quantizers.Stages` describes how a stage begins. The gradient quantizer is the last scheme's.

    Raises:
        ValueError: no stages, a first stage that does not begin at 0, starts that do not increase or lie beyond 1;
            schemes that differ in ``padding_value``, ``scale_map`` or ``backward_weight``, that replace the weight, or
            that are layerwise.
        TypeError: something other than a sequence of pairs of a number and a scheme.
    """
    if isinstance(stages, str) or not isinstance(stages, Sequence):
        raise TypeError(f"stages (={stages!r}) must be a sequence of pairs (progress, qconv.Scheme)")
    for pair in stages:
        if not (isinstance(pair, Sequence) and len(pair) == 2 and isinstance(pair[1], Scheme)):
            raise TypeError(f"stages must hold pairs (progress, qconv.Scheme), not {pair!r}")
        check_numbers(progress=pair[0])
    if not stages:
        raise ValueError("stages (=[]) must hold at least one pair (progress, qconv.Scheme)")
    stages = [(float(start), scheme) for start, scheme in stages]
    last = stages[-1][1]
    for _, scheme in stages:
        _check_not_layerwise(scheme)
        for name in ("padding_value", "scale_map", "backward_weight"):
            value, asked = getattr(scheme, name), getattr(last, name)
            if value != asked:
                raise ValueError(f"{name} (={value!r}) of {scheme} must equal that of {last} (={asked!r}) in stages")
    weight: Factory = partial(Stages, [(start, scheme.weight) for start, scheme in stages])
    weight()  # raise on wrong stages here, not when the first layer is built
    name = ", ".join(f"({start:g}, {scheme})" for start, scheme in stages)
    input = partial(Stages, [(start, scheme.input) for start, scheme in stages])
    return replace(last, name=f"staged([{name}])", input=input, weight=weight)


def two_stage(scheme: Scheme, start: float = 0.5) -> Scheme:
    """Activations first, weights later: ``scheme`` with float weights until the progress ``start``.

    ReActNet (arXiv:2003.03488) and the networks before it (arXiv:1904.05868) are trained this way. Their two stages are
    two runs, each with its own learning rate schedule; the second starts from the first one's weights. ``start=1`` is
    such a first run: its weights stay float to the end.

    Raises:
        ValueError: ``start`` is not above 0 and at most 1, or the scheme replaces the weight or is layerwise.
        TypeError: ``scheme`` is not a scheme.
    """
    if not isinstance(scheme, Scheme):
        raise TypeError(f"scheme (={scheme!r}) must be a qconv.Scheme, such as qconv.schemes.reactnet()")
    _check_not_layerwise(scheme)
    check_numbers(start=start)
    if not 0 < start <= 1:
        raise ValueError(f"start (={start}) must be above 0 and at most 1")
    weight = partial(Stages, [(0.0, Identity), (float(start), scheme.weight)])
    weight()
    return replace(scheme, name=f"two_stage({scheme}, start={start:g})", weight=weight)


def layerwise(
    scheme: Scheme,
    inputs: tuple[float, float] = (0.0, 0.4),
    weights: tuple[float, float] = (0.4, 0.8),
    ramp: float = 0.0,
) -> Scheme:
    """Apply ``scheme`` layer by layer, from the input of the network to its output.

    Before that, a layer's inputs and weights are float. The layer of depth d, 0 for the first one that follows the
    scheme and 1 for the last, quantizes its inputs from the progress ``i₀ + d (i₁ − i₀)`` on, where ``(i₀, i₁)`` is
    ``inputs``, and its weights accordingly. When the inputs of a layer change, those after it are still float and can
    adapt; in the other order, binary activations would cut the layers before them off from the gradient (StoMPP,
    arXiv:2601.22660). The weights follow when all inputs are quantized, if the two ranges do not overlap. With a
    ``ramp``, a layer does not change as a whole: the elements that are quantized are chosen at random, and from none to
    all they take that share of the training, as with the paper's masks (`qconv.quantizers.Mixed`).

    `convert` gives the layers their depths, in the order of ``model.named_modules()``; `Scheme.at_depth` is for a layer
    of your own.

    Args:
        scheme: the scheme to reach.
        inputs: the progress at which the inputs of the first and of the last layer begin to be quantized.
        weights: the same for their weights.
        ramp: the progress from the first quantized element of a tensor to the last.

    Raises:
        ValueError: a number of ``inputs`` or ``weights`` is not at least 0 and below 1 (a stage at 1 would never
            begin), the second is below the first, ``ramp`` is neither 0 nor at least 1e-6, or would not end before 1,
            or the scheme is layerwise itself, or replaces the weight.
        TypeError: ``scheme`` is not a scheme, ``inputs`` or ``weights`` is not a pair of numbers, or ``ramp`` is none.

    Example:
        >>> layer = torch.nn.Sequential(*(torch.nn.Conv2d(4, 4, 3) for _ in range(3)))
        >>> model = qconv.convert(layer, qconv.schemes.layerwise(qconv.schemes.bnn()), skip=())
        >>> [layer.input_quantizer.final_from for layer in model]
        [0.0, 0.2, 0.4]
    """
    if not isinstance(scheme, Scheme):
        raise TypeError(f"scheme (={scheme!r}) must be a qconv.Scheme, such as qconv.schemes.bireal()")
    plain, grad = split_name(scheme.name)
    check_numbers(ramp=ramp)
    starts = Starts(plain, _range("inputs", inputs), _range("weights", weights), float(ramp))
    latest = max(starts.inputs[1], starts.weights[1])
    if ramp and not (ramp >= 1e-6 and latest + ramp < 1):  # or a stage would have no length
        raise ValueError(
            f"ramp (={ramp}) must be 0, or at least 1e-6 and end before 1 in the last layer, which begins at {latest}"
        )
    _check_not_layerwise(scheme)
    made = replace(scheme, name=f"{starts}{grad}", starts=starts)
    made.at_depth(1)  # raise here, not when the first layer is built
    return made


def _check_not_layerwise(scheme: Scheme) -> None:
    if scheme.starts is not None:
        raise ValueError(f"scheme (={scheme}) must not be layerwise: its layers already begin at different times")


def _range(name: str, value: Sequence[float]) -> tuple[float, float]:
    """Return two progresses in order."""
    if isinstance(value, str) or not isinstance(value, Sequence) or len(value) != 2:
        raise TypeError(f"{name} (={value!r}) must be a pair: the progress for the first layer and for the last one")
    first, last = value
    check_numbers(**{f"{name}[0]": first, f"{name}[1]": last})
    if not 0 <= first <= last < 1:
        raise ValueError(
            f"{name} (={tuple(value)}) must be two shares of the training, at least 0 and below 1, in order"
        )
    return float(first), float(last)
