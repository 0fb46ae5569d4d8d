"""The mean that quantization adds to the outputs of a layer, taken away again (Nagel et al., arXiv:1906.04721)."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from .checks import check_at_least_one, check_whole
from .hessian import quantized_layers
from .layers import QuantizedLayer
from .layers.naming import name_of
from .layers.trial import trial
from .sensitivity import batches_of, calibrate_what_waits
from .table import Column, lines

BIAS, NOWHERE = "its bias", "nothing"
COLUMNS = (Column("layer"), Column("corrected"), Column("shift", is_right=True))


@dataclass(frozen=True)
class Shift:
    """How far quantization has moved the mean output of a layer.

    Attributes:
        name: of the layer.
        corrected: what has taken the shift away: "its bias", the names of batch norms, or "nothing".
        size: ``‖E[y_q] − E[y]‖ / ‖σ(y)‖`` over the filters, behind the corrected layers before it.
    """

    name: str
    corrected: str
    size: float


@dataclass(frozen=True, repr=False)
class BiasCorrection:
    """The layers in the order of their calls; ``str`` of it is a table.

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
    r"""Take away what quantization adds to the mean output of each filter, without labels and without training.

    Bias correction with data (arXiv:1906.04721, section 4.2 and appendix D), for each quantized layer in the order of
    their calls:

    .. math::

        b \leftarrow b - \bigl( \mathbb{E}[y_q] - \mathbb{E}[y] \bigr)

    y are the outputs of the float layer in the float model, :math:`y_q` those of the quantized layer, which gets its
    inputs from the corrected layers before it; the means are over samples and places. A layer without a bias, whose
    output goes into a batch norm, is corrected in the running mean of that, which becomes the float model's plus the
    difference. Weights and scales stay.

    It takes as long as two forwards, and helps where weights are rounded to nearest. Behind `reconstruct`, which sees
    the shift as a part of its error, little is left to gain; do not call it before `reconstruct`, which takes the
    batch norms of its float model from the quantized one. Called again, it finds no shift.

    Args:
        model: a converted model, which is changed in place. What is not calibrated yet is calibrated on ``images``.
        float_model: the trained model from which it was converted, or `qconv.to_float` of a copy.
        images: a tensor of samples, or batches, from a DataLoader, for example; labels are not used.
        max_samples: the number of samples that are used, in a single forward.

    Returns:
        The shift of each layer that was called. A UserWarning names those with nothing that can be corrected.

    Raises:
        ValueError: a model without quantized layers; a ``float_model`` with some, or without a layer of the same name
            and weight shape; no samples.
        TypeError: a layer or a batch norm that is called twice.
        FloatingPointError: outputs of a layer with NaN or inf. The model is as it was.
    """
    check_whole("max_samples", max_samples)
    check_at_least_one(max_samples=max_samples)
    layers = quantized_layers(model)
    if not layers:
        raise ValueError(f"model ({type(model).__name__}) is float: convert it first, with qconv.schemes.minmax(4, 8)")
    twins = _twins(layers, float_model)
    pictures = [batch for batch, _ in batches_of(images, None, max_samples, max_samples)]
    if not pictures:
        raise ValueError("images must hold at least one sample")
    sample = torch.cat(pictures)
    calibrate_what_waits(model, [(sample, None)])
    targets: dict[str, tuple[Tensor, Tensor]] = {}

    def note(name: str, output: Tensor) -> None:
        targets[name] = _mean_and_deviation(twins[name], output)

    with trial(float_model), _called(twins, note):
        float_model(sample)
    found = _Found(layers, targets, _norms(float_model))
    with trial(model), _called(layers, found.of_layer), _before(_norms(model), found.of_norm):
        model(sample)
    rows = found.apply()
    if left := [row.name for row in rows if row.corrected == NOWHERE]:
        warnings.warn(
            f"the shift of {', '.join(left)} stays: no bias, and no batch norm that takes the output; give the float "
            "layer a bias before it is converted",
            stacklevel=2,
        )
    return BiasCorrection(rows, len(sample))


def _twins(layers: Mapping[str, QuantizedLayer], float_model: nn.Module) -> dict[str, nn.Module]:
    """The float layers by the names of the quantized ones."""
    if others := quantized_layers(float_model):
        name, layer = next(iter(others.items()))
        raise ValueError(
            f"float_model has a quantized layer, {name_of(layer, name)}: give the model before it was converted, or "
            "qconv.to_float of a copy"
        )
    modules = dict(float_model.named_modules())
    for name, layer in layers.items():
        weight = getattr(modules.get(name), "weight", None)
        size = tuple(weight.shape) if isinstance(weight, Tensor) else "absent"
        if size != tuple(layer.weight.shape):
            raise ValueError(
                f"float_model must have the layers of model: '{name}.weight' is {size} in it, "
                f"{tuple(layer.weight.shape)} in model"
            )
    return {name: modules[name] for name in layers}


def _norms(model: nn.Module) -> dict[str, _BatchNorm]:
    return {name: module for name, module in model.named_modules() if isinstance(module, _BatchNorm)}


class _Found:
    """The shifts of a forward of the quantized model, which sees them corrected; `apply` makes them last."""

    def __init__(
        self,
        layers: Mapping[str, QuantizedLayer],
        targets: Mapping[str, tuple[Tensor, Tensor]],
        float_norms: Mapping[str, _BatchNorm],
    ) -> None:
        self.layers, self.targets, self.float_norms = layers, targets, float_norms
        self.shifts: dict[str, Tensor] = {}
        self.of_norms: dict[str, list[tuple[str, _BatchNorm, Tensor]]] = {}
        self.outputs: list[tuple[Tensor, str]] = []  # of layers without bias: a batch norm may get one of them

    def of_layer(self, name: str, output: Tensor) -> Tensor | None:
        """Note the shift of an output, and return the output without it if the layer has a bias."""
        layer = self.layers[name]
        if name not in self.targets:
            raise ValueError(f"float_model does not call {name}, which model calls")
        shift = _mean_and_deviation(layer, output)[0] - self.targets[name][0]
        if not bool(shift.isfinite().all()):
            raise FloatingPointError(f"the outputs of {name_of(layer, name)} have NaN or inf on these images")
        self.shifts[name] = shift
        if layer.bias is not None:
            return output - _in_place_of(shift, layer, output)
        self.outputs.append((output, name))
        return None

    def of_norm(self, place: str, norm: _BatchNorm, input: Tensor) -> Tensor | None:
        """Return the input without its shift, if it is the output of a layer without bias."""
        name = next((name for output, name in self.outputs if output is input), None)
        if name is None:
            return None
        if any(norm is other for others in self.of_norms.values() for _, other, _ in others):
            raise TypeError(f"{place} ({type(norm).__name__}) is called twice: its inputs have shifts of their own")
        twin = self.float_norms.get(place)
        if norm.running_mean is None:  # it takes away every mean
            shift = torch.zeros_like(self.shifts[name])
        elif twin is not None and twin.running_mean is not None:
            shift = self.shifts[name] - (norm.running_mean - twin.running_mean)  # less what was corrected before
        else:
            raise ValueError(f"float_model must have the batch norms of model: '{place}.running_mean' is absent in it")
        self.of_norms.setdefault(name, []).append((place, norm, shift))
        return input - _in_place_of(shift, self.layers[name], input)

    @torch.no_grad()
    def apply(self) -> tuple[Shift, ...]:
        """Change biases and running means; return a row for each layer."""
        rows: list[Shift] = []
        for name, shift in self.shifts.items():
            layer, norms = self.layers[name], self.of_norms.get(name, [])
            corrected, shifts = ", ".join(place for place, _, _ in norms) or NOWHERE, [each for *_, each in norms]
            if layer.bias is not None:
                layer.bias.sub_(shift.to(layer.bias))
                corrected = BIAS
            for _, norm, each in norms:
                if norm.running_mean is not None:
                    norm.running_mean.add_(each.to(norm.running_mean))
            deviation = max(float(self.targets[name][1].norm()), 1e-300)
            rows.append(Shift(name, corrected, max(float(each.norm()) for each in shifts or [shift]) / deviation))
        return tuple(rows)


def _is_last(layer: nn.Module) -> bool:
    """Whether channels are the last dimension of the outputs."""
    return isinstance(layer, nn.Linear)


def _mean_and_deviation(layer: nn.Module, output: Tensor) -> tuple[Tensor, Tensor]:
    """Return both for each filter, over samples and places."""
    channels = output.ndim - 1 if _is_last(layer) else 1
    flat = output.detach().double().movedim(channels, 0).flatten(1)
    return flat.mean(1), flat.std(1, correction=0)


def _in_place_of(shift: Tensor, layer: nn.Module, output: Tensor) -> Tensor:
    """Return the shift in a shape to subtract from the output."""
    size = (-1,) if _is_last(layer) else (-1, *(1,) * (output.ndim - 2))
    return shift.to(output).view(size)


@contextmanager
def _called(layers: Mapping[str, nn.Module], act: Callable[[str, Tensor], Tensor | None]) -> Iterator[None]:
    """Call ``act(name, output)`` behind each layer; what it returns replaces the output.

    Raises:
        TypeError: a layer is called twice.
    """
    seen: set[str] = set()

    def hook(name: str):
        def behind(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor | None:
            del args
            if name in seen:
                raise TypeError(f"{name_of(module, name)} is called twice: its calls have shifts of their own")
            seen.add(name)
            return act(name, output)

        return behind

    handles = [layer.register_forward_hook(hook(name)) for name, layer in layers.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _before(norms: Mapping[str, _BatchNorm], act: Callable[[str, _BatchNorm, Tensor], Tensor | None]) -> Iterator[None]:
    """Call ``act(name, norm, input)`` before each batch norm; what it returns replaces the input."""

    def hook(name: str):
        def before(norm: nn.Module, args: tuple[Any, ...]) -> Tensor | None:
            return act(name, cast(_BatchNorm, norm), args[0])

        return before

    handles = [norm.register_forward_pre_hook(hook(name)) for name, norm in norms.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
