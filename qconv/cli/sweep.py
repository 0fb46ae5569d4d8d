"""The table at the end of a sweep, with mean and standard deviation over the seeds."""

import itertools
import json
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ..ground.table import write_csv
from ..runs.read_runs import natural
from ..runs.run_files import RESULT

METRICS = ("test_accuracy", "val_accuracy_best", "val_accuracy_final")


class SweepTable(Callback):
    """Hydra callback of a multirun: keeps `sweep.csv` up to date with the runs' `result.json`; shows a table last.

    A failed run has no row; the others have theirs, even if Hydra then ends the sweep without a table.
    """

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        """Write the results of the runs so far."""
        if config.hydra.mode == RunMode.MULTIRUN:
            folder = Path(config.hydra.sweep.dir)
            runs = read_runs(folder)
            if runs:
                write_csv(runs, folder / "sweep.csv")

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Show the results of the runs, and write them again: a parallel job may have written without some others."""
        from ..training.report.screen import show_rows

        folder = Path(config.hydra.sweep.dir)
        runs = read_runs(folder)
        if runs:
            write_csv(runs, folder / "sweep.csv")
            show_rows(
                ("run", "seeds", "test accuracy", "validation, best", "validation, final"), table(runs), str(folder)
            )


def read_runs(folder: Path) -> list[dict[str, Any]]:
    """Return the sweep's runs with a result, in order; `hydra.sweep.subdir` may nest their folders."""
    found = (path.parents[1] for path in folder.rglob(".hydra/overrides.yaml"))
    jobs = sorted((job for job in found if not _is_of_another(job, folder)), key=natural)
    return [read_run(job, result) for job in jobs if (result := _result_of(job)) is not None]


def _result_of(job: Path) -> Path | None:
    """The result of a job, in its `run_dir`; None if there is none, or one that is older than the job.

    An earlier run wrote it then; the times of the files decide.
    """
    begun = (job / ".hydra" / "overrides.yaml").stat().st_mtime  # Hydra writes it anew for a job that is then refused
    try:
        own = (job / ".hydra" / "config.yaml").read_text().replace("${hydra:", "${hydra.")  # which the next file has
        cfg = OmegaConf.merge(OmegaConf.load(job / ".hydra" / "hydra.yaml"), OmegaConf.create(own))
        result = (job if cfg.hydra.job.chdir else Path()) / cfg.run_dir / RESULT
        return result if result.stat().st_mtime >= begun else None
    except (OSError, OmegaConfBaseException):
        return None


def read_run(job: Path, path: Path) -> dict[str, Any]:
    """Return the overrides of a job, and the results of its run."""
    result = json.loads(path.read_text())
    overrides: Any = OmegaConf.to_container(OmegaConf.load(job / ".hydra" / "overrides.yaml"))  # not resolved
    words = [str(word) for word in overrides if not str(word).startswith("seed=")]
    return {"overrides": " ".join(words) or "(defaults)", "seed": result["seed"], **{m: result[m] for m in METRICS}}


def table(runs: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Return one line for each set of overrides other than the seed."""
    groups = defaultdict(list)
    for run in runs:
        groups[run["overrides"]].append(run)
    return [
        (name, ", ".join(str(run["seed"]) for run in group), *(spread([run[m] for run in group]) for m in METRICS))
        for name, group in groups.items()
    ]


def spread(values: list[float]) -> str:
    """Return the mean, and the sample standard deviation if there is one."""
    from ..training.report.screen import percent

    deviation = f" ± {100 * statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return percent(statistics.mean(values)) + deviation


def _is_of_another(job: Path, folder: Path) -> bool:
    """Whether the job belongs to another sweep with a folder inside this one."""
    between = itertools.takewhile(lambda parent: parent != folder, job.parents)
    return any((parent / "multirun.yaml").is_file() for parent in between)
