"""The steps of a conversion: what happens to each layer, and why."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

from .. import layers
from ..ground.checks import check_choice
from ..ground.table import Column, cost_text, lines, most_costly, name_of_repeats, repeats
from ..layers import QuantizedLayer
from ..layers.bypassed import has_own_forward, parent_of, run
from ..layers.computed import base_of, computed_by, why_not_computed
from ..layers.naming import name_of
from ..layers.parents import read_by_parents
from ..layers.variants import around_own_forward
from ..scheme import Factory, Scheme
from ..schemes import lsq, minmax
from .before_sign import ActivationStep, find_steps
from .layer_patterns import compiled_pattern, first_and_last, first_match, layer_names
from .replacements import CHOICES, BeforeSign
from .tied import check_fits, check_tied, tied_parameters

QUANTIZED: dict[type[nn.Module], type[QuantizedLayer]] = {
    layer.float_type: layer
    for layer in vars(layers).values()
    if isinstance(layer, type) and issubclass(layer, QuantizedLayer) and "float_type" in vars(layer)
}
"""The quantized layer of each layer of `torch.nn`: those that `qconv.layers` imports. Their subclasses may compute
anything, so they are left alone, except those of timm, see `qconv.layers.OF_TIMM`, and those in the argument
``subclasses`` of `convert`."""

Kinds = Mapping[type[nn.Module], type[QuantizedLayer]]
SUBCLASS = "a subclass of "
"""The start of the reason why a layer of an unknown subclass stays."""

FIRST_AND_LAST = ("first", "last")

FirstLast = Literal["float", "w8", "w8a8"] | Scheme
FIRST_LAST: dict[str, Scheme | None] = {
    "float": None,
    "w8": minmax(8, None),
    "w8a8": lsq(8, 8, signed_input=True),
}
"""The meaning of the words of ``first_last``."""


@dataclass(frozen=True)
class Step:
    """The conversion of one layer.

    Attributes:
        names: its names in the model; several for a shared layer.
        layer: the layer itself.
        kind: its class before the conversion.
        scheme: the scheme that it would get; None if it stays.
        reason: why it stays, or what chose a scheme other than the model's.
        becomes: its class after the conversion; None if it stays.
        is_changed: whether it stays because of what was done to it before, though it is not among those to skip.
    """

    names: tuple[str, ...]
    layer: nn.Module
    kind: type[nn.Module]
    scheme: Scheme | None
    reason: str = ""
    becomes: type[QuantizedLayer] | None = None
    is_changed: bool = False

    def __str__(self) -> str:
        if self.scheme is None or self.becomes is None:
            return f"{self.kind.__name__} stays: {self.reason}"
        reason = f" ({self.reason})" if self.reason else ""
        return f"{self.kind.__name__} → {self.becomes.__name__} {self.scheme.name}{reason}"


@dataclass(frozen=True, repr=False)
class Plan:
    """The steps of a conversion, in the order of the model's modules, and the activations. ``str(plan)`` is a table.

    Attributes:
        steps: the steps of the layers.
        activations: the replacements of activations that pass only one sign on, before signs.
        costs: what quantizing a layer costs, by its name, such as `qconv.Sensitivity.costs`: another column.
    """

    steps: tuple[Step, ...]
    activations: tuple[ActivationStep, ...] = ()
    costs: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.text()

    def text(self, width: int | None = None) -> str:
        """Return the table; with a width, in so many columns, and layers that repeat in one line."""
        steps = (*self.steps, *self.activations)
        rows = [(", ".join(step.names) or "(the model itself)", str(step)) for step in steps]
        if self.costs:
            costs = (next((self.costs[name] for name in step.names if name in self.costs), None) for step in steps)
            rows = [("layer", "", "cost"), *((*row, cost_text(cost)) for row, cost in zip(rows, costs, strict=True))]
            table = lines(rows, (Column(""), Column(""), Column("", is_right=True)), width)
            return "\n".join([*table, most_costly(self.costs)])
        if width is not None:
            groups = repeats([text for _, text in rows])
            rows = [(name_of_repeats(rows[g[0]][0], rows[g[-1]][0], len(g)), rows[g[0]][1]) for g in groups]
        return "\n".join(lines(rows, (Column(""), Column("")), width))

    def __repr__(self) -> str:
        changed = sum(step.scheme is not None for step in self.steps)
        return f"Plan({changed} of {len(self.steps)} layers change)"


@dataclass(frozen=True)
class Request:
    """The arguments of `qconv.plan` and `qconv.convert` that decide what happens to a layer; described there."""

    scheme: Scheme
    skip: Sequence[str] = FIRST_AND_LAST
    overrides: Mapping[str, Scheme | None] | None = None
    first_last: FirstLast = "float"
    grad_quantizer: Factory | None = None
    before_sign: BeforeSign = "identity"
    signed_inputs: bool | None = None
    example: Any = None
    subclasses: Kinds | None = None


def _quantized(subclasses: Kinds | None) -> Kinds:
    """Return `QUANTIZED`, the layers of torchvision and timm if imported (else no model has one), and others."""
    quantized = dict(QUANTIZED)
    if "torchvision.ops" in sys.modules:
        from ..layers import QDeformConv2d, QDeformConv2dPack

        quantized |= {layer.float_type: layer for layer in (QDeformConv2d, QDeformConv2dPack)}
    if "timm.layers.std_conv" in sys.modules:
        quantized |= {layer.float_type: layer for layer in (getattr(layers, name) for name in layers.OF_TIMM)}
    if subclasses is not None and not isinstance(subclasses, Mapping):
        raise TypeError(
            f"subclasses (={subclasses!r}) must be a dictionary of classes and their quantized layers, such as "
            "{MyConv2d: qconv.QConv2d}"
        )
    for kind, layer in (subclasses or {}).items():
        if not (isinstance(layer, type) and issubclass(layer, QuantizedLayer)):
            raise TypeError(
                f"subclasses[{kind!r}] (={layer!r}) must be a quantized layer's class, such as qconv.QConv2d"
            )
        if not (isinstance(kind, type) and issubclass(kind, layer.float_type)) or issubclass(kind, QuantizedLayer):
            raise TypeError(
                f"subclasses: {kind!r} must be a float subclass of {layer.float_type.__name__}, as {layer.__name__} is"
            )
        quantized[kind] = around_own_forward(layer, kind)
    return quantized


def plan_of(model: nn.Module, asked: Request) -> Plan:
    """Return the plan; the errors are those of `qconv.plan`."""
    scheme, skip, overrides = asked.scheme, asked.skip, asked.overrides or {}
    check_choice("before_sign", asked.before_sign, *CHOICES)
    if isinstance(skip, str) or not isinstance(skip, Iterable):
        such_as = f"such as ({skip!r},)" if isinstance(skip, str) else "() for none"
        raise TypeError(f"skip (={skip!r}) must be a sequence of patterns, {such_as}")
    if asked.overrides is not None and not isinstance(asked.overrides, Mapping):
        raise TypeError(f"overrides (={asked.overrides!r}) must be a dictionary of patterns and schemes")
    for argument, value in (("scheme", scheme), *((f"overrides[{key!r}]", value) for key, value in overrides.items())):
        if not isinstance(value, Scheme) and (argument == "scheme" or value is not None):
            raise TypeError(f"{argument} (={value!r}) must be a qconv.Scheme, such as qconv.schemes.bwn()")
    if asked.signed_inputs is not None:
        scheme = scheme.with_signed_input(asked.signed_inputs)
    for name, patterns in (("skip", skip), ("overrides", overrides)):
        for pattern in patterns:
            if not isinstance(pattern, str):
                raise TypeError(f"{name} has {pattern!r}: it must hold names of layers, or expressions for them")
    words = [word for word in skip if word in FIRST_AND_LAST]
    of_first_and_last = _first_last_scheme(asked.first_last, words)

    quantized = _quantized(asked.subclasses)
    names = layer_names(model, quantized)
    tied = tied_parameters(model)
    if not names:
        looked_for = ", ".join(float_type.__name__ for float_type in QUANTIZED)
        raise ValueError(f"model ({type(model).__name__}) has no layer to convert: it has none of {looked_for}")
    excepted = first_and_last(names, words)
    skip_patterns = {
        pattern: compiled_pattern("skip", pattern, names) for pattern in skip if pattern not in FIRST_AND_LAST
    }
    override_patterns = {pattern: compiled_pattern("overrides", pattern, names) for pattern in overrides}

    bypassed = read_by_parents(model)
    uncalled: set[nn.Module] = set()
    if asked.example is not None:
        watch = run(model, names, asked.example)
        bypassed |= {layer: parent_of(model, names[layer][0]) for layer in watch.bypassed}
        uncalled = names.keys() - watch.called

    def step(layer: nn.Module, at: tuple[str, ...]) -> Step:
        kind, becomes = type(layer), _quantized_class(layer, quantized)
        if isinstance(layer, QuantizedLayer) and becomes is None:
            return Step(at, layer, kind, None, f"quantized already, {layer.scheme.name}")
        chosen, reason, grad = scheme, "", asked.grad_quantizer
        if (pattern := first_match(override_patterns, at)) is not None:
            chosen = overrides[pattern]
            reason = f"overrides {pattern!r}" + (" is None" if chosen is None else "")
            if chosen is not None and chosen.grad is not None:
                grad = None  # the override is meant for this layer alone
        elif layer in excepted:
            chosen, reason = of_first_and_last, f"the {excepted[layer]} layer"
        elif (skipped := first_match(skip_patterns, at)) is not None:
            chosen, reason = None, f"skip {skipped!r}"
        if layer in bypassed:
            why = f"{bypassed[layer]} reads its weight and never calls it"
            if pattern is not None and chosen is not None:
                raise ValueError(f"overrides {pattern!r}: {name_of(layer, at[0])} can't be quantized: {why}")
            return Step(at, layer, kind, None, why)
        if why := _why_changed(layer, becomes is not None):
            return Step(at, layer, kind, None, why, is_changed=chosen is not None)
        weight = layer._parameters.get("weight")
        if weight is not None and weight.is_complex():
            return Step(at, layer, kind, None, "its weight is complex")
        if becomes is None:
            twin = next(float_type for float_type in quantized if isinstance(layer, float_type))
            advice = f", see subclasses={{{kind.__name__}: qconv.{quantized[twin].__name__}}}"
            if isinstance(layer, LazyModuleMixin):
                advice = ", whose weight has no shape yet: run the model once before"
            elif kind.__module__.startswith("torch."):  # never called
                advice = ""
            return Step(at, layer, kind, None, f"{SUBCLASS}{twin.__name__}{advice}")
        if chosen is not None:
            if grad is not None:
                chosen = chosen.with_grad(grad)
            check_fits(layer, becomes, chosen, at, tied)
            if why := why_not_computed(layer, chosen.weight()):
                return Step(at, layer, kind, None, why, is_changed=True)
            if layer in uncalled:
                reason = ", ".join(filter(None, (reason, "not called with the example")))
        return Step(at, layer, kind, chosen, reason, None if chosen is None else becomes)

    steps = _by_depth(step(layer, at) for layer, at in names.items())
    check_tied(model, [(step.names[0], step.layer, step.scheme) for step in steps if step.scheme is not None])
    for pattern, chosen in overrides.items():
        named = [step for step in steps if chosen is not None and first_match(override_patterns, step.names) == pattern]
        if named and all(step.scheme is None for step in named):
            raise ValueError(
                f"overrides {pattern!r}: {name_of(named[0].layer, named[0].names[0])} can't be quantized: "
                f"{named[0].reason}"
            )
    takes_sign = {
        step.layer: step.names[0] for step in steps if step.scheme is not None and step.scheme.input().splits_at_zero
    }
    return Plan(steps, find_steps(model, takes_sign, asked.before_sign))


def _quantized_class(layer: nn.Module, quantized: Kinds) -> type[QuantizedLayer] | None:
    """Return a layer's class once it is quantized; None if it is so already, or of an unknown subclass."""
    if isinstance(layer, QuantizedLayer):
        return cast(type[QuantizedLayer], base_of(layer)) if layer.is_float else None
    return quantized.get(base_of(layer))


def _why_changed(layer: nn.Module, is_known: bool) -> str:
    """Return what was done to a layer, perhaps of a known class, because of which it stays; empty if nothing was."""
    if is_known and layer._parameters.get("weight") is None and computed_by(layer) is None:
        return "its weight is not a parameter"
    if has_own_forward(layer):  # which would be called in place of the quantized layer's
        return "its forward is replaced on the layer itself"
    return ""


def _by_depth(steps: Iterable[Step]) -> tuple[Step, ...]:
    """Give each layer of a layerwise scheme its stages: the first such layer has depth 0, the last one 1."""
    steps = tuple(steps)
    deep = [step for step in steps if step.scheme is not None and step.scheme.starts is not None]
    depths = {step.layer: number / max(len(deep) - 1, 1) for number, step in enumerate(deep)}
    return tuple(
        replace(step, scheme=step.scheme.at_depth(depths[step.layer]))
        if step.scheme is not None and step.layer in depths
        else step
        for step in steps
    )


def _first_last_scheme(first_last: FirstLast, words: Sequence[str]) -> Scheme | None:
    """Return the schemes of the first and the last layer, if ``words`` names them."""
    if isinstance(first_last, Scheme):
        scheme = first_last
    elif first_last in [*FIRST_LAST]:  # what is no word may have no hash
        scheme = FIRST_LAST[first_last]
    else:
        known = ", ".join(map(repr, FIRST_LAST))
        raise ValueError(f"first_last (={first_last!r}) must be one of {known}, or a qconv.Scheme")
    if scheme is not None and not words:
        raise ValueError(f"first_last (={str(first_last)!r}) needs 'first' or 'last' in skip")
    return scheme
