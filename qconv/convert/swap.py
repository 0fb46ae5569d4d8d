"""Swapping the layers of a model: `plan` shows what would happen, `convert` does it, `to_float` undoes it."""

import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar, cast

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..check import forget, watch
from ..ground.checks import check_flags, check_module
from ..ground.table import screen_width
from ..layers import QuantizedLayer
from ..layers.adopt import adopt, release, undo
from ..layers.naming import name_of
from ..layers.parents import call_children_, undo_
from ..lean import lean as make_lean, while_not_lean
from ..scheme import Factory, Scheme
from .before_sign import note_, replace_all
from .decisions import FIRST_AND_LAST, SUBCLASS, FirstLast, Kinds, Plan, Request, Step, plan_of
from .replacements import BeforeSign, replaced, restore_

Model = TypeVar("Model", bound=nn.Module)


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
            sign is the activation, as in Bi-Real Net; ``"hardtanh"``; ``"prelu"``, with one learned slope, which
            is trained before frozen layers, too (modules only); ``"leaky"``, a slope of 2^-10: the sign is that of the
            ReLU's input, and all other readers get the ReLU's values (where the sign is that of an average over many,
            it stays +1); ``"keep"`` leaves it. All calls of a shared module, or of functions by
            a module's methods, change together: if no such sign follows one of them, or `torch.fx` can't trace where
            one is, they become ``"leaky"`` in place of the first three, and the plan says so. `to_float` undoes it. The
            layers record what precedes their signs, so a state dict of a model with another choice is refused; one
            without a record, from an earlier version, is loaded.
        signed_inputs: True puts the levels of ``scheme``'s inputs on both sides of 0, False starts them at 0, where the
            method has both (`schemes.lsq`); ``overrides`` and ``first_last`` keep their own. None leaves the choice to
            the scheme: LSQ decides by the inputs that each layer sees in `calibrate` or in the first training batch,
            and says what it chose. Methods without levels below 0 warn where they clip negative inputs.
        example: an input of the model, a tuple of its arguments, or a dictionary of them. The model is run with it, in
            evaluation: layers whose weights it reads without calling them stay float, since nothing would be quantized
            there. `READERS` in `qconv.layers.parents` are known without an example.
        subclasses: the quantized layers of subclasses that would otherwise be left alone: ``{MyConv2d: qconv.QConv2d}``
            if the class computes the same as its parent, or does something around its parent's forward, such as
            padding, which it keeps. `freeze` and `save_packed` refuse such layers. Other classes need their own
            quantized layer, see `qconv.layers.variants`. timm's ``StdConv2d``, ``ScaledStdConv2d`` (with "same"
            padding, too), ``Conv2dSame`` and ``Linear`` are known.
        costs: what quantizing a layer costs, by its name, such as `qconv.Sensitivity.costs`, as a column of the table.

    Returns:
        The steps, as data.

    Raises:
        ValueError: a pattern that matches no layer, an invalid pattern, an unknown word as ``first_last``, or one other
            than "float" if ``skip`` names neither, a scheme in ``overrides`` for a layer that the model never calls, or
            for layers all of which stay as they are (of an unknown subclass, with a weight that is no parameter, or
            quantized already), a ``before_sign`` that is none of the five, or ``signed_inputs`` for a scheme without
            that choice.
        TypeError: ``model`` is not a module, ``scheme`` not a scheme, a pattern not text, ``skip`` no sequence,
            ``overrides`` or ``subclasses`` no dictionary, or ``grad_quantizer`` makes no quantizer; an ``example`` of
            another kind than those above that the model can't take.
    """
    check_module(model)
    asked = Request(
        scheme, skip, overrides, first_last, grad_quantizer, before_sign, signed_inputs, example, subclasses
    )
    with while_not_lean(model):
        result = plan_of(model, asked)
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
    check: bool = True,
) -> Model:
    """Turn the layers of a model into quantized ones, in place, and return the model. The weights are kept.

    Arguments and errors are those of `plan`, without ``costs``. Layer objects stay the same, so shared layers stay
    shared, and hooks and an optimizer's parameters stay valid. Learned tensors of a scheme are new parameters, frozen
    if the layer's weight is (``requires_grad=False``), except the slopes of ``"prelu"``. Linear and (transposed,
    deformable) convolution layers are converted. Their subclasses stay as they are, except those in ``subclasses``
    (with a warning if they are most of the layers). So do layers that are already quantized, except by
    `schemes.identity`, and layers with a weight that is not a parameter, such as a fixed kernel in a buffer. If
    anything fails, the model is left unchanged. A plain convolution that makes the offsets of a deformable one is
    treated like any other: name it in ``skip``. Activations before signs change with the layers, see ``before_sign``;
    if an activation can't be replaced, a warning names the layers with constant signs.

    Hooks of the layers watch the first three training batches, and then remove themselves. They warn of inputs in one
    level, of negative inputs that are clipped, of steps without `qconv.after_step`, and of evaluation before
    calibration. ``check=False`` leaves them out; `qconv.check` tells the same at any time, and more. The fast paths of
    `torch.nn.TransformerEncoderLayer` and others that would not call quantized layers are switched off.

    With ``lean=True`` the model is made lean afterwards, as by `qconv.lean`. In a model that is already lean, new
    quantized layers are lean, too, even with ``lean=False``.

    Raises:
        TypeError: ``lean`` or ``check`` is not a bool; and as for `plan`.
        ValueError: nothing is left to convert; the model is wrapped in DistributedDataParallel; and as for `plan`.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(8, 10))
        >>> convert(model, qconv.schemes.bnn())[1]
        QConv2d(8, 8, kernel_size=(3, 3), stride=(1, 1), scheme=bnn())
    """
    check_flags(lean=lean, check=check)
    check_module(model)
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        raise ValueError(
            "model is wrapped in DistributedDataParallel, which does not synchronize parameters added later, such "
            "as learned step sizes: convert the model first, then wrap it"
        )
    asked = Request(
        scheme, skip, overrides, first_last, grad_quantizer, before_sign, signed_inputs, example, subclasses
    )
    with while_not_lean(model):
        made = plan_of(model, asked)
        if all(step.scheme is None for step in made.steps):
            raise ValueError(f"model ({type(model).__name__}) has nothing left to convert:\n{made}")
        _warn_of_layers_left(made.steps)
        with _all_or_nothing(model, made) as done:
            _adopt(made.steps, done)
            for step in made.steps:
                if step.scheme is not None:
                    step.layer.__dict__["name_in_model"] = step.names[0]
            replace_all(made.activations)
            note_(model, made.activations, before_sign)
            call_children_(model)
    if check:
        watch(model)
    return make_lean(model) if lean else model


def _warn_of_layers_left(steps: Sequence[Step]) -> None:
    """Warn if most layers stay because they are of unknown subclasses, or any because of what was done to it."""
    if left := [step for step in steps if step.is_changed]:
        others = f" So do {len(left) - 1} others: see qconv.plan." if len(left) > 1 else ""
        warnings.warn(f"layer '{left[0].names[0]}' stays float: {left[0].reason}.{others}", stacklevel=3)
    unknown = [step for step in steps if step.reason.startswith(SUBCLASS)]
    if 2 * len(unknown) > len(steps):
        kinds = Counter(step.kind.__name__ for step in unknown).most_common()
        listed = ", ".join(f"{count} {name}" for name, count in kinds)
        warnings.warn(
            f"{len(unknown)} of {len(steps)} layers stay float, because subclasses may compute anything: {listed}. If "
            f"they compute what their parents do, name them in subclasses=: '{unknown[0].names[0]}' is "
            f"{unknown[0].reason}; see qconv.layers.variants for others",
            stacklevel=3,
        )


Done = list[tuple[QuantizedLayer, Scheme | None, list[bool]]]
"""The layers that were changed, with their former schemes, and which of their parameters were trained."""


@contextmanager
def _all_or_nothing(model: nn.Module, made: Plan) -> Iterator[Done]:
    """Context manager: after an error, also a warning that is one, the model is what it was before.

    Those who change layers append them to what it gives.
    """
    done: Done = []
    activations = [step.module for step in made.activations if replaced(step.module) is None]
    try:
        yield done
    except BaseException:
        for module in activations:
            restore_(module)
        for layer, former, required in reversed(done):
            undo(layer, former)
            for parameter, is_trained in zip(layer.parameters(), required, strict=True):
                parameter.requires_grad_(is_trained)
        undo_(model)
        call_children_(model)  # of layers that were quantized before
        raise


def _adopt(steps: Sequence[Step], done: Done) -> None:
    """Change the layers of the plan and append them to ``done``; an error names the layer that fails."""
    for step in steps:
        if step.scheme is None or step.becomes is None:
            continue
        trained = [parameter.requires_grad for parameter in step.layer.parameters()]
        former = step.layer.scheme if isinstance(step.layer, QuantizedLayer) else None
        name = name_of(step.layer, step.names[0])
        try:
            adopt(step.layer, step.becomes, step.scheme)
        except (ValueError, TypeError, RuntimeError) as error:
            if type(error) in (ValueError, TypeError, RuntimeError):
                raise type(error)(f"{name}: {error}") from error
            raise
        done.append((cast(QuantizedLayer, step.layer), former, trained))


def to_float(model: Model) -> Model:
    """Undo `convert`: turn every quantized layer into its float twin, in place, and return the model.

    The float layers get the latent weights, or the learned ones if a scheme learns them in other tensors. Layers that
    were parametrized or pruned after `convert` stay so. Activations that were replaced before signs are put back. The
    model is no longer lean.

    Pass the whole model that was converted, because activations and the signs after them may lie in different parts. To
    leave a part float, convert the float model with ``overrides``.

    Raises:
        ValueError: the model has no quantized layer.
        TypeError: ``model`` is not a module.
    """
    check_module(model)
    layers = [module for module in model.modules() if isinstance(module, QuantizedLayer)]
    if not layers:
        raise ValueError(f"model ({type(model).__name__}) has no quantized layer")
    make_lean(model, False)
    for layer in layers:
        release(layer)
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
