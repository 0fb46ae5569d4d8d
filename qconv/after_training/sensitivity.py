"""Which layers cost accuracy most: one layer at a time is quantized, and outputs and loss are compared."""

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..convert import convert
from ..ground.checks import check_module
from ..ground.progress import shown
from ..ground.table import Column, lines, write_csv
from ..layers import QuantizedLayer
from ..layers.copies import copied
from ..layers.observed_run import trial, without_warnings
from ..layers.twins import quantized_layers
from ..lean import lean
from ..loop.calibrate import calibrate_layers
from ..loop.optimizer_step import check_final
from ..scheme import Scheme
from .layer_chart import BLUE, layer_chart
from .samples import Batches, Loss, Output, batches_of, loss_of, outputs_of

COLUMNS = (
    Column("layer"),
    Column("scheme"),
    *(Column(head, is_right=True) for head in ("error", "SQNR dB", "KL", "loss", "accuracy")),
)
ALL = "(all together)"
IGNORED = -100
"""The label that `torch.nn.functional.cross_entropy` leaves out."""


@dataclass(frozen=True)
class Cost:
    """The effect of quantization on the outputs of a model.

    Attributes:
        layer: the name of the layer that is quantized.
        scheme: its scheme.
        error: ``Σ (y_q − y)² / Σ y²`` over the output; the mean of several outputs.
        kl: the mean divergence KL(p ‖ p_q) of the classes' probabilities in nats; None unless the only output is
            ``(N, C)`` with C above 1.
        loss: the increase of the loss; None without ``loss=`` or labels of classes.
        accuracy: the change of the accuracy, from −1 to 1; None without labels of classes.
    """

    layer: str
    scheme: str
    error: float
    kl: float | None = None
    loss: float | None = None
    accuracy: float | None = None

    @property
    def sqnr(self) -> float:
        """The signal-to-quantization-noise ratio of the outputs, in dB."""
        return float("inf") if self.error == 0 else -10 * torch.tensor(self.error, dtype=torch.float64).log10().item()

    @property
    def cost(self) -> float:
        """The figure for comparing layers: the loss; without labels the divergence, else the error."""
        return next(figure for figure in (self.loss, self.kl, self.error) if figure is not None)


@dataclass(frozen=True, repr=False)
class Sensitivity:
    """The costs of a model's layers, the most costly first; prints as a table.

    Attributes:
        rows: a cost for each layer.
        together: the cost of all of them at once.
        samples: the number of samples that were used.
        loss: the loss of the float model; None without labels of classes.
    """

    rows: tuple[Cost, ...]
    together: Cost
    samples: int
    loss: float | None = None

    @property
    def costs(self) -> dict[str, float]:
        """`Cost.cost` by layer name, for `qconv.plan` and `qconv.summary`."""
        return {row.layer: row.cost for row in self.rows}

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Write a row for each layer, and one for all layers together."""
        write_csv([{**asdict(row), "sqnr_db": row.sqnr} for row in (*self.rows, self.together)], Path(path))

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw the costs as bars, the most costly layer on top, into a PNG file.

        Raises:
            ImportError: matplotlib is not installed.
        """
        rows = self.rows[::-1]
        with layer_chart(path, len(rows), 1, "Sensitivity.plot") as (axes,):
            axes.barh([row.layer for row in rows], [row.cost for row in rows], color=BLUE)
            axes.set_xlabel(f"{self._measure}, each layer quantized alone ({self.samples} samples)")

    @property
    def _measure(self) -> str:
        return (
            "increase of the loss"
            if self.loss is not None
            else "KL divergence"
            if self.together.kl is not None
            else "error"
        )

    def __str__(self) -> str:
        rows = [*map(_cells, self.rows), None, _cells(self.together)]
        of = "" if self.loss is None else f"; loss of the float model {self.loss:.4f}"
        return "\n".join([*lines(rows, COLUMNS), "", f"by {self._measure}, {self.samples} samples{of}"])

    def __repr__(self) -> str:
        return f"Sensitivity({len(self.rows)} layers, most costly {self.rows[0].layer})"


def sensitivity(
    model: nn.Module,
    images: Tensor | Iterable[Any],
    labels: Tensor | None = None,
    *,
    scheme: Scheme | None = None,
    skip: Sequence[str] = (),
    overrides: Mapping[str, Scheme | None] | None = None,
    output: Output | None = None,
    loss: Loss | None = None,
    batch_size: int = 64,
    max_samples: int = 512,
    **options: Any,
) -> Sensitivity:
    """Quantize one layer at a time, with all others float, and measure the effect on the model's outputs.

    A copy of a float model is converted by ``scheme`` and calibrated on the same images. A converted model is measured
    as it is, against its own latent weights. Neither is changed. The model runs in evaluation, once for each layer.

    Leave the layers at the top float, or give them more bits. The last line of the table says what the choice is worth:

        >>> found = qconv.sensitivity(model, images, labels, scheme=lsq(2, 2))  # doctest: +SKIP
        >>> found.plot("sensitivity.png")  # doctest: +SKIP
        >>> better = {re.escape(row.layer): lsq(8, 8) for row in found.rows[:3]}  # doctest: +SKIP
        >>> print(qconv.sensitivity(model, images, labels, scheme=lsq(2, 2), overrides=better))  # doctest: +SKIP
        >>> qconv.plan(model, lsq(2, 2), overrides=better, costs=found.costs)  # doctest: +SKIP

    Without training in between, low bits do most harm, so use the order of the layers, not the size of the loss.

    Args:
        model: takes one tensor and returns one or several, in tuples, dictionaries or dataclasses: all are compared.
        images: a tensor of samples, or batches, with or without labels, as from a DataLoader; CPU tensors are moved
            to the model's device.
        labels: the samples' (or pixels') classes, with a tensor of images; with them the loss (cross-entropy) is the
            measure. Floats, as of a regression, and labels of a model with one output are no classes, and left out.
        scheme: for a float model; None for a converted one.
        skip: as for `qconv.convert`; by default nothing, so that the first and the last layer are measured, too.
        overrides: as for `qconv.convert`.
        output: the only output that is compared, if the model returns several: the index or key of one, such as
            ``"out"``, or a function that takes what the model returns and gives one tensor.
        loss: computes the mean loss of a batch from what the model returns and the labels (None without them), in
            place of the cross-entropy of the only output.
        batch_size: of a tensor of images.
        max_samples: the number of samples that are used.
        options: further ones of `qconv.convert`. ``before_sign`` is "keep" by default.

    Raises:
        ValueError: a float model without ``scheme``, or a converted one with it; a scheme that changes in the course of
            the training; no samples; labels that are not one for each image; an ``output`` that the model does not
            have; outputs without numbers, or of other shapes once a layer is quantized, such as lists of boxes;
            ``batch_size`` or ``max_samples`` below 1.
        TypeError: a batch, labels or an output that are no tensor; a loss that is no number; labels beside batches; and
            as for `qconv.convert` and `qconv.calibrate`.
        FloatingPointError: outputs with NaN or inf.
    """
    check_module(model)
    batches = batches_of(model, images, labels, batch_size, max_samples)
    is_converted = any(isinstance(module, QuantizedLayer) and not module.is_float for module in model.modules())
    if is_converted == (scheme is not None):
        here = "converted already: leave scheme out" if is_converted else "float: pass scheme=qconv.schemes.lsq(4, 4)"
        raise ValueError(f"model ({type(model).__name__}) is {here}")
    model = copied(model)
    if scheme is not None:
        convert(model, scheme, skip=skip, overrides=overrides, **{"before_sign": "keep", **options, "check": False})
        check_final(model, "scheme")
    lean(model, False)
    model.eval()
    calibrate_what_waits(model, [images for images, _ in batches])
    layers = quantized_layers(model)
    for layer in layers.values():
        if layer.weight_quantizer.replaces_weight:  # learned tensors stand for the weight: there is no other
            with torch.no_grad():
                layer.weight.copy_(layer.float_weight())
    with trial(model):
        with float_but(layers.values()):
            reference = _outputs(model, batches, output, loss)
        rows = []
        for name, layer in shown(list(layers.items()), "sensitivity", len(layers)):
            with float_but([other for other in layers.values() if other is not layer]):
                found = _outputs(model, batches, output, loss)
                rows.append(_cost(name, layer.scheme.name, batches, reference, found))
        together = _cost(ALL, "", batches, reference, _outputs(model, batches, output, loss))
    samples = sum(len(images) for images, _ in batches)
    return Sensitivity(tuple(sorted(rows, key=lambda row: -row.cost)), together, samples, reference[1])


def calibrate_what_waits(model: nn.Module, batches: Sequence[Tensor]) -> None:
    """Calibrate the layers with quantizers that have had no data, or follow the weight; the others stay unchanged."""
    layers = quantized_layers(model)
    waiting = [name for name, layer in layers.items() if not layer.input_quantizer.calibrated]
    if waiting or any(layer.weight_quantizer.is_fresh for layer in layers.values()):
        calibrate_layers(model, batches, sum(map(len, batches)), waiting)


@contextmanager
def float_but(layers: Iterable[QuantizedLayer]) -> Iterator[None]:
    """Context manager: let these layers compute as their float twins; forwards set on a layer are restored."""
    own = {layer: layer.__dict__.get("forward") for layer in layers}
    for layer in own:
        # That of the class: the float_type of a layer may be a subclass of it, whose methods refuse this layer.
        layer.__dict__["forward"] = partial(type(layer).float_type.forward, layer)
    try:
        with without_warnings():
            yield
    finally:
        for layer, forward in own.items():
            layer.__dict__.pop("forward", None)
            if forward is not None:
                layer.__dict__["forward"] = forward


Outputs = tuple[Sequence[Sequence[Tensor]], float | None]
"""Each output of a model, by batches, and the mean loss; None without ``loss=`` or labels of classes."""


def _outputs(model: nn.Module, batches: Batches, output: Output | None, loss: Loss | None) -> Outputs:
    given = [model(images) for images, _ in batches]
    found = [outputs_of(model, each, output) for each in given]
    every = [*zip(*found, strict=True)]
    if loss is None:
        return every, _mean_loss(every[0], batches) if len(every) == 1 else None
    losses = [
        float(loss_of(model, each, labels, loss)) * len(images)
        for each, (images, labels) in zip(given, batches, strict=True)
    ]
    return every, sum(losses) / sum(len(images) for images, _ in batches)


def _cost(name: str, scheme: str, batches: Batches, reference: Outputs, found: Outputs) -> Cost:
    (all_before, loss_before), (all_after, loss_after) = reference, found
    errors = []
    for before, after in zip(all_before, all_after, strict=True):
        if not any(y.numel() for y in before):
            raise ValueError("outputs must have numbers on these images: compare others, by output=")
        for y, y_q in zip(before, after, strict=True):
            if y.shape != y_q.shape:
                here = f"{tuple(y.shape)} and, with {name} quantized, {tuple(y_q.shape)}"
                raise ValueError(f"outputs (of shapes {here}) must keep their shapes: compare others, by output=")
        noise = sum(_energy(y_q - y) for y_q, y in zip(after, before, strict=True))
        if not math.isfinite(noise):
            is_float = not all(map(math.isfinite, map(_energy, before)))
            which = "the float model" if is_float else f"the model with {name} quantized"
            raise FloatingPointError(f"the outputs of {which} have NaN or inf on these images")
        errors.append(noise / max(sum(map(_energy, before)), 1e-300))
    (before, after), kl, accuracy = (all_before[0], all_after[0]), None, None
    if len(errors) == 1 and all(y.ndim == 2 and y.shape[1] > 1 for y in before):
        total = sum(_divergence(y, y_q) for y, y_q in zip(before, after, strict=True))
        kl = max(total / max(sum(map(len, before)), 1), 0.0)
    loss = None if loss_before is None or loss_after is None else loss_after - loss_before
    if len(errors) == 1 and _mean_loss(before, batches) is not None:
        accuracy = _accuracy(after, batches) - _accuracy(before, batches)
    return Cost(name, scheme, sum(errors) / len(errors), kl, loss, accuracy)


def _energy(x: Tensor) -> float:
    return x.double().square().sum().item()


def _divergence(y: Tensor, y_q: Tensor) -> float:
    logs, logs_q = (F.log_softmax(values.double(), 1) for values in (y, y_q))
    return F.kl_div(logs_q, logs, reduction="sum", log_target=True).item()


def _mean_loss(outputs: Sequence[Tensor], batches: Batches) -> float | None:
    """Return the mean cross-entropy; None unless all labels are classes, and the model has at least two."""
    pairs = [(y, labels) for y, (_, labels) in zip(outputs, batches, strict=True) if labels is not None]
    if len(pairs) < len(outputs) or any(
        labels.is_floating_point() or y.ndim < 2 or y.shape[1] < 2 for y, labels in pairs
    ):
        return None
    total = sum(F.cross_entropy(y.double(), labels, reduction="sum").item() for y, labels in pairs)
    return total / max(sum(map(_labelled, (labels for _, labels in pairs))), 1)


def _accuracy(outputs: Sequence[Tensor], batches: Batches) -> float:
    right = sum((y.argmax(1) == labels).sum().item() for y, (_, labels) in zip(outputs, batches, strict=True))
    return right / max(sum(_labelled(labels) for _, labels in batches if labels is not None), 1)


def _labelled(labels: Tensor) -> int:
    """Return the number of labels, perhaps of pixels, that `torch.nn.functional.cross_entropy` counts."""
    return int((labels != IGNORED).sum())


def _cells(row: Cost) -> tuple[str, ...]:
    kl, loss = ("" if figure is None else f"{figure:.4g}" for figure in (row.kl, row.loss))
    accuracy = "" if row.accuracy is None else f"{row.accuracy:+.2%}"
    return row.layer, row.scheme, f"{row.error:.2%}", f"{row.sqnr:.1f}", kl, loss, accuracy
