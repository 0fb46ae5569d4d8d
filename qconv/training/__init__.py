"""Training with Lightning: the parts of `qconv train`, usable without it."""

from ..runs.curves import draw_curves as draw_curves
from .callbacks.checkpoints import Checkpoints as Checkpoints
from .callbacks.diagnostics import Diagnostics as Diagnostics
from .callbacks.ewgs_delta import EWGSDelta as EWGSDelta
from .callbacks.finite_guard import FiniteGuard as FiniteGuard
from .callbacks.history import History as History
from .callbacks.progress import Progress as Progress
from .callbacks.random_state import RandomState as RandomState
from .callbacks.weight_averaging import MovingAverage as MovingAverage
from .checkpoint_io import (
    AtomicCheckpointIO as AtomicCheckpointIO,
    CheckpointError as CheckpointError,
    load_checkpoint as load_checkpoint,
)
from .classifier import Classifier as Classifier
from .trainer import keep_freed_memory as keep_freed_memory, make_trainer as make_trainer
