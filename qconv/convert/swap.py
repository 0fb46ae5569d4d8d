"""Swapping the layers of a model: `plan` shows what would happen, `convert` does it, `to_float` undoes it."""

import re
import sys
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar, cast

from torch import Tensor, nn

from .. import layers
from ..checks import check_flags
from ..layers import (
    QConv1d,
    QConv2d,
    QConv3d,
    QConvTranspose1d,
    QConvTranspose2d,
    QConvTranspose3d,
    QLinear,
    QuantizedLayer,
)
from ..layers.bypassed import forget, parent_of, run, watch_first_forwards
from ..layers.computed import computed_by
from ..layers.naming import name_of
from ..layers.parents import call_children_, read_by_parents, undo_
from ..lean import lean as make_lean, while_not_lean
from ..scheme import Factory, Scheme
from ..schemes import lsq, minmax
from ..table import Column, cost_text, lines, most_costly, name_of_repeats, repeats, screen_width
from .activations import BeforeSign, check_choice, replaced, restore_
from .before_sign import ActivationStep, find_steps, note_, replace_all

Model = TypeVar("Model", bound=nn.Module)

QUANTIZED: dict[type[nn.Module], type[QuantizedLayer]] = {
    layer.float_type: layer
    for layer in (QConv1d, QConv2d, QConv3d, QConvTranspose1d, QConvTranspose2d, QConvTranspose3d, QLinear)
}
"""The quantized layer of each layer of `torch.nn`. Their subclasses may compute anything, so they are left alone,
except those of timm, see `qconv.layers.OF_TIMM`, and those in the argument ``subclasses`` of `convert`."""

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
    """

    names: tuple[str, ...]
    layer: nn.Module
    kind: type[nn.Module]
    scheme: Scheme | None
    reason: str = ""
    becomes: type[QuantizedLayer] | None = None

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


def plan(
    model: nn.Module,
    scheme: Scheme,
    *,
    skip: Sequence[str] = FIRST_AND_LAST,
    overrides: Mapping[str, Scheme | None] | None = None,
    first_last: FirstLast = "float",
    grad_quantizer: Factory | None = None,
    before_sign: BeforeSign = "identity",
    signed_inputs: bool | None = None,
    example: Any = None,
    subclasses: Kinds | None = None,
    costs: Mapping[str, float] | None = None,
) -> Plan:
    """Print for each layer what `convert` would make of it, or why it stays. The model is not changed.

    Args:
        model: any module.
        scheme: for every convolution and linear layer, except as below.
        skip: layers that stay float: the words ``"first"`` and ``"last"`` (in the order of
            ``model.named_modules()``), and regular expressions that match a layer's whole name.
        overrides: schemes for layers whose whole name matches a regular expression, or None to leave them float. The
            first match counts, and takes precedence over ``skip``.
        first_last: the treatment of the layers that ``skip`` names by ``"first"`` and ``"last"``: ``"float"``, as in
            the papers of DoReFa, PACT, TTQ and of most binary networks; ``"w8a8"``, 8 bits for weight and input, as in
            LSQ (`schemes.lsq` with a signed input, which the first layer needs; the paper's last one is unsigned);
            ``"w8"``, 8 bits for the weight alone, as in APoT (`schemes.minmax`); or a scheme. BNN, DeepShift and others
            treat them like the rest: ``skip=()``.
        grad_quantizer: makes a quantizer of the output's gradient for every converted layer, in place of its scheme's,
            except for ``overrides`` with their own: `qconv.quantizers.Int8Stochastic`, ``partial(FP8, "e5m2")``.
        before_sign: the replacement of a ReLU or ReLU6, module or function, before a layer that takes the sign of its
            input (`Quantizer.splits_at_zero`), which would be +1 everywhere. ``"identity"`` means none, so that the
            sign is the activation, as in Bi-Real Net; ``"hardtanh"``; ``"prelu"``, with one learned slope (modules
            only); ``"leaky"``, a slope of 2^-10: the sign is that of the ReLU's input, and all other readers get the
            ReLU's values; ``"keep"`` leaves it. All calls of a shared module, or of functions by a module's methods,
            change together: if no such sign follows one of them, they become ``"leaky"`` in place of the first three,
            and the plan says so. `to_float` undoes it. The layers record what precedes their signs, so a state dict of
            a model with another choice is refused; one without a record, from an earlier version, is loaded.
        signed_inputs: whether the levels of ``scheme``'s inputs lie on both sides of 0 (True) or from 0 on (False),
            where the method has both (`schemes.lsq`); ``overrides`` and ``first_last`` keep their own. None leaves it
            to the scheme, and so by default to the inputs that each layer sees in `calibrate` or in the first training
            batch. These say what was chosen, and warn where a method without levels below 0 cuts negative inputs off.
        example: an input of the model, a tuple of its arguments, or a dictionary of them. The model is run with it, in
            evaluation: layers whose weights it reads without calling them stay float, since nothing would be quantized
            there. `READERS` in `qconv.layers.parents` are known without an example.
        subclasses: the quantized layers of subclasses that would otherwise be left alone. A class that computes the
            same as its parent gets that of the parent, ``{MyConv2d: qconv.QConv2d}``; others need their own, see
            `qconv.layers.variants`. timm's ``StdConv2d``, ``ScaledStdConv2d`` (with "same" padding, too),
            ``Conv2dSame`` and ``Linear`` are known.
        costs: what quantizing a layer costs, by its name, such as `qconv.Sensitivity.costs`, as a column of the table.

    Returns:
        The steps, as data.

    Raises:
        ValueError: a pattern that matches no layer, an invalid pattern, nothing left to convert, an unknown word as
            ``first_last``, or one other than "float" if ``skip`` names neither, a scheme in ``overrides`` for a layer
            that the model never calls, a ``before_sign`` that is none of the five, or ``signed_inputs`` for a scheme
            without that choice.
        TypeError: ``scheme`` is not a scheme, or ``grad_quantizer`` makes no quantizer.
    """
    with while_not_lean(model):
        result = _make_plan(
            model,
            _signed(scheme, signed_inputs),
            skip,
            overrides or {},
            first_last,
            grad_quantizer,
            before_sign,
            example,
            subclasses,
        )
    result = replace(result, costs=costs or {})
    print(result.text(screen_width()))  # noqa: T201  # the one function that is there to be read on the screen
    return result


def convert(
    model: Model,
    scheme: Scheme,
    *,
    skip: Sequence[str] = FIRST_AND_LAST,
    overrides: Mapping[str, Scheme | None] | None = None,
    first_last: FirstLast = "float",
    grad_quantizer: Factory | None = None,
    before_sign: BeforeSign = "identity",
    signed_inputs: bool | None = None,
    example: Any = None,
    subclasses: Kinds | None = None,
    lean: bool = False,
) -> Model:
    """Turn the layers of a model into quantized ones, in place, and return the model. The weights are kept.

    Arguments, of which there are no ``costs``, and errors are those of `plan`. Layer objects stay the same, so shared
    layers stay shared, and hooks and an optimizer's parameters stay valid; learned tensors of a scheme are new
    parameters, frozen if the layer's weight is (``requires_grad=False``). Linear and (transposed, deformable)
    convolution layers are converted. Their subclasses stay as they are, except those in ``subclasses`` (with a warning
    if they are most of the layers). So do layers that are quantized already, and those with a computed weight, such as
    parametrized and pruned ones. If a layer fails, the model is left unchanged. A plain convolution that makes the
    offsets of a deformable one is treated like any other: name it in ``skip``. Activations before signs change with the
    layers, see ``before_sign``; a warning names the layers whose signs stay constant because an activation can't be
    replaced.

    The first forward in training and the first one in evaluation are watched: a warning names quantized layers that the
    model never calls although it computes with their weights, and nothing is shipped with them. The fast paths of
    `torch.nn.TransformerEncoderLayer` and others that would do so are switched off.

    With ``lean=True`` the model is made lean afterwards, as by `qconv.lean`. In a model that is lean already, new
    quantized layers are as well; with ``lean=False``, too.

    Raises:
        TypeError: ``lean`` is not a bool; and as for `plan`.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(8, 10))
        >>> convert(model, qconv.schemes.bnn())[1]
        QConv2d(8, 8, kernel_size=(3, 3), stride=(1, 1), scheme=bnn())
    """
    check_flags(lean=lean)
    with while_not_lean(model):
        made = _make_plan(
            model,
            _signed(scheme, signed_inputs),
            skip,
            overrides or {},
            first_last,
            grad_quantizer,
            before_sign,
            example,
            subclasses,
        )
        _warn_of_subclasses(made.steps)
        _adopt(made.steps)
        for step in made.steps:
            if step.scheme is not None:
                step.layer.__dict__["name_in_model"] = step.names[0]
        replace_all(made.activations)
        note_(model, made.activations, before_sign)
        call_children_(model)
        watch_first_forwards(model)
    return make_lean(model) if lean else model


def _signed(scheme: Scheme, signed_inputs: bool | None) -> Scheme:
    if signed_inputs is None or not isinstance(scheme, Scheme):  # which is refused later
        return scheme
    return scheme.with_signed_input(signed_inputs)


def _warn_of_subclasses(steps: Sequence[Step]) -> None:
    """Warn if most layers stay because they are of unknown subclasses."""
    kinds = Counter(step.kind.__name__ for step in steps if step.reason.startswith(SUBCLASS))
    if 2 * kinds.total() > len(steps):
        listed = ", ".join(f"{count} {name}" for name, count in kinds.most_common())
        warnings.warn(
            f"{kinds.total()} of {len(steps)} layers stay float, because subclasses may compute anything: {listed}. If "
            "they compute what their parents do, give convert(..., subclasses={TheClass: qconv.QConv2d}); see "
            "qconv.layers.variants for others",
            stacklevel=3,
        )


def _adopt(steps: Sequence[Step]) -> None:
    """Change all layers of the plan, or none: if one fails, the error names it and those before it change back."""
    done: list[tuple[QuantizedLayer, type[nn.Module], list[bool]]] = []
    for step in steps:
        if step.scheme is None or step.becomes is None:
            continue
        trained, name = (
            [parameter.requires_grad for parameter in step.layer.parameters()],
            name_of(step.layer, step.names[0]),
        )
        try:
            step.becomes.adopt(step.layer, step.scheme)
        except BaseException as error:
            for layer, kind, required in reversed(done):
                layer.without_quantizers_(kind)
                for parameter, is_trained in zip(layer.parameters(), required, strict=True):
                    parameter.requires_grad_(is_trained)
            if type(error) in (ValueError, TypeError, RuntimeError):
                raise type(error)(f"{name}: {error}") from error
            raise
        done.append((cast(QuantizedLayer, step.layer), step.kind, trained))


def to_float(model: Model) -> Model:
    """Undo `convert`: turn every quantized layer into its float twin, in place, and return the model.

    The float layers get the latent weights, or the learned ones if a scheme learns them in other tensors. Layers that
    were parametrized or pruned after `convert` stay so. Activations that were replaced before signs are put back. The
    model is no longer lean.

    Raises:
        ValueError: the model has no quantized layer.
    """
    layers = [module for module in model.modules() if isinstance(module, QuantizedLayer)]
    if not layers:
        raise ValueError(f"model ({type(model).__name__}) has no quantized layer")
    make_lean(model, False)
    for layer in layers:
        layer.release()
    for module in model.modules():
        restore_(module)
    undo_(model)
    forget(model)
    return model


def float_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Return the state dict for the float twin of the model: without learned tensors of quantizers and activations."""
    learned = quantizer_prefixes(model)
    return {key: value for key, value in model.state_dict().items() if not key.startswith(learned)}


def quantizer_prefixes(model: nn.Module) -> tuple[str, ...]:
    """Return the prefixes of tensors that the float model does not have.

    They are a prefix for each quantizer of each quantized layer, and the names of the learned slopes of activations
    that `convert` has put before signs.
    """
    modules = list(model.named_modules(remove_duplicate=False))
    slopes = (
        f"{name}.{own}" if name else own
        for name, module in modules
        if (was := replaced(module)) is not None and not was.calls
        for own in module._parameters
    )
    quantizers = (
        f"{name}.{child}." if name else f"{child}."
        for name, module in modules
        if isinstance(module, QuantizedLayer)
        for child in ("input_quantizer", "weight_quantizer", "grad_quantizer")
    )
    return *quantizers, *slopes


def _quantized(subclasses: Kinds | None) -> Kinds:
    """Return `QUANTIZED`, the layers of torchvision and timm if imported (else no model has one), and others."""
    quantized = dict(QUANTIZED)
    if "torchvision.ops" in sys.modules:
        from ..layers import QDeformConv2d, QDeformConv2dPack

        quantized |= {layer.float_type: layer for layer in (QDeformConv2d, QDeformConv2dPack)}
    if "timm.layers.std_conv" in sys.modules:
        quantized |= {layer.float_type: layer for layer in (getattr(layers, name) for name in layers.OF_TIMM)}
    for kind, layer in (subclasses or {}).items():
        if not (isinstance(layer, type) and issubclass(layer, QuantizedLayer)):
            raise TypeError(
                f"subclasses[{kind!r}] (={layer!r}) must be a quantized layer's class, such as qconv.QConv2d"
            )
        if not (isinstance(kind, type) and issubclass(kind, layer.float_type)) or issubclass(kind, QuantizedLayer):
            raise TypeError(
                f"subclasses: {kind!r} must be a float subclass of {layer.float_type.__name__}, as {layer.__name__} is"
            )
        quantized[kind] = layer
    return quantized


def _make_plan(
    model: nn.Module,
    scheme: Scheme,
    skip: Sequence[str],
    overrides: Mapping[str, Scheme | None],
    first_last: FirstLast,
    grad_quantizer: Factory | None,
    before_sign: BeforeSign,
    example: Any,
    subclasses: Kinds | None,
) -> Plan:
    check_choice(before_sign)
    if isinstance(skip, str):
        raise TypeError(f"skip (={skip!r}) must be a sequence of patterns, such as ({skip!r},)")
    for argument, value in (("scheme", scheme), *((f"overrides[{key!r}]", value) for key, value in overrides.items())):
        if not isinstance(value, Scheme) and (argument == "scheme" or value is not None):
            raise TypeError(f"{argument} (={value!r}) must be a qconv.Scheme, such as qconv.schemes.bwn()")
    words = [word for word in skip if word in FIRST_AND_LAST]
    of_first_and_last = _first_last_scheme(first_last, words)

    quantized = _quantized(subclasses)
    names = _layer_names(model, quantized)
    tied = _tied_parameters(model)
    if not any(type(layer) in quantized for layer in names):
        raise ValueError(f"model ({type(model).__name__}) has no layer to convert: " + _what_there_is(names))
    excepted = _excepted(names, words)
    skip_patterns = {pattern: _compiled("skip", pattern, names) for pattern in skip if pattern not in FIRST_AND_LAST}
    override_patterns = {pattern: _compiled("overrides", pattern, names) for pattern in overrides}

    bypassed = read_by_parents(model)
    uncalled: set[nn.Module] = set()
    if example is not None:
        watch = run(model, names, example)
        bypassed |= {layer: parent_of(model, names[layer][0]) for layer in watch.bypassed}
        uncalled = names.keys() - watch.called

    def step(layer: nn.Module, at: tuple[str, ...]) -> Step:
        kind = type(layer)
        if isinstance(layer, QuantizedLayer):
            return Step(at, layer, kind, None, f"quantized already, {layer.scheme.name}")
        if layer in bypassed:
            pattern = _first_match(override_patterns, at)
            reason = f"{bypassed[layer]} reads its weight and never calls it"
            if pattern and overrides[pattern] is not None:
                raise ValueError(f"overrides {pattern!r}: {name_of(layer, at[0])} can't be quantized: {reason}")
            return Step(at, layer, kind, None, reason)
        if maker := computed_by(layer):
            return Step(at, layer, kind, None, str(maker))
        if kind not in quantized:
            twin = next(float_type for float_type in quantized if isinstance(layer, float_type))
            return Step(at, layer, kind, None, f"{SUBCLASS}{twin.__name__}")
        chosen, reason, grad = scheme, "", grad_quantizer
        if pattern := _first_match(override_patterns, at):
            chosen = overrides[pattern]
            reason = f"overrides {pattern!r}" + (" is None" if chosen is None else "")
            if chosen is not None and chosen.grad is not None:
                grad = None  # the override is meant for this layer alone
        elif layer in excepted:
            chosen, reason = of_first_and_last, f"the {excepted[layer]} layer"
        elif pattern := _first_match(skip_patterns, at):
            chosen, reason = None, f"skip {pattern!r}"
        if chosen is not None:
            if grad is not None:
                chosen = chosen.with_grad(grad)
            _check_fits(layer, quantized[kind], chosen, at, tied)
            if layer in uncalled:
                reason = ", ".join(filter(None, (reason, "not called with the example")))
        return Step(at, layer, kind, chosen, reason, None if chosen is None else quantized[kind])

    steps = tuple(step(layer, at) for layer, at in names.items())
    if all(step.scheme is None for step in steps):
        raise ValueError(f"model ({type(model).__name__}) has nothing left to convert:\n{Plan(steps)}")
    takes_sign = {
        step.layer: step.names[0] for step in steps if step.scheme is not None and step.scheme.input().splits_at_zero
    }
    return Plan(steps, find_steps(model, takes_sign, before_sign))


def _first_last_scheme(first_last: FirstLast, words: Sequence[str]) -> Scheme | None:
    """Return the schemes of the first and the last layer, if ``words`` names them."""
    if isinstance(first_last, Scheme):
        scheme = first_last
    elif first_last in FIRST_LAST:
        scheme = FIRST_LAST[first_last]
    else:
        known = ", ".join(map(repr, FIRST_LAST))
        raise ValueError(f"first_last (={first_last!r}) must be one of {known}, or a qconv.Scheme")
    if scheme is not None and not words:
        raise ValueError(f"first_last (={str(first_last)!r}) needs 'first' or 'last' in skip")
    return scheme


def _check_fits(
    layer: nn.Module, becomes: type[QuantizedLayer], scheme: Scheme, at: tuple[str, ...], tied: set[nn.Parameter]
) -> None:
    """Raise a ValueError that names the layer if it can't follow the scheme, before anything is changed."""
    try:
        becomes.check_scheme(scheme)
    except ValueError as error:
        raise ValueError(f"{name_of(layer, at[0])}: {error}") from error
    if scheme.weight().replaces_weight and layer.weight in tied:
        raise ValueError(
            f"{name_of(layer, at[0])}: its weight is tied to another module's, and {scheme.name} would "
            "replace it by tensors of its own; leave one of them float by skip or overrides"
        )


def _tied_parameters(model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters that more than one module holds."""
    seen: set[nn.Parameter] = set()
    tied: set[nn.Parameter] = set()
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            (tied if parameter in seen else seen).add(parameter)
    return tied


def _layer_names(model: nn.Module, quantized: Kinds) -> dict[nn.Module, tuple[str, ...]]:
    """Return every layer of a convertible kind, subclasses included, with all its names in the model."""
    names: dict[nn.Module, tuple[str, ...]] = {}
    kinds = tuple(quantized)
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, kinds):
            names[module] = (*names.get(module, ()), name)
    return names


def _excepted(names: Mapping[nn.Module, Any], words: Sequence[str]) -> dict[nn.Module, str]:
    parts = {part for layer in names for part in layer.modules() if part is not layer}  # of a deformable layer
    layers = [layer for layer in names if layer not in parts]
    ends = {"first": layers[0], "last": layers[-1]}
    return {ends[word]: word for word in words}


def _compiled(argument: str, pattern: str, names: Mapping[nn.Module, tuple[str, ...]]) -> re.Pattern[str]:
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{argument} pattern {pattern!r} is not a regular expression: {error}") from error
    every = [name for at in names.values() for name in at]
    if not any(compiled.fullmatch(name) for name in every):
        raise ValueError(f"{argument} pattern {pattern!r} matches no layer; the layers are {', '.join(every)}")
    return compiled


def _first_match(patterns: Mapping[str, re.Pattern[str]], at: tuple[str, ...]) -> str | None:
    return next((text for text, pattern in patterns.items() if any(map(pattern.fullmatch, at))), None)


def _what_there_is(names: Mapping[nn.Module, Any]) -> str:
    kinds = sorted({type(layer).__name__ for layer in names})
    looked_for = ", ".join(float_type.__name__ for float_type in QUANTIZED)
    return f"it has {', '.join(kinds)}" if kinds else f"it has none of {looked_for}"
