"""Train a quantized network, or evaluate one: `train.py --help` shows what can be chosen."""

import ast
import logging
import os
import signal
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import hydra
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException, InstantiationException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

# torch and Lightning, which take seconds, are imported by the functions: --help and a mistyped option answer at once.
if TYPE_CHECKING:
    from qconv.training.report.result import Evaluation, Result

CONFIGS = Path(__file__).resolve().parent / "configs"
USER_ERRORS = (HydraException, OmegaConfBaseException, ValueError, TypeError, OSError, FloatingPointError, ImportError)


def store_schemes() -> None:
    """Give Hydra a config ``scheme/<name>`` for every scheme of `qconv.methods`: its arguments with their defaults.

    They are read from the source, for to import it would be to import torch.
    """
    package = find_spec("qconv")
    if package is None or package.origin is None:
        raise SystemExit('error: qconv is not installed: pip install "qconv[train]"')
    for file in sorted(Path(package.origin).parent.glob("methods/*.py")):
        for function in ast.parse(file.read_text(encoding="utf-8")).body:
            if not isinstance(function, ast.FunctionDef) or "named" not in map(ast.unparse, function.decorator_list):
                continue
            names = [argument.arg for argument in (*function.args.args, *function.args.kwonlyargs)]
            values = (*function.args.defaults, *function.args.kw_defaults)
            try:
                defaults = [ast.literal_eval(value) for value in values if value is not None]
            except ValueError as error:
                raise SystemExit(f"error: {file}: the defaults of {function.name}() must be plain values") from error
            node = {"_target_": f"qconv.schemes.{function.name}", **dict(zip(names, defaults, strict=True))}
            ConfigStore.instance().store(name=function.name, node=node, group="scheme", provider="qconv.methods")


store_schemes()


def train(cfg: DictConfig) -> "Result":
    """Train as `cfg` says, write the run's folder, and return the figures."""
    from qconv.training.run import train

    return train(cfg)


def evaluate(cfg: DictConfig) -> "Evaluation":
    """Validate and test the checkpoint `cfg.evaluate`."""
    from qconv.training.run import evaluate

    return evaluate(cfg)


@hydra.main(config_path=str(CONFIGS), config_name="config", version_base="1.3")
def main(cfg: DictConfig) -> float | tuple[float, ...]:
    """Train or evaluate; `cfg.objective` is what a sweeper optimizes."""
    # Importing Lightning sets the levels that are set here.
    from lightning_fabric.utilities.exceptions import MisconfigurationException
    from pytorch_lightning.utilities.exceptions import SIGTERMException

    from qconv.training.report.result import objective

    for name in ("pytorch_lightning", "lightning_fabric", "lightning.pytorch"):
        logging.getLogger(name).setLevel(logging.ERROR)
    if cfg.evaluate is not None and cfg.ckpt_path is not None:
        raise ValueError(
            f"evaluate (={cfg.evaluate}) and ckpt_path (={cfg.ckpt_path}) exclude each other: test or resume"
        )
    try:
        if cfg.evaluate is not None:
            return evaluate(cfg).val_accuracy
        return objective(train(cfg), cfg.objective)
    except MisconfigurationException as error:  # such as a GPU that is not there
        raise ValueError(str(error)) from error
    except SIGTERMException as error:  # a SystemExit of code 0: the scheduler would think that the run is over
        sys.stderr.write(f"{error}\n")
        raise SystemExit(128 + signal.SIGTERM) from None


def run_main() -> None:
    """Run `main` without chatter, and end a user's error with one line instead of a traceback."""
    warnings.filterwarnings("ignore", module="pytorch_lightning|lightning_fabric")
    in_full = os.environ.get("HYDRA_FULL_ERROR") == "1"
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then leaves the exception to us
    # Read when torch loads OpenMP (GNU's): for how long a thread that waits spins before it sleeps. At the default, 30
    # times as long, a run on cores that something else uses, too, took up to 10 times as long.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    try:
        main()
    except USER_ERRORS as error:
        if in_full:
            raise
        raise SystemExit(f"error: {message(error)}\n(HYDRA_FULL_ERROR=1 shows the traceback)") from None
    except KeyboardInterrupt as error:
        if in_full:
            raise
        sys.stderr.write(f"\n{str(error) or 'stopped by Ctrl-C'}\n")
        raise SystemExit(128 + signal.SIGINT) from None


def message(error: BaseException) -> str:
    """What to tell the user: without what Hydra has wrapped around it, and with the file that the system refused."""
    if isinstance(error, InstantiationException) and error.__cause__ is not None:
        return str(error.__cause__)
    if isinstance(error, OSError) and error.filename is not None:
        return f"cannot use {error.filename}: {error.strerror}"
    return str(error)


if __name__ == "__main__":
    run_main()
