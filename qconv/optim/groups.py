"""Parameter groups by the kind of parameter: learned steps, binary weights, normalizations."""

import copy
import math
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from inspect import signature
from numbers import Real
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.optim import Optimizer

from ..ground.checks import check_module, check_not_negative
from ..layers import QuantizedLayer
from ..layers.computed import trained_weights
from ..loop.optimizer_step import innermost
from ..quantizers import Quantizer, Stages

Predicate = Callable[[str, nn.Parameter], bool]
Options = Mapping[str, Any]
Rules = Mapping[str, Options] | Mapping[Predicate, Options] | Mapping[str | Predicate, Options]

KINDS = (
    "binary_weights",
    "quantized_weights",
    "input_quantizers",
    "weight_quantizers",
    "grad_quantizers",
    "quantizers",
    "norms",
    "biases",
)
"""The kinds that a rule of `parameter_groups` can name."""

_WITH_PRODUCTS = (nn.Linear, _ConvNd, nn.Embedding)
_NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)  # _NormBase is that of batch and instance norms


def parameter_groups(model: nn.Module, rules: Rules | None = None, *, lr: float | None = None) -> list[dict[str, Any]]:
    """Sort the trainable parameters of ``model`` into groups with their own options, for any torch optimizer.

    Args:
        model: any module.
        rules: maps each rule to its options; the first rule that matches a parameter counts. A rule is one of

            - ``"binary_weights"``, ``"quantized_weights"``: weights of quantized layers, with 1 or fewer than 32 bits,
              or what they are computed from (`torch.nn.utils.parametrize`, pruning);
            - ``"quantizers"``: the learned tensors of quantizers; ``"input_quantizers"``, ``"weight_quantizers"`` and
              ``"grad_quantizers"``: those that a quantized layer has in this role;
            - ``"norms"``: weights and biases of normalizations: torch's, and vectors of others with "norm" in the
              name of their class; ``"biases"``: parameters named ``bias``, also of normalizations, not of quantizers;
            - any other text: a regular expression that matches the parameter's whole name;
            - a function of name and parameter that says whether it matches.

            A shared parameter has all its names and kinds.

            Options are the optimizer's, and ``lr_scale``: the group's learning rate is ``lr_scale · lr``.
        lr: the learning rate that the optimizer gets, too; needed if a rule has an ``lr_scale``.

    Returns:
        First the group of the parameters that no rule matches, if there are any, with no options: it takes those of the
        optimizer. Then a group for each rule, in their order. Every trainable parameter is in exactly one group. A
        parameter that is frozen now (``requires_grad=False``) is in none.

    Raises:
        ValueError: no trainable parameter, an invalid expression, an option ``params``, or a rule that matches nothing,
            or only parameters that earlier rules take; an ``lr_scale`` that is not positive, beside an ``lr`` of the
            same rule, in a binary group of `Bop`, or without the optimizer's ``lr``; a binary group with a weight whose
            value does not follow its sign (SiMaN), or that its quantizer changes after each step (``center=True``).
        TypeError: ``model`` is not a module, a rule is neither text nor function, or options are not a mapping.

    Example:
        APoT's recipe (arXiv:1909.13144), and DeepShift-PS's (arXiv:1905.13298, with `shift_penalty` in the loss)::

            parameter_groups(model, {"input_quantizers": {"lr": 0.1}, "weight_quantizers": {"lr": 0.02}})
            parameter_groups(model, {"weight_quantizers": {"weight_decay": 0.0}})

        Learned steps with Adam, which moves every parameter by about ``lr`` each time, however small it is::

            torch.optim.Adam(parameter_groups(model, {"quantizers": {"lr_scale": 0.01}}, lr=0.01), lr=0.01)

        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
        >>> groups = parameter_groups(model, {"norms": {"weight_decay": 0.0}})
        >>> [len(group["params"]) for group in groups]
        [2, 2]
    """
    check_module(model)
    rules = {} if rules is None else rules
    if not isinstance(rules, Mapping):
        raise TypeError(f"rules (={rules!r}) must be a mapping of rules to options, such as {{'norms': {{'lr': 0.1}}}}")
    names: dict[nn.Parameter, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            names[parameter].append(name)
    if not names:
        raise ValueError(f"model ({type(model).__name__}) has no trainable parameter")
    kinds = _kinds(model)
    rest = list(names)
    groups: list[dict[str, Any]] = []
    for rule, options in rules.items():
        if not isinstance(options, Mapping):
            raise TypeError(f"rules[{rule!r}] (={options!r}) must be a mapping of options, such as {{'lr': 0.1}}")
        if "params" in options:
            raise ValueError(f"rules[{rule!r}] must not have the option 'params': the rule says which they are")
        matches = _matcher(rule, kinds)
        matched = [parameter for parameter in names if any(matches(name, parameter) for name in names[parameter])]
        if not matched:
            some = ", ".join(repr(parameter_names[0]) for parameter_names in list(names.values())[:5])
            raise ValueError(
                f"rules[{rule!r}] matches no trainable parameter of the model; a rule is one of {', '.join(KINDS)}, "
                f"a function, or an expression for whole names such as {some}"
            )
        taken, left = set(matched), set(rest)
        if not taken & left:
            raise ValueError(f"rules[{rule!r}] matches only parameters that earlier rules match: put it first")
        if options.get("binary"):
            _check_flips(model, taken)
        own = {"params": [parameter for parameter in rest if parameter in taken], **options}
        if "lr_scale" in own:
            own["lr"] = _scaled(lr, own.pop("lr_scale"), rule, options)
        groups.append(own)
        rest = [parameter for parameter in rest if parameter not in taken]
    return [{"params": rest}, *groups] if rest else groups


def _check_flips(model: nn.Module, weights: Collection[nn.Parameter]) -> None:
    """Raise a ValueError unless each value has its weight's sign, or in a whole filter the opposite sign.

    So it does for a quantizer that changes weights of ±1 after a step, in any stage.
    """
    for name, layer in model.named_modules():
        if not isinstance(layer, QuantizedLayer) or layer._parameters.get("weight") not in weights:
            continue
        with layer.as_evaluated() as (quantizer, filters):
            third = (torch.arange(filters.numel(), device=filters.device) % 3 == 0).view_as(filters)
            both = [torch.where(ones, 1.0, -1.0).to(filters) for ones in (third, ~third)]
            same = torch.cat([(quantizer.quantize(x, *quantizer.tensors()).sign() * x).flatten(1) for x in both], 1)
            after = [x.clone() for x in both]
            own: Any = copy.deepcopy(quantizer)
            stages: list[Quantizer] = list(own.quantizers) if isinstance(quantizer, Stages) else [own]
            for stage in stages:
                for x in after:
                    stage.after_step_(x)
        if not torch.equal(same.amin(1), same.amax(1)):
            raise ValueError(
                f"{name}.weight with {layer.scheme} can't be in a binary group: its value does not follow the sign of "
                "the weight, which Bop flips; use a scheme such as qconv.schemes.bnn"
            )
        if not all(map(torch.equal, after, both)):
            raise ValueError(
                f"{name}.weight with {layer.scheme} can't be in a binary group: its quantizer changes the weights "
                "after each step, as center=True does, and Bop keeps them at ±1; use a scheme such as "
                "qconv.schemes.bnn"
            )


def _scaled(lr: Any, scale: Any, rule: str | Predicate, options: Options) -> float:
    """Return the learning rate of a rule with ``lr_scale``."""
    if not _is_positive(scale):
        raise ValueError(f"rules[{rule!r}]: lr_scale (={scale!r}) must be a positive number")
    if "lr" in options:
        raise ValueError(f"rules[{rule!r}] must have lr (={options['lr']!r}) or lr_scale (={scale!r}), not both")
    if options.get("binary"):
        raise ValueError(
            f"rules[{rule!r}]: lr_scale (={scale!r}) must not be in a binary group, whose learning rate is Bop's γ and "
            "not a share of Adam's: use lr"
        )
    if lr is None:
        raise ValueError(f"rules[{rule!r}]: lr_scale (={scale!r}) multiplies the optimizer's lr, which must be given")
    if not _is_positive(lr):
        raise ValueError(f"lr (={lr!r}) must be a positive number for lr_scale (={scale!r}) of rules[{rule!r}]")
    return float(lr) * float(scale)


def _is_positive(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and 0 < float(value) < math.inf


def _matcher(rule: str | Predicate, kinds: Mapping[nn.Parameter, set[str]]) -> Predicate:
    if callable(rule):
        return rule
    if not isinstance(rule, str):
        raise TypeError(f"rules: {rule!r} must be a kind, a regular expression or a function of name and parameter")
    if rule in KINDS:
        return lambda _, parameter: rule in kinds[parameter]
    try:
        pattern = re.compile(rule)
    except re.error as error:
        raise ValueError(f"rules: {rule!r} must be a regular expression: {error}") from error
    return lambda name, _: pattern.fullmatch(name) is not None


def _kinds(model: nn.Module) -> Mapping[nn.Parameter, set[str]]:
    """Return the `KINDS` of every parameter."""
    kinds: dict[nn.Parameter, set[str]] = defaultdict(set)

    def add(kind: str, parameters: Iterable[nn.Parameter]) -> None:
        for parameter in parameters:
            kinds[parameter].add(kind)

    for module in model.modules():
        if isinstance(module, Quantizer):
            add("quantizers", module.parameters())
        elif isinstance(module, _NORMS):
            add("norms", module.parameters(recurse=False))
        elif isinstance(module, QuantizedLayer):
            for place in ("input", "weight", "grad"):
                quantizer = getattr(module, f"{place}_quantizer")
                add(f"{place}_quantizers", () if quantizer is None else quantizer.parameters())
            weights, bits = trained_weights(module), module.weight_quantizer.bits
            add("binary_weights", weights if bits == 1 else ())
            add("quantized_weights", weights if bits < 32 else ())
        elif "norm" in type(module).__name__.lower() and not isinstance(module, _WITH_PRODUCTS):  # of timm, for one
            add("norms", [parameter for parameter in module.parameters(recurse=False) if parameter.ndim == 1])
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name.rpartition(".")[2] == "bias" and "quantizers" not in kinds[parameter]:
            add("biases", [parameter])
    return kinds


class ModelOptimizer:
    """Builds an optimizer over the `parameter_groups` of a model, in a form that a configuration can express.

    ``ModelOptimizer(optimizer, rules, lr=lr, **options)(model)`` is
    ``optimizer(parameter_groups(model, rules, lr=lr), lr=lr, **options)``.

    Raises:
        ValueError: an ``lr`` or ``weight_decay`` that is negative or infinite; None, or another count of numbers, where
            the optimizer's default has numbers.

    Example:
        >>> make = ModelOptimizer(torch.optim.SGD, {"biases": {"weight_decay": 0.0}}, lr=0.1, weight_decay=1e-4)
        >>> [group["weight_decay"] for group in make(nn.Linear(2, 2)).param_groups]
        [0.0001, 0.0]
    """

    def __init__(self, optimizer: Callable[..., Optimizer], rules: Rules | None = None, **options: Any) -> None:
        check_not_negative(
            **{name: options[name] for name in ("lr", "weight_decay") if isinstance(options.get(name), Real)}
        )
        defaults = {name: each.default for name, each in signature(optimizer).parameters.items()}
        for name, value in options.items():  # torch raises an IndexError for betas=[0.9]
            default = defaults.get(name)
            if isinstance(default, tuple) and (not isinstance(value, Sequence) or len(value) != len(default)):
                raise ValueError(f"{name} (={value}) must be {len(default)} numbers, such as {list(default)}")
            if isinstance(default, float) and value is None:
                raise ValueError(f"{name} (=None) must be a number, such as {default}")
        self.optimizer, self.rules, self.options = optimizer, rules, options

    def __call__(self, model: nn.Module) -> Optimizer:
        """Return the optimizer of ``model``.

        Raises:
            TypeError: the parameters of a model in place of the model.
            ValueError: as for `parameter_groups`; an option in the rules that looks like a mistyped one.
        """
        if not isinstance(model, nn.Module):
            raise TypeError(f"model ({type(model).__name__}) must be the module itself, not its parameters")
        optimizer = self.optimizer(parameter_groups(model, self.rules, lr=self.options.get("lr")), **self.options)
        known = [*innermost(optimizer).defaults, "lr_scale"]
        for rule, options in (self.rules or {}).items():
            # torch keeps options that nothing reads. What is like no other may be read without a default.
            for name in [name for name in options if name not in known]:
                if close := get_close_matches(name, known, n=1, cutoff=0.8):
                    kind = type(optimizer).__name__
                    raise ValueError(f"rules[{rule!r}]: {kind} has no option {name!r}; did you mean {close[0]!r}?")
        return optimizer
