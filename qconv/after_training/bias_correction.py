"""Correction of the shift that quantization adds to a layer's mean outputs (Nagel et al., arXiv:1906.04721)."""

import math
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..convert.tied import shared_tensor
from ..ground.checks import check_module
from ..ground.processes import mean_over_processes, process_count
from ..ground.table import Column, lines
from ..layers import QuantizedLayer
from ..layers.naming import name_of
from ..layers.observed_run import check_not_inference, trial
from ..layers.twins import float_twins, quantized_layers
from .samples import images_of
from .sensitivity import calibrate_what_waits

BIAS, NOWHERE = "its bias", "nothing"
COLUMNS = (Column("layer"), Column("corrected"), Column("shift", is_right=True))


@dataclass(frozen=True)
class Shift:
    """The shift of a layer's mean output by quantization.

    Attributes:
        name: of the layer.
        corrected: what has taken the shift away: "its bias", the names of batch norms, or "nothing".
        size: ``‖E[y_q] − E[y]‖ / ‖σ(y)‖`` over the filters, with the layers before it corrected.
    """

    name: str
    corrected: str
    size: float


@dataclass(frozen=True, repr=False)
class BiasCorrection:
    """The layers in the order of their calls; prints as a table.

    Attributes:
        rows: the layers.
        samples: the number of samples that were used.
    """

    rows: tuple[Shift, ...]
    samples: int

    def __str__(self) -> str:
        cells = [(row.name, row.corrected, f"{row.size:.2%}") for row in self.rows]
        words = f"shift of the mean output before it was corrected, in standard deviations, {self.samples} samples"
        return "\n".join([*lines(cells, COLUMNS), "", words])

    def __repr__(self) -> str:
        return f"BiasCorrection({len(self.rows)} layers, {self.samples} samples)"


def correct_bias(
    model: nn.Module, float_model: nn.Module, images: Tensor | Iterable[Any], *, max_samples: int = 256
) -> BiasCorrection:
    r"""Remove the shift that quantization adds to the mean output of each filter, without labels and without training.

    Bias correction with data (arXiv:1906.04721), for each quantized layer in the order of their calls:

    .. math::

        b \leftarrow b - \bigl( \mathbb{E}[y_q] - \mathbb{E}[y] \bigr)

    y are the outputs of the float layer in the float model, :math:`y_q` those of the quantized layer, which gets its
    inputs from the corrected layers before it; the means are over samples and positions. If a layer without a bias goes
    into a batch norm, the running mean there becomes the float model's plus the difference; other readers of the
    layer's output keep the shift. Weights and scales do not change.

    It runs each model once, and helps if weights are rounded to nearest. After `reconstruct`, which already reduces the
    shift, there is little to gain. If you call `reconstruct` later, pass it ``float_model``. A second call with the
    same float model finds no shift, except for rounding.

    Under `torch.distributed`, every process calls it with the same number of its own samples, and all get the mean.

    Args:
        model: a converted model, which is changed in place. What is not calibrated yet is calibrated on ``images``.
        float_model: the trained model from which it was converted: a copy, as `qconv.convert` changes its model; or
            `qconv.to_float` of a copy that was made before anything was corrected or reconstructed.
        images: a tensor of samples, or batches, from a DataLoader, for example, which are moved from the CPU to the
            model's device; labels are not used.
        max_samples: the number of samples that are used, in a single forward: their activations are in memory at once.

    Returns:
        The shift of each layer that was called. A UserWarning names those with nothing that can be corrected.

    Raises:
        ValueError: a model without quantized layers; a ``float_model`` with some, or without the layers and batch norms
            of ``model``, or which does not call them; no samples, or samples of several sizes or without batches.
        TypeError: a layer or a corrected batch norm that is called twice; a bias that is shared or computed; a batch
            that is no tensor.
        RuntimeError: `torch.inference_mode`.
        FloatingPointError: outputs of a layer with NaN or inf. Biases and batch norms are as they were.
    """
    check_module(model)
    check_module(float_model, "float_model")
    check_not_inference("correct_bias notes which tensors are changed")
    layers = quantized_layers(model)
    if not layers:
        raise ValueError(
            f"model ({type(model).__name__}) has no quantized layers: convert a float model, with "
            "qconv.schemes.minmax(4, 8) for example, and call this before qconv.freeze"
        )
    twins = float_twins(layers, float_model)
    _check_biases(model, layers)
    pictures = images_of(model, images, max_samples, max_samples)
    if len(sizes := {tuple(batch.shape[1:]) for batch in pictures}) > 1:
        raise ValueError(f"images must all have one size, because they form one batch; there are {sorted(sizes)}")
    sample = torch.cat(pictures)
    targets: dict[str, tuple[Tensor, Tensor]] = {}

    def note(name: str, output: Tensor) -> None:
        targets[name] = _moments(twins[name], name, output)

    with trial(float_model), _called(twins, note):
        float_model(sample)
    calibrate_what_waits(model, [sample])
    found = _Found(layers, targets, _norms(float_model))
    with trial(model, warns=True), _called(layers, found.of_layer), _before(_norms(model), found.of_norm):
        model(sample)
    rows = found.apply()
    if left := [row.name for row in rows if row.corrected == NOWHERE]:
        warnings.warn(
            f"the mean outputs of {', '.join(map(repr, left))} stay shifted: there is no bias, and no batch norm "
            "after them; give the float layer a bias before convert",
            stacklevel=2,
        )
    return BiasCorrection(rows, len(sample))


def _check_biases(model: nn.Module, layers: Mapping[str, QuantizedLayer]) -> None:
    """Raise a TypeError for a bias that can't be corrected for one layer only."""
    biases = {name: layer.bias for name, layer in layers.items() if layer.bias is not None}
    for name, layer in layers.items():
        if name in biases and layer._parameters.get("bias") is None:
            raise TypeError(f"the bias of {name_of(layer, name)} is computed by a parametrization: remove that first")
    if shared := shared_tensor(model, biases):
        raise TypeError(f"{' and '.join(shared)} share a bias, which can't correct both")


def _norms(model: nn.Module) -> dict[str, _BatchNorm]:
    return {name: module for name, module in model.named_modules() if isinstance(module, _BatchNorm)}


def _moments(layer: nn.Module, name: str, output: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and deviation of a layer's outputs, per filter, over samples, positions and processes."""
    weight = cast(Tensor, layer.weight)
    least = 2 if isinstance(layer, nn.Linear) else weight.ndim
    if output.ndim < least:
        raise ValueError(
            f"images must be batches: the outputs of {name_of(layer, name)} have {output.ndim} dimensions instead "
            f"of {least}"
        )
    channels = output.ndim - 1 if isinstance(layer, nn.Linear) else 1
    others = [dimension for dimension in range(output.ndim) if dimension != channels]
    count = output.numel() // output.shape[channels]
    mean = output.mean(others, dtype=torch.float64)
    square = torch.linalg.vector_norm(output, dim=others, dtype=torch.float64).square() / count
    mean_over_processes((mean, square), True, process_count())
    if not bool(mean.isfinite().all()):
        raise FloatingPointError(f"the outputs of {name_of(layer, name)} have NaN or inf on these images")
    return mean, (square - mean.square()).clamp_min(0).sqrt()


class _Found:
    """The shifts in a forward of the quantized model, corrected on the way; `apply` makes them permanent."""

    def __init__(
        self,
        layers: Mapping[str, QuantizedLayer],
        targets: Mapping[str, tuple[Tensor, Tensor]],
        float_norms: Mapping[str, _BatchNorm],
    ) -> None:
        self.layers, self.targets, self.float_norms = layers, targets, float_norms
        self.shifts: dict[str, Tensor] = {}
        self.of_norms: dict[str, list[tuple[str, _BatchNorm, Tensor]]] = {}
        self.calls: Counter[_BatchNorm] = Counter()
        # Outputs of layers without bias, with their versions: a batch norm may get one of them, if it was not changed.
        self.outputs: list[tuple[weakref.ref[Tensor], int, str]] = []

    def of_layer(self, name: str, output: Tensor) -> Tensor | None:
        """Record the shift of an output; return the output without it if the layer has a bias."""
        layer = self.layers[name]
        if name not in self.targets:
            raise ValueError(f"float_model does not call {name_of(layer, name)}, which model calls")
        shift = self.shifts[name] = _moments(layer, name, output)[0] - self.targets[name][0]
        if layer.bias is not None:
            return output - _in_place_of(shift, layer, output)
        if output.ndim == 2 or not isinstance(layer, nn.Linear):  # its channels are those of a batch norm
            self.outputs.append((weakref.ref(output), output._version, name))
        return None

    def of_norm(self, place: str, norm: _BatchNorm, input: Tensor) -> Tensor | None:
        """Return the input without its shift, if it is the output of a layer without bias."""
        self.calls[norm] += 1
        same = (name for output, version, name in self.outputs if output() is input and input._version == version)
        name = next(same, None)
        if name is None:
            return None
        twin = self.float_norms.get(place)
        if norm.running_mean is None:  # it takes away every mean
            shift = torch.zeros_like(self.shifts[name])
        elif twin is not None and twin.running_mean is not None:
            shift = self.shifts[name] - (norm.running_mean - twin.running_mean)  # less what was corrected before
        else:
            raise ValueError(f"float_model must have the batch norms of model: it lacks '{place}.running_mean'")
        self.of_norms.setdefault(name, []).append((place, norm, shift))
        return input - _in_place_of(shift, self.layers[name], input)

    @torch.no_grad()
    def apply(self) -> tuple[Shift, ...]:
        """Change biases and running means; return a row for each layer."""
        if not self.shifts:
            raise ValueError("model calls none of its quantized layers")
        means: set[int] = set()
        for place, norm, _ in (each for norms in self.of_norms.values() for each in norms):
            if self.calls[norm] > 1 or (norm.running_mean is not None and id(norm.running_mean) in means):
                raise TypeError(f"{place} ({type(norm).__name__}) is called twice: its inputs have different shifts")
            means.add(id(norm.running_mean))
        rows: list[Shift] = []
        for name, shift in self.shifts.items():
            layer, norms = self.layers[name], self.of_norms.get(name, [])
            corrected = ", ".join(place for place, _, _ in norms) or NOWHERE
            shifts = [each for *_, each in norms]
            if layer.bias is not None:
                layer.bias.sub_(shift.to(layer.bias))
                corrected = BIAS
            for _, norm, each in norms:
                if norm.running_mean is not None:
                    norm.running_mean.add_(each.to(norm.running_mean))
            size = max(float(each.norm()) for each in shifts or [shift])
            deviation = float(self.targets[name][1].norm())
            rows.append(Shift(name, corrected, size / deviation if deviation else math.inf if size else 0.0))
        return tuple(rows)


def _in_place_of(shift: Tensor, layer: nn.Module, output: Tensor) -> Tensor:
    """Return the shift in a shape to subtract from the output."""
    size = (-1,) if isinstance(layer, nn.Linear) else (-1, *(1,) * (output.ndim - 2))
    return shift.to(output).view(size)


@contextmanager
def _called(layers: Mapping[str, nn.Module], act: Callable[[str, Tensor], Tensor | None]) -> Iterator[None]:
    """Call ``act(name, output)`` after each layer, before other hooks; its result replaces the output."""
    seen: set[str] = set()

    def behind(name: str, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor | None:
        del args
        if name in seen:
            raise TypeError(f"{name_of(module, name)} is called twice: its calls have different shifts")
        seen.add(name)
        return act(name, output)

    with ExitStack() as hooks:
        for name, layer in layers.items():
            hooks.enter_context(layer.register_forward_hook(partial(behind, name), prepend=True))
        yield


@contextmanager
def _before(norms: Mapping[str, _BatchNorm], act: Callable[[str, _BatchNorm, Tensor], Tensor | None]) -> Iterator[None]:
    """Call ``act(name, norm, input)`` before each batch norm; its result replaces the input."""

    def before(name: str, norm: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        input = args[0] if args else kwargs["input"]
        changed = act(name, cast(_BatchNorm, norm), input)
        if changed is None:
            return None
        return ((changed, *args[1:]), kwargs) if args else ((), {**kwargs, "input": changed})

    with ExitStack() as hooks:
        for name, norm in norms.items():
            hooks.enter_context(norm.register_forward_pre_hook(partial(before, name), with_kwargs=True))
        yield
