"""The folder of a run: ensuring that it holds one run and has one writer; what `resume=auto` finds in it."""

import json
import os
import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from omegaconf import DictConfig, OmegaConf
from pytorch_lightning.utilities import rank_zero_only

from ..ground.files import atomic_file
from ..runs.run_files import CONFIG, EVALUATION, KEPT, LAST, LOCK, RESULT, holds
from .report.screen import show_note
from .resume import RUN, decisive

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

AUTO = "auto"
BY_TIME = re.compile(r"/\d{4}-\d\d-\d\d/\d\d-\d\d-\d\d(-\d+)?(/\d+)?$")  # how Hydra names a folder, also in a sweep


class RunFolderError(ValueError):
    """A folder that holds another run, or to which another process is writing."""


def run_to_resume(cfg: DictConfig) -> str | None:
    """Return the folder of the run if it has a `last.ckpt`: the meaning of `resume=auto`.

    Raises:
        RunFolderError: the folder is named after the time, so the same command would never find it again.
    """
    goes_on = (Path(cfg.run_dir) / LAST).is_file()
    if not goes_on and BY_TIME.search(str(cfg.run_dir)):
        raise RunFolderError(f"resume={AUTO} needs the folder of the run: add run_dir=FOLDER")
    if not goes_on:
        show_note(f"resume={AUTO}: no {LAST} in {cfg.run_dir}, starting a new run")
    return str(cfg.run_dir) if goes_on else None


def same_run(path: Path, asked: Any) -> bool:
    """Whether the config file belongs to a run that can be resumed as the requested run."""
    if not path.is_file():
        return False
    written: Any = OmegaConf.to_container(OmegaConf.load(path))
    if not isinstance(written, dict):
        return False
    return all(decisive(group, written) == decisive(group, asked) for group in RUN)


def check_free(cfg: DictConfig, *, go_on: bool) -> None:
    """Raise a RunFolderError if the run or evaluation would overwrite another one in its folder.

    With `go_on`, `resume=auto`, an interrupted run may start again.
    """
    if not cfg.run_dir:
        raise RunFolderError(f"run_dir (={cfg.run_dir!r}) must be a folder")
    folder = Path(cfg.run_dir)
    kept = [str(name) for name in KEPT if (folder / name).is_file()]
    if not kept:
        return
    evaluated: str | None = cfg.evaluate
    resumed = cfg.resume is not None and Path(cfg.resume).resolve() == folder.resolve()
    if resumed if evaluated is None else holds(folder, Path(evaluated)):
        return
    if evaluated is not None:
        with suppress(ValueError, KeyError, TypeError):
            before = json.loads((folder / EVALUATION).read_text())["checkpoint"] if kept == [EVALUATION] else None
            if before is not None and Path(before).resolve() == Path(evaluated).resolve():
                return
        raise RunFolderError(f"run_dir (={folder}) has {kept[0]} of another checkpoint than {evaluated}: {OTHER}")
    # Killed between the first best.ckpt and the first last.ckpt: it starts again.
    if go_on and RESULT not in kept and same_run(folder / CONFIG, OmegaConf.to_container(cfg, resolve=True)):
        return
    more = f"continue it by resume={shlex.quote(str(folder))}, or " if str(LAST) in kept else ""
    raise RunFolderError(f"run_dir (={folder}) holds a run already ({kept[0]}): {more}{OTHER}")


OTHER = "name another folder; in a sweep, one for each run, such as 'run_dir=runs/a/${hydra:job.num}'"


def is_first_process() -> bool:
    """Whether this is the process of a run that writes, judging by its environment."""
    return getattr(rank_zero_only, "rank", 0) == 0


@contextmanager
def claimed(cfg: DictConfig, *, go_on: bool = False) -> Iterator[None]:
    """Hold the run's folder, with the composed config in it, as its only writing process.

    Of several processes of one run, the first does so. The lock ends with the process, however it ends, so a run that
    was killed can be restarted at once.
    """
    if not is_first_process():
        yield
        return
    folder = Path(cfg.run_dir)
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        file = _locked(folder)
    former = (folder / CONFIG).read_bytes() if (folder / CONFIG).is_file() else None
    last = _time_of(folder / LAST)
    with file:
        try:
            check_free(cfg, go_on=go_on)
            if cfg.evaluate is None or not holds(folder, Path(cfg.evaluate)):  # else the folder has its own config
                with _writing(folder), atomic_file(folder / CONFIG) as config:
                    config.write(OmegaConf.to_yaml(cfg, resolve=True).encode())
            yield
        except BaseException:
            if former is not None and last is not None and _time_of(folder / LAST) == last:
                with suppress(OSError), atomic_file(folder / CONFIG) as config:  # the run is where it was
                    config.write(former)
            raise
        finally:
            with suppress(OSError):  # Windows can't remove an open file
                (folder / LOCK).unlink()


def _time_of(path: Path) -> int | None:
    return path.stat().st_mtime_ns if path.is_file() else None


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OSError(f"run_dir (={folder}) cannot be written: {error.strerror}") from error


def _locked(folder: Path) -> IO[str]:
    """Open the file with a lock of this process: flock's would be inherited by forked workers."""
    path = folder / LOCK
    while True:
        file = path.open("a")
        if fcntl is None:
            return file
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            file.close()
            raise RunFolderError(f"another process is writing into run_dir (={folder}): {OTHER}") from error
        except OSError:  # a file system without locks
            return file
        with suppress(FileNotFoundError):
            if path.stat().st_ino == os.fstat(file.fileno()).st_ino:
                return file
        file.close()  # the run that held it has just removed it
