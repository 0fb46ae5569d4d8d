"""From a composed config to its parts: data, network, loss, trainer and callbacks."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from pytorch_lightning import Callback, LightningDataModule, Trainer, seed_everything
from pytorch_lightning.callbacks import BatchSizeFinder, LearningRateFinder
from torch import nn

from ..convert import convert
from ..ground.short_names import short_call
from ..lean import takes_channels_last
from ..scheme import Scheme
from ..summary import summarize
from ..summary.saved import sample_of
from .classifier import Classifier
from .compilation import chosen_mode
from .initial_weights import checkpoint_of_run, draw_weights, load_weights
from .loggers import started_loggers
from .report.result import about_run
from .report.screen import default_of, show_model, show_note
from .teacher import check_teacher
from .trained_on import (
    arguments_as_trained,
    names_of,
    normalize_as_trained,
    prepare_as_trained,
    split_otherwise,
)

C = TypeVar("C", bound=Callback)
TEACHER = "loss.weights"
FINDERS: dict[type, str] = {
    LearningRateFinder: "try several rates, such as -m optimizer.lr=0.003,0.01,0.03",
    BatchSizeFinder: "give data.batch_size=N",
}
"""Callbacks of Lightning that are refused, and what to do instead."""


def made(node: Any, **more: Any) -> Any:
    """Instantiate a config node, with plain lists: Hydra's own lists turn dataclasses back into nodes.

    A word or a number is returned: what takes it knows whether it is valid.
    """
    return instantiate(node, _convert_="all", **more) if OmegaConf.is_config(node) else node


def build(
    cfg: DictConfig, checkpoint: Mapping[str, Any] | None = None
) -> tuple[LightningDataModule, Classifier, dict[str, Any]]:
    """Return data, network with optimizer and schedule, and a description of them.

    Images are prepared as in the training of the checkpoint to continue or evaluate.

    Raises:
        CheckpointError: as `prepare_as_trained`.
    """
    if not 0 <= cfg.seed < 2**32:
        raise ValueError(f"seed (={cfg.seed}) must be a whole number from 0 to {2**32 - 1}")
    seed_everything(cfg.seed, verbose=False)
    config: Any = OmegaConf.to_container(cfg, resolve=True)
    data = made_data(cfg, checkpoint, f"run {cfg.resume}" if cfg.evaluate is None else f"checkpoint {cfg.evaluate}")
    if names_of(data) is not None:
        note_splits(cfg, data)
    model, scheme = quantized_model(cfg, data)
    if cfg.init_from is not None and cfg.resume is None and cfg.evaluate is None:
        told = load_weights(model, str(cfg.init_from))
        if told:
            show_note(f"init_from={cfg.init_from}: {told}")
    size = data.in_channels, *data.image_size
    table = summarize(model, size)
    about = about_run(config, scheme.name, table)
    names = (short_call(config[group], default_of) for group in ("model", "data"))
    show_model(table, "{}, {scheme}, on {}".format(*names, scheme=about["scheme"]))
    tree = getattr(data, "tree", None)
    images = None if tree is None else len(tree.splits["train"]) * cfg.trainer.max_epochs
    compiled, told = chosen_mode(cfg.compile, model, images)
    if told:
        show_note(told)
    classifier = Classifier(
        model,
        made(cfg.optimizer),
        made(cfg.scheduler),
        config,
        # Evaluation needs no teacher.
        build_loss(cfg.loss, data) if cfg.evaluate is None else None,
        channels_last=cfg.channels_last,
        shift_decay=cfg.shift_decay,
        compile=compiled,
        step_rules=[] if cfg.evaluate is not None else made(cfg.step_rules),
        dampening=cfg.dampening,
        sine_penalty=cfg.sine_penalty,
        takes_channels_last=takes_channels_last(model, sample_of(model, (2, *size), random=True)),
    )
    return data, classifier, about


def made_data(cfg: DictConfig, checkpoint: Mapping[str, Any] | None, called: str) -> Any:
    """Return the data module, which prepares images as in the training of the checkpoint."""
    others = (each for _, each in networks_before(cfg))
    data = made(cfg.data, **arguments_as_trained(cfg.data, checkpoint, others))
    prepare_as_trained(data, checkpoint, called)
    for word, each in networks_before(cfg):
        if word.startswith(TEACHER):  # it sees the same images as the student
            normalize_as_trained(data, each)
    return data


def networks_before(cfg: DictConfig) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the checkpoints of networks that a new run starts or learns from, and the words that name them."""
    for key, path in (("init_from", cfg.init_from), (TEACHER, cfg.loss.get("weights"))):
        if path is not None and cfg.resume is None and cfg.evaluate is None:
            yield f"{key}={path}", checkpoint_of_run(str(path))


def note_splits(cfg: DictConfig, data: Any) -> None:
    """Say if a network that the run starts or learns from may have been trained on images for validation or test."""
    for word, checkpoint in networks_before(cfg):
        if difference := split_otherwise(checkpoint, cfg.data, data):
            show_note(
                f"{word}: its run divided this folder differently ({difference}), so it may have been trained on "
                "images that validate or are tested now"
            )


def float_model(cfg: DictConfig, in_channels: int, num_classes: int) -> nn.Module:
    """Return the network for images of these channels and these classes, before it is quantized."""
    try:
        model = made(cfg.model, in_channels=in_channels, num_classes=num_classes)
    except InstantiationException as error:
        target = cfg.model.get("_target_", "")
        if not isinstance(error.__cause__, TypeError) or str(target).startswith("qconv."):
            raise
        keys = ", ".join(["in_channels", "num_classes", *(str(key) for key in cfg.model if key != "_target_")])
        raise ValueError(
            f"model._target_ (={target}) is called with {keys}: {error.__cause__}. It must take the first two: "
            "model=torchvision_model and model=timm_model make any network there by model.name=, or write a function"
        ) from error
    return draw_weights(model, cfg.weight_init)


def quantized_model(cfg: DictConfig, data: Any) -> tuple[nn.Module, Scheme]:
    """Return the quantized network and its scheme."""
    model = float_model(cfg, data.in_channels, data.num_classes)
    scheme = made(cfg.scheme)
    grad = made(cfg.grad_quantizer) or None
    if grad is not None:
        scheme = scheme.with_grad(grad)
    convert(
        model,
        scheme,
        skip=tuple(cfg.skip),
        overrides=made(cfg.overrides),
        first_last=made(cfg.first_last),
        grad_quantizer=grad,
        before_sign=cfg.before_sign,
    )
    return model, scheme


def build_loss(node: DictConfig, data: Any) -> Any:
    """Return the loss; its teacher, if it has one, is a network for these images and classes."""
    if "teacher" not in node:
        return made(node)
    teacher = made(node.teacher, in_channels=data.in_channels, num_classes=data.num_classes)
    loss = made(node, teacher=teacher)
    check_teacher(node, teacher, data)
    return loss


@contextmanager
def started(cfg: DictConfig) -> Iterator[tuple[Trainer, list[Callback]]]:
    """Context manager: the trainer of a run, and its callbacks. An evaluation is not logged: it is no run."""
    for word, instead in (("callbacks", "callbacks.NAME._target_"), ("logger", "logger")):
        if word in cfg.trainer:
            raise ValueError(f"trainer.{word} must not be given: {instead}= adds to those of the run")
    callbacks = [made(node) for node in cfg.callbacks.values() if node is not None]
    for callback in callbacks:
        if isinstance(callback, tuple(FINDERS)):
            kind = type(callback)
            raise ValueError(f"callbacks: {kind.__name__} changes what a run is told to do: {FINDERS[kind]}")
        if not isinstance(callback, Callback):
            raise TypeError(f"callbacks: {callback!r} must be a callback of Lightning: callbacks.NAME._target_=CLASS")
    with started_loggers(cfg) if cfg.evaluate is None else nullcontext([]) as loggers:
        yield made(cfg.trainer)(callbacks=callbacks, logger=loggers), callbacks


def find(callbacks: list[Callback], kind: type[C]) -> C:
    """Return the only callback of this class."""
    matching = [callback for callback in callbacks if isinstance(callback, kind)]
    if len(matching) != 1:
        raise ValueError(f"callbacks must hold one {kind.__module__}.{kind.__name__}, not {len(matching)}")
    return matching[0]
