"""Schemes that change during training: float weights first, or fewer and fewer bits."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from ..checks import check_numbers
from ..quantizers import Identity, Stages
from ..scheme import Factory, Scheme


def staged(stages: Sequence[tuple[float, Scheme]]) -> Scheme:
    """Return one scheme that runs several in turn: each begins at its progress, set by `qconv.set_progress`.

    Progressive bits (APoT's initialization, arXiv:1909.13144) are ``staged([(0, apot(4, 4)), (0.5, apot(2, 2))])``.
    `qconv.quantizers.Stages` describes how a stage begins. The gradient quantizer is that of the last scheme.

    Raises:
        ValueError: no stages, a first stage that does not begin at 0, starts that do not increase or lie beyond 1;
            schemes
            that differ in ``padding_value``, ``scale_map`` or ``backward_weight``, or that replace the weight.
        TypeError: something other than a scheme.
    """
    stages = [(float(start), scheme) for start, scheme in stages]
    for _, scheme in stages:
        if not isinstance(scheme, Scheme):
            raise TypeError(f"stages must hold pairs (progress, qconv.Scheme), not {scheme!r}")
    last = stages[-1][1] if stages else Scheme("none")
    for _, scheme in stages:
        for name in ("padding_value", "scale_map", "backward_weight"):
            value, asked = getattr(scheme, name), getattr(last, name)
            if value != asked:
                raise ValueError(f"{name} (={value!r}) of {scheme} must be that of {last} (={asked!r}) in stages")
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
        ValueError: ``start`` is not above 0 and at most 1, or the scheme replaces the weight.
        TypeError: ``scheme`` is not a scheme.
    """
    if not isinstance(scheme, Scheme):
        raise TypeError(f"scheme (={scheme!r}) must be a qconv.Scheme, such as qconv.schemes.reactnet()")
    check_numbers(start=start)
    if not 0 < start <= 1:
        raise ValueError(f"start (={start}) must be above 0 and at most 1")
    weight = partial(Stages, [(0.0, Identity), (float(start), scheme.weight)])
    weight()
    return replace(scheme, name=f"two_stage({scheme}, start={start:g})", weight=weight)
