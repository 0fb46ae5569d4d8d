"""``qconv evaluate``: the results of a run's checkpoint, from the run's folder only."""

import argparse
import warnings
from pathlib import Path
from typing import Any

from ..runs.run_files import BEST, CONFIG, EVALUATION, LAST


def add(commands: Any) -> None:
    """Add the command and its arguments."""
    parser = commands.add_parser(
        "evaluate",
        help="validate and test the best checkpoint of a run",
        description="Validate and test the best checkpoint of a run, as its config.yaml says, and write "
        "evaluation.json into its folder.",
        epilog="example: qconv evaluate outputs/2026-01-31/12-00-00 data.root=/elsewhere trainer=gpu",
    )
    parser.add_argument("run_folder", metavar="RUN", help="folder of a run, which must be trusted")
    parser.add_argument(
        "words",
        metavar="KEY=VALUE",
        nargs="*",
        help="settings that replace those in config.yaml; run_dir=DIR writes evaluation.json there",
    )
    parser.add_argument(
        "--last", action="store_true", help="use the checkpoint of the last epoch instead of the best one"
    )
    parser.set_defaults(run=run, more="words")


def run(options: argparse.Namespace) -> int:
    """Print the results."""
    warnings.filterwarnings("ignore", module="pytorch_lightning|lightning_fabric")
    from ..training.run import evaluate
    from ..training.stored_config import config_errors, stored_config
    from .configs import folder, store_schemes
    from .messages import lightning_errors, quiet_lightning

    quiet_lightning()
    store_schemes()
    path = Path(options.run_folder)
    cfg = stored_config(path, options.words, folder())
    cfg.evaluate = str(path / (LAST if options.last else BEST))
    with config_errors(path / CONFIG), lightning_errors():
        evaluate(cfg)
    print(Path(cfg.run_dir) / EVALUATION)
    return 0
