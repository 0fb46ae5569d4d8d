"""A whole run from its composed config: the function that `qconv train` calls."""

import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from pytorch_lightning import Callback, LightningDataModule, Trainer
from pytorch_lightning.accelerators import CPUAccelerator
from pytorch_lightning.utilities.exceptions import SIGTERMException

from ..loop.optimizer_step import is_final
from ..runs.run_files import EVALUATION, LAST, RESULT
from .assemble import build, find, started
from .callbacks.checkpoints import Checkpoints, where_to_go_on
from .callbacks.finite_guard import FiniteGuard
from .callbacks.history import History
from .callbacks.test_predictions import TestPredictions
from .checkpoint_io import AtomicCheckpointIO, load_checkpoint
from .classifier import EVALUATION_FIGURES, Classifier
from .go_on import changes
from .leanness import check_lean, make_lean, mode_of
from .norm_estimates import batch_norms_kept, reestimate_batch_norm
from .report.result import Evaluation, Result, check_objective, write_json
from .report.screen import show_note, show_outcome
from .resume import NETWORK, RUN, check_checkpoint
from .run_folder import AUTO, check_free, claimed, is_first_process, run_to_resume
from .shipping import leave_report, note_shipped, ship
from .trained_on import other_images

# The messages of gloo and NCCL.
LOST = ("timed out", "timeout", "connection closed", "connection reset", "broken pipe", "remote process exited")


def train(cfg: DictConfig) -> Result:
    """Train as `cfg` says, from the last checkpoint of `cfg.resume`, and test that of the best validation accuracy.

    Raises:
        RunFolderError: the run's folder holds another run, or another process is writing to it.
    """
    go_on = cfg.resume == AUTO
    if go_on:
        cfg.resume = run_to_resume(cfg)
    if type(cfg.trainer.max_epochs) is not int or cfg.trainer.max_epochs < 1:
        raise ValueError(f"trainer.max_epochs (={cfg.trainer.max_epochs}) must be a whole number of at least 1")
    check_lean(cfg.lean)
    if is_first_process():
        check_free(cfg, go_on=go_on)  # and again under the lock: building the run can take minutes
    checkpoint = None if cfg.resume is None else load_checkpoint(Path(cfg.resume) / LAST)
    data, classifier, about = build(cfg, checkpoint)
    check_objective(cfg.objective, about)
    if checkpoint is not None:
        check_resumed(cfg, checkpoint, classifier)
    with claimed(cfg, go_on=go_on), started(cfg) as (trainer, callbacks):
        return fit_and_test(cfg, data, classifier, about, trainer, callbacks)


def check_resumed(cfg: DictConfig, checkpoint: dict[str, Any], classifier: Classifier) -> None:
    """Raise unless the run can go on from its checkpoint; say what is changed by the user's word."""
    path = Path(cfg.resume) / LAST
    check_checkpoint(path, checkpoint, classifier, tuple(group for group in RUN if group != "trainer"))
    if cfg.trainer.max_epochs <= checkpoint["epoch"]:
        raise ValueError(
            f"trainer.max_epochs (={cfg.trainer.max_epochs}) must be at least {checkpoint['epoch'] + 1}, the epochs "
            f"that the run of {path} has begun"
        )
    for line in (f"resume={cfg.resume}: going on from epoch {checkpoint['epoch']}", *changes(checkpoint, classifier)):
        show_note(line)


def fit_and_test(
    cfg: DictConfig,
    data: LightningDataModule,
    classifier: Classifier,
    about: dict[str, Any],
    trainer: Trainer,
    callbacks: list[Callback],
) -> Result:
    """The run itself, in its folder."""
    check_validation(trainer)
    check_limits(trainer)
    word = make_lean(
        classifier.model,
        cfg.lean,
        takes_channels_last=classifier.takes_channels_last,
        on_cpu=isinstance(trainer.accelerator, CPUAccelerator),
        compiled=classifier.is_compiled,
    )
    about["lean"] = mode_of(classifier.model)
    about["precision"] = trainer.precision  # that of the last part, if a run has gone on on another processor
    show_note(f"lean: {word}")
    checkpoints, history = find(callbacks, Checkpoints), find(callbacks, History)
    if checkpoints.last != Path(cfg.run_dir) / LAST:
        raise ValueError(
            f"callbacks.checkpoints.folder (={checkpoints.folder}) must be {(Path(cfg.run_dir) / LAST).parent}, from "
            "which resume= continues: choose the folder of the run by run_dir="
        )
    with interruptions_named(trainer), batch_norms_kept(classifier.model):
        path = None if cfg.resume is None else Path(cfg.resume) / LAST
        trainer.fit(classifier, datamodule=data, ckpt_path=path, weights_only=True)
    if checkpoints.best_epoch is None:  # a file may be there, of another run
        raise ValueError(
            f"trainer: no epoch was validated, so there is no best checkpoint to test; {where_to_go_on(trainer)}"
        )
    if "val_accuracy" not in history.rows[-1]:  # a callback has ended the training between two validations
        history.complete(_validated(classifier, data, trainer), trainer)
    best = load_checkpoint(checkpoints.best)
    classifier.load_state_dict(best["state_dict"])
    best_accuracy = history.rows[best["epoch"]]["val_accuracy"]
    decisions = TestPredictions()
    if cfg.report:
        trainer.callbacks.append(decisions)  # pyright: ignore[reportAttributeAccessIssue]
    with interruptions_named(trainer):
        if cfg.reestimate_bn:
            reestimate_batch_norm(classifier, data, trainer)
            best_accuracy = _validated(classifier, data, trainer)["val_accuracy"]
            if trainer.is_global_zero:
                AtomicCheckpointIO().save_checkpoint({**best, "state_dict": classifier.state_dict()}, checkpoints.best)
        (test,) = trainer.test(classifier, datamodule=data, verbose=False)
    if trainer.is_global_zero:
        ship(cfg, classifier.model, data, about)
    result = Result(
        **_own_figures(test, about),
        tested="best",
        val_accuracy_best=best_accuracy,
        val_accuracy_final=history.rows[-1]["val_accuracy"],
        best_epoch=best["epoch"],
        epochs=len(history.rows),
        seconds=history.seconds,
        quantized=is_final(classifier),
        about=about,
    )
    if trainer.is_global_zero:
        write_json(result, Path(cfg.run_dir) / RESULT)
        show_outcome(result)
        history.draw(best["epoch"], dict(test))
        leave_report(cfg, classifier.model, data, decisions)
    return result


def _validated(classifier: Classifier, data: LightningDataModule, trainer: Trainer) -> dict[str, float]:
    """Return the figures of the validation images after the training."""
    with interruptions_named(trainer):
        (figures,) = trainer.validate(classifier, datamodule=data, verbose=False)
    return dict(figures)


def _own_figures(figures: Mapping[str, float], about: dict[str, Any]) -> dict[str, float]:
    """Return loss and accuracy; other figures of callbacks go into `about`, unless it has the name already."""
    for name, value in figures.items():
        if name not in EVALUATION_FIGURES:
            about.setdefault(name, value)
    return {name: value for name, value in figures.items() if name in EVALUATION_FIGURES}


def check_validation(trainer: Trainer) -> None:
    """Raise a ValueError unless the last epoch will be validated, and each validation ends an epoch.

    Otherwise there would be no best checkpoint to test, or its figures would belong to other weights.
    """
    every, epochs = trainer.check_val_every_n_epoch, trainer.max_epochs
    interval: Any = trainer.val_check_interval  # 1 is a batch, 1.0 is all
    if every is None or not (interval is None or (isinstance(interval, float) and interval == 1)):
        word = "check_val_every_n_epoch (=None)" if every is None else f"val_check_interval (={interval})"
        raise ValueError(
            f"trainer.{word}: validations must be at the end of epochs, where checkpoints are written; "
            "+trainer.check_val_every_n_epoch=N validates after each N of them"
        )
    if epochs is not None and epochs % every:
        raise ValueError(
            f"trainer.check_val_every_n_epoch (={every}) must divide trainer.max_epochs (={epochs}): the best epoch is "
            "tested, and the result states the accuracy after the last one"
        )


def check_limits(trainer: Trainer) -> None:
    """Raise a ValueError if no image will be trained on, validated or tested: early, not at the end of the run."""
    for name in ("limit_train_batches", "limit_val_batches", "limit_test_batches"):
        if getattr(trainer, name) == 0:
            raise ValueError(
                f"trainer.{name} (={getattr(trainer, name)}) must be above 0: the result needs images of each part"
            )


def evaluate(cfg: DictConfig) -> Evaluation:
    """Validate and test the checkpoint `cfg.evaluate`.

    Raises:
        RunFolderError: the folder for the figures holds the figures of another checkpoint or of a run.
        CheckpointError: the checkpoint is damaged, or has another network or other classes than the data.
    """
    check_lean(cfg.lean)
    if is_first_process():
        check_free(cfg, go_on=False)
    checkpoint = load_checkpoint(str(cfg.evaluate))
    data, classifier, about = build(cfg, checkpoint)
    check_checkpoint(Path(cfg.evaluate), checkpoint, classifier, NETWORK)
    with claimed(cfg), started(cfg) as (trainer, _):
        trainer.precision_plugin.convert_module(classifier)  # before its weights, which would be rounded to float32
        classifier.load_state_dict(checkpoint["state_dict"])
        check_limits(trainer)
        about["precision"] = trainer.precision
        with interruptions_named(trainer):
            (val,) = trainer.validate(classifier, datamodule=data, verbose=False)
            (test,) = trainer.test(classifier, datamodule=data, verbose=False)
        loader: Any = data.train_dataloader()
        if difference := other_images(checkpoint, data, loader):
            show_note(f"{difference}: if they are the same images, it may have been trained on some that validate now")
        note_shipped(Path(cfg.evaluate), about)
        figures = {**_own_figures({**val, **test}, about), "quantized": is_final(classifier)}
        evaluation = Evaluation(checkpoint=cfg.evaluate, epoch=checkpoint["epoch"], **figures, about=about)
        if trainer.is_global_zero:
            write_json(evaluation, Path(cfg.run_dir) / EVALUATION)
            show_outcome(evaluation)
    return evaluation


class LostProcessError(OSError):
    """One of several processes ended, or hung for longer than the timeout of the others."""


@contextmanager
def interruptions_named(trainer: Trainer) -> Iterator[None]:
    """Report that the run was stopped or another process was lost, and how to continue."""
    handler = signal.getsignal(signal.SIGINT)
    try:
        yield
    except SIGTERMException as error:
        raise SIGTERMException(f"stopped by SIGTERM; {where_to_go_on(trainer)}") from error
    except SystemExit as error:
        if not isinstance(error.__context__, KeyboardInterrupt):
            raise
        # Lightning ends the program without a message, and makes it ignore Ctrl-C from then on.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, handler)
        raise KeyboardInterrupt(f"stopped by Ctrl-C; {where_to_go_on(trainer)}") from None
    except RuntimeError as error:
        words = str(error)
        if trainer.world_size == 1 or not any(sign in words.lower() for sign in LOST):
            for guard in (each for each in trainer.callbacks if isinstance(each, FiniteGuard)):  # pyright: ignore
                if (bad := guard.unfinished(trainer)) is not None:
                    raise FloatingPointError(bad) from error
            raise
        launcher = trainer.strategy.launcher
        if launcher is not None:  # otherwise the processes started here would keep running
            launcher.kill(signal.SIGKILL)
            # Lightning looks after them, and would kill this process, too, before its message is shown.
            getattr(launcher, "procs", []).clear()
        reason = words.splitlines()[0].rpartition("] ")[2].partition(". ")[0]  # without the place in gloo's source
        raise LostProcessError(
            f"process {trainer.global_rank} of {trainer.world_size}: another one was lost, or did not answer within "
            f"trainer.timeout_s ({reason}); {where_to_go_on(trainer)}"
        ) from error
