"""Validate and test the best checkpoint of a run, as its config.yaml says.

The results go to evaluation.json in its folder.
"""

import argparse
import warnings
from pathlib import Path

from ..runs.run_files import BEST, CONFIG, EVALUATION, LAST

HELP = "validate and test the best checkpoint of a run"
EXAMPLE = "qconv evaluate outputs/2026-01-31/12-00-00 data.root=/elsewhere trainer=gpu"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("run_folder", metavar="RUN", help="folder of a run, which must be trusted")
    parser.add_argument(
        "words",
        metavar="KEY=VALUE",
        nargs="*",
        default=[],
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
    from .messages import lightning_errors, message, quiet_lightning

    quiet_lightning()
    store_schemes()
    path = Path(options.run_folder)
    try:
        cfg = stored_config(path, options.words, folder())
        cfg.evaluate = str(path / (LAST if options.last else BEST))
        config = " with ".join(filter(None, [str(path / CONFIG), " ".join(options.words)]))
        with config_errors(config), lightning_errors():
            evaluate(cfg)
    except ValueError as error:
        raise ValueError(message(error)) from error
    print(Path(cfg.run_dir) / EVALUATION)
    return 0
