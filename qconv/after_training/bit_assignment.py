"""Bits of each layer within a budget: Hessian traces and an integer program (HAWQ-V2, HAWQ-V3)."""

import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn

from ..convert import convert
from ..ground.checks import check_at_least_one, check_choice, check_module, check_whole
from ..ground.extras import needed
from ..ground.processes import check_alone
from ..ground.table import Column, lines, write_csv
from ..layers import QuantizedLayer
from ..layers.copies import copied
from ..layers.observed_run import check_not_inference
from ..layers.twins import quantized_layers
from ..lean import lean
from ..loop.calibrate import calibrate
from ..loop.optimizer_step import check_final
from ..scheme import Scheme
from ..summary import Summary, summarize
from ..summary.costs_table import row_name
from .hessian import expected_losses, traces
from .integer_program import Choice as Choice, cheapest, check_budgets
from .layer_chart import BLUE, layer_chart
from .samples import Batches, Loss, Output, batches_of
from .sensitivity import sensitivity

Measure = Literal["hessian", "measured"]

COLUMNS = (
    Column("layer"),
    Column("scheme"),
    *(Column(head, is_right=True) for head in ("bits w/in", "cost", "packed bytes", "BOPs")),
)


@dataclass(frozen=True, repr=False)
class BitAssignment:
    """The scheme of each layer; prints as a table.

    Attributes:
        rows: the choice for each layer, in the order of the model.
        overrides: the schemes by regular expressions, for `qconv.convert` and `qconv.plan`.
        others: everything that could have been chosen, by layer.
        packed_bytes: of the whole model.
        bops: of the whole model, for one sample.
        traces: the mean of the diagonal of the Hessian by each layer's weight; empty if costs were measured.
    """

    rows: tuple[Choice, ...]
    overrides: Mapping[str, Scheme]
    others: Mapping[str, tuple[Choice, ...]]
    packed_bytes: int
    bops: int
    traces: Mapping[str, float]

    @property
    def cost(self) -> float:
        """The sum of the costs."""
        return sum(row.cost for row in self.rows)

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Write a row for each choice of each layer, with a column for the chosen ones."""
        taken = set(self.rows)
        write_csv([{**asdict(row), "taken": row in taken} for rows in self.others.values() for row in rows], Path(path))

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw the bits of each layer's weight, and the cost of each choice, into a PNG file.

        Raises:
            ImportError: matplotlib is not installed.
        """
        with layer_chart(path, len(self.rows), 2, "BitAssignment.plot") as (left, right):
            left.barh([row.layer for row in self.rows], [row.weight_bits for row in self.rows], color=BLUE)
            left.invert_yaxis()
            left.set_xlabel("bits of the weight")
            for place, row in enumerate(self.rows):
                others = self.others[row.layer]
                right.plot([max(other.cost, 1e-12) for other in others], [place] * len(others), ".", color="#bbbbbb")
                right.plot(max(row.cost, 1e-12), place, "o", color="#dd8452", markersize=5)
            right.set_xscale("log")
            right.set_xlabel("cost (grey: the other choices)")

    def __str__(self) -> str:
        cells = [
            (
                *(row.layer, row.scheme, f"{row.weight_bits:.3g}/{row.input_bits:.3g}", f"{row.cost:.3g}"),
                *(f"{row.packed_bytes:,}", f"{row.bops:,}"),
            )
            for row in self.rows
        ]
        total = ("all", "", "", f"{self.cost:.3g}", f"{self.packed_bytes:,}", f"{self.bops:,}")
        measure = "expected increase of the loss" if self.traces else "divergence of each layer alone"
        end = f"cost: {measure}; bytes and BOPs of all are those of the whole model"
        return "\n".join([*lines([*cells, None, total], COLUMNS), "", end])

    def __repr__(self) -> str:
        return f"BitAssignment({len(self.rows)} layers, {self.packed_bytes} bytes, {self.bops} BOPs)"


def assign_bits(
    model: nn.Module,
    images: Tensor | Iterable[Any],
    labels: Tensor | None = None,
    *,
    choices: Sequence[Scheme],
    max_bytes: int | None = None,
    max_bops: int | None = None,
    measure: Measure = "hessian",
    skip: Sequence[str] = ("first", "last"),
    output: Output | None = None,
    loss: Loss | None = None,
    probes: int = 16,
    batch_size: int = 64,
    max_samples: int = 128,
    seed: int = 0,
    **options: Any,
) -> BitAssignment:
    r"""Choose a scheme for each layer, so that the loss rises least within a budget of bytes or of bit operations.

    The sum of the layers' costs is minimized by an integer program (`scipy.optimize.milp`), as in HAWQ-V3
    (arXiv:2011.10680). The cost of a scheme for a layer is, with ``measure="hessian"``,

    .. math::

        \tfrac12 \, \overline{H}_w \lVert w_q - w \rVert^2 +
        \tfrac12 \, \overline{H}_x \lVert x_q - x \rVert^2

    where :math:`\overline{H}` is the mean of the diagonal of the loss's Hessian by the layer's weight or input: its
    trace, which Hutchinson's estimator takes from products with random signs, over the number of elements; the first
    term is HAWQ-V2's (arXiv:1911.03852), the second is left out if all choices have the same bits for inputs. A
    negative estimate counts as 0. With ``measure="measured"`` it is the divergence of the classes' probabilities that
    `qconv.sensitivity` measures for this layer only; the error, if the outputs are no classes. Neither knows what
    several layers do together, nor how training repairs it: compare the result with `qconv.sensitivity`, and train it.

        >>> found = qconv.assign_bits(model, images, labels, choices=[lsq(2, 2), lsq(4, 4), lsq(8, 8)],
        ...                           max_bytes=100_000)  # doctest: +SKIP
        >>> print(found)  # doctest: +SKIP
        >>> qconv.convert(model, lsq(4, 4), overrides=found.overrides)  # doctest: +SKIP

    Args:
        model: a float model that takes one tensor and returns logits, or several outputs: see ``output`` and ``loss``.
            It is not changed.
        images: a tensor of samples, or batches, with or without labels, as from a DataLoader; CPU tensors are moved
            to the model's device.
        labels: the samples' classes, with a tensor of images. Without labels the loss is the cross-entropy to the
            model's own probabilities.
        choices: the schemes from which each layer gets one.
        max_bytes: the most bytes of the packed model, as `qconv.summary` counts them: without the test of its outputs,
            which has a few hundred.
        max_bops: the most bit operations of the whole model for one sample, as `qconv.summary` counts them.
        measure: ``"hessian"`` or ``"measured"``.
        skip: layers that stay float, as for `qconv.convert`; they count in the budget.
        output: as for `qconv.sensitivity`: the index or key of the logits, or a function that gives them.
        loss: computes the mean loss of a batch from what the model returns and the labels, in place of the
            cross-entropy of the logits. The Hessian of several outputs needs it, or ``output``.
        probes: random vectors for each tensor and batch; a product of the Hessian takes a few times as long as a step.
        batch_size: of a tensor of images.
        max_samples: the number of samples that are used.
        seed: of the random vectors.
        options: further ones of `qconv.convert`. ``before_sign`` is "keep" by default.

    Raises:
        ValueError: no choices, two with one name, or one that changes in the course of the training; neither budget; a
            budget that the cheapest choices exceed; a converted model; no samples; labels that are not one for each
            image; an unknown measure; an ``output`` that the model does not have; a number below 1; traces of a model
            with one output, whose loss is constant.
        TypeError: a choice that is no scheme, and as for `qconv.sensitivity`.
        RuntimeError: several processes, which would come to different choices; `torch.inference_mode`.
        FloatingPointError: NaN or inf in the model's outputs or second derivatives.
        ImportError: scipy is not installed.
    """
    with needed("qconv.assign_bits"):  # before the work
        from scipy.optimize import milp

        del milp
    _check(model, choices, max_bytes, max_bops, measure)
    check_alone("assign_bits")
    if measure == "hessian":
        check_not_inference("assign_bits needs gradients")
    check_at_least_one(probes=probes)
    check_whole("seed", seed)
    if "overrides" in options:
        raise ValueError("overrides must not be given: assign_bits chooses them; use skip for layers that stay float")
    batches = batches_of(model, images, labels, batch_size, max_samples)
    options = {"before_sign": "keep", "skip": skip, **options, "check": False}
    converted = [_converted(model, scheme, options) for scheme in choices]
    # Layers that get the scheme of `first_last`, whatever the choice is, are not chosen for.
    asked = list(quantized_layers(convert(copied(model), choices[0], **{**options, "first_last": "float"})))
    input_size = tuple(batches[0][0].shape[1:])
    summaries = [summarize(each, input_size) for each in converted]
    counted = {row.name for row in summaries[0].rows}
    names = [name for name in asked if row_name(name) in counted]  # without those that nothing calls
    rest = {"packed_bytes": min(summary.header_bytes for summary in summaries), "bops": 0}
    for figure in rest:
        rest[figure] += min(_rest(summary, names, figure) for summary in summaries)
    uncosted = _others(names, choices, summaries, [dict.fromkeys(names, 0.0)] * len(choices))
    most = {"packed_bytes": max_bytes, "bops": max_bops}
    if _uniform(uncosted, summaries, most) is None:  # before anything is measured
        check_budgets(uncosted, {figure: (most[figure], rest[figure]) for figure in most})
    for each in converted:
        calibrate(each, [images for images, _ in batches], max_samples=sum(len(images) for images, _ in batches))
    if measure == "measured":
        costs, of_weights = [_measured(each, batches, output) for each in converted], {}
    else:
        for name, layer in quantized_layers(converted[0]).items():
            if layer.filters_are_computed:
                raise TypeError(f"{name} quantizes what it computes from its weight: use measure='measured'")
        kinds = {tuple(repr(each.input_quantizer) for each in quantized_layers(model).values()) for model in converted}
        of_inputs = len(kinds) > 1
        found = traces(converted[0], batches, probes, seed, of_inputs=of_inputs, output=output, loss=loss)
        costs = [expected_losses(each, batches, found) for each in converted]
        of_weights = {name: of_weight for name, (of_weight, _) in found.items()}
    others = _others(names, choices, summaries, costs)
    uniform = _uniform(others, summaries, most)
    while True:
        try:
            taken = cheapest(others, {figure: (most[figure], rest[figure]) for figure in most})
        except ValueError:
            if uniform is None:
                raise
            taken = uniform
        if uniform is not None and _cost(others, uniform) <= _cost(others, taken):
            taken, uniform = uniform, None
        overrides = {re.escape(name): choices[index] for name, index in taken.items()}
        whole = summarize(_converted(model, choices[0], {**options, "overrides": overrides}), input_size)
        if max_bytes is None or whole.packed_bytes <= max_bytes:
            break
        # The file's header is larger with several schemes. Counted for all assignments, it may leave none but those of
        # one scheme, whose files are known.
        rest["packed_bytes"] += whole.packed_bytes - max_bytes
    rows = tuple(others[name][index] for name, index in taken.items())
    return BitAssignment(rows, overrides, others, whole.packed_bytes, whole.bops, of_weights)


def _uniform(
    others: Mapping[str, tuple[Choice, ...]], summaries: Sequence[Summary], most: Mapping[str, int | None]
) -> dict[str, int] | None:
    """Return the cheapest assignment of one scheme to all layers within the budgets; None if there is none."""
    within = [
        index
        for index, summary in enumerate(summaries)
        if all(limit is None or getattr(summary, figure) <= limit for figure, limit in most.items())
    ]
    if not within:
        return None
    return min((dict.fromkeys(others, index) for index in within), key=lambda taken: _cost(others, taken))


def _cost(others: Mapping[str, tuple[Choice, ...]], taken: Mapping[str, int]) -> float:
    return sum(others[name][index].cost for name, index in taken.items())


def _check(
    model: nn.Module, choices: Sequence[Scheme], max_bytes: int | None, max_bops: int | None, measure: str
) -> None:
    check_module(model)
    if not choices:
        raise ValueError("choices (=[]) must hold at least one scheme, such as [schemes.lsq(2, 2), schemes.lsq(4, 4)]")
    for choice in choices:
        if not isinstance(choice, Scheme):
            raise TypeError(f"choices: {choice!r} must be a scheme, such as qconv.schemes.lsq(4, 4)")
    repeated = [name for name, count in Counter(choice.name for choice in choices).items() if count > 1]
    if repeated:
        raise ValueError(
            f"choices: {repeated[0]!r} is the name of several schemes, so the table can't tell them apart: rename "
            "one with dataclasses.replace(scheme, name=...)"
        )
    if max_bytes is None and max_bops is None:
        raise ValueError("pass a budget: max_bytes, max_bops, or both")
    for name, value in {"max_bytes": max_bytes, "max_bops": max_bops}.items():
        if value is not None:
            check_whole(name, value)
    check_choice("measure", measure, "hessian", "measured")
    if any(isinstance(module, QuantizedLayer) and not module.is_float for module in model.modules()):
        raise ValueError(f"model ({type(model).__name__}) is already converted: pass the float model")


def _converted(model: nn.Module, scheme: Scheme, options: Mapping[str, Any]) -> nn.Module:
    """Return a converted copy in evaluation."""
    each = convert(copied(model), scheme, **options)
    check_final(each, "choices")
    lean(each, False)
    return each.eval()


def _measured(model: nn.Module, batches: Batches, output: Output | None) -> dict[str, float]:
    given = ((images,) if labels is None else (images, labels) for images, labels in batches)
    found = sensitivity(model, given, output=output, max_samples=sum(len(images) for images, _ in batches))
    # By chance the loss may fall where little is lost; a divergence can't.
    return {row.layer: row.error if row.kl is None else row.kl for row in found.rows}


def _others(
    names: Sequence[str], choices: Sequence[Scheme], summaries: Sequence[Summary], costs: Sequence[Mapping[str, float]]
) -> dict[str, tuple[Choice, ...]]:
    """Return the choices of each layer."""
    by_scheme = list(zip(choices, summaries, costs, strict=True))
    return {
        name: tuple(_choice(name, scheme, summary, cost[name]) for scheme, summary, cost in by_scheme) for name in names
    }


def _choice(name: str, scheme: Scheme, summary: Summary, cost: float) -> Choice:
    row = next(row for row in summary.rows if row.name == row_name(name))
    return Choice(name, scheme.name, row.weight_bits, row.input_bits, cost, row.packed_bytes, row.bops)


def _rest(summary: Summary, names: Sequence[str], figure: str) -> int:
    """Sum a figure over the modules without a choice."""
    chosen = {*map(row_name, names)}
    return sum(getattr(row, figure) for row in summary.rows if row.name not in chosen)
