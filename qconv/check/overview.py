"""`qconv.check`: one table of what is known to go wrong in a model."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..ground.checks import check_module
from ..ground.table import Column, lines, screen_width
from ..layers import QuantizedLayer
from ..layers.bypassed import parent_of, run
from ..layers.twins import quantized_layers
from ..loop.input_signs import REMEDY, SHARE as NEGATIVE, judged
from ..loop.optimizer_step import is_stepped_by, left_out
from .judgements import SHARE, crowded, left_undone


class Problem(NamedTuple):
    """A row of the table.

    Attributes:
        name: of the layer or the tensor; "optimizer" for what concerns all its steps.
        problem: what goes wrong, and the remedy.
    """

    name: str
    problem: str


def check(model: nn.Module, example: Any = None, optimizer: Optimizer | None = None) -> list[Problem]:
    """Print known problems in the training of a converted model, and return them. The model is not changed.

    It always names quantizers without data. With ``example``, one forward in evaluation mode shows inputs that nearly
    all become one level (as of a sign after a ReLU), negative inputs that are clipped, and layers that are not called,
    perhaps because the model reads their weight directly. With ``optimizer``, it names steps that do not end with
    `qconv.after_step`, and learned tensors that the optimizer of the weights lacks.

    Args:
        model: a converted model.
        example: an input of the model, a tuple of its arguments, or a dictionary of them, as in use.
        optimizer: the optimizer of the model, or one that wraps it.

    Returns:
        The rows of the table; empty if nothing is wrong.

    Raises:
        TypeError: ``model`` is not a module; ``optimizer`` is no optimizer; an ``example`` that the model can't take.
        ValueError: the model has no quantized layer.
    """
    check_module(model)
    layers = quantized_layers(model)
    if not layers:
        raise ValueError(f"model ({type(model).__name__}) has no quantized layer")
    found = list(_without_data(layers))
    if example is not None:
        found += _seen(model, layers, example)
    if optimizer is not None:
        found += _of_steps(model, layers, optimizer)
    text = lines(found, (Column("name"), Column("problem")), screen_width()) if found else ["nothing found"]
    print("\n".join(text))  # noqa: T201  # it is there to be read on the screen
    return found


def _without_data(layers: Mapping[str, QuantizedLayer]) -> Iterator[Problem]:
    for name, layer in layers.items():
        if not layer.input_quantizer.calibrated:
            kind = type(layer.input_quantizer).__name__
            yield Problem(name, f"{kind} has had no data: call qconv.calibrate(model, batches) before evaluation")


def _seen(model: nn.Module, layers: Mapping[str, QuantizedLayer], example: Any) -> list[Problem]:
    """What one forward shows, in the order of the layers."""
    found: dict[nn.Module, list[str]] = {layer: [] for layer in layers.values()}

    def look(layer: nn.Module, args: tuple[Any, ...]) -> None:
        if isinstance(layer, QuantizedLayer) and args and isinstance(args[0], Tensor) and args[0].numel():
            found[layer] += [text for text in _of_input(layer, args[0]) if text not in found[layer]]

    with ExitStack() as hooks:
        for layer in found:
            hooks.enter_context(layer.register_forward_pre_hook(look))
        watch = run(model, found, example)
    for name, layer in layers.items():
        if layer in watch.bypassed:
            found[layer].append(
                f"{parent_of(model, name)} computes with its float weight and never calls it: convert the float model "
                "with it in skip, or with example=input, which leaves it float"
            )
        elif layer not in watch.called:
            found[layer].append("not called with the example")
    return [Problem(name, text) for name, layer in layers.items() for text in found[layer]]


@torch.no_grad()
def _of_input(layer: QuantizedLayer, input: Tensor) -> Iterator[str]:
    quantizer = layer.input_quantizer
    if not quantizer.calibrated:
        return
    most = crowded(layer, input)
    if most is not None and most.share >= SHARE:
        yield most.message(quantizer)
    negative = judged(quantizer, (input < 0).float().mean().item())
    if negative is not None and negative.signed is None and negative.share >= NEGATIVE:
        yield f"{negative.share:.0%} of its inputs are negative and clipped to 0: {REMEDY}"


def _of_steps(model: nn.Module, layers: Mapping[str, QuantizedLayer], optimizer: Optimizer) -> Iterator[Problem]:
    if not is_stepped_by(optimizer, model) and (what := next(filter(None, map(left_undone, layers.values())), "")):
        remedy = "call qconv.after_every_step(optimizer, model) before the training loop"
        yield Problem("optimizer", f"its steps do not end with qconv.after_step, which {what}: {remedy}")
    for name in left_out(optimizer, model):
        yield Problem(
            name, "not in the optimizer of the weights: create it after qconv.convert, or call add_param_group"
        )
