"""The Lightning Trainer with the settings of this project."""

import ctypes
import logging
import platform
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning_fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning_fabric.plugins.environments.slurm import SLURMEnvironment
from lightning_fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.callbacks import Checkpoint, ProgressBar as AnyBar, RichProgressBar
from pytorch_lightning.callbacks.progress.rich_progress import ProcessingSpeedColumn
from pytorch_lightning.strategies import ParallelStrategy
from pytorch_lightning.utilities import rank_zero_only
from rich.progress import BarColumn

from ..ground.checks import check_not_negative, check_numbers
from .checkpoint_io import AtomicCheckpointIO

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4  # from glibc's malloc.h
LONGEST_S = 31 * 24 * 3600
BFLOAT16 = ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16")
"""The names in `torch.cpu.get_capabilities` for instructions that multiply bfloat16: two of x86, two of ARM."""


class ProgressBar(RichProgressBar):
    """Lightning's bar with short names and percentages for the accuracies, so that 80 columns hold it in one line."""

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        """Return the accuracies of training and validation."""
        metrics = super().get_metrics(trainer, pl_module)
        found = {name: metrics.get(f"{name}_accuracy") for name in ("train", "val", "test")}
        return {name: f"{100 * value:.1f}%" for name, value in found.items() if isinstance(value, int | float)}

    def configure_columns(self, trainer: Trainer) -> list[Any]:
        """Return Lightning's columns, with a shorter bar and without the speed."""
        columns = [each for each in super().configure_columns(trainer) if not isinstance(each, ProcessingSpeedColumn)]
        for column in columns:
            if isinstance(column, BarColumn):
                column.bar_width = 14
        return columns


def computes_bfloat16(accelerator: str) -> bool:
    """Whether CUDA's GPU or this machine's processor has instructions that multiply bfloat16 numbers; else False.

    A processor without them converts every operand: a training step of the float ResNet-20 took about twice as long as
    in float32.
    """
    if accelerator in ("gpu", "cuda"):
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return accelerator == "cpu" and any(torch.cpu.get_capabilities().get(name) for name in BFLOAT16)


def make_trainer(
    *,
    accelerator: str = "auto",
    precision: str = "auto",
    devices: int | str = 1,
    callbacks: Sequence[Callback] = (),
    timeout_s: float | None = None,
    **options: Any,
) -> Trainer:
    """A Trainer that takes the GPU in bf16 if there is one, else the CPU in fp32, and writes checkpoints atomically.

    A progress bar is shown only on terminals; a bar in ``callbacks`` replaces it and is always shown. On the
    CPU, glibc is told to keep freed memory (`keep_freed_memory`).
    Under SLURM, Lightning neither restarts the job at SIGUSR1 nor resumes from files that SIGUSR1 left in the folder.

    Args:
        accelerator: "auto", or any known to Lightning.
        precision: "auto" means bf16-mixed on GPUs that support it and 32-true elsewhere; "bf16-if-native" means
            bf16-mixed on any GPU of CUDA and any processor that has instructions for it, and 32-true elsewhere; or any
            known to Lightning.
        devices: number of devices, or a list of them.
        callbacks: the Trainer's callbacks.
        timeout_s: of several processes, seconds that one waits for the others before the run fails; None is torch's
            default.
        options: the Trainer's other arguments.

    Raises:
        ValueError: `timeout_s` is out of its range, or the strategy has no such time; a negative `gradient_clip_val`,
            which Lightning would take for none.
    """
    if accelerator == "auto":
        accelerator = "gpu" if torch.cuda.is_available() else "cpu"
    on_gpu = accelerator in ("gpu", "cuda")
    if precision == "auto":
        precision = "bf16-mixed" if on_gpu and torch.cuda.is_bf16_supported() else "32-true"
    if precision == "bf16-if-native":
        precision = "bf16-mixed" if computes_bfloat16(accelerator) else "32-true"
    if accelerator == "cpu":
        keep_freed_memory()
        asked = precision
        if str(precision) in ("16", "16-mixed"):
            precision = "bf16-mixed"  # as Lightning would, of whose warnings a run shows few
            warn("trainer.precision=16-mixed: using bf16-mixed, because mixed precision on a CPU is bfloat16")
        if precision in ("bf16", "bf16-mixed", "bf16-true") and not computes_bfloat16(accelerator):
            warn(
                f"trainer.precision={asked}: this processor has no instructions for bfloat16, so steps take longer "
                "than with trainer.precision=32-true; bf16-if-native uses bf16-mixed only where it is faster"
            )
    check_numbers(timeout_s=timeout_s)
    check_not_negative(gradient_clip_val=options.get("gradient_clip_val") or 0)
    if timeout_s is not None and not 0 < timeout_s <= LONGEST_S:
        raise ValueError(f"timeout_s (={timeout_s}) must be positive and at most {LONGEST_S}, a month")
    shows = sys.stdout.isatty() and options.get("enable_progress_bar", True)
    bar = [ProgressBar(leave=False)] if shows and not any(isinstance(each, AnyBar) for each in callbacks) else []
    defaults: dict[str, Any] = {
        "enable_progress_bar": any(isinstance(each, AnyBar) for each in (*callbacks, *bar)),
        # Lightning would add its own checkpoint callback, which writes below the current folder.
        "enable_checkpointing": any(isinstance(callback, Checkpoint) for callback in callbacks),
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "log_every_n_steps": 1,
        "logger": False,
        "plugins": [AtomicCheckpointIO()],
        "use_distributed_sampler": False,  # the data modules share the images out themselves
    }
    if SLURMEnvironment.detect():
        # Lightning would take the weights of an hpc_ckpt_*.ckpt in the current folder, whatever run has left it there.
        defaults["default_root_dir"] = Path.cwd() / "lightning"
        given = getattr(options.get("strategy"), "cluster_environment", None)
        if given is None and not TorchElasticEnvironment.detect():
            # It would write such files at SIGUSR1, and start the job again; a run goes on from its last.ckpt.
            plugins = options.get("plugins") or defaults["plugins"]
            plugins = [*plugins] if isinstance(plugins, list | tuple) else [plugins]
            if not any(isinstance(plugin, ClusterEnvironment) for plugin in plugins):
                options["plugins"] = [*plugins, SLURMEnvironment(auto_requeue=False)]
    trainer = Trainer(
        accelerator=accelerator,
        precision=precision,  # pyright: ignore[reportArgumentType]
        devices=devices,
        callbacks=[*callbacks, *bar],
        **{**defaults, **options},
    )
    strategy = trainer.strategy  # which Lightning may have chosen
    if timeout_s is not None and isinstance(strategy, ParallelStrategy):
        if not hasattr(strategy, "_timeout"):
            raise ValueError(f"trainer.timeout_s (={timeout_s}) must be null: {type(strategy).__name__} has no timeout")
        strategy._timeout = timedelta(seconds=timeout_s)  # pyright: ignore[reportAttributeAccessIssue]
    return trainer


def keep_freed_memory() -> bool:
    """Tell glibc's malloc to keep freed blocks; do nothing elsewhere. Return whether it was told.

    By default glibc returns large blocks to the system when they are freed, and each training step then pays for fresh,
    zeroed pages: a ResNet-18 step took up to 1.5 times as long. In return the process never shrinks.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    settings = ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, 2**31 - 1), (M_TOP_PAD, 256 * 2**20))
    told = [mallopt(parameter, value) == 1 for parameter, value in settings]
    return all(told)


@rank_zero_only
def warn(words: str) -> None:
    """Warn, in the first process alone."""
    logging.getLogger("qconv").warning(words)
