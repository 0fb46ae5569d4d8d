"""Forward hooks that watch the first training batches of quantized layers, and then remove themselves."""

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from ..layers import QuantizedLayer
from ..layers.naming import name_of
from ..layers.observed_run import is_quiet
from ..layers.twins import quantized_layers
from ..loop.input_signs import Negative, judged, tell
from .judgements import SHARE, crowded, left_undone, uncalibrated, versions

BATCHES = 3
"""The number of training batches that are watched."""


def watch(model: nn.Module) -> None:
    """Watch the first three training batches of every quantized layer, counted anew."""
    forget(model)
    report = Report()
    for name, layer in quantized_layers(model).items():
        layer.register_forward_hook(FirstBatches(name, report))


def forget(model: nn.Module) -> None:
    """End what `watch` began."""
    for module in model.modules():
        hooks = module._forward_hooks
        for key in [key for key, hook in hooks.items() if isinstance(hook, FirstBatches)]:
            hooks.pop(key, None)


class Report:
    """What layers that are watched together tell in one message."""

    def __init__(self) -> None:
        self.found: dict[str, Negative] = {}
        self.is_step_told = False


class FirstBatches:
    """The hook of one layer: it counts the forwards in training with gradient, and ends with the third.

    Evaluation is looked at until then. Forwards that are compiled, traced or in a transform of `torch.func` are not,
    nor those of a replica of DataParallel, which is temporary.

    Attributes:
        is_stepped: whether `qconv.after_step` was called with the layer, or an optimizer was made to call it.
        is_calibrated: whether `qconv.calibrate` has told of its negative inputs.
    """

    def __init__(self, name: str, report: Report) -> None:
        self.name, self.report = name, report
        self.batches = self.in_one_level = 0
        self.versions: dict[int, int] = {}
        self.is_stepped = self.is_calibrated = self.was_evaluated = False

    def __call__(self, layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if torch.compiler.is_compiling() or is_quiet() or not args or not _can_be_read(args[0]):
            return
        if not isinstance(layer, QuantizedLayer):  # it has become float
            forget(layer)
        elif "_former_parameters" in layer.__dict__ or not args[0].numel():
            return
        elif not layer.training:
            self._evaluated(layer)
        elif torch.is_grad_enabled():
            with torch.no_grad():
                self._trained(layer, args[0])

    def _evaluated(self, layer: QuantizedLayer) -> None:
        if not self.was_evaluated and (why := uncalibrated(layer)):
            self.was_evaluated = True
            warnings.warn(f"{name_of(layer, self.name)} {why}", stacklevel=2)

    def _trained(self, layer: QuantizedLayer, input: Tensor) -> None:
        self.batches += 1
        if self.batches == 1:
            negative = judged(layer.input_quantizer, (input < 0).float().mean().item())
            if negative is not None and not self.is_calibrated:
                self.report.found[self.name or name_of(layer)] = negative
        else:
            of_first, self.report.found = self.report.found, {}
            tell(of_first)
        self._look_for_steps(layer)
        found = crowded(layer, input)
        self.in_one_level += found is not None and found.share >= SHARE
        if self.batches == BATCHES:
            forget(layer)
            if found is not None and self.in_one_level == BATCHES:
                first = f"{name_of(layer, self.name)}: in each of its first {BATCHES} training batches "
                warnings.warn(first + found.message(layer.input_quantizer), stacklevel=2)

    def _look_for_steps(self, layer: QuantizedLayer) -> None:
        """Warn, once for the model, if weights have changed without `qconv.after_step`."""
        before, self.versions = self.versions, versions(layer)
        has_changed = before.keys() == self.versions.keys() and before != self.versions  # others may stand in
        if has_changed and not (self.is_stepped or self.report.is_step_told) and (what := left_undone(layer)):
            self.report.is_step_told = True
            warnings.warn(
                f"an optimizer's step did not end with qconv.after_step, which {what} with {layer.scheme}: call "
                "qconv.after_every_step(optimizer, model) before the training loop",
                stacklevel=2,
            )


def _can_be_read(input: Any) -> bool:
    """Whether it is a plain tensor with values: no trace, capture or transformation by `torch.func`."""
    if type(input) not in (Tensor, nn.Parameter) or input.is_meta or torch.jit.is_tracing():  # pyright: ignore[reportPrivateImportUsage]
        return False
    if input.is_cuda and torch.cuda.is_current_stream_capturing():
        return False
    return not torch._C._functorch.is_functorch_wrapped_tensor(input)  # pyright: ignore[reportAttributeAccessIssue]
