"""What a run leaves in its folder at its end: the packed model, the page, and the predictions of its test."""

from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from pytorch_lightning import LightningDataModule
from torch import nn

from ..layers.copies import copied
from ..packed import save_packed
from ..packed.calls import build_network
from ..runs.run_files import BEST, CONFIG, PACKED, PAGE, PREDICTIONS
from .callbacks.test_predictions import TestPredictions
from .report.screen import show_note
from .trained_on import describe_pictures

REPORT_S = 0.2  # to time each batch size: a run must not wait for its report


def ship(cfg: DictConfig, model: nn.Module, data: LightningDataModule, about: dict[str, Any]) -> None:
    """Write `PACKED` into the run's folder, with network, images and classes; `about` gets its size.

    If it can't be written, a note says why, and no file of an earlier run remains; the trained model is not lost.
    """
    path = Path(cfg.run_dir) / PACKED
    described = description(cfg.model, data)
    if described["network"] is None:
        show_note(
            f"{PACKED} does not name its network, which is not in qconv.models: qconv's commands take it from "
            f"{CONFIG}, and load_packed(path, model=…) from you"
        )
    try:
        path.unlink(missing_ok=True)
        floats = {tensor.dtype for tensor in model.parameters() if tensor.is_floating_point()}
        # Shipped models compute in float32.
        save_packed(model if floats == {torch.float32} else copied(model).float(), path, **described)
    except (ValueError, TypeError, OSError, RuntimeError) as error:
        show_note(f"no packed model is written: {error}")
        return
    _note_size(path, about)


def note_shipped(checkpoint: Path, about: dict[str, Any]) -> None:
    """Put the size of the run's packed model into `about`, if it was made of ``checkpoint``, the best one.

    For another checkpoint the size stays `Summary.packed_bytes`, which counts no description of the network. The best
    checkpoint is newer than the packed model if a resumed run was interrupted.
    """
    path = checkpoint.parent.parent / PACKED
    is_best = checkpoint == path.parent / BEST
    if is_best and path.is_file() and path.stat().st_mtime >= checkpoint.stat().st_mtime:
        _note_size(path, about)


def _note_size(path: Path, about: dict[str, Any]) -> None:
    about["packed_bytes"] = path.stat().st_size
    about["compression"] = about["float_bytes"] / about["packed_bytes"]


def description(node: DictConfig, data: Any) -> dict[str, Any]:
    """Return the arguments of `save_packed` for a network for these images."""
    return {"network": _network_call(node, data), **describe_pictures(data)}


def _network_call(node: DictConfig, data: Any) -> dict[str, Any] | None:
    """Return the call of the network for these images and classes; None if it is not from `qconv.models`."""
    call: Any = OmegaConf.to_container(node, resolve=True)
    call = {**call, "in_channels": data.in_channels, "num_classes": data.num_classes}
    try:
        build_network(call)
    except ValueError:
        return None
    return call


def leave_report(cfg: DictConfig, model: nn.Module, data: LightningDataModule, decisions: TestPredictions) -> None:
    """Write the page of a run and the predictions of its test into its folder, unless `cfg.report` is false.

    If the page can't be written, a note says why; the run has its results by then. No page of an earlier run remains.
    """
    folder = Path(cfg.run_dir)
    try:
        for name in (PAGE, PREDICTIONS):
            (folder / name).unlink(missing_ok=True)
        if not cfg.report:
            return
        from .report.gather import gather, network_for  # with jinja2 and PIL, which only a report needs
        from .report.page import write_page

        decisions.predictions().save(folder / PREDICTIONS)
        write_page(gather(folder, network_for(model, data), seconds=REPORT_S), folder / PAGE)
    except Exception as error:  # noqa: BLE001  # whatever it is, the run must not fail at its very end
        show_note(f"no report is written: {type(error).__name__}: {error}")
    else:
        show_note(f"report: {folder / PAGE}")
