"""Everything that the page of a run shows, gathered from the run's folder."""

import copy
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import nn

from ...bench.forms import Run, Timing, batch_of, in_turn, ready
from ...convert import to_float
from ...ground.files import DamagedFileError
from ...ground.table import read_csv
from ...inference import freeze
from ...layers import QuantizedLayer
from ...packed import PackedFileError, load_for_pictures, read_header
from ...runs.read_runs import read_result
from ...runs.run_files import BEST, DIAGNOSTICS, LAST, METRICS, PACKED, PREDICTIONS, RESULT
from ...summary import Summary, summarize
from ..finished import FinishedRun
from .predictions import Predictions

BATCHES = 1, 64
PATIENCE = 2.0  # seconds that one batch may take before its size is left out
FLOAT, QUANTIZED, FROZEN = "float", "quantized, as trained", "frozen (qconv.freeze)"


@dataclass(frozen=True)
class Network:
    """The network of a run, with the size (C, H, W) of its images and the names of its classes."""

    model: nn.Module
    input_size: tuple[int, ...]
    classes: Sequence[str]


@dataclass(frozen=True)
class Report:
    """The contents of the page.

    Attributes:
        result: the figures in `result.json`; None for a run that has not finished.
        history: the rows of `metrics.csv`, one for each epoch.
        diagnostics: the rows of `diagnostics.csv`, one for each epoch and layer.
        predictions: the predictions of the test; None without a test.
        timings: by batch size and form of the network, in ms on this CPU.
        not_frozen: why there is no frozen form; else empty.
        is_packed: whether there is a packed file that names its network and images.
    """

    folder: str
    config: dict[str, Any]
    result: dict[str, Any] | None
    history: list[dict[str, float]]
    diagnostics: list[dict[str, Any]]
    summary: Summary
    classes: list[str]
    predictions: Predictions | None
    timings: dict[int, dict[str, Timing]]
    not_frozen: str
    is_packed: bool
    has_checkpoint: bool


def gather(folder: str | os.PathLike[str], network: Network | None = None, *, seconds: float) -> Report:
    """Return the contents of the page of a run, finished or not; `seconds` go to the timing of each batch size.

    Raises:
        DamagedFileError: the folder holds no run.
        ValueError: neither the packed file nor data and checkpoint can be read.
    """
    run = FinishedRun(folder)
    network = network or network_of(run)
    config: Any = OmegaConf.to_container(run.cfg)
    try:
        result = read_result(run.folder) if (run.folder / RESULT).is_file() else None
    except ValueError as error:
        raise DamagedFileError(f"{run.folder}: {error}") from error
    timings, not_frozen = time_forms(network, seconds)
    return Report(
        folder=str(run.folder),
        config=config,
        result=result,
        history=[_numbers(row) for row in read_csv(run.folder / METRICS)],
        diagnostics=[{**_numbers(row), "layer": row["layer"]} for row in read_csv(run.folder / DIAGNOSTICS)],
        summary=summarize(ready(network.model), network.input_size),
        classes=list(network.classes),
        predictions=_predictions(run, network) if result is not None else None,
        timings=timings,
        not_frozen=not_frozen,
        is_packed=_names_network(run.folder),
        has_checkpoint=(run.folder / LAST).is_file(),
    )


def network_of(run: FinishedRun) -> Network:
    """Return the network of the packed file, which needs no data; else of the best checkpoint, or an untrained one."""
    if _names_network(run.folder):
        model, header, pictures = load_for_pictures(run.folder / PACKED)
        return Network(model, tuple(pictures.size), header.classes or ())
    has_weights = any((run.folder / name).is_file() for name in (PACKED, BEST))
    return network_for(run.model() if has_weights else run.untrained(), run.data)


def network_for(model: nn.Module, data: Any) -> Network:
    """Return the network for the images of a data module."""
    return Network(model, (data.in_channels, *data.image_size), tuple(getattr(data, "classes", ())))


def time_forms(network: Network, seconds: float) -> tuple[dict[int, dict[str, Timing]], str]:
    """Return the times of the network as float, quantized and frozen, by batch size, and why it can't be frozen."""
    model, reason = ready(network.model), ""
    runs: dict[str, Run] = {QUANTIZED: model}
    if any(isinstance(module, QuantizedLayer) for module in model.modules()):
        runs = {FLOAT: to_float(copy.deepcopy(model)), **runs}
    try:
        runs[FROZEN] = freeze(model)
    except (ValueError, TypeError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
    images = torch.randn(1, *network.input_size, generator=torch.Generator().manual_seed(0), device="cpu")
    with torch.inference_mode():
        timings = {size: in_turn(runs, batch_of(images, size), seconds, rounds=3, most=PATIENCE) for size in BATCHES}
    return {size: timed for size, timed in timings.items() if timed}, reason


def predict(run: FinishedRun, network: Network) -> Predictions:
    """Return the network's predictions for the test images of a run."""
    model = ready(network.model)
    normalize = getattr(run.data, "normalize", None)

    def parts():
        for images, labels in run.batches("test"):
            with torch.inference_mode():  # and not what reads images, which keeps them
                logits = model(images.float())
            yield Predictions.of_batch(logits, images, labels, normalize)

    return Predictions.joined(parts())


def _predictions(run: FinishedRun, network: Network) -> Predictions:
    path = run.folder / PREDICTIONS
    if path.is_file():
        return Predictions.load(path)
    found = predict(run, network)  # of a run from before they were kept
    found.save(path)
    return found


def _names_network(folder: Path) -> bool:
    try:
        header = read_header(folder / PACKED)
    except PackedFileError:
        return False
    return header.network is not None and header.pictures is not None


def _numbers(row: dict[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in row.items() if name != "layer" and value not in ("", None)}
