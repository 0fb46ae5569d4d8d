"""The files in the folder of a run, and the folder of the configs that runs start from."""

from pathlib import Path

CONFIG = "config.yaml"
BEST, LAST = Path("checkpoints/best.ckpt"), Path("checkpoints/last.ckpt")
RESULT, EVALUATION, METRICS, DIAGNOSTICS = "result.json", "evaluation.json", "metrics.csv", "diagnostics.csv"
PACKED = "model.safetensors"
PAGE, PREDICTIONS = "report.html", "predictions.safetensors"
LOCK = ".lock"
KEPT = (LAST, BEST, RESULT, PACKED, EVALUATION)  # which another run must not overwrite


PACKAGE = Path(__file__).resolve().parent.parent


def config_folder() -> Path:
    """The folder of the configs: a wheel has it inside the package, a checkout at the top level."""
    inside = PACKAGE / "configs"
    return inside if inside.is_dir() else PACKAGE.parent / "configs"


def holds(folder: Path, checkpoint: Path) -> bool:
    """Whether the checkpoint is one of the run in this folder."""
    return checkpoint.resolve().parent.parent == folder.resolve()


def why_no_run(folder: Path) -> str:
    """Say that a folder without a config is no run's; name that of a checkpoint, or one of a sweep."""
    around = folder.parent.parent / CONFIG
    configs = [around] if folder.suffix == ".ckpt" and around.is_file() else sorted(folder.glob(f"*/{CONFIG}"))
    hint = f"; name a run's, such as {configs[0].parent}" if configs else ""
    return f"{folder} is not the folder of a run: there is no {CONFIG}{hint}"
