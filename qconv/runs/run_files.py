"""The files in the folder of a run."""

from pathlib import Path

CONFIG = "config.yaml"
BEST, LAST = Path("checkpoints/best.ckpt"), Path("checkpoints/last.ckpt")
RESULT, EVALUATION, METRICS = "result.json", "evaluation.json", "metrics.csv"
PACKED = "model.safetensors"
PAGE, PREDICTIONS = "report.html", "predictions.safetensors"
LOCK = ".lock"
KEPT = (LAST, BEST, RESULT, PACKED, EVALUATION)  # which another run must not overwrite


def holds(folder: Path, checkpoint: Path) -> bool:
    """Whether the checkpoint is one of the run in this folder."""
    return checkpoint.resolve().parent.parent == folder.resolve()
