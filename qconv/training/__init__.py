"""Training with Lightning: what `train.py` is made of, and usable without it."""

from .checkpoint_io import AtomicCheckpointIO as AtomicCheckpointIO
from .checkpoint_io import CheckpointError as CheckpointError
from .checkpoint_io import load_checkpoint as load_checkpoint
from .checkpoints import Checkpoints as Checkpoints
from .classifier import Classifier as Classifier
from .curves import draw_curves as draw_curves
from .diagnostics import Diagnostics as Diagnostics
from .finite_guard import FiniteGuard as FiniteGuard
from .history import History as History
from .memory import keep_freed_memory as keep_freed_memory
from .progress import Progress as Progress
from .random_state import RandomState as RandomState
from .trainer import make_trainer as make_trainer
from .weight_averaging import MovingAverage as MovingAverage
