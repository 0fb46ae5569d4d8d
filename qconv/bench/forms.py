"""A network in all forms that can run: float, as trained, frozen, and in ONNX Runtime."""

import copy
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import fill
from typing import Any

import torch
from torch import Tensor, nn

from ..after_training.samples import Output, outputs_of
from ..ground.checks import check_at_least_one, check_module, check_not_negative
from ..ground.environment import commit, machine, versions
from ..ground.extras import missing
from ..ground.files import write_file
from ..ground.table import Column, csv_text, lines
from ..inference import freeze
from ..inference.verify import classes as decided
from ..packed import save_packed
from .rows import quartiles, seconds_per_call

FLOAT, TRAINED, FROZEN, ONNX, FLOAT_ONNX = "float", "trained", "frozen", "ONNX", "float, ONNX Runtime"
EXAMPLES = 256  # images that the ONNX export sees
CHUNK = 64  # images that are classified at once
TURN = 0.02  # seconds that a form runs in one round
ROUNDS = 5  # at least

Run = Callable[[Tensor], Any]


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one batch: the median over the rounds, and its quartiles.

    Attributes:
        ms: the median.
        low: the lower quartile.
        high: the upper quartile.
        speed: how many times as fast as the first form; the median of the ratios within a round.
    """

    ms: float
    low: float
    high: float
    speed: float


@dataclass(frozen=True)
class Form:
    """One way to run the network.

    Attributes:
        name: float, trained, frozen, ONNX, or the float network in ONNX Runtime, which is the honest baseline.
        bytes: the size of its file: of all parameters and buffers, of the packed file, of the ONNX file.
        timings: by batch size.
        agreement: the share of images that get the class that the trained network gives them.
        accuracy: the share of images that get their own class.
        note: why the form is missing, or what else must be known about it.
    """

    name: str
    bytes: int | None = None
    timings: Mapping[int, Timing] = field(default_factory=dict)
    agreement: float | None = None
    accuracy: float | None = None
    note: str = ""


@dataclass(frozen=True, repr=False)
class ModelComparison:
    """The result of `compare_models`; ``print`` shows it as a table.

    Attributes:
        forms: a row of the table for each form.
        batch_sizes: those that were timed.
        pictures: the number of images that were classified.
    """

    forms: tuple[Form, ...]
    batch_sizes: tuple[int, ...]
    pictures: int

    def __getitem__(self, name: str) -> Form:
        """The form of this name."""
        return next(form for form in self.forms if form.name == name)

    def fastest(self, batch_size: int) -> str:
        """The name of the form with the lowest median time."""
        return min((form for form in self.forms if form.timings), key=lambda form: form.timings[batch_size].ms).name

    def records(self) -> list[dict[str, Any]]:
        """A flat dictionary for each form, with the machine and versions of the measurement."""
        where = {**machine(), **versions(), "commit": commit()}
        return [{**self._record(form), **where} for form in self.forms]

    def _record(self, form: Form) -> dict[str, Any]:
        row: dict[str, Any] = {"form": form.name, "bytes": form.bytes}
        for size in self.batch_sizes:
            timing = form.timings.get(size)
            for name in ("ms", "low", "high", "speed"):
                row[f"{name}_batch_{size}"] = None if timing is None else float(f"{getattr(timing, name):.4g}")
        decided = {"agreement": form.agreement, "accuracy": form.accuracy, "pictures": self.pictures}
        return {**row, **decided, "note": form.note}

    def to_csv(self, path: str | os.PathLike[str] | None = None) -> str:
        """Return a header and a line for each form, with machine and versions.

        Args:
            path: a file to write it to as well; it is replaced as a whole or not at all.
        """
        text = csv_text(self.records())
        if path is not None:
            write_file(path, text)
        return text

    def __str__(self) -> str:
        heads = "bytes", *(f"ms, batch {size}" for size in self.batch_sizes), "agreement", "accuracy"
        columns = [Column(""), *(Column(head, is_right=True) for head in heads)]
        notes = [fill(f"{form.name}: {form.note}", 100, subsequent_indent="  ") for form in self.forms if form.note]
        about = (
            "Bytes of the file. In brackets: how many times as fast as float, or slower.",
            f"Agreement with the trained network, on {self.pictures:,} images." if self.pictures else "",
            *(f"Fastest to ship, batch {size}: {self.fastest(size)}." for size in self.batch_sizes),
        )
        return "\n".join([*lines(map(self._cells, self.forms), columns), "", *filter(None, about), *notes])

    def _cells(self, form: Form) -> tuple[str, ...]:
        timings = [form.timings.get(size) for size in self.batch_sizes]
        times = ["–" if each is None else f"{each.ms:.3g} ({_speed_text(each.speed)})" for each in timings]
        shares = ["–" if share is None else f"{100 * share:.2f} %" for share in (form.agreement, form.accuracy)]
        return form.name, "–" if form.bytes is None else f"{form.bytes:,}", *times, *shares


def _speed_text(speed: float) -> str:
    times, ending = (speed, "×") if speed >= 0.995 else (1 / speed, "× slower")
    return (f"{times:.3g}" if times < 999.5 else f"{times:,.0f}") + ending


@torch.inference_mode()
def compare_models(
    float_model: nn.Module,
    quantized: nn.Module,
    images: Tensor,
    labels: Tensor | None = None,
    *,
    output: Output | None = None,
    batch_sizes: Sequence[int] = (1, 64),
    seconds: float = 2.0,
) -> ModelComparison:
    """Compare a float network with a quantized one as trained, frozen (`qconv.freeze`), and both in ONNX Runtime.

    All forms run on the CPU in float32, in evaluation mode, with torch's number of threads; the models do not change.
    They are timed in turn, round by round. If the model can't be frozen or exported, the row of that form has the
    reason.

    Args:
        float_model: the network to compare with, such as the one before `qconv.convert`.
        quantized: a converted, trained network.
        images: normalized inputs (N, C, H, W). The first ones are timed, repeated if there are fewer than in a batch.
        labels: their classes (N,); without them there is no accuracy.
        output: of several outputs, the only one that is compared, as for `qconv.sensitivity`; by default all are, and
            the agreement is that of all their decisions: the largest number in dimension 1, of pixels too.
        batch_sizes: numbers of images to time.
        seconds: how long to time each batch size; at least five rounds are timed.

    Raises:
        TypeError: an argument of another type.
        ValueError: no image, another number of labels, a batch size below 1, or seconds below 0; labels, and outputs
            that are not one of (N, classes).

    Example:
        >>> model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(64, 3))
        >>> quantized = qconv.convert(copy.deepcopy(model), qconv.schemes.bwn())
        >>> result = qconv.compare_models(model, quantized, torch.rand(8, 1, 8, 8))  # doctest: +SKIP
        >>> print(result)  # doctest: +SKIP
                 bytes    ms, batch 1   ms, batch 64  agreement  accuracy
        float      956    0.0612 (1×)     0.194 (1×)    87.50 %         –
        ...
        >>> result["frozen"].agreement  # doctest: +SKIP
        1.0
    """
    check_not_negative(seconds=seconds)
    _check(float_model, quantized, images, labels, batch_sizes)
    images = images.detach().float().cpu()
    with TemporaryDirectory() as folder:
        with torch.inference_mode(False), torch.no_grad():  # of inference tensors kernels would keep nothing
            runs, forms = _forms(float_model, quantized, images.clone(), Path(folder))
        times = {size: in_turn(runs, batch_of(images, size), seconds) for size in batch_sizes}
        decisions = {name: classes(run, images, output) for name, run in runs.items()}
    if labels is not None and decisions[TRAINED].shape != labels.shape:
        raise ValueError("labels need one output of (N, classes): choose it by output=, an index, a key or a function")
    rows = []
    for form in forms:
        found = decisions.get(form.name)
        right = None if found is None or labels is None else share(found, labels.cpu())
        same = None if found is None else share(found, decisions[TRAINED])
        timings = {size: timed[form.name] for size, timed in times.items() if form.name in timed}
        rows.append(Form(form.name, form.bytes, timings, same, right, form.note))
    return ModelComparison(tuple(rows), tuple(batch_sizes), len(images))


def _check(
    float_model: nn.Module, quantized: nn.Module, images: Tensor, labels: Tensor | None, batch_sizes: Sequence[int]
) -> None:
    for name, model in (("float_model", float_model), ("quantized", quantized)):
        check_module(model, name)
    if not isinstance(images, Tensor) or not images.is_floating_point():
        kind = images.dtype if isinstance(images, Tensor) else type(images).__name__
        raise TypeError(f"images ({kind}) must be a float tensor (N, C, H, W): normalized images")
    if not len(images):
        raise ValueError("images must hold at least one image")
    if labels is not None and not isinstance(labels, Tensor):
        raise TypeError(f"labels ({type(labels).__name__}) must be a tensor")
    if labels is not None and labels.shape != images.shape[:1]:
        raise ValueError(f"labels (of shape {tuple(labels.shape)}) must be one for each of the {len(images)} images")
    if not isinstance(batch_sizes, Sequence):
        raise TypeError(f"batch_sizes (={batch_sizes!r}) must be a sequence of whole numbers, such as (1, 64)")
    if not batch_sizes:
        raise ValueError("batch_sizes (=()) must hold at least one number")
    for number, size in enumerate(batch_sizes):
        check_at_least_one(**{f"batch_sizes[{number}]": size})


def _forms(
    float_model: nn.Module, quantized: nn.Module, images: Tensor, folder: Path
) -> tuple[dict[str, Run], list[Form]]:
    """The forms that exist, ready to run, and a row for each form."""
    runs: dict[str, Run] = {FLOAT: ready(float_model), TRAINED: ready(quantized)}
    forms = [Form(FLOAT, stored_bytes(float_model)), Form(TRAINED, stored_bytes(quantized))]
    makes: tuple[tuple[str, Callable[[], tuple[Run, int]]], ...] = (
        (FROZEN, lambda: (freeze(ready(quantized)), packed_bytes(quantized, folder))),
        (ONNX, lambda: _onnx(quantized, images, folder)),
        (FLOAT_ONNX, lambda: _onnx(float_model, images, folder)),
    )
    for name, make in makes:
        try:
            run, size = make()
            run(images[:1])
            runs[name] = run
            forms.append(Form(name, size))
        except (ValueError, TypeError, RuntimeError, ImportError, OSError) as error:  # the others are still compared
            forms.append(Form(name, note=str(error).splitlines()[0]))
    return runs, forms


def ready(model: nn.Module) -> nn.Module:
    """A copy of the model for inference on the CPU."""
    return copy.deepcopy(model).cpu().float().eval()


def stored_bytes(model: nn.Module) -> int:
    """Bytes of the parameters and buffers that a state dict holds, each tensor once."""
    tensors = [tensor for tensor in model.state_dict(keep_vars=True).values() if isinstance(tensor, Tensor)]
    return sum(tensor.nbytes for tensor in dict.fromkeys(tensors))


def packed_bytes(model: nn.Module, folder: Path) -> int:
    """Bytes of the packed file of a model, which is written into the folder."""
    path = folder / "model.safetensors"
    save_packed(ready(model), path)
    return path.stat().st_size


def _onnx(model: nn.Module, images: Tensor, folder: Path) -> tuple[Run, int]:
    if find_spec("onnxruntime") is None:  # before the export, which takes seconds
        raise ImportError(missing("the ONNX form", "onnxruntime"))
    from ..onnx import OnnxModel, export_onnx

    path = folder / "model.onnx"
    with torch.inference_mode(False):
        export_onnx(ready(model), path, images[:EXAMPLES].clone())
    return OnnxModel(path), path.stat().st_size


def batch_of(images: Tensor, size: int) -> Tensor:
    """The first ``size`` images, from the start again if there are fewer."""
    return images[torch.arange(size) % len(images)]


def in_turn(
    runs: Mapping[str, Run], batch: Tensor, seconds: float, rounds: int = ROUNDS, most: float = float("inf")
) -> dict[str, Timing]:
    """Time the forms in turn, for so many seconds and rounds at least; nothing if a round of calls takes ``most``.

    In a round a form runs for `TURN` seconds at least, after a call that does not count: it finds the caches full of
    another form's numbers.
    """
    once = {name: seconds_per_call(partial(run, batch), 1) for name, run in runs.items()}
    if sum(once.values()) > most:
        return {}
    loops = {name: max(1, round(TURN / spent)) for name, spent in once.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(next(iter(times.values()))) < rounds:
        for name, run in runs.items():
            times[name].append(1e3 * seconds_per_call(partial(run, batch), loops[name]))
    first = next(iter(times.values()))
    return {
        name: Timing(
            ms=statistics.median(values),
            low=quartiles(values)[0],
            high=quartiles(values)[2],
            speed=statistics.median(slow / fast for slow, fast in zip(first, values, strict=True)),
        )
        for name, values in times.items()
    }


def classes(run: Run, images: Tensor, output: Output | None = None) -> Tensor:
    """The class of each image; of several outputs or of pixels, all decisions in one row."""
    batches = [outputs_of(run, run(part), output) for part in images.split(CHUNK)]
    return torch.cat([decided(torch.cat(batch)).flatten() for batch in zip(*batches, strict=True)])


def share(found: Tensor, wanted: Tensor) -> float:
    """The share of equal classes."""
    return float((found == wanted).float().mean())
