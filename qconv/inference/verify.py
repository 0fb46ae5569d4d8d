"""The comparison of a frozen model with the trained one."""

import copy
import os
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..convert import to_float
from ..ground.table import Column, least_width, lines, wrap
from ..layers import QuantizedLayer
from ..layers.copies import copied
from ..lean import lean
from ..packed import load_packed
from ..packed.tensors import inner_model
from .build import FrozenModel, build
from .defaults import of_shipping
from .float_error import SURE, TINY, difference
from .layer_check import LayerCheck, LayerPair
from .own_run import Guided, calls_and_output, own_run
from .rewrite import Frozen

HEADS = "layer", "arithmetic", "gives", "codes ≠", "sums ≠", "handed ≠", "error", "of bound", "drift", "unexplained"
COLUMNS = tuple(map(Column, HEADS))
LEFT_OUT: tuple[tuple[str, ...], ...] = ((), ("of bound",), ("of bound", "drift"))  # on narrower and narrower screens
CLOSE = 1e-5  # of the largest output: the possible difference of two orders of float sums


@dataclass(frozen=True)
class Verification:
    """The result of `verify`; ``print`` shows it as a table.

    Attributes:
        layers: one for each quantized layer, in the order of the model.
        guided: the largest difference between an output and the trained network's in exact arithmetic on the
            codes of the frozen layers.
        difference: the largest difference between an output and the trained network's.
        largest: the largest output.
        decisions: number of inputs that get another class than from the trained network (with one output: another
            sign), in any place where outputs have several.
        samples: number of inputs.
        of_bound: the largest used share of what `guided` may be; 1 at the limit.
        last: the name of the quantized layer that runs last.
    """

    layers: tuple[LayerCheck, ...]
    guided: float
    difference: float
    largest: float
    decisions: int
    samples: int
    of_bound: float = 0.0
    last: str = ""

    @property
    def first_difference(self) -> LayerCheck | None:
        """The first layer that is not equal."""
        return next((layer for layer in self.layers if not layer.equal), None)

    @property
    def equal(self) -> bool:
        """Whether all integers are equal, and all codes and floats, outputs included, agree within rounding."""
        return self.first_difference is None and self.of_bound <= 1

    def __str__(self) -> str:
        return self.text()

    def text(self, width: int | None = None) -> str:
        """Return the table and the result, in at most `width` columns if possible; None sets no limit."""
        outcome = (
            f"{self._verdict()}; outputs differ from the trained ones by up to {self.difference:.1e} of "
            f"{self.largest:.3g}; {self.decisions} of {self.samples} predicted classes differ"
        )
        cells = [_cells(layer) for layer in self.layers]
        tables = [_without(heads, cells) for heads in LEFT_OUT]
        fitting = (table for table in tables if width is None or least_width(*table) <= width)
        return "\n".join([*lines(*next(fitting, tables[-1]), width), *wrap(outcome, width or len(outcome))])

    def _verdict(self) -> str:
        first = self.first_difference
        if first is not None:
            return f"not equal: '{first.name}' is the first layer that differs: {first.reason}"
        if self.equal:
            return "equal"
        where = f"what follows '{self.last}', the last quantized layer," if self.last else "the network"
        return (
            f"not equal: {where} has outputs that are off by up to {self.guided:.1e}, {self.of_bound:.3g} times "
            "what rounding explains"
        )


def _without(heads: Sequence[str], cells: Sequence[Sequence[str]]) -> tuple[list[list[str]], list[Column]]:
    """Return rows and columns without the named columns."""
    kept = [place for place, head in enumerate(HEADS) if head not in heads]
    return [[row[place] for place in kept] for row in cells], [COLUMNS[place] for place in kept]


def _cells(layer: LayerCheck) -> tuple[str, ...]:
    """The layer as text, in the order of `COLUMNS`."""
    is_integer, is_floats = layer.arithmetic != "float", layer.gives == "floats"
    counts = [str(number) if is_integer else "" for number in (layer.codes, layer.sums)]
    error = (f"{layer.error:.1e}", f"{layer.of_bound:.2f}") if is_floats else ("", "")
    handed, drift = "" if is_floats else str(layer.handed), f"{layer.drift} of {layer.elements:,}"
    return layer.name, layer.arithmetic, layer.gives, *counts, handed, *error, drift, str(layer.unexplained)


@torch.no_grad()
@of_shipping()
def verify(
    model: nn.Module, frozen: FrozenModel | str | os.PathLike[str], inputs: Tensor | Iterable[Any]
) -> Verification:
    """Compare a trained model with its frozen form, or with a packed file, on real inputs, layer by layer.

    Each frozen layer gets the input of the trained one. Its codes must equal the trained quantizer's, its sums
    the exact sums of these codes, and its output codes those that the trained modules after it give for the exact sums
    in float64. A float may differ from the exact value by 8 times the error that float32 arithmetic is expected to
    make.

    Then the frozen network runs as a whole, on its own codes, and the trained one follows it in float64: each of its
    layers takes the input of the frozen one. So each input of a layer is compared with the result of the trained
    modules for the inputs of the layers before it. A float near the edge between two codes can fall to either side,
    since float sums depend on their order. A code may therefore be that of any number within 8 errors of the exact one,
    where the error follows from the arithmetic of each element (`float_error`). The outputs, and with them
    the decisions, must agree with the trained arithmetic on these codes within 8 errors, too. The trained network on
    its own codes has other elements fall to the other side of an edge; the outputs and decisions that differ from it
    are counted.

    Both networks run on the CPU, in float32 and eagerly: `torch.compile` and `torch.autocast` are switched off, since
    the shipped model computes in integers and float32. A network that was trained under autocast is compared by its
    weights.

    Args:
        model: the trained model; wrappers that compile it or spread it over devices are removed.
        frozen: its frozen form, or a packed file, which is loaded and frozen.
        inputs: one batch or several; of ``(images, labels)``, as a loader gives them, the images.

    Raises:
        ValueError: a frozen model with other layers; no input, or one with NaN or inf.
        TypeError: the output of a model is not a tensor.
        PackedFileError: a file that is damaged, or of another model.
    """
    model = lean(copied(inner_model(model)).eval().cpu(), False)
    if not isinstance(frozen, FrozenModel):
        frozen = build(load_packed(frozen, to_float(copy.deepcopy(model))), 0.0, None)
    elif any(tensor.device.type != "cpu" for tensor in (*frozen.parameters(), *frozen.buffers())):
        frozen = copy.deepcopy(frozen).cpu()
    pairs = _pairs(model, frozen)
    with ExitStack() as stack:
        for device in ("cpu", "cuda"):
            stack.enter_context(torch.autocast(device, enabled=False))
        if any(hasattr(module, "_orig_mod") for module in (*model.modules(), *frozen.modules())):
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        return _compared(model, frozen, pairs, (inputs,) if _is_batch(inputs) else inputs)


def _is_batch(inputs: Any) -> bool:
    """Whether it is one batch: a tensor, or one with labels."""
    if isinstance(inputs, tuple | list) and len(inputs) == 2:
        kinds = [isinstance(each, Tensor) and each.is_floating_point() for each in inputs]
        return kinds == [True, False] and isinstance(inputs[1], Tensor)
    return isinstance(inputs, Tensor)


def _compared(
    model: nn.Module, frozen: FrozenModel, pairs: dict[str, LayerPair], inputs: Iterable[Any]
) -> Verification:
    checks = {name: pair.nothing for name, pair in pairs.items()}
    guided = differs = largest = of_bound = 0.0
    decisions = samples = 0
    last = ""
    for number, batch in enumerate(inputs):
        if isinstance(batch, tuple | list) and batch and isinstance(batch[0], Tensor):  # with labels
            batch = batch[0]
        if not isinstance(batch, Tensor):
            raise TypeError(f"inputs must be tensors, or (tensor, labels), not {type(batch).__name__}")
        batch = batch.cpu()
        if not batch.isfinite().all():
            raise ValueError(f"inputs have NaN or inf in batch {number}: pass typical inputs")
        seen, output = calls_and_output(model, batch, {name: pair.layer for name, pair in pairs.items()})
        if not isinstance(output, Tensor):
            raise TypeError(f"model returns {type(output).__name__}; it must return a tensor")
        own, output_frozen = own_run(frozen, batch, pairs)
        following = Guided(model, pairs, own)
        exact, error = following.run(batch)
        last = following.last
        for name, pair in pairs.items():
            checks[name] = checks[name].merged(following.found[name])
            for call in seen.pop(name):
                checks[name] = checks[name].merged(pair.check(call))
        samples += len(batch)
        if output.numel():
            off = difference(output_frozen, exact)
            guided = max(guided, float(off.max()))
            of_bound = max(of_bound, float((off / (SURE * error + TINY)).max()))
            differs = max(differs, float(difference(output_frozen, output).max()))
            largest = max(largest, float(output.double().abs().max()))
            is_comparable = output.shape == output_frozen.shape
            differing = other_decisions(output, output_frozen) if is_comparable else torch.ones(len(batch))
            decisions += int(differing.sum())
    if not samples:
        raise ValueError("inputs must hold at least one sample")
    return Verification(tuple(checks.values()), guided, differs, largest, decisions, samples, of_bound, last)


def _pairs(model: nn.Module, frozen: FrozenModel) -> dict[str, LayerPair]:
    """Pair the layers of both models, in the order of the trained one."""
    modules = dict(model.named_modules(remove_duplicate=False))
    known = {told.name: told for told in frozen.layers}
    for name in known:
        if not isinstance(modules.get(name), QuantizedLayer):
            raise ValueError(f"the frozen model has a layer '{name}', the trained one has no quantized layer there")
    for name, module in modules.items():
        if isinstance(module, QuantizedLayer) and not any(name.startswith(f"{other}.") for other in known):
            with suppress(AttributeError):  # nothing in the frozen model replaces it
                if isinstance(frozen.find(name), QuantizedLayer):
                    known.setdefault(name, Frozen(name, "float", reason="it was left as it is"))
    fed = {told.reader for told in frozen.layers if told.reader}
    return {name: LayerPair(model, frozen, known[name], name in fed) for name in modules if name in known}


def classes(output: Tensor) -> Tensor:
    """Return each sample's class: with one output its sign; for ``(N, C, …)`` outputs, at each position."""
    if output.dtype == torch.bool:
        output = output.byte()
    if output.ndim < 2:
        output = output.unsqueeze(1)
    elif output.ndim == 3 and output.shape[1] == 1:  # one row of classes for each sample
        output = output.squeeze(1)
    return output.argmax(1) if output.shape[1] > 1 else (output[:, 0] > 0).long()


def other_decisions(one: Tensor, other: Tensor) -> Tensor:
    """Whether each sample has another class in ``other``, at one position or more."""
    return (classes(one) != classes(other)).unsqueeze(1).flatten(1).any(1)


def tolerance(largest: float) -> float:
    """The difference of outputs that the order of float sums can explain, where this is the largest output."""
    return CLOSE * (largest + 0.1)
