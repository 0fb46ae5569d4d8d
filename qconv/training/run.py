"""A whole run from its composed config: what `train.py` calls."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from pytorch_lightning import Callback, LightningDataModule, Trainer, seed_everything
from pytorch_lightning.utilities import rank_zero_only
from pytorch_lightning.utilities.exceptions import SIGTERMException
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.swa_utils import update_bn

from ..convert import convert
from ..convert.activations import replaced
from ..lifecycle.steps import is_final
from ..scheme import Scheme
from ..summary import summarize
from .callbacks.checkpoints import Checkpoints, where_to_go_on
from .callbacks.history import History
from .checkpoint_io import CheckpointError, load_checkpoint
from .classifier import Classifier
from .initial_weights import load_weights
from .report.result import Evaluation, Result, about_run, check_objective, write_json
from .report.screen import show_model, show_outcome
from .resume import call, check_config, check_tensors, fill_tensors
from .run_folder import EVALUATION, NETWORK, RESULT, RUN, average_of, check_free, claimed, find_last, is_first_process
from .shipping import ship

# What gloo and NCCL say.
LOST = ("timed out", "timeout", "connection closed", "connection reset", "broken pipe", "remote process exited")
C = TypeVar("C", bound=Callback)


def train(cfg: DictConfig) -> Result:
    """Train as `cfg` says, resume if it has a `ckpt_path`, and test the checkpoint of the best validation accuracy.

    Raises:
        RunFolderError: the run's folder holds another run, or another process is writing there.
    """
    go_on = cfg.ckpt_path == "last"
    if go_on:
        cfg.ckpt_path = find_last(cfg)
    if cfg.trainer.max_epochs < 1:
        raise ValueError(f"trainer.max_epochs (={cfg.trainer.max_epochs}) must be at least 1")
    if is_first_process():
        check_free(cfg, go_on=go_on)  # and again behind the lock: to build the run can take minutes
    data, classifier, about = build(cfg)
    check_objective(cfg.objective, about)
    if cfg.ckpt_path is not None:
        check_average(cfg.ckpt_path, read_checkpoint(cfg.ckpt_path, classifier, RUN), classifier.config or {})
    with claimed(cfg, go_on=go_on):
        return fit_and_test(cfg, data, classifier, about)


def fit_and_test(cfg: DictConfig, data: LightningDataModule, classifier: Classifier, about: dict[str, Any]) -> Result:
    """The run itself, in its folder."""
    trainer, callbacks = start_run(cfg)
    check_validation(trainer)
    checkpoints, history = find(callbacks, Checkpoints), find(callbacks, History)
    with interruptions_named(trainer):
        trainer.fit(classifier, datamodule=data, ckpt_path=cfg.ckpt_path, weights_only=True)
    if not checkpoints.best.is_file():
        raise ValueError(
            f"trainer: no epoch was validated, so there is no best checkpoint to test; {where_to_go_on(trainer)}"
        )
    best = load_checkpoint(checkpoints.best)
    classifier.load_state_dict(best["state_dict"])
    with interruptions_named(trainer):
        if cfg.reestimate_bn:
            reestimate_batch_norm(classifier, data, trainer)
        (test,) = trainer.test(classifier, datamodule=data, verbose=False)
    if trainer.is_global_zero:
        ship(cfg, classifier.model, data, about)
    result = Result(
        **test,
        tested="best",
        val_accuracy_best=history.rows[best["epoch"]]["val_accuracy"],
        val_accuracy_final=[row["val_accuracy"] for row in history.rows if "val_accuracy" in row][-1],
        best_epoch=best["epoch"],
        epochs=len(history.rows),
        seconds=history.seconds,
        quantized=is_final(classifier),
        about=about,
    )
    end_run(cfg, trainer, result, RESULT)
    return result


def check_validation(trainer: Trainer) -> None:
    """Raise a ValueError if no epoch will be validated: there would be no best checkpoint to test."""
    every, epochs = trainer.check_val_every_n_epoch, trainer.max_epochs
    if trainer.limit_val_batches == 0:
        reason = "limit_val_batches (=0)"
    elif every is not None and epochs is not None and every > epochs > 0:
        reason = f"check_val_every_n_epoch (={every}) of max_epochs (={epochs})"
    else:
        return
    raise ValueError(f"trainer: no epoch would be validated with {reason}, and the test is of the best one")


def check_average(path: str, checkpoint: dict[str, Any], config: dict[str, Any]) -> None:
    """Raise unless both or neither average the weights: the state dict in the file is the average."""
    found, asked = average_of(checkpoint["config"]), average_of(config)
    if found != asked:
        add = "callbacks=default" if found is None else f"callbacks=ema callbacks.ema.decay={found['decay']}"
        words = f"was trained with callbacks.ema {call(found)}, this run asks for {call(asked)}"
        raise CheckpointError(f"checkpoint {path} {words}: add {add}")


def evaluate(cfg: DictConfig) -> Evaluation:
    """Validate and test the checkpoint `cfg.evaluate`.

    Raises:
        RunFolderError: the folder for the figures holds those of another checkpoint, or of a run.
    """
    if is_first_process():
        check_free(cfg, go_on=False)
    data, classifier, about = build(cfg)
    checkpoint = read_checkpoint(cfg.evaluate, classifier, NETWORK)
    classifier.load_state_dict(checkpoint["state_dict"])
    with claimed(cfg):
        trainer, _ = start_run(cfg)
        with interruptions_named(trainer):
            (val,) = trainer.validate(classifier, datamodule=data, verbose=False)
            (test,) = trainer.test(classifier, datamodule=data, verbose=False)
        figures = {**val, **test, "quantized": is_final(classifier)}
        evaluation = Evaluation(checkpoint=cfg.evaluate, epoch=checkpoint["epoch"], **figures, about=about)
        end_run(cfg, trainer, evaluation, EVALUATION)
    return evaluation


class LostProcessError(OSError):
    """One of several processes ended, or hung for longer than the others wait."""


@contextmanager
def interruptions_named(trainer: Trainer) -> Iterator[None]:
    """Say what has happened if the run is stopped or another process is lost, and how to go on."""
    handler = signal.getsignal(signal.SIGINT)
    try:
        yield
    except SIGTERMException as error:
        raise SIGTERMException(f"stopped by SIGTERM; {where_to_go_on(trainer)}") from error
    except SystemExit as error:
        if not isinstance(error.__context__, KeyboardInterrupt):
            raise
        # Lightning ends the program without a word, and has it ignore Ctrl-C from there on.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, handler)
        raise KeyboardInterrupt(f"stopped by Ctrl-C; {where_to_go_on(trainer)}") from None
    except RuntimeError as error:
        words = str(error)
        if trainer.world_size == 1 or not any(sign in words.lower() for sign in LOST):
            raise
        launcher = trainer.strategy.launcher
        if launcher is not None:  # those that were started here would stay
            launcher.kill(signal.SIGKILL)
        reason = words.splitlines()[0].rpartition("] ")[2].partition(". ")[0]  # without the place in gloo's source
        raise LostProcessError(
            f"process {trainer.global_rank} of {trainer.world_size}: another one was lost, or did not answer within "
            f"trainer.timeout_s ({reason}); {where_to_go_on(trainer)}"
        ) from error


def reestimate_batch_norm(classifier: Classifier, data: LightningDataModule, trainer: Trainer) -> None:
    """Take the running statistics of batch norms anew, as the mean over one epoch of training pictures."""

    def images() -> Iterator[Tensor]:
        for batch in data.train_dataloader():  # through the hooks that Lightning would call
            batch = data.on_before_batch_transfer(batch, 0)
            batch = data.transfer_batch_to_device(batch, classifier.device, 0)
            yield data.on_after_batch_transfer(batch, 0)[0]

    update_bn(images(), classifier)
    for module in classifier.modules():
        if isinstance(module, _BatchNorm):
            for statistic in (module.running_mean, module.running_var):
                if statistic is not None:  # every process has seen its part
                    statistic.copy_(trainer.strategy.reduce(statistic, reduce_op="mean"))


def build(cfg: DictConfig) -> tuple[LightningDataModule, Classifier, dict[str, Any]]:
    """Data, network with optimizer and schedule, and what there is to say about them."""
    seed_everything(cfg.seed, verbose=False)
    config: Any = OmegaConf.to_container(cfg, resolve=True)
    if HydraConfig.initialized():
        config["choices"] = dict(HydraConfig.get().runtime.choices)  # for what is said of a checkpoint that doesn't fit
    data = instantiate(cfg.data)
    model, scheme = quantized_model(cfg, data)
    if cfg.init_from is not None and cfg.ckpt_path is None and cfg.evaluate is None:
        load_weights(model, cfg.init_from)
    table = summarize(model, (data.in_channels, *data.image_size))
    about = about_run(config, scheme.name, table)
    rank_zero_only(show_model)(table, f"{about['model']}, {about['scheme']}, on {about['data']}")
    classifier = Classifier(
        model,
        instantiate(cfg.optimizer),
        instantiate(cfg.scheduler),
        config,
        # A teacher is not needed to evaluate.
        build_loss(cfg.loss, data.in_channels, data.num_classes) if cfg.evaluate is None else None,
        channels_last=cfg.channels_last,
        shift_decay=cfg.shift_decay,
        compile=cfg.compile,
    )
    return data, classifier, about


def float_model(cfg: DictConfig, data: Any) -> nn.Module:
    """The network for these pictures and classes, before it is quantized."""
    return instantiate(cfg.model, in_channels=data.in_channels, num_classes=data.num_classes)


def quantized_model(cfg: DictConfig, data: Any) -> tuple[nn.Module, Scheme]:
    """The quantized network, and its scheme."""
    model = float_model(cfg, data)
    scheme = instantiate(cfg.scheme)
    overrides = None if cfg.overrides is None else {key: instantiate(node) for key, node in cfg.overrides.items()}
    first_last: Any = cfg.first_last if isinstance(cfg.first_last, str) else instantiate(cfg.first_last)
    grad = instantiate(cfg.grad_quantizer) or None
    if grad is not None:
        scheme = scheme.with_grad(grad)
    convert(
        model,
        scheme,
        skip=tuple(cfg.skip),
        overrides=overrides,
        first_last=first_last,
        grad_quantizer=grad,
        before_sign=cfg.get("before_sign", "keep"),  # absent in the configs of runs before there was a choice
    )
    return model, scheme


def build_loss(node: DictConfig, in_channels: int, num_classes: int) -> Any:
    """The loss; its teacher, if it has one, is a network for these pictures and classes."""
    if "teacher" not in node:
        return instantiate(node)
    teacher = instantiate(node.teacher, in_channels=in_channels, num_classes=num_classes)
    return instantiate(node, teacher=teacher)


def read_checkpoint(path: str, classifier: Classifier, groups: tuple[str, ...]) -> dict[str, Any]:
    """The checkpoint at `path`, if it is one of this network and its config agrees in `groups`."""
    checkpoint = load_checkpoint(path)
    stored = checkpoint.get("config")
    before = isinstance(stored, dict) and "before_sign" not in stored  # written before there was a choice
    if before and any(replaced(module) for module in classifier.modules()):
        raise CheckpointError(f"checkpoint {path} was trained with its ReLUs before signs: add before_sign=keep")
    check_config(path, checkpoint, classifier.config or {}, groups)
    fill_tensors(checkpoint["state_dict"], classifier.state_dict())
    check_tensors(path, checkpoint, classifier.state_dict())
    return checkpoint


def start_run(cfg: DictConfig) -> tuple[Trainer, list[Callback]]:
    """The trainer with its callbacks."""
    callbacks = [instantiate(node) for node in cfg.callbacks.values()]
    loggers = [instantiate(node) for node in cfg.logger.values()]
    return instantiate(cfg.trainer)(callbacks=callbacks, logger=loggers), callbacks


def end_run(cfg: DictConfig, trainer: Trainer, outcome: Result | Evaluation, name: str) -> None:
    """Write the figures and show them, once among all processes."""
    if trainer.is_global_zero:
        write_json(outcome, Path(cfg.run_dir) / name)
        show_outcome(outcome)


def find(callbacks: list[Callback], kind: type[C]) -> C:
    """The one callback of this class."""
    found = [callback for callback in callbacks if isinstance(callback, kind)]
    if len(found) != 1:
        raise ValueError(f"callbacks must hold one {kind.__module__}.{kind.__name__}, not {len(found)}")
    return found[0]
