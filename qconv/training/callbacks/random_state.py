"""The callback that makes a resumed run draw the same random numbers as an uninterrupted one."""

from typing import Any

import torch
import torch.distributed as dist
from pytorch_lightning import Callback, LightningModule, Trainer

from ...ground.processes import process_count, rank_and_count


class RandomState(Callback):
    """Stores torch's random state, of the CPU and of the run's GPU, in the checkpoint and restores it on resuming.

    Each process resumes with its own state. If the number of processes has changed, all resume with the state of
    the first process. Python's and NumPy's generators are left alone: nothing in qconv draws from them in training.
    """

    def __init__(self) -> None:
        self.resumed: dict[str, Any] | None = None
        self.device = torch.device("cpu")

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Note the device of this process."""
        self.device = trainer.strategy.root_device

    def state_dict(self) -> dict[str, Any]:
        """Return the present state; with several processes the states of all, and all must call it."""
        own = {
            "cpu": torch.get_rng_state(),
            "cuda": [torch.cuda.get_rng_state(self.device)] if self.device.type == "cuda" else [],
        }
        if (count := process_count()) == 1:
            return own
        states: list[Any] = [None] * count
        dist.all_gather_object(states, own)
        return {**states[0], "processes": states}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the state until training starts: Lightning may draw numbers before."""
        self.resumed = state_dict

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Set the state, once."""
        self._resume()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Restore the state if training resumes within an epoch."""
        self._resume()

    def _resume(self) -> None:
        if self.resumed is None:
            return
        rank, count = rank_and_count()
        states = self.resumed.get("processes", [self.resumed])
        own = states[rank if len(states) == count else 0]
        torch.set_rng_state(own["cpu"])
        if own["cuda"] and self.device.type == "cuda":
            torch.cuda.set_rng_state(own["cuda"][0], self.device)
        self.resumed = None
