"""``qconv train``: trains or evaluates a network; Hydra composes the config from the command line."""

import os
import shlex
import signal
import sys
import warnings
from collections.abc import Sequence
from functools import wraps

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from .configs import folder, store_schemes
from .messages import lightning_errors, message, quiet_lightning
from .mistakes import check_direction, check_flags, check_given, check_types, leave_out
from .relaunch import command_line, forgotten
from .resume import config_of, folders

# torch and Lightning, which take seconds, are imported by the functions: --help and a mistyped option answer at once.
USER_ERRORS = (HydraException, OmegaConfBaseException, ValueError, TypeError, OSError, FloatingPointError, ImportError)

store_schemes()


def is_first_process() -> bool:
    """Whether this is the process of a run that writes, as far as its environment says."""
    return all(os.environ.get(name, "0") == "0" for name in ("LOCAL_RANK", "RANK", "SLURM_PROCID"))


def announce(folder: str) -> None:
    """Print the run's folder before the slow imports; nothing if they are done, as in a sweep."""
    if "torch" not in sys.modules and is_first_process():
        print(f"{folder}: loading PyTorch and Lightning", flush=True)


def main(cfg: DictConfig) -> float | tuple[float, ...]:
    """Train or evaluate without chatter; `cfg.objective` is what a sweeper optimizes."""
    warnings.filterwarnings("ignore", module="pytorch_lightning|lightning_fabric")
    # Importing Lightning sets the levels that are set here.
    from pytorch_lightning.utilities.exceptions import SIGTERMException

    from ..training.report.result import objective
    from ..training.run import evaluate, train

    quiet_lightning()
    if cfg.evaluate is not None and cfg.resume is not None:
        raise ValueError(f"evaluate (={cfg.evaluate}) and resume (={cfg.resume}) exclude each other: test or resume")
    try:
        with lightning_errors():
            if cfg.evaluate is not None:
                return evaluate(cfg).val_accuracy
            return objective(train(cfg), cfg.objective)
    except SIGTERMException as error:  # a SystemExit of code 0: the scheduler would think that the run is over
        sys.stderr.write(f"{error}\n")
        raise SystemExit(128 + signal.SIGTERM) from None


def run_hydra(program: str, arguments: Sequence[str], *, in_full: bool) -> None:
    """Compose the config from the arguments and run `main` with it, or do what the arguments ask of Hydra."""
    called, process = sys.argv, os.getpid()

    @wraps(main)
    def as_called(cfg: DictConfig) -> float | tuple[float, ...]:
        if os.getpid() == process:  # and not a job of a cluster, which was started otherwise
            sys.argv = command_line(called, arguments, cfg)
        hydra_cfg = HydraConfig.get()
        try:
            check_types(cfg, [*hydra_cfg.overrides.hydra, *hydra_cfg.overrides.task])
            check_given(cfg)
            if hydra_cfg.mode == RunMode.MULTIRUN:
                check_direction(cfg.objective, hydra_cfg.sweeper)
            announce(cfg.run_dir)
            for line in leave_out(cfg, hydra_cfg.overrides.task):
                if is_first_process():
                    print(line, file=sys.stderr)
            with forgotten():
                return main(cfg)
        except BrokenPipeError:
            raise
        except USER_ERRORS as error:
            if hydra_cfg.mode == RunMode.MULTIRUN:  # Hydra raises it once other runs have ended
                others = f"qconv compare {shlex.quote(hydra_cfg.sweep.dir)} shows the others once they have ended"
                sys.stderr.write(f"error: {message(error)}\n({others})\n")
                raise
            if in_full:
                raise
            raise told(error) from None  # Hydra would put its own line before an exception

    sys.argv = [program, *flags_last(arguments)]  # where Hydra looks for its arguments
    full_error = os.environ.get("HYDRA_FULL_ERROR")
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then leaves the exception to us
    try:
        hydra.main(config_path=str(folder()), config_name="config", version_base="1.3")(as_called)()
    finally:
        sys.argv = called
        if full_error is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = full_error


def flags_last(words: Sequence[str]) -> list[str]:
    """Return the words with Hydra's flags last, because argparse rejects flags between other words."""
    others = get_args_parser().parse_intermixed_args(words).overrides
    flags = [*words]
    for word in others:
        flags.remove(word)
    return [*others, *flags]


def run_main(program: str, arguments: Sequence[str]) -> None:
    """Run the program, and end a user's error with one line instead of a traceback."""
    in_full = os.environ.get("HYDRA_FULL_ERROR") == "1"
    # Read when torch loads OpenMP (GNU's): for how long a thread that waits spins before it sleeps. At the default, 30
    # times as long, a run on cores that something else uses, too, took up to 10 times as long.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    try:
        if resumed := folders(arguments):
            announce(resumed[0])
            if (cfg := config_of(arguments)) is not None:
                main(cfg)
        else:
            check_flags(arguments)
            run_hydra(program, arguments, in_full=in_full)
    except BrokenPipeError:
        raise
    except USER_ERRORS as error:
        if in_full:
            raise
        raise told(error) from None
    except KeyboardInterrupt as error:
        # The other processes that Lightning has started have nothing to add.
        if is_first_process():
            if in_full:
                raise
            sys.stderr.write(f"\n{str(error) or 'stopped by Ctrl-C'}\n")
        raise SystemExit(128 + signal.SIGINT) from None


def told(error: BaseException) -> SystemExit:
    """Return an exit of the program with an error message."""
    return SystemExit(f"error: {message(error)}\n(HYDRA_FULL_ERROR=1 shows the traceback)")
