"""The report that a run leaves in its folder."""

from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig
from pytorch_lightning import LightningDataModule
from torch import nn

from ...runs.run_files import PAGE, PREDICTIONS
from .screen import show_note

if TYPE_CHECKING:
    from ..callbacks.test_predictions import TestPredictions

SECONDS = 0.2  # to time each batch size: a run must not wait for its report


def leave_report(cfg: DictConfig, model: nn.Module, data: LightningDataModule, decisions: "TestPredictions") -> None:
    """Write the page of a run and the predictions of its test into its folder, unless `cfg.report` is false.

    If the page can't be written, a note says why; the run has its results by then. No page of an earlier run remains.
    """
    folder = Path(cfg.run_dir)
    try:
        for name in (PAGE, PREDICTIONS):
            (folder / name).unlink(missing_ok=True)
        if not cfg.report:
            return
        from .gather import gather, network_for  # with jinja2 and PIL, which only a report needs
        from .page import write_page

        decisions.predictions().save(folder / PREDICTIONS)
        write_page(gather(folder, network_for(model, data), seconds=SECONDS), folder / PAGE)
    except Exception as error:  # noqa: BLE001  # whatever it is, the run must not fail at its very end
        show_note(f"no report is written: {type(error).__name__}: {error}")
    else:
        show_note(f"report: {folder / PAGE}")
