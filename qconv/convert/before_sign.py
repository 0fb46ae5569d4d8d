"""Activations before signs in a conversion: the steps of `plan`, and carrying them out."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from torch import nn

from ..layers import QuantizedLayer
from ..layers.bypassed import has_own_forward
from ..layers.sign_note import note_of
from .one_signed import Site, find
from .replacements import BeforeSign, calls_relu, replace_, replace_calls_

SHOWN = 3
NAMES = {
    "hardtanh": "Hardtanh",
    "prelu": "PReLU",
    "leaky": "LeakyReLU, which keeps the sign",
    "identity": "Identity",
}


@dataclass(frozen=True)
class ActivationStep:
    """The conversion of one activation that passes only one sign on, before signs.

    Attributes:
        names: its names in the model, or those of the module whose forward calls it.
        module: that module.
        kind: its class before the conversion.
        function: the function that is called; empty for an activation that is a module.
        layers: the names of the layers whose input would have one sign because of it.
        like: one of these layers.
        becomes: its replacement, in the terms of ``before_sign``; None if it stays.
        reason: why it stays, or is replaced otherwise than chosen.
        is_traced: whether a graph shows that it precedes these layers; if not, it may.
    """

    names: tuple[str, ...]
    module: nn.Module
    kind: type[nn.Module]
    function: str
    layers: tuple[str, ...]
    like: nn.Module
    becomes: str | None
    reason: str = ""
    is_traced: bool = True

    def __str__(self) -> str:
        what = f"{self.function} in {self.kind.__name__}" if self.function else self.kind.__name__
        shown = _listed(self.layers)
        if self.becomes is None:
            return (
                f"{what} stays: {self.reason}; the input of {shown} {'is' if self.is_traced else 'may be'} one-signed"
            )
        because = f", because {self.reason}" if self.reason else ""
        before = "before" if self.is_traced else "perhaps before"
        return f"{what} → {NAMES[self.becomes]}{because} ({before} the sign of {shown})"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:SHOWN]) + (", …" if len(names) > SHOWN else "")


def find_steps(model: nn.Module, layers: Mapping[nn.Module, str], choice: BeforeSign) -> tuple[ActivationStep, ...]:
    """Plan ``choice`` for the activations in ``model`` because of which the input of any of ``layers`` has one sign."""
    if not layers:
        return ()
    looked = find(model, layers)
    elsewhere = {(site.module, _way(site)) for site in looked.elsewhere}
    layers_at: dict[Site, list[nn.Module]] = {}
    for layer, sites in looked.inputs.items():
        for site in sites:
            layers_at.setdefault(site, []).append(layer)
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name)
    order = {module: number for number, module in enumerate(names)}
    steps = []
    for site in sorted(layers_at, key=lambda site: (order[site.module], site.function)):
        is_traced = site not in looked.untraced
        leaky = (site.module, _way(site)) in elsewhere and choice not in ("keep", "leaky")
        becomes: BeforeSign = "leaky" if leaky else choice
        reason = stays = _why_not(site, becomes)
        if leaky and not stays:
            reason = "it is also called where no sign follows" if is_traced else "torch.fx can't trace its calls"
        steps.append(
            ActivationStep(
                names=tuple(names[site.module]),
                module=site.module,
                kind=type(site.module),
                function=site.function,
                layers=tuple(name for layer, name in layers.items() if layer in layers_at[site]),
                like=layers_at[site][0],
                becomes=None if stays else becomes,
                reason=reason,
                is_traced=is_traced,
            )
        )
    return tuple(steps)


def _way(site: Site) -> str:
    """How it is replaced: all functions that a module calls change together; methods of tensors can't change."""
    return site.function if site.function.startswith(".") else "functions" if site.function else ""


def _why_not(site: Site, choice: BeforeSign) -> str:
    """Return why the activation stays; empty if it is replaced."""
    if choice == "keep":
        return "before_sign='keep'"
    if has_own_forward(site.module):
        return "its forward is replaced on the module itself: del module.forward first"
    if not site.function:
        return ""
    if choice == "prelu":
        return "a function has no parameter: use nn.ReLU"
    if site.function.startswith(".") or not calls_relu(type(site.module)):
        return f"convert can't replace {site.function} here: use nn.ReLU"
    return ""


def replace_all(steps: Sequence[ActivationStep]) -> None:
    """Replace the activations; warn about those that can't be."""
    done = set()
    for step in steps:
        if step.becomes is None or step.module in done:
            continue
        done.add(step.module)
        if step.function:
            replace_calls_(step.module, step.becomes)
        else:
            replace_(step.module, step.becomes, step.like)
    left = [step for step in steps if step.becomes is None and step.reason != "before_sign='keep'"]
    if left:
        where = "\n".join(f"{step.names[0] or '(the model itself)'}  {step}" for step in left)
        let = "activation lets" if len(left) == 1 else "activations let"
        stand = "stands" if len(left) == 1 else "stand"
        if not all(step.is_traced for step in left):
            stand = "may stand"
        warnings.warn(
            f"{len(left)} {let} one sign through and {stand} before signs, which are then constant:\n{where}",
            stacklevel=3,
        )


def note_(model: nn.Module, steps: Sequence[ActivationStep], choice: BeforeSign) -> None:
    """Record in the layers of signs which activations precede them; a state dict may tell it nowhere else."""
    choices: dict[str, set[str]] = {}
    for step in steps:
        for name in step.layers:
            choices.setdefault(name, set()).add("keep" if step.becomes is None else step.becomes)
    for name, kinds in choices.items():
        cast(QuantizedLayer, model.get_submodule(name)).before_sign = note_of(choice, kinds)
